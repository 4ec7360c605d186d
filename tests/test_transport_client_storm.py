"""Everything at once, by chance: requests of all sizes, left early, aborted, timed out, engines killed, the client closed in mid-course.

Nobody may hang, closing returns, and nothing is on its way afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
from support.clients import LIMIT
from support.raw_engine import raw_engine
from support.requests import request as mm_request

from fastmm import EngineCoreRequest, SamplingParams, TransportError
from fastmm.errors import SchemaValueError
from fastmm.transport import AsyncEngineClient, EngineClient

pytestmark = [pytest.mark.slow, pytest.mark.no_asan]
EXPECTED = (TransportError, SchemaValueError)  # dead, closed, no room, no answer; an id that is live


def made(chance: random.Random, name: str) -> EngineCoreRequest:
    kind = chance.choice(["count", "count", "count", "hang", "other", "gone"])
    request_id = f"{kind}-{name if chance.random() < 0.9 else 'same'}"
    sampling = SamplingParams(max_tokens=chance.choice([1, 3, 20]))
    if chance.random() < 0.6:
        return EngineCoreRequest(request_id, [1] * chance.randint(1, 100), sampling_params=sampling)
    nelem = chance.choice([100, 1 << 18, 1 << 20])
    return mm_request(np.ones(nelem, np.float32), request_id=request_id, sampling_params=sampling)


def options(chance: random.Random) -> dict[str, Any]:
    room = chance.choice([1 << 20, 1 << 30])
    return {"engines": 2, "startup_timeout": LIMIT, "max_inflight_nbytes": room, "silence_timeout": chance.choice([None, 2.0])}


@pytest.mark.parametrize("seed", range(3))
def test_threads(seed):
    chance = random.Random(seed)
    client = EngineClient(**options(chance))
    stop = threading.Event()
    failed: list[BaseException] = []

    def work(index: int) -> None:
        mine = random.Random(seed * 1000 + index)
        try:
            for n in range(1_000_000):
                if stop.is_set():
                    return
                with contextlib.suppress(*EXPECTED):
                    act = mine.random()
                    if act < 0.05:
                        client.call_utility("echo", 1, timeout=1)
                    elif act < 0.1:
                        client.abort([f"hang-{index}-{n - 1}"])
                    else:
                        outputs = client.generate(made(mine, f"{index}-{n}"), timeout=2)
                        with contextlib.suppress(StopIteration):
                            for _ in range(mine.choice([0, 1, 2, 1000])):
                                outputs.next(timeout=0.3)
        except BaseException as error:
            failed.append(error)

    address = client.bind()
    with raw_engine(address, 0) as first, raw_engine(address, 1) as second:
        client.start()
        threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(12)]
        for thread in threads:
            thread.start()
        stop.wait(chance.uniform(0.2, 0.8))
        chance.choice([first, second]).kill()
        stop.wait(chance.uniform(0.1, 0.5))
        begun = time.monotonic()
        client.close()
        assert time.monotonic() - begun < LIMIT / 2
        stop.set()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        assert failed == []
        assert client.ledger.wait(LIMIT), client.ledger.counters


@pytest.mark.parametrize("seed", range(3))
def test_tasks(seed):
    asyncio.run(asyncio.wait_for(storm_of_tasks(seed), 4 * LIMIT))


async def storm_of_tasks(seed: int) -> None:
    chance = random.Random(seed)
    client = AsyncEngineClient(**options(chance))
    stop = asyncio.Event()

    async def take(outputs: Any, n: int) -> None:
        async for _output in outputs:
            n -= 1
            if n <= 0:
                return

    async def work(index: int) -> None:
        mine = random.Random(seed * 1000 + index)
        for n in range(1_000_000):
            if stop.is_set():
                return
            with contextlib.suppress(*EXPECTED, asyncio.TimeoutError, TimeoutError):
                act = mine.random()
                if act < 0.05:
                    await client.call_utility("echo", 1, timeout=1)
                elif act < 0.1:
                    await client.abort([f"hang-{index}-{n - 1}"])
                else:
                    outputs = client.generate(made(mine, f"{index}-{n}"), timeout=2)
                    await asyncio.wait_for(take(outputs, mine.choice([0, 1, 2, 1000])), mine.choice([0.01, 0.3]))
            await asyncio.sleep(0)

    address = client.bind()
    with raw_engine(address, 0) as first, raw_engine(address, 1) as second:
        await client.start()
        tasks = [asyncio.create_task(work(index)) for index in range(24)]
        await asyncio.sleep(chance.uniform(0.2, 0.8))
        chance.choice([first, second]).kill()
        await asyncio.sleep(chance.uniform(0.1, 0.5))
        for task in tasks[:8]:
            task.cancel()
        begun = time.monotonic()
        await client.close()
        assert time.monotonic() - begun < LIMIT / 2
        stop.set()
        _, hung = await asyncio.wait(tasks, timeout=LIMIT)
        assert not hung
        for task in tasks:
            assert task.cancelled() or task.exception() is None
        assert await client.ledger.await_done(LIMIT), client.ledger.counters

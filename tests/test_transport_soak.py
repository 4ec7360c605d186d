"""A client and an engine for a long time: every answer right, memory flat, nothing on its way in the end.

10^5 requests take some ten seconds on two cores; SOAK=1000000 in the environment makes it that many.
"""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import pytest
from support.memory import resident_nbytes
from support.toy_engine import assert_answered, checksum, make_request, toy_engine

from fastmm.transport import AsyncEngineClient, EngineClient

pytestmark = pytest.mark.no_asan  # its allocator keeps what is freed

# Bytes of an image, one for each request in turn: text, inline, in frames that ZMQ copies, in frames that it does not.
SIZES = (0, 0, 200, 0, 5_000, 40_000, 0, 70_000, 0, 300_000, 0, 200, 0, 5_000, 0, 1_500_000)
AT_ONCE = 32
WARM = 1_000


class Load:
    """Requests made once and sent again under other ids: what is measured is the transport, not the making of arrays."""

    def __init__(self) -> None:
        self.requests = [make_request("", number, nbytes=nbytes) for number, nbytes in enumerate(SIZES)]
        self.checksums = [checksum(request) for request in self.requests]

    def request(self, number: int) -> tuple[Any, int]:
        request = self.requests[number % len(SIZES)]
        copy = type(request)(
            f"r{number}", request.prompt_token_ids, request.mm_features, request.sampling_params, arrival_time=1.0
        )
        return copy, self.checksums[number % len(SIZES)]


def engine_nbytes(process: Any) -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def judge(count: int, ours: tuple[int, int], engines: tuple[int, int], descriptors: tuple[int, int]) -> None:
    """Memory is flat in either process: what allocators keep of a later peak does not grow with the count."""
    for whose, (before, after) in (("the client", ours), ("the engine", engines)):
        grown = after - before
        print(f"{count} requests: {whose} had {before >> 20} MB and has {after >> 20}")
        assert grown < 8 << 20, f"{whose} has grown by {grown >> 20} MB, {grown / count:.0f} bytes a request"
    assert descriptors[1] <= descriptors[0] + 2


async def soak(count: int) -> None:
    load = Load()
    client = AsyncEngineClient(startup_timeout=60, max_inflight_nbytes=64 << 20, dtype=None)
    numbers = iter(range(count))
    done = 0

    async def worker() -> None:
        nonlocal done
        for number in numbers:
            request, expected = load.request(number)
            if number % 101 == 100:  # given up in the middle
                stream = client.generate(request)
                await anext(stream)
                await stream.aclose()
            else:
                assert_answered(request.request_id, expected, [output async for output in client.generate(request)])
            done += 1

    def state() -> tuple[int, int, int]:
        gc.collect()
        return resident_nbytes(), engine_nbytes(process), len(os.listdir("/proc/self/fd"))

    with toy_engine(client.bind()) as process:
        async with client:
            tasks = [asyncio.create_task(worker()) for _ in range(AT_ONCE)]
            while done < min(WARM, count // 2):
                await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_EXCEPTION)
                assert not any(task.done() and task.exception() for task in tasks)
            before = state()
            await asyncio.gather(*tasks)
            assert done == count
            assert await asyncio.to_thread(client.ledger.wait, 60)
            assert client.counters["live"] == 0
            assert client.counters["broken"] == 0
            after = state()
            seen = await client.call_utility("seen", timeout=60)
            assert seen["added"] == count
            assert (seen["failed"], seen["dropped"], seen["running"]) == (0, 0, 0)
            counters = client.ledger.counters
            assert (counters["inflight"], counters["inflight_nbytes"]) == (0, 0)
            assert counters["peak_nbytes"] <= 64 << 20
    judge(count, *zip(before, after))


def test_some_thousand_requests_of_all_sizes() -> None:
    asyncio.run(asyncio.wait_for(soak(4_000), 300))


def test_whoever_sends_more_than_there_is_room_for_waits_and_nothing_stays_behind() -> None:
    load = Load()
    client = EngineClient(startup_timeout=60, max_inflight_nbytes=2 << 20, dtype=None)
    with toy_engine(client.bind()), client:
        for first in range(0, 1_024, 16):
            asked = []
            for number in range(first, first + 16):
                request, expected = load.request(number)
                asked.append((request.request_id, expected, client.generate(request, timeout=60)))
            for request_id, expected, outputs in asked:
                assert_answered(request_id, expected, list(outputs))
        assert client.ledger.wait(60)
        assert client.ledger.counters["peak_nbytes"] <= 2 << 20


@pytest.mark.slow
def test_a_hundred_thousand_requests_of_all_sizes() -> None:
    asyncio.run(asyncio.wait_for(soak(int(os.environ.get("SOAK", "100000"))), 3600))

"""The client for asyncio: who waits behind whom, other event loops, and what callbacks raise."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.async_clients import aborted, driven, large, tokens, within_limit
from support.clients import LIMIT, text
from support.raw_engine import raw_engine

from fastmm import Overloaded, TransportError, TransportTimeout
from fastmm.transport import AsyncEngineClient


@contextlib.contextmanager
def stopped(process: Any) -> Iterator[None]:
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


@within_limit
async def test_who_must_not_wait_does_not_wait_behind_others_that_do():
    async with driven(max_inflight_nbytes=1 << 20) as (client, processes):
        with stopped(processes[0]):
            fill = [asyncio.ensure_future(client.add_request(large(f"count-{i}", 16 << 20))) for i in range(2)]
            early = asyncio.ensure_future(client.add_request(large("count-early"), wait=False))
            with pytest.raises(Overloaded):  # it came before the second began to wait
                await asyncio.wait_for(early, LIMIT)
            for request in (large("count-2"), text("count-3")):
                with pytest.raises(Overloaded):
                    await asyncio.wait_for(client.add_request(request, wait=False), LIMIT)
                with pytest.raises(TransportTimeout, match="within 0.2 s"):
                    await asyncio.wait_for(client.add_request(request, timeout=0.2), LIMIT)
            with pytest.raises(TransportTimeout):
                await asyncio.wait_for(client.call_utility("pid", timeout=0.2), LIMIT)
            assert client.counters["live"] == 2
        for outputs in await asyncio.wait_for(asyncio.gather(*fill), LIMIT):
            assert await tokens(outputs) == [0]
        assert await tokens(client.generate(text("count-3"), wait=False)) == [0, 1, 2]


@within_limit
async def test_an_engine_that_nothing_was_sent_to_yet_is_not_silent():
    async with driven(2, max_inflight_nbytes=1 << 20, silence_timeout=0.5) as (client, _):
        ticket = client.ledger.reserve(1 << 20)  # what goes to another engine, and that one reads it slowly
        waiting = asyncio.ensure_future(client.add_request(large("count-1", data_parallel_rank=1)))
        behind = asyncio.ensure_future(client.add_request(text("count-2", data_parallel_rank=1)))
        await asyncio.wait([waiting, behind], timeout=1.5)
        assert client.alive == (0, 1)
        ticket.cancel()
        assert await tokens(await waiting) == [0]
        assert await tokens(await behind) == [0, 1, 2]


@pytest.mark.parametrize("first", ["ended", "runs"])
def test_a_client_is_closed_on_another_event_loop(first):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> tuple[Any, Any]:
        await client.start()
        return await client.add_request(text("hang-1")), await client.add_request(text("hang-2"))

    client = AsyncEngineClient(startup_timeout=LIMIT)
    with raw_engine(client.bind()):
        outputs, other = asyncio.run_coroutine_threadsafe(begin(), loop).result(LIMIT)
        if first == "ended":
            loop.call_soon_threadsafe(loop.stop)
            thread.join(LIMIT)
            loop.close()

        async def end() -> None:
            with pytest.raises(TransportError, match="another"):
                await outputs.__anext__()
            await outputs.aclose()
            await asyncio.wait_for(asyncio.gather(client.close(), client.close()), LIMIT)
            await client.close()

        asyncio.run(end())
        assert client.counters["live"] == 0
        assert other._live.ended
        assert client._connection is None
        if first == "runs":
            loop.call_soon_threadsafe(loop.stop)
            thread.join(LIMIT)
            loop.close()


def test_outputs_that_are_closed_on_another_event_loop_abort_their_request():
    async def close(outputs: Any) -> None:
        await outputs.aclose()

    async def main() -> None:
        async with driven() as (client, _):
            outputs = await client.add_request(text("hang-1"))
            await asyncio.to_thread(asyncio.run, close(outputs))
            assert await aborted(client) == ["hang-1"]

    asyncio.run(asyncio.wait_for(main(), 3 * LIMIT))


class Mine(Exception):
    pass


@pytest.mark.parametrize("at", ["waiting", "ready"])
@within_limit
async def test_what_progress_raises_ends_the_start(at):
    def progress(state: Any) -> None:
        if set(state.values()) == {at}:
            raise Mine

    client = AsyncEngineClient(progress=progress, startup_timeout=LIMIT)
    with raw_engine(client.bind()):
        with pytest.raises(Mine):
            await client.start()
        with pytest.raises(TransportError):
            await client.add_request(text("count-1"))


@within_limit
async def test_a_start_that_is_cancelled_says_nothing_behind_its_callers_back():
    loop, said = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: said.append(context))
    client = AsyncEngineClient(startup_timeout=LIMIT)
    starting = asyncio.ensure_future(client.start())
    await asyncio.sleep(0.1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    del client, starting
    gc.collect()
    assert said == []


@within_limit
async def test_the_id_of_an_iterator_that_was_dropped_is_free_at_once():
    async with driven() as (client, _):
        for _ in range(20):
            async for output in client.generate(text("hang-1")):
                assert output.new_token_ids == [7]
                break

"""The client for asyncio, against an engine in a process of its own. What both clients share is in test_transport_client.py."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from support.async_clients import aborted, driven, large, seen, tokens, within_limit
from support.clients import LIMIT, text
from support.raw_engine import raw_engine

from fastmm import (
    EngineCoreRequest,
    EngineDead,
    Overloaded,
    SchemaError,
    TransportError,
    TransportTimeout,
    UtilityFailed,
)
from fastmm.errors import SchemaValueError
from fastmm.schema import FinishReason
from fastmm.transport import AsyncEngineClient, aio
from fastmm.transport.connection import send_frames


@pytest.mark.parametrize("handshake", [None, "tcp://127.0.0.1:0"])
@within_limit
async def test_an_engine_is_driven_on_ipc_and_tcp(handshake):
    async with driven(handshake=handshake, input=handshake, output=handshake) as (client, _):
        outputs = [output async for output in client.generate(text("count-1"))]
        assert [output.new_token_ids for output in outputs] == [[0], [1], [2]]
        assert outputs[-1].finish_reason == FinishReason.LENGTH
        assert client.engines[0].vllm_version == "0.33.0"


@within_limit
async def test_progress_is_told_on_the_event_loop():
    states: list[Any] = []
    thread = threading.get_ident()
    async with driven(2, progress=lambda state: states.append((state, threading.get_ident()))):
        pass
    assert states[0][0] == {0: "waiting", 1: "waiting"}
    assert states[-1][0] == {0: "ready", 1: "ready"}
    assert {where for _, where in states} == {thread}


@within_limit
async def test_the_loop_is_free_while_engines_load():
    client = AsyncEngineClient(startup_timeout=0.5)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    counting = asyncio.create_task(count())
    with pytest.raises(TransportTimeout, match="engine 0 has not said HELLO"):
        await client.start()
    counting.cancel()
    assert turns > 5
    with pytest.raises(TransportError):
        await client.add_request(text("count-1"))


@within_limit
async def test_a_start_that_is_cancelled_or_closed_leaves_nothing_behind():
    for how in ("cancel", "close"):
        client = AsyncEngineClient(startup_timeout=600.0)
        directory = os.path.dirname(client.bind().removeprefix("ipc://"))
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0)
        if how == "cancel":
            starting.cancel()
        else:
            await client.close()
        with pytest.raises((asyncio.CancelledError, TransportError)):
            await starting
        await client.close()
        assert not os.path.exists(directory)


@within_limit
async def test_hundreds_of_requests_at_once_get_their_own_answers():
    async with driven(2) as (client, _):

        async def ask(i: int) -> None:
            assert await tokens(client.generate(text(f"count-{i}", max_tokens=1 + i % 7))) == list(range(1 + i % 7))

        await asyncio.gather(*map(ask, range(300)))
        assert client.outstanding() == {0: 0, 1: 0}
        assert abs(len(await seen(client, "add", 0)) - 150) < 100


@within_limit
async def test_a_live_id_is_refused():
    async with driven() as (client, _):
        outputs = await client.add_request(text("hang-1"))
        with pytest.raises(SchemaValueError, match="live"):
            await client.add_request(text("hang-1"))
        assert (await anext(outputs)).new_token_ids == [7]


@pytest.mark.parametrize("how", ["break", "aclose", "with", "drop", "cancel", "timeout", "abort"])
@within_limit
async def test_leaving_early_aborts_on_the_engine(how):
    async with driven() as (client, _):
        if how == "break":
            async for _output in client.generate(text("hang-1")):
                break
        elif how in {"cancel", "timeout"}:
            started = asyncio.Event()

            async def consume() -> None:
                async for _output in client.generate(text("hang-1")):
                    started.set()

            if how == "timeout":
                with pytest.raises((asyncio.TimeoutError, TimeoutError)):
                    await asyncio.wait_for(consume(), 0.2)
            else:
                task = asyncio.create_task(consume())
                await started.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
        else:
            outputs = client.generate(text("hang-1"))
            await anext(outputs)
            if how == "aclose":
                await outputs.aclose()
                with pytest.raises(StopAsyncIteration):
                    await anext(outputs)
            elif how == "with":
                async with outputs:
                    pass
            elif how == "abort":
                await client.abort("hang-1")
                assert [output.finish_reason async for output in outputs] == [FinishReason.ABORT]
            else:
                del outputs
        assert await aborted(client) == ["hang-1"]
        assert client.counters["live"] == 0


@within_limit
async def test_outputs_dropped_on_another_thread_abort_too():
    async with driven() as (client, _):
        box = [await client.add_request(text("hang-1"))]
        await asyncio.to_thread(box.clear)
        gc.collect()
        assert await aborted(client) == ["hang-1"]


@within_limit
async def test_a_request_that_is_never_iterated_is_never_sent():
    async with driven() as (client, _):
        client.generate(text("count-1"))
        assert await seen(client, "add") == []


@within_limit
async def test_two_tasks_cannot_iterate_over_one_request():
    async with driven() as (client, _):
        outputs = await client.add_request(text("mute-1"))
        first = asyncio.create_task(anext(outputs))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError):
            await anext(outputs)
        first.cancel()


@pytest.mark.parametrize(
    "bad",
    [object(), EngineCoreRequest(3, [1]), text("count-1", priority=2**70), text("count-1", mm_features=[object()])],  # type: ignore[arg-type, list-item]
    ids=["none", "id", "value", "feature"],
)
@within_limit
async def test_a_request_that_cannot_be_written_leaves_no_trace(bad):
    async with driven() as (client, _):
        with pytest.raises((SchemaError, ValueError)):
            async for _output in client.generate(bad):
                pass
        assert client.counters["live"] == 0
        assert client.ledger.counters["inflight"] == 0
        assert await tokens(client.generate(text("count-1"))) == [0, 1, 2]


@within_limit
async def test_a_large_request_that_cannot_be_written_leaves_no_trace():
    async with driven() as (client, _):
        bad = large("count-1")
        bad.priority = 2**70
        with pytest.raises((SchemaError, ValueError)):
            await client.add_request(bad)
        assert client.counters["live"] == 0
        assert await tokens(client.generate(large("count-1"))) == [0]


@within_limit
async def test_large_requests_are_encoded_off_the_loop_and_small_ones_on_it():
    async with driven() as (client, _):
        threads: list[tuple[str, int]] = []
        encoder = client._registry.engines[0].encoder

        class Spy:
            def encode(self, request: Any) -> Any:
                threads.append((request.request_id, threading.get_ident()))
                return encoder.encode(request)

        client._registry.engines[0].encoder = Spy()  # type: ignore[assignment]
        await tokens(client.generate(text("count-small")))
        await tokens(client.generate(large("count-medium", 1 << 19)))
        await tokens(client.generate(large("count-large", 2 << 20)))
        here = threading.get_ident()
        assert [name for name, thread in threads if thread == here] == ["count-small", "count-medium"]


@within_limit
async def test_requests_leave_in_the_order_in_which_they_were_asked_for():
    async with driven() as (client, _):
        requests = [large(f"count-{i}", 8 << 20) if i % 4 == 1 else text(f"count-{i}", max_tokens=1) for i in range(24)]
        await asyncio.gather(*(tokens(client.generate(request)) for request in requests))
        order = [entry[0] for entry in await seen(client, "add")]
        assert order == [f"count-{i}" for i in range(24)]


@within_limit
async def test_a_utility_call_stands_behind_the_requests_before_it():
    async with driven() as (client, _):
        asking = [asyncio.create_task(tokens(client.generate(large(f"count-{i}", 8 << 20)))) for i in range(3)]
        await asyncio.sleep(0)
        assert len(await seen(client, "add")) == 3
        await asyncio.gather(*asking)


@within_limit
async def test_a_large_request_that_is_cancelled_before_it_left_is_never_sent():
    async with driven() as (client, _):
        gate = threading.Event()
        held = asyncio.create_task(client._worker.submit(gate.wait).result(lambda: None))
        first = asyncio.create_task(tokens(client.generate(large("count-1", 16 << 20))))
        second = asyncio.create_task(tokens(client.generate(large("count-2", 16 << 20))))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        gate.set()
        await held
        assert await first == [0]
        assert [entry[0] for entry in await seen(client, "add")] == ["count-1"]
        assert client.counters["live"] == 0


@within_limit
async def test_a_large_request_that_is_cancelled_as_it_leaves_is_aborted_on_the_engine(monkeypatch):
    async with driven() as (client, _):
        loop = asyncio.get_running_loop()

        def send_and_cancel(socket: Any, frames: Any) -> None:  # the worker's: what small messages leave by is the core's
            send_frames(socket, frames)
            loop.call_soon_threadsafe(task.cancel)

        monkeypatch.setattr(aio, "send_frames", send_and_cancel)
        task = asyncio.create_task(client.add_request(large("hang-1")))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await aborted(client) == ["hang-1"]
        assert client.counters["live"] == 0


@within_limit
async def test_who_waits_for_room_waits_without_holding_the_loop_and_overloaded_is_for_who_will_not():
    async with driven(max_inflight_nbytes=1000) as (client, processes):
        os.kill(processes[0].pid, 19)  # SIGSTOP: it reads nothing more
        try:
            first = await client.add_request(large("count-1", 32 << 20))
            with pytest.raises(Overloaded):
                await client.add_request(large("count-2"), wait=False)
            with pytest.raises(TransportTimeout):
                await client.add_request(large("count-3"), timeout=0.05)
            waiting = asyncio.create_task(client.add_request(large("count-4")))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert client.counters["live"] == 1
            last = asyncio.create_task(client.add_request(large("count-5")))
            await asyncio.sleep(0)
        finally:
            os.kill(processes[0].pid, 18)  # SIGCONT
        assert await tokens(first) == [0]
        assert await tokens(await last) == [0]
        assert [entry[0] for entry in await seen(client, "add")] == ["count-1", "count-5"]
        assert await client.ledger.await_done(LIMIT)


@within_limit
async def test_large_arguments_of_a_utility_call_are_in_the_ledger():
    async with driven() as (client, _):
        assert await client.call_utility("pid", np.ones(1 << 20, np.float32), timeout=LIMIT)
        assert client.ledger.counters["peak_nbytes"] > 1 << 22
        assert await client.ledger.await_done(LIMIT)


@within_limit
async def test_a_client_is_no_other_event_loops():
    async with driven() as (client, _):
        for act in (client.add_request, client.abort, client.call_utility):
            with pytest.raises(TransportError, match="event loop"):
                await asyncio.to_thread(asyncio.run, act(text("count-1") if act == client.add_request else "pid"))


@within_limit
async def test_utility_calls_return_what_the_engine_returns_or_raise_what_it_says():
    async with driven(2) as (client, processes):
        assert await client.call_utility("echo", 1, "a", [2.5, None]) == [1, "a", [2.5, None]]
        assert await client.call_utility_all("pid") == {0: processes[0].pid, 1: processes[1].pid}
        with pytest.raises(UtilityFailed, match="Call to fail failed: as asked"):
            await client.call_utility("fail")
        with pytest.raises(TransportTimeout, match="engine 0"):
            await client.call_utility("hang", timeout=0.05)
        call = asyncio.create_task(client.call_utility("hang"))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert client._registry._calls == {}


@pytest.mark.parametrize("action", ["kill", "exit", "dead"])
@pytest.mark.parametrize("handshake", [None, "tcp://127.0.0.1:0"], ids=["ipc", "tcp"])
@within_limit
async def test_a_dead_engine_ends_all_that_wait_within_two_seconds(action, handshake):
    async with driven(handshake=handshake, input=handshake, output=handshake) as (client, processes):
        streams = [await client.add_request(text(f"hang-{i}")) for i in range(5)]
        for stream in streams:
            assert (await anext(stream)).new_token_ids == [7]
        call = asyncio.create_task(client.call_utility("hang"))
        await asyncio.sleep(0)
        begun = time.monotonic()
        if action == "kill":
            processes[0].kill()
        else:
            streams.append(await client.add_request(text(f"{action}-1")))
            assert (await anext(streams[-1])).new_token_ids == [7]
        for stream in streams:
            with pytest.raises(EngineDead, match="engine 0"):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert time.monotonic() - begun < 2
        with pytest.raises(EngineDead):
            await call
        with pytest.raises(EngineDead):
            await client.add_request(text("count-1"))
        begun = time.monotonic()
    assert time.monotonic() - begun < LIMIT / 2


@within_limit
async def test_one_dead_engine_of_two_ends_only_its_own_requests():
    async with driven(2) as (client, processes):
        mine = await client.add_request(text("hang-1", data_parallel_rank=1))
        other = await client.add_request(text("hang-2", data_parallel_rank=0))
        processes[1].kill()
        await anext(other)
        with pytest.raises(EngineDead):
            await tokens(mine)
        assert client.alive == (0,)
        for i in range(4):
            assert await tokens(client.generate(text(f"count-{i}"))) == [0, 1, 2]
        await other.aclose()


@within_limit
async def test_an_engine_that_owes_an_answer_and_is_silent_counts_as_dead():
    async with driven(silence_timeout=0.3) as (client, processes):
        await asyncio.sleep(0.4)
        assert await tokens(client.generate(text("count-1"))) == [0, 1, 2]
        os.kill(processes[0].pid, 19)
        try:
            with pytest.raises(EngineDead, match="said nothing"):
                await tokens(client.generate(text("count-2")))
        finally:
            os.kill(processes[0].pid, 18)


@within_limit
async def test_closing_ends_who_waits_and_can_be_done_twice_and_at_once():
    async with driven() as (client, _):
        streams = [await client.add_request(text(f"mute-{i}")) for i in range(3)]
        waiting = [asyncio.create_task(anext(stream)) for stream in streams]
        waiting.append(asyncio.create_task(client.call_utility("hang")))
        await asyncio.sleep(0.01)
        await asyncio.gather(client.close(), client.close())
        for task in waiting:
            with pytest.raises(TransportError, match="closed"):
                await task
        for act in (client.add_request(text("count-1")), client.call_utility("pid"), client.abort("x"), client.start()):
            with pytest.raises(TransportError):
                await act


def test_a_loop_that_ends_before_the_client_was_closed_ends_all_the_same():
    async def main() -> None:
        client = AsyncEngineClient(startup_timeout=LIMIT)
        stack.enter_context(raw_engine(client.bind()))
        await client.start()
        outputs = await client.add_request(text("hang-1"))
        await anext(outputs)

    with contextlib.ExitStack() as stack:
        asyncio.run(main())
        gc.collect()

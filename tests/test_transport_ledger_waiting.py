"""Waiting for room in the ledger: bounded, in order, for threads and coroutines alike, and no trace of who gave up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fastmm.errors import FastmmError, Overloaded, SchemaError, TransportTimeout
from fastmm.transport.lifetime import Ledger, Ticket

PATIENCE_S = 20.0


def waiting(ledger: Ledger, count: int) -> None:
    """Return when so many wait."""
    deadline = time.monotonic() + PATIENCE_S
    while ledger.counters["waiting"] != count:
        assert time.monotonic() < deadline, ledger.counters
        time.sleep(0.001)


async def waiting_async(ledger: Ledger, count: int) -> None:
    for _ in range(10_000):
        if ledger.counters["waiting"] == count:
            return
        await asyncio.sleep(0)
    raise AssertionError(ledger.counters)


def run(main: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def is_empty(ledger: Ledger) -> bool:
    counters = ledger.counters
    return not (counters["inflight"] or counters["inflight_nbytes"] or counters["waiting"])


def test_who_does_not_want_to_wait_is_told_with_the_figures() -> None:
    ledger = Ledger(10)
    held = ledger.reserve(8, wait=False)
    with pytest.raises(Overloaded, match="no room for 3 bytes: 8 bytes in 1 messages are on their way, of at most 10"):
        ledger.reserve(3, wait=False)
    small = ledger.reserve(2, wait=False)
    with pytest.raises(Overloaded):
        run(lambda: ledger.areserve(1, wait=False))
    held.cancel()
    small.cancel()
    assert is_empty(ledger)
    assert ledger.counters["peak_nbytes"] == 10


def test_a_message_larger_than_the_bound_goes_alone() -> None:
    ledger = Ledger(10)
    first = ledger.reserve(1)
    with pytest.raises(Overloaded):
        ledger.reserve(11, wait=False)
    first.cancel()
    large = ledger.reserve(11, wait=False)
    with pytest.raises(Overloaded):
        ledger.reserve(0, wait=False)
    large.cancel()
    assert is_empty(ledger)


def test_a_wait_that_times_out_leaves_no_trace_and_lets_the_next_one_pass() -> None:
    ledger = Ledger(10)
    held = ledger.reserve(6)
    with pytest.raises(TransportTimeout, match=r"no room for 9 bytes within 0.01 s"):
        ledger.reserve(9, timeout=0.01)
    with pytest.raises(TransportTimeout):
        run(lambda: ledger.areserve(9, timeout=0.01))
    assert ledger.counters["waiting"] == 0

    async def main() -> None:
        large = asyncio.create_task(ledger.areserve(9))
        await waiting_async(ledger, 1)
        small = asyncio.create_task(ledger.areserve(4))
        await waiting_async(ledger, 2)  # it would fit, and waits its turn
        large.cancel()
        (await small).cancel()

    run(main)
    held.cancel()
    assert is_empty(ledger)


def test_threads_and_coroutines_are_served_in_the_order_of_coming() -> None:
    ledger, served = Ledger(10), []
    held = ledger.reserve(10)

    def thread(index: int) -> None:
        ticket = ledger.reserve(10)
        served.append(index)
        ticket.cancel()

    async def coroutine(index: int) -> None:
        ticket = await ledger.areserve(10)
        served.append(index)
        ticket.cancel()

    async def main() -> None:
        threads, tasks = [], []
        for index in range(20):
            if index % 2:
                tasks.append(asyncio.create_task(coroutine(index)))
            else:
                threads.append(threading.Thread(target=thread, args=(index,)))
                threads[-1].start()
            await asyncio.to_thread(waiting, ledger, index + 1)
        held.cancel()
        await asyncio.gather(*tasks)
        for one in threads:
            await asyncio.to_thread(one.join, PATIENCE_S)

    run(main)
    assert served == list(range(20))
    assert is_empty(ledger)


def test_a_cancelled_wait_leaves_no_trace_even_where_it_was_admitted_already() -> None:
    ledger = Ledger(10)

    async def main() -> None:
        held = ledger.reserve(10)
        task = asyncio.create_task(ledger.areserve(5))
        await waiting_async(ledger, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ledger.counters["waiting"] == 0
        task = asyncio.create_task(ledger.areserve(5))
        await waiting_async(ledger, 1)
        held.cancel()  # admits it; its task has not run yet
        assert ledger.counters["inflight_nbytes"] == 5
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_empty(ledger)

    run(main)


def test_a_loop_that_ended_while_somebody_waited_keeps_no_room() -> None:
    ledger = Ledger(10)
    held = ledger.reserve(10)
    loop = asyncio.new_event_loop()
    task = loop.create_task(ledger.areserve(10))
    loop.run_until_complete(asyncio.sleep(0))
    waiting(ledger, 1)
    loop.close()
    got: list[Ticket] = []
    other = threading.Thread(target=lambda: got.append(ledger.reserve(10, timeout=PATIENCE_S)))
    other.start()
    waiting(ledger, 2)
    held.cancel()  # its turn goes to nobody, and so to the next one
    other.join(PATIENCE_S)
    assert len(got) == 1
    got.clear()
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio would complain of what is meant here
    del task
    gc.collect()
    assert is_empty(ledger)


def test_room_made_on_another_thread_wakes_a_loop_that_sleeps() -> None:
    ledger = Ledger(10)

    async def main() -> None:
        held = ledger.reserve(10)
        threading.Timer(0.05, held.cancel).start()
        begun = time.monotonic()
        (await ledger.areserve(10, timeout=PATIENCE_S)).cancel()
        assert time.monotonic() - begun < PATIENCE_S

    run(main)
    assert is_empty(ledger)


def test_an_interrupted_wait_leaves_no_trace() -> None:
    ledger = Ledger(10)
    held = ledger.reserve(10)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        waiting(ledger, 1)
        signal.pthread_kill(main, signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
    try:
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            ledger.reserve(1, timeout=PATIENCE_S)
    finally:
        signal.signal(signal.SIGINT, before)
    helper.join()
    assert ledger.counters["waiting"] == 0
    held.cancel()
    assert is_empty(ledger)


def test_a_check_ends_a_wait_that_makes_no_sense_and_keeps_the_place_in_the_queue_until_then() -> None:
    ledger = Ledger(10)
    held = ledger.reserve(10)
    asked: list[int] = []

    def check() -> None:
        asked.append(ledger.counters["waiting"])
        if len(asked) == 3:
            raise BufferError("the peer has gone")

    for reserve in (lambda: ledger.reserve(1, check=check), lambda: run(lambda: ledger.areserve(1, check=check))):
        asked.clear()
        with pytest.raises(BufferError, match="has gone"):
            reserve()
        assert asked == [1, 1, 1]
        with pytest.raises(TransportTimeout):
            ledger.reserve(1, timeout=0.01, check=check)
    asked.clear()

    def release() -> None:
        held.cancel()

    def never() -> None:
        if not asked:
            asked.append(0)
            release()

    ledger.reserve(1, check=never).cancel()
    held = ledger.reserve(10)
    asked.clear()
    run(lambda: ledger.areserve(1, check=never)).cancel()
    assert is_empty(ledger)


def test_wait_returns_when_nothing_is_on_its_way() -> None:
    ledger = Ledger()
    assert ledger.wait(0)
    held = ledger.reserve(5)
    assert not ledger.wait(0)
    assert not ledger.wait(0.01)
    assert not run(lambda: ledger.await_done(0.01))
    assert not run(lambda: ledger.await_done(0))
    threading.Timer(0.02, held.cancel).start()
    assert run(lambda: ledger.await_done())
    held = ledger.reserve(5)
    threading.Timer(0.02, held.cancel).start()
    assert ledger.wait(PATIENCE_S)
    assert run(lambda: ledger.await_done(0))


def test_an_asyncio_guard_waits_for_its_buffer() -> None:
    ledger, buffer = Ledger(), bytearray(100)

    async def main() -> None:
        parcels = ledger.reserve(100).parcels([buffer])
        with pytest.raises(Overloaded):
            await ledger.aguard(buffer, wait=False)
        with pytest.raises(TransportTimeout):
            await ledger.aguard(buffer, timeout=0.01)
        threading.Timer(0.02, parcels.clear).start()
        await ledger.aguard(buffer, timeout=PATIENCE_S)
        buffer.extend(b"mine again")

    run(main)
    assert is_empty(ledger)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None, 1 << 64])
def test_a_bound_is_a_whole_number_of_bytes(bad: Any) -> None:
    with pytest.raises(SchemaError, match="max_inflight_nbytes"):
        Ledger(bad)
    if bad != 0:
        with pytest.raises(FastmmError, match="nbytes"):
            Ledger(1).reserve(bad)


def test_threads_and_loops_that_hurry_cancel_and_time_out_never_pass_the_bound_and_end_empty() -> None:
    ledger, seeds = Ledger(1000), iter(range(1000))
    faults: list[BaseException] = []

    def hold(ticket: Ticket, generator: random.Random) -> None:
        if generator.random() < 0.5:
            parcels = ticket.parcels([bytearray(8), b"x" * 8])
            threading.Thread(target=parcels.clear).start() if generator.random() < 0.05 else parcels.clear()
        elif generator.random() < 0.5:
            ticket.cancel()
        if ledger.counters["inflight_nbytes"] > 1000:
            faults.append(AssertionError("over the bound"))

    def thread() -> None:
        generator = random.Random(next(seeds))
        try:
            for _ in range(400):
                with contextlib.suppress(Overloaded, TransportTimeout):
                    hold(
                        ledger.reserve(
                            generator.randrange(1000), wait=generator.random() < 0.9, timeout=generator.choice([None, 0.001])
                        ),
                        generator,
                    )
        except BaseException as error:
            faults.append(error)

    async def coroutine(generator: random.Random) -> None:
        for _ in range(100):
            task = asyncio.create_task(
                ledger.areserve(
                    generator.randrange(1000), wait=generator.random() < 0.9, timeout=generator.choice([None, 0.001])
                )
            )
            if generator.random() < 0.3:
                await asyncio.sleep(0)
                task.cancel()
            with contextlib.suppress(Overloaded, TransportTimeout, asyncio.CancelledError):
                hold(await task, generator)

    def loop() -> None:
        async def main() -> None:
            await asyncio.gather(*[coroutine(random.Random(next(seeds))) for _ in range(5)])

        try:
            asyncio.run(main())
        except BaseException as error:
            faults.append(error)

    workers = [threading.Thread(target=thread) for _ in range(4)] + [threading.Thread(target=loop) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers), ledger.counters
    assert not faults
    assert ledger.wait(PATIENCE_S)
    assert is_empty(ledger)
    assert ledger.counters["peak_nbytes"] <= 1000
    assert ledger.counters["admitted"] == ledger.counters["finished"]

"""ProcessorPool over threads: order, bounds, faces, cancel, and a failure anywhere parks nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import BrokenExecutor, CancelledError, Executor, wait

import pytest
from support.processors import IMAGE, LONG, Gate, Obedient, work

from fastmm.errors import (
    DuplicateRequest,
    FastmmError,
    LimitError,
    Overloaded,
    ProcessorDied,
    ProcessorError,
    ProcessorOverloaded,
)
from fastmm.processors import Budgets, Processed, Work
from fastmm.processors.pool import ProcessorPool
from fastmm.processors.store import ResultStore


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()


# --- the way of a request ---------------------------------------------------------------------------------------------


def test_a_future_gives_the_result():
    with ProcessorPool(Obedient()) as pool:
        result = pool.submit(work("a", "rows 3")).result(LONG)
    assert isinstance(result, Processed)
    assert result.items[0].features["pixel_values"].shape == (3, 1024)


def test_an_awaitable_gives_the_result():
    async def main() -> list[Processed]:
        return await asyncio.wait_for(asyncio.gather(*[pool.asubmit(work(str(i))) for i in range(20)]), LONG)

    with ProcessorPool(Obedient()) as pool:
        assert len(asyncio.run(main())) == 20
        assert pool.counters["completed"] == 20


def test_an_awaitable_raises_what_its_future_raises():
    async def main() -> None:
        with pytest.raises(ProcessorError, match="asked to raise"):
            await asyncio.wait_for(pool.asubmit(work("a", "raise it")), LONG)

    with ProcessorPool(Obedient()) as pool:
        asyncio.run(main())


def test_cancelling_the_request_cancels_its_awaitable(gate):
    async def main() -> None:
        awaitable = pool.asubmit(work("a", gate.text))
        await asyncio.to_thread(gate.begun)
        assert pool.cancel("a")
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(awaitable, LONG)

    with ProcessorPool(Obedient()) as pool:
        asyncio.run(main())
        gate.open()


def test_a_loop_that_is_closed_before_its_results_come_disturbs_nobody(gate):
    async def leave() -> None:
        pool.asubmit(work("a", gate.text))

    async def stay() -> Processed:
        return await asyncio.wait_for(pool.asubmit(work("b")), LONG)

    with ProcessorPool(Obedient(), workers=1) as pool:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(leave())
        loop.close()
        gate.open()
        assert asyncio.run(stay())
        assert pool.counters["completed"] == 2


def test_many_loops_in_many_threads_each_get_their_own_results():
    async def main(k: int) -> None:
        results = await asyncio.wait_for(
            asyncio.gather(*[pool.asubmit(work(f"{k}-{i}", f"rows {i + 1}")) for i in range(50)]), LONG
        )
        assert [len(result.items[0].features["pixel_values"]) for result in results] == list(range(1, 51))
        done.append(k)

    done: list[int] = []
    with ProcessorPool(Obedient(), workers=3) as pool:
        threads = [threading.Thread(target=lambda k=k: asyncio.run(main(k))) for k in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
    assert sorted(done) == list(range(5))


def test_asubmit_puts_to_work_at_once():
    """Not only when it is awaited."""

    async def main() -> None:
        awaitable = pool.asubmit(work("a"))
        assert pool.counters["submitted"] == 1
        await asyncio.wait_for(awaitable, LONG)

    with ProcessorPool(Obedient()) as pool:
        asyncio.run(main())


def test_the_order_is_process_validate_hashes_park_complete():
    seen = []

    class Pool(ProcessorPool):
        def wrap(self, work, processed):
            seen.append(("wrap", processed.items[0].hash))
            return processed

    class Store(ResultStore):
        def park(self, rid, result):
            seen.append(("park", rid))
            assert not future.done()
            super().park(rid, result)

    class Recording(Obedient):
        def process(self, work, tokenizer):
            assert work.hashes is None
            assert begin.wait(LONG)
            seen.append(("process", work.request_id))
            return super().process(work, tokenizer)

    def run(processor, work, tokenizer, *, budgets):
        from fastmm.processors.run import process_work, validate_processed

        def validate(work, processed, *args, **options):
            seen.append(("validate", processed.items[0].hash))
            validate_processed(work, processed, *args, **options)

        return process_work(processor, work, tokenizer, budgets=budgets, validate=validate)

    begin, store = threading.Event(), Store()
    with Pool(Recording(), store=store, run=run) as pool:
        future = pool.submit(work("a", hashes=["0x12345"]))
        future.add_done_callback(lambda future: seen.append(("complete", "a" in store)))
        begin.set()
        result = future.result(LONG)
    assert [what for what, _ in seen] == ["process", "validate", "wrap", "park", "complete"]
    own, callers = seen[1][1], seen[2][1]
    assert own == "ab" * 8
    assert callers == result.items[0].hash != own
    assert seen[4][1] is True
    assert store.take("a") is result


@pytest.mark.parametrize(
    ("text", "more", "error"),
    [
        ("raise an error", {}, ProcessorError),
        ("bad", {}, ProcessorError),  # the validation refuses it
        ("rows 1", {"images": ["https://example.org/not-fetched.png"]}, ProcessorError),
        ("rows 1", {"images": ["data:,%"]}, ProcessorError),
        ("rows 1", {"extensions": {"multimodal_x": 1}}, FastmmError),
        ("rows 1", {"images": [b"\x89PNG\r\n\x1a\n" + b"x" * 100]}, FastmmError),
        ("exit", {}, ProcessorError),
        ("interrupt", {}, ProcessorError),
    ],
)
def test_a_failure_anywhere_parks_nothing(text, more, error):
    store = ResultStore()
    with ProcessorPool(Obedient(), store=store, workers=1) as pool:
        with pytest.raises(error):
            pool.submit(Work(**{"request_id": "a", "text": text, "images": [IMAGE], **more})).result(LONG)
        assert store.counters["parked"] == 0
        assert pool.counters["failed"] == 1
        assert pool.submit(work("b")).result(LONG)  # never a lost worker
        assert pool.counters["workers"] == 1


def test_what_wrap_raises_fails_the_request_and_parks_nothing():
    class Pool(ProcessorPool):
        def wrap(self, work, processed):
            raise KeyError("no such model")

    store = ResultStore()
    with Pool(Obedient(), store=store) as pool:
        with pytest.raises(ProcessorError, match="KeyError"):
            pool.submit(work("a")).result(LONG)
        assert len(store) == 0
        assert pool.counters["failed"] == 1
        assert pool.counters["completed"] == 0


@pytest.mark.parametrize("text_chars", [10, 500_000])  # packed at once, and on a thread of its own
def test_what_replacing_a_broken_executor_raises_fails_the_request(text_chars):
    class Broken(Executor):
        def submit(self, fn, /, *args, **kwargs):
            raise BrokenExecutor("a worker died")

    class Pool(ProcessorPool):
        def replace_executor(self, executor):
            raise RuntimeError("no other")

    with Pool(Obedient(), executor=Broken(), workers=1) as pool:
        for i in range(3):  # its slot comes back
            with pytest.raises(ProcessorDied, match="no other"):
                pool.submit(work(str(i), "x" * text_chars)).result(LONG)


def test_a_full_store_fails_the_request():
    store = ResultStore(max_entries=1)
    with ProcessorPool(Obedient(), store=store) as pool:
        pool.submit(work("a")).result(LONG)
        with pytest.raises(ProcessorOverloaded, match="store is full"):
            pool.submit(work("b")).result(LONG)
        assert sorted(store.drain()) == ["a"]


def test_a_processors_exception_is_the_cause():
    with ProcessorPool(Obedient()) as pool:
        error = pool.submit(work("a", "raise me")).exception(LONG)
    assert type(error) is ProcessorError
    assert "ValueError: asked to raise me" in str(error)
    assert isinstance(error.__cause__, ValueError)


def test_errors_of_ours_come_as_they_are():
    with ProcessorPool(Obedient(), budgets=Budgets(max_output_nbytes=1000)) as pool:
        with pytest.raises(LimitError, match="1000"):
            pool.submit(work("a", "rows 10")).result(LONG)


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_a_full_queue_is_an_error_at_once(gate):
    with ProcessorPool(Obedient(), workers=1, queue_size=2) as pool:
        futures = [pool.submit(work("0", gate.text))]
        gate.begun()
        futures += [pool.submit(work(str(i))) for i in (1, 2)]
        with pytest.raises(ProcessorOverloaded, match="queue is full") as caught:
            pool.submit(work("3"))
        assert isinstance(caught.value, Overloaded)
        assert pool.counters["queued"] == 2
        assert pool.counters["refused"] == 1

        async def face() -> None:
            with pytest.raises(ProcessorOverloaded):
                await pool.asubmit(work("3"))

        asyncio.run(face())
        gate.open()
        for future in futures:
            future.result(LONG)
        pool.submit(work("3")).result(LONG)


def test_without_a_queue_only_what_is_at_work_is_taken(gate):
    with ProcessorPool(Obedient(), workers=1, queue_size=0) as pool:
        first = pool.submit(work("0", gate.text))
        with pytest.raises(ProcessorOverloaded):
            pool.submit(work("1"))
        gate.open()
        first.result(LONG)


def test_no_more_than_workers_are_at_work(tmp_path):
    most, now, lock = 0, 0, threading.Lock()

    class Counting(Obedient):
        def process(self, work, tokenizer):
            nonlocal most, now
            with lock:
                now += 1
                most = max(most, now)
            time.sleep(0.001)
            with lock:
                now -= 1
            return super().process(work, tokenizer)

    with ProcessorPool(Counting(), workers=3) as pool:
        for future in [pool.submit(work(str(i))) for i in range(100)]:
            future.result(LONG)
        assert pool.counters["workers"] == 3
    assert most == 3


def test_requests_are_processed_in_the_order_they_came(gate):
    seen = []

    class Recording(Obedient):
        def process(self, work, tokenizer):
            seen.append(work.request_id)
            return super().process(work, tokenizer)

    with ProcessorPool(Recording(), workers=1) as pool:
        futures = [pool.submit(work("first", gate.text)), *[pool.submit(work(str(i))) for i in range(50)]]
        gate.open()
        wait(futures, LONG)
    assert seen == ["first", *map(str, range(50))]


def test_a_duplicate_id_is_refused_at_once_and_free_again_afterwards(gate):
    store = ResultStore()
    with ProcessorPool(Obedient(), workers=1, store=store) as pool:
        first = pool.submit(work("a", gate.text))
        with pytest.raises(DuplicateRequest, match="at work"):
            pool.submit(work("a"))
        gate.open()
        first.result(LONG)
        with pytest.raises(DuplicateRequest, match="parked"):
            pool.submit(work("a"))
        store.take("a")
        pool.submit(work("a")).result(LONG)


def test_what_is_no_work_is_refused():
    with ProcessorPool(Obedient()) as pool:
        with pytest.raises(ProcessorError, match="expected a Work, got dict"):
            pool.submit({"request_id": "a"})
        assert pool.counters["submitted"] == 0


# --- cancel -----------------------------------------------------------------------------------------------------------


def test_a_request_that_waits_can_be_cancelled_and_makes_room(gate):
    store = ResultStore()
    with ProcessorPool(Obedient(), workers=1, queue_size=1, store=store) as pool:
        first, second = pool.submit(work("a", gate.text)), pool.submit(work("b"))
        assert pool.cancel("b") is True
        assert second.cancelled()
        third = pool.submit(work("c"))
        gate.open()
        first.result(LONG)
        third.result(LONG)
        assert sorted(store.drain()) == ["a", "c"]
        assert pool.counters["cancelled"] == 1


def test_a_result_that_arrives_after_the_cancel_is_dropped_never_parked(gate):
    store = ResultStore()
    with ProcessorPool(Obedient(), workers=1, store=store) as pool:
        future = pool.submit(work("a", gate.text))
        gate.begun()
        assert pool.cancel("a") is True
        with pytest.raises(CancelledError):
            future.result(0)
        again = pool.submit(work("a", "rows 2"))  # the id is free at once
        gate.open()
        assert again.result(LONG).items[0].features["pixel_values"].shape[0] == 2
        assert store.counters["parked"] == 1
        assert pool.counters["dropped"] == 1


def test_cancelling_the_future_is_cancelling_the_request(gate):
    with ProcessorPool(Obedient(), workers=1) as pool:
        futures = [pool.submit(work(str(i), gate.text if i == 0 else "rows 1")) for i in range(3)]
        assert futures[1].cancel()
        assert futures[1].cancel()
        assert pool.counters["cancelled"] == 1
        assert pool.counters["queued"] == 1
        gate.open()
        futures[2].result(LONG)
        assert futures[2].cancel() is False


def test_cancelling_the_task_is_cancelling_the_request(gate):
    async def main() -> None:
        async def ask() -> None:
            await pool.asubmit(work("a", gate.text))

        task = asyncio.create_task(ask())
        await asyncio.to_thread(gate.begun)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.counters["cancelled"] == 1

    with ProcessorPool(Obedient(), workers=1, store=ResultStore()) as pool:
        asyncio.run(main())
        gate.open()
        pool.submit(work("b")).result(LONG)
        assert sorted(pool.store.drain()) == ["b"]


def test_what_is_not_at_work_cannot_be_cancelled():
    with ProcessorPool(Obedient(), store=ResultStore()) as pool:
        assert pool.cancel("unknown") is False
        pool.submit(work("a")).result(LONG)
        assert pool.cancel("a") is False
        assert "a" in pool.store

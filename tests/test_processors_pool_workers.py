"""ProcessorPool over threads: a hang costs no worker; shutdown; what can be swapped; executors that were given; many threads."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
from support.processors import IMAGE, LONG, Gate, Obedient, Unloadable, gates, image_item, until, work

from fastmm.errors import (
    LimitError,
    ProcessorDied,
    ProcessorError,
    ProcessorOverloaded,
    ProcessorTimeout,
)
from fastmm.processors import Budgets, Processed, Work
from fastmm.processors.pool import ProcessorPool
from fastmm.processors.store import ResultStore


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()


# --- hangs ------------------------------------------------------------------------------------------------------------


def test_a_hang_is_one_failed_request_and_no_lost_worker(tmp_path):
    store = ResultStore()
    stuck = gates(tmp_path, 3)
    with ProcessorPool(Obedient(), workers=2, timeout=1.0, store=store) as pool:
        hanging = [pool.submit(work(f"h{i}", gate.text)) for i, gate in enumerate(stuck)]
        rest = [pool.submit(work(str(i))) for i in range(20)]
        for future in hanging:
            with pytest.raises(ProcessorTimeout, match=r"more than 1\.0 s") as caught:
                future.result(LONG)
            assert isinstance(caught.value, TimeoutError)
        for future in rest:
            future.result(LONG)
        counters = pool.counters
        assert (counters["timeouts"], counters["replaced"], counters["workers"]) == (3, 3, 2)
        for gate in stuck:
            gate.open()  # what comes back at last is dropped
        until(lambda: pool.counters["dropped"] == 3)
        assert sorted(store.drain()) == sorted(map(str, range(20)))


def test_a_hang_after_a_cancel_costs_no_worker(gate):
    with ProcessorPool(Obedient(), workers=1, timeout=1.0) as pool:
        pool.submit(work("a", gate.text))
        gate.begun()
        assert pool.cancel("a")
        pool.submit(work("b")).result(LONG)
        assert pool.counters["replaced"] == 1


@pytest.mark.parametrize("cancelled", [True, False])
def test_shutdown_without_a_deadline_waits_for_no_request_that_hangs(gate, cancelled):
    pool = ProcessorPool(Obedient(), workers=1, timeout=1.0)
    pool.submit(work("a", gate.text))
    gate.begun()
    if cancelled:
        assert pool.cancel("a")
    ended = []
    thread = threading.Thread(target=lambda: ended.append(pool.shutdown(None)), daemon=True)
    thread.start()
    thread.join(LONG)
    assert ended == [True]


def test_time_in_the_queue_is_not_time_at_work(tmp_path):
    class Slow(Obedient):
        def process(self, work, tokenizer):
            time.sleep(0.15)
            return super().process(work, tokenizer)

    with ProcessorPool(Slow(), workers=1, timeout=2.0) as pool:  # twenty of them take three seconds
        for future in [pool.submit(work(str(i))) for i in range(20)]:
            future.result(LONG)


def test_a_program_ends_though_a_processor_hangs(tmp_path):
    """Its threads do not keep the interpreter, as those of the standard executor would."""
    source = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from fastmm.processors import Work
from fastmm.processors.pool import ProcessorPool
from support.processors import Gate, Obedient
from pathlib import Path
gate = Gate(Path(sys.argv[2]))
pool = ProcessorPool(Obedient(), workers=1)
pool.submit(Work(request_id="a", text=gate.text))
gate.begun()
print(pool.shutdown(timeout=0.1))
"""
    child = subprocess.run(
        [sys.executable, "-c", source, str(Path(__file__).parent), str(tmp_path / "gate")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.stdout == "False\n", child.stderr
    assert child.returncode == 0


# --- what else an exception can do ------------------------------------------------------------------------------------


class Evil(Exception):
    """Its message is an exception, too."""

    def __str__(self):
        raise Evil


class Worse(BaseException):
    def __str__(self):
        raise Worse


@pytest.mark.parametrize("evil", [Evil, Worse])
@pytest.mark.parametrize("where", ["process", "wrap"])
def test_an_exception_whose_message_is_one_costs_no_worker(evil, where):
    class Raising(Obedient):
        def process(self, work, tokenizer):
            if where == "process" and work.text == "evil":
                raise evil
            return super().process(Work(request_id="-", images=work.images), tokenizer)

    class Pool(ProcessorPool):
        def wrap(self, work, processed):
            if where == "wrap" and work.text == "evil":
                raise evil
            return processed

    with Pool(Raising(), workers=1) as pool:
        for i in range(3):
            with pytest.raises(ProcessorError, match="cannot be read"):
                pool.submit(work(str(i), "evil")).result(LONG)
        assert pool.submit(work("after")).result(LONG)
        assert pool.counters["replaced"] == 0


@pytest.mark.parametrize("where", ["process", "wrap"])
def test_a_failed_future_that_is_kept_keeps_nothing_of_the_request(where):
    class Pixels(np.ndarray):
        """An array that can be watched."""

    class Raising(Obedient):
        def process(self, work, tokenizer):
            if where == "process":
                local = work
                raise ValueError(f"failed over {len(local.images)}")
            return super().process(work, tokenizer)

    class Pool(ProcessorPool):
        def wrap(self, work, processed):
            raise ValueError("failed")

    pixels = IMAGE.view(Pixels).copy()
    gone = weakref.ref(pixels)
    with Pool(Raising(), workers=1) as pool:
        future = pool.submit(Work(request_id="a", images=[pixels]))
        error = future.exception(LONG)
        del pixels
        until(lambda: pool.counters["running"] == 0)
        gc.collect()
        assert gone() is None
        assert any("raise ValueError" in line for line in traceback.format_exception(None, error, error.__traceback__))


def test_cancelled_requests_do_not_pile_up(gate):
    with ProcessorPool(Obedient(), workers=1, queue_size=4) as pool:
        pool.submit(work("a", gate.text))
        gate.begun()
        kept = [pool.submit(work(f"kept-{i}")) for i in range(3)]
        for i in range(5000):
            assert pool.submit(work(str(i))).cancel()
        assert len(pool._crew._queue) < 200
        assert pool.counters["queued"] == 3
        gate.open()
        for future in kept:
            future.result(LONG)


@pytest.mark.parametrize("timeout", [None, 100.0])
def test_a_pool_that_is_dropped_says_so_and_its_threads_end(timeout):
    def use_and_drop() -> None:
        pool = ProcessorPool(Obedient(), workers=2, timeout=timeout)
        pool.start()
        pool.submit(work("a")).result(LONG)
        until(lambda: pool.counters["running"] == 0)

    before = set(threading.enumerate())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        use_and_drop()
        until(lambda: gc.collect() >= 0 and bool(said))
    assert "was not shut down" in str(said[0].message)
    assert said[0].category is ResourceWarning
    until(lambda: not set(threading.enumerate()) - before)


# --- shutdown ---------------------------------------------------------------------------------------------------------


def test_shutdown_lets_what_was_taken_come_to_an_end(gate):
    pool = ProcessorPool(Obedient(), workers=1)
    futures = [pool.submit(work(str(i), gate.text if i == 0 else "rows 1")) for i in range(10)]
    gate.begun()
    threading.Timer(0.05, gate.open).start()
    assert pool.shutdown(LONG) is True
    assert all(future.result(0) for future in futures)


def test_shutdown_has_a_deadline_and_leaves_no_future_open(gate):
    pool = ProcessorPool(Obedient(), workers=1, store=ResultStore())
    futures = [pool.submit(work(str(i), gate.text if i == 0 else "rows 1")) for i in range(5)]
    gate.begun()
    begin = time.monotonic()
    assert pool.shutdown(timeout=0.2) is False
    assert time.monotonic() - begin < 10
    for future in futures:
        with pytest.raises(ProcessorError, match="shut down"):
            future.result(0)
    assert pool.counters["queued"] == 0
    gate.open()
    assert len(pool.store) == 0


def test_shutdown_may_be_called_again_from_anywhere(gate):
    pool = ProcessorPool(Obedient(), workers=1)
    future = pool.submit(work("a", gate.text))
    gate.begun()
    said = []
    threads = [threading.Thread(target=lambda: said.append(pool.shutdown(LONG))) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.open()
    for thread in threads:
        thread.join(LONG)
    assert said == [True] * 4
    assert future.result(0)
    assert pool.shutdown(0) is True
    with pool:
        pass


def test_after_shutdown_nothing_is_taken():
    pool = ProcessorPool(Obedient())
    pool.shutdown()
    with pytest.raises(ProcessorError, match="shut down"):
        pool.submit(work("a"))
    with pytest.raises(ProcessorError, match="shut down"):
        pool.start()


def test_shutdown_leaves_no_thread():
    before = set(threading.enumerate())
    with ProcessorPool(Obedient(), workers=4, timeout=5.0) as pool:
        pool.start()
        for i in range(20):
            pool.submit(work(str(i))).result(LONG)
        assert len(set(threading.enumerate()) - before) == 5
    until(lambda: not set(threading.enumerate()) - before)


# --- one start, and what can be swapped -------------------------------------------------------------------------------


def test_workers_start_once_when_they_are_needed_or_when_asked():
    made = []

    class Pool(ProcessorPool):
        def make_executor(self, index):
            made.append(index)
            return super().make_executor(index)

    with Pool(Obedient(), workers=3) as pool:
        assert made == []
        pool.submit(work("a")).result(LONG)
        assert made == [0]
        assert pool.start() is True
        assert pool.start() is True
        for i in range(20):
            pool.submit(work(str(i))).result(LONG)
        assert made == [0, 1, 2]


def test_the_processor_is_made_once():
    made = []

    def factory():
        made.append(1)
        return Obedient()

    with ProcessorPool(factory, workers=4) as pool:
        for future in [pool.submit(work(str(i))) for i in range(20)]:
            future.result(LONG)
    assert made == [1]


def test_a_processor_may_be_given_by_name_and_the_tokenizer_as_a_function():
    seen = []

    class Seeing(Obedient):
        def process(self, work, tokenizer):
            seen.append(tokenizer)
            return super().process(work, tokenizer)

    tokenizer = object()
    with ProcessorPool("support.processors:Obedient") as pool:
        pool.submit(work("a")).result(LONG)
    with ProcessorPool(Seeing, tokenizer=lambda: tokenizer) as pool:
        pool.submit(work("a")).result(LONG)
    assert seen == [tokenizer]


def test_loading_can_be_swapped():
    with ProcessorPool("a name", tokenizer=3, load=lambda processor, tokenizer: (Obedient(), tokenizer)) as pool:
        pool.submit(work("a")).result(LONG)


def test_wrapping_of_results_can_be_swapped():
    class Pool(ProcessorPool):
        def wrap(self, work, processed):
            return {"rid": work.request_id, "ids": processed.prompt_token_ids}

    store = ResultStore()
    with Pool(Obedient(), store=store) as pool:
        assert pool.submit(work("a")).result(LONG)["rid"] == "a"
        assert store.take("a")["ids"][0] == 0


def test_budgets_are_the_pools():
    with ProcessorPool(Obedient(), budgets=Budgets(max_media_nbytes=3)) as pool:
        with pytest.raises(LimitError):
            pool.submit(Work(request_id="a", images=[b"1234"])).result(LONG)


def test_affinity_is_off_by_default_and_a_hook():
    allowed = sorted(os.sched_getaffinity(0))
    seen: dict[int, set[int]] = {}

    class Pool(ProcessorPool):
        def affinity(self, index):
            return None if index == 0 else [allowed[-1]]

    class Looking(Obedient):
        def process(self, work, tokenizer):
            seen[int(threading.current_thread().name.rpartition("-")[2])] = os.sched_getaffinity(0)
            return super().process(work, tokenizer)

    with Pool(Looking(), workers=2) as pool:
        pool.start()
        i = 0
        while len(seen) < 2:
            i += 2
            wait([pool.submit(work(str(i + j))) for j in range(2)], LONG)
    assert seen == {0: set(allowed), 1: {allowed[-1]}}
    assert os.sched_getaffinity(0) == set(allowed)


def test_an_affinity_that_the_system_refuses_costs_no_worker():
    class Pool(ProcessorPool):
        def affinity(self, index):
            return [100_000]

    with Pool(Obedient()) as pool:
        pool.submit(work("a")).result(LONG)


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"workers": True},
        {"queue_size": -1},
        {"timeout": 0},
        {"timeout": True},
        {"executor": "thread"},
        {"executor": 3},
    ],
)
def test_options_are_checked(options):
    with pytest.raises(ProcessorError, match="ProcessorPool"):
        ProcessorPool(Obedient(), **options)


def test_a_processor_that_cannot_be_made_or_is_none_is_an_error_at_once():
    with pytest.raises(RuntimeError, match="no weights"):
        ProcessorPool(Unloadable)
    with pytest.raises(ProcessorError, match="process"):
        ProcessorPool(object())


# --- executors that were given ----------------------------------------------------------------------------------------


def test_runs_on_a_thread_pool_that_it_was_given_and_leaves_it_running():
    with ThreadPoolExecutor(2, thread_name_prefix="mine") as mine:
        names = set()

        class Looking(Obedient):
            def process(self, work, tokenizer):
                names.add(threading.current_thread().name.partition("_")[0])
                return super().process(work, tokenizer)

        with ProcessorPool(Looking(), executor=mine, workers=2) as pool:
            for future in [pool.submit(work(str(i))) for i in range(20)]:
                future.result(LONG)
        assert names == {"mine"}
        assert mine.submit(int).result(LONG) == 0


def test_an_executor_that_is_shut_down_fails_requests_and_blocks_nobody(gate):
    mine = ThreadPoolExecutor(1)
    with ProcessorPool(Obedient(), executor=mine, workers=2) as pool:
        first, second = pool.submit(work("a", gate.text)), pool.submit(work("b"))
        gate.begun()
        mine.shutdown(wait=False, cancel_futures=True)
        with pytest.raises(ProcessorDied):
            second.result(LONG)
        with pytest.raises(ProcessorDied):
            pool.submit(work("c")).result(LONG)
        gate.open()
        assert first.result(LONG)


def test_a_long_queue_before_an_executor_that_is_shut_down_fails_to_the_last(gate):
    mine = ThreadPoolExecutor(1)
    with ProcessorPool(Obedient(), executor=mine, workers=1) as pool:
        first = pool.submit(work("a", gate.text))
        gate.begun()
        rest = [pool.submit(work(str(i))) for i in range(3000)]
        mine.shutdown(wait=False)
        gate.open()
        assert first.result(LONG)
        for future in rest:
            assert isinstance(future.exception(LONG), ProcessorDied)
        assert pool.counters["failed"] == 3000


def test_runs_on_an_executor_that_does_everything_at_once():
    """In the caller's own thread, in `submit`: nothing of the pool may hold a lock, or call itself, there."""

    class Inline(ThreadPoolExecutor):
        def submit(self, function, /, *args, **kwargs):
            future = Future()
            future.set_result(function(*args, **kwargs))
            return future

    store = ResultStore()
    with ProcessorPool(Obedient(), executor=Inline(1), workers=1, store=store) as pool:
        again = pool.submit(work("a"))
        again.add_done_callback(lambda future: pool.submit(work("b")))
        for i in range(1500):
            assert pool.submit(work(str(i))).done()
    assert len(store) == 1502


@pytest.mark.parametrize("as_function", [False, True])
def test_a_hang_on_a_thread_pool_that_was_given_costs_no_capacity(tmp_path, as_function):
    stuck = gates(tmp_path, 2)
    mine = None if as_function else ThreadPoolExecutor(2)
    with ProcessorPool(Obedient(), executor=mine or (lambda: ThreadPoolExecutor(2)), workers=2, timeout=1.0) as pool:
        hanging = [pool.submit(work(f"h{i}", gate.text)) for i, gate in enumerate(stuck)]
        for future in hanging:
            with pytest.raises(ProcessorTimeout):
                future.result(LONG)
        for future in [pool.submit(work(str(i))) for i in range(10)]:
            future.result(LONG)
        for gate in stuck:
            gate.open()
    if mine is not None:
        mine.shutdown()


# --- memory and threads -----------------------------------------------------------------------------------------------


def test_an_idle_pool_keeps_nothing_of_a_request():
    class Media:
        pass

    class Taking(Obedient):
        def process(self, work, tokenizer):
            return Processed(prompt_token_ids=[0, 7], items=[image_item(1, 0)])

    from fastmm.processors.run import process_work

    def run(processor, work, tokenizer, *, budgets):
        return process_work(processor, work, tokenizer, budgets=Budgets(max_pixels=None))

    with ProcessorPool(Taking(), workers=1, timeout=100.0, run=run) as pool:
        media = Media()
        gone = weakref.ref(media)
        future = pool.submit(Work(request_id="a", images=[media]))
        future.result(LONG)
        del media
        until(lambda: pool.counters["running"] == 0)
        gc.collect()
        assert gone() is None  # though the future, with the result, is kept
        values = weakref.ref(future.result(0).items[0].features["pixel_values"])
        del future
        gc.collect()
        assert values() is None


def test_many_threads_submit_cancel_and_take_and_every_request_has_one_end():
    store = ResultStore()
    n_threads, each = 8, 150
    ends: list[list[str]] = [[] for _ in range(n_threads)]

    def client(k: int) -> None:
        futures = []
        for i in range(each):
            rid = f"{k}-{i}"
            while True:
                try:
                    future = pool.submit(work(rid, "raise now" if i % 7 == 0 else "rows 1"))
                    break
                except ProcessorOverloaded:
                    time.sleep(0.001)
            futures.append((rid, future))
            if i % 5 == 0:
                pool.cancel(rid)
        for rid, future in futures:
            try:
                future.result(LONG)
            except CancelledError:
                ends[k].append("cancelled")
                assert rid not in store
            except ProcessorError:
                ends[k].append("failed")
                assert rid not in store
            else:
                ends[k].append("completed")
                assert store.take(rid) is not None

    with ProcessorPool(Obedient(), workers=4, queue_size=50, store=store, timeout=30.0) as pool:
        threads = [threading.Thread(target=client, args=(k,), daemon=True) for k in range(n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        until(lambda: pool.counters["running"] == 0)
        counters = pool.counters
    every = [end for mine in ends for end in mine]
    assert len(every) == n_threads * each
    for outcome in ("completed", "failed", "cancelled"):
        assert counters[outcome] == every.count(outcome)
    assert counters["submitted"] == len(every)
    assert counters["queued"] == 0
    assert len(store) == 0


def test_of_cancel_and_completion_exactly_one_wins():
    store = ResultStore()
    with ProcessorPool(Obedient(), workers=2, store=store) as pool:
        for i in range(300):
            future = pool.submit(work(str(i)))
            if i % 3:
                time.sleep(0.00002 * (i % 10))
            if pool.cancel(str(i)):
                assert future.cancelled()
            else:
                assert future.result(LONG)
            until(lambda: pool.counters["running"] == 0)
            assert (str(i) in store) is not future.cancelled()

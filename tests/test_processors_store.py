"""ResultStore: park, take once, purge; bounded in entries, bytes and time."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

from fastmm import WireTensor
from fastmm.errors import DuplicateRequest, Overloaded, ProcessorError, ProcessorOverloaded
from fastmm.processors import Processed, ProcessedItem
from fastmm.processors.store import ResultStore, result_nbytes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def processed(nbytes: int = 64) -> Processed:
    item = ProcessedItem(modality="image", features={"pixel_values": np.zeros(nbytes, np.uint8)}, hash="h", spans=[(0, 0)])
    return Processed(prompt_token_ids=[1, 2, 3], items=[item])


def test_a_result_is_taken_once():
    store = ResultStore()
    result = processed()
    store.park("a", result)
    assert "a" in store
    assert store.take("a") is result
    assert store.take("a") is None
    assert "a" not in store
    assert len(store) == 0


def test_an_id_that_was_taken_may_be_parked_again():
    store = ResultStore()
    store.park("a", 1)
    store.take("a")
    store.park("a", 2)
    assert store.take("a") == 2


def test_a_duplicate_id_is_refused_and_the_first_result_stays():
    store = ResultStore()
    store.park("a", "first")
    with pytest.raises(DuplicateRequest, match="'a'"):
        store.park("a", "second")
    assert store.take("a") == "first"
    assert store.counters["duplicates"] == 1


def test_purge_lets_go():
    class Result:
        pass

    store, result = ResultStore(), Result()
    gone = weakref.ref(result)
    store.park("a", result)
    del result
    gc.collect()
    assert gone() is not None
    assert store.purge("a") is True
    gc.collect()
    assert gone() is None
    assert store.purge("a") is False
    assert store.take("a") is None


def test_bounded_in_entries():
    store = ResultStore(max_entries=2)
    store.park("a", 1)
    store.park("b", 2)
    with pytest.raises(ProcessorOverloaded, match="2 results"):
        store.park("c", 3)
    assert "c" not in store
    store.take("a")
    store.park("c", 3)
    assert store.counters["overflows"] == 1


def test_bounded_in_bytes_exactly_at_the_bound_passes():
    store = ResultStore(max_nbytes=200)
    store.park("a", processed(100))
    store.park("b", processed(100))
    with pytest.raises(ProcessorOverloaded, match="pass 200"):
        store.park("c", processed(1))
    store.purge("a")
    store.park("c", processed(100))
    assert store.counters["nbytes"] == 200


def test_none_is_no_result():
    with pytest.raises(ProcessorError, match="None"):
        ResultStore().park("a", None)


def test_full_is_an_overload_as_that_of_a_transport_is():
    with pytest.raises(Overloaded):
        ResultStore(max_entries=0).park("a", 1)


def test_a_result_older_than_its_time_to_live_is_gone():
    clock = Clock()
    store = ResultStore(ttl=10.0, clock=clock)
    store.park("old", 1)
    clock.now += 9.5
    store.park("young", 2)
    clock.now += 0.5
    assert "old" not in store
    assert store.take("old") is None
    assert store.take("young") == 2
    assert store.counters["expired"] == 1
    assert store.counters["nbytes"] == 0


def test_what_expired_makes_room():
    clock = Clock()
    store = ResultStore(max_entries=1, ttl=1.0, clock=clock)
    store.park("a", 1)
    clock.now += 1.0
    store.park("b", 2)
    store.purge("b")
    store.park("a", 3)
    assert store.take("a") == 3


def test_expire_alone_lets_go_of_what_is_too_old():
    clock = Clock()
    store = ResultStore(ttl=5.0, clock=clock)
    for i in range(4):
        store.park(str(i), i)
        clock.now += 1.0
    clock.now = 106.5  # two are older than five seconds
    assert store.expire() == 2
    assert sorted(store.drain()) == ["2", "3"]


def test_without_a_time_to_live_nothing_expires():
    clock = Clock()
    store = ResultStore(ttl=None, clock=clock)
    store.park("a", 1)
    clock.now += 1e12
    assert store.take("a") == 1


def test_drain_gives_everything_once_and_the_store_goes_on():
    store = ResultStore()
    for i in range(5):
        store.park(str(i), i)
    assert store.drain() == {str(i): i for i in range(5)}
    assert store.drain() == {}
    assert store.counters["drained"] == 5
    assert store.counters["nbytes"] == 0
    store.park("0", "again")
    assert store.take("0") == "again"


def test_counters_tell_what_became_of_every_result():
    clock = Clock()
    store = ResultStore(max_entries=5, ttl=10.0, clock=clock)
    for i in range(5):
        store.park(str(i), processed(10))
    with pytest.raises(ProcessorOverloaded):
        store.park("5", processed(10))
    store.take("0")
    store.purge("1")
    clock.now += 10
    store.expire()
    counters = store.counters
    assert counters["parked"] == 5 == counters["taken"] + counters["purged"] + counters["expired"] + counters["drained"]
    assert counters["peak_nbytes"] == 50
    assert counters["entries"] == counters["nbytes"] == 0


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (None, 0),
        ([1, 2, 3], 0),
        ("text", 0),
        (b"abc", 3),
        (np.zeros((3, 4), np.float32), 48),
        ({"a": [np.zeros(5, np.uint8), {"b": (b"12", np.zeros(2, np.int64))}]}, 23),
        (WireTensor("bfloat16", (2, 3), bytes(12)), 12),
        (processed(77), 77),
    ],
    ids=str,
)
def test_bytes_of_a_result_are_those_of_its_tensors(value, nbytes):
    assert result_nbytes(value) == nbytes


def test_bytes_of_torch_tensors_count():
    torch = pytest.importorskip("torch")
    assert result_nbytes([torch.zeros(3, dtype=torch.bfloat16), 1]) == 6


@pytest.mark.parametrize(
    "options",
    [{"max_entries": -1}, {"max_entries": True}, {"max_nbytes": 1.5}, {"ttl": 0}, {"ttl": -1.0}, {"max_entries": None}],
)
def test_options_are_checked(options):
    with pytest.raises(ProcessorError, match="ResultStore"):
        ResultStore(**options)


def test_of_many_threads_exactly_one_takes_each_result():
    store, taken = ResultStore(), [[] for _ in range(8)]
    ids = [str(i) for i in range(2000)]
    barrier = threading.Barrier(9)

    def taker(mine: list[str]) -> None:
        barrier.wait(30)
        left = set(ids)
        while left:
            for rid in list(left):
                if store.take(rid) is not None:
                    mine.append(rid)
                    left.discard(rid)
            left -= {rid for rid in left if rid in done and rid not in store}

    done: set[str] = set()
    threads = [threading.Thread(target=taker, args=(mine,), daemon=True) for mine in taken]
    for thread in threads:
        thread.start()
    barrier.wait(30)
    for rid in ids:
        store.park(rid, rid)
        done.add(rid)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert sorted(rid for mine in taken for rid in mine) == sorted(ids)
    assert store.counters["taken"] == 2000


def test_letting_go_of_a_result_may_come_back_to_the_store():
    """A destructor runs outside the lock: one that uses the store must not hang."""

    class Result:
        def __init__(self, store: ResultStore) -> None:
            self.store = store

        def __del__(self) -> None:
            self.store.purge("other")

    clock = Clock()
    store = ResultStore(ttl=1.0, clock=clock, size=lambda result: 0)
    store.park("a", Result(store))
    clock.now += 2
    done = threading.Thread(target=store.expire, daemon=True)
    done.start()
    done.join(10)
    assert not done.is_alive()

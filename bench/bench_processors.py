"""The pool: what it costs a request beyond the processor's own time, and what a large result costs the parent process.

    python -m bench.bench_processors [--json FILE] [--rounds N]

The first table is a pool over threads. The processor returns at once what it made before, for one image and a prompt of a few
hundred ids, so that all there is to see is the pool: media, extensions, validation, the caller's hashes, store, and the way
to a thread and back.

- "one at a time": submit, wait for the result, take it from the store: two changes of threads lie in it, which are also shown
  alone ("bare executor": the standard library's, with a function that does nothing);
- "64 in flight": as in a server;
- "asyncio, in flight": the same through `asubmit` and an event loop.

The bar is 50 us for a request beyond the processor's own time, which is measured in the same round and taken off.

The second table is a result from another process: by the pool (shared memory), and by the standard `ProcessPoolExecutor`, which
pickles it. Beside it, how many bytes the parent allocated for it (tracemalloc's peak): the payload itself must not be among
them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

from fastmm.processors import Processed, ProcessedItem, ProcessorPool, ResultStore, Work

from .support import Bar, Record, alone, figures, judged, quiet, show_table, warm

OVERHEAD_SECONDS = 50e-6
IN_FLIGHT = 64
SIZES = {"256 KiB": 256 << 10, "4 MiB": 4 << 20, "64 MiB": 64 << 20}
ALLOCATED_MAX = 64 << 10  # bytes that the parent may allocate for a result, whatever its size
HASH = "0123456789abcdef"


class Ready:
    """Gives what it made before."""

    schema = None

    def __init__(self, nbytes: int = 0) -> None:
        self.values = np.ones((max(1, nbytes // 4704), 1176), np.float32)
        self.ids = list(range(100, 500))

    def process(self, work: Work, tokenizer: Any) -> Processed:
        item = ProcessedItem(modality="image", features={"pixel_values": self.values}, hash=HASH, spans=[(10, 265)])
        return Processed(prompt_token_ids=self.ids, items=[item])


class Sized:
    """Makes as many bytes as the text says."""

    schema = None

    def process(self, work: Work, tokenizer: Any) -> Processed:
        return made(int(work.text or 0))


def made(nbytes: int) -> Processed:
    return Ready(nbytes).process(Work(request_id="-"), None)


def nothing() -> None:
    pass


IMAGE = np.zeros((8, 8, 3), np.uint8)


def works(n: int) -> list[Work]:
    return [Work(request_id=f"request-{i}", text="<image> describe", images=[IMAGE], hashes=["0xabc"]) for i in range(n)]


# --- overhead -------------------------------------------------------------------------------------------------------------


def overhead(rounds: int | None) -> list[Record]:
    store, processor = ResultStore(), Ready()
    batch = works(IN_FLIGHT)
    with ProcessorPool(processor, workers=2, store=store) as pool, ThreadPoolExecutor(2) as bare:
        pool.start()

        def own() -> None:
            for work in batch:
                processor.process(work, None)

        def empty() -> None:
            for _ in batch:
                bare.submit(nothing).result()

        def one_at_a_time() -> None:
            for work in batch:
                pool.submit(work).result()
                store.take(work.request_id)

        def in_flight() -> None:
            futures = [pool.submit(work) for work in batch]
            for work, future in zip(batch, futures, strict=True):
                future.result()
                store.take(work.request_id)

        async def gather() -> None:
            await asyncio.gather(*[pool.asubmit(work) for work in batch])
            for work in batch:
                store.take(work.request_id)

        loop = asyncio.new_event_loop()
        ways: dict[str, Callable[[], None]] = {
            "bare executor": empty,
            "one at a time": one_at_a_time,
            f"{IN_FLIGHT} in flight": in_flight,
            "asyncio, in flight": lambda: loop.run_until_complete(gather()),
        }
        seconds = warm({"own": own, **ways}, rounds or 51)
        loop.close()
    per_request = {name: [sample / IN_FLIGHT for sample in samples] for name, samples in seconds.items()}
    beyond = {name: [s - o for s, o in zip(per_request[name], per_request["own"], strict=True)] for name in ways}
    what = {"bench": "processors", "case": "one image", "caches": "warm"}
    records = figures(beyond, **what)
    for name in list(ways)[1:]:
        found = statistics.median(beyond[name])
        records.append(
            {
                "kind": "bar",
                **what,
                "ours": name,
                "theirs": f"{OVERHEAD_SECONDS * 1e6:.0f} us",
                "bar": 1,
                "ratio": OVERHEAD_SECONDS / found,
                "met": found <= OVERHEAD_SECONDS,
            }
        )
    return records


# --- other processes ------------------------------------------------------------------------------------------------------


def crossing(rounds: int | None) -> list[Record]:
    records: list[Record] = []
    context = get_context("spawn")
    with ProcessorPool(Sized, executor="processes", workers=1) as pool, ProcessPoolExecutor(1, mp_context=context) as bare:
        pool.start()
        for case, nbytes in SIZES.items():
            work = Work(request_id="a", text=str(nbytes), images=[IMAGE])
            calls = {
                "pickled": lambda nbytes=nbytes: bare.submit(made, nbytes).result(),
                "fastmm": lambda work=work: pool.submit(work).result(),
                "made here": lambda nbytes=nbytes: made(nbytes),
            }
            what = {"bench": "processors", "case": f"{case} from a process", "caches": "warm"}
            seconds = warm(calls, rounds or 9)
            records += figures(seconds, **what) + judged(seconds, [Bar("fastmm", "pickled")], **what)
            for name in ("pickled", "fastmm"):
                allocated = peak_of(calls[name])
                record = {"kind": "memory", **what, "contender": name, "nbytes": nbytes, "allocated": allocated}
                records.append(record)
                if name == "fastmm":
                    bar = {"theirs": f"{ALLOCATED_MAX >> 10} KiB allocated here", "bar": 1, "ratio": ALLOCATED_MAX / allocated}
                    records.append({"kind": "bar", **what, "ours": name, **bar, "met": allocated <= ALLOCATED_MAX})
    return records


def peak_of(call: Callable[[], Any]) -> int:
    """Bytes that this process had allocated at most, beyond what it had before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        kept = call()
        time.sleep(0.05)  # the executor's threads let go
        peak = tracemalloc.get_traced_memory()[1]
        del kept
        return peak - before
    finally:
        tracemalloc.stop()


def run(rounds: int | None = None) -> list[Record]:
    with quiet():
        return overhead(rounds) + crossing(rounds)


def show(records: list[Record]) -> None:
    show_table([r for r in records if r["case"] == "one image"], "pool beyond the processor")
    show_table([r for r in records if r["case"] != "one image" and r["kind"] != "memory"], "a result from another process")
    for r in records:
        if r["kind"] == "memory":
            print(f"{r['case']:28}{r['contender']:10}{r['allocated'] / 1024:12.0f} KiB allocated by the parent")
    print()


if __name__ == "__main__":
    alone(run, show, "bench_processors", __doc__.partition("\n")[0])

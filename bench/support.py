"""What every benchmark shares: interleaved rounds, ratios within a round, bars, the environment, the table.

A benchmark is a module with ``run(rounds=None) -> list of records`` and ``show(records)``. A record is a dict with ``bench``
(which one), ``kind`` (``"figure"``: something measured; ``"bar"``: a ratio and what it must be) and what belongs to it.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from fastmm._native.cast import available_isas, selected_isa

Record = dict[str, Any]
Call = Callable[[], object]

SAMPLE_SECONDS = 2e-4  # short calls are repeated up to this: the clock does not show, and few samples are interrupted
ROUNDS = 51
COLD_NBYTES = 192 << 20  # of copy traffic before each cold call: nothing of the request is left in a cache


@dataclass(frozen=True)
class Bar:
    """`ours` must be at least `factor` times as quick as `theirs`; None: a ratio to report."""

    ours: str
    theirs: str
    factor: float | None = None


class Evictor:
    """Copies between two buffers, so that the caches hold nothing else afterwards."""

    def __init__(self, nbytes: int = COLD_NBYTES) -> None:
        self.source = np.ones(nbytes // 2, np.uint8)
        self.room = np.zeros(nbytes // 2, np.uint8)

    def __call__(self) -> None:
        np.copyto(self.room, self.source)


@contextmanager
def quiet() -> Iterator[None]:
    """One torch thread and no garbage collector, as `timeit` does it."""
    import torch

    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


def seconds_of(call: Call, times: int) -> float:
    """Of one call, the mean over `times`; what it returns is dropped inside the measure."""
    repeats = range(times)
    start = time.perf_counter()
    for _ in repeats:
        call()
    return (time.perf_counter() - start) / times


def warm(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of one call, per contender and round; in each round every contender in turn, A B A B."""
    repeats = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        repeats[name] = max(1, min(100_000, round(SAMPLE_SECONDS / max(seconds_of(call, 1), 1e-8))))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()  # its own state of the caches
            seconds[name].append(seconds_of(call, repeats[name]))
    return seconds


def nothing() -> None:
    pass


def cold(calls: dict[str, Call], rounds: int, evict: Evictor) -> dict[str, list[float]]:
    """The same, with `evict` before each single call. The clock, and Python's way into a call, are made warm again: they
    would cost either side some microseconds that are not its own."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            evict()
            for _ in range(3):
                seconds_of(nothing, 1)
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], ours: str, theirs: str) -> float:
    """How many times as quick: the median of the ratios within a round."""
    return statistics.median(t / o for o, t in zip(seconds[ours], seconds[theirs], strict=True))


def figures(seconds: dict[str, list[float]], **what: Any) -> list[Record]:
    """One record per contender: median, and spread (half the distance of the quartiles, as a fraction)."""
    records = []
    for name, samples in seconds.items():
        low, middle, high = statistics.quantiles(samples, n=4)
        records.append({"kind": "figure", **what, "contender": name, "seconds": middle, "spread": (high - low) / 2 / middle})
    return records


def judged(seconds: dict[str, list[float]], bars: Sequence[Bar], **what: Any) -> list[Record]:
    """One record per bar whose contenders were there."""
    records = []
    for bar in bars:
        if bar.ours in seconds and bar.theirs in seconds:
            reached = ratio(seconds, bar.ours, bar.theirs)
            met = None if bar.factor is None else reached >= bar.factor
            records.append(
                {"kind": "bar", **what, "ours": bar.ours, "theirs": bar.theirs, "bar": bar.factor, "ratio": reached, "met": met}
            )
    return records


def show_table(records: list[Record], title: str) -> None:
    """Microseconds, a row per case, a column per contender; beside it the ratios and their bars."""
    cases = dict.fromkeys((r["case"], r["caches"]) for r in records if "case" in r)
    names = list(dict.fromkeys(r["contender"] for r in records if r["kind"] == "figure"))
    width = max((len(case) for case, _ in cases), default=0) + 6
    print(f"{title + ', us (spread)':{width}}" + "".join(f"{name:>20}" for name in names) + "   ratio")
    for case, caches in cases:
        mine = [r for r in records if r.get("case") == case and r.get("caches") == caches]
        cells = {r["contender"]: f"{r['seconds'] * 1e6:.2f} ({r['spread']:.0%})" for r in mine if r["kind"] == "figure"}
        print(f"{case + ' ' + caches:{width}}" + "".join(f"{cells.get(name, ''):>20}" for name in names), end="   ")
        print("; ".join(claim(r, names) for r in mine if r["kind"] == "bar"))
    print()


def claim(record: Record, names: list[str]) -> str:
    text = f"{record['ratio']:.2f}x"
    if len(names) > 2:
        text = f"{record['ours']} {text} {record['theirs']}"
    if record["bar"] is None:
        return text
    return f"{text} bar {record['bar']:g} {'met' if record['met'] else 'MISSED'}"


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def environment() -> dict[str, str]:
    """CPU, instruction set, versions: what a figure is worth nothing without."""
    found = {
        "cpu": cpu_model(),
        "isa": selected_isa(),
        "isas": " ".join(available_isas()),
        "python": platform.python_version(),
    }
    for package in ("fastmm", "numpy", "torch", "ml_dtypes", "msgspec", "vllm", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def alone(run: Callable[..., list[Record]], show: Callable[[list[Record]], None], name: str, about: str) -> None:
    """The command line of one benchmark."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=about)
    parser.add_argument("--json", type=Path, help="write the records and the environment here")
    parser.add_argument("--rounds", type=int, help="rounds per case")
    options = parser.parse_args()
    described = environment()
    print("  ".join(f"{key} {value}" for key, value in described.items()))
    records = run(rounds=options.rounds)
    show(records)
    if options.json:
        options.json.write_text(json.dumps({"environment": described, "records": records}, indent=1) + "\n")

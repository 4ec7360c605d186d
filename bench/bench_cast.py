"""Casting float32: fastmm's kernels beside torch, numpy and ml_dtypes, and beside the roof, a read-only sum.

    python -m bench.bench_cast [--json FILE] [--rounds N] [--sizes 0.06,1.2,4.8,19,105]

Every contender's result is compared with the rule's before anything is timed. Then rounds: in each, every contender in turn
runs once untimed, which gives it its own state of the caches, and once timed. One thread. The figures are medians over the
rounds, in GB/s of float32 read; the spread is half the distance of the quartiles. A bar is judged by the median of the
ratios within a round.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastmm._native.cast import _cast_buffer, available_isas, cast, selected_isa

KIB64, MB1, MB5, MB19, MB105 = 64 << 10, 256 * 1176 * 4, 1024 * 1176 * 4, 4096 * 1176 * 4, 100 << 20
SIZES = (KIB64, MB1, MB5, MB19, MB105)
SAMPLE_SECONDS = 2e-4  # short calls are repeated up to this, so that the clock does not show


@dataclass
class Contender:
    """`run(n)` does the work n times; `result()` gives the bits it makes of fresh input, for the check."""

    name: str
    run: Callable[[int], object]
    result: Callable[[], np.ndarray] | None = None


@dataclass(frozen=True)
class Bar:
    """`ours` must be at least `factor` times as quick as `theirs` for sizes within the bounds."""

    ours: str
    theirs: str
    factor: float
    smallest: int
    largest: int


def bars(best: str) -> list[Bar]:
    """Those of PERFORMANCE.md, "Casting"."""
    found = [
        Bar("cast() in place bf16", "torch .to bf16", 1.8, MB1, MB5),
        Bar("cast() in place bf16", "torch .to bf16", 1.4, MB19, MB19),
        Bar("cast() in place bf16", "torch copy_ bf16", 1.15, MB105, MB105),
        Bar(f"{best} in place bf16", "read-only sum", 0.65, KIB64, MB105),
        Bar(f"{best} in place f16", "read-only sum", 0.65, KIB64, MB105),
        Bar("cast() in place f16", "numpy astype f16", 25, KIB64, MB5),
    ]
    if "avx2" in available_isas():
        found += [
            Bar("avx2 in place bf16", "torch .to bf16", 1.0, KIB64, MB105),
            Bar("avx2 in place f16", "torch .to f16", 1.0, KIB64, MB105),
        ]
    return found


def roof() -> ctypes.CDLL | None:
    """The read-only sum and a plain memcpy in C; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "roof.so")
        source = Path(__file__).with_name("roof.c")
        subprocess.run([compiler, "-O3", "-w", "-shared", "-fPIC", source, "-o", library], check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.fmm_bench_sum.restype = ctypes.c_float
    loaded.fmm_bench_sum.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    loaded.fmm_bench_copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    return loaded


def repeated(call: Callable[[], object]) -> Callable[[int], object]:
    def run(times: int) -> None:
        for _ in range(times):
            call()

    return run


def contenders(nbytes: int) -> list[Contender]:
    """Everything that is timed at one size, over one source and one warm destination per element type."""
    import torch

    nelem = nbytes // 4
    fresh = np.random.default_rng(1).standard_normal(nelem, np.float32)
    # 64-byte aligned, as pixel values are. What is cast in place has memory of its own: its numbers are rubbish after the
    # first round, which is the same to the vector kernels but not to the peers.
    torch_source, torch_handed_over = torch.from_numpy(fresh).clone(), torch.from_numpy(fresh).clone()
    source, handed_over = torch_source.numpy(), torch_handed_over.numpy()
    torch_warm = {"bf16": torch.zeros(nelem, dtype=torch.bfloat16), "f16": torch.zeros(nelem, dtype=torch.float16)}
    torch_types = {"bf16": torch.bfloat16, "f16": torch.float16}
    names = {"bf16": "bfloat16", "f16": "float16"}
    all_of_it: list[Contender] = []

    def add(name: str, run: Callable[[int], object], result: Callable[[], Any] | None = None) -> None:
        def bits() -> np.ndarray:
            made = result()
            raw = made.view(torch.int16).numpy() if isinstance(made, torch.Tensor) else made
            return raw.reshape(-1).view(np.uint16)[:nelem].copy()

        all_of_it.append(Contender(name, run, bits if result else None))

    library = roof()
    if library is not None:
        room = np.zeros(nbytes, np.uint8)
        add("read-only sum", lambda n: library.fmm_bench_sum(source.ctypes.data, nbytes, n))
        add("memcpy", lambda n: library.fmm_bench_copy(room.ctypes.data, source.ctypes.data, nbytes, n))
    for short, long in names.items():
        warm = torch_warm[short].view(torch.int16).numpy()
        for isa in available_isas():

            def over_itself(isa: str = isa, long: str = long) -> np.ndarray:
                scratch = fresh.copy()
                _cast_buffer(scratch, scratch, "float32", long, isa=isa)
                return scratch

            def kernel(n: int, isa: str = isa, long: str = long) -> None:
                _cast_buffer(handed_over, handed_over, "float32", long, isa=isa, repeat=n)

            def kernel_out(n: int, isa: str = isa, long: str = long, warm: np.ndarray = warm) -> None:
                _cast_buffer(source, warm, "float32", long, isa=isa, repeat=n)

            if isa != "scalar":
                add(f"{isa} in place {short}", kernel, over_itself)
            add(f"{isa} to a warm buffer {short}", kernel_out)
        dtype, room_torch = torch_types[short], torch_warm[short]
        add(
            f"cast() in place {short}",
            repeated(lambda long=long: cast(torch_handed_over, long, inplace=True)),
            lambda long=long: cast(torch.from_numpy(fresh.copy()), long, inplace=True),
        )
        add(
            f"cast() out= {short}",
            repeated(lambda long=long, room_torch=room_torch: cast(torch_source, long, out=room_torch)),
            lambda long=long, room_torch=room_torch: cast(torch.from_numpy(fresh), long, out=room_torch),
        )
        add(
            f"cast() pooled {short}",
            repeated(lambda long=long: cast(torch_source, long)),
            lambda long=long: cast(torch.from_numpy(fresh), long),
        )
        add(
            f"torch .to {short}",
            repeated(lambda dtype=dtype: torch_source.to(dtype)),
            lambda dtype=dtype: torch.from_numpy(fresh).to(dtype),
        )
        add(
            f"torch copy_ {short}",
            repeated(lambda room_torch=room_torch: room_torch.copy_(torch_source)),
            lambda room_torch=room_torch: room_torch.copy_(torch.from_numpy(fresh)),
        )
    add("numpy astype f16", repeated(lambda: source.astype(np.float16)), lambda: fresh.astype(np.float16))
    try:
        import ml_dtypes
    except ImportError:
        pass
    else:
        brain = ml_dtypes.bfloat16
        add("ml_dtypes astype bf16", repeated(lambda: source.astype(brain)), lambda: fresh.astype(brain))
    return all_of_it


def check(entered: list[Contender]) -> None:
    """All results of one target type are the same bits; the input holds no NaN, about which the peers differ."""
    for short in ("bf16", "f16"):
        results = {c.name: c.result() for c in entered if c.result is not None and c.name.endswith(" " + short)}
        first, want = next(iter(results.items()))
        for name, got in results.items():
            if not np.array_equal(got, want):
                raise SystemExit(f"not timed: {name} and {first} give different bits")


def measure(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of one call, per contender and round."""
    entered = contenders(nbytes)
    check(entered)
    seconds: dict[str, list[float]] = {c.name: [] for c in entered}
    repeats = {}
    for c in entered:
        c.run(2)
        start = time.perf_counter()
        c.run(1)
        repeats[c.name] = max(1, min(1000, round(SAMPLE_SECONDS / max(time.perf_counter() - start, 1e-7))))
    for _ in range(rounds):
        for c in entered:
            c.run(1)
            start = time.perf_counter()
            c.run(repeats[c.name])
            seconds[c.name].append((time.perf_counter() - start) / repeats[c.name])
    return seconds


def ratio(seconds: dict[str, list[float]], ours: str, theirs: str) -> float:
    return statistics.median(t / o for o, t in zip(seconds[ours], seconds[theirs], strict=True))


def run(sizes: tuple[int, ...] = SIZES, rounds: int | None = None) -> list[dict[str, Any]]:
    """One record per size and contender: ``gbps``, ``spread`` (a fraction), ``of_roof``; and one per bar and size."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    try:
        for nbytes in sizes:
            seconds = measure(nbytes, rounds or (11 if nbytes > MB19 else 25 if nbytes > MB1 else 51))
            for name, samples in seconds.items():
                low, middle, high = statistics.quantiles(samples, n=4)
                records.append(
                    {
                        "bench": "cast",
                        "kind": "figure",
                        "nbytes": nbytes,
                        "contender": name,
                        "seconds": middle,
                        "gbps": nbytes / middle * 1e-9,
                        "spread": (high - low) / 2 / middle,
                        "of_roof": ratio(seconds, name, "read-only sum") if "read-only sum" in seconds else None,
                    }
                )
            for bar in bars(available_isas()[0]):
                if bar.smallest <= nbytes <= bar.largest and bar.ours in seconds and bar.theirs in seconds:
                    reached = ratio(seconds, bar.ours, bar.theirs)
                    records.append(
                        {
                            "bench": "cast",
                            "kind": "bar",
                            "nbytes": nbytes,
                            "ours": bar.ours,
                            "theirs": bar.theirs,
                            "bar": bar.factor,
                            "ratio": reached,
                            "met": reached >= bar.factor,
                        }
                    )
    finally:
        torch.set_num_threads(threads)
    return records


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def environment() -> dict[str, str]:
    import torch

    versions = {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__}
    return {"cpu": cpu_model(), "isa": selected_isa(), "isas": " ".join(available_isas()), **versions}


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB"


def show(records: list[dict[str, Any]]) -> None:
    figures = [r for r in records if r["kind"] == "figure"]
    sizes = sorted({r["nbytes"] for r in figures})
    print(f"{'GB/s of float32 read (spread)':32}" + "".join(f"{megabytes(size):>16}" for size in sizes))
    for name in dict.fromkeys(r["contender"] for r in figures):
        cells = {r["nbytes"]: f"{r['gbps']:.1f} ({r['spread']:.0%})" for r in figures if r["contender"] == name}
        print(f"{name:32}" + "".join(f"{cells.get(size, ''):>16}" for size in sizes))
    print()
    for r in records:
        if r["kind"] == "bar":
            verdict = "met" if r["met"] else "MISSED"
            claim = f"{r['ours']:26} {r['ratio']:6.2f} x {r['theirs']:18} bar {r['bar']:5.2f}"
            print(f"{megabytes(r['nbytes']):>9}  {claim}  {verdict}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the records and the environment here")
    parser.add_argument("--rounds", type=int, help="rounds per size; by default 11 to 51")
    parser.add_argument("--sizes", help="source sizes in MB, by default those of PERFORMANCE.md")
    options = parser.parse_args(arguments)
    sizes = tuple(int(float(s) * 1e6) // 256 * 256 for s in options.sizes.split(",")) if options.sizes else SIZES
    described = environment()
    print("  ".join(f"{key} {value}" for key, value in described.items()))
    records = run(sizes, options.rounds)
    show(records)
    if options.json:
        options.json.write_text(json.dumps({"environment": described, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Casting float32: fastmm's kernels beside torch, numpy and ml_dtypes, and beside the roof, a read-only sum.

Every result is compared with the others' before anything is timed. Figures are GB/s of float32 read, one thread. Kernels by
the name of their instruction set are called without `cast()` around them, the small ones many times in one call; `cast()`
is what a user calls.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fastmm._native.cast import _cast_buffer, available_isas, cast

from .support import Bar, Call, Record, alone, figures, judged, quiet, ratio, warm

KIB64, MB1, MB5, MB19, MB105 = 64 << 10, 256 * 1176 * 4, 1024 * 1176 * 4, 4096 * 1176 * 4, 100 << 20
ROUNDS = {KIB64: 51, MB1: 51, MB5: 25, MB19: 25, MB105: 11}
ROOF, COPY = "read-only sum", "memcpy"
TYPES = {"bf16": "bfloat16", "f16": "float16"}
KERNEL_REPEATS = {KIB64: 32}  # in one call from Python, which costs as much as the cast itself


def bars(nbytes: int) -> list[Bar]:
    """Those of PERFORMANCE.md, "Casting"."""
    best = available_isas()[0]
    found = [Bar(f"{best} in place {short}", ROOF, 0.65) for short in TYPES]
    if nbytes <= MB5:
        found += [Bar(f"{ours} in place f16", "numpy astype f16", 25) for ours in (best, "cast()")]
    if nbytes in (MB1, MB5):
        found += [Bar(f"{ours} in place bf16", "torch .to bf16", 1.8) for ours in (best, "cast()")]
    if nbytes == MB19:
        found += [Bar(f"{ours} in place bf16", "torch .to bf16", 1.4) for ours in (best, "cast()")]
    if nbytes == MB105:
        found += [Bar(f"{ours} in place bf16", "torch copy_ bf16", 1.15) for ours in (best, "cast()")]
    if "avx2" in available_isas():
        found += [Bar(f"avx2 in place {short}", f"torch .to {short}", 1.0) for short in TYPES]
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


class Contenders:
    """Everything that is timed at one size: `calls`, how often each does its work in one call, and its result."""

    def __init__(self, nbytes: int) -> None:
        import torch

        nelem = nbytes // 4
        self.fresh = np.random.default_rng(1).standard_normal(nelem, np.float32)
        # 64-byte aligned, as pixel values are. What is cast in place has memory of its own: its numbers are rubbish after
        # the first round, which is the same to the vector kernels but not to the peers.
        self.source = torch.from_numpy(self.fresh).clone()
        self.handed_over = self.source.clone()
        self.handed_to_kernels = self.source.clone().numpy()
        self.calls: dict[str, Call] = {}
        self.times: dict[str, int] = {}
        self.results: dict[str, Callable[[], Any]] = {}
        self.add_roof(nbytes, KERNEL_REPEATS.get(nbytes, 1))
        for short in TYPES:
            self.add_kernels(short, KERNEL_REPEATS.get(nbytes, 1))
            self.add_cast(short)
            self.add_torch(short)
        self.add_numpy()

    def add(self, name: str, call: Call, result: Callable[[], Any] | None = None, times: int = 1) -> None:
        self.calls[name], self.times[name] = call, times
        if result is not None:
            self.results[name] = result

    def warm_room(self, short: str) -> Any:
        import torch

        return torch.zeros(self.fresh.size, dtype=getattr(torch, TYPES[short]))

    def add_roof(self, nbytes: int, times: int) -> None:
        library = roof()
        if library is None:
            return
        self.room = np.zeros(nbytes, np.uint8)
        source, room = self.source.data_ptr(), self.room.ctypes.data
        self.add(ROOF, lambda: library.fmm_bench_sum(source, nbytes, times), times=times)
        self.add(COPY, lambda: library.fmm_bench_copy(room, source, nbytes, times), times=times)

    def add_kernels(self, short: str, times: int) -> None:
        import torch

        name, room = TYPES[short], self.warm_room(short).view(torch.int16).numpy()
        source, handed_over = self.source.numpy(), self.handed_to_kernels

        def over_itself(isa: str) -> np.ndarray:
            scratch = self.fresh.copy()
            _cast_buffer(scratch, scratch, "float32", name, isa=isa)
            return scratch

        def run(isa: str, src: np.ndarray, dst: np.ndarray) -> Call:
            return lambda: _cast_buffer(src, dst, "float32", name, isa=isa, repeat=times)

        for isa in available_isas():
            self.add(f"{isa} to a warm buffer {short}", run(isa, source, room), times=times)
            if isa != "scalar":
                self.add(f"{isa} in place {short}", run(isa, handed_over, handed_over), lambda isa=isa: over_itself(isa), times)

    def add_cast(self, short: str) -> None:
        import torch

        name, room, fresh = TYPES[short], self.warm_room(short), torch.from_numpy(self.fresh)
        self.add(
            f"cast() in place {short}",
            lambda: cast(self.handed_over, name, inplace=True),
            lambda: cast(fresh.clone(), name, inplace=True),
        )
        self.add(f"cast() out= {short}", lambda: cast(self.source, name, out=room), lambda: cast(fresh, name, out=room))
        self.add(f"cast() pooled {short}", lambda: cast(self.source, name), lambda: cast(fresh, name))

    def add_torch(self, short: str) -> None:
        import torch

        dtype, room, fresh = getattr(torch, TYPES[short]), self.warm_room(short), torch.from_numpy(self.fresh)
        self.add(f"torch .to {short}", lambda: self.source.to(dtype), lambda: fresh.to(dtype))
        self.add(f"torch copy_ {short}", lambda: room.copy_(self.source), lambda: room.copy_(fresh))

    def add_numpy(self) -> None:
        source = self.source.numpy()
        self.add("numpy astype f16", lambda: source.astype(np.float16), lambda: self.fresh.astype(np.float16))
        try:
            import ml_dtypes
        except ImportError:
            return
        brain = ml_dtypes.bfloat16
        self.add("ml_dtypes astype bf16", lambda: source.astype(brain), lambda: self.fresh.astype(brain))

    def check(self) -> None:
        """All results of one type are the same bits; the input holds no NaN, about which the peers differ."""
        for short in TYPES:
            want = None
            for name, result in self.results.items():
                if name.endswith(" " + short):
                    got = bits_of(result(), self.fresh.size)
                    if want is not None and not np.array_equal(got, want):
                        raise SystemExit(f"not timed: {name} gives other bits than the contenders before it")
                    want = got


def bits_of(tensor: Any, nelem: int) -> np.ndarray:
    import torch

    array = tensor.view(torch.int16).numpy() if isinstance(tensor, torch.Tensor) else tensor
    return array.reshape(-1).view(np.uint16)[:nelem].copy()


def run(rounds: int | None = None) -> list[Record]:
    """Per size: a figure for every contender (``gbps``, ``of_roof``), and the bars."""
    records: list[Record] = []
    with quiet():
        for nbytes, usual_rounds in ROUNDS.items():
            entered = Contenders(nbytes)
            entered.check()
            seconds = warm(entered.calls, max(2, rounds or usual_rounds))
            seconds = {name: [s / entered.times[name] for s in samples] for name, samples in seconds.items()}
            what = {"bench": "cast", "nbytes": nbytes}
            for record in figures(seconds, **what):
                record["gbps"] = nbytes / record["seconds"] * 1e-9
                record["of_roof"] = ratio(seconds, record["contender"], ROOF) if ROOF in seconds else None
                records.append(record)
            records += judged(seconds, bars(nbytes), **what)
    return records


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB"


def show(records: list[Record]) -> None:
    measured = [r for r in records if r["kind"] == "figure"]
    sizes = sorted({r["nbytes"] for r in measured})
    print(f"{'cast float32, GB/s (spread)':32}" + "".join(f"{megabytes(size):>16}" for size in sizes))
    for name in dict.fromkeys(r["contender"] for r in measured):
        cells = {r["nbytes"]: f"{r['gbps']:.1f} ({r['spread']:.0%})" for r in measured if r["contender"] == name}
        print(f"{name:32}" + "".join(f"{cells.get(size, ''):>16}" for size in sizes))
    print()
    for r in records:
        if r["kind"] == "bar":
            claim = f"{r['ours']:26} {r['ratio']:6.2f} x {r['theirs']:18} bar {r['bar']:5.2f}"
            print(f"{megabytes(r['nbytes']):>9}  {claim}  {'met' if r['met'] else 'MISSED'}")
    print()


if __name__ == "__main__":
    alone(run, show, "bench_cast", __doc__.partition("\n")[0])

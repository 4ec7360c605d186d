"""``fastmm doctor``: what this machine has, what fastmm makes of it, and whether it works."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fastmm
from fastmm._native.encoder import THRESHOLD_VARIABLE, default_threshold
from fastmm._native.pool import pool_stats

REQUIRED = ("numpy", "pyzmq", "msgpack")
# What is lost without them.
OPTIONAL = {
    "torch": "decode with tensors='numpy' or 'wire'",
    "ml_dtypes": "numpy then has no bfloat16: such tensors decode as WireTensor",
    "vllm": "needed by make test-vllm and make bench only",
}

DESCRIPTION = (
    "Say what this machine has and what fastmm makes of it, and try a small request. Ends with 1 where something is wrong."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    findings: dict[str, str] = {}
    problems: list[str] = []
    for label, find in FINDERS.items():
        try:
            findings[label] = find()
        except Exception as error:  # a doctor reports what it finds, whatever it is
            findings[label] = "see below"
            problems.append(f"{label}: {type(error).__name__}: {error}")
    if arguments.json:
        print(json.dumps({"findings": findings, "problems": problems}, indent=2))
    else:
        width = max(map(len, findings)) + 2
        for label, finding in findings.items():
            print(f"{label:<{width}}{finding}")
        print()
        print("\n".join(f"PROBLEM  {problem}" for problem in problems) or "all well")
    return 1 if problems else 0


def find_fastmm() -> str:
    return f"{fastmm.__version__}, in {Path(fastmm.__file__).parent}"


def find_python() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}, {platform.system()} {platform.machine()}"


def find_cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or 'unknown'}, {os.cpu_count()} logical cores"


def find_instruction_sets() -> str:
    forced = os.environ.get("FASTMM_ISA")
    why = f"forced by FASTMM_ISA={forced}" if forced else "the best of them"
    return f"{', '.join(fastmm.available_isas())}; {fastmm.selected_isa()} is used, {why}"


def find_threshold() -> str:
    source = f"from {THRESHOLD_VARIABLE}" if os.environ.get(THRESHOLD_VARIABLE) else "the default"
    return f"tensors of {default_threshold()} bytes and more get a frame of their own ({source})"


def find_pool() -> str:
    return f"keeps at most {pool_stats()['idle_limit_nbytes']:,} bytes of idle buffers for casts out of place"


def find_package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if name in REQUIRED:
            raise
        return f"not installed; {OPTIONAL[name]}"


def find_torch() -> str:
    if importlib.util.find_spec("torch") is None:
        return find_package("torch")
    import torch

    # Without it every tensor goes through __dlpack__, which costs microseconds instead of tens of nanoseconds.
    fast = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    return f"{torch.__version__}, its tensors read through " + (
        "the DLPack C exchange API" if fast else "__dlpack__, the slow way"
    )


def find_request() -> str:
    values = np.linspace(-2, 2, 4096, dtype=np.float32)
    feature = fastmm.MmFeatureSpec(
        data={"pixel_values": fastmm.MmFieldElem(values.copy(), fastmm.MmBatchedField())},
        modality="image",
        identifier="doctor",
        mm_position=fastmm.PlaceholderRange(0, 4),
    )
    request = fastmm.EngineCoreRequest("doctor", [1, 2, 3, 4], [feature])
    arrived: Any = fastmm.decode_request(fastmm.encode_request(request, dtype="float16"), tensors="numpy")
    data = [feature.data["pixel_values"].data for feature in arrived.mm_features or [] if feature.data is not None]
    if len(data) != 1 or not np.array_equal(data[0], values.astype(np.float16)):
        raise ValueError("a small request came back with other values than were sent: please report this")
    return f"cast to float16, encoded, decoded, {values.size:,} values compared: equal"


FINDERS: dict[str, Callable[[], str]] = {
    "fastmm": find_fastmm,
    "Python": find_python,
    "CPU": find_cpu,
    "instruction sets": find_instruction_sets,
    **{name: lambda name=name: find_package(name) for name in REQUIRED},  # type: ignore[misc]
    "torch": find_torch,
    **{name: lambda name=name: find_package(name) for name in OPTIONAL if name != "torch"},  # type: ignore[misc]
    "threshold": find_threshold,
    "pool": find_pool,
    "a small request": find_request,
}

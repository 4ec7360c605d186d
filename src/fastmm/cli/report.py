"""What the demo saw, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def milliseconds(nanoseconds: float) -> float:
    return round(nanoseconds / 1e6, 4)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell, two spaces between them."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_report(report: dict[str, Any]) -> None:
    print_table(
        ["photograph", "size", "resized to", "patches", "grid", "prompt tokens"],
        [
            [
                Path(photograph["path"]).name,
                "{} x {}".format(*photograph["original_size"]),
                "{} x {}".format(*photograph["size"]),
                f"{photograph['patches']:,}",
                "{} x {} x {}".format(*photograph["grid_thw"]),
                f"{photograph['prompt_tokens']:,}",
            ]
            for photograph in report["photographs"]
        ],
    )
    print()
    for label, value in rows_of(report):
        print(f"{label:<16}{value}")
    print()
    print(verdict_of(report))


def rows_of(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    main, *aux = report["frames_nbytes"]
    spent, casting = report["milliseconds"], report["nbytes_cast"] > 0
    patches = sum(photograph["patches"] for photograph in report["photographs"])
    yield "patches", f"{patches:,} of 14 x 14 x 3 x 2 values, in {held_by(report['tensors'])}"
    if casting:
        how = "in place" if report["inplace"] else "into pooled buffers"
        yield "cast", f"float32 to {report['dtype']}, {how}, by the kernel {report['kernel']}"
    else:
        yield "cast", "none: the patches are float32 already"
    yield "frames", f"main ({main:,} bytes) and {len(aux)} aux ({sum(aux):,} bytes)"
    if aux:
        yield "", f"{report['frames_at_tensors']} of {len(aux)} start at the tensor's own address"
    yield "bytes viewed", f"{report['nbytes_viewed']:,}"
    yield "bytes copied", f"{report['nbytes_copied']:,}"
    yield "bytes cast", f"{report['nbytes_cast']:,}"
    yield "times", f"medians of {report['rounds']} rounds"
    if casting:
        yield "  cast", f"{spent['cast']:.3f} ms, alone, on a copy that is warm in the caches"
    yield "  encode", f"{spent['encode']:.3f} ms" + (", the cast included" if casting else "")
    yield "  decode", f"{spent['decode']:.3f} ms"
    yield "  arrive", f"{spent['arrive']:.3f} ms, from generate() until process {report['processes'][1]} had every frame"
    yield "  answer", f"{spent['answer']:.3f} ms, from generate() until its answer was here"
    for picture in report["pictures"]:
        level = picture["largest_difference"]
        yield "painted", f"{picture['path']}, at most {level} of 255 grey levels from the photograph"


def verdict_of(report: dict[str, Any]) -> str:
    if report["equal"]:
        return f"equal: all {report['values']:,} values that arrived, to the photographs' own values {report['reference']}"
    faults = [f"{report['differing']:,} of {report['values']:,} values differ"] if report["differing"] else []
    return "NOT EQUAL: " + "; ".join([*faults, *report["faults"]])


def held_by(tensors: str) -> str:
    if tensors == "torch":
        import torch

        return f"torch {torch.__version__} tensors"
    return f"numpy {np.__version__} arrays" if tensors == "numpy" else "fastmm's WireTensors"

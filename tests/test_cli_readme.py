"""What README.md shows is what happens."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest

import fastmm
from fastmm.cli.report import rows_of

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@needs_torch
def test_every_python_block_runs_and_prints_what_the_next_block_says() -> None:
    blocks = [(match[1], match[2]) for match in BLOCK.finditer(README)]
    names: dict[str, object] = {}
    ran = 0
    for (language, source), (next_language, wanted) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language != "python":
            continue
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(source, "README.md", "exec"), names)
        assert next_language == "text"
        assert said.getvalue() == wanted
        ran += 1
    assert ran >= 2


def test_the_example_is_short() -> None:
    (example, *_others) = [match[2] for match in BLOCK.finditer(README) if match[1] == "python"]
    assert len(example.strip().splitlines()) <= 16


def test_the_demos_output_has_the_rows_that_the_demo_prints() -> None:
    shown = next(match[2] for match in BLOCK.finditer(README) if "photograph" in match[2])
    report = {
        "photographs": [{"patches": 1296}],
        "frames_nbytes": [2000, 3048192],
        "frames_at_tensors": 1,
        "nbytes_viewed": 1,
        "nbytes_copied": 1,
        "nbytes_cast": 1,
        "dtype": "bfloat16",
        "inplace": True,
        "kernel": "avx512",
        "tensors": "wire",
        "milliseconds": {"cast": 1.0, "encode": 1.0, "decode": 1.0, "arrive": 1.0, "answer": 1.0},
        "rounds": 5,
        "processes": [1, 2],
        "pictures": [{"path": "a.png", "largest_difference": 1}],
    }
    _head, rows, _verdict = shown.split("\n\n")
    assert [line[:16].strip() for line in rows.splitlines()] == [label.strip() for label, _value in rows_of(report)]


@pytest.mark.no_asan  # starts make and awk
def test_every_make_target_that_is_named_exists() -> None:
    named = set(re.findall(r"(?:`|^    )make ([a-z-]+)", README, re.MULTILINE))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert named <= set(targets)


def test_every_file_that_is_named_exists() -> None:
    for name in re.findall(r"`((?:src|include|tests|bench|\.ci)/[^`*]*)`", README):
        assert (ROOT / name).exists(), name


def test_every_public_name_that_is_used_exists() -> None:
    for name in re.findall(r"fastmm\.([A-Za-z_]+)\(", README):
        assert hasattr(fastmm, name), name

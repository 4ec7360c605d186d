"""``fastmm inspect``: the structure of stored frames as a tree, without what they carry."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fastmm
from fastmm.dtypes import item_nbytes

from .errors import CommandError

# Positional messages, by the name of their type: what stands at which place.
POSITIONS = {
    "request": tuple(field.name for field in dataclasses.fields(fastmm.EngineCoreRequest)),
    "outputs": tuple(field.name for field in dataclasses.fields(fastmm.EngineCoreOutputs)),
    "plain": (),
}
# Names, hashes and kinds: the strings that say what a message is, and nothing of what a user wrote.
SHOWN = {"request_id", "external_req_id", "modality", "identifier", "mm_hash"}
FIELD_KINDS = ("batched", "flat", "shared")
FEW = 8

DESCRIPTION = """\
Show what stored frames hold: the tree of the main frame, with types and shapes of tensors and the frames they point to.
Token ids, texts and tensor data are not shown. `fastmm demo --keep-frames DIR` makes frames to try it on.
"""
EPILOG = "example:\n  fastmm inspect kept/frame-*"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("frames", nargs="+", type=Path, metavar="FILE", help="one frame each, the main frame first")
    parser.add_argument(
        "--type",
        choices=POSITIONS,
        default="request",
        help="what the main frame is, for the names of its places (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        frames = [path.read_bytes() for path in arguments.frames]
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}; give the files of one message, main frame first") from None
    try:
        tree = fastmm.Decoder(None).decode(frames)
    except fastmm.DecodeError as error:
        raise CommandError(f"these frames are no message: {error}", exit_code=1) from None
    for index, (path, frame) in enumerate(zip(arguments.frames, frames, strict=True)):
        print(f"frame {index}  {len(frame):>13,} bytes  {path}")
    print()
    names = POSITIONS[arguments.type]
    if names and not isinstance(tree, list):
        raise CommandError(
            f"the main frame is {kind_of(tree)}, not the array of {arguments.type}: take --type plain", exit_code=1
        )
    items = named(tree, names) if names else [("$", tree)]
    for name, value in items:
        print("\n".join(lines_of(name, value)))
    return 0


def named(values: Sequence[Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for index, value in enumerate(values):
        yield (names[index] if index < len(names) else f"[{index}]"), value


def lines_of(name: str, value: Any, indent: str = "") -> Iterator[str]:
    """One value as lines: on one where it is small, else a line and its parts below it."""
    short = summary(name, value)
    if short is not None:
        yield f"{indent}{name}: {short}"
        return
    yield f"{indent}{name}: {kind_of(value)}"
    parts = value.items() if isinstance(value, dict) else ((f"[{index}]", item) for index, item in enumerate(value))
    for key, part in parts:
        yield from lines_of(str(key), part, indent + "  ")


def summary(name: str, value: Any) -> str | None:
    """A value in one line, or None where its parts want lines of their own."""
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, str):
        return json.dumps(value) if name in SHOWN else f"text of {len(value)} characters"
    if isinstance(value, (bytes, memoryview)):
        return f"{len(value):,} bytes"
    if (tensor := tensor_of(value)) is not None:
        return tensor
    if isinstance(value, (list, dict)) and not value:
        return f"empty {kind_of(value).split()[0]}"
    if isinstance(value, list):
        if len(value) == 2 and value[0] in FIELD_KINDS and isinstance(value[1], dict):
            return field_of(value[0], value[1])
        if all(isinstance(item, (int, float)) or item is None for item in value):
            return f"{len(value):,} numbers"
    return None


def tensor_of(value: Any) -> str | None:
    """What a ``[dtype, shape, data]`` is; None where `value` is not one."""
    if not (isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and isinstance(value[1], list)):
        return None
    dtype, shape, data = value
    if not all(type(extent) is int for extent in shape):
        return None
    try:
        nbytes = math.prod(shape) * item_nbytes(dtype)
    except fastmm.FastmmError:
        return None
    where = f"in frame {data}" if type(data) is int else "inline" if isinstance(data, (bytes, memoryview)) else "elsewhere"
    return f"tensor {dtype} {shape}, {nbytes:,} bytes, {where}"


def field_of(kind: str, members: dict[str, Any]) -> str:
    """How an element is joined with those of other items."""
    said = [kind]
    for name, value in members.items():
        if isinstance(value, list):
            said.append(f"{name} {json.dumps(value)}" if len(value) <= FEW else f"{len(value)} {name}")
        else:
            said.append(f"{name} {json.dumps(value)}")
    return ", ".join(said)


def kind_of(value: Any) -> str:
    if isinstance(value, dict):
        return f"map of {len(value)}"
    return f"array of {len(value)}" if isinstance(value, list) else type(value).__name__

"""``fastmm demo``: a photograph becomes a request, crosses to a second process, and is painted back there."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

import fastmm
from fastmm.schema import EngineCoreRequestType
from fastmm.transport import bind_router, engine_identity, private_directory, receive_frames, send_frames

from .errors import CommandError
from .photograph import Photograph, find_photograph, load_photograph
from .report import milliseconds, print_report
from .request import RANK, TENSORS, WARM_UP, bytes_of, choose_tensors, leaf_of, request_for

DTYPES = ("bfloat16", "float16", "float32")
NEVER_A_FRAME = 1 << 62  # a threshold that no tensor reaches
# The second process imports torch, which takes long on a busy machine with cold disks.
START_S, ANSWER_S = 120.0, 120.0

DESCRIPTION = """\
Cut photographs into the patches that Qwen2-VL takes, make one request of them, cast it to bfloat16, encode it, send it
over ZMQ to a second process, decode it there, compare every value, and paint the pictures back from what arrived.
"""
EPILOG = """\
examples:
  fastmm demo                             the astronaut of scikit-image
  fastmm demo holiday.jpg coffee          a file of yours, and the cup of scikit-image
  fastmm demo --inline --json             patches inside the main frame; figures as JSON

It ends with 0 when every value that arrived is the right one, 1 when not, 2 when it was given what it cannot use.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "photographs",
        nargs="*",
        default=["astronaut"],
        metavar="PHOTOGRAPH",
        help="path of a picture, or the name of one that scikit-image ships: astronaut, chelsea, coffee, rocket, "
        "hubble_deep_field... (default: astronaut)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("fastmm-demo"),
        metavar="DIR",
        help="where the painted pictures go; made when missing (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="what the patches are cast to (default: %(default)s)"
    )
    parser.add_argument(
        "--no-inplace", action="store_true", help="cast into a pooled buffer, and leave the patches as they are"
    )
    parser.add_argument(
        "--inline", action="store_true", help="write the patches into the main frame instead of frames of their own"
    )
    parser.add_argument(
        "--tensors",
        choices=TENSORS,
        help="what holds the patches on both sides (default: torch where installed, else numpy with ml_dtypes, else wire: "
        "fastmm's WireTensor)",
    )
    parser.add_argument("--keep-frames", type=Path, metavar="DIR", help="also write each frame to a file, for fastmm inspect")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    paths = [find_photograph(word) for word in arguments.photographs]
    photographs = [load_photograph(path) for path in paths]
    tensors = choose_tensors(arguments.tensors)
    pictures = picture_paths(photographs, arguments.output)
    for directory in filter(None, (arguments.output, arguments.keep_frames)):
        make_directory(directory)
    with private_directory() as directory:
        settings = {
            "socket": str(directory / "front-end"),
            "photographs": [str(path) for path in paths],
            "pictures": [str(path) for path in pictures],
            "request_id": f"demo-{os.getpid()}",
            "dtype": arguments.dtype,
            "tensors": tensors,
        }
        report = send_and_hear(arguments, settings, photographs)
    report["photographs"] = [
        {
            "path": str(path),
            "original_size": photograph.original_size,
            "size": (photograph.pixels.shape[1], photograph.pixels.shape[0]),
            "patches": photograph.patch_count,
            "grid_thw": photograph.grid_thw,
            "prompt_tokens": photograph.token_count,
        }
        for path, photograph in zip(paths, photographs, strict=True)
    ]
    report["equal"] = not report["differing"] and not report["faults"]
    print(json.dumps(report, indent=2)) if arguments.json else print_report(report)
    return 0 if report["equal"] else 1


def picture_paths(photographs: Sequence[Photograph], directory: Path) -> list[Path]:
    """A file name for each picture; the second of the same name gets a number."""
    seen: dict[str, int] = {}
    paths = []
    for photograph in photographs:
        count = seen[photograph.name] = seen.get(photograph.name, 0) + 1
        paths.append(directory / (f"{photograph.name}.png" if count == 1 else f"{photograph.name}-{count}.png"))
    return paths


def make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{directory}: cannot be made: {error.strerror}; give another directory") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise CommandError(f"{directory}: cannot be written to; give another directory")


def send_and_hear(arguments: argparse.Namespace, settings: dict[str, Any], photographs: Sequence[Photograph]) -> dict[str, Any]:
    """Start the second process, send it the request, and return what both sides saw."""
    dtype, inplace, tensors = arguments.dtype, not arguments.no_inplace, settings["tensors"]
    encoder = fastmm.Encoder(dtype=dtype, inplace=inplace, threshold=NEVER_A_FRAME if arguments.inline else None)
    with bind_router(Path(settings["socket"])) as socket:
        command = [sys.executable, "-m", "fastmm.cli.painter", json.dumps(settings)]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as painter:
            try:

                def hear(timeout_s: float) -> dict[str, Any]:
                    _identity, answer = receive_frames(socket, timeout_s, lambda: painter.poll() is None)
                    heard: dict[str, Any] = msgpack.unpackb(answer.bytes)
                    if "failed" in heard:
                        raise CommandError(f"the second process could not read the request: {heard['failed']}", exit_code=1)
                    return heard

                address = [engine_identity(RANK), EngineCoreRequestType.ADD.value]
                request = request_for(photographs, settings["request_id"], tensors)
                hear(START_S)
                # One just like it goes first, so that the times below are not those of first calls and fresh memory.
                twin = request_for(photographs, WARM_UP, tensors)
                send_frames(socket, [*address, *encoder.encode(twin)])
                hear(ANSWER_S)

                cast_ns = cast_alone_ns(request, dtype, inplace, tensors)
                before = encoder.counters
                encode_ns, frames = timed(lambda: encoder.encode(request))
                counters = {name: value - before[name] for name, value in encoder.counters.items()}
                sent_ns = time.monotonic_ns()
                send_frames(socket, [*address, *frames])
                heard = hear(ANSWER_S)
            except BaseException:
                painter.kill()
                raise
    if arguments.keep_frames:
        for index, frame in enumerate(frames):
            (arguments.keep_frames / f"frame-{index:04}").write_bytes(frame)
    return {
        "request_id": request.request_id,
        "prompt_tokens": len(request.prompt_token_ids or ()),
        "dtype": dtype,
        "inplace": inplace,
        "inline": arguments.inline,
        "tensors": tensors,
        "kernel": fastmm.selected_isa(),
        "frames_nbytes": [memoryview(frame).nbytes for frame in frames],
        "frames_at_tensors": frames_at_tensors(request, frames),
        "nbytes_viewed": counters["nbytes_viewed"],
        "nbytes_copied": counters["nbytes_copied"],
        "nbytes_cast": counters["nbytes_cast"],
        "processes": (os.getpid(), painter.pid),
        "milliseconds": {
            "cast": milliseconds(cast_ns),
            "encode": milliseconds(encode_ns),
            "send": milliseconds(heard["received_ns"] - sent_ns),  # CLOCK_MONOTONIC is one clock for both processes
            "decode": milliseconds(heard["decode_ns"]),
        },
        **{name: heard[name] for name in ("pictures", "values", "differing", "faults", "reference")},
    }


def timed(work: Callable[[], Any]) -> tuple[int, Any]:
    begun_ns = time.monotonic_ns()
    result = work()
    return time.monotonic_ns() - begun_ns, result


def patches_in(request: fastmm.EngineCoreRequest) -> list[Any]:
    return [feature.data["pixel_values"].data for feature in request.mm_features or () if feature.data]


def cast_alone_ns(request: fastmm.EngineCoreRequest, dtype: str, inplace: bool, tensors: str) -> int | None:
    """Time of casting copies of the request's patches the way that encoding will; None where there is nothing to cast."""
    if dtype == "float32":
        return None
    copies = [leaf_of(bytes_of(leaf).copy().view(np.float32), tensors) for leaf in patches_in(request)]
    return timed(lambda: [fastmm.cast(copy, dtype, inplace=inplace) for copy in copies])[0]


def frames_at_tensors(request: fastmm.EngineCoreRequest, frames: Sequence[Any]) -> int:
    """How many aux frames start at the very address of one of the request's own tensors."""
    addresses = {bytes_of(leaf).ctypes.data for leaf in patches_in(request)}
    return sum(frame.address in addresses for frame in frames[1:])

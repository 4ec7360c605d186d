"""``fastmm demo``: a photograph becomes a request, crosses to a second process, and is painted back there."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from .errors import CommandError
from .photograph import Photograph, find_photograph, load_photograph
from .report import print_report
from .request import TENSORS, choose_tensors

DTYPES = ("bfloat16", "float16", "float32")

DESCRIPTION = """\
Cut photographs into the patches that Qwen2-VL takes and make one request of them. An AsyncEngineClient casts it to the
engine's bfloat16, encodes it and sends it over ZMQ; an EngineServer in a second process decodes it. Compare every value
there, and paint the pictures back from what arrived.
"""
EPILOG = """\
examples:
  fastmm demo                             the astronaut of scikit-image
  fastmm demo holiday.jpg coffee          a file of yours, and the cup of scikit-image
  fastmm demo --processor patches         the request made by a processor of another package (see examples/)
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
    parser.add_argument(
        "--processor",
        metavar="NAME",
        help="let a processor make the request, in a pool: an entry point of fastmm.processors, or module:attribute, that "
        "makes Qwen2-VL's patches (such as examples/patch-processor)",
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
    settings = {
        "photographs": [str(path) for path in paths],
        "pictures": [str(path) for path in pictures],
        "request_id": "demo",
        "dtype": arguments.dtype,
        "tensors": tensors,
        "processor": arguments.processor,
    }
    from .front_end import exchange  # here, and not above: help and the other commands need no zmq

    report, frames = exchange(photographs, settings, inplace=not arguments.no_inplace, inline=arguments.inline)
    if arguments.keep_frames:
        for index, frame in enumerate(frames):
            (arguments.keep_frames / f"frame-{index:04}").write_bytes(frame)
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
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
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

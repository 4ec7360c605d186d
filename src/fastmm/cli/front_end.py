"""The demo's first process: makes the request, encodes and sends it, and hears what the second process made of it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np

import fastmm
from fastmm.schema import EngineCoreRequestType
from fastmm.transport import bind_router, engine_identity, private_directory, receive_frames, send_frames

from .errors import CommandError
from .photograph import Photograph
from .report import milliseconds
from .request import RANK, REHEARSAL, bytes_of, leaf_of, request_for

NEVER_A_FRAME = 1 << 62  # a threshold that no tensor reaches
# The second process imports torch, which takes long on a busy machine with cold disks.
PATIENCE_S = 120.0
# How often a request just like the real one goes first: times of first calls and fresh memory say little.
ROUNDS = 5


class SecondProcess:
    """The painter, from the front end's side."""

    def __init__(self, socket: Any, process: subprocess.Popen[bytes]) -> None:
        self.socket = socket
        self.process = process

    def send(self, frames: Sequence[Any]) -> None:
        send_frames(self.socket, [engine_identity(RANK), EngineCoreRequestType.ADD.value, *frames])

    def hear(self) -> dict[str, Any]:
        _identity, answer = receive_frames(self.socket, PATIENCE_S, lambda: self.process.poll() is None)
        heard: dict[str, Any] = msgpack.unpackb(answer.bytes)
        if "failed" in heard:
            raise CommandError(f"the second process could not use the request: {heard['failed']}", exit_code=1)
        return heard


@contextmanager
def second_process(settings: dict[str, Any]) -> Iterator[SecondProcess]:
    """Start the painter; it has ended when the block has, by itself or not."""
    with private_directory() as directory:
        path = directory / "front-end"
        command = [sys.executable, "-m", "fastmm.cli.painter", json.dumps({**settings, "socket": str(path)})]
        with bind_router(path) as socket, subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
            try:
                yield SecondProcess(socket, process)
            except BaseException:
                process.kill()
                raise


def exchange(
    photographs: Sequence[Photograph], settings: dict[str, Any], *, inplace: bool, inline: bool
) -> tuple[dict[str, Any], list[Any]]:
    """Send the photographs to a second process.

    Parameters
    ----------
    photographs
        What the request shows.
    settings
        What the second process must know: ``photographs`` and ``pictures`` (paths), ``request_id``, ``dtype``, ``tensors``.

    Returns
    -------
    report, frames
        What both sides saw and measured, and the message itself.
    """
    dtype, tensors = settings["dtype"], settings["tensors"]
    encoder = fastmm.Encoder(dtype=dtype, inplace=inplace, threshold=NEVER_A_FRAME if inline else None)
    times: list[dict[str, int]] = []
    with second_process(settings) as painter:
        painter.hear()  # it is ready
        for name in [REHEARSAL] * ROUNDS + [settings["request_id"]]:
            request = request_for(photographs, name, tensors)  # a new one each time: a cast in place can be done once
            spent = {"cast": cast_alone_ns(request, dtype, inplace, tensors)}
            before = encoder.counters
            begun_ns = time.monotonic_ns()
            frames = encoder.encode(request)
            sent_ns = time.monotonic_ns()
            spent["encode"] = sent_ns - begun_ns
            painter.send(frames)
            heard = painter.hear()
            spent["send"] = heard["received_ns"] - sent_ns  # the monotonic clock is one for both processes
            spent["decode"] = heard["decode_ns"]
            times.append(spent)
    times = times[1:]  # the first is to warm up
    after = encoder.counters
    report = {
        "request_id": request.request_id,
        "prompt_tokens": len(request.prompt_token_ids or ()),
        "dtype": dtype,
        "inplace": inplace,
        "inline": inline,
        "tensors": tensors,
        "kernel": fastmm.selected_isa(),
        "frames_nbytes": [memoryview(frame).nbytes for frame in frames],
        "frames_at_tensors": frames_at_tensors(request, frames),
        "nbytes_viewed": after["nbytes_viewed"] - before["nbytes_viewed"],
        "nbytes_copied": after["nbytes_copied"] - before["nbytes_copied"],
        "nbytes_cast": after["nbytes_cast"] - before["nbytes_cast"],
        "processes": (os.getpid(), painter.process.pid),
        "rounds": len(times),
        "milliseconds": {step: milliseconds(statistics.median(spent[step] for spent in times)) for step in times[0]},
        **{name: heard[name] for name in ("pictures", "values", "differing", "faults", "reference")},
    }
    return report, frames


def patches_in(request: fastmm.EngineCoreRequest) -> list[Any]:
    return [feature.data["pixel_values"].data for feature in request.mm_features or () if feature.data]


def cast_alone_ns(request: fastmm.EngineCoreRequest, dtype: str, inplace: bool, tensors: str) -> int:
    """Time of casting copies of the request's patches the way that encoding will."""
    copies = [leaf_of(bytes_of(leaf).copy().view(np.float32), tensors) for leaf in patches_in(request)]
    begun_ns = time.monotonic_ns()
    for copy in copies:
        fastmm.cast(copy, dtype, inplace=inplace)
    return time.monotonic_ns() - begun_ns


def frames_at_tensors(request: fastmm.EngineCoreRequest, frames: Sequence[Any]) -> int:
    """How many aux frames start at the very address of one of the request's own tensors."""
    addresses = {bytes_of(leaf).ctypes.data for leaf in patches_in(request)}
    return sum(frame.address in addresses for frame in frames[1:])

"""The demo's first process: makes the request, has a client send it to the second process, and hears what that made of it."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

import fastmm
from fastmm.transport import AsyncEngineClient

from .errors import CommandError
from .photograph import Photograph
from .report import milliseconds
from .request import REHEARSAL, bytes_of, leaf_of, request_for

NEVER_A_FRAME = 1 << 62  # a threshold that no tensor reaches
# The second process imports torch, which takes long on a busy machine with cold disks.
PATIENCE_S = 120.0
# How often a request just like the real one goes first: times of first calls and fresh memory say little.
ROUNDS = 5


@asynccontextmanager
async def second_process(client: AsyncEngineClient, settings: dict[str, Any]) -> AsyncIterator[int]:
    """Start the painter, and the client when the painter is there: its process id. It has ended when the block has."""
    told = json.dumps({**settings, "handshake": client.bind()})
    command = [sys.executable, "-m", "fastmm.cli.painter", told]
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    try:
        ended, started = asyncio.ensure_future(process.wait()), asyncio.ensure_future(client.start())
        done, _ = await asyncio.wait([ended, started], return_when=asyncio.FIRST_COMPLETED)
        if started not in done:
            await client.close()
            await asyncio.wait([started])
            started.exception()  # that it was closed
            raise CommandError(f"the second process ended before it was ready, with exit status {ended.result()}", exit_code=1)
        await started
        try:
            yield process.pid
        except fastmm.EngineDead:
            raise CommandError(f"the second process ended before it answered, with exit status {await ended}", 1) from None
        await client.close()  # the painter then ends by itself
        await ended
    finally:
        await client.close()
        if process.returncode is None:
            process.kill()
            await process.wait()


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
    return asyncio.run(exchange_async(photographs, settings, inplace, inline))


async def exchange_async(
    photographs: Sequence[Photograph], settings: dict[str, Any], inplace: bool, inline: bool
) -> tuple[dict[str, Any], list[Any]]:
    dtype, tensors = settings["dtype"], settings["tensors"]
    threshold = NEVER_A_FRAME if inline else None
    # The client casts to the dtype that the engine says is its own. This encoder does what the client's does, to be looked at.
    client = AsyncEngineClient(startup_timeout=PATIENCE_S, inplace=inplace, threshold=threshold)
    encoder = fastmm.Encoder(dtype=dtype, inplace=inplace, threshold=threshold)
    times: list[dict[str, int]] = []
    async with request_maker(photographs, settings) as new_request, second_process(client, settings) as painter:
        for name in [REHEARSAL] * ROUNDS + [settings["request_id"]]:
            request = await new_request(name)  # a new one each time: a cast in place can be done once
            spent = {"cast": cast_alone_ns(request, dtype, inplace, tensors)}
            before = encoder.counters
            begun_ns = time.monotonic_ns()
            frames = encoder.encode(request)
            spent["encode"] = time.monotonic_ns() - begun_ns
            frames_kept = request, frames

            request = await new_request(name)
            begun_ns = time.monotonic_ns()
            async for output in client.generate(request):
                if output.error is not None:
                    raise CommandError(f"the second process could not use the request: {output.error.message}", exit_code=1)
            spent["answer"] = time.monotonic_ns() - begun_ns
            heard = await client.call_utility("report", timeout=PATIENCE_S)
            spent["arrive"] = heard["received_ns"] - begun_ns  # the monotonic clock is one for both processes
            spent["decode"] = heard["decode_ns"]
            times.append(spent)
        await client.ledger.await_done(PATIENCE_S)
    times = times[1:]  # the first is to warm up
    after = encoder.counters
    request, frames = frames_kept
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
        "nbytes_in_flight": client.ledger.counters["inflight_nbytes"],
        "processes": (os.getpid(), painter),
        "rounds": len(times),
        "milliseconds": {step: milliseconds(statistics.median(spent[step] for spent in times)) for step in times[0]},
        **{name: heard[name] for name in ("pictures", "values", "differing", "faults", "reference")},
    }
    return report, frames


@asynccontextmanager
async def request_maker(
    photographs: Sequence[Photograph], settings: dict[str, Any]
) -> AsyncIterator[Callable[[str], Awaitable[fastmm.EngineCoreRequest]]]:
    """What makes the request of a name: the demo itself, or the processor that was named."""
    if settings["processor"] is None:

        async def made_here(name: str) -> fastmm.EngineCoreRequest:
            return request_for(photographs, name, settings["tensors"])

        yield made_here
        return
    from .processing import Processing

    with Processing(settings["processor"], [Path(path) for path in settings["photographs"]], settings["tensors"]) as made:
        yield made.request


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

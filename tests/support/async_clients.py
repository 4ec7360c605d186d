"""`AsyncEngineClient`s with engines of `raw_engine`, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np

from fastmm import EngineCoreRequest, SamplingParams
from fastmm.transport import AsyncEngineClient

from .clients import LIMIT
from .raw_engine import READY, raw_engine
from .requests import request as mm_request

ONE = SamplingParams(max_tokens=1)


@contextlib.asynccontextmanager
async def driven(engines: int = 1, *, ready: Any = READY, **options: Any) -> AsyncIterator[tuple[Any, list[Any]]]:
    """A client with its engines."""
    client = AsyncEngineClient(engines=engines, startup_timeout=LIMIT, **options)
    with contextlib.ExitStack() as stack:
        address = client.bind()
        processes = [stack.enter_context(raw_engine(address, rank, ready)) for rank in range(engines)]
        async with client:
            yield client, processes


def within_limit(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A coroutine as a test, on a loop of its own."""

    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 3 * LIMIT))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    for name in ("pytestmark", "__signature__"):
        if hasattr(test, name):
            setattr(run, name, getattr(test, name))
    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return run


async def tokens(outputs: Any) -> list[int]:
    return [token async for output in outputs for token in output.new_token_ids]


async def seen(client: AsyncEngineClient, what: str, rank: int | None = None) -> list[Any]:
    return [entry[1:] for entry in await client.call_utility("seen", rank=rank, timeout=LIMIT) if entry[0] == what]


async def aborted(client: AsyncEngineClient) -> list[str]:
    """The ids whose abort the engine saw, once it saw any."""
    deadline = time.monotonic() + LIMIT
    while not (aborts := await seen(client, "abort")) and time.monotonic() < deadline:
        pass
    return [request_id for (ids,) in aborts for request_id in ids]


def large(request_id: str, nbytes: int = 4 << 20, **more: Any) -> EngineCoreRequest:
    return mm_request(np.ones(nbytes // 4, np.float32), request_id=request_id, sampling_params=ONE, **more)

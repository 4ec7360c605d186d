"""Clients with engines of `raw_engine`, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fastmm import EngineCoreRequest, SamplingParams
from fastmm.transport import EngineClient

from .raw_engine import READY, raw_engine

LIMIT = 20.0  # seconds that anything may take


def text(request_id: str, *, max_tokens: int = 3, ids: Any = (1, 2), **more: Any) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, list(ids), sampling_params=SamplingParams(max_tokens=max_tokens), **more)


@contextmanager
def driven(
    engines: int = 1, *, handshake: str | None = None, ready: Any = READY, **options: Any
) -> Iterator[tuple[Any, list[Any]]]:
    """A client with its engines."""
    client = EngineClient(handshake, engines=engines, startup_timeout=LIMIT, **options)
    with ExitStack() as stack:
        address = client.bind()
        processes = [stack.enter_context(raw_engine(address, rank, ready)) for rank in range(engines)]
        with client:
            yield client, processes


def tokens(outputs: Any) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def seen(client: EngineClient, what: str, rank: int | None = None) -> list[Any]:
    return [entry[1:] for entry in client.call_utility("seen", rank=rank, timeout=LIMIT) if entry[0] == what]

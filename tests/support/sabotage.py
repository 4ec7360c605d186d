"""An encoder that breaks some messages, in place of a client's own."""

from __future__ import annotations

from typing import Any

import pytest

import fastmm
from fastmm.transport import core


def break_requests(monkeypatch: pytest.MonkeyPatch, prefix: str, frames: str) -> None:
    """Clients made from now on send requests whose id begins with `prefix` with a frame lost, or with ``"more"`` than there are."""

    class Saboteur:
        def __init__(self, **options: Any) -> None:
            self._encoder = fastmm.Encoder(**options)

        def encode(self, request: Any) -> list[Any]:
            written = self._encoder.encode(request)
            if not request.request_id.startswith(prefix):
                return written
            return written[:-1] if frames == "lost" else [*written, b"one more"]

    monkeypatch.setattr(core, "Encoder", Saboteur)

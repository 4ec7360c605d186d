"""The two classes that take the place of vLLM's, put together as this process is to run them."""

from __future__ import annotations

import os
import sys
from typing import Any

from . import counters, guard, shadow
from .tolerant import is_core, tolerant


def classes(mode: str) -> dict[str, type]:
    """Make the encoder and the decoder for ``on`` or ``shadow``, by the names that vLLM gives them."""
    encoder: Any = shadow.ShadowEncoder if mode == "shadow" else guard.GuardedEncoder
    decoder: Any = shadow.ShadowDecoder if mode == "shadow" else guard.GuardedDecoder
    if counters.directory():
        counters.open_file()
        os.register_at_fork(after_in_child=counters.open_file)
        encoder, decoder = counted_encoder(encoder), counted_decoder(decoder)
    return {"MsgpackEncoder": _named("MsgpackEncoder", encoder), "MsgpackDecoder": _by_place(decoder)}


def counted_encoder(base: Any) -> Any:
    """The same encoder, each message counted."""

    class CountedEncoder(base):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            counters.add(counters.encoders)

        def encode(self, obj: Any) -> Any:
            counters.add(counters.encoded)
            return super().encode(obj)

        def encode_into(self, obj: Any, buf: bytearray) -> Any:
            counters.add(counters.encoded)
            return super().encode_into(obj, buf)

    return CountedEncoder


def counted_decoder(base: Any) -> Any:
    """The same decoder, each message counted."""

    class CountedDecoder(base):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            counters.add(counters.decoders)

        def decode(self, bufs: Any) -> Any:
            counters.add(counters.decoded)
            return super().decode(bufs)

    return CountedDecoder


def _by_place(base: Any) -> Any:
    """The decoder, and the tolerant one of it where the engine core's module makes it.

    The module decides, not the name it was given: the API server's process loads the plugin before it imports the engine core,
    and the engine core forked from it never loads the plugin.
    """

    class MsgpackDecoder(base):  # type: ignore[misc]
        def __new__(cls, *arguments: Any, **named: Any) -> Any:
            made = tolerating if cls is MsgpackDecoder and is_core(sys._getframe(1).f_globals) else cls
            return super().__new__(made)

    tolerating = tolerant(MsgpackDecoder)
    return MsgpackDecoder


def _named(name: str, base: Any) -> type:
    return type(name, (base,), {"__module__": __name__})

"""The two classes that take the place of vLLM's, put together as this process is to run them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from . import counters, guard, shadow
from .tolerant import is_core, tolerant


def classes(mode: str, made_one: Callable[[], None]) -> dict[str, Any]:
    """Make the encoder and the decoder for ``on`` or ``shadow``, by the names that vLLM gives them.

    ``made_one`` is called each time that vLLM makes one.
    """
    encoder: Any = shadow.ShadowEncoder if mode == "shadow" else guard.GuardedEncoder
    decoder: Any = shadow.ShadowDecoder if mode == "shadow" else guard.GuardedDecoder
    if counters.directory():
        counters.open_file()
        os.register_at_fork(after_in_child=counters.open_file)
        encoder, decoder = counted_encoder(encoder), counted_decoder(decoder)
    return {"MsgpackEncoder": _outermost_encoder(encoder, made_one), "MsgpackDecoder": _outermost_decoder(decoder, made_one)}


def counted_encoder(base: Any) -> Any:
    """The same encoder, each message counted."""

    class CountedEncoder(base):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            counters.name_process()
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
            counters.name_process()
            counters.add(counters.decoders)

        def decode(self, bufs: Any) -> Any:
            counters.add(counters.decoded)
            return super().decode(bufs)

    return CountedDecoder


def _outermost_encoder(base: Any, made_one: Callable[[], None]) -> Any:
    class MsgpackEncoder(base):  # type: ignore[misc]
        def __init__(self, size_threshold: int | None = None, oob_tensor_consumer: Any = None) -> None:
            made_one()
            super().__init__(size_threshold, oob_tensor_consumer)

    return MsgpackEncoder


def _outermost_decoder(base: Any, made_one: Callable[[], None]) -> Any:
    """The decoder, and the tolerant one of it where the engine core's module makes it.

    The module decides, not the name it was given: the API server's process loads the plugin before it imports the engine core,
    and the engine core forked from it never loads the plugin.
    """

    class MsgpackDecoder(base):  # type: ignore[misc]
        def __new__(cls, *arguments: Any, **named: Any) -> Any:
            made = tolerating if cls is MsgpackDecoder and is_core(sys._getframe(1).f_globals) else cls
            return super().__new__(made)

        def __init__(self, t: Any | None = None, share_mem: bool = True, oob_tensor_provider: Any = None) -> None:
            made_one()
            super().__init__(t, share_mem, oob_tensor_provider)

    tolerating = tolerant(MsgpackDecoder)
    return MsgpackDecoder

"""The small messages: what a client sends an engine beside requests, and the frame with which an engine says that it is dead.

Frames here are those behind the type's: a client sends ``[engine, type, *frames]``, an engine reads ``[type, *frames]``.
Nothing here touches a socket, and everything may be used from any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgpack

from ..codec import Decoder, Encoder
from ..errors import DecodeError, SchemaError
from ..schema import EngineCoreRequestType

ADD: bytes = EngineCoreRequestType.ADD.value
ABORT: bytes = EngineCoreRequestType.ABORT.value
START_DP_WAVE: bytes = EngineCoreRequestType.START_DP_WAVE.value
UTILITY: bytes = EngineCoreRequestType.UTILITY.value

# Alone in its message, and no msgpack: 0x45 would be the number 69.
ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"


class UtilityCall(NamedTuple):
    """A method that a client wants called in the engine's process, and whom to answer."""

    client_index: int
    call_id: int
    method: str
    args: list[Any]


class StartWave(NamedTuple):
    """Engines of a data-parallel group that are idle begin `wave`, but for one that has begun it already."""

    wave: int
    exclude_engine: int | None


@functools.cache
def _encoder() -> Encoder:
    return Encoder(dedup=False)  # byte for byte what vLLM writes


@functools.cache
def _ids_decoder() -> Decoder:
    return Decoder(list[str])


@functools.cache
def _plain_decoder() -> Decoder:
    return Decoder(None)


def read_request_type(frame: Any) -> EngineCoreRequestType:
    """What kind of message a client's first frame announces.

    Raises
    ------
    DecodeError
        It is none of the four that travel between processes.
    """
    try:
        return EngineCoreRequestType(bytes(frame))
    except ValueError:
        size = memoryview(frame).nbytes
        raise DecodeError(f"expected a request type, one byte from 0 to 3, got another or {size} bytes") from None


def is_engine_dead(frames: Sequence[Any]) -> bool:
    """Whether an engine's message says that the engine ended with an error."""
    if len(frames) != 1:
        return False
    view = memoryview(frames[0])
    return view.nbytes == len(ENGINE_CORE_DEAD) and view == ENGINE_CORE_DEAD


# --- abort ------------------------------------------------------------------------------------------------------------


def abort_message(request_ids: Iterable[str]) -> bytes:
    """The frame of an ABORT: the ids of the requests to end. Ids that the engine does not know are no error there."""
    ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
    for request_id in ids:
        if not isinstance(request_id, str):
            raise SchemaError(f"expected request ids that are str, got a {type(request_id).__qualname__}")
    return msgpack.packb(ids)  # type: ignore[no-any-return]


def read_abort(frames: Any) -> list[str]:
    """The ids in an ABORT, from its frame or list of frames. Anything but an array of str is a `DecodeError`."""
    return _ids_decoder().decode(frames)  # type: ignore[no-any-return]


# --- data-parallel waves ----------------------------------------------------------------------------------------------


def start_dp_wave_message(wave: int, exclude_engine: int | None = None) -> bytes:
    """The frame of a START_DP_WAVE; `exclude_engine` is the rank of an engine that runs this wave already."""
    exclude = None if exclude_engine is None else _whole("exclude_engine", exclude_engine)
    return msgpack.packb((_whole("wave", wave), exclude))  # type: ignore[no-any-return]


def read_start_dp_wave(frames: Any) -> StartWave:
    """The wave to start, from the frame of a START_DP_WAVE or a list of one."""
    value = _plain_decoder().decode(frames)
    if type(value) is not list or len(value) != 2:
        raise DecodeError("expected [wave, excluded engine], got another value", frame=0)
    wave, exclude = value
    if type(wave) is not int:
        raise DecodeError(f"expected the number of a wave, got {_kind(wave)}", path="$[0]", frame=0)
    if exclude is not None and type(exclude) is not int:
        raise DecodeError(f"expected the rank of an engine or nil, got {_kind(exclude)}", path="$[1]", frame=0)
    return StartWave(wave, exclude)


# --- utility calls ----------------------------------------------------------------------------------------------------


def utility_message(client_index: int, call_id: int, method: str, args: Sequence[Any] = ()) -> list[Any]:
    """The frames of a UTILITY: have the engine call `method` with `args` and answer `client_index` under `call_id`.

    Arguments may be whatever a request may hold (`LoRARequest` for ``add_lora``, tensors, dataclasses), so the request's
    own encoder writes them, not msgpack: large tensors become aux frames, which keep them until they are sent.
    """
    if type(method) is not str:
        raise SchemaError(f"expected the name of a method, got a {type(method).__qualname__}")
    call = (_whole("client_index", client_index), _whole("call_id", call_id), method, tuple(args))
    return _encoder().encode(call)


def read_utility(frames: Any) -> UtilityCall:
    """The call in a UTILITY, from its frames.

    Arguments come as plain values, as in vLLM: what a class they were is not on the wire, and a tensor among them is the
    list ``[dtype, shape, bytes or index of the frame]``.
    """
    value = _plain_decoder().decode(frames)
    if type(value) is not list or len(value) != 4:
        raise DecodeError("expected [client index, call id, method, arguments], got another value", frame=0)
    client_index, call_id, method, args = value
    for place, number, what in ((0, client_index, "the index of a client"), (1, call_id, "the id of a call")):
        if type(number) is not int:
            raise DecodeError(f"expected {what}, got {_kind(number)}", path=f"$[{place}]", frame=0)
    if type(method) is not str:
        raise DecodeError(f"expected the name of a method, got {_kind(method)}", path="$[2]", frame=0)
    if type(args) is not list:
        raise DecodeError(f"expected an array of arguments, got {_kind(args)}", path="$[3]", frame=0)
    return UtilityCall(client_index, call_id, method, args)


def _whole(name: str, value: int) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**64:
        raise SchemaError(f"expected {name} to be an int of 64 bits, got {value!r:.40}")
    return value


def _kind(value: object) -> str:
    return "nil" if value is None else f"a {type(value).__name__}"

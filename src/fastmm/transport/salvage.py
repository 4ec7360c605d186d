"""What a request that cannot be decoded still says: who sent it, so that somebody can be told.

An engine answers a broken request as a failed one, instead of ending its input thread, when the main frame's beginning can be
read. Nothing else of the message is looked at, and nothing of it is believed beyond its type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack

CLIENT_INDEX_POSITION = 11  # of the request's array, in every layout since vLLM 0.22 (WIRE: EngineCoreRequest)
MOST_ID_CHARACTERS = 1024  # a longer id is taken for part of the damage
_MOST_CLIENTS = 1 << 16


class Salvaged(NamedTuple):
    """What could be read; None where it could not."""

    request_id: str | None
    client_index: int | None


def salvage_request(main: bytes | bytearray | memoryview, client_index_position: int = CLIENT_INDEX_POSITION) -> Salvaged:
    """Read the request id and the index of its client out of the main frame of a broken request.

    Parameters
    ----------
    main
        The main frame, of any length and content. It is read, not kept; at most once over.
    client_index_position
        Where the layout has ``client_index``.

    Returns
    -------
    Salvaged
        ``request_id`` is None when the frame does not begin as a request does: an array whose first element is a string
        of valid UTF-8. ``client_index`` is None when damage lies before it. Never raises for what the frame contains.
    """
    request_id: str | None = None
    try:
        unpacker, elements = _opened(main)
        first = unpacker.unpack() if elements else None
        if not isinstance(first, str) or not 0 < len(first) <= MOST_ID_CHARACTERS:
            return Salvaged(None, None)
        request_id = first
        if elements <= client_index_position:  # the sender left it out: the default
            return Salvaged(request_id, 0)
        for _ in range(client_index_position - 1):
            unpacker.skip()
        index = unpacker.unpack()
    except Exception:  # every way in which bytes can be no msgpack: OutOfData, ValueError and its kind, RecursionError
        return Salvaged(request_id, None)
    if type(index) is not int or not 0 <= index < _MOST_CLIENTS:
        return Salvaged(request_id, None)
    return Salvaged(request_id, index)


def salvage_call(main: bytes | bytearray | memoryview) -> tuple[int, int] | None:
    """Read client index and call id of a broken utility call; None where it does not begin as one does. Never raises."""
    try:
        unpacker, elements = _opened(main)
        if elements != 4:
            return None
        client_index, call_id = unpacker.unpack(), unpacker.unpack()
    except Exception:
        return None
    fits = type(client_index) is int and type(call_id) is int and 0 <= client_index < _MOST_CLIENTS
    return (client_index, call_id) if fits else None


def salvage_call_id(main: bytes | bytearray | memoryview) -> int | None:
    """Read the id of a broken utility call, under which its caller waits; None where it cannot be read. Never raises."""
    try:
        unpacker, elements = _opened(main)
        if elements < 2:
            return None
        unpacker.skip()
        call_id = unpacker.unpack()
    except Exception:
        return None
    return call_id if type(call_id) is int else None


def _opened(main: bytes | bytearray | memoryview) -> tuple[Any, int]:
    """A reader behind the header of the main frame's array, and how many elements that announces. Raises where it is none."""
    unpacker = msgpack.Unpacker(max_buffer_size=0, strict_map_key=False)
    unpacker.feed(main)
    return unpacker, unpacker.read_array_header()

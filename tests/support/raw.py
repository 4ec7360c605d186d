"""Frames written by hand: what no encoder of ours would write, the decoder must answer all the same."""

from __future__ import annotations

from typing import Any

import msgpack

ELEMENTS = [
    "r",
    [1, 2, 3],
    None,
    None,
    None,
    1.5,
    None,
    None,
    None,
    None,
    None,
    0,
    0,
    0,
    None,
    False,
    None,
    None,
    None,
    False,
    None,
    None,
]
POSITIONS = {"prompt_token_ids": 1, "mm_features": 2, "sampling_params": 3, "pooling_params": 4, "arrival_time": 5,
             "lora_request": 6, "prompt_embeds": 9, "prompt_is_token_ids": 10, "client_index": 11, "trace_headers": 14,
             "resumable": 15, "reasoning_parser_kwargs": 18, "kv_hints": 21}  # fmt: skip


def pack(value: Any) -> bytes:
    """The value as a main frame; tuples are arrays, `msgpack.ExtType` is an ext."""
    packed: bytes = msgpack.packb(value)
    return packed


def elements(**fields: Any) -> list[Any]:
    """A request as the list of its 22 elements."""
    values = list(ELEMENTS)
    for name, value in fields.items():
        values[POSITIONS[name]] = value
    return values


def request(*aux: bytes, **fields: Any) -> list[bytes]:
    """Frames of a request of 22 elements."""
    return [pack(elements(**fields)), *aux]


def raw(data: bytes) -> msgpack.ExtType:
    """Inline tensor data."""
    return msgpack.ExtType(3, data)


BATCHED = ["batched", {"keep_on_cpu": False}]


def feature(data: Any, field: Any = BATCHED, **fields: Any) -> dict[str, Any]:
    """A feature of one element, `pixel_values`."""
    return {
        "data": {"pixel_values": {"data": data, "field": field}},
        "modality": "image",
        "identifier": "i",
        "mm_position": {"offset": 0, "length": 2, "is_embed": None},
        "mm_hash": "h",
    } | fields


def item(*aux: bytes, data: Any = None, field: Any = BATCHED, **fields: Any) -> list[bytes]:
    """Frames of a request with one feature of one element."""
    return request(*aux, mm_features=[feature(data, field, **fields)])

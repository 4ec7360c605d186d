"""Small requests of fastmm's own classes, and a look into their frames that uses nothing of fastmm."""

from __future__ import annotations

from typing import Any

import msgpack

from fastmm import Encoder, EngineCoreRequest, MmBatchedField, MmFeatureSpec, MmFieldElem, PlaceholderRange

RAW_VIEW = 3  # the extension of inline tensor data


def feature(data: Any, *, key: str = "pixel_values", field: Any = None, **more: Any) -> MmFeatureSpec:
    """A feature with one leaf, or one nested list of leaves."""
    defaults: dict[str, Any] = {"modality": "image", "identifier": "i", "mm_position": PlaceholderRange(offset=0, length=1)}
    elem = MmFieldElem(data=data, field=MmBatchedField() if field is None else field)
    return MmFeatureSpec(data={key: elem}, **(defaults | more))


def request(*leaves: Any, **more: Any) -> EngineCoreRequest:
    """A request with one feature for each leaf."""
    defaults: dict[str, Any] = {"request_id": "r", "prompt_token_ids": [1, 2], "arrival_time": 0.0}
    return EngineCoreRequest(mm_features=[feature(leaf) for leaf in leaves] or None, **(defaults | more))


def leaf(of: EngineCoreRequest, index: int = 0, key: str = "pixel_values") -> Any:
    """What now hangs where `request` put a leaf."""
    return of.mm_features[index].data[key].data


def unpacked(frames: Any) -> Any:
    """The tree of the main frame as msgpack sees it."""
    return msgpack.unpackb(memoryview(frames[0]), strict_map_key=False, use_list=True)


def resolve(tensor: Any, frames: Any) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor on the wire with its bytes, inline or from its frame."""
    dtype, shape, data = tensor
    if isinstance(data, msgpack.ExtType):
        assert data.code == RAW_VIEW
        return dtype, tuple(shape), data.data
    assert type(data) is int
    assert 1 <= data < len(frames)
    return dtype, tuple(shape), bytes(memoryview(frames[data]))


def triple(value: Any, **options: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and bytes of a tensor that is encoded alone."""
    frames = Encoder(**({"threshold": 256} | options)).encode(value)
    return resolve(unpacked(frames), frames)


def sent(frames: Any, index: int = 0, key: str = "pixel_values") -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and bytes of a feature's leaf."""
    return resolve(unpacked(frames)[2][index]["data"][key]["data"], frames)


def same_bytes(frames: Any) -> list[bytes]:
    """Frames as bytes, to compare."""
    return [bytes(memoryview(frame)) for frame in frames]

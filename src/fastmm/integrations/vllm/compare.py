"""Are two messages, or two decoded objects, the same: where not, and never what they contain."""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch


def frames_difference(theirs: Sequence[Any], ours: Sequence[Any]) -> str | None:
    """Say where two messages differ; None where they are the same bytes in the same frames."""
    if len(theirs) != len(ours):
        return f"{len(theirs)} frames from vLLM, {len(ours)} from fastmm"
    for number, (a, b) in enumerate(zip(theirs, ours)):
        if difference := _bytes_difference(_flat(a), _flat(b)):
            return f"frame {number} {difference}"
    return None


def _flat(frame: Any) -> memoryview:
    view = memoryview(frame)
    if not view.nbytes:
        return memoryview(b"")
    return view.cast("B") if view.format != "B" or view.ndim != 1 else view


def _bytes_difference(a: memoryview, b: memoryview) -> str | None:
    if a.nbytes != b.nbytes:
        return f"has {a.nbytes} bytes from vLLM, {b.nbytes} from fastmm"
    if not a.nbytes:
        return None
    left, right = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
    if left.ctypes.data == right.ctypes.data or np.array_equal(left, right):
        return None
    return f"differs at byte {int(np.argmax(left != right))} of {a.nbytes}"


def difference(theirs: Any, ours: Any, path: str = "$") -> str | None:
    """Say where two decoded objects first differ, as a path and a reason; None where they are equal.

    Types must be the same, floats the same bits, tensors and arrays of the same dtype, shape and bytes. Where an object is
    used twice in one tree and copied in the other makes no difference.
    """
    if theirs is ours:
        return None
    if type(theirs) is not type(ours):
        return f"{path}: {type(theirs).__qualname__} from vLLM, {type(ours).__qualname__} from fastmm"
    if isinstance(theirs, torch.Tensor):
        return _tensors(theirs, ours, path)
    if isinstance(theirs, np.ndarray):
        return _arrays(theirs, ours, path)
    if isinstance(theirs, float):
        return None if struct.pack("d", theirs) == struct.pack("d", ours) else f"{path}: another number"
    if isinstance(theirs, (str, bytes, int, bool, enum.Enum, slice)):
        return None if theirs == ours else f"{path}: another {type(theirs).__name__}"
    if isinstance(theirs, Mapping):
        return _mappings(theirs, ours, path)
    if isinstance(theirs, (list, tuple)):
        if len(theirs) != len(ours):
            return f"{path}: {len(theirs)} elements from vLLM, {len(ours)} from fastmm"
        return _first(difference(a, b, f"{path}[{n}]") for n, (a, b) in enumerate(zip(theirs, ours)))
    if isinstance(theirs, (set, frozenset)):
        return None if theirs == ours else f"{path}: another set"
    names = _fields(theirs)
    if names is not None:
        return _first(difference(getattr(theirs, n, None), getattr(ours, n, None), f"{path}.{n}") for n in names)
    return None if theirs == ours else f"{path}: another {type(theirs).__qualname__}"


def _fields(obj: Any) -> Sequence[str] | None:
    if isinstance(obj, msgspec.Struct):
        return obj.__struct_fields__
    if dataclasses.is_dataclass(obj):
        return [field.name for field in dataclasses.fields(obj)]
    if hasattr(obj, "__dict__") and not any("__eq__" in vars(cls) for cls in type(obj).__mro__[:-1]):
        return list(vars(obj))
    return None


def _first(found: Any) -> str | None:
    return next((text for text in found if text), None)


def _mappings(theirs: Mapping[Any, Any], ours: Mapping[Any, Any], path: str) -> str | None:
    if list(theirs) != list(ours):
        return f"{path}: other keys, or in another order"
    return _first(difference(theirs[key], ours[key], f"{path}[{n}]") for n, key in enumerate(theirs))


def _tensors(a: torch.Tensor, b: torch.Tensor, path: str) -> str | None:
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device or a.is_pinned() != b.is_pinned():
        return f"{path}: {a.dtype} {tuple(a.shape)} {a.device} from vLLM, {b.dtype} {tuple(b.shape)} {b.device} from fastmm"
    if a.stride() != b.stride():
        return f"{path}: strides {a.stride()} from vLLM, {b.stride()} from fastmm"
    if not a.numel() or (a.is_contiguous() and a.data_ptr() == b.data_ptr()):
        return None
    same = torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
    return None if same else f"{path}: a tensor of other values"


def _arrays(a: Any, b: Any, path: str) -> str | None:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{path}: {a.dtype.str} {a.shape} from vLLM, {b.dtype.str} {b.shape} from fastmm"
    return None if a.tobytes() == b.tobytes() else f"{path}: an array of other values"

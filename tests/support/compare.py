"""Deep comparison of requests and outputs across fastmm's classes and vLLM's.

`MultiModalFieldElem.__eq__` of vLLM compares the type of the field only, `LoRARequest.__eq__` the name only, and ``==`` on
tensors raises or gives a tensor: so nothing here uses the classes' own equality.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

# Classes that stand for the same thing under another name.
_SAME_CLASS = {
    "MultiModalFeatureSpec": "MmFeatureSpec",
    "MultiModalFieldElem": "MmFieldElem",
    "MultiModalBatchedField": "MmBatchedField",
    "MultiModalFlatField": "MmFlatField",
    "MultiModalSharedField": "MmSharedField",
}


class Leaf:
    """A tensor in the one form in which all kinds can be compared."""

    def __init__(self, dtype: str, shape: tuple[int, ...], data: bytes) -> None:
        self.dtype, self.shape, self.data = dtype, shape, data


def torch_or_none() -> Any:
    return sys.modules.get("torch")


def numpy_wire_name(dtype: np.dtype[Any]) -> str:
    """A numpy dtype as torch spells it where that means the same, else as numpy does."""
    if dtype.isbuiltin == 2:  # a type of ml_dtypes, which has torch's names
        return dtype.name
    if dtype.isnative and dtype.kind in "?biufc" and dtype.itemsize <= 16 and dtype.name not in ("longdouble", "float128"):
        return dtype.name
    return dtype.str


def leaf_of(value: Any) -> Leaf | None:
    """The value as a `Leaf`, or None when it is no tensor."""
    torch = torch_or_none()
    if torch is not None and isinstance(value, torch.Tensor):
        dense = value.detach().cpu().contiguous().flatten()
        data = dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        return Leaf(str(value.dtype).removeprefix("torch."), tuple(value.shape), data)
    if isinstance(value, np.ndarray):
        return Leaf(numpy_wire_name(value.dtype), tuple(value.shape), value.tobytes())
    if type(value).__name__ == "WireTensor":
        name = value.dtype
        if name[0] in "<>|=":
            name = numpy_wire_name(np.dtype(name))
        return Leaf(name, tuple(value.shape), bytes(value.data))
    return None


def _fields(value: Any) -> list[tuple[str, Any]] | None:
    """Names and values of the fields of a struct, dataclass or named tuple; None for anything else."""
    names = getattr(type(value), "__struct_fields__", None) or getattr(type(value), "_fields", None)
    if names is None:
        if not dataclasses.is_dataclass(value):
            return None
        names = [field.name for field in dataclasses.fields(value)]
    return [(name, getattr(value, name)) for name in names]


def _fail(path: str, what: str) -> None:
    raise AssertionError(f"{path}: {what}")


def assert_same(a: Any, b: Any, path: str = "$") -> None:
    """Fail with the path of the first difference.

    Tensors of any kind are compared by dtype, shape and bytes; the members of fields one by one; lists and tuples as
    sequences (a tuple becomes a list on the wire); sets without order; floats by their bits; enums by value; bounds of
    slices as ints. An int, a float and a bool are three different things.
    """
    left, right = leaf_of(a), leaf_of(b)
    if left is not None or right is not None:
        if left is None or right is None:
            _fail(path, f"{type(a).__name__} against {type(b).__name__}")
            return
        if left.dtype != right.dtype:
            _fail(path, f"dtype {left.dtype} against {right.dtype}")
        if left.shape != right.shape:
            _fail(path, f"shape {left.shape} against {right.shape}")
        if left.data != right.data:
            _fail(path, f"{len(left.data)} bytes differ")
        return
    if isinstance(a, enum.Enum) or isinstance(b, enum.Enum):
        if type(a).__name__ != type(b).__name__:
            _fail(path, f"{type(a).__name__} against {type(b).__name__}")
        if a.value != b.value:
            _fail(path, f"{a!r} against {b!r}")
        return
    if isinstance(a, np.generic):
        a = a.item()
    if isinstance(b, np.generic):
        b = b.item()
    if isinstance(a, slice) or isinstance(b, slice):
        if not (isinstance(a, slice) and isinstance(b, slice)):
            _fail(path, f"{type(a).__name__} against {type(b).__name__}")
        for bound in ("start", "stop", "step"):
            bounds = [getattr(s, bound) for s in (a, b)]
            if [None if x is None else int(x) for x in bounds[:1]] != [None if x is None else int(x) for x in bounds[1:]]:
                _fail(f"{path}.{bound}", f"{bounds[0]!r} against {bounds[1]!r}")
        return
    if type(a).__name__ == "UtilityResult" and type(b).__name__ == "UtilityResult":
        assert_same(a.result, b.result, f"{path}.result")
        return
    left_fields, right_fields = _fields(a), _fields(b)
    if left_fields is not None or right_fields is not None:
        names = [type(x).__name__ for x in (a, b)]
        if left_fields is None or right_fields is None or len({_SAME_CLASS.get(name, name) for name in names}) != 1:
            _fail(path, f"{names[0]} against {names[1]}")
            return
        if [name for name, _ in left_fields] != [name for name, _ in right_fields]:
            _fail(path, f"fields of {names[0]} and {names[1]} differ")
        for (name, x), (_, y) in zip(left_fields, right_fields, strict=True):
            assert_same(x, y, f"{path}.{name}")
        return
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
            _fail(path, f"{type(a).__name__} against {type(b).__name__}")
        if list(a) != list(b):
            _fail(path, f"keys {list(a)} against {list(b)}")
        for key in a:
            assert_same(a[key], b[key], f"{path}[{key!r}]")
        return
    if isinstance(a, (set, frozenset)) or isinstance(b, (set, frozenset)):
        if a != b:
            _fail(path, f"{a!r} against {b!r}")
        return
    if isinstance(a, (list, tuple)) or isinstance(b, (list, tuple)):
        if not (isinstance(a, (list, tuple)) and isinstance(b, (list, tuple))):
            _fail(path, f"{type(a).__name__} against {type(b).__name__}")
        if len(a) != len(b):
            _fail(path, f"{len(a)} elements against {len(b)}")
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{index}]")
        return
    if isinstance(a, (bytes, bytearray, memoryview)) and isinstance(b, (bytes, bytearray, memoryview)):
        if bytes(a) != bytes(b):
            _fail(path, "bytes differ")
        return
    if type(a) is not type(b):
        _fail(path, f"{type(a).__name__} against {type(b).__name__}")
    if isinstance(a, float):
        if struct.pack("<d", a) != struct.pack("<d", b):
            _fail(path, f"{a!r} against {b!r}")
    elif a != b:
        _fail(path, f"{a!r} against {b!r}")


def frame_bytes(frames: Any) -> list[bytes]:
    """Frames of either encoder as bytes, whatever buffers they are."""
    return [memoryview(frame).tobytes() for frame in frames]


def assert_same_frames(got: Any, expected: Any) -> None:
    """Byte for byte equality, with a message that says where the first difference is."""
    left, right = frame_bytes(got), frame_bytes(expected)
    for index, (x, y) in enumerate(zip(left, right, strict=False)):
        if x == y:
            continue
        at = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
        _fail(
            f"frame {index}, offset {at}",
            f"{x[max(0, at - 8) : at + 24].hex()} against {y[max(0, at - 8) : at + 24].hex()} (lengths {len(x)} and {len(y)})",
        )
    if len(left) != len(right):
        _fail("$", f"{len(left)} frames against {len(right)}")

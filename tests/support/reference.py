"""The wire's rules once more, in plain Python over fastmm's schema classes: slow, short, and read from the rules alone.

An oracle that needs no vLLM: it holds the schema classes to the golden frames by themselves, and says which side is wrong
when the compiled encoder differs.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from fastmm.schema import WireTensor


class ReferenceEncoder:
    """Encodes one object; `frames` is the result."""

    def __init__(self, obj: Any, threshold: int = 256) -> None:
        self.threshold = threshold
        self.main = bytearray()
        self.frames: list[Any] = [self.main]
        self.write(obj)

    def header(self, size: int, fix: int | None, fix_limit: int, codes: tuple[int, int, int]) -> None:
        """The shortest header; `codes` for 8, 16 and 32 bits, 0 where there is none."""
        if fix is not None and size < fix_limit:
            self.main.append(fix | size)
        elif codes[0] and size < 1 << 8:
            self.main += struct.pack(">BB", codes[0], size)
        elif size < 1 << 16:
            self.main += struct.pack(">BH", codes[1], size)
        else:
            self.main += struct.pack(">BI", codes[2], size)

    def array(self, size: int) -> None:
        self.header(size, 0x90, 16, (0, 0xDC, 0xDD))

    def map(self, size: int) -> None:
        self.header(size, 0x80, 16, (0, 0xDE, 0xDF))

    def ext(self, data: bytes) -> None:
        fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}
        if len(data) in fixed:
            self.main.append(fixed[len(data)])
        else:
            self.header(len(data), None, 0, (0xC7, 0xC8, 0xC9))
        self.main.append(3)
        self.main += data

    def integer(self, value: int) -> None:
        if 0 <= value < 128 or -32 <= value < 0:
            self.main.append(value & 0xFF)
            return
        forms = (">BB", ">BH", ">BI", ">BQ") if value >= 0 else (">Bb", ">Bh", ">Bi", ">Bq")
        for width, form in enumerate(forms):
            low, high = (0, 1 << (8 << width)) if value >= 0 else (-1 << ((8 << width) - 1), 0)
            if low <= value < high:
                self.main += struct.pack(form, (0xCC if value >= 0 else 0xD0) + width, value)
                return
        raise OverflowError(value)

    def tensor(self, dtype: str, shape: tuple[int, ...], data: bytes, *, always_inline: bool = False) -> None:
        self.array(3)
        self.write(dtype)
        self.write(tuple(shape))
        if always_inline or len(data) < self.threshold:
            self.ext(data)
        else:
            self.write(len(self.frames))
            self.frames.append(data)

    def write(self, value: Any) -> None:
        if value is None:
            self.main.append(0xC0)
        elif isinstance(value, bool):
            self.main.append(0xC3 if value else 0xC2)
        elif isinstance(value, enum.Enum):
            self.write(value.value)
        elif isinstance(value, int):
            self.integer(value)
        elif isinstance(value, float):
            self.main += struct.pack(">Bd", 0xCB, value)
        elif isinstance(value, str):
            data = value.encode()
            self.header(len(data), 0xA0, 32, (0xD9, 0xDA, 0xDB))
            self.main += data
        elif isinstance(value, (bytes, bytearray, memoryview)):
            self.header(len(value), None, 0, (0xC4, 0xC5, 0xC6))
            self.main += value
        elif isinstance(value, (list, tuple, set, frozenset)):
            self.array(len(value))
            for item in value:
                self.write(item)
        elif isinstance(value, Mapping):
            self.map(len(value))
            for key, item in value.items():
                self.write(key)
                self.write(item)
        elif isinstance(value, slice):
            self.write([None if bound is None else int(bound) for bound in (value.start, value.stop, value.step)])
        elif isinstance(value, WireTensor):
            self.tensor(value.dtype, value.shape, bytes(value.data), always_inline=value.dtype[0] in "<>|" and not value.shape)
        elif isinstance(value, np.ndarray):
            self.tensor(value.dtype.str, value.shape, value.tobytes(), always_inline=not value.shape)
        elif hasattr(type(value), "__wire__"):
            self.record(value)
        else:
            import torch

            assert isinstance(value, torch.Tensor), type(value)
            dense = value.detach().contiguous().flatten()
            data = dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""
            self.tensor(str(value.dtype).removeprefix("torch."), tuple(value.shape), data)

    def record(self, value: Any) -> None:
        fields = dataclasses.fields(value)
        kind = type(value).__wire__
        if kind == "array":
            self.array(len(fields))
            for field in fields:
                self.write(getattr(value, field.name))
            return
        factory = getattr(type(value), "__wire_factory__", None)
        if factory is not None:
            self.array(2)
            self.write(factory)
        if kind == "map-omit-defaults":
            fields = tuple(field for field in fields if not self.is_default(field, getattr(value, field.name)))
            assert len(dataclasses.fields(value)) > 15  # the header's size follows the declared fields
            self.main += struct.pack(">BH", 0xDE, len(fields))
        else:
            self.map(len(fields))
        for field in fields:
            self.write(field.name)
            self.write(getattr(value, field.name))

    @staticmethod
    def is_default(field: dataclasses.Field[Any], value: Any) -> bool:
        if field.default is not dataclasses.MISSING:
            return value is field.default
        return field.default_factory in (list, dict, set) and type(value) is field.default_factory and not value


def reference_encode(obj: Any, threshold: int = 256) -> list[bytes]:
    """Frames of an object of fastmm's classes."""
    return [bytes(frame) for frame in ReferenceEncoder(obj, threshold).frames]

"""What every schema class shares: equality that knows tensors."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

if TYPE_CHECKING:
    TensorLike: TypeAlias = Any
else:

    class TensorLike:
        """Marks a field that holds a tensor: torch, numpy, WireTensor, or whatever has DLPack or the buffer protocol.

        Only annotations use it; a type checker sees `Any`.
        """


def same_value(a: Any, b: Any) -> bool:
    """Deep equality in which tensors are equal when kind, dtype, shape and bytes are.

    NaN payloads count, as the wire carries them. Never raises on tensors, as ``==`` of containers of arrays does.
    """
    if a is b:
        return True
    if isinstance(a, np.ndarray):
        if not isinstance(b, np.ndarray) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(np.array_equal(a, b)) if a.dtype.hasobject else a.tobytes() == b.tobytes()
    torch = sys.modules.get("torch")  # a tensor can only exist where torch was imported
    if torch is not None and isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        left, right = (t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (a, b))
        return bool(torch.equal(left, right))
    if isinstance(b, np.ndarray) or (torch is not None and isinstance(b, torch.Tensor)):
        return False
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    return bool(a == b)


class Record:
    """Base of the schema classes.

    ``__wire__`` says how an instance is written: ``"array"`` (positional, always full length), ``"map"`` (every field, nil
    included) or ``"map-omit-defaults"`` (a field is left out when its value is the very default object, or an empty list,
    dict or set where the default is made by that factory). ``__wire_factory__``, where a class has it, is written before
    the map: ``[name, {fields}]``. Fields are written in the order of their declaration, under their own names.

    Equality compares field by field and tensors by kind, dtype, shape and bytes. Instances are mutable, so they have no
    hash.
    """

    __slots__ = ()
    __wire__: ClassVar[str] = "map"
    __hash__: ClassVar[None]  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(
            same_value(getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        )

    __hash__ = None

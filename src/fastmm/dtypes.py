"""One table of element types: the name on the wire, numpy's name, item size and class of number.

The wire spells a torch tensor's type as torch does, without ``torch.`` (``bfloat16``), and a numpy array's as
``dtype.str`` (``<f4``, ``|b1``, ``<U2``). The table is of the first kind and is the same as the one in
``include/fastmm/dtype.h`` (a test holds both equal); the second kind is numpy's own to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import CompatError, SchemaError

__all__ = ["DTYPES", "DType", "item_nbytes", "is_numpy_name", "numpy_dtype"]


@dataclass(frozen=True)
class DType:
    """One row of the table.

    Attributes
    ----------
    name
        On the wire: torch's name without ``torch.``.
    item_nbytes
        Bytes of one element.
    number_class
        ``"bool"``, ``"int"``, ``"uint"``, ``"float"`` or ``"complex"``.
    numpy_name
        numpy's own name, or None where numpy itself has no such type; ml_dtypes may add it under `name`.
    """

    name: str
    item_nbytes: int
    number_class: str
    numpy_name: str | None


def _own(name: str, item_nbytes: int, number_class: str) -> DType:
    return DType(name, item_nbytes, number_class, name)


def _extra(name: str, item_nbytes: int, number_class: str) -> DType:
    return DType(name, item_nbytes, number_class, None)


# Order is the order of FMM_DTYPE_TABLE.
DTYPES: dict[str, DType] = {
    row.name: row
    for row in (
        _own("bool", 1, "bool"),
        _own("uint8", 1, "uint"),
        _own("int8", 1, "int"),
        _own("uint16", 2, "uint"),
        _own("int16", 2, "int"),
        _own("uint32", 4, "uint"),
        _own("int32", 4, "int"),
        _own("uint64", 8, "uint"),
        _own("int64", 8, "int"),
        _own("float16", 2, "float"),
        _extra("bfloat16", 2, "float"),
        _own("float32", 4, "float"),
        _own("float64", 8, "float"),
        _extra("complex32", 4, "complex"),
        _own("complex64", 8, "complex"),
        _own("complex128", 16, "complex"),
        _extra("float8_e4m3fn", 1, "float"),
        _extra("float8_e4m3fnuz", 1, "float"),
        _extra("float8_e5m2", 1, "float"),
        _extra("float8_e5m2fnuz", 1, "float"),
        _extra("float8_e8m0fnu", 1, "float"),
    )
}

# Kinds of numpy types that mean the same on another machine: no objects, no structures, no dates.
_NUMPY_KINDS = frozenset("?biufcSU")


def is_numpy_name(name: str) -> bool:
    """Whether `name` is spelt as numpy's ``dtype.str``: a byte order, a kind, a size."""
    return len(name) >= 3 and name[0] in "<>|=" and name[1] in _NUMPY_KINDS and name[2:].isdecimal()


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type of a wire name of either spelling.

    Raises
    ------
    SchemaError
        The name is not one of the wire's.
    CompatError
        numpy has no such type and ml_dtypes is not installed, or is too old to have it.
    """
    if is_numpy_name(name):
        try:
            return np.dtype(name)
        except TypeError:
            raise SchemaError(f"numpy has no dtype {name!r}") from None
    row = DTYPES.get(name)
    if row is None:
        raise SchemaError(f"unknown dtype {name!r}: expected a name of torch such as 'bfloat16', or of numpy such as '<f4'")
    if row.numpy_name is not None:
        return np.dtype(row.numpy_name)
    try:
        import ml_dtypes
    except ImportError:
        raise CompatError(f"numpy has no dtype {name!r} by itself: install ml_dtypes, or use the torch form") from None
    scalar = getattr(ml_dtypes, row.name, None)
    if scalar is None:
        raise CompatError(f"ml_dtypes {ml_dtypes.__version__} has no {name!r}: a newer one may, or use the torch form")
    found: np.dtype[Any] = np.dtype(scalar)
    return found


def item_nbytes(name: str) -> int:
    """Bytes of one element of a wire name of either spelling; `SchemaError` when it is not one of the wire's."""
    row = DTYPES.get(name)
    return row.item_nbytes if row is not None else numpy_dtype(name).itemsize

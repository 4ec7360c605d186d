"""A tensor as the wire has it: dtype, shape, bytes. No framework needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ..dtypes import DTYPES, is_numpy_name, item_nbytes, numpy_dtype
from ..errors import CompatError, SchemaError, SchemaValueError

_MAX_NBYTES = 2**63 - 1


class _ArrayOver:
    """Exposes memory to numpy as writable and keeps its owner alive.

    torch has no read-only tensors and prints a warning when it is given read-only memory. A decoded frame is read-only by
    contract, so the flag is dropped here and the contract documented where the tensor is handed out.
    """

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        self.owner = owner


class WireTensor:
    """A dense C-order tensor: the name of its type, its shape and a buffer.

    Parameters
    ----------
    dtype
        A wire name: torch's without ``torch.`` (``"bfloat16"``) or numpy's ``dtype.str`` (``"<f4"``).
    shape
        Extents, each an int of at least 0.
    data
        Any C-contiguous buffer of exactly ``prod(shape) * item size`` bytes. It is viewed, not copied, and kept alive.

    Raises
    ------
    SchemaError
        The dtype is not one of the wire's, an extent is not an int, `data` is no contiguous buffer.
    SchemaValueError
        An extent is negative, or the size of `data` is not that of the shape.

    Notes
    -----
    Two are equal when dtype, shape and bytes are: ``"float32"`` and ``"<f4"`` differ, as they do on the wire.
    """

    __slots__ = ("data", "dtype", "shape")
    __wire__: ClassVar[str] = "tensor"
    __hash__: ClassVar[None]  # type: ignore[assignment]

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __init__(self, dtype: str, shape: Sequence[int], data: Any) -> None:
        if not isinstance(dtype, str):
            raise SchemaError(f"dtype must be a str, not {type(dtype).__name__}", path="WireTensor.dtype")
        try:
            itemsize = item_nbytes(dtype)
            extents = tuple(shape)
        except SchemaError as error:
            error.path = "WireTensor.dtype"
            raise
        except TypeError:
            raise SchemaError(f"shape must be a sequence of int, not {type(shape).__name__}", path="WireTensor.shape") from None
        for extent in extents:
            if not isinstance(extent, (int, np.integer)) or isinstance(extent, bool):
                raise SchemaError(f"an extent must be an int, not {type(extent).__name__}", path="WireTensor.shape")
            if extent < 0:
                raise SchemaValueError(f"an extent must be at least 0, not {extent}", path="WireTensor.shape")
        extents = tuple(map(int, extents))
        expected = math.prod(extents) * itemsize
        # The product of the non-zero extents must fit too: strides are computed from it.
        if math.prod(extent for extent in extents if extent) * itemsize > _MAX_NBYTES:
            raise SchemaValueError(f"shape {extents} of {dtype} has too many bytes to address", path="WireTensor.shape")
        try:
            view = memoryview(data)
        except TypeError:
            raise SchemaError(f"data must be a buffer, not {type(data).__name__}", path="WireTensor.data") from None
        if not view.c_contiguous:
            raise SchemaError("data must be a C-contiguous buffer", path="WireTensor.data")
        if view.nbytes != expected:
            raise SchemaValueError(
                f"shape {extents} of {dtype} takes {expected} bytes, data has {view.nbytes}", path="WireTensor.data"
            )
        self.dtype = dtype
        self.shape = extents
        if view.format == "B" and view.ndim == 1:
            self.data = view
        else:  # memoryview.cast refuses an extent of zero
            self.data = view.cast("B") if view.nbytes else memoryview(b"")

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.data.nbytes

    def __repr__(self) -> str:
        return f"WireTensor(dtype={self.dtype!r}, shape={self.shape}, nbytes={self.nbytes})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WireTensor):
            return NotImplemented
        return self.dtype == other.dtype and self.shape == other.shape and self.data == other.data

    __hash__ = None

    def numpy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """The tensor as a numpy array.

        Returns
        -------
        numpy.ndarray
            A view over `data`, read-only where `data` is. A copy, writable, only where the memory is not aligned to the
            item size.

        Raises
        ------
        CompatError
            numpy has no such type, and ml_dtypes is absent or has none.
        """
        dtype = numpy_dtype(self.dtype)
        if not self.nbytes:
            return np.empty(self.shape, dtype)
        raw = np.frombuffer(self.data, np.uint8)
        if raw.ctypes.data % _alignment(dtype):
            raw = raw.copy()
        return raw.view(dtype).reshape(self.shape)

    def torch(self) -> Any:
        """The tensor as a torch tensor.

        Returns
        -------
        torch.Tensor
            A view over `data`. torch has no read-only tensors: where `data` is read-only the tensor must not be written
            to. A copy where the memory is not aligned to the item size, and where numpy's type is in the other byte
            order.

        Raises
        ------
        CompatError
            torch is not installed or has no such type.
        """
        try:
            import torch
        except ImportError:
            raise CompatError("torch is not installed: use the numpy form, or the raw bytes") from None
        if is_numpy_name(self.dtype):
            array_dtype = numpy_dtype(self.dtype)
            torch_dtype = getattr(torch, array_dtype.name, None) if array_dtype.name in DTYPES else None
            swapped = not array_dtype.isnative
        else:
            torch_dtype = getattr(torch, self.dtype, None)
            swapped = False
        if torch_dtype is None:
            raise CompatError(
                f"torch {torch.__version__} has no dtype for {self.dtype!r}: use the numpy form, or the raw bytes"
            )
        if not self.nbytes:
            return torch.empty(self.shape, dtype=torch_dtype)
        if swapped:
            native = self.numpy().astype(numpy_dtype(self.dtype).newbyteorder("="))
            return torch.from_numpy(native)
        raw = np.frombuffer(self.data, np.uint8)
        if raw.ctypes.data % torch_dtype.itemsize:
            raw = raw.copy()
        elif not raw.flags.writeable:
            raw = np.asarray(_ArrayOver(raw.ctypes.data, raw.nbytes, raw))
        return torch.from_numpy(raw).view(torch_dtype).reshape(self.shape)


def _alignment(dtype: np.dtype[Any]) -> int:
    # A unicode array is a row of 4-byte characters; complex numbers are pairs, yet torch wants them aligned whole.
    return dtype.alignment

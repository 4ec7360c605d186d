"""Whether every number of a tensor is finite, at the speed of reading it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..errors import CompatError
from ..schema import WireTensor

__all__ = ["all_finite"]

# Types without numpy's own arithmetic: which bits are the exponent.  All of them set is an infinity or a NaN.
_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00}
_CHUNK_NELEM = 1 << 16


def all_finite(tensor: Any) -> bool:
    """Whether a tensor holds neither an infinity nor a NaN. Integers and bools never do.

    A sum is infinite or NaN when one of its terms is, and one pass over memory: only where the sum is neither finite nor
    exact are the numbers themselves looked at. Types of 8 bits are not looked at.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) or tensor.dtype.itemsize == 1 or not tensor.numel():
            return True
        if tensor.dtype in (torch.float32, torch.float64) and bool(torch.isfinite(tensor.detach().sum())):
            return True
        return bool(torch.isfinite(tensor).all())
    if isinstance(tensor, WireTensor):
        if tensor.dtype in _EXPONENTS:
            return _exponents_finite(np.frombuffer(tensor.data, np.uint16), _EXPONENTS[tensor.dtype])
        try:
            array = tensor.numpy()
        except CompatError:
            return True
    elif isinstance(tensor, np.ndarray):
        array = tensor
    else:
        try:
            array = np.from_dlpack(tensor)
        except (TypeError, ValueError, RuntimeError, BufferError, AttributeError):
            return True
    if not array.size:
        return True
    if array.dtype.name in _EXPONENTS and array.dtype.isnative and array.flags.c_contiguous:
        return _exponents_finite(array.reshape(-1).view(np.uint16), _EXPONENTS[array.dtype.name])
    if array.dtype.kind not in "fc":
        return True
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())


def _exponents_finite(bits: np.ndarray[Any, np.dtype[np.uint16]], mask: int) -> bool:
    wanted = np.uint16(mask)
    for begin in range(0, bits.size, _CHUNK_NELEM):  # the temporaries stay in the cache
        part = bits[begin : begin + _CHUNK_NELEM] & wanted
        if bool((part == wanted).any()):
            return False
    return True

"""Floating features in the engine's type before they leave a worker: half the bytes cross, and nobody casts afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .._native.cast import cast
from ..dtypes import is_numpy_name, numpy_dtype
from ..errors import SchemaError
from .contract import Processed, ProcessedItem

__all__ = ["cast_result", "wire_dtype"]

_SOURCES = ("float32", "float64", "float16", "bfloat16")
_TARGETS = ("bfloat16", "float16", "float32")


def wire_dtype(dtype: Any) -> str | None:
    """The name of a type that features can be cast to, from that name or from torch's or numpy's type; None stays."""
    if dtype is None:
        return None
    name = dtype.__name__ if isinstance(dtype, type) else str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    if name not in _TARGETS:
        raise SchemaError(f"expected 'bfloat16', 'float16', 'float32' or such a type of torch or numpy, got {dtype!r}")
    return name


def cast_result(processed: Any, dtype: str) -> Any:
    """A result whose floating tensors are of one type; a tensor that is in it twice is cast once.

    What is of that type, no floating tensor, or no `Processed` stays as it is, and nothing is written to.
    """
    if not isinstance(processed, Processed):
        return processed
    done: dict[int, Any] = {}
    return dataclasses.replace(processed, items=[_item(item, dtype, done) for item in processed.items])


def _item(item: ProcessedItem, dtype: str, done: dict[int, Any]) -> ProcessedItem:
    features = {key: _cast(value, dtype, done) for key, value in item.features.items()}
    model_data = {key: _cast(value, dtype, done) for key, value in item.model_data.items()}
    return dataclasses.replace(item, features=features, model_data=model_data)


def _cast(value: Any, dtype: str, done: dict[int, Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(part, dtype, done) for part in value]
    name = _name(value)
    if name == dtype or name not in _SOURCES:
        return value
    if id(value) not in done:
        done[id(value)] = cast(value, dtype)
    return done[id(value)]


def _name(value: Any) -> str:
    """The name in our table of a tensor's type; anything else where it has none."""
    if isinstance(value, Mapping) or not hasattr(value, "shape"):
        return ""
    dtype = getattr(value, "dtype", "")
    if isinstance(dtype, str) and is_numpy_name(dtype):  # of a WireTensor
        dtype = numpy_dtype(dtype)
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")

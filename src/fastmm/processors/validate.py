"""What a processor returned, checked before anything of it can reach the scheduler.

Built-in and external processors are held to the same. Every error has the path of the item and the field.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .._native.placeholder import first_outside
from .._native.split import Batch
from ..dtypes import DTYPES, is_numpy_name, numpy_dtype
from ..errors import FastmmError, LimitError, ProcessorError
from ..schema import WireTensor, same_value
from .contract import Budgets, Field, Layout, Processed, ProcessedItem, Work
from .extensions import is_present
from .finite import all_finite
from .words import is_text, kind_of

__all__ = ["span_of", "validate_processed"]

_IDS_END = 1 << 31  # the engine holds ids as int32
_INT_END = 1 << 63
_NESTED_MAX = 64


def validate_processed(work: Work, processed: Processed, budgets: Budgets | None = None, *, finite: bool = False) -> None:
    """Check a processor's result.

    Parameters
    ----------
    work
        What the request asked for.
    processed
        What came back.
    budgets
        Only `Budgets.max_output_nbytes` is looked at. None: its default.
    finite
        Refuse floating features that hold an infinity or a NaN.

    Raises
    ------
    ProcessorError
        The prompt's ids are not ints from 0 to 2^31 - 1; an item's modality or their number is not that of the request's
        media; a feature is no tensor of the wire, or its shape does not go with its data; spans are empty, out of order,
        overlapping or outside the prompt; a hash is missing; model data is of a type that the wire does not carry.
    LimitError
        More bytes than the budget.
    """
    if not isinstance(processed, Processed):
        raise ProcessorError(f"expected a Processed, got {kind_of(processed)}", path="processed")
    nids = _check_ids(processed.prompt_token_ids)
    items = processed.items
    if not isinstance(items, (list, tuple)):
        raise ProcessorError(f"expected a list of ProcessedItem, got {kind_of(items)}", path="items")
    for i, item in enumerate(items):
        if not isinstance(item, ProcessedItem):
            raise ProcessorError(f"expected a ProcessedItem, got {kind_of(item)}", path=f"items[{i}]")
    _check_modalities(work, items)
    total = 0
    limit = (Budgets() if budgets is None else budgets).max_output_nbytes
    for i, item in enumerate(items):
        path = f"items[{i}]"
        if not is_text(item.hash):
            raise ProcessorError(f"expected a str that is not empty, and UTF-8, got {kind_of(item.hash)}", path=f"{path}.hash")
        total += _check_features(item, path, finite)
        if limit is not None and total > limit:
            raise LimitError(f"expected at most {limit} bytes of output (max_output_nbytes), got {total}", path=path)
    _check_joins(items)
    _check_places(items, nids)


# --- the prompt -------------------------------------------------------------------------------------------------------


def _check_ids(ids: Any) -> int:
    """How many there are."""
    path = "prompt_token_ids"
    if isinstance(ids, (list, tuple)):
        found = ids if isinstance(ids, list) else list(ids)
        i = first_outside(found, _IDS_END)
        while i >= 0:
            one = found[i]
            if not isinstance(one, (int, np.integer)) or isinstance(one, bool):
                raise ProcessorError(f"expected an int, got {kind_of(one)}", path=f"{path}[{i}]")
            if not 0 <= int(one) < _IDS_END:
                raise ProcessorError("expected ids from 0 to 2^31 - 1, got one beyond", path=f"{path}[{i}]")
            i = first_outside(found, _IDS_END, i + 1)  # it was an int of numpy, or of a class of ints
    else:
        try:
            array = ids.detach().cpu().numpy() if hasattr(ids, "detach") else ids
        except Exception:  # a tensor of a kind that has no numbers for us
            array = None
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
            raise ProcessorError(f"expected a list of ints or a 1-D tensor of them, got {kind_of(ids)}", path=path)
        outside = (array < 0) | (array >= _IDS_END) if array.dtype.itemsize >= 4 or array.dtype.kind == "i" else None
        if outside is not None and outside.any():
            i = int(outside.argmax())
            raise ProcessorError("expected ids from 0 to 2^31 - 1, got one beyond", path=f"{path}[{i}]")
    n = len(ids)
    if not n:
        raise ProcessorError("expected the expanded prompt, got no ids", path=path)
    return n


def _check_modalities(work: Work, items: Sequence[ProcessedItem]) -> None:
    wanted = [media.kind.value for media in work.media]
    for i, item in enumerate(items):
        path = f"items[{i}].modality"
        if not is_text(item.modality):
            raise ProcessorError(f"expected a name in UTF-8, got {kind_of(item.modality)}", path=path)
        if i < len(wanted) and item.modality != wanted[i]:
            raise ProcessorError(f"expected {wanted[i]!r}, as the request's media are, got {item.modality[:40]!r}", path=path)
    if len(items) < len(wanted):
        raise ProcessorError(
            f"expected an item for each of the {len(wanted)} media of the request, got {len(items)}", path="items"
        )
    if len(items) > len(wanted) and not _has_extensions(work.extensions):
        raise ProcessorError(
            f"expected {len(wanted)} items, as many as there are media, got {len(items)}: only extensions can make more",
            path="items",
        )


def _has_extensions(extensions: Any) -> bool:
    if isinstance(extensions, Mapping):
        return any(map(is_present, extensions.values()))
    return extensions is not None


# --- features ---------------------------------------------------------------------------------------------------------


def _check_features(item: ProcessedItem, path: str, finite: bool) -> int:
    """The bytes of an item's tensors."""
    for name in ("features", "fields", "model_data"):
        given = getattr(item, name)
        if type(given) is not dict and not isinstance(given, Mapping):
            raise ProcessorError(f"expected a mapping of keys, got {kind_of(given)}", path=f"{path}.{name}")
        for key in given:
            if not is_text(key):
                raise ProcessorError(f"expected names in UTF-8 as keys, got {kind_of(key)}", path=f"{path}.{name}")
    if not item.features and not item.model_data:
        raise ProcessorError("expected at least one feature, got none", path=f"{path}.features")
    total = 0
    for key, value in item.features.items():
        where = f"{path}.features[{key!r}]"
        total += _nested(value, where, finite, numbers=False)
    for key, value in item.model_data.items():
        where = f"{path}.model_data[{key!r}]"
        if key in item.features:
            raise ProcessorError("expected a key that is no feature too", path=where)
        total += _nested(value, where, finite, numbers=True)
    for key, field in item.fields.items():
        _check_field(item, key, field, f"{path}.fields[{key!r}]")
    return total


def _check_field(item: ProcessedItem, key: str, field: Any, path: str) -> None:
    if not isinstance(field, Field):
        raise ProcessorError(f"expected a Field, got {kind_of(field)}", path=path)
    if key not in item.features:
        raise ProcessorError(f"expected keys of the features ({', '.join(map(repr, item.features))})", path=path)
    if field.layout is Layout.FLAT:
        value = item.features[key]
        shape = getattr(value, "shape", None)
        if shape is None:
            raise ProcessorError(f"expected a tensor to be flat, got {kind_of(value)}", path=path)
        dim = _whole(field.dim)
        if dim is None or not -len(shape) <= dim < len(shape):
            raise ProcessorError(f"expected a dim of a tensor with {len(shape)} dimensions", path=path)


def _check_joins(items: Sequence[ProcessedItem]) -> None:
    """What the engine concatenates must fit, and what it takes once must be the same."""
    firsts: dict[tuple[str, str], tuple[int, Field, Any]] = {}
    for i, item in enumerate(items):
        for key, field in item.fields.items():
            if field.layout is Layout.BATCHED:
                continue
            value = item.features[key]
            before = firsts.setdefault((item.modality, key), (i, field, value))
            if before[0] == i or before[1] != field:
                continue
            path, other = f"items[{i}].features[{key!r}]", f"items[{before[0]}]"
            if field.layout is Layout.SHARED:
                if value is not before[2] and not same_value(value, before[2]):
                    raise ProcessorError(f"expected what is shared to be the same as in {other}", path=path)
            elif _besides(value, field.dim) != _besides(before[2], field.dim):
                raise ProcessorError(
                    f"expected a flat key to have the dtype and the other extents of {other}, got {_besides(value, field.dim)}"
                    f" and {_besides(before[2], field.dim)}",
                    path=path,
                )


def _besides(value: Any, dim: int) -> tuple[str, list[int], int]:
    """What must be equal for a concatenation along an axis: the type, the other extents, the axis."""
    shape = [int(extent) for extent in value.shape]
    axis = dim % len(shape)
    name = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if is_numpy_name(name):
        name = numpy_dtype(name).name
    return name, shape[:axis] + shape[axis + 1 :], axis


def _whole(value: Any) -> int | None:
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _nested(value: Any, path: str, finite: bool, *, numbers: bool) -> int:
    """The bytes of the tensors in a value; lists are walked without recursion."""
    if not isinstance(value, (list, tuple)):
        return _one(value, path, finite, numbers)
    total = 0
    pending: list[Iterator[tuple[int, Any]]] = [enumerate(value)]
    steps: list[int] = [0]
    while pending:
        for i, one in pending[-1]:
            steps[-1] = i
            if isinstance(one, (list, tuple)):
                if len(pending) >= _NESTED_MAX:
                    raise ProcessorError(f"expected at most {_NESTED_MAX} lists in one another", path=path)
                pending.append(enumerate(one))
                steps.append(0)
                break
            total += _one(one, path, finite, numbers, steps)
        else:
            pending.pop()
            steps.pop()
    return total


def _at(path: str, steps: Sequence[int]) -> str:
    return path + "".join(f"[{step}]" for step in steps)


def _one(value: Any, path: str, finite: bool, numbers: bool, steps: Sequence[int] = ()) -> int:
    """The bytes of a tensor, or 8 of a number where there may be one."""
    if isinstance(value, (bool, int, float, np.generic)):
        if not numbers and not steps:
            raise ProcessorError(f"expected a tensor, got {kind_of(value)}: numbers are model_data", path=_at(path, steps))
        if isinstance(value, np.generic) and (value.dtype.kind not in "biuf" or value.dtype.name not in DTYPES):
            raise ProcessorError(f"expected an int, a float or a bool, got {kind_of(value)}", path=_at(path, steps))
        if isinstance(value, (int, np.integer)) and not -_INT_END <= int(value) < _INT_END:
            raise ProcessorError("expected an int of 64 bits, got one beyond", path=_at(path, steps))
        if finite and isinstance(value, (float, np.floating)) and not np.isfinite(value):
            raise ProcessorError("expected a finite number", path=_at(path, steps))
        return 8
    try:
        nbytes = _tensor_nbytes(value)
    except FastmmError as error:
        more = " of tensors and numbers" if numbers else ""
        raise ProcessorError(f"{error.message}{f', or a list{more}' if more else ''}", path=_at(path, steps)) from None
    if finite and not all_finite(value):
        raise ProcessorError("expected finite numbers, got an infinity or a NaN", path=_at(path, steps))
    return nbytes


def _tensor_nbytes(value: Any) -> int:
    """The bytes of a tensor that the wire can carry.

    A WireTensor is written by hand or by another process, and its attributes can be set: it is made once more, which checks
    that the product of its shape, without overflow, is the number of its elements.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.name not in DTYPES:
            raise ProcessorError(f"expected numbers of a type that the wire knows, got dtype {value.dtype}")
        _check_byte_order(value.dtype)
        raw = value.dtype.name
    elif isinstance(value, WireTensor):
        value = WireTensor(value.dtype, value.shape, value.data)
        if is_numpy_name(value.dtype):
            _check_byte_order(numpy_dtype(value.dtype))
        raw = None  # it says itself what it is
    else:
        raw = str(getattr(value, "dtype", "")).removeprefix("torch.")
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor) and raw not in DTYPES:
            raise ProcessorError(f"expected a dtype that the wire knows, got {raw}")
    if raw == "uint16":
        raise ProcessorError(
            'expected 16-bit words that say what they are, got uint16: WireTensor("bfloat16", shape, words), or'
            ' WireTensor("uint16", shape, words) where they are numbers'
        )
    return Batch(value).nbytes


def _check_byte_order(dtype: np.dtype[Any]) -> None:
    if not dtype.isnative:  # the wire has a name for it, and an engine's model no tensor
        raise ProcessorError(
            f"expected numbers in this machine's byte order, got {dtype.str}: use astype(dtype.newbyteorder('='))"
        )


# --- places -----------------------------------------------------------------------------------------------------------


def span_of(item: ProcessedItem, path: str = "item") -> tuple[int, int]:
    """The first and the last position of an item, whichever way it says them.

    Raises
    ------
    ProcessorError
        There is neither or both, a span is empty, or spans are out of order or overlap.
    """
    if (item.spans is None) == (item.placeholder is None):
        came = "neither" if item.spans is None else "both"
        raise ProcessorError(f"expected spans or a placeholder, got {came}", path=path)
    if item.placeholder is not None:
        where = f"{path}.placeholder"
        given = item.placeholder
        pair = given if isinstance(given, (list, tuple)) else (getattr(given, "offset", None), getattr(given, "length", None))
        offset, length = _pair(pair, where, "(offset, length)")
        if length < 1:
            raise ProcessorError(f"expected a length of at least 1, got {length}", path=where)
        mask = getattr(given, "is_embed", None)
        if mask is not None:
            _check_mask(mask, length, f"{where}.is_embed")
        return offset, offset + length - 1
    spans = item.spans
    if not isinstance(spans, (list, tuple)) or not spans:
        raise ProcessorError("expected a list of (first, last), one at least", path=f"{path}.spans")
    before = -1
    begin = 0
    for i, span in enumerate(spans):
        where = f"{path}.spans[{i}]"
        first, last = _pair(span, where, "(first, last)")
        if last < first:
            raise ProcessorError(f"expected a span that is not empty, got ({first}, {last})", path=where)
        if i and first <= before:
            raise ProcessorError(
                f"expected spans in order that do not overlap, got one from {first} after one to {before}", path=where
            )
        begin = first if i == 0 else begin
        before = last
    return begin, before


def _check_mask(mask: Any, length: int, path: str) -> None:
    """A bool for each position, and at least one that is true: an item without embeddings is none."""
    try:
        shape = Batch(mask).shape
    except FastmmError as error:
        raise ProcessorError(error.message, path=path) from None
    if shape != (length,):
        raise ProcessorError(f"expected a mask of shape ({length},), got {shape}", path=path)
    if str(mask.dtype).removeprefix("torch.") not in ("bool", "|b1"):
        raise ProcessorError(f"expected a mask of bool, got {mask.dtype}", path=path)
    if not bool((mask.numpy() if isinstance(mask, WireTensor) else mask).any()):
        raise ProcessorError("expected a mask that is true somewhere", path=path)


def _pair(value: Any, path: str, what: str) -> tuple[int, int]:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        first, second = _whole(value[0]), _whole(value[1])
        if first is not None and second is not None:
            if first < 0:
                raise ProcessorError("expected positions from 0 on, got a negative one", path=path)
            return first, second
    raise ProcessorError(f"expected a pair of ints {what}", path=path)


def _check_places(items: Sequence[ProcessedItem], nids: int) -> None:
    """Inside the prompt, in order within a modality, and not overlapping."""
    found = []
    last_of: dict[str, tuple[int, int]] = {}
    for i, item in enumerate(items):
        path = f"items[{i}]"
        first, last = span_of(item, path)
        where = f"{path}.{'placeholder' if item.spans is None else 'spans'}"
        if last >= nids:
            raise ProcessorError(f"expected positions inside the {nids} ids of the prompt, got {_number(last)}", path=where)
        before = last_of.get(item.modality)
        if before is not None and first < before[1]:
            raise ProcessorError(f"expected it after items[{before[0]}], which is {item.modality} too", path=where)
        last_of[item.modality] = (i, first)
        found.append((first, last, i, where))
    found.sort()
    for (_, end, one, _), (begin, _, other, where) in pairwise(found):
        if begin <= end:
            raise ProcessorError(f"expected items that do not overlap, got items[{one}] and items[{other}]", path=where)


def _number(value: int) -> str:
    return str(value) if value < 1 << 128 else "a number of more than 128 bits"

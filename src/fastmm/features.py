"""One processed batch of a prompt's items into one `MmFeatureSpec` per item, every size checked; n samples of one prompt."""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from ._native.placeholder import Prompt, place
from ._native.split import Batch, copy_record, feature_specs, field_elems, flat_fields, nested_nbytes, read_ints, slices_of
from .errors import FastmmError, LimitError, SchemaError, SchemaValueError
from .schema import (
    EngineCoreRequest,
    MmBatchedField,
    MmFeatureSpec,
    MmFieldElem,
    MmFlatField,
    MmSharedField,
    SamplingParams,
)

__all__ = ["FlatSizes", "build_features", "fan_out"]

# What vLLM's models call the tensors of a video, where an image processor made them.
VIDEO_NAMES = {"pixel_values": "pixel_values_videos", "image_grid_thw": "video_grid_thw"}
_MAX_DEPTH = 64  # of lists in lists


@dataclass(frozen=True, slots=True)
class FlatSizes:
    """How a flat tensor is cut: an extent along `dim` for each item.

    Attributes
    ----------
    sizes
        The key of a sizes tensor among the tensors, or the sizes themselves: a 1-D tensor of any integer dtype, or a
        sequence of ints.
    dim
        The axis that is cut. A negative one counts from the last.
    """

    sizes: Any
    dim: int = 0


def build_features(
    *,
    tensors: Mapping[str, Any],
    placeholders: Iterable[Any],
    hashes: Iterable[str],
    prompt_token_ids: Any,
    modality: str = "image",
    batched: Collection[str] = (),
    flat: Mapping[str, Any] | None = None,
    keep_on_cpu: Collection[str] = (),
    embed_token_id: int | Collection[int] | None = None,
    identifiers: Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    full_slices: bool = False,
    max_payload_nbytes: int = 1 << 30,
    cached: Collection[int] = (),
) -> list[MmFeatureSpec]:
    """Split what a processor made of all items of one modality into one feature per item.

    Nothing is copied: each item's tensors are views of the batch (torch tensors of a torch batch, numpy arrays of a numpy
    array, WireTensors of a WireTensor), which keep its memory and can be cast in place later.

    Parameters
    ----------
    tensors
        Keyword argument of the model to a torch tensor, a numpy array, a `WireTensor`, another producer of DLPack, or a list
        (of lists) of tensors and numbers, as a ragged batch comes.
    placeholders
        For each item ``(offset, length)`` in the prompt, or a `PlaceholderRange`. They must not overlap.
    hashes
        For each item the key of its content in the caches of the engine.
    prompt_token_ids
        The prompt: a list of ints or a 1-D tensor of integers. None where there are only prompt embeddings: then nothing
        says where the prompt ends, and `embed_token_id` must be None.
    modality
        ``"image"``, ``"video"``, ``"audio"`` or any other name that the model knows.
    batched
        Keys whose first axis (or list) has one entry per item; the item is that entry. A key that is in `flat` too is
        batched.
    flat
        Key to the sizes by which its tensor is cut along the first axis: the key of a sizes tensor, the sizes themselves, or
        a `FlatSizes`. What is neither in `batched` nor in `flat` is shared by all items, a sizes tensor too.
    keep_on_cpu
        Keys that the engine leaves in host memory.
    embed_token_id
        The token, or tokens, of the prompt that take an embedding; each position then gets an ``is_embed`` mask, unless all
        of its tokens do.
    identifiers
        Keys of the cache of encoder outputs, where they are not the hashes.
    rename
        New names of keys. None: for ``"video"`` ``pixel_values`` becomes ``pixel_values_videos`` and ``image_grid_thw``
        ``video_grid_thw``; else no key is renamed. Keys may be named by either name everywhere.
    full_slices
        Write the slices of all items into one field that all items share, as vLLM does, instead of its own slice into each.
    max_payload_nbytes
        How many bytes all tensors together may have.
    cached
        Indices of items that the engine has already: their features carry no data. Where all are cached, there need be no
        tensors.

    Returns
    -------
    list of MmFeatureSpec
        In the order of their offsets. Empty when there are no items.

    Raises
    ------
    SchemaError
        Something is of the wrong type, or a key is not there.
    SchemaValueError
        A count, a size or a position does not fit.
    LimitError
        More than `max_payload_nbytes`.
    """
    if not isinstance(modality, str) or not modality:
        raise SchemaError(f"expected a name, got {_kind(modality)}", path="modality")
    names = rename if rename is not None else VIDEO_NAMES if modality == "video" else None
    found = _renamed(tensors, names, "tensors")
    batches, torch_came = _measured(found, max_payload_nbytes)

    spots = _listed(placeholders, "placeholders")
    digests = _strings(hashes, "hashes", len(spots))
    keys = digests if identifiers is None else _strings(identifiers, "identifiers", len(spots))
    n = len(spots)
    if n == 0:
        if found:
            raise SchemaValueError(
                f"expected as many placeholders as there are items, got none and {len(found)} tensors: "
                f"{', '.join(map(repr, found))}",
                path="placeholders",
            )
        return []
    absent = _indices(cached, n)
    marks = None if embed_token_id is None else _token_ids(embed_token_id)
    try:
        prompt = Prompt(prompt_token_ids)
    except FastmmError as error:
        error.path = "prompt_token_ids"
        raise
    if marks is not None and prompt.nelem is None:
        raise SchemaError("expected token ids to look for embed_token_id in, got None", path="prompt_token_ids")

    columns: dict[str, Any] = {}
    if found:
        rows = _names(batched, names, found, "batched")
        cuts = {} if flat is None else _cuts(flat, names, found)
        host = _names(keep_on_cpu, names, found, "keep_on_cpu")
        fields: dict[Any, Any] = {}  # items of several keys share field objects
        for key, value in found.items():
            columns[key] = _column(
                key, value, batches[key], n, key in rows, cuts.get(key), key in host, full_slices, found, fields
            )
    else:
        for given, where in ((batched, "batched"), (() if flat is None else flat, "flat"), (keep_on_cpu, "keep_on_cpu")):
            _names(given, names, found, where)
        if len(absent) < n:
            raise SchemaValueError(f"expected the tensors of {n - len(absent)} items, got none", path="tensors")

    positions = place(spots, prompt, marks, torch_came)
    features = feature_specs(columns, modality, keys, positions, digests, absent)
    features.sort(key=_offset_of)
    return features


def _offset_of(feature: MmFeatureSpec) -> int:
    return feature.mm_position.offset


# --- arguments --------------------------------------------------------------------------------------------------------


def _kind(value: Any) -> str:
    """What came, without its content."""
    return (
        "None"
        if value is None
        else "an empty str"
        if value == "" and isinstance(value, str)
        else f"a {type(value).__qualname__}"
    )


def _listed(values: Any, where: str) -> list[Any]:
    if type(values) is list:
        return values
    if not isinstance(values, (str, bytes, Mapping)):
        try:
            return list(values)
        except TypeError:
            pass
    raise SchemaError(f"expected a list with one entry per item, got {_kind(values)}", path=where)


def _strings(values: Any, where: str, n: int) -> list[str]:
    listed = _listed(values, where)
    if len(listed) != n:
        raise SchemaValueError(f"expected {n}, as many as there are placeholders, got {len(listed)}", path=where)
    for i, value in enumerate(listed):
        if not isinstance(value, str) or not value:
            raise SchemaError(f"expected a str that is not empty, got {_kind(value)}", path=f"{where}[{i}]")
    return listed


def _whole(value: Any) -> int | None:
    """An int of Python or numpy, None for anything else, a bool too."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _indices(values: Collection[int], n: int) -> set[int]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise SchemaError(f"expected indices of items, got {_kind(values)}", path="cached")
    found = set()
    for value in values:
        index = _whole(value)
        if index is None:
            raise SchemaError(f"expected indices of items, got {_kind(value)}", path="cached")
        if not 0 <= index < n:
            raise SchemaValueError(f"expected indices from 0 to {n - 1}, got {index}", path="cached")
        found.add(index)
    return found


def _token_ids(value: Any) -> list[int]:
    values = [value] if _whole(value) is not None else value
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise SchemaError(f"expected a token id or a set of them, got {_kind(value)}", path="embed_token_id")
    ids = []
    for value in values:
        token = _whole(value)
        if token is None:
            raise SchemaError(f"expected a token id or a set of them, got {_kind(value)}", path="embed_token_id")
        if not 0 <= token < 1 << 63:
            raise SchemaValueError("expected token ids from 0 to 2^63 - 1, got one beyond", path="embed_token_id")
        ids.append(token)
    if not ids:
        raise SchemaValueError("expected at least one token id, got none", path="embed_token_id")
    return ids


# --- keys -------------------------------------------------------------------------------------------------------------


def _renamed(tensors: Any, names: Mapping[str, str] | None, where: str) -> dict[str, Any]:
    """The mapping under its new names."""
    if not isinstance(tensors, Mapping):
        raise SchemaError(f"expected a mapping of keys, got {_kind(tensors)}", path=where)
    if names is not None and not isinstance(names, Mapping):
        raise SchemaError(f"expected a mapping of key to key, got {_kind(names)}", path="rename")
    found: dict[str, Any] = {}
    before: dict[str, str] = {}
    for key, value in tensors.items():
        if not isinstance(key, str):
            raise SchemaError(f"expected str keys, got {_kind(key)}", path=where)
        name = key if names is None else names.get(key, key)
        if not isinstance(name, str):
            raise SchemaError(f"expected a str, got {_kind(name)}", path=f"rename[{key!r}]")
        if name in found:
            raise SchemaValueError(
                f"expected each key once, got {before[name]!r} and {key!r}, which both are {name!r} after renaming", path=where
            )
        before[name] = key
        found[name] = value
    return found


def _names(keys: Any, names: Mapping[str, str] | None, found: dict[str, Any], where: str) -> set[str]:
    """The keys under their new names, each of which has a tensor."""
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
        raise SchemaError(f"expected a set of keys, got {_kind(keys)}", path=where)
    result = set()
    for key in keys:
        result.add(_name(key, names, found, where))
    return result


def _name(key: Any, names: Mapping[str, str] | None, found: dict[str, Any], where: str) -> str:
    if not isinstance(key, str):
        raise SchemaError(f"expected str keys, got {_kind(key)}", path=where)
    name = key if names is None else names.get(key, key)
    if name not in found:
        there = ", ".join(map(repr, found)) or "none"
        raise SchemaValueError(f"expected keys of the tensors ({there}), got {key!r}", path=where)
    return name


def _cuts(flat: Any, names: Mapping[str, str] | None, found: dict[str, Any]) -> dict[str, FlatSizes]:
    cuts = {}
    for key, value in _renamed(flat, names, "flat").items():
        _name(key, None, found, "flat")
        cut = value if isinstance(value, FlatSizes) else FlatSizes(value)
        if isinstance(cut.sizes, str):
            cut = FlatSizes(_name(cut.sizes, names, found, f"flat[{key!r}]"), cut.dim)
        cuts[key] = cut
    return cuts


# --- tensors ----------------------------------------------------------------------------------------------------------


def _at(error: FastmmError, key: str) -> FastmmError:
    error.path = f"tensors[{key!r}]{error.path or ''}"
    return error


def _measured(found: dict[str, Any], max_payload_nbytes: int) -> tuple[dict[str, Batch | None], bool]:
    """A `Batch` for each key that has a single tensor; whether there are torch tensors.  Only sizes are looked at."""
    batches: dict[str, Batch | None] = {}
    kinds: set[str] = set()
    torch_came = False
    total = 0
    for key, value in found.items():
        try:
            if isinstance(value, (list, tuple, int, float)):
                batches[key] = None
                total += nested_nbytes(value, _MAX_DEPTH, kinds)
            else:
                batches[key] = batch = Batch(value)
                total += batch.nbytes
                torch_came = torch_came or batch.is_torch
        except (SchemaError, LimitError) as error:
            raise _at(error, key) from None
    limit = _whole(max_payload_nbytes)
    if limit is None or limit < 0:
        raise SchemaError(f"expected a number of bytes >= 0, got {_kind(max_payload_nbytes)}", path="max_payload_nbytes")
    if total > limit:
        raise LimitError(f"expected at most {limit} bytes of payload (max_payload_nbytes), got {total}", path="tensors")
    return batches, torch_came or bool(kinds)


def _column(
    key: str,
    value: Any,
    batch: Batch | None,
    n: int,
    batched: bool,
    cut: FlatSizes | None,
    keep_on_cpu: bool,
    full_slices: bool,
    found: dict[str, Any],
    fields: dict[Any, Any],
) -> list[MmFieldElem] | MmFieldElem:
    """An elem for each item, or the one of all items."""
    if batched:
        field = fields.get(keep_on_cpu)
        if field is None:
            field = fields[keep_on_cpu] = MmBatchedField(keep_on_cpu=keep_on_cpu)
        return field_elems(_rows(key, value, batch, n), field)
    if cut is None:
        return MmFieldElem(value, MmSharedField(batch_size=n, keep_on_cpu=keep_on_cpu))
    sizes = _sizes(key, cut.sizes, n, found)
    dim = _dim(key, cut.dim, batch)
    extent = batch.shape[dim] if batch is not None else _extent(key, value)
    total = sum(sizes)
    if total != extent:
        raise SchemaValueError(
            f"expected sizes of the {n} items that add up to {extent}, the extent of {key!r} along axis {dim}, got {total}",
            path=_sizes_path(key, cut.sizes),
        )
    bounds = list(accumulate(sizes, initial=0))
    leaves = batch.pieces(bounds, dim) if batch is not None else [list(value[a:b]) for a, b in pairwise(bounds)]
    where = (id(cut.sizes), dim, keep_on_cpu) if not isinstance(cut.sizes, str) else (cut.sizes, dim, keep_on_cpu)
    flat = fields.get(where)
    if flat is None:
        slices = slices_of(bounds, dim)
        flat = (
            MmFlatField(keep_on_cpu=keep_on_cpu, slices=slices, dim=dim)
            if full_slices
            else flat_fields(slices, dim, keep_on_cpu)
        )
        fields[where] = flat
    return field_elems(leaves, flat)


def _rows(key: str, value: Any, batch: Batch | None, n: int) -> list[Any]:
    if batch is not None:
        shape = batch.shape
        if not shape:
            raise SchemaValueError("expected an axis to take items from, got a tensor of shape ()", path=f"tensors[{key!r}]")
        extent = shape[0]
    else:
        extent = _extent(key, value)
    if extent != n:
        raise SchemaValueError(
            f"expected a row for each of the {n} items of the batched {key!r}, got {extent}", path=f"tensors[{key!r}]"
        )
    return batch.rows() if batch is not None else list(value)


def _extent(key: str, value: Any) -> int:
    if not isinstance(value, (list, tuple)):
        raise SchemaError(f"expected a tensor or a list to take items from, got {_kind(value)}", path=f"tensors[{key!r}]")
    return len(value)


def _dim(key: str, dim: Any, batch: Batch | None) -> int:
    ndim = 1 if batch is None else len(batch.shape)
    axis = _whole(dim)
    if axis is None:
        raise SchemaError(f"expected a whole number as dim, got {_kind(dim)}", path=f"flat[{key!r}]")
    if not -ndim <= axis < ndim:
        raise SchemaValueError(f"expected a dim of a tensor with {ndim} dimensions, got {axis}", path=f"flat[{key!r}]")
    return axis % ndim


def _sizes_path(key: str, sizes: Any) -> str:
    return f"tensors[{sizes!r}]" if isinstance(sizes, str) else f"flat[{key!r}]"


def _sizes(key: str, sizes: Any, n: int, found: dict[str, Any]) -> list[int]:
    """The extents of the items, each at least 0."""
    path = _sizes_path(key, sizes)
    given = found[sizes] if isinstance(sizes, str) else sizes
    if isinstance(given, (list, tuple, range)):
        numbers = []
        for i, value in enumerate(given):
            number = _whole(value)
            if number is None:
                raise SchemaError(f"expected a whole number as the size of item {i}, got {_kind(value)}", path=path)
            numbers.append(number)
    else:
        try:
            numbers = read_ints(given)
        except FastmmError as error:
            error.message = f"{error.message}, as the sizes of {key!r}"
            error.path = path
            raise
    if len(numbers) != n:
        raise SchemaValueError(f"expected a size of {key!r} for each of the {n} items, got {len(numbers)}", path=path)
    if min(numbers) < 0:
        i = next(i for i, number in enumerate(numbers) if number < 0)
        raise SchemaValueError(f"expected a size of {key!r} that is at least 0 for item {i}, got {numbers[i]}", path=path)
    return numbers


# --- n samples of one prompt --------------------------------------------------------------------------------------------


def fan_out(request: Any, n: int, ids: Sequence[str] | None = None, seeds: Sequence[int | None] | None = None) -> list[Any]:
    """Make `n` requests of one, for n samples of its prompt.

    They share the very same prompt and features, so `encode_requests` walks the features once, casts their payload once
    and hands out the same frames for all; no memory of payload size is taken, however large n is.

    Parameters
    ----------
    request
        An `EngineCoreRequest` of fastmm or of vLLM. It is left as it is, and must not be encoded with a cast in place
        beside the new ones.
    n
        How many, at least 1.
    ids
        Their request ids, all different. None: ``"0_<request id>"``, ``"1_<request id>"``... as vLLM names them; for one
        sample the request's own.
    seeds
        Their seeds. None: where the request has one, that plus 0, 1, 2..., as in vLLM.

    Returns
    -------
    list of EngineCoreRequest
        Of the class of `request`. Their sampling parameters ask for one sample each.

    Raises
    ------
    SchemaError, SchemaValueError
        The counts do not agree, an id is taken twice, seeds are given to a request without sampling parameters.
    """
    count = _whole(n)
    if count is None:
        raise SchemaError(f"expected a whole number, got {_kind(n)}", path="n")
    if count < 1:
        raise SchemaValueError(f"expected at least 1, got {count}", path="n")
    if ids is None:
        names = [f"{i}_{request.request_id}" for i in range(count)] if count > 1 else [request.request_id]
    else:
        names = _samples(ids, "ids", count)
        for i, name in enumerate(names):
            if not isinstance(name, str):
                raise SchemaError(f"expected a str, got {_kind(name)}", path=f"ids[{i}]")
        if len(set(names)) != count:
            raise SchemaValueError(f"expected {count} different ids, got {len(set(names))}", path="ids")
    params = request.sampling_params
    numbers = None if seeds is None else _samples(seeds, "seeds", count)
    if numbers is not None:
        if params is None:
            raise SchemaError("expected a request with sampling_params, got None: seeds are part of them", path="seeds")
        for i, seed in enumerate(numbers):
            if seed is not None and _whole(seed) is None:
                raise SchemaError(f"expected a whole number or None, got {_kind(seed)}", path=f"seeds[{i}]")
    elif params is not None and params.seed is not None:
        numbers = [params.seed + i for i in range(count)]
    single = params
    if params is not None:
        single = _copied(params)
        single.n = 1
    requests = []
    for i in range(count):
        sample = _copied(request)
        sample.request_id = names[i]
        if numbers is not None:
            single = _copied(single)
            single.seed = numbers[i]
        sample.sampling_params = single
        requests.append(sample)
    return requests


def _copied(value: Any) -> Any:
    return copy_record(value) if type(value) in (EngineCoreRequest, SamplingParams) else copy.copy(value)


def _samples(values: Any, where: str, n: int) -> list[Any]:
    listed = _listed(values, where)
    if len(listed) != n:
        raise SchemaValueError(f"expected {n}, one for each sample, got {len(listed)}", path=where)
    return listed

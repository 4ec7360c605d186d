"""build_features: one batch, as a processor made it, into one feature per item."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from .._native.placeholder import Prompt, place
from .._native.split import Batch, feature_specs, field_elems, flat_fields, nested_nbytes, read_ints, slices_of
from ..errors import FastmmError, LimitError, SchemaError, SchemaValueError
from ..schema import MmBatchedField, MmFeatureSpec, MmFieldElem, MmFlatField, MmSharedField
from .arguments import (
    flat_cuts,
    indices,
    kind_of,
    known_names,
    listed,
    payload_limit,
    renamed,
    shown,
    strings,
    token_ids,
    whole,
)

# What vLLM's models call the tensors of a video, where an image processor made them.
VIDEO_NAMES = {"pixel_values": "pixel_values_videos", "image_grid_thw": "video_grid_thw"}


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
    max_payload_nbytes: int | None = 1 << 30,
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
        How many bytes all tensors together may have; None: as many as there are.
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
        raise SchemaError(f"expected a name, got {kind_of(modality)}", path="modality")
    if rename is not None and not isinstance(rename, Mapping):
        raise SchemaError(f"expected a mapping of key to key, got {kind_of(rename)}", path="rename")
    names = rename if rename is not None else VIDEO_NAMES if modality == "video" else None
    found = renamed(tensors, names, "tensors")
    batches, torch_came = _measured(found, max_payload_nbytes)

    spots = listed(placeholders, "a list of (offset, length)", "placeholders")
    digests = strings(hashes, "hashes", len(spots))
    keys = digests if identifiers is None else strings(identifiers, "identifiers", len(spots))
    n = len(spots)
    absent = indices(cached, n)
    if n == 0:
        if found:
            raise SchemaValueError(
                f"expected as many placeholders as there are items, got none and {len(found)} tensors: "
                f"{', '.join(map(repr, found))}",
                path="placeholders",
            )
        return []
    marks = None if embed_token_id is None else token_ids(embed_token_id)
    try:
        prompt = Prompt(prompt_token_ids)
    except FastmmError as error:
        error.path = "prompt_token_ids"
        raise
    if marks is not None and prompt.nelem is None:
        raise SchemaError("expected token ids to look for embed_token_id in, got None", path="prompt_token_ids")

    columns: dict[str, Any] = {}
    if found:
        rows = known_names(batched, names, found, "batched")
        cuts = {} if flat is None else flat_cuts(flat, names, found)
        host = known_names(keep_on_cpu, names, found, "keep_on_cpu")
        fields: dict[Any, Any] = {}  # items of several keys share field objects
        for key, value in found.items():
            columns[key] = _column(
                key, value, batches[key], n, key in rows, cuts.get(key), key in host, full_slices, found, fields
            )
    else:
        for given, where in ((batched, "batched"), (list(flat or ()), "flat"), (keep_on_cpu, "keep_on_cpu")):
            known_names(given, names, found, where)
        if len(absent) < n:
            raise SchemaValueError(f"expected the tensors of {n - len(absent)} items, got none", path="tensors")

    positions, in_order = place(spots, prompt, marks, torch_came)
    features = feature_specs(columns, modality, keys, positions, digests, absent)
    return features if in_order else sorted(features, key=_offset_of)


def _offset_of(feature: MmFeatureSpec) -> int:
    return feature.mm_position.offset


# --- tensors ----------------------------------------------------------------------------------------------------------


def _at(error: FastmmError, key: str) -> FastmmError:
    error.path = f"tensors[{key!r}]{error.path or ''}"
    return error


def _measured(found: dict[str, Any], max_payload_nbytes: int | None) -> tuple[dict[str, Batch | None], bool]:
    """A `Batch` for each key that has a single tensor; whether there are torch tensors.  Only sizes are looked at."""
    batches: dict[str, Batch | None] = {}
    kinds: set[str] = set()
    torch_came = False
    total = 0
    for key, value in found.items():
        try:
            if isinstance(value, (list, tuple, int, float, np.generic)):
                batches[key] = None
                total += nested_nbytes(value, kinds)
            else:
                batches[key] = batch = Batch(value)
                total += batch.nbytes
                torch_came = torch_came or batch.is_torch
        except (SchemaError, LimitError) as error:
            raise _at(error, key) from None
    limit = payload_limit(max_payload_nbytes)
    if limit is not None and total > limit:
        raise LimitError(f"expected at most {limit} bytes of payload (max_payload_nbytes), got {total}", path="tensors")
    return batches, torch_came or bool(kinds)


def _column(
    key: str,
    value: Any,
    batch: Batch | None,
    n: int,
    batched: bool,
    cut: tuple[Any, Any] | None,
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
    given, dim = cut
    sizes = _sizes(key, given, n, found)
    axis = _axis(key, dim, batch)
    extent = batch.shape[axis] if batch is not None else _extent(key, value)
    total = sum(sizes)
    if total != extent:
        raise SchemaValueError(
            f"expected sizes of the {n} items that add up to {extent}, the extent of {key!r} along axis {axis}, got "
            f"{shown(total)}",
            path=_sizes_path(key, given),
        )
    bounds = list(accumulate(sizes, initial=0))
    leaves = batch.pieces(bounds, axis) if batch is not None else [list(value[a:b]) for a, b in pairwise(bounds)]
    where = (given if isinstance(given, str) else id(given), axis, keep_on_cpu)
    flat = fields.get(where)
    if flat is None:
        slices = slices_of(bounds, axis)
        if full_slices:
            flat = MmFlatField(keep_on_cpu=keep_on_cpu, slices=slices, dim=axis)
        else:
            flat = flat_fields(slices, axis, keep_on_cpu)
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
        raise SchemaError(f"expected a tensor or a list to take items from, got {kind_of(value)}", path=f"tensors[{key!r}]")
    return len(value)


def _axis(key: str, dim: Any, batch: Batch | None) -> int:
    ndim = 1 if batch is None else len(batch.shape)
    axis = whole(dim)
    if axis is None:
        raise SchemaError(f"expected a whole number as dim, got {kind_of(dim)}", path=f"flat[{key!r}]")
    if not -ndim <= axis < ndim:
        raise SchemaValueError(f"expected a dim of a tensor with {ndim} dimensions, got {shown(axis)}", path=f"flat[{key!r}]")
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
            number = whole(value)
            if number is None:
                raise SchemaError(f"expected a whole number as the size of item {i}, got {kind_of(value)}", path=path)
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
        raise SchemaValueError(
            f"expected a size of {key!r} that is at least 0 for item {i}, got {shown(numbers[i])}", path=path
        )
    return numbers

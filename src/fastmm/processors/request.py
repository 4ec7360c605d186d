"""A processor's result into what the encoder takes: features, and a whole request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from .._native.placeholder import first_outside
from ..features import build_features
from ..schema import (
    EngineCoreRequest,
    MmBatchedField,
    MmFeatureSpec,
    MmFlatField,
    MmSharedField,
    PlaceholderRange,
    PoolingParams,
    SamplingParams,
    WireTensor,
)
from .contract import Field, Layout, Processed, ProcessedItem
from .validate import span_of

__all__ = ["to_features", "to_request"]

_BATCHED = Field()
_ON_HOST = Field(keep_on_cpu=True)


def to_features(processed: Processed) -> list[MmFeatureSpec]:
    """One feature per item, by `build_features`; nothing is copied.

    Parameters
    ----------
    processed
        Validated. An item of several spans takes the positions from the first to the last, with a mask of those between.

    Returns
    -------
    list of MmFeatureSpec
        In the order of their offsets.
    """
    groups: dict[Any, list[ProcessedItem]] = {}
    for item in processed.items:
        # Items of one modality may differ in their keys, as pixels and ready embeddings do: each kind is a batch.
        fields = tuple((key, item.fields.get(key, _BATCHED)) for key in item.features)
        groups.setdefault((item.modality, fields, tuple(item.model_data)), []).append(item)
    ids = processed.prompt_token_ids
    if not isinstance(ids, list):
        ids = list(ids) if isinstance(ids, tuple) else ids
    features: list[MmFeatureSpec] = []
    for (modality, fields, extra), items in groups.items():
        features += _group(modality, dict(fields), extra, items, ids)
    return sorted(features, key=lambda feature: feature.mm_position.offset) if len(groups) > 1 else features


def _group(
    modality: str, fields: dict[str, Field], extra: Sequence[str], items: list[ProcessedItem], ids: Any
) -> list[MmFeatureSpec]:
    tensors: dict[str, Any] = {key: [item.features[key] for item in items] for key in fields}
    tensors.update({key: [item.model_data[key] for item in items] for key in extra})
    columns = {key: _fields(field, tensors[key]) for key, field in fields.items()}
    columns.update({key: [MmBatchedField(keep_on_cpu=True)] * len(items) for key in extra})
    made = build_features(
        tensors=tensors,
        batched=tensors.keys(),
        placeholders=[_place(item) for item in items],
        hashes=[item.hash for item in items],
        prompt_token_ids=ids,
        modality=modality,
        rename={},
        max_payload_nbytes=None,
    )
    # All keys went as rows of a batch, so that each item's tensors are its own very objects; what joins them is said here.
    for key, column in columns.items():
        for feature, field in zip(made, column):
            assert feature.data is not None
            feature.data[key].field = field
    return made


def _fields(field: Field, values: list[Any]) -> list[Any]:
    n = len(values)
    if field.layout is Layout.SHARED:
        return [MmSharedField(batch_size=n, keep_on_cpu=field.keep_on_cpu)] * n
    if field.layout is Layout.BATCHED:
        return [MmBatchedField(keep_on_cpu=field.keep_on_cpu)] * n
    dim = field.dim % len(values[0].shape)
    bounds = list(accumulate((int(value.shape[dim]) for value in values), initial=0))
    whole = (slice(None),) * dim
    cuts: list[Any] = [(*whole, slice(a, b)) if dim else slice(a, b) for a, b in pairwise(bounds)]
    # Its own slice is all an item carries: the metadata of n items is linear in n.
    return [MmFlatField(slices=[cut], dim=dim, keep_on_cpu=field.keep_on_cpu) for cut in cuts]


def _place(item: ProcessedItem) -> Any:
    if item.spans is None:
        return item.placeholder
    first, last = span_of(item)
    if len(item.spans) == 1:
        return (first, last - first + 1)
    mask = np.zeros(last - first + 1, np.bool_)
    for begin, end in item.spans:
        mask[begin - first : end - first + 1] = True
    if mask.all():
        return (first, len(mask))
    return PlaceholderRange(
        offset=first, length=len(mask), is_embed=WireTensor("bool", mask.shape, mask)
    )  # as torch's bool is written


def to_request(
    processed: Processed,
    request_id: str,
    sampling_params: SamplingParams | None = None,
    *,
    pooling_params: PoolingParams | None = None,
    **fields: Any,
) -> EngineCoreRequest:
    """The request that the encoder and the client take.

    Parameters
    ----------
    processed
        What a processor made, validated.
    request_id
        The engine's name of the request.
    sampling_params, pooling_params
        At most one of them. None of either: `SamplingParams()`.
    **fields
        Further fields of `EngineCoreRequest`, such as ``cache_salt`` and ``priority``.

    Returns
    -------
    EngineCoreRequest
        Its tensors are those of `processed`: with ``dtype=`` the encoder casts them in place.
    """
    ids = processed.prompt_token_ids
    token_ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if first_outside(token_ids, 1 << 31) >= 0:
        token_ids = list(map(int, token_ids))  # ints of numpy
    if sampling_params is None and pooling_params is None:
        sampling_params = SamplingParams()
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        mm_features=to_features(processed) or None,
        sampling_params=sampling_params,
        pooling_params=pooling_params,
        **fields,
    )

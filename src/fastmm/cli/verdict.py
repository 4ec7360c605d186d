"""Whether what arrived is what the photographs say: every value compared, with conversions that are not fastmm's own."""

from __future__ import annotations

from typing import Any

import numpy as np

import fastmm

from .request import bytes_of, dtype_of

Bits = np.ndarray[Any, np.dtype[Any]]


def converted(patches: np.ndarray[Any, np.dtype[np.float32]], dtype: str, tensors: str) -> tuple[Bits, str]:
    """The bits of `patches` in `dtype` as another program makes them, and how it did, in words."""
    if dtype == "float32":
        return patches.view(np.uint32), "as they are"
    if tensors == "torch":
        import torch

        return torch.from_numpy(patches).to(getattr(torch, dtype)).view(torch.int16).numpy().view(
            np.uint16
        ), "as torch converts them"
    if dtype == "float16":
        return patches.astype(np.float16).view(np.uint16), "as numpy converts them"
    if tensors == "numpy":
        import ml_dtypes

        return patches.astype(ml_dtypes.bfloat16).view(np.uint16), "as ml_dtypes converts them"
    # Round to nearest, ties to even. A photograph has no NaN, which this rule would break.
    bits = patches.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16), "converted by integer arithmetic"


def compare(arrived: fastmm.EngineCoreRequest, expected: fastmm.EngineCoreRequest, dtype: str, tensors: str) -> dict[str, Any]:
    """Compare a request with the one that was to arrive, whose patches are still float32. Takes both apart.

    Returns
    -------
    dict
        ``values`` (compared), ``differing``, ``faults`` (what else is wrong, in words), ``reference`` (which conversion).
    """
    report: dict[str, Any] = {"values": 0, "differing": 0, "faults": [], "reference": ""}
    features, wanted_features = arrived.mm_features or [], expected.mm_features or []
    if len(features) != len(wanted_features):
        report["faults"].append(f"{len(features)} features arrived, not {len(wanted_features)}")
        return report
    for index, (feature, wanted) in enumerate(zip(features, wanted_features, strict=True)):
        assert feature.data is not None
        assert wanted.data is not None
        leaf = feature.data["pixel_values"].data
        patches = bytes_of(wanted.data["pixel_values"].data).view(np.float32)
        reference, report["reference"] = converted(patches, dtype, tensors)
        shape = tuple(wanted.data["pixel_values"].data.shape)
        if dtype_of(leaf) != dtype or tuple(leaf.shape) != shape:
            report["faults"].append(f"image {index} is {dtype_of(leaf)} {tuple(leaf.shape)}, not {dtype} {shape}")
            continue
        report["values"] += reference.size
        report["differing"] += int(np.count_nonzero(bytes_of(leaf).view(reference.dtype) != reference))
        # The rest of the feature is compared as it stands, below.
        feature.data["pixel_values"].data = wanted.data["pixel_values"].data = None
    expected.arrival_time = arrived.arrival_time  # the one field that only the sender knows
    if not report["faults"] and arrived != expected:
        report["faults"].append("the request around the patches is another one")
    return report

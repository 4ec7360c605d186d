"""The demo's request, made by both processes on their own: one to send it, the other to know what must arrive."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

import fastmm

from .errors import CommandError
from .photograph import PATCH_VALUES, Photograph, patches_of

# Qwen2-VL's ids for the marks around a picture, and for each of its places in the prompt.
VISION_START, VISION_END, IMAGE_PAD = 151652, 151653, 151655
# What stands for the user's words: the demo needs no tokenizer, only ids.
WORDS = (74785, 419, 6548, 13)

TENSORS = ("torch", "numpy", "wire")

REHEARSAL = "rehearsal"  # a request of this name is decoded and timed, and that is all


def choose_tensors(wanted: str | None) -> str:
    """What holds the patches on both sides: as `wanted`, or the best of what is installed."""
    if wanted is None:
        if importlib.util.find_spec("torch"):
            return "torch"
        return "numpy" if importlib.util.find_spec("ml_dtypes") else "wire"
    if wanted == "torch" and not importlib.util.find_spec("torch"):
        raise CommandError("--tensors torch needs torch: pip install 'fastmm[torch]', or take --tensors wire")
    if wanted == "numpy" and not importlib.util.find_spec("ml_dtypes"):
        raise CommandError("--tensors numpy needs ml_dtypes: pip install ml_dtypes, or take --tensors wire")
    return wanted


def leaf_of(array: np.ndarray[Any, Any], tensors: str) -> Any:
    """A tensor of the chosen kind over the memory of `array`."""
    if tensors == "torch":
        import torch

        return torch.from_numpy(array)
    if tensors == "wire":
        return fastmm.WireTensor(array.dtype.name, array.shape, array)
    return array


def bytes_of(leaf: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The memory of a tensor of any of the kinds, flat, not copied."""
    if isinstance(leaf, fastmm.WireTensor):
        return np.frombuffer(leaf.data, np.uint8)
    if isinstance(leaf, np.ndarray):
        return leaf.reshape(-1).view(np.uint8)
    import torch

    flat: np.ndarray[Any, np.dtype[np.uint8]] = leaf.reshape(-1).view(torch.uint8).numpy()
    return flat


def dtype_of(leaf: Any) -> str:
    """The name of a tensor's element type, without its package."""
    return str(leaf.dtype).removeprefix("torch.")


def request_for(photographs: Sequence[Photograph], request_id: str, tensors: str) -> fastmm.EngineCoreRequest:
    """One request that shows all `photographs`; their patches lie in one float32 batch, as a processor hands them over."""
    counts = [photograph.patch_count for photograph in photographs]
    patches = np.empty((sum(counts), PATCH_VALUES), np.float32)
    np.concatenate([patches_of(photograph) for photograph in photographs], out=patches)
    prompt, placeholders = list(WORDS), []
    for photograph in photographs:
        placeholders.append((len(prompt) + 1, photograph.token_count))
        prompt += [VISION_START, *[IMAGE_PAD] * photograph.token_count, VISION_END]
    features = fastmm.build_features(
        tensors={
            "pixel_values": leaf_of(patches, tensors),
            "image_grid_thw": leaf_of(np.array([photograph.grid_thw for photograph in photographs], np.int64), tensors),
        },
        flat={"pixel_values": counts},
        batched={"image_grid_thw"},
        keep_on_cpu={"image_grid_thw"},
        placeholders=placeholders,
        hashes=[hashlib.sha256(photograph.pixels.tobytes()).hexdigest() for photograph in photographs],
        prompt_token_ids=prompt,
        embed_token_id=IMAGE_PAD,
    )
    return fastmm.EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=features,
        sampling_params=fastmm.SamplingParams(max_tokens=64),
    )

"""Qwen2-VL's image patches, in numpy: an example of a model package's own processor for fastmm."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fastmm.processors import Field, Layout, Media, Processed, ProcessedItem, Tokenizer, Work, open_image

__all__ = ["PatchExtensions", "PatchProcessor"]

PATCH, MERGE, FRAMES, CHANNELS = 14, 2, 2, 3
MIN_PIXELS = 56 * 56
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)

# Patches of all images lie behind one another; a row of the grid says where one ends, and the model reads it on the CPU.
FIELDS = {"pixel_values": Field(Layout.FLAT), "image_grid_thw": Field(keep_on_cpu=True)}


@dataclass
class PatchExtensions:
    """What a request may ask of this processor, beside its images."""

    __broadcast__: ClassVar[frozenset[str]] = frozenset({"multimodal_max_pixels"})  # one number may be for a whole batch

    multimodal_max_pixels: int = 28 * 28 * 1280

    def __post_init__(self) -> None:
        if self.multimodal_max_pixels < MIN_PIXELS:
            raise ValueError(f"multimodal_max_pixels is at least {MIN_PIXELS}")


class PatchProcessor:
    """Images to patches; each image token of the prompt becomes as many as its image takes.

    Parameters
    ----------
    image_token_id
        What stands for an image in the prompt.
    """

    schema = PatchExtensions

    def __init__(self, image_token_id: int = 151655) -> None:
        self.image_token_id = image_token_id

    def process(self, work: Work, tokenizer: Tokenizer | None) -> Processed:
        if work.videos or work.audios:
            raise ValueError("this model takes images only")
        prompt = work.prompt_token_ids
        if prompt is None:
            if tokenizer is None or work.text is None:
                raise ValueError("the prompt must be given as ids, or as text with a tokenizer")
            prompt = tokenizer.encode(work.text)
        if prompt.count(self.image_token_id) != len(work.images):
            raise ValueError(
                f"{len(work.images)} images, and {prompt.count(self.image_token_id)} places for them in the prompt"
            )
        images = iter(work.images)
        ids: list[int] = []
        items = []
        for token in prompt:
            if token != self.image_token_id:
                ids.append(token)
                continue
            pixels = resized(next(images), work.extensions.multimodal_max_pixels)
            patches, grid = cut(pixels)
            n = len(patches) // MERGE**2
            items.append(
                ProcessedItem(
                    modality="image",
                    features={"pixel_values": patches, "image_grid_thw": grid},
                    fields=FIELDS,
                    hash=hashlib.sha256(pixels.tobytes()).hexdigest(),
                    spans=[(len(ids), len(ids) + n - 1)],
                )
            )
            ids += [token] * n
        return Processed(prompt_token_ids=ids, items=items)


def resized(media: Media, max_pixels: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Upright RGB whose edges are multiples of 28, its area within bounds."""
    from PIL import Image, ImageOps

    opened = open_image(media)
    image = ImageOps.exif_transpose(opened if hasattr(opened, "convert") else Image.fromarray(opened)).convert("RGB")
    width, height = image.size
    unit = PATCH * MERGE
    wide, high = round(width / unit) * unit, round(height / unit) * unit
    if wide * high > max_pixels:
        shrink = math.sqrt(width * height / max_pixels)
        wide, high = (max(unit, math.floor(edge / shrink / unit) * unit) for edge in (width, height))
    elif wide * high < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (width * height))
        wide, high = (math.ceil(edge * grow / unit) * unit for edge in (width, height))
    return np.asarray(image.resize((wide, high), Image.Resampling.BICUBIC))


def cut(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Normalised float32 patches of shape (n, 1176), 2 x 2 neighbours together, and their grid in time, down and across."""
    high, wide = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    normalised = (pixels.astype(np.float32) / np.float32(255) - MEAN) / STD
    blocks = normalised.reshape(high // MERGE, MERGE, PATCH, wide // MERGE, MERGE, PATCH, CHANNELS)
    ordered = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(high * wide, CHANNELS, 1, PATCH, PATCH)
    patches = np.repeat(ordered, FRAMES, axis=2).reshape(high * wide, -1)
    return patches, np.array([1, high, wide], np.int64)

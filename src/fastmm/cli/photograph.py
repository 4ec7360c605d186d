"""A photograph to the patches that Qwen2-VL takes, and patches back to a picture.

Sizes, order and numbers are those of the public Qwen2-VL image processor; a test compares the patches with its own.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CommandError

PATCH = 14  # pixels along each edge of a patch
MERGE = 2  # the model merges 2 x 2 patches into one token, so these lie together
FRAMES = 2  # a patch is two frames of a video deep; a still picture is repeated
CHANNELS = 3
PATCH_VALUES = CHANNELS * FRAMES * PATCH * PATCH
MIN_PIXELS = 56 * 56
MAX_PIXELS = 28 * 28 * 1280
MAX_ASPECT = 200
# Pillow's names for pictures of 32-bit whole numbers and floats.
DEEP_MODES = ("I", "F")
# CLIP's, in red, green, blue.
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Patches = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Photograph:
    """A photograph, resized for the model.

    Attributes
    ----------
    name
        The file's name without its ending.
    original_size
        Width and height of the file's picture, upright.
    pixels
        uint8 of shape (height, width, 3); height and width are multiples of 28.
    """

    name: str
    original_size: tuple[int, int]
    pixels: Pixels

    @property
    def grid_thw(self) -> tuple[int, int, int]:
        """Patches in time, down and across."""
        height, width, _ = self.pixels.shape
        return 1, height // PATCH, width // PATCH

    @property
    def patch_count(self) -> int:
        return math.prod(self.grid_thw)

    @property
    def token_count(self) -> int:
        """Places in the prompt that the picture takes."""
        return self.patch_count // MERGE**2


def find_photograph(word: str) -> Path:
    """The file at the path `word`, or the photograph of that name in scikit-image."""
    path = Path(word)
    try:
        if path.is_file():
            return path
        if path.exists():
            raise CommandError(f"{word}: is not a file; give the path of a photograph")
    except OSError as error:
        raise CommandError(f"{word[:80]}: {error.strerror}") from None
    if path.name != word or path.suffix:
        raise CommandError(f"{word}: there is no such file")
    samples = sample_photographs()
    if word in samples:
        return samples[word]
    if samples:
        raise CommandError(f"{word}: there is no such file, and scikit-image ships no such photograph (try astronaut, coffee)")
    raise CommandError(
        f"{word}: there is no such file; for the photographs that scikit-image ships, pip install 'fastmm[demo]'"
    )


def sample_photographs() -> dict[str, Path]:
    """What scikit-image ships, by name; empty where it is not installed. scikit-image itself is not loaded: only its files."""
    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        return {}
    data = Path(spec.submodule_search_locations[0], "data")
    return {path.stem: path for pattern in ("*.jpg", "*.png") for path in sorted(data.glob(pattern))}


def load_photograph(path: Path) -> Photograph:
    """Read a file and resize its picture to multiples of 28 pixels, within the model's limits."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise CommandError("reading photographs needs Pillow: pip install 'fastmm[demo]'") from None
    try:
        with Image.open(path) as file:
            if file.mode in DEEP_MODES or file.mode.startswith("I;"):  # Pillow would clip these to white without a word
                raise CommandError(f"{path}: has more than 8 bits for each colour; save it with 8, as Qwen2-VL takes them")
            picture = ImageOps.exif_transpose(file).convert("RGB")
    except Image.DecompressionBombError as error:
        raise CommandError(f"{path}: is too large to be a photograph: {error}") from None
    except Image.UnidentifiedImageError:
        raise CommandError(f"{path}: is not a picture that Pillow can read") from None
    except (OSError, SyntaxError, ValueError) as error:  # Pillow's words for a file that is damaged or cut short
        raise CommandError(f"{path}: cannot be read: {error}") from None
    width, height = picture.size
    resized = picture.resize(resized_size(width, height, path), Image.Resampling.BICUBIC)
    return Photograph(path.stem, (width, height), np.asarray(resized))


def resized_size(width: int, height: int, path: Path) -> tuple[int, int]:
    """The nearest size of multiples of 28 whose area is within the model's limits; the aspect ratio is kept as it can."""
    unit = PATCH * MERGE
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise CommandError(f"{path}: {width} x {height} pixels; Qwen2-VL takes an aspect ratio of at most {MAX_ASPECT}")
    wide, high = round(width / unit) * unit, round(height / unit) * unit
    if wide * high > MAX_PIXELS:
        shrink = math.sqrt(width * height / MAX_PIXELS)
        wide = max(unit, math.floor(width / shrink / unit) * unit)
        high = max(unit, math.floor(height / shrink / unit) * unit)
    elif wide * high < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (width * height))
        wide, high = math.ceil(width * grow / unit) * unit, math.ceil(height * grow / unit) * unit
    return wide, high


def patches_of(photograph: Photograph) -> Patches:
    """Normalised float32 patches of shape (n, 1176), each of channel, frame, row, column; 2 x 2 neighbours together."""
    _, high, wide = photograph.grid_thw
    normalised = (photograph.pixels.astype(np.float32) / np.float32(255) - MEAN) / STD
    blocks = normalised.reshape(high // MERGE, MERGE, PATCH, wide // MERGE, MERGE, PATCH, CHANNELS)
    # block row, block column, row and column in the block | channel, pixel row, pixel column
    ordered = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(high * wide, CHANNELS, 1, PATCH, PATCH)
    return np.repeat(ordered, FRAMES, axis=2).reshape(high * wide, PATCH_VALUES)


def pixels_of(patches: Patches, grid_thw: tuple[int, int, int]) -> Pixels:
    """The picture that patches show, by their first frame: the way back of `patches_of`."""
    _, high, wide = grid_thw
    first = patches.reshape(high // MERGE, wide // MERGE, MERGE, MERGE, CHANNELS, FRAMES, PATCH, PATCH)[:, :, :, :, :, 0]
    rows = first.transpose(0, 2, 5, 1, 3, 6, 4).reshape(high * PATCH, wide * PATCH, CHANNELS)
    levels = np.rint((rows * STD + MEAN) * np.float32(255))
    pixels: Pixels = np.clip(levels, 0, 255).astype(np.uint8)
    return pixels

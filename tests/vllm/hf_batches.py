"""Batches that real HuggingFace processors make of photographs and sound, with vLLM's fields and ours for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from vllm.multimodal.inputs import MultiModalFieldConfig as Config

import fastmm

PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")


@cache
def photographs() -> list[Image.Image]:
    """scikit-image carries them; only the files are wanted, not the package."""
    found = importlib.util.find_spec("skimage")
    assert found is not None
    assert found.origin is not None
    return [Image.open(Path(found.origin).parent / "data" / name).convert("RGB") for name in PHOTOGRAPHS]


def clips() -> list[np.ndarray]:
    """Three sounds of 1, 2 and 3 seconds: gliding tones."""
    seconds = [np.arange(16_000 * n) / 16_000 for n in (1, 2, 3)]
    return [np.sin(2 * np.pi * (200 + 150 * t) * t).astype(np.float32) for t in seconds]


@dataclass
class Case:
    """One batch: the tensors, how vLLM splits them, how we do."""

    tensors: dict[str, Any]
    configs: dict[str, Config]
    ours: dict[str, Any] = field(default_factory=dict)
    modality: str = "image"
    n: int = len(PHOTOGRAPHS)


def clip() -> Case:
    batch = transformers.CLIPImageProcessorPil()(photographs(), return_tensors="pt")
    return Case(dict(batch), {"pixel_values": Config.batched("image")}, {"batched": {"pixel_values"}})


def llava_next() -> Case:
    batch = transformers.LlavaNextImageProcessorPil()(photographs(), return_tensors="pt")
    keys = ("pixel_values", "image_sizes")
    return Case(dict(batch), {key: Config.batched("image") for key in keys}, {"batched": set(keys)})


def qwen() -> Case:
    batch = dict(transformers.Qwen2VLImageProcessorPil()(photographs(), return_tensors="pt"))
    grid = batch["image_grid_thw"]
    batch["patches_per_image"] = grid.prod(-1)
    return Case(
        batch,
        {
            "pixel_values": Config.flat_from_sizes("image", grid.prod(-1)),
            "image_grid_thw": Config.batched("image", keep_on_cpu=True),
            "patches_per_image": Config.shared("image", len(PHOTOGRAPHS)),
        },
        {
            "flat": {"pixel_values": "patches_per_image"},
            "batched": {"image_grid_thw"},
            "keep_on_cpu": {"image_grid_thw"},
        },
    )


def qwen_video() -> Case:
    """Two clips of two and four frames, each a photograph that slides."""
    image = np.asarray(photographs()[0])
    videos = [[np.roll(image, 8 * i, 1)[:224, :224] for i in range(count)] for count in (2, 4)]
    processor = transformers.Qwen2VLImageProcessorPil()
    made = [processor(video, return_tensors="pt") for video in videos]
    sizes = torch.tensor([len(batch["pixel_values"]) for batch in made])
    pixels = torch.cat([batch["pixel_values"] for batch in made])
    grids = torch.tensor([[len(video), *batch["image_grid_thw"][0, 1:]] for video, batch in zip(videos, made, strict=True)])
    return Case(
        {"pixel_values_videos": pixels, "video_grid_thw": grids},
        {"pixel_values_videos": Config.flat_from_sizes("video", sizes), "video_grid_thw": Config.batched("video")},
        {"flat": {"pixel_values": sizes}, "batched": {"image_grid_thw"}},
        "video",
        2,
    )


def whisper() -> Case:
    batch = transformers.WhisperFeatureExtractor(feature_size=128)(
        clips(), sampling_rate=16_000, return_tensors="pt", return_attention_mask=True
    )
    return Case(
        dict(batch),
        {key: Config.batched("audio") for key in batch},
        {"batched": {"input_features", "attention_mask"}},
        "audio",
        3,
    )


def whisper_along_time() -> Case:
    """All clips' frames behind one another: flat along the last axis, the leaves have gaps."""
    batch = transformers.WhisperFeatureExtractor(feature_size=80)(clips(), sampling_rate=16_000, return_tensors="pt")
    sizes = [100, 200, 300]
    frames = torch.cat([row[:, :size] for row, size in zip(batch["input_features"], sizes, strict=True)], 1)
    return Case(
        {"input_features": frames},
        {"input_features": Config.flat_from_sizes("audio", torch.tensor(sizes), dim=1)},
        {"flat": {"input_features": fastmm.FlatSizes(sizes, 1)}},
        "audio",
        3,
    )


def pixtral() -> Case:
    """A ragged batch: each photograph keeps its own size."""
    batch = transformers.PixtralImageProcessorPil()(photographs())
    images = [torch.as_tensor(np.asarray(image)) for image in batch["pixel_values"]]
    return Case({"pixel_values": images}, {"pixel_values": Config.batched("image")}, {"batched": {"pixel_values"}})


def ragged_tiles() -> Case:
    """A flat list: two photographs have two tiles, the others one; tiles differ in size."""
    tiles = pixtral().tensors["pixel_values"]
    tiles = [tiles[0], tiles[1], tiles[0][:, :64], tiles[2], tiles[3], tiles[3][:, :, :80]]
    return Case(
        {"tiles": tiles},
        {"tiles": Config.flat("image", [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 6)])},
        {"flat": {"tiles": [2, 1, 1, 2]}},
    )


def mixed() -> Case:
    """Every kind of field in one batch, with what is left on the CPU in each."""
    one = qwen()
    shared = torch.tensor(transformers.CLIPImageProcessorPil().image_mean)
    one.tensors |= {
        "small": clip().tensors["pixel_values"],
        "ragged": pixtral().tensors["pixel_values"],
        "mean": shared,
        "rows": one.tensors["pixel_values"][:, :6].T.contiguous(),
        "scales": [0.5, 1, True, 2.25],
    }
    sizes = one.tensors["patches_per_image"]
    one.configs |= {
        "small": Config.batched("image"),
        "ragged": Config.batched("image", keep_on_cpu=True),
        "mean": Config.shared("image", 4, keep_on_cpu=True),
        "rows": Config.flat_from_sizes("image", sizes, dim=1, keep_on_cpu=True),
        "scales": Config.batched("image"),
    }
    one.ours = {
        "flat": {"pixel_values": "patches_per_image", "rows": fastmm.FlatSizes("patches_per_image", 1)},
        "batched": ["image_grid_thw", "small", "ragged", "scales"],
        "keep_on_cpu": ["image_grid_thw", "ragged", "mean", "rows"],
    }
    return one


CASES: dict[str, Callable[[], Case]] = {
    maker.__name__: maker
    for maker in (clip, llava_next, qwen, qwen_video, whisper, whisper_along_time, pixtral, ragged_tiles, mixed)
}

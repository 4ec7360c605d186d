"""The demo cuts photographs as the real Qwen2-VL image processor does, and the real engine reads its request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fastmm
from fastmm.cli.photograph import Photograph, load_photograph, patches_of
from fastmm.cli.request import IMAGE_PAD, request_for

image = pytest.importorskip("PIL.Image")


@pytest.mark.parametrize("size", [(512, 512), (600, 400), (451, 300), (31, 57), (1, 1), (1600, 1200), (150, 1)])
def test_patches_are_those_of_the_real_processor_bit_for_bit(size: tuple[int, int], tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    width, height = size
    # Smooth and rough at once, so that the resizing has something to get wrong.
    rows, columns = np.mgrid[:height, :width]
    smooth = 127 + 80 * np.sin(rows / 17) * np.cos(columns / 23)
    rough = np.random.default_rng(width * height).integers(-40, 40, (height, width, 3))
    source = image.fromarray((smooth[..., None] + rough).clip(0, 255).astype(np.uint8))
    source.save(tmp_path / "a.png")

    real = Qwen2VLImageProcessorPil()(source, return_tensors="np")
    photograph = load_photograph(tmp_path / "a.png")
    assert photograph.grid_thw == tuple(real["image_grid_thw"][0])
    assert np.array_equal(patches_of(photograph), real["pixel_values"])


def test_the_real_engine_decodes_the_demos_request() -> None:
    import torch
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder

    rng = np.random.default_rng(3)
    photographs = [
        Photograph("a", (56, 84), rng.integers(0, 256, (84, 56, 3), dtype=np.uint8)),
        Photograph("b", (112, 56), rng.integers(0, 256, (56, 112, 3), dtype=np.uint8)),
    ]
    frames = fastmm.encode_request(request_for(photographs, "r-1", "torch"), dtype="bfloat16")
    request = MsgpackDecoder(EngineCoreRequest).decode(frames)
    assert request.request_id == "r-1"
    assert len(request.mm_features) == 2
    for feature, photograph in zip(request.mm_features, photographs, strict=True):
        sent = torch.from_numpy(patches_of(photograph)).to(torch.bfloat16)
        assert torch.equal(feature.data["pixel_values"].data, sent)
        assert feature.data["image_grid_thw"].data.tolist() == list(photograph.grid_thw)
        first, count = feature.mm_position.offset, feature.mm_position.length
        assert request.prompt_token_ids[first : first + count] == [IMAGE_PAD] * photograph.token_count

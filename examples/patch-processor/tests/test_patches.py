"""What a model package tests of its processor: that it keeps fastmm's contract, and that its numbers are right."""

from __future__ import annotations

import io

import numpy as np
import pytest
from fastmm_patches import PatchExtensions, PatchProcessor
from PIL import Image

from fastmm.errors import ExtensionError, ProcessorError
from fastmm.processors import Work, load_processor, process_work, split_extensions
from fastmm.processors.testing import check_processor

IMAGE = 151655


def photograph(seed: int, size: tuple[int, int] = (160, 120)) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "PNG")
    return out.getvalue()


def work(*images: object, **more: object) -> Work:
    prompt = [1, *[2, IMAGE, 3] * len(images), 4]
    return Work(request_id="r", prompt_token_ids=prompt, images=images, **more)  # type: ignore[arg-type]


def test_it_keeps_the_contract():
    samples = [
        work(photograph(1)),
        work(
            photograph(2, (90, 200)),
            "https://host/b.png",
            prefetched=[photograph(3)],
            extensions={"multimodal_max_pixels": 5000},
        ),
        work(Image.open(io.BytesIO(photograph(4)))),
        work(),
    ]
    check_processor(PatchProcessor(), samples)


def test_it_is_found_by_its_name():
    assert isinstance(load_processor("patches"), PatchProcessor)


def test_each_image_takes_a_quarter_of_its_patches_as_tokens():
    made = process_work(PatchProcessor(), work(photograph(1), photograph(2, (90, 200))))
    for item in made.items:
        ((first, last),) = item.spans
        assert set(made.prompt_token_ids[first : last + 1]) == {IMAGE}
        assert 4 * (last - first + 1) == len(item.features["pixel_values"]) == item.features["image_grid_thw"].prod()


def test_a_request_may_ask_for_fewer_pixels_and_a_batch_for_all_of_it():
    large, small = (
        process_work(PatchProcessor(), work(photograph(1), extensions=extensions)).items[0]
        for extensions in ({}, {"multimodal_max_pixels": 5000})
    )
    assert len(small.features["pixel_values"]) * 196 <= 5000 < len(large.features["pixel_values"]) * 196
    assert small.hash != large.hash
    batch = split_extensions({"multimodal_max_pixels": 5000}, 2, True, schema=PatchExtensions)
    assert batch == [{"multimodal_max_pixels": 5000}] * 2


@pytest.mark.parametrize("value", [True, "5000", 5000.5, 10, None])
def test_another_value_is_the_clients_fault(value):
    with pytest.raises(ExtensionError, match=r"invalid processor extensions: .*multimodal_max_pixels"):
        process_work(PatchProcessor(), work(photograph(1), extensions={"multimodal_max_pixels": value}))


def test_images_without_a_place_are_refused():
    with pytest.raises(ProcessorError, match="1 images, and 0 places"):
        process_work(PatchProcessor(), Work(request_id="r", prompt_token_ids=[1], images=[photograph(1)]))

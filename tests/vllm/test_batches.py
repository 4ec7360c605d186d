"""A processor's batch: split by vLLM and by us, sent, and joined again by the engine's own code to the same tensors."""

import random

import pytest
import torch
from peers import our_encoder, received, vllm_decode, vllm_encoder
from support.compare import assert_same, assert_same_frames
from transformers import BatchFeature
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm_family import FAMILY as F

import fastmm

KEEP = {"image_grid_thw"}


def batch_of(seed):
    """What a processor of the kind of Qwen2-VL gives for a few images, and the places of their tokens."""
    rng = random.Random(seed)
    count = rng.randint(1, 7)
    patches = torch.tensor([rng.randint(1, 9) for _ in range(count)])
    total = int(patches.sum())
    tensors = {
        "pixel_values": torch.randn(total, 12, generator=torch.Generator().manual_seed(seed)),
        "image_grid_thw": torch.arange(count * 3).reshape(count, 3),
        "mask": torch.arange(total) % 2 == 0,
        "scale": torch.tensor([0.5, 2.0]),
        "patches": patches,
    }
    places, ids = [], []
    for size in patches.tolist():
        places.append((len(ids) + 1, size))
        ids += [1, *[9] * size]
    return tensors, places, [*ids, 2]


def by_vllm(tensors, places):
    count = len(places)
    configs = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", tensors["patches"]),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        "mask": MultiModalFieldConfig.flat_from_sizes("image", tensors["patches"]),
        "scale": MultiModalFieldConfig.shared("image", count),
        "patches": MultiModalFieldConfig.batched("image"),
    }
    items = MultiModalKwargsItems.from_hf_inputs(BatchFeature(tensors), configs)["image"]
    return [
        F.feature(item, "image", f"h{i}", F.placeholder(*place), f"h{i}")
        for i, (item, place) in enumerate(zip(items, places, strict=True))
    ]


def by_us(tensors, places, ids, **options):
    return fastmm.build_features(
        tensors=tensors,
        flat={"pixel_values": "patches", "mask": "patches"},
        batched={"image_grid_thw", "patches"},
        keep_on_cpu=KEEP,
        placeholders=places,
        hashes=[f"h{i}" for i in range(len(places))],
        prompt_token_ids=ids,
        **options,
    )


def model_inputs(request):
    """What the engine's own code makes of the features of a request for the model."""
    return dict(sorted(MultiModalKwargsItems({"image": [feature.data for feature in request.mm_features]}).get_data().items()))


def sent(features, ids):
    """The request as the real engine decodes it."""
    request = fastmm.EngineCoreRequest("r", ids, features, arrival_time=1.0)
    return vllm_decode(our_encoder(64, dedup=True).encode(request))


@pytest.mark.parametrize("full_slices", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_the_engine_joins_our_items_to_the_processors_batch(seed, full_slices):
    tensors, places, ids = batch_of(seed)
    theirs = vllm_decode(vllm_encoder(64).encode(F.request("r", ids, arrival_time=1.0, mm_features=by_vllm(tensors, places))))
    ours = sent(by_us(tensors, places, ids, full_slices=full_slices), ids)
    assert_same(model_inputs(ours), model_inputs(theirs))
    assert_same(model_inputs(ours)["pixel_values"], tensors["pixel_values"])
    for mine, other in zip(ours.mm_features, theirs.mm_features, strict=True):
        assert (mine.modality, mine.identifier, mine.mm_hash) == (other.modality, other.identifier, other.mm_hash)
        assert_same(mine.mm_position, other.mm_position)
        for key in other.data:
            assert_same(mine.data[key].data, other.data[key].data)
            assert mine.data[key].field.keep_on_cpu == other.data[key].field.keep_on_cpu


@pytest.mark.parametrize("seed", range(25))
def test_we_write_vllms_own_items_byte_for_byte(seed):
    tensors, places, ids = batch_of(seed)
    request = F.request("r", ids, arrival_time=1.0, mm_features=by_vllm(tensors, places))
    assert_same_frames(our_encoder(64).encode(request), vllm_encoder(64).encode(request))


def test_samples_of_one_prompt_decode_each_to_its_own_request():
    tensors, places, ids = batch_of(3)
    features = by_vllm(tensors, places)
    requests = [
        F.request(f"r{i}", ids, arrival_time=1.0 + i, mm_features=features, sampling_params=F.sampling(seed=i))
        for i in range(5)
    ]
    expected = [vllm_decode(vllm_encoder(64).encode(request)) for request in requests]
    many = fastmm.encode_requests(requests, threshold=64)
    for frames, one in zip(many, expected, strict=True):
        assert_same(vllm_decode(frames), one)
    cast = fastmm.encode_requests(requests, threshold=64, dtype="bfloat16")
    for frames, one in zip(cast, expected, strict=True):
        decoded = vllm_decode(frames)
        assert decoded.request_id == one.request_id
        for mine, other in zip(decoded.mm_features, one.mm_features, strict=True):
            assert_same(mine.data["pixel_values"].data, other.data["pixel_values"].data.bfloat16())
            assert_same(mine.data["image_grid_thw"].data, other.data["image_grid_thw"].data)


def test_encode_request_takes_vllms_request_and_decode_request_gives_ours():
    tensors, places, ids = batch_of(4)
    request = F.request("r", ids, arrival_time=1.0, mm_features=by_vllm(tensors, places), sampling_params=F.sampling(stop="x"))
    frames = fastmm.encode_request(request)
    assert_same(vllm_decode(frames), fastmm.decode_request(received(frames)))
    assert_same_frames(fastmm.encode_request(request, dedup=False), vllm_encoder(256).encode(request))

"""With `dtype` the frames are those that vLLM writes for the same request with its floating payloads cast by torch."""

import random

import numpy as np
import pytest
import torch
from corpus import viewable
from peers import our_encoder, vllm_decode, vllm_encoder
from support.compare import assert_same, assert_same_frames, frame_bytes
from vllm_family import FAMILY as F

import fastmm

FLOATING = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def tensor(rng, dtypes=(*FLOATING, torch.int64, torch.bool, torch.uint8)):
    """Finite values: which bits a NaN gets is torch's affair here and ours elsewhere."""
    dtype = dtypes[rng.randint(0, len(dtypes) - 1)]
    shape = tuple(rng.randint(0, 9) for _ in range(rng.randint(0, 3)))
    values = torch.from_numpy(np.random.default_rng(rng.randint(0, 2**32)).normal(size=(*shape, 2)) * 100)
    made = values.to(dtype)
    made = [made, made[..., 0], made.transpose(0, -1), made[..., :1].expand_as(made)][rng.randint(0, 3)]
    return viewable(made)


def build(seed, cast=lambda x: x):
    """A request of a seed, `cast` applied to the payloads that the dtype policy covers."""
    rng = random.Random(seed)
    items = [
        {f"k{k}": [tensor(rng), [tensor(rng), 3, 2.5], tensor(rng)][: rng.randint(1, 3)] for k in range(rng.randint(1, 3))}
        for _ in range(rng.randint(1, 4))
    ]
    nest = lambda x: [nest(y) for y in x] if isinstance(x, list) else cast(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
    return F.request(
        "r",
        [1, 2],
        arrival_time=1.5,
        mm_features=[
            F.feature(
                F.item({key: F.elem(nest(data), F.batched()) for key, data in item.items()}),
                "image",
                "i",
                F.placeholder(0, 4, torch.tensor([True, False, True, True])),
            )
            for item in items
        ],
        sampling_params=F.sampling(extra_args={"scale": np.ones(3, np.float32)}),
        prompt_embeds=cast(tensor(rng, FLOATING)),
    )


def dense(tensor):
    return tensor.clone(memory_format=torch.contiguous_format)


def by_torch(dtype):
    return lambda x: x.to(torch.float32).to(dtype).contiguous() if x.is_floating_point() else x


@pytest.mark.parametrize("threshold", [0, 64, 2**62])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("inplace", [True, False])
def test_frames_are_those_of_the_tensors_cast_by_torch(name, threshold, inplace):
    encoder = fastmm.Encoder(dtype=name, inplace=inplace, dedup=False, threshold=threshold)
    for seed in range(60):
        expected = vllm_encoder(threshold).encode(build(seed, by_torch(getattr(torch, name))))
        request = build(seed)
        assert_same_frames(encoder.encode(request), expected)
        if inplace:
            assert_same_frames(encoder.encode(request), expected)
        else:
            assert_same(request, build(seed))


@pytest.mark.parametrize("threshold", [0, 64, 2**62])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_the_tree_is_coherent_after_a_cast_in_place(name, threshold):
    """Dense leaves are handed over: whoever encodes the tree now, vLLM too, writes the same frames."""
    encoder = fastmm.Encoder(dtype=name, dedup=False, threshold=threshold)
    for seed in range(60):
        request = build(seed, dense)
        expected = vllm_encoder(threshold).encode(build(seed, by_torch(getattr(torch, name))))
        assert_same_frames(encoder.encode(request), expected)
        assert_same_frames(vllm_encoder(threshold).encode(request), expected)
        assert_same_frames(our_encoder(threshold).encode(request), expected)


def test_deduplicated_casts_decode_to_the_same():
    encoder = fastmm.Encoder(dtype="bfloat16", threshold=0)
    values = torch.arange(24, dtype=torch.float32)
    request, expected = build(1), build(1, by_torch(torch.bfloat16))
    request.sampling_params = expected.sampling_params = None
    for leaf, part in ((values, request), (values.bfloat16(), expected)):
        for feature in part.mm_features:
            feature.data["again"] = F.elem([leaf.view(4, 6), leaf.view(6, 4)], F.batched())
    assert_same(vllm_decode(encoder.encode(request)), expected)
    first, second = request.mm_features[0].data["again"].data
    assert first.dtype == second.dtype == torch.bfloat16
    assert first.data_ptr() == second.data_ptr() == values.data_ptr()


def test_encoding_again_gives_the_same_bytes():
    encoder = fastmm.Encoder(dtype="bfloat16")
    request = build(7)
    first = frame_bytes(encoder.encode(request))
    assert frame_bytes(encoder.encode(request)) == first

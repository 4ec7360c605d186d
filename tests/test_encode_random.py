"""Ownership and the wire, on random requests whose leaves lie over, under and across one another's memory.

The oracle is the reference encoder over a copy of the request in which torch has cast every payload.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from support.compare import assert_same, assert_same_frames
from support.payloads import bits, through_float32
from support.reference import reference_encode
from support.requests import feature

from fastmm import (
    Encoder,
    EngineCoreRequest,
    FastmmError,
    MmBatchedField,
    MmFeatureSpec,
    MmFieldElem,
    MmFlatField,
    MmSharedField,
    PlaceholderRange,
    SamplingParams,
    decode_request,
    encode_requests,
)

torch = pytest.importorskip("torch")

THRESHOLDS = [0, 1, 64, 256, 2**62]
SEEDS = range(400)


class Draw:
    """A request of a seed; its leaves are views of a few bases, or tensors of their own."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.bases = [self.base() for _ in range(self.rng.randint(1, 4))]
        self.fields = [self.field() for _ in range(3)]
        self.leaves = []

    def base(self):
        count = self.rng.choice([1, 8, 60, 300, 5000])
        dtype = self.rng.choice([torch.float32] * 6 + [torch.float64, torch.float16, torch.bfloat16, torch.int32])
        made = torch.randn(count, generator=torch.Generator().manual_seed(self.rng.randrange(2**31))) * 100
        return made.to(dtype)

    def field(self):
        slices = [(slice(self.rng.randrange(9), self.rng.randrange(70_000)),) for _ in range(self.rng.choice([0, 1, 3, 20]))]
        return self.rng.choice(
            [MmBatchedField(), MmSharedField(batch_size=self.rng.randrange(300)), MmFlatField(slices=slices)]
        )

    def view(self):
        """Any view of a base: the very same memory, a part, an overlap, a stride, other integers over the same bytes."""
        base = self.rng.choice(self.bases)
        count = base.numel()
        kind = self.rng.randrange(11)
        if kind <= 2:
            return base
        if kind == 3 and count % 4 == 0:
            return base.view(4, -1) if self.rng.random() < 0.7 else base.view(4, -1).t()
        if kind == 4:
            return base[:: self.rng.choice([1, 2, 3])]
        if kind == 5:
            return base.view(torch.uint8)
        if kind == 6:
            return base[:1].expand(self.rng.randint(0, 40))
        if kind == 7 and count >= 8:
            return base.unfold(0, 4, self.rng.randint(1, 4))
        if kind == 8:
            return base.detach().clone()
        first, last = sorted(self.rng.randint(0, count) for _ in range(2))
        return base[first:last]

    def leaf(self):
        made = self.view()
        if made.is_contiguous() and made.dim() and made.stride(-1) != 1:  # an odd stride where there is one element
            made = made.clone(memory_format=torch.contiguous_format)
        self.leaves.append(made)
        return made

    def data(self, depth=2):
        kind = self.rng.randrange(10)
        if kind <= 6 or not depth:
            return self.leaf()
        if kind == 7:
            return self.rng.choice([5, 2.5, True])
        items = [self.data(depth - 1) for _ in range(self.rng.randint(0, 3))]
        return items if kind == 8 else tuple(items)

    def features(self):
        made = []
        for index in range(self.rng.choice([0, 1, 2, 4, 7])):
            item = {
                key: MmFieldElem(data=self.data(), field=self.rng.choice(self.fields))
                for key in ("pixel_values", "grid", "é" * 20)
                if self.rng.random() < 0.7
            }
            position = PlaceholderRange(index, 5, torch.tensor([True] * 5) if self.rng.random() < 0.3 else None)
            made.append(MmFeatureSpec(data=item, modality="image", identifier=f"i{index}", mm_position=position))
        if made and self.rng.random() < 0.2:
            made.append(self.rng.choice(made))  # the very same object again
        return made

    def request(self, features=None):
        made = EngineCoreRequest(
            f"r{self.rng.randrange(99)}", [self.rng.randrange(150_000) for _ in range(self.rng.randint(0, 300))]
        )
        made.arrival_time = 1.5
        made.mm_features = self.features() if features is None else features
        if self.rng.random() < 0.4:
            made.prompt_embeds = self.leaf()
        if self.rng.random() < 0.4:
            extra = {"array": np.arange(self.rng.randrange(100)), "alias": self.leaf()} if self.rng.random() < 0.5 else {}
            made.sampling_params = SamplingParams(temperature=0.7, extra_args=extra)
        return made


def copied(value, target, payload=False):
    """The request as it is on the wire: payloads cast by torch, everything in memory of its own."""
    if isinstance(value, torch.Tensor):
        dense = value.clone(memory_format=torch.contiguous_format)
        cast = payload and target is not None and value.is_floating_point() and str(value.dtype) != f"torch.{target}"
        return through_float32(dense, target) if cast else dense
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, (list, tuple)):
        return type(value)(copied(item, target, payload) for item in value)
    if isinstance(value, dict):
        return {key: copied(item, target) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        again = object.__new__(type(value))
        for field in dataclasses.fields(value):
            is_payload = (isinstance(value, MmFieldElem) and field.name == "data") or field.name == "prompt_embeds"
            content = getattr(value, field.name)
            is_default = content is field.default  # such a field is left out by identity
            object.__setattr__(again, field.name, content if is_default else copied(content, target, is_payload))
        return again
    return value


def snapshot(draw):
    return [bits(base) for base in draw.bases], [bits(leaf) for leaf in draw.leaves]


@pytest.mark.parametrize("target", [None, "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("inplace", [True, False])
def test_random_requests_are_the_references_bytes(target, inplace):
    for seed in SEEDS:
        draw = Draw(seed)
        made = draw.request()
        threshold = draw.rng.choice(THRESHOLDS)
        expected = reference_encode(copied(made, target), threshold)
        before = snapshot(draw)
        encoder = Encoder(dtype=target, inplace=inplace, dedup=False, threshold=threshold)
        try:
            for _ in range(2):  # the second time over what the first one left
                assert_same_frames(encoder.encode(made), expected)
            if target is None or not inplace:
                assert snapshot(draw) == before
            else:
                assert_same_frames(Encoder(dedup=False, threshold=threshold).encode(copied(made, target)), expected)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, threshold {threshold}: {error}") from error


@pytest.mark.parametrize("target", [None, "bfloat16"])
def test_random_requests_come_back_equal_with_shared_frames(target):
    for seed in SEEDS:
        draw = Draw(seed)
        made = draw.request()
        threshold = draw.rng.choice(THRESHOLDS)
        expected = copied(made, target)
        frames = Encoder(dtype=target, threshold=threshold).encode(made)
        received = [bytearray(memoryview(frame)) for frame in frames]
        if made.sampling_params is not None and made.sampling_params.extra_args:
            expected.sampling_params = made.sampling_params = None  # arrays of type Any come back as they are on the wire
            received = [bytearray(memoryview(f)) for f in Encoder(dtype=target, threshold=threshold).encode(made)]
        try:
            assert_same(decode_request(received), expected)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, threshold {threshold}: {error}") from error


@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("target", [None, "bfloat16"])
def test_random_requests_encoded_together_are_those_encoded_alone(target, dedup):
    for seed in SEEDS:
        draw = Draw(seed)
        shared = draw.features()
        made = [draw.request(draw.rng.choice([None, shared, shared])) for _ in range(draw.rng.randint(1, 5))]
        threshold = draw.rng.choice(THRESHOLDS)
        expected = [Encoder(dedup=dedup, threshold=threshold).encode(copied(each, target)) for each in made]
        try:
            for _ in range(2):
                together = encode_requests(made, dtype=target, dedup=dedup, threshold=threshold)
                for got, alone, each in zip(together, expected, made, strict=True):
                    if dedup:
                        decoded = decode_request([bytearray(memoryview(frame)) for frame in got])
                        if each.sampling_params is None or not each.sampling_params.extra_args:
                            assert_same(decoded, decode_request([bytearray(memoryview(frame)) for frame in alone]))
                    else:
                        assert_same_frames(got, alone)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, threshold {threshold}: {error}") from error


def test_random_requests_that_fail_change_nothing():
    for seed in SEEDS:
        draw = Draw(seed)
        made = draw.request()
        made.mm_features.append(feature(torch.ones(3)))
        name, wrong = draw.rng.choice(
            [
                ("session_id", object()),
                ("external_req_id", "\ud800"),
                ("prompt_embeds", torch.ones(3).to_sparse()),
                ("priority", 2**70),
            ]
        )
        setattr(made, name, wrong)
        before, tree = snapshot(draw), [id(leaf) for leaf in flat(made)]
        encoder = Encoder(dtype="bfloat16")
        for encode, value in ((encoder.encode, made), (encoder.encode_many, [made, made])):
            with pytest.raises(FastmmError):
                encode(value)
            assert snapshot(draw) == before, seed
            assert [id(leaf) for leaf in flat(made)] == tree, seed


def flat(value):
    """Every tensor of a tree, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)
    elif isinstance(value, dict):
        yield from flat(list(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from flat([getattr(value, field.name) for field in dataclasses.fields(value)])

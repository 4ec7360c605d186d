"""Features of real processors' batches: what vLLM makes of them, and what it decodes of ours, is the same data."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hf_batches import CASES, Case
from peers import vllm_decode, vllm_encoder
from support.compare import assert_same
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalFlatField,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

import fastmm

EMBED = 151_655
LENGTH = 6


@cache
def processed(name: str) -> Case:
    return CASES[name]()


def prompt(n: int) -> tuple[list[int], list[tuple[int, int]]]:
    ids, places = [1, 2, 3], []
    for _ in range(n):
        places.append((len(ids), LENGTH))
        ids += [EMBED] * LENGTH + [9]
    return ids, places


def fresh(value: Any) -> Any:
    """A copy: a cast in place must not reach the other side's data."""
    return [fresh(v) for v in value] if isinstance(value, list) else value.clone() if isinstance(value, torch.Tensor) else value


def ours(case: Case, **changes: Any) -> fastmm.EngineCoreRequest:
    ids, places = prompt(case.n)
    arguments = {
        "tensors": {key: fresh(value) for key, value in case.tensors.items()},
        "placeholders": places,
        "hashes": [f"{i:064x}" for i in range(case.n)],
        "prompt_token_ids": ids,
        "modality": case.modality,
    }
    features = fastmm.build_features(**(arguments | case.ours | changes))
    return fastmm.EngineCoreRequest("r", ids, mm_features=features, arrival_time=1.0)


def theirs(case: Case) -> EngineCoreRequest:
    ids, places = prompt(case.n)
    items = MultiModalKwargsItems.from_hf_inputs(case.tensors, case.configs)[case.modality]
    features = [
        MultiModalFeatureSpec(
            data=item,
            modality=case.modality,
            identifier=f"{i:064x}",
            mm_position=PlaceholderRange(offset=offset, length=length),
            mm_hash=f"{i:064x}",
        )
        for i, (item, (offset, length)) in enumerate(zip(items, places, strict=True))
    ]
    absent = dict.fromkeys(["sampling_params", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"])
    return EngineCoreRequest(request_id="r", prompt_token_ids=ids, mm_features=features, arrival_time=1.0, **absent)


def assert_same_items(got: list[Any], expected: list[Any], *, slices: bool) -> None:
    assert len(got) == len(expected)
    for feature, peer in zip(got, expected, strict=True):
        assert (feature.modality, feature.identifier, feature.mm_hash) == (peer.modality, peer.identifier, peer.mm_hash)
        assert_same(feature.mm_position, peer.mm_position)
        assert set(feature.data) == set(peer.data)
        for key, elem in feature.data.items():
            other = peer.data[key]
            assert_same(elem.data, other.data, key)
            assert type(elem.field) is type(other.field)
            assert elem.field.keep_on_cpu == other.field.keep_on_cpu
            for member in ("dim", "batch_size"):
                assert getattr(elem.field, member, None) == getattr(other.field, member, None)
            if slices and isinstance(elem.field, MultiModalFlatField):
                assert [bounds(s) for s in elem.field.slices] == [bounds(s) for s in other.field.slices]


def bounds(part: Any) -> list[Any]:
    """Of a slice or a tuple of slices, in which vLLM has 0-d tensors; one slice is as good as a tuple of it."""
    parts = part if isinstance(part, (list, tuple)) else [part]
    return [[None if x is None else int(x) for x in (s.start, s.stop, s.step)] for s in parts]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("full_slices", [False, True])
@pytest.mark.parametrize("threshold", [0, 256, 2**40])
def test_our_features_decode_to_what_from_hf_inputs_gives(name, full_slices, threshold):
    case = processed(name)
    expected = vllm_decode(vllm_encoder(256).encode(theirs(case))).mm_features
    assert_same_items(expected, theirs(case).mm_features, slices=True)  # the peer itself loses nothing
    got = vllm_decode(fastmm.encode_request(ours(case, full_slices=full_slices), threshold=threshold)).mm_features
    assert_same_items(got, expected, slices=full_slices)


@pytest.mark.parametrize("name", CASES)
def test_reducing_the_decoded_items_gives_the_batch_back(name):
    case = processed(name)
    items = [feature.data for feature in vllm_decode(fastmm.encode_request(ours(case))).mm_features]
    peers = [feature.data for feature in theirs(case).mm_features]
    for key in items[0]:
        elems = [item[key] for item in items]
        merged = elems[0].field.reduce_data(elems)
        assert_same(merged, peers[0][key].field.reduce_data([peer[key] for peer in peers]), key)
        batch = case.tensors[key]
        if isinstance(batch, torch.Tensor):
            assert_same(merged, batch, key)


@pytest.mark.parametrize("name", CASES)
def test_the_engine_batches_our_items_as_it_does_its_own(name):
    case = processed(name)
    items = [feature.data for feature in vllm_decode(fastmm.encode_request(ours(case))).mm_features]
    peers = [feature.data for feature in theirs(case).mm_features]
    got, expected = (MultiModalKwargsItems({case.modality: group}).get_data() for group in (items, peers))
    assert_same({key: got[key] for key in sorted(got)}, {key: expected[key] for key in sorted(expected)})


@pytest.mark.parametrize("name", CASES)
def test_a_cast_on_the_way_is_torchs_own_cast(name):
    def cast(value: Any) -> Any:
        if isinstance(value, list):
            return [cast(v) for v in value]
        return value.to(torch.bfloat16) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    case = processed(name)
    got = vllm_decode(fastmm.encode_request(ours(case), dtype="bfloat16")).mm_features
    for feature, peer in zip(got, theirs(case).mm_features, strict=True):
        for key, elem in feature.data.items():
            assert_same(elem.data, cast(peer.data[key].data), key)


@pytest.mark.parametrize("name", ["qwen", "whisper_along_time", "clip"])
@pytest.mark.parametrize("kind", ["numpy", "wire"])
def test_numpy_and_wire_batches_decode_to_the_same_torch_tensors(name, kind):
    case = processed(name)

    def convert(batch: torch.Tensor) -> Any:
        array = batch.numpy().copy()
        return array if kind == "numpy" else fastmm.WireTensor(array.dtype.name, array.shape, array.tobytes())

    tensors = {key: convert(value) for key, value in case.tensors.items()}
    got = vllm_decode(fastmm.encode_request(ours(case, tensors=tensors))).mm_features
    assert_same_items(got, theirs(case).mm_features, slices=False)


@pytest.mark.parametrize("name", CASES)
def test_cached_items_decode_to_items_without_data(name):
    case = processed(name)
    got = vllm_decode(fastmm.encode_request(ours(case, cached={0, case.n - 1}))).mm_features
    whole = theirs(case).mm_features
    assert [feature.data is None for feature in got] == [i in (0, case.n - 1) for i in range(case.n)]
    assert_same_items(got[1:-1], whole[1:-1], slices=False)
    assert [feature.mm_hash for feature in got] == [feature.mm_hash for feature in whole]


def test_a_mask_decodes_to_the_tensor_that_vllm_counts_with():
    case = processed("clip")
    ids, places = prompt(case.n)
    ids[places[1][0] + 2] = 9
    got = vllm_decode(fastmm.encode_request(ours(case, prompt_token_ids=ids, embed_token_id=EMBED))).mm_features
    assert [feature.mm_position.get_num_embeds() for feature in got] == [LENGTH, LENGTH - 1, LENGTH, LENGTH]
    mask = got[1].mm_position.is_embed
    assert mask.dtype == torch.bool
    assert mask.tolist() == [True, True, False, True, True, True]
    assert got[1].mm_position.extract_embeds_range() == [
        (places[1][0], places[1][0] + 1),
        (places[1][0] + 3, places[1][0] + 5),
    ]


def test_placeholders_of_vllm_are_taken():
    case = processed("clip")
    _, places = prompt(case.n)
    mask = torch.tensor([True, False] * 3)
    ranges = [PlaceholderRange(offset=o, length=n, is_embed=mask if i else None) for i, (o, n) in enumerate(places)]
    got = vllm_decode(fastmm.encode_request(ours(case, placeholders=ranges))).mm_features
    assert [feature.mm_position for feature in got] == ranges


def test_samples_of_a_request_of_vllm():
    request = theirs(processed("qwen"))
    request.sampling_params = SamplingParams(n=4, seed=11, temperature=0.5)
    samples = fastmm.fan_out(request, 4)
    assert all(type(sample) is EngineCoreRequest for sample in samples)
    assert all(sample.mm_features is request.mm_features for sample in samples)
    for i, frames in enumerate(fastmm.encode_requests(samples)):
        decoded = vllm_decode(frames)
        assert decoded.request_id == f"{i}_r"
        assert (decoded.sampling_params.n, decoded.sampling_params.seed) == (1, 11 + i)
        assert_same_items(decoded.mm_features, request.mm_features, slices=True)
    assert request.sampling_params.n == 4
    assert request.request_id == "r"


def test_prompt_embeddings_of_a_request_of_vllm_are_cast_right_for_every_sample():
    request = theirs(processed("clip"))
    request.prompt_embeds = torch.linspace(-2, 2, 600).reshape(4, 150)
    expected = request.prompt_embeds.to(torch.bfloat16)
    features = [feature.data["pixel_values"].data.to(torch.bfloat16) for feature in request.mm_features]
    for sample in fastmm.fan_out(request, 3):
        decoded = vllm_decode(fastmm.encode_request(sample, dtype="bfloat16", inplace=False))
        assert_same(decoded.prompt_embeds, expected)
        for feature, leaf in zip(decoded.mm_features, features, strict=True):
            assert_same(feature.data["pixel_values"].data, leaf)


def test_samples_decode_to_what_vllms_own_children_would():
    from vllm.v1.engine.parallel_sampling import ParentRequest

    request = theirs(processed("clip"))
    request.external_req_id = "outside"
    for seed in (None, 5):
        request.sampling_params = SamplingParams(n=3, seed=seed, temperature=0.5, max_tokens=8)
        parent = ParentRequest(request)
        for i, sample in enumerate(fastmm.fan_out(request, 3)):
            name, params = parent.get_child_info(i)
            assert sample.request_id == name
            assert sample.sampling_params == params
            assert sample.external_req_id == "outside"


def test_metadata_stays_linear_where_vllms_does_not():
    sizes = {}
    for n in (10, 100):
        patches = torch.zeros(n * 4, 300)
        case = Case(
            {"pixel_values": patches},
            {"pixel_values": MultiModalFieldConfig.flat_from_sizes("image", torch.full((n,), 4))},
            {"flat": {"pixel_values": [4] * n}},
            n=n,
        )
        sizes[n] = [
            len(memoryview(frames[0])) for frames in (fastmm.encode_request(ours(case)), vllm_encoder(256).encode(theirs(case)))
        ]
    assert sizes[100][0] < 11 * sizes[10][0]
    assert sizes[100][1] > 11 * sizes[10][1]

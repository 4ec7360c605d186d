"""n samples of one prompt: they share features, prompt and frames, and cost one cast."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from support.items import KINDS, array_of, qwen, tensor, torch_or_skip

import fastmm
from fastmm import SamplingParams, SchemaError, fan_out
from fastmm.errors import SchemaValueError


def prompt_request(kind="numpy", sizes=(100, 50), width=10, **fields):
    given = qwen(kind, list(sizes), width=width)
    fields.setdefault("sampling_params", SamplingParams(n=4, temperature=0.5))
    features = fastmm.build_features(**given)
    return fastmm.EngineCoreRequest("r", given["prompt_token_ids"], mm_features=features, arrival_time=1.0, **fields)


def received(frames):
    return [bytes(memoryview(frame)) for frame in frames]


# --- what a sample is ---------------------------------------------------------------------------------------------------


def test_samples_share_the_prompt_and_the_features():
    request = prompt_request(cache_salt="salt", priority=3, external_req_id="outside")
    samples = fan_out(request, 4)
    assert [sample.request_id for sample in samples] == ["0_r", "1_r", "2_r", "3_r"]
    for sample in samples:
        assert type(sample) is fastmm.EngineCoreRequest
        assert sample.mm_features is request.mm_features
        assert sample.prompt_token_ids is request.prompt_token_ids
        assert (sample.cache_salt, sample.priority, sample.external_req_id) == ("salt", 3, "outside")
        assert sample.arrival_time == request.arrival_time
        assert sample.sampling_params.n == 1
        assert sample.sampling_params.temperature == 0.5


def test_the_request_stays_as_it_is():
    request = prompt_request()
    before = (request.request_id, request.sampling_params, request.sampling_params.n, request.sampling_params.seed)
    for sample in fan_out(request, 2, seeds=[5, 6]):
        sample.priority = 9
    assert (request.request_id, request.sampling_params, request.sampling_params.n, request.sampling_params.seed) == before
    assert request.priority == 0


def test_one_sample_keeps_the_id_of_its_request():
    (sample,) = fan_out(prompt_request(), 1)
    assert sample.request_id == "r"
    assert sample.sampling_params.n == 1


def test_ids_and_seeds_are_taken_as_given():
    samples = fan_out(prompt_request(), 3, ids=["a", "b", "c"], seeds=(7, None, np.int64(2)))
    assert [sample.request_id for sample in samples] == ["a", "b", "c"]
    assert [sample.sampling_params.seed for sample in samples] == [7, None, 2]
    assert type(samples[2].sampling_params.seed) is int
    assert len({id(sample.sampling_params) for sample in samples}) == 3


def test_a_seed_of_the_request_counts_up():
    samples = fan_out(prompt_request(sampling_params=SamplingParams(n=3, seed=40)), 3)
    assert [sample.sampling_params.seed for sample in samples] == [40, 41, 42]


def test_a_request_without_sampling_parameters_can_be_fanned_out():
    samples = fan_out(prompt_request(sampling_params=None), 2)
    assert [sample.sampling_params for sample in samples] == [None, None]


@pytest.mark.parametrize(
    ("n", "options", "path", "kind"),
    [
        (0, {}, "n", SchemaValueError),
        (-1, {}, "n", SchemaValueError),
        (1.0, {}, "n", SchemaError),
        (True, {}, "n", SchemaError),
        (2, {"ids": ["a"]}, "ids", SchemaValueError),
        (2, {"ids": ["a", "a"]}, "ids", SchemaValueError),
        (2, {"ids": ["a", 1]}, "ids[1]", SchemaError),
        (2, {"ids": "ab"}, "ids", SchemaError),
        (2, {"seeds": [1]}, "seeds", SchemaValueError),
        (2, {"seeds": [1, 1.5]}, "seeds[1]", SchemaError),
        (2, {"seeds": [1, True]}, "seeds[1]", SchemaError),
        (2, {"seeds": 3}, "seeds", SchemaError),
    ],
)
def test_counts_ids_and_seeds_are_checked(n, options, path, kind):
    with pytest.raises(kind) as caught:
        fan_out(prompt_request(), n, **options)
    assert caught.value.path == path
    assert "got" in str(caught.value)


def test_seeds_need_sampling_parameters():
    with pytest.raises(SchemaError, match="sampling_params"):
        fan_out(prompt_request(sampling_params=None), 2, seeds=[1, 2])


@pytest.mark.parametrize("value", [None, 3, object()])
def test_what_is_no_request_is_an_error(value):
    with pytest.raises(SchemaError, match="request"):
        fan_out(value, 2)


# --- what samples cost ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_samples_decode_to_what_each_alone_would(kind, dtype):
    alone = [
        fastmm.decode_request(received(fastmm.encode_request(sample, dtype=dtype)), tensors="numpy")
        for sample in (fan_out(prompt_request(kind), 3)[i] for i in range(3))
    ]
    together = fastmm.encode_requests(fan_out(prompt_request(kind), 3), dtype=dtype)
    assert [fastmm.decode_request(received(frames), tensors="numpy") for frames in together] == alone
    assert len({sample.request_id for sample in alone}) == 3


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_samples_cost_one_cast_and_share_their_frames(kind):
    encoder = fastmm.Encoder(dtype="float16")
    request = prompt_request(kind)
    values = np.concatenate([array_of(feature.data["pixel_values"].data) for feature in request.mm_features])
    expected = values.astype(np.float16).tobytes()
    messages = encoder.encode_many(fan_out(request, 16))
    assert encoder.counters["nbytes_cast"] == 150 * 10 * 4
    places = [[(frame.address, frame.nbytes) for frame in frames[1:]] for frames in messages]
    assert places == places[:1] * 16
    assert all(b"".join(received(frames[1:])) == expected for frames in messages)


def test_samples_encoded_one_by_one_are_cast_once_too():
    encoder = fastmm.Encoder(dtype="float16")
    messages = [received(encoder.encode(sample)) for sample in fan_out(prompt_request(), 4)]
    assert encoder.counters["nbytes_cast"] == 150 * 10 * 4
    assert all(frames[1:] == messages[0][1:] for frames in messages)


def test_memory_does_not_grow_with_the_number_of_samples():
    peaks = {}
    for n in (1, 64):
        request = prompt_request(sizes=[4096, 4096], width=64)  # 2 MB
        samples = fan_out(request, n)
        fastmm.encode_requests(samples[:1], dtype="float16", inplace=False)
        tracemalloc.start()
        fastmm.encode_requests(samples, dtype="float16")
        peaks[n] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[64] < peaks[1] + 64 * 4096


def embeds_of(kind, swapped=False):
    array = np.linspace(-3, 3, 512, dtype=np.float32).reshape(4, 128)
    return array.astype(">f4") if swapped else tensor(kind, array)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("many", [True, False])
def test_prompt_embeddings_are_cast_right_for_every_sample(kind, many):
    embeds = embeds_of(kind)
    before = array_of(embeds).copy()
    samples = fan_out(prompt_request(prompt_embeds=embeds), 3)
    if many:
        messages = fastmm.encode_requests(samples, dtype="float16")
    else:
        messages = [fastmm.encode_request(sample, dtype="float16") for sample in samples]
    for frames in messages:
        found = fastmm.decode_request(received(frames), tensors="numpy").prompt_embeds
        assert np.array_equal(found, before.astype(np.float16))
    assert np.array_equal(array_of(embeds), before)


def test_prompt_embeddings_in_the_other_byte_order_are_cast_right():
    embeds = embeds_of("numpy", swapped=True)
    for frames in fastmm.encode_requests(fan_out(prompt_request(prompt_embeds=embeds), 3), dtype="float16"):
        found = fastmm.decode_request(received(frames), tensors="numpy").prompt_embeds
        assert np.array_equal(found, embeds.astype(np.float16))


def test_prompt_embeddings_that_need_no_cast_are_not_copied():
    torch = torch_or_skip()
    for embeds in (torch.zeros(4, 128, dtype=torch.bfloat16), torch.zeros(8, 128)[::2], torch.zeros(4, 128)):
        address = embeds.data_ptr()
        samples = fan_out(prompt_request(prompt_embeds=embeds), 2)
        found = [fastmm.encode_request(sample, dtype=None)[-1] for sample in samples]
        if embeds.is_contiguous():
            assert [frame.address for frame in found] == [address] * 2
        assert all(received([frame]) == [embeds.contiguous().view(torch.uint8).numpy().tobytes()] for frame in found)
    (sample, _) = fan_out(prompt_request(prompt_embeds=embeds), 2)
    del embeds
    assert received(fastmm.encode_request(sample))[-1] == bytes(2048)

"""What the drop-in decoder refuses: all that vLLM's own refuses, and what that one lets through; always as msgspec's callers
expect it."""

import random

import msgspec
import numpy as np
import pytest
import torch
from codecs_of_both import assert_identical
from peers import draw, received, vllm_decode, vllm_encoder
from test_leniencies import ALLOWED, LENIENCIES, ONES, RAW_ESCAPES, ext, frames_of, frames_of_elem
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest

import fastmm
from fastmm.integrations.vllm import MsgpackDecoder
from fastmm.integrations.vllm.codec import MalformedMessageError


def decode(frames, of_type=EngineCoreRequest):
    return MsgpackDecoder(of_type).decode(received(frames))


@pytest.mark.parametrize("name", [name for name in LENIENCIES if name not in ALLOWED])
def test_what_vllm_lets_through_wrongly_is_refused(name):
    build, holds = LENIENCIES[name]
    assert holds(vllm_decode(build()))
    with pytest.raises(msgspec.ValidationError):
        decode(build())


@pytest.mark.parametrize("name", RAW_ESCAPES)
def test_what_escapes_vllm_as_an_odd_error_is_a_validation_error(name):
    build, error = RAW_ESCAPES[name]
    with pytest.raises(error):
        vllm_decode(build())
    with pytest.raises(msgspec.ValidationError):
        decode(build())


def test_a_refusal_is_of_both_families_and_says_where():
    with pytest.raises(MalformedMessageError) as caught:
        decode(frames_of(["float32", [4], 5], ONES))
    assert isinstance(caught.value, msgspec.ValidationError)
    assert isinstance(caught.value, fastmm.DecodeError)
    assert caught.value.path == "$.mm_features[0].data['k'].data"
    assert "$.mm_features[0].data['k'].data" in str(caught.value)


# The same faults where msgspec reads and asks the hooks: an embedding of a request, arrays and tensors of outputs.


def request_with_embeds(triple, *aux):
    frames = frames_of(3, *aux)
    request = msgspec.msgpack.decode(frames[0])
    request[9] = triple
    return [msgspec.msgpack.encode(request), *aux], EngineCoreRequest


def outputs_with_experts(triple, *aux):
    output = ["r", [1], None, None, None, None, None, None, None, None, None, None, triple]
    return [msgspec.msgpack.encode([0, [output], None, 1.5]), *aux], EngineCoreOutputs


def outputs_with_pooling(triple, *aux):
    return [msgspec.msgpack.encode([0, [["r", [1], None, None, triple]], None, 1.5]), *aux], EngineCoreOutputs


PLACES = {
    "prompt_embeds": (request_with_embeds, "float32"),
    "pooling_output": (outputs_with_pooling, "float32"),
    "routed_experts": (outputs_with_experts, "<f4"),
}
FAULTS = {
    "index 0": lambda name: ([name, [-1], 0],),
    "index -1": lambda name: ([name, [4], -1], ONES),
    "an index past the frames": lambda name: ([name, [4], 2], ONES),
    "a huge index": lambda name: ([name, [4], 2**64 - 1], ONES),
    "a bool as an index": lambda name: ([name, [4], True], ONES),
    "a negative extent": lambda name: ([name, [-1], 1], ONES),
    "a bool as an extent": lambda name: ([name, [True, 4], 1], ONES),
    "a huge extent": lambda name: ([name, [2**64 - 1], 1], ONES),
    "extents whose product overflows": lambda name: ([name, [2**40, 2**40], 1], ONES),
    "too many dimensions": lambda name: ([name, [1] * 65 + [4], 1], ONES),
    "a shape that is too small": lambda name: ([name, [3], 1], ONES),
    "a shape that is too large": lambda name: ([name, [5], 1], ONES),
    "bin as data": lambda name: ([name, [4], ONES],),
    "too few bytes inline": lambda name: ([name, [5], ext(ONES)],),
    "an unknown dtype": lambda name: (["float33", [4], 1], ONES),
    "an alias": lambda name: (["float", [4], 1], ONES),
    "an object dtype": lambda name: (["|O8", [2], 1], ONES),
    "no text as dtype": lambda name: ([4, [4], 1], ONES),
    "two elements": lambda name: ([name, [4]],),
    "a map out of band without a provider": lambda name: ([name, [4], {"tensor_id": 1}],),
    "a frame too many": lambda name: ([name, [4], 1], ONES, b"surplus"),
    "another ext code": lambda name: ([name, [4], msgspec.msgpack.Ext(9, ONES)],),
    "a pickle": lambda name: ([name, [4], msgspec.msgpack.Ext(1, b"\x80\x04N.")],),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_tensors_are_found_where_msgspec_asks_the_hooks(place, fault):
    build, name = PLACES[place]
    frames, of_type = build(*FAULTS[fault](name))
    with pytest.raises(msgspec.ValidationError):
        decode(frames, of_type)


@pytest.mark.parametrize("place", PLACES)
def test_the_same_places_take_what_is_right(place):
    build, name = PLACES[place]
    for triple, *aux in (
        ([name, [4], 1], ONES),
        ([name, [2, 2], ext(ONES)],),
        ([name, [0], ext(b"")],),
        ([name, [0, 3], 1], b""),
    ):
        frames, of_type = build(triple, *aux)
        assert_identical(decode(frames, of_type), vllm_decode(frames, of_type))


def test_a_torch_name_is_no_array_of_torch_and_a_numpy_name_no_tensor():
    frames, of_type = request_with_embeds(["<f4", [4], 1], ONES)
    with pytest.raises(msgspec.ValidationError):
        decode(frames, of_type)
    frames, of_type = outputs_with_experts(["float32", [4], 1], ONES)
    assert isinstance(decode(frames, of_type).outputs[0].routed_experts, np.ndarray)
    with pytest.raises(msgspec.ValidationError):
        decode(frames_of(["<f4", [4], 1], ONES))


# --- frames nobody points to ----------------------------------------------------------------------------------------------


def test_a_frame_that_only_a_plain_value_points_to_is_none_too_many():
    """Where vLLM's types say nothing a tensor stays a list with an index: so does its frame."""
    frames = frames_of(3)
    request = msgspec.msgpack.decode(frames[0])
    request[18] = {"embeds": ["float32", [4], 1]}
    frames = [msgspec.msgpack.encode(request), ONES]
    assert decode(frames).reasoning_parser_kwargs == {"embeds": ["float32", [4], 1]}
    with pytest.raises(msgspec.ValidationError, match="point to this aux frame"):
        decode([*frames, ONES])
    call = [msgspec.msgpack.encode([0, 1, "load", [["float32", [4], 1]]]), ONES]
    assert decode(call, None) == [0, 1, "load", [["float32", [4], 1]]]
    with pytest.raises(msgspec.ValidationError):
        decode([*call, ONES], None)


# --- messages that are no messages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_type", [None, EngineCoreRequest, EngineCoreOutputs, MultiModalKwargsItem, torch.Tensor])
def test_junk_is_a_decode_error(of_type):
    decoder = MsgpackDecoder(of_type)
    for frames in (
        [],
        [b""],
        b"",
        [b"\xc1"],
        [b"\x93"],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\x9a" * 2000],
        [object()],
        [b"\x80", b""],
    ):
        with pytest.raises(msgspec.DecodeError):
            decoder.decode(frames)


def test_a_cut_message_is_refused():
    for seed in range(0, 300, 7):
        message, threshold = draw(seed)
        main, *aux = map(bytes, received(vllm_encoder(threshold).encode(message)))
        decoder = MsgpackDecoder(type(message))
        for cut in random.Random(seed).sample(range(len(main)), min(len(main), 100)):
            with pytest.raises(msgspec.DecodeError):
                decoder.decode([main[:cut], *aux])
        with pytest.raises(msgspec.DecodeError):
            decoder.decode([main + b"\x00", *aux])


@pytest.mark.parametrize("first", range(0, 1200, 200))
def test_of_damaged_frames_we_accept_only_what_vllm_reads_alike(first):
    """And whatever we refuse that vLLM does not is one of the leniencies."""
    accepted, stricter = 0, []
    for seed in range(first, first + 200):
        message, threshold = draw(seed)
        of_type = type(message)
        frames = vllm_encoder(threshold).encode(message)
        decoder = MsgpackDecoder(of_type)
        rng = random.Random(seed)
        for _ in range(20):
            main, *aux = received(frames)
            for _ in range(rng.choice([1, 1, 1, 2, 5])):
                at = rng.randrange(len(main))
                main[at] = rng.choice([rng.randrange(256), main[at] ^ (1 << rng.randrange(8)), 0xC0, 0x90, 0x80, 0xD4, 0xC7])
            try:
                theirs = vllm_decode([main, *aux], of_type)
            except Exception:
                with pytest.raises(msgspec.DecodeError):
                    decoder.decode([main, *aux])
                continue
            try:
                ours = decoder.decode([main, *aux])
            except msgspec.DecodeError as error:
                stricter.append(str(error))
                continue
            assert_identical(ours, theirs)
            accepted += 1
    assert accepted > 100
    known = (
        "expected the index", "bytes for", "placeholder", "is_embed", "dtype such as", "point to this aux frame", "extents", "ext",
        "expected a slice", "expected bool", "expected int", "the data of a tensor", "an extent", "keys", "nil", "expected a bound",
        "an array of", "a tensor",
    )  # fmt: skip
    assert [text for text in stricter if not any(word in text for word in known)] == []


def test_a_refused_message_leaves_the_decoder_as_it_was():
    decoder = MsgpackDecoder(EngineCoreRequest)
    good, threshold = draw(1)
    frames = vllm_encoder(threshold).encode(good)
    for build, _ in [*LENIENCIES.values(), *RAW_ESCAPES.values()]:
        try:
            decoder.decode(received(build()))
        except msgspec.DecodeError:
            assert decoder.aux_buffers == ()
        assert_identical(decoder.decode(received(frames)), vllm_decode(frames))


def test_an_error_of_the_machine_is_not_the_messages():
    def provider(dtype, shape, meta):
        raise MemoryError

    frames = frames_of(["float32", [4], {"tensor_id": 1}])
    with pytest.raises(MemoryError):
        MsgpackDecoder(EngineCoreRequest, oob_tensor_provider=provider).decode(frames)


def test_a_field_that_is_not_one_is_refused():
    for field in (
        ["batched", {"kept_on_cpu": True}],
        ["flat", {"dim": 0}],
        ["flat", {"slices": 3}],
        ["batched"],
        "batched",
        None,
    ):
        with pytest.raises(Exception):  # noqa: B017 - the real one raises what it likes
            vllm_decode(frames_of_elem({"data": 1, "field": field}))
        with pytest.raises(msgspec.ValidationError):
            decode(frames_of_elem({"data": 1, "field": field}))

"""The drop-in codec against vLLM's own, on a generated corpus: the same bytes out, the same objects in."""

import msgspec
import numpy as np
import pytest
import torch
from codecs_of_both import assert_identical
from corpus import THRESHOLDS, Corpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peers import draw, received, vllm_decode, vllm_encoder
from support.compare import assert_same, assert_same_frames
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from vllm.v1.serial_utils import MsgpackDecoder as TheirDecoder

from fastmm.integrations.vllm import MsgpackDecoder, MsgpackEncoder

SEEDS = 3200
CHUNK = 200
chunks = pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
encoders = {threshold: MsgpackEncoder(threshold) for threshold in THRESHOLDS}
decoders = {of_type: MsgpackDecoder(of_type) for of_type in (None, EngineCoreRequest, EngineCoreOutputs)}


@chunks
def test_every_message_has_the_same_bytes(first):
    for seed in range(first, first + CHUNK):
        message, threshold = draw(seed, odd=bool(seed & 8))
        expected = vllm_encoder(threshold).encode(message)
        frames = encoders[threshold].encode(message)
        assert type(frames[0]) is bytes
        assert_same_frames(frames, expected)
        buffer = bytearray(seed % 300)
        frames = encoders[threshold].encode_into(message, buffer)
        assert frames[0] is buffer
        assert_same_frames(frames, expected)


def test_no_message_of_the_corpus_is_left_to_vllms_encoder():
    for seed in range(400):
        message, threshold = draw(seed, odd=bool(seed & 8))
        encoders[threshold].encode(message)
    assert all(encoder.counters["messages_left"] == 0 for encoder in encoders.values())


@chunks
def test_every_message_decodes_to_an_equal_object_of_the_same_types(first):
    for seed in range(first, first + CHUNK):
        message, threshold = draw(seed, odd=bool(seed & 8))
        frames = vllm_encoder(threshold).encode(message)
        try:
            expected = vllm_decode(frames, type(message))
        except msgspec.ValidationError:  # odd messages hold what vLLM's types forbid
            with pytest.raises(msgspec.ValidationError):
                decoders[type(message)].decode(received(frames))
            continue
        assert_identical(decoders[type(message)].decode(received(frames)), expected)
        assert_same(decoders[None].decode(received(frames)), vllm_decode(frames, None))


@chunks
def test_what_we_decode_encodes_to_the_same_bytes_again(first):
    for seed in range(first, first + CHUNK):
        message, threshold = draw(seed)
        frames = vllm_encoder(threshold).encode(message)
        again = vllm_encoder(threshold).encode(decoders[type(message)].decode(received(frames)))
        assert_same_frames(again, vllm_encoder(threshold).encode(vllm_decode(frames, type(message))))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False), threshold=st.sampled_from(THRESHOLDS))
def test_any_request_comes_back(rng, threshold):
    message = Corpus(rng).request()
    frames = encoders[threshold].encode(message)
    assert_same_frames(frames, vllm_encoder(threshold).encode(message))
    assert_identical(decoders[EngineCoreRequest].decode(received(frames)), vllm_decode(frames))


def test_items_alone_come_back():
    """As the shared-memory store and the HTTP endpoint send them; with and without memory of their own."""
    count = 0
    for seed in range(300):
        message, threshold = draw(seed)
        for feature in getattr(message, "mm_features", None) or ():
            if feature.data is None:
                continue
            count += 1
            frames = vllm_encoder(threshold).encode(feature.data)
            assert_same_frames(encoders[threshold].encode(feature.data), frames)
            for share in (True, False):
                both = [cls(MultiModalKwargsItem, share_mem=share) for cls in (TheirDecoder, MsgpackDecoder)]
                for decoder in both:
                    decoder.pin_tensors = False  # there is no accelerator to pin memory for
                assert_identical(*(decoder.decode(received(frames)) for decoder in both))
    assert count > 100


CONTROL = [
    ["request-1", "request-2"],
    [],
    (0, 2**63 + 5, "get_supported_tasks", ()),
    (0, 1, "collective_rpc", ("sleep", 1.5, (1, "x"), {"level": 2, "tags": ["weights"]})),
    (0, 2, "add_lora", ({"lora_name": "a", "lora_int_id": 1, "lora_path": "/p"},)),
    (0, 3, "receive", ([torch.arange(1000), np.arange(3)],)),
    (7, None),
    {"key": [1, 2.5, None, b"x"], 3: "y"},
    "text",
    None,
    b"bytes",
    {3, 4},
    EngineCoreRequestType.ADD,
    2**64 - 1,
]


@pytest.mark.parametrize("message", CONTROL, ids=lambda message: str(message)[:24])
def test_aborts_calls_and_waves_have_the_same_bytes_and_content(message):
    frames = vllm_encoder(256).encode(message)
    assert_same_frames(encoders[256].encode(message), frames)
    assert_identical(decoders[None].decode(received(frames)), vllm_decode(frames, None))


def test_a_request_that_follows_another_is_not_touched_by_it():
    """One decoder, many messages: nothing of one shows in the next, and equal field objects are shared within one only."""
    requests = []
    for seed in (seed for seed in range(400) if seed % 4):
        message, threshold = draw(seed)
        frames = vllm_encoder(threshold).encode(message)
        requests.append((decoders[EngineCoreRequest].decode(received(frames)), vllm_decode(frames)))
    fields = {}
    for number, (ours, theirs) in enumerate(requests):
        assert_identical(ours, theirs)
        for feature in ours.mm_features or ():
            for elem in (feature.data or {}).values():
                assert fields.setdefault(id(elem.field), number) == number


def test_equal_field_metadata_is_one_object():
    rng_seed = next(s for s in range(1000) if s % 4 and len(draw(s)[0].mm_features or ()) >= 5)
    message, threshold = draw(rng_seed)
    decoded = decoders[EngineCoreRequest].decode(vllm_encoder(threshold).encode(message))
    count = len({id(elem.field) for feature in decoded.mm_features if feature.data for elem in feature.data.values()})
    total = sum(len(feature.data) for feature in decoded.mm_features if feature.data)
    assert count < total

"""A fault inside fastmm costs one message its speed: vLLM's own code does it, and the log has no payload."""

import logging

import msgspec
import pytest
import torch
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import OOBTensorConsumer

from fastmm.integrations.vllm import codec, compare, counters, guard, trial
from fastmm.integrations.vllm import log as log_module
from fastmm.integrations.vllm.originals import VllmDecoder, VllmEncoder

SECRET = "s3cr3t-payload"
MESSAGES = {name: (message, kind) for name, message, kind in trial.messages()}
REQUEST, KIND = MESSAGES["a multimodal request"]


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(log_module, "_times", {})
    with caplog.at_level(logging.INFO, logger="vllm.fastmm"):
        yield caplog


def broken(*_, **__):
    raise RuntimeError(SECRET)


def received(frames):
    return [bytearray(frame) for frame in frames]


@pytest.mark.parametrize("method", ["encode", "encode_into"])
@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_fastmm_fails_on_is_encoded_by_vllm(name, method, monkeypatch, log):
    monkeypatch.setattr(guard, f"_{method}", broken)
    message, _ = MESSAGES[name]
    before = counters.values()["faults"]
    arguments = [bytearray(b"left over from the last message" * 100)] if method == "encode_into" else []
    frames = getattr(guard.GuardedEncoder(), method)(message, *arguments)
    assert compare.frames_difference(VllmEncoder().encode(message), frames) is None
    if arguments:
        assert frames[0] is arguments[0]
    assert counters.values()["faults"] == before + 1
    (warning,) = [r.getMessage() for r in log.records]
    assert f"{method} of {type(message).__qualname__} failed (RuntimeError)" in warning
    assert "in broken" in warning  # where, for a report
    assert SECRET not in warning


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_fastmm_fails_on_is_decoded_by_vllm(name, monkeypatch, log):
    message, kind = MESSAGES[name]
    frames = received(VllmEncoder().encode(message))
    monkeypatch.setattr(guard, "_decode", broken)
    decoded = guard.GuardedDecoder(kind).decode(frames)
    assert compare.difference(VllmDecoder(kind).decode(frames), decoded) is None
    (warning,) = [r.getMessage() for r in log.records]
    assert "decode to" in warning
    assert SECRET not in warning


def test_what_vllm_would_raise_too_is_raised_as_vllm_raises_it(log):
    class Unknown:
        pass

    for method, arguments in (("encode", ()), ("encode_into", (bytearray(),))):
        with pytest.raises(TypeError) as theirs:
            getattr(VllmEncoder(), method)(Unknown(), *arguments)
        with pytest.raises(TypeError) as ours:
            getattr(guard.GuardedEncoder(), method)(Unknown(), *arguments)
        assert str(ours.value) == str(theirs.value)
    assert log.records == []  # no fault of ours


def test_the_encoder_is_good_again_for_the_next_message(monkeypatch):
    encoder = guard.GuardedEncoder()
    with monkeypatch.context() as patch:
        patch.setattr(guard, "_encode", broken)
        encoder.encode(REQUEST)
    assert compare.frames_difference(VllmEncoder().encode(REQUEST), encoder.encode(REQUEST)) is None


def test_codecs_that_cannot_even_be_made_are_vllms(monkeypatch, log):
    monkeypatch.setattr(codec.MsgpackEncoder, "__init__", broken)
    monkeypatch.setattr(codec.MsgpackDecoder, "__init__", broken)
    encoder, decoder = guard.GuardedEncoder(64), guard.GuardedDecoder(KIND)
    assert len(log.records) == 2
    assert encoder.size_threshold == 64
    theirs = VllmEncoder(64).encode(REQUEST)
    assert compare.frames_difference(theirs, encoder.encode(REQUEST)) is None
    assert compare.frames_difference(theirs, encoder.encode_into(REQUEST, bytearray())) is None
    frames = received(theirs)
    assert compare.difference(VllmDecoder(KIND).decode(frames), decoder.decode(frames)) is None
    assert SECRET not in log.text


@pytest.mark.parametrize("error", [msgspec.ValidationError("no"), msgspec.DecodeError("no")])
def test_a_refusal_is_no_fault_and_is_not_tried_again(error, monkeypatch, log):
    def refuse(self, bufs):
        raise error

    monkeypatch.setattr(guard, "_decode", refuse)
    before = counters.values()
    with pytest.raises(type(error)):
        guard.GuardedDecoder(KIND).decode(received(VllmEncoder().encode(REQUEST)))
    assert counters.values() == before | {"refused": before["refused"] + 1}
    assert log.records == []


class Consumer(OOBTensorConsumer):
    def __init__(self):
        self.tensors, self.messages = [], 0

    def __call__(self, tensor):
        self.tensors.append(tensor)
        return {"tensor_id": len(self.tensors) - 1}

    def new_message(self):
        self.messages += 1
        self.tensors.clear()


def test_out_of_band_tensors_are_offered_again_after_a_fault(monkeypatch):
    consumer = Consumer()

    def broken_late(self, obj):
        codec.MsgpackEncoder.encode(self, obj)
        broken()

    monkeypatch.setattr(guard, "_encode", broken_late)
    frames = guard.GuardedEncoder(None, consumer).encode(REQUEST)
    assert consumer.messages == 2  # the first one is stale, as after a failed send
    assert len(consumer.tensors) == 2
    decoded = VllmDecoder(KIND, oob_tensor_provider=lambda dtype, shape, meta: consumer.tensors[meta["tensor_id"]]).decode(
        received(frames)
    )
    assert compare.difference(REQUEST.mm_features, decoded.mm_features) is None


def test_a_provider_that_was_asked_is_not_asked_for_the_same_tensors_again(monkeypatch):
    consumer, asked = Consumer(), []
    frames = received(VllmEncoder(None, consumer).encode(REQUEST))

    def provider(dtype, shape, meta):
        asked.append(meta["tensor_id"])
        return consumer.tensors[meta["tensor_id"]]

    def broken_late(self, bufs):
        codec.MsgpackDecoder.decode(self, bufs)
        broken()

    decoder = guard.GuardedDecoder(KIND, True, provider)
    monkeypatch.setattr(guard, "_decode", broken_late)
    with pytest.raises(RuntimeError):
        decoder.decode(frames)
    assert asked == [0, 1]
    monkeypatch.setattr(guard, "_decode", broken)  # before it was asked: vLLM may
    assert len(decoder.decode(frames).mm_features) == 2
    assert asked == [0, 1, 0, 1]


def test_a_flood_of_faults_does_not_flood_the_log(monkeypatch, log):
    monkeypatch.setattr(guard, "_encode", broken)
    encoder = guard.GuardedEncoder()
    for _ in range(1000):
        encoder.encode(["r"])
    assert len(log.records) == log_module.FIRST + 2  # the 100th and the 1000th
    assert "1000 times" in log.records[-1].getMessage()


def test_the_classes_are_vllms_to_those_who_ask():
    encoder, decoder = guard.GuardedEncoder(128), guard.GuardedDecoder(EngineCoreOutputs, False)
    assert isinstance(encoder, VllmEncoder)
    assert isinstance(decoder, VllmDecoder)
    assert (encoder.size_threshold, encoder.oob_tensor_consumer) == (128, None)
    assert (decoder.share_mem, decoder.oob_tensor_provider) == (False, None)
    assert guard.GuardedDecoder(EngineCoreRequest).share_mem
    assert torch.equal(guard.GuardedDecoder(torch.Tensor).decode(received(encoder.encode(torch.arange(9)))), torch.arange(9))

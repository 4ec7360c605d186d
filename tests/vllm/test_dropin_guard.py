"""A fault inside fastmm costs one message its speed: vLLM's own code does it, and the log has no payload."""

import logging

import msgspec
import pytest
import torch
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, UtilityOutput
from vllm.v1.serial_utils import OOBTensorConsumer, UtilityResult

from fastmm.errors import FastmmError
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


def broken_once(then):
    """A function that fails the first time it is called: what goes wrong in fastmm does not go wrong again in vLLM."""
    calls = []

    def function(*arguments):
        calls.append(arguments)
        return broken() if len(calls) == 1 else then(*arguments)

    return function


def received(frames):
    return [bytearray(frame) for frame in frames]


class Consumer(OOBTensorConsumer):
    """Takes every tensor; the first one that it is offered may fail."""

    def __init__(self, fails_at=None):
        self.tensors, self.messages, self.fails_at = [], 0, fails_at

    def __call__(self, tensor):
        if len(self.tensors) == self.fails_at:
            self.fails_at = None
            broken()
        self.tensors.append(tensor)
        return {"tensor_id": len(self.tensors) - 1}

    def new_message(self):
        self.messages += 1
        self.tensors.clear()


@pytest.mark.parametrize("method", ["encode", "encode_into"])
def test_a_message_that_fastmm_fails_on_is_encoded_by_vllm(method, log):
    before = counters.values()["faults"]
    arguments = [bytearray(b"left over from the last message" * 100)] if method == "encode_into" else []
    consumer = Consumer(fails_at=1)
    frames = getattr(guard.GuardedEncoder(None, consumer), method)(REQUEST, *arguments)
    assert consumer.messages == 2  # what was sent for the first is stale, as after a failed send
    assert len(consumer.tensors) == 2
    assert compare.frames_difference(VllmEncoder(None, Consumer()).encode(REQUEST), frames) is None
    if arguments:
        assert frames[0] is arguments[0]
    assert counters.values()["faults"] == before + 1
    (warning,) = [r.getMessage() for r in log.records]
    assert f"{method} of EngineCoreRequest failed (RuntimeError)" in warning
    assert "in broken" in warning  # where, for a report
    assert SECRET not in warning


@pytest.mark.parametrize("name", MESSAGES)
def test_any_message_can_be_left_to_vllm(name, log):
    message, kind = MESSAGES[name]
    expected = VllmEncoder().encode(message)
    encoder, buffer = guard.GuardedEncoder(), bytearray(b"old" * 1000)
    assert compare.frames_difference(expected, encoder.after_fault(RuntimeError(SECRET), message)) is None
    into = encoder.after_fault(RuntimeError(SECRET), message, buffer)
    assert into[0] is buffer
    assert compare.frames_difference(expected, into) is None
    frames = received(expected)
    decoded = guard.GuardedDecoder(kind).after_error(RuntimeError(SECRET), frames)
    assert compare.difference(VllmDecoder(kind).decode(frames), decoded) is None
    assert len(log.records) == 3
    assert SECRET not in log.text


def test_a_message_that_fastmm_fails_on_is_decoded_by_vllm(monkeypatch, log):
    kind = EngineCoreOutputs
    frames = received(VllmEncoder().encode(kind(utility_output=UtilityOutput(call_id=1, result=UtilityResult([1])))))
    expected = VllmDecoder(kind).decode(frames)
    monkeypatch.setattr(codec.MsgpackDecoder, "dec_hook", broken_once(codec.MsgpackDecoder.dec_hook))
    decoder = guard.GuardedDecoder(kind)
    assert compare.difference(expected, decoder.decode(frames)) is None
    (warning,) = [r.getMessage() for r in log.records]
    assert "decode to EngineCoreOutputs failed (RuntimeError)" in warning
    assert SECRET not in warning
    assert compare.difference(expected, decoder.decode(frames)) is None  # the next one is ours again
    assert len(log.records) == 1


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


def test_the_encoder_is_good_again_for_the_next_message(log):
    encoder = guard.GuardedEncoder(None, Consumer(fails_at=0))
    encoder.encode(REQUEST)
    assert compare.frames_difference(VllmEncoder(None, Consumer()).encode(REQUEST), encoder.encode(REQUEST)) is None
    assert len(log.records) == 1


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


def test_a_refusal_is_no_fault_and_is_not_tried_again(monkeypatch, log):
    frames = received(VllmEncoder().encode(REQUEST))
    asked = []
    monkeypatch.setattr(VllmDecoder, "decode", lambda self, bufs: asked.append(bufs))
    for damaged in ([], frames[:1], [frames[0][:-1], *frames[1:]], [*frames, b"one too many"]):
        before = counters.values()
        with pytest.raises(msgspec.DecodeError):
            guard.GuardedDecoder(KIND).decode(damaged)
        assert counters.values() == before | {"refused": before["refused"] + 1}
    assert asked == []
    assert log.records == []


def test_what_vllm_fails_on_too_is_raised_as_a_refusal(monkeypatch, log):
    frames = received(VllmEncoder().encode(REQUEST))
    decoder = guard.GuardedDecoder(KIND)
    monkeypatch.setattr(VllmDecoder, "decode", broken)
    with pytest.raises(msgspec.ValidationError):
        decoder.after_error(KeyError("dtype"), frames)
    assert log.records == []


def test_out_of_band_tensors_come_through_after_a_fault():
    consumer = Consumer(fails_at=1)
    frames = received(guard.GuardedEncoder(None, consumer).encode(REQUEST))
    tensors = list(consumer.tensors)
    decoder = VllmDecoder(KIND, oob_tensor_provider=lambda dtype, shape, meta: tensors[meta["tensor_id"]])
    assert compare.difference(REQUEST.mm_features, decoder.decode(frames).mm_features) is None


def test_a_provider_is_not_asked_for_the_same_tensors_again():
    consumer, asked = Consumer(), []
    frames = received(VllmEncoder(None, consumer).encode(REQUEST))

    def provider(dtype, shape, meta):
        asked.append(meta["tensor_id"])
        return consumer.tensors[meta["tensor_id"]] if len(asked) != 2 else broken()

    decoder = guard.GuardedDecoder(KIND, True, provider)
    assert decoder.oob_tensor_provider is provider
    with pytest.raises(msgspec.DecodeError):
        decoder.decode(frames)
    assert asked == [0, 1]
    with pytest.raises(RuntimeError):  # nor after a fault of fastmm's: it may have been asked
        decoder.after_error(RuntimeError(), frames)
    assert asked == [0, 1]
    assert len(decoder.decode(frames).mm_features) == 2


def test_a_flood_of_faults_does_not_flood_the_log(log):
    encoder = guard.GuardedEncoder()
    for _ in range(1000):
        encoder.after_fault(RuntimeError(SECRET), ["r"])
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


@pytest.mark.parametrize(
    "secret", ["hunter2secret", "it's a secret", 'a "secret"', 'it\'s "a" secret', "\\' secret", "secret" * 100]
)
def test_no_value_is_in_an_errors_words(secret):
    for error in (
        msgspec.ValidationError(f"Invalid enum value '{secret}' - at `$[3]`"),
        FastmmError(f"expected a name, got {secret + ' and more'!r} and {secret + ' again'!r}"),
        caused(codec.MalformedMessageError(f"KeyError: {secret!r}"), KeyError(secret)),
        ValueError(secret),
    ):
        assert "secret" not in log_module.describe(error)
    assert "Invalid enum value '...' - at `$[3]`" in log_module.describe(
        msgspec.ValidationError(f"Invalid enum value '{secret}' - at `$[3]`")
    )
    assert log_module.describe(FastmmError("expected 'float32', got 'float99'")).endswith("expected 'float32', got 'float99'")


def caused(error, cause):
    error.__cause__ = cause
    return error

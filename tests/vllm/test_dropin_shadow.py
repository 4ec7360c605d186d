"""In shadow both do the work: vLLM's result is used whatever fastmm does, a difference is logged and never its content."""

import logging

import msgspec
import numpy as np
import pytest
import torch
from test_dropin_guard import KIND, MESSAGES, REQUEST, SECRET, Consumer, broken, received
from vllm.v1.engine import EngineCoreRequest

from fastmm.integrations.vllm import codec, compare, counters, drop_in, shadow, trial
from fastmm.integrations.vllm import log as log_module
from fastmm.integrations.vllm.originals import VllmDecoder, VllmEncoder


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(log_module, "_times", {})
    with caplog.at_level(logging.INFO, logger="vllm.fastmm"):
        yield caplog


@pytest.fixture
def differences():
    before = counters.values()["differences"]
    return lambda: counters.values()["differences"] - before


@pytest.mark.parametrize("name", MESSAGES)
def test_where_nothing_differs_nothing_is_said(name, log, differences):
    message, kind = MESSAGES[name]
    encoder, decoder = shadow.ShadowEncoder(), shadow.ShadowDecoder(kind)
    frames = encoder.encode(message)
    assert compare.frames_difference(VllmEncoder().encode(message), frames) is None
    buffer = bytearray(b"old" * 1000)
    into = encoder.encode_into(message, buffer)
    assert into[0] is buffer
    assert compare.frames_difference(frames, into) is None
    assert compare.difference(VllmDecoder(kind).decode(received(frames)), decoder.decode(received(frames))) is None
    assert differences() == 0
    assert log.records == []


@pytest.mark.parametrize("method", ["encode", "encode_into"])
def test_a_fault_of_fastmms_encoder_is_nobodys_problem(method, monkeypatch, log, differences):
    monkeypatch.setattr(codec.MsgpackEncoder, method, broken)
    arguments = [bytearray()] if method == "encode_into" else []
    frames = getattr(shadow.ShadowEncoder(), method)(REQUEST, *arguments)
    assert compare.frames_difference(VllmEncoder().encode(REQUEST), frames) is None
    assert differences() == 1
    (warning,) = [r.getMessage() for r in log.records]
    assert f"{method} of EngineCoreRequest: fastmm raised RuntimeError" in warning
    assert SECRET not in warning


def test_a_fault_of_fastmms_decoder_is_nobodys_problem(monkeypatch, log, differences):
    monkeypatch.setattr(codec.MsgpackDecoder, "decode", broken)
    frames = received(VllmEncoder().encode(REQUEST))
    decoded = shadow.ShadowDecoder(KIND).decode(frames)
    assert compare.difference(VllmDecoder(KIND).decode(frames), decoded) is None
    assert differences() == 1
    assert SECRET not in log.text


def test_codecs_that_cannot_even_be_made_are_nobodys_problem(monkeypatch, log, differences):
    monkeypatch.setattr(codec.MsgpackEncoder, "__init__", broken)
    monkeypatch.setattr(codec.MsgpackDecoder, "__init__", broken)
    frames = received(shadow.ShadowEncoder().encode(REQUEST))
    assert len(shadow.ShadowDecoder(KIND).decode(frames).mm_features) == 2
    assert differences() == 2
    assert SECRET not in log.text


def test_a_byte_that_differs_is_named_by_its_place(monkeypatch, log, differences):
    def wrong(self, obj):
        frames = VllmEncoder().encode(obj)
        main = bytearray(frames[0])
        main[7] ^= 1
        return [bytes(main), *frames[1:]]

    monkeypatch.setattr(codec.MsgpackEncoder, "encode", wrong)
    theirs = VllmEncoder().encode(REQUEST)
    assert shadow.ShadowEncoder().encode(REQUEST)[0] == theirs[0]
    assert differences() == 1
    assert f"frame 0 differs at byte 7 of {len(theirs[0])} (vLLM's result is used)" in log.text


def test_a_payload_that_differs_is_named_by_its_place(monkeypatch, log):
    def wrong(self, obj):
        frames = VllmEncoder().encode(obj)
        changed = np.array(np.frombuffer(frames[1], np.uint8))
        changed[100] ^= 1
        return [frames[0], changed.data, *frames[2:]]

    monkeypatch.setattr(codec.MsgpackEncoder, "encode", wrong)
    shadow.ShadowEncoder().encode(REQUEST)
    assert "frame 1 differs at byte 100 of 512" in log.text


def test_an_object_that_differs_is_named_by_its_path(monkeypatch, log):
    def wrong(self, bufs):
        decoded = VllmDecoder(KIND).decode(bufs)
        decoded.mm_features[1].data["pixel_values"].data[0, 0] += 1
        return decoded

    frames = received(VllmEncoder().encode(REQUEST))
    monkeypatch.setattr(codec.MsgpackDecoder, "decode", wrong)
    # The tensors of both views share the received frame: only a copy can differ.
    monkeypatch.setattr(codec.MsgpackDecoder, "decode", lambda self, bufs: wrong(self, [bytearray(frame) for frame in bufs]))
    shadow.ShadowDecoder(KIND).decode(frames)
    assert "$.mm_features[1].data[0].data: a tensor of other values" in log.text


def test_what_only_one_of_the_two_refuses_is_a_difference_and_vllms_answer_stands(monkeypatch, log, differences):
    frames = received(VllmEncoder().encode(REQUEST))
    monkeypatch.setattr(
        codec.MsgpackDecoder, "decode", lambda self, bufs: (_ for _ in ()).throw(msgspec.ValidationError("too strict"))
    )
    assert shadow.ShadowDecoder(KIND).decode(frames).request_id == REQUEST.request_id
    assert differences() == 1
    assert "fastmm raised ValidationError: too strict" in log.text
    with pytest.raises(msgspec.DecodeError):  # vLLM's own error is vLLM's
        shadow.ShadowDecoder(KIND).decode([b"\xc1"])


def test_tensors_go_out_of_band_once_and_come_in_once(log, differences):
    consumer, asked = Consumer(), []
    frames = received(shadow.ShadowEncoder(None, consumer).encode(REQUEST))
    assert consumer.messages == 1
    assert len(consumer.tensors) == 2

    def provider(dtype, shape, meta):
        asked.append(meta["tensor_id"])
        return consumer.tensors[meta["tensor_id"]]

    decoded = shadow.ShadowDecoder(KIND, oob_tensor_provider=provider).decode(frames)
    assert asked == [0, 1]
    assert compare.difference(REQUEST.mm_features, decoded.mm_features) is None
    assert differences() == 0
    assert log.records == []


def test_a_consumer_keeps_its_own_methods():
    consumer = Consumer()
    consumer.set_target_engine = lambda engine: f"engine {engine}"
    assert shadow.ShadowEncoder(None, consumer).oob_tensor_consumer.set_target_engine(3) == "engine 3"


def test_shadow_is_what_the_plugin_makes_when_asked():
    made = drop_in.classes("shadow", lambda: None)
    assert issubclass(made["MsgpackEncoder"], shadow.ShadowEncoder)
    assert issubclass(made["MsgpackDecoder"], shadow.ShadowDecoder)
    assert issubclass(made["MsgpackEncoder"], VllmEncoder)
    assert not issubclass(made["MsgpackEncoder"], codec.MsgpackEncoder)


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (1, 1.0, "$: int from vLLM, float from fastmm"),
        (True, 1, "$: bool from vLLM, int from fastmm"),
        (0.0, -0.0, "$: another number"),
        ([1, 2], [1, 3], "$[1]: another int"),
        ([1, 2], [1], "$: 2 elements"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "$: other keys, or in another order"),
        (slice(0, 2), slice(0, 3), "$: another slice"),
        ({1, 2}, {1}, "$: another set"),
        (torch.zeros(2), torch.zeros(2, 1), "$: torch.float32 (2,) cpu from vLLM"),
        (torch.zeros(2), torch.zeros(2).bfloat16(), "$: torch.float32 (2,) cpu from vLLM, torch.bfloat16"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "$: a tensor of other values"),
        (torch.zeros(2, 2), torch.zeros(2, 2).t(), "$: strides (2, 1) from vLLM"),
        (np.zeros(2), np.zeros(2, ">f8"), "$: <f8 (2,) from vLLM, >f8 (2,)"),
        (np.zeros(2), np.ones(2), "$: an array of other values"),
    ],
)
def test_the_comparison_sees(theirs, ours, said):
    assert compare.difference(theirs, ours).startswith(said)
    assert compare.difference(ours, theirs) is not None


def test_the_comparison_takes_the_same_for_the_same():
    for _, message, kind in trial.messages():
        frames = received(VllmEncoder().encode(message))
        assert compare.difference(VllmDecoder(kind).decode(frames), VllmDecoder(kind).decode(frames)) is None
    nan = float("nan")
    assert compare.difference([nan, torch.tensor([nan]), np.array([nan])], [nan, torch.tensor([nan]), np.array([nan])]) is None
    assert EngineCoreRequest is KIND

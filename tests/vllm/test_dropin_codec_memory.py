"""Whose memory a decoded tensor shows, how long it lives, who may write to it; and one codec in many threads."""

import gc
import threading
import weakref

import msgspec
import numpy as np
import pytest
import torch
import zmq
from codecs_of_both import assert_identical, both
from peers import draw, received, vllm_decode, vllm_encoder
from support.compare import assert_same_frames
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder as TheirDecoder
from vllm.v1.serial_utils import MsgpackEncoder as TheirEncoder

from fastmm.integrations.vllm import MsgpackDecoder, MsgpackEncoder


def one_feature(tensor):
    message, _ = draw(1)
    message.prompt_token_ids = list(range(100))
    message.sampling_params = None
    message.prompt_embeds = torch.arange(512.0)
    feature = next(
        f for seed in range(1, 400, 4) for f in draw(seed)[0].mm_features or () if f.data and f.mm_position.is_embed is None
    )
    (elem, *_) = feature.data.values()
    elem.data = tensor
    feature.data.data = {"k": elem}
    message.mm_features = [feature]
    return message


def leaves(request):
    return request.mm_features[0].data["k"].data, request.prompt_embeds


# --- views --------------------------------------------------------------------------------------------------------------


@both
def test_tensors_of_aux_frames_view_them_and_writes_are_seen(codec):
    frames = [bytearray(memoryview(frame)) for frame in vllm_encoder(256).encode(one_feature(torch.arange(1000)))]
    tensor, embeds = leaves(codec.Decoder(EngineCoreRequest).decode(frames))
    tensor[3] = -7
    embeds[5] = 0.25
    assert np.frombuffer(frames[1], np.int64)[3] == -7
    assert np.frombuffer(frames[2], np.float32)[5] == 0.25
    frames[1][0:8] = (99).to_bytes(8, "little")
    assert tensor[0] == 99


@both
def test_without_shared_memory_they_have_their_own(codec):
    decoder = codec.Decoder(EngineCoreRequest, share_mem=False)
    decoder.pin_tensors = False  # no accelerator here
    frames = [bytearray(memoryview(frame)) for frame in vllm_encoder(256).encode(one_feature(torch.arange(1000)))]
    tensor, embeds = leaves(decoder.decode(frames))
    tensor[3] = -7
    embeds[5] = 0.25
    assert np.frombuffer(frames[1], np.int64)[3] == 3
    assert np.frombuffer(frames[2], np.float32)[5] == 5
    for own in (tensor, embeds):
        assert own.untyped_storage().resizable()  # torch's own memory, not a view of somebody's


def test_pinning_is_asked_for_as_vllm_asks(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: asked.append(self.numel()) or self.clone())
    decoder = MsgpackDecoder(EngineCoreRequest, share_mem=False)
    decoder.pin_tensors = True
    frames = vllm_encoder(256).encode(one_feature(torch.arange(1000)))
    decoder.decode(frames)
    assert asked == [8000, 2048]


@both
@pytest.mark.parametrize("share", [True, False])
def test_inline_data_is_always_copied(codec, share):
    decoder = codec.Decoder(MultiModalKwargsItem, share_mem=share)
    item = next(iter(one_feature(torch.arange(10)).mm_features)).data
    main = bytearray(vllm_encoder(2**62).encode(item)[0])
    tensor = decoder.decode(main)["k"].data
    tensor[0] = 77
    assert bytes(main) == vllm_encoder(2**62).encode(item)[0]


@both
def test_arrays_view_their_frame_and_are_as_writable_as_it(codec):
    data = np.arange(1000.0)
    for frame, writable in (
        (lambda f: f, False),
        (bytes, False),
        (bytearray, True),
        (lambda f: zmq.Frame(bytes(f)), None),
    ):
        frames = [frame(memoryview(f)) if i else f for i, f in enumerate(vllm_encoder(256).encode(data))]
        if frame(b"") == b"" and writable is False and type(frames[1]) is not bytes:
            continue  # a memoryview of the array itself, which can be written to
        array = codec.Decoder(np.ndarray).decode(frames)
        assert array.tolist() == data.tolist()
        assert np.shares_memory(array, np.frombuffer(frames[1], np.uint8))
        assert array.flags.writeable is (np.frombuffer(frames[1], np.uint8).flags.writeable if writable is None else writable)


def test_unaligned_frames_are_copied_not_misread():
    tensor = torch.arange(1000, dtype=torch.float64)
    frames = [bytes(memoryview(frame)) for frame in vllm_encoder(256).encode(one_feature(tensor))]
    shifted = [frames[0], *(memoryview(b"x" + frame)[1:] for frame in frames[1:])]
    got, embeds = leaves(MsgpackDecoder(EngineCoreRequest).decode(shifted))
    assert torch.equal(got, tensor)
    assert got.data_ptr() % 8 == 0
    assert torch.equal(embeds, torch.arange(512.0))


def test_two_tensors_of_one_frame_show_the_same_memory():
    """Our encoder for our own classes writes such messages; vLLM's never does."""
    frames = vllm_encoder(256).encode(one_feature([torch.arange(1000), torch.arange(1000)]))
    main = bytearray(frames[0]).replace(b"\x91\xcd\x03\xe8\x02", b"\x91\xcd\x03\xe8\x01", 1)
    main = main.replace(b"\x91\xcd\x02\x00\x03", b"\x91\xcd\x02\x00\x02", 1)
    (a, b), _ = leaves(MsgpackDecoder(EngineCoreRequest).decode([main, bytearray(frames[1]), bytearray(frames[3])]))
    assert a.data_ptr() == b.data_ptr()


# --- lifetime -----------------------------------------------------------------------------------------------------------


class Holder(bytearray):
    """A frame that can be watched."""


@pytest.mark.parametrize("of_type", [EngineCoreRequest, MultiModalKwargsItem])
def test_a_tensor_keeps_its_frame_and_nothing_else(of_type):
    request = one_feature(torch.arange(1000))
    message = request if of_type is EngineCoreRequest else request.mm_features[0].data
    frames = [Holder(memoryview(frame)) for frame in vllm_encoder(256).encode(message)]
    watched = [weakref.ref(frame) for frame in frames]
    decoded = MsgpackDecoder(of_type).decode(frames)
    tensor = (decoded.mm_features[0].data if of_type is EngineCoreRequest else decoded)["k"].data
    del frames, decoded
    gc.collect()
    assert [ref() is not None for ref in watched] == [False, True, *[False] * (len(watched) - 2)]
    assert tensor.tolist() == list(range(1000))
    del tensor
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


def test_refused_messages_let_go_of_their_frames():
    frames = [Holder(memoryview(frame)) for frame in vllm_encoder(256).encode(one_feature(torch.arange(1000)))]
    frames.append(Holder(b"surplus"))
    watched = [weakref.ref(frame) for frame in frames]
    decoder = MsgpackDecoder(EngineCoreRequest)
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(frames)
    del frames
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


def test_encoder_and_decoder_can_be_collected():
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
    decoder.decode(encoder.encode(one_feature(torch.arange(1000))))
    watched = [weakref.ref(encoder), weakref.ref(decoder)]
    del encoder, decoder
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_a_thousand_messages_leave_nothing_behind():
    request = one_feature(torch.arange(1000))
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
    frames = [bytes(memoryview(f)) for f in encoder.encode(request)]

    def several():
        for _ in range(1000):
            decoder.decode(list(frames))
            encoder.encode(request)

    several()
    gc.collect()
    before = len(gc.get_objects())
    several()
    gc.collect()
    assert len(gc.get_objects()) - before < 100


# --- threads and nesting ------------------------------------------------------------------------------------------------


def test_one_codec_in_many_threads():
    encoder, decoder = MsgpackEncoder(256), MsgpackDecoder(EngineCoreRequest)
    drawn = [draw(seed)[0] for seed in range(1, 200) if seed % 4]
    written = [received(vllm_encoder(256).encode(message)) for message in drawn]
    expected = [vllm_decode(frames) for frames in written]
    failures = []

    def work(offset):
        try:
            for turn in range(2 * len(drawn)):
                index = (turn + offset) % len(drawn)
                assert_same_frames(encoder.encode(drawn[index]), written[index])
                assert_identical(decoder.decode([bytearray(f) for f in written[index]]), expected[index])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(37 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert failures == []


def test_a_provider_may_decode_with_the_same_decoder():
    class Store:
        kept = []

        def new_message(self):
            pass

        def __call__(self, tensor):
            self.kept.append(tensor)
            return {"n": len(self.kept) - 1}

    inner = [bytes(memoryview(f)) for f in vllm_encoder(256).encode(one_feature(torch.arange(500)))]
    store, seen = Store(), []

    def provide(dtype, shape, meta):
        seen.append(leaves(decoder.decode(inner))[0].tolist())
        return store.kept[meta["n"]]

    frames = TheirEncoder(0, store).encode(one_feature(torch.arange(300)))
    decoder = MsgpackDecoder(EngineCoreRequest, oob_tensor_provider=provide)
    decoder.decode(frames)
    assert seen
    assert all(ids == list(range(500)) for ids in seen)


# --- every type -----------------------------------------------------------------------------------------------------------

NAMES = sorted({str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)})


@pytest.mark.parametrize("name", NAMES)
def test_every_type_of_torch_travels_as_with_vllm(name):
    dtype = getattr(torch, name)
    try:
        tensor = torch.arange(64, dtype=torch.uint8).view(dtype)
        expected = TheirEncoder(16).encode([tensor])
    except RuntimeError:
        pytest.skip("torch itself, or vLLM, cannot")
    assert_same_frames(MsgpackEncoder(16).encode([tensor]), expected)
    for threshold in (16, 10_000):
        frames = TheirEncoder(threshold).encode(tensor)
        for share in (True, False):
            theirs, ours = TheirDecoder(torch.Tensor, share_mem=share), MsgpackDecoder(torch.Tensor, share_mem=share)
            theirs.pin_tensors = ours.pin_tensors = False
            try:
                wanted = theirs.decode(received(frames))
            except RuntimeError:
                continue
            got = ours.decode(received(frames))
            assert (got.dtype, got.shape, got.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
            assert got.view(torch.uint8).tolist() == wanted.view(torch.uint8).tolist()

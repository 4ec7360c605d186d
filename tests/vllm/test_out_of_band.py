"""Tensors that go another way: the same calls, the same bytes, the same objects as with vLLM's own encoder and decoder."""

import pytest
import torch
from peers import draw, received
from support.compare import assert_same, assert_same_frames
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, OOBTensorConsumer

import fastmm


class Store(OOBTensorConsumer):
    """Takes every other tensor."""

    def __init__(self):
        self.message, self.seen, self.kept = 0, 0, {}

    def new_message(self):
        self.message += 1

    def __call__(self, tensor):
        self.seen += 1
        if self.seen % 2:
            return None
        key = (self.message, self.seen)
        self.kept[key] = tensor.detach().clone()
        return {"message": self.message, "tensor": self.seen, "name": "caf\u00e9"}

    def provide(self, dtype, shape, meta):
        tensor = self.kept[meta["message"], meta["tensor"]]
        assert str(tensor.dtype) == f"torch.{dtype}"
        return tensor.reshape(tuple(shape))


@pytest.mark.parametrize("threshold", [0, 1, 256])
def test_the_consumer_is_asked_as_vllm_asks_it(threshold):
    theirs, ours = Store(), Store()
    vllm_encoder = MsgpackEncoder(threshold, theirs)
    our_encoder = fastmm.Encoder(dtype=None, dedup=False, threshold=threshold, oob_tensor_consumer=ours)
    for seed in range(1, 200):
        message, _ = draw(seed, odd=bool(seed & 8))
        assert_same_frames(our_encoder.encode(message), vllm_encoder.encode(message))
    assert theirs.seen == ours.seen > 100
    assert theirs.message == ours.message == 199
    assert theirs.kept.keys() == ours.kept.keys()
    for key, tensor in theirs.kept.items():
        assert_same(ours.kept[key], tensor)


def test_the_provider_gives_what_the_consumer_took():
    for seed in (seed for seed in range(1, 200) if seed % 4):
        store = Store()
        message, _ = draw(seed)
        frames = MsgpackEncoder(0, store).encode(message)
        theirs = MsgpackDecoder(EngineCoreRequest, oob_tensor_provider=store.provide).decode(received(frames))
        ours = fastmm.Decoder(tensors="torch", oob_tensor_provider=store.provide).decode(frames)
        assert_same(ours, theirs)


@pytest.mark.parametrize("wrong", [lambda t: t.double(), lambda t: t.reshape(-1)[:1], lambda t: None, lambda t: "tensor"])
def test_what_a_provider_returns_is_checked(wrong):
    store = Store()
    store.seen = 1
    message, _ = draw(1)
    message.prompt_embeds = torch.ones(4, 8)
    message.mm_features = None
    message.sampling_params = None
    frames = MsgpackEncoder(0, store).encode(message)
    with pytest.raises(fastmm.DecodeError):
        fastmm.Decoder(oob_tensor_provider=lambda *args: wrong(store.provide(*args))).decode(frames)


def test_without_a_provider_it_is_an_error():
    store = Store()
    store.seen = 1
    message, _ = draw(1)
    message.prompt_embeds = torch.ones(4, 8)
    frames = MsgpackEncoder(0, store).encode(message)
    with pytest.raises(fastmm.DecodeError):
        fastmm.decode_request(frames)

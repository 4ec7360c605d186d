"""Our two ends of the torch queue with vLLM's own two, in real processes, both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from support.shm_peers import contents, make_request, receive, received, send
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.tensor_ipc import TensorIpcReceiver, TensorIpcSender
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import fastmm
from fastmm.transport.torch_shm import TorchShmConsumer, TorchShmProvider

PATIENCE_S = 120


class Peer:
    def __init__(self, target: Any, queue: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.ours, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(queue, theirs, "vllm"), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, what: Any) -> Any:
        self.ours.send(what)
        assert self.ours.poll(PATIENCE_S)
        return self.ours.recv()

    def end(self) -> None:
        for _ in range(2):
            try:
                self.ours.send(None)
            except OSError:
                break
        self.process.join(PATIENCE_S)
        self.process.kill()


def as_theirs(request: Any) -> EngineCoreRequest:
    return MsgpackDecoder(EngineCoreRequest).decode(received(request))


@pytest.fixture
def queue() -> Any:
    return multiprocessing.get_context("spawn").Queue()


def test_vllm_receives_in_its_process_what_we_send(queue: Any) -> None:
    encoder = fastmm.Encoder(oob_tensor_consumer=TorchShmConsumer(queue))
    peer = Peer(receive, queue)
    try:
        for seed in range(20):
            request = make_request(seed)
            (main,) = encoder.encode(request)
            assert peer.ask([bytes(main)]) == contents(request)
    finally:
        peer.end()


def test_we_receive_what_vllm_sends_from_its_process(queue: Any) -> None:
    decoder = fastmm.Decoder(oob_tensor_provider=TorchShmProvider(queue))
    peer = Peer(send, queue)
    try:
        for seed in range(20):
            frames = peer.ask(seed)
            assert len(frames) == 1
            assert contents(decoder.decode(frames)) == contents(make_request(seed))
    finally:
        peer.end()


def test_the_place_of_a_tensor_is_written_as_vllm_writes_it(queue: Any) -> None:
    ours = fastmm.Encoder(oob_tensor_consumer=TorchShmConsumer(queue)).encode([torch.ones(100), torch.ones(200)])
    theirs = MsgpackEncoder(256, TensorIpcSender(queue)).encode([torch.ones(100), torch.ones(200)])
    mine, other = (MsgpackDecoder().decode(frames) for frames in (ours, theirs))
    for a, b in zip(mine, other):
        assert a[:2] == b[:2]
        assert a[2].keys() == b[2].keys()
        assert (a[2]["message_id"], a[2]["tensor_id"]) == (b[2]["message_id"], b[2]["tensor_id"])


def test_senders_of_both_kinds_share_a_queue(queue: Any) -> None:
    ours = fastmm.Encoder(oob_tensor_consumer=TorchShmConsumer(queue))
    theirs = MsgpackEncoder(256, TensorIpcSender(queue))
    frames = {}
    for seed in range(8):
        request = make_request(seed)
        frames[seed] = ours.encode(request) if seed % 2 else theirs.encode(as_theirs(request))
    decoder = fastmm.Decoder(oob_tensor_provider=TorchShmProvider(queue))
    receiver = MsgpackDecoder(EngineCoreRequest, oob_tensor_provider=TensorIpcReceiver(queue))
    for seed in (0, 1, 3, 2):
        assert contents(decoder.decode(frames[seed])) == contents(make_request(seed))
    for seed in (5, 4, 6, 7):
        # What the first receiver took off the queue for others is not there any more: send anew.
        request = make_request(seed)
        again = ours.encode(request) if seed % 2 else theirs.encode(as_theirs(request))
        assert contents(receiver.decode(again)) == contents(make_request(seed))

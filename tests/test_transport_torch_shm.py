"""Tensors over a torch queue: they arrive, alone and exact; what fails falls back or is an error, and nothing is waited for."""

from __future__ import annotations

import gc
import os
import queue as queues
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.memory import in_fresh_process
from support.shm_peers import contents, make_request, receive, send

import fastmm
from fastmm import DecodeError, TransportTimeout
from fastmm.transport.torch_shm import TorchShmConsumer, TorchShmProvider

torch = pytest.importorskip("torch")

import torch.multiprocessing as multiprocessing  # noqa: E402

PATIENCE_S = 60

pytestmark = pytest.mark.no_asan  # nothing of ours is compiled here, and each process imports torch


# Children are forked from a server that has imported torch, once.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "fastmm", "support.shm_peers"])


@pytest.fixture
def queue() -> Iterator[Any]:
    made = CONTEXT.Queue()
    yield made
    made.close()
    made.join_thread()


@contextmanager
def child(target: Any, queue: Any, maker: str = "fastmm") -> Iterator[Any]:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(queue, theirs, maker), daemon=True)
    process.start()
    theirs.close()
    pipe = types.SimpleNamespace(process=process, send=ours.send, recv=lambda: ours.recv() if ours.poll(PATIENCE_S) else None)
    try:
        yield pipe
    finally:
        for _ in range(2):
            try:
                ours.send(None)
            except OSError:
                break
        process.join(PATIENCE_S)
        process.kill()


def on_queue(consumer: TorchShmConsumer, tensor: Any) -> dict[str, Any]:
    consumer.new_message()
    place = consumer(tensor)
    assert place is not None, consumer.last_error
    return place


def ask(provider: TorchShmProvider, place: dict[str, Any], tensor: Any) -> Any:
    return provider(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), place)


# --- between processes ------------------------------------------------------------------------------------------------


def test_requests_arrive_in_another_process_exact(queue: Any) -> None:
    encoder = fastmm.Encoder(oob_tensor_consumer=TorchShmConsumer(queue))
    with child(receive, queue) as peer:
        for seed in range(20):
            request = make_request(seed)
            frames = encoder.encode(request)
            assert len(frames) == 1  # nothing but the main frame
            peer.send([bytes(frames[0])])
            assert peer.recv() == contents(request)


def test_several_senders_are_told_apart(queue: Any) -> None:
    provider = TorchShmProvider(queue)
    decoder = fastmm.Decoder(oob_tensor_provider=provider)
    with child(send, queue) as one, child(send, queue) as two:
        peers = [one, two]
        for seed in range(10):  # all on the queue before anything is decoded
            peers[seed % 2].send(seed)
        frames = {seed: peers[seed % 2].recv() for seed in range(10)}
        for seed in [0, 1, 3, 2, 5, 7, 4, 6, 8, 9]:
            assert contents(decoder.decode(frames[seed])) == contents(make_request(seed))
    assert provider.counters["waiting"] == 0


def test_a_sender_that_was_killed_is_an_error_and_not_a_wait(queue: Any) -> None:
    provider = TorchShmProvider(queue, timeout=PATIENCE_S)
    decoder = fastmm.Decoder(oob_tensor_provider=provider)
    with child(send, queue) as peer:
        peer.send(1)
        frames = peer.recv()
        assert queue._reader.poll(PATIENCE_S)  # a thread of its own writes to the queue
        peer.process.kill()
        peer.process.join(PATIENCE_S)
    with pytest.raises(DecodeError, match="oob_tensor_provider"):
        decoder.decode(frames)
    assert provider.counters["failed"] >= 1


def test_the_living_are_served_among_the_killed(queue: Any) -> None:
    decoder = fastmm.Decoder(oob_tensor_provider=TorchShmProvider(queue, timeout=PATIENCE_S))
    with child(send, queue) as dead, child(send, queue) as alive:
        dead.send(1)
        dead.recv()
        alive.send(2)
        frames = alive.recv()
        dead.process.kill()
        dead.process.join(PATIENCE_S)
        assert contents(decoder.decode(frames)) == contents(make_request(2))


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_a_view_does_not_drag_its_base_along_nor_move_it(queue: Any) -> None:
    consumer, provider = TorchShmConsumer(queue), TorchShmProvider(queue)
    base = torch.arange(1 << 20, dtype=torch.float32)
    address = base.data_ptr()
    view = base[100:200]
    got = ask(provider, on_queue(consumer, view), view)
    assert torch.equal(got, view)
    assert got.untyped_storage().nbytes() == 400
    assert not base.is_shared()
    assert base.data_ptr() == address
    assert consumer.counters["nbytes_copied"] == 400


def test_a_view_of_shared_memory_is_copied_out_of_it(queue: Any) -> None:
    consumer, provider = TorchShmConsumer(queue), TorchShmProvider(queue)
    base = torch.arange(1 << 16, dtype=torch.float32).share_memory_()
    view = base[100:200]
    assert ask(provider, on_queue(consumer, view), view).untyped_storage().nbytes() == 400


def test_a_whole_shared_tensor_is_not_copied(queue: Any) -> None:
    consumer, provider = TorchShmConsumer(queue), TorchShmProvider(queue)
    tensor = torch.zeros(1 << 16).share_memory_()
    got = ask(provider, on_queue(consumer, tensor), tensor)
    tensor[5] = 7.0
    assert got[5] == 7.0
    assert consumer.counters["nbytes_copied"] == 0


ODD = {
    "strided": lambda: torch.arange(1200.0).view(30, 40).t()[::2],
    "expanded": lambda: torch.ones(1).expand(1000),
    "requires grad": lambda: torch.ones(100, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.ones(100)),
    "float8": lambda: torch.ones(100).to(torch.float8_e4m3fn),
    "bool": lambda: torch.arange(100) % 3 == 0,
    "zero-dimensional": lambda: torch.tensor(1.5),
    "empty": lambda: torch.empty(0, 5),
    "negated lazily": lambda: torch.complex(torch.ones(50), torch.ones(50)).conj().imag,
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_tensors_arrive_as_they_are(queue: Any, kind: str) -> None:
    tensor = ODD[kind]()
    got = ask(TorchShmProvider(queue), on_queue(TorchShmConsumer(queue), tensor), tensor)
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert got.is_contiguous()
    same = tensor.detach().resolve_neg()
    assert torch.equal(got.view(torch.uint8) if got.dtype == torch.float8_e4m3fn else got,
                       same.view(torch.uint8) if got.dtype == torch.float8_e4m3fn else same)  # fmt: skip


def test_casts_come_first(queue: Any) -> None:
    request = make_request(0)
    frames = fastmm.Encoder(dtype="bfloat16", oob_tensor_consumer=TorchShmConsumer(queue)).encode(request)
    decoded = fastmm.Decoder(oob_tensor_provider=TorchShmProvider(queue)).decode(frames)
    assert [kind for kind, _, _ in contents(decoded)] == ["torch.bfloat16", "torch.bfloat16", "torch.int64"]
    plain = make_request(0)
    fastmm.encode_request(plain, dtype="bfloat16")
    assert contents(decoded) == contents(plain)


# --- failures of the sender -------------------------------------------------------------------------------------------


class Broken:
    """A queue that takes nothing."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        assert not block
        raise self.error

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        raise queues.Empty


@pytest.mark.parametrize("error", [queues.Full(), OSError("no descriptors"), ValueError("closed"), RuntimeError("torch")])
def test_a_tensor_the_queue_does_not_take_travels_in_a_frame(error: Exception) -> None:
    consumer = TorchShmConsumer(Broken(error))
    frames = fastmm.Encoder(oob_tensor_consumer=consumer).encode(make_request(3))
    assert len(frames) == 4
    assert contents(fastmm.decode_request(frames)) == contents(make_request(3))
    assert consumer.counters["failed"] == 3
    assert consumer.last_error is error


def test_what_cannot_be_pickled_falls_back_in_the_call(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's sender learns of it in the queue's own thread, when the message is on its way already."""
    import multiprocessing.reduction

    def refuse(self: Any, obj: Any) -> Any:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(multiprocessing.reduction, "DupFd", refuse)
    consumer = TorchShmConsumer(queue)
    frames = fastmm.Encoder(oob_tensor_consumer=consumer).encode(make_request(3))
    assert contents(fastmm.decode_request(frames)) == contents(make_request(3))
    assert consumer.counters["failed"] == 3


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a small /dev/shm needs a mount namespace (root)")
def test_a_full_shared_memory_falls_back() -> None:
    code = """
import torch, torch.multiprocessing as mp, fastmm
from fastmm.transport.torch_shm import TorchShmConsumer, TorchShmProvider
queue = mp.get_context("spawn").Queue()
consumer = TorchShmConsumer(queue)
request = fastmm.EngineCoreRequest("r", [1], arrival_time=1.0, prompt_embeds=torch.ones(1 << 20))
frames = fastmm.Encoder(oob_tensor_consumer=consumer).encode(request)
assert len(frames) == 2 and consumer.counters["failed"] == 1, consumer.counters
small = fastmm.EngineCoreRequest("r", [1], arrival_time=1.0, prompt_embeds=torch.ones(1 << 10))
frames = fastmm.Encoder(oob_tensor_consumer=consumer).encode(small)
assert len(frames) == 1, consumer.last_error
got = fastmm.Decoder(oob_tensor_provider=TorchShmProvider(queue)).decode(frames)
assert torch.equal(got.prompt_embeds, small.prompt_embeds)
print("done")
"""
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm || exit 77; exec "$0" -c "$1"'
    done = subprocess.run(["unshare", "-m", "sh", "-c", script, sys.executable, code], capture_output=True, text=True,
                          timeout=PATIENCE_S, check=False)  # fmt: skip
    if done.returncode in (1, 77) and "done" not in done.stdout and "mount" in done.stderr + done.stdout:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()[-200:]}")
    assert "done" in done.stdout, done.stderr


# --- failures seen by the receiver ------------------------------------------------------------------------------------


def test_a_tensor_is_given_once(queue: Any) -> None:
    consumer, provider = TorchShmConsumer(queue), TorchShmProvider(queue, timeout=PATIENCE_S)
    tensor = torch.ones(100)
    place = on_queue(consumer, tensor)
    ask(provider, place, tensor)
    with pytest.raises(DecodeError, match="taken already"):
        ask(provider, place, tensor)


def test_a_tensor_that_came_twice_is_kept_once(queue: Any) -> None:
    provider = TorchShmProvider(queue)
    place = {"sender_id": "s", "message_id": 1, "tensor_id": 0}
    for _ in range(3):
        queue.put(types.SimpleNamespace(**place, tensor=torch.ones(10)))
    queue.put(types.SimpleNamespace(sender_id="s", message_id=2, tensor_id=0, tensor=torch.zeros(10)))
    assert torch.equal(ask(provider, place, torch.ones(10)), torch.ones(10))
    assert torch.equal(ask(provider, place | {"message_id": 2}, torch.ones(10)), torch.zeros(10))
    assert provider.counters["dropped"] == 2
    assert provider.counters["waiting"] == 0


def test_a_tensor_that_was_lost_is_missed_when_the_next_one_comes(queue: Any) -> None:
    """One sender's come in order: who sees the third need not wait for the second."""
    consumer, provider = TorchShmConsumer(queue), TorchShmProvider(queue, timeout=PATIENCE_S)
    consumer.new_message()
    tensor = torch.ones(100)
    first, later = consumer(tensor), consumer(tensor)
    assert first is not None
    with pytest.raises(DecodeError, match="never came"):
        ask(provider, first | {"message_id": 0}, tensor)
    assert torch.equal(ask(provider, later, tensor), tensor)


def test_a_tensor_that_never_comes_is_a_timeout(queue: Any) -> None:
    provider = TorchShmProvider(queue, timeout=0)
    with pytest.raises(TransportTimeout):
        ask(provider, {"sender_id": "s", "message_id": 1, "tensor_id": 0}, torch.ones(1))
    frames = fastmm.Encoder(oob_tensor_consumer=TorchShmConsumer(queue)).encode(make_request(1))
    decoder = fastmm.Decoder(oob_tensor_provider=TorchShmProvider(Broken(OSError()), timeout=0))
    with pytest.raises(DecodeError, match="in time"):
        decoder.decode(frames)


@pytest.mark.parametrize(
    "meta",
    [{}, {"sender_id": "s"}, {"sender_id": "s", "message_id": "1", "tensor_id": 0}, {"sender_id": 1, "message_id": 1, "tensor_id": 0},
     {"sender_id": "s", "message_id": 1, "tensor_id": None}, {"sender_id": "s", "message_id": True, "tensor_id": 0}],
)  # fmt: skip
def test_another_shape_of_place_is_a_decode_error(queue: Any, meta: dict[str, Any]) -> None:
    with pytest.raises(DecodeError, match="sender_id"):
        TorchShmProvider(queue, timeout=PATIENCE_S)("float32", (1,), meta)


@pytest.mark.parametrize("junk", [None, 5, "text", {"sender_id": "s"}, types.SimpleNamespace(sender_id="s", message_id=1),
                                  types.SimpleNamespace(sender_id="s", message_id=1, tensor_id=0, tensor=None)])  # fmt: skip
def test_what_else_is_on_the_queue_is_passed_over(queue: Any, junk: Any) -> None:
    provider, tensor = TorchShmProvider(queue), torch.ones(10)
    queue.put(junk)
    assert torch.equal(ask(provider, on_queue(TorchShmConsumer(queue), tensor), tensor), tensor)
    assert provider.counters["failed"] == 1


def test_a_tensor_of_another_type_than_the_message_says_is_refused(queue: Any) -> None:
    class Liar(TorchShmConsumer):
        def __call__(self, tensor: Any) -> dict[str, Any] | None:
            return super().__call__(tensor.double())

    frames = fastmm.Encoder(oob_tensor_consumer=Liar(queue)).encode(make_request(0))
    with pytest.raises(DecodeError, match="oob_tensor_provider"):
        fastmm.Decoder(oob_tensor_provider=TorchShmProvider(queue)).decode(frames)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_messages_that_were_never_decoded_go_with_the_next_one(queue: Any) -> None:
    consumer, provider = TorchShmConsumer(queue), TorchShmProvider(queue)
    tensor = torch.ones(1000)
    for _ in range(5):
        place = on_queue(consumer, tensor)
    ask(provider, place, tensor)
    assert provider.counters == {"tensors": 1, "nbytes": 4000, "dropped": 4, "failed": 0, "waiting": 0, "waiting_nbytes": 0}


def test_what_nobody_asks_for_is_bounded_and_can_be_forgotten(queue: Any) -> None:
    provider = TorchShmProvider(queue, max_waiting_nbytes=10_000)
    other = TorchShmConsumer(queue)
    for _ in range(10):
        gone = on_queue(other, torch.ones(1000))
    tensor = torch.ones(10)
    ask(provider, on_queue(TorchShmConsumer(queue), tensor), tensor)
    assert provider.counters["waiting_nbytes"] <= 10_000
    assert provider.counters["waiting"] == 2
    provider.forget(gone["sender_id"])
    assert provider.counters["waiting"] == provider.counters["waiting_nbytes"] == 0
    provider.forget("never seen")


def test_memory_and_descriptors_are_given_back() -> None:
    out = in_fresh_process(
        """
import gc, os, torch, torch.multiprocessing as mp, fastmm
from fastmm.transport.torch_shm import TorchShmConsumer, TorchShmProvider
queue = mp.get_context("spawn").Queue()
encoder = fastmm.Encoder(oob_tensor_consumer=TorchShmConsumer(queue))
decoder = fastmm.Decoder(oob_tensor_provider=TorchShmProvider(queue))
def once(count):
    for _ in range(count):
        request = fastmm.EngineCoreRequest("r", [1], arrival_time=1.0, prompt_embeds=torch.ones(1 << 18))
        got = decoder.decode(encoder.encode(request))
        assert got.prompt_embeds[-1] == 1
def used():
    gc.collect()
    shm = sum(1 for line in open("/proc/self/maps") if "/dev/shm/torch" in line)
    return shm, len(os.listdir("/proc/self/fd"))
once(20)
before = used()
once(80)
after = used()
print(before, after)
assert after[0] <= before[0] + 1 and after[1] <= before[1] + 4, (before, after)
"""
    )
    assert out


def test_threads_are_senders_of_their_own(queue: Any) -> None:
    consumer, provider = TorchShmConsumer(queue), TorchShmProvider(queue)
    encoder = fastmm.Encoder(oob_tensor_consumer=consumer)
    decoder = fastmm.Decoder(oob_tensor_provider=provider)
    found: dict[int, list[tuple[int, Any]]] = {}

    def work(number: int) -> None:
        found[number] = [(seed, encoder.encode(make_request(seed))) for seed in range(number * 100, number * 100 + 8)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for turn in range(8):  # one of each thread in turn
        for number in range(4):
            seed, frames = found[number][turn]
            assert contents(decoder.decode(frames)) == contents(make_request(seed))
    assert provider.counters["dropped"] == 0
    gc.collect()

"""The ledger over real sockets: memory is held until ZMQ is done with all frames of a message, and not a moment longer."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from support.memory import in_fresh_process, resident_nbytes

import fastmm
from fastmm.errors import EncodeError, Overloaded, TransportError, TransportTimeout
from fastmm.transport.lifetime import Ledger, Ticket, nbytes_of

MIB = 1 << 20
PATIENCE_S = 20.0


def comes_true(condition: Callable[[], object]) -> bool:
    """Whether it does within a long time; what makes it true is another thread."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context[Any]()
    yield context
    context.destroy(linger=0)


@contextmanager
def pair(context: zmq.Context[Any], path: Path, sndhwm: int = 1000) -> Iterator[tuple[zmq.Socket[Any], zmq.Socket[Any]]]:
    """A ROUTER, which sends, and the DEALER it knows as ``b"\\0\\0"``."""
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.linger = dealer.linger = 0
    router.router_mandatory = True
    router.sndhwm = sndhwm
    dealer.identity = b"\0\0"
    router.bind(f"ipc://{path}")
    dealer.connect(f"ipc://{path}")
    dealer.send(b"here")
    assert router.poll(PATIENCE_S * 1000)
    router.recv_multipart()
    yield router, dealer
    router.close()
    dealer.close()


def push_to_nobody(context: zmq.Context[Any], path: Path) -> zmq.Socket[Any]:
    """A socket whose messages stay in its queue: nobody listens there yet."""
    push = context.socket(zmq.PUSH)
    push.linger = 0
    push.connect(f"ipc://{path}")
    return push


def send(ledger: Ledger, socket: zmq.Socket[Any], frames: list[Any], flags: int = 0) -> Ticket:
    ticket = ledger.reserve(nbytes_of(frames))
    socket.send_multipart(ticket.parcels(frames), flags, copy=False)
    return ticket


def empty(ledger: Ledger) -> bool:
    return (ledger.counters["inflight"], ledger.counters["inflight_nbytes"]) == (0, 0)


def test_frames_that_zmq_copies_are_done_when_sent(context: zmq.Context[Any], tmp_path: Path) -> None:
    ledger, array = Ledger(), np.zeros(zmq.COPY_THRESHOLD - 1, np.uint8)
    gone = weakref.ref(array)
    push = push_to_nobody(context, tmp_path / "s")
    ticket = send(ledger, push, [b"main", array])
    del array
    assert ticket.done  # although nobody is there to receive it
    assert gone() is None
    assert empty(ledger)


def test_a_request_is_held_until_its_frames_have_left_and_not_longer(context: zmq.Context[Any], tmp_path: Path) -> None:
    ledger = Ledger()
    pixels = np.zeros((64, 4096), np.float32)
    memory = weakref.ref(pixels)
    features = fastmm.build_features(
        tensors={"pixel_values": pixels},
        batched={"pixel_values"},
        placeholders=[(i, 1) for i in range(64)],
        hashes=[str(i) for i in range(64)],
        prompt_token_ids=list(range(64)),
    )
    request = fastmm.EngineCoreRequest("r", list(range(64)), features)
    frames = fastmm.encode_request(request, threshold=0)
    with_main_at_least = nbytes_of(frames)
    assert with_main_at_least > pixels.nbytes
    push = push_to_nobody(context, tmp_path / "s")
    push.copy_threshold = 0  # every frame is ZMQ's to hold
    ticket = send(ledger, push, frames)
    del request, features, frames, pixels
    gc.collect()
    assert memory() is not None
    assert not ticket.done
    assert ledger.counters["inflight_nbytes"] == with_main_at_least == ticket.nbytes
    pull = context.socket(zmq.PULL)
    pull.bind(f"ipc://{tmp_path / 's'}")
    assert pull.poll(PATIENCE_S * 1000)
    received = pull.recv_multipart()
    assert comes_true(lambda: ticket.done)
    assert memory() is None  # a ticket is done when the memory is free, not before
    assert fastmm.decode_request(received, tensors="numpy").request_id == "r"
    assert ledger.wait(PATIENCE_S)


def test_a_tensor_that_is_written_to_before_its_frame_has_left_arrives_as_written_and_the_ledger_says_from_when_it_is_free(
    context: zmq.Context[Any], tmp_path: Path
) -> None:
    ledger, array = Ledger(), np.zeros(MIB, np.uint8)
    push = push_to_nobody(context, tmp_path / "s")
    ticket = send(ledger, push, [array])
    array[:] = 7  # the documented contract: not before the ticket is done
    assert not ticket.done
    pull = context.socket(zmq.PULL)
    pull.bind(f"ipc://{tmp_path / 's'}")
    assert comes_true(lambda: ticket.done)
    array[:] = 9  # now it is free
    assert pull.poll(PATIENCE_S * 1000)
    assert set(pull.recv()) == {7}


def test_all_frames_count_where_a_tracker_knows_the_last_only(context: zmq.Context[Any], tmp_path: Path) -> None:
    ledger, array = Ledger(), np.zeros(MIB, np.uint8)
    push = push_to_nobody(context, tmp_path / "s")
    frames = [array, b"a last frame that ZMQ copies"]
    ticket = ledger.reserve(nbytes_of(frames))
    tracker = push.send_multipart(ticket.parcels(frames), copy=False, track=True)
    assert tracker is not None
    assert tracker.done  # what pyzmq would have told us
    assert not ticket.done
    push.close()
    assert comes_true(lambda: ticket.done)


@pytest.mark.parametrize("how", ["close", "destroy", "term"])
def test_what_was_not_sent_is_free_when_the_socket_or_the_context_goes(how: str, tmp_path: Path) -> None:
    context, ledger = zmq.Context[Any](), Ledger()
    push = push_to_nobody(context, tmp_path / "s")
    gone = []
    for _ in range(20):
        array = np.zeros(MIB, np.uint8)
        gone.append(weakref.ref(array))
        send(ledger, push, [b"main", array])
    del array
    assert ledger.counters["inflight"] == 20
    assert all(memory() is not None for memory in gone)
    if how == "destroy":
        context.destroy(linger=0)
    else:
        push.close(linger=0)
    if how == "term":
        context.term()
    assert ledger.wait(PATIENCE_S)
    assert [memory() for memory in gone] == [None] * 20
    context.term()


def test_a_socket_that_lingers_keeps_the_memory_until_the_message_has_left(tmp_path: Path) -> None:
    context, ledger = zmq.Context[Any](), Ledger()
    push = push_to_nobody(context, tmp_path / "s")
    ticket = send(ledger, push, [np.full(MIB, 3, np.uint8)])
    push.close(linger=60_000)
    assert not ticket.done
    with zmq.Context[Any]() as other, other.socket(zmq.PULL) as pull:
        pull.bind(f"ipc://{tmp_path / 's'}")
        assert pull.poll(PATIENCE_S * 1000)
        assert set(pull.recv()) == {3}
        assert comes_true(lambda: ticket.done)
    context.term()


SLEEPER = """
import sys, time, zmq
dealer = zmq.Context().socket(zmq.DEALER)
dealer.identity, dealer.rcvhwm = b"\\0\\0", 1
dealer.connect(sys.argv[1])
dealer.send(b"here")
time.sleep(600)
"""


def test_what_is_on_its_way_to_a_peer_that_is_killed_is_free_at_once(context: zmq.Context[Any], tmp_path: Path) -> None:
    ledger, router = Ledger(), context.socket(zmq.ROUTER)
    router.sndhwm, router.router_mandatory = 0, True
    router.bind(f"ipc://{tmp_path / 's'}")
    with subprocess.Popen([sys.executable, "-c", SLEEPER, f"ipc://{tmp_path / 's'}"]) as peer:
        assert router.poll(PATIENCE_S * 1000)
        router.recv_multipart()
        tickets = [send(ledger, router, [b"\0\0", np.zeros(4 * MIB, np.uint8)]) for _ in range(40)]
        assert sum(ticket.done for ticket in tickets) < 40  # its queue and the pipe are full
        peer.send_signal(signal.SIGKILL)
        # libzmq's thread takes the connection down; the socket lets go of its queue when it is next looked at.
        assert comes_true(lambda: not router.poll(0) and empty(ledger))
        peer.wait()


def test_a_send_that_fails_leaves_nothing_behind(context: zmq.Context[Any], tmp_path: Path) -> None:
    ledger = Ledger()
    with pair(context, tmp_path / "s") as (router, _):
        with pytest.raises(zmq.ZMQError, match="unreachable"):
            send(ledger, router, [b"\1\1", np.zeros(MIB, np.uint8)])
        assert comes_true(lambda: empty(ledger))
    push = context.socket(zmq.PUSH)
    push.bind(f"ipc://{tmp_path / 'nobody'}")
    with pytest.raises(zmq.Again):
        send(ledger, push, [np.zeros(MIB, np.uint8), b"more"], zmq.NOBLOCK)
    assert comes_true(lambda: empty(ledger))
    assert ledger.counters["admitted"] == ledger.counters["finished"] == 2


def test_a_thousand_sends_of_5_mb_keep_to_the_bound_and_memory_stays_flat(context: zmq.Context[Any], tmp_path: Path) -> None:
    ledger, count = Ledger(max_inflight_nbytes=32_000_000), 1000

    with pair(context, tmp_path / "s", sndhwm=0) as (router, dealer):

        def receive() -> None:
            for _ in range(count):
                dealer.recv_multipart(copy=False)

        receiver = threading.Thread(target=receive)
        receiver.start()
        start = 0
        for index in range(count):
            array = np.empty(5_000_000, np.uint8)
            array[::4096] = index & 255  # every page is real
            send(ledger, router, [b"\0\0", array])
            del array
            if index == 100:
                start = resident_nbytes()
        assert ledger.wait(PATIENCE_S)
        receiver.join(PATIENCE_S)
        assert not receiver.is_alive()
    assert ledger.counters["peak_nbytes"] <= 32_000_000
    assert ledger.counters["finished"] == count
    assert resident_nbytes() - start < 64 * MIB  # 5 GB went through


def test_a_thousand_receives_of_2_7_mb_stay_flat_with_the_collector_off(context: zmq.Context[Any], tmp_path: Path) -> None:
    ledger = Ledger(max_inflight_nbytes=16_000_000)
    decoder = fastmm.Decoder(None)
    encoder = fastmm.Encoder()
    gc.disable()
    try:
        with pair(context, tmp_path / "s", sndhwm=0) as (router, dealer):
            array, start = np.zeros(2_700_000, np.uint8), 0
            for index in range(1000):
                send(ledger, router, [b"\0\0", *encoder.encode([array])])
                main, payload = dealer.recv_multipart(copy=False)
                assert memoryview(payload)[0] == 0  # touched
                (tensor,) = decoder.decode([main, payload])
                del main, payload, tensor
                if index == 100:
                    start = resident_nbytes()
            assert resident_nbytes() - start < 32 * MIB
    finally:
        gc.enable()
    assert ledger.wait(PATIENCE_S)


def test_a_buffer_of_encode_into_is_guarded_while_it_is_on_its_way(context: zmq.Context[Any], tmp_path: Path) -> None:
    ledger, buffer, encoder = Ledger(), bytearray(), fastmm.Encoder()
    push = push_to_nobody(context, tmp_path / "s")
    ledger.guard(buffer, wait=False)  # not sent yet
    ticket = send(ledger, push, encoder.encode_into(list(range(100_000)), buffer))
    with pytest.raises(Overloaded, match="still on its way"):
        ledger.guard(buffer, wait=False)
    with pytest.raises(TransportTimeout, match="on its way"):
        ledger.guard(buffer, timeout=0.01)
    with pytest.raises(EncodeError, match="nobody else uses"):
        encoder.encode_into([1], buffer)  # even who does not ask the ledger cannot change what ZMQ reads
    ledger.guard(bytearray(buffer), wait=False)  # equal, and another
    threading.Timer(0.05, push.close).start()
    ledger.guard(buffer, timeout=PATIENCE_S)
    assert ticket.done
    assert encoder.encode_into([1], buffer) == [buffer]


def test_a_ticket_is_used_once_and_takes_frames_only() -> None:
    ledger = Ledger()
    ticket = ledger.reserve(3)
    with pytest.raises(TransportError, match="expected frames, got a int"):
        ticket.parcels([b"abc", 3])
    with pytest.raises(TransportError, match="expected frames, got a ndarray"):
        ticket.parcels([np.zeros((4, 4))[:, ::2]])
    assert not ticket.done  # what failed has left no trace
    parcels = ticket.parcels([b"abc"])
    with pytest.raises(TransportError, match="has its parcels"):
        ticket.parcels([b"abc"])
    ticket.cancel()  # the parcels have the word
    assert not ticket.done
    assert bytes(parcels[0]) == b"abc"
    view = memoryview(parcels[0])
    assert view.readonly
    del parcels
    assert not ticket.done  # a view is a holder like any other
    del view
    assert ticket.done
    with pytest.raises(TransportError, match="is done"):
        ticket.parcels([b"abc"])
    with pytest.raises(TypeError, match="comes from"):
        Ticket()
    assert empty(ledger)
    assert ledger.reserve(0).parcels([]) == []
    assert empty(ledger)


def test_a_ticket_that_is_dropped_or_cancelled_gives_its_room_back() -> None:
    ledger = Ledger(10)
    ticket = ledger.reserve(10)
    del ticket  # an error between reserve and send
    ticket = ledger.reserve(10, wait=False)
    ticket.cancel()
    ticket.cancel()
    assert ticket.done
    assert empty(ledger)


def test_callbacks_are_called_once_when_the_memory_is_free_and_their_failures_hurt_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, array, called, failures = Ledger(), np.zeros(8, np.uint8), [], []
    monkeypatch.setattr(sys, "unraisablehook", lambda failure: failures.append(failure.exc_value))
    memory = weakref.ref(array)

    def fail(_: Ticket) -> None:
        raise ValueError("a callback's own")

    ticket = ledger.reserve(8)
    ticket.add_done_callback(lambda told: called.append((told, memory())))
    ticket.add_done_callback(fail)
    ticket.add_done_callback(lambda told: called.append("after the one that failed"))
    removed = called.append
    ticket.add_done_callback(removed)
    ticket.remove_done_callback(removed)
    parcels = ticket.parcels([array])
    del array
    try:
        raise KeyError("on its way while the parcel dies")
    except KeyError as error:
        del parcels
        assert error.args == ("on its way while the parcel dies",)
    assert called == [(ticket, None), "after the one that failed"]
    assert [str(failure) for failure in failures] == ["a callback's own"]
    ticket.add_done_callback(lambda told: called.append("at once"))
    assert called[-1] == "at once"
    with pytest.raises(TypeError, match="callable"):
        ticket.add_done_callback(3)  # type: ignore[arg-type]


def test_parcels_in_a_cycle_and_under_a_collector_that_runs_all_the_time_lose_no_count() -> None:
    ledger, buffers = Ledger(), []
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            ticket = ledger.reserve(10)
            buffers.append(bytearray(10))
            cycle: list[Any] = [ticket.parcels(buffers[-1:]), ticket]
            cycle.append(cycle)
            ticket.add_done_callback(lambda _, cycle=cycle: cycle)
            del cycle, ticket
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert empty(ledger)
    assert ledger.counters["finished"] == 300
    for buffer in buffers:
        ledger.guard(buffer, wait=False)


def test_a_child_starts_with_an_empty_ledger_and_the_parent_goes_on() -> None:
    in_fresh_process(
        """
import os, tempfile, zmq, numpy as np
from fastmm.transport.lifetime import Ledger
ledger = Ledger(1 << 20)
context = zmq.Context()
directory = tempfile.mkdtemp()
push = context.socket(zmq.PUSH)
push.connect(f"ipc://{directory}/s")
called = []
ticket = ledger.reserve(1 << 20)
ticket.add_done_callback(lambda _: called.append(os.getpid()))
push.send_multipart(ticket.parcels([np.zeros(1 << 20, np.uint8)]), copy=False)
del ticket
child = os.fork()
if not child:
    code = 1
    try:
        assert ledger.counters["inflight"] == ledger.counters["inflight_nbytes"] == 0
        assert ledger.wait(0)
        with zmq.Context() as mine:  # pyzmq starts anew here, and drops what the parent had on its way
            for _ in range(3):
                with mine.socket(zmq.PUSH) as other:
                    other.linger = 0
                    other.connect(f"ipc://{directory}/t")
                    other.send_multipart(ledger.reserve(1 << 20, timeout=20).parcels([np.zeros(1 << 20, np.uint8)]), copy=False)
        assert ledger.wait(20)
        assert called == []
        code = 0
    finally:
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0
assert ledger.counters["inflight"] == 1 and called == []
push.close(linger=0)
assert ledger.wait(20)
assert called == [os.getpid()]
context.term()
"""
    )


@pytest.mark.parametrize("closing", ["nothing", "context.destroy(linger=0)", "push.close(linger=0)"])
def test_the_interpreter_ends_well_with_messages_on_their_way(closing: str) -> None:
    code = f"""
import atexit, tempfile, zmq, numpy as np
from fastmm.transport.lifetime import Ledger
ledger, context = Ledger(), zmq.Context()
push = context.socket(zmq.PUSH)
push.connect(f"ipc://{{tempfile.mkdtemp()}}/s")
kept = []
for _ in range(50):
    ticket = ledger.reserve(1 << 20)
    ticket.add_done_callback(lambda _: kept)
    push.send_multipart(ticket.parcels([np.zeros(1 << 20, np.uint8)]), copy=False)
{closing if closing != "nothing" else "pass"}
atexit.register(lambda: print(ledger.counters["inflight"] >= 0))
"""
    assert in_fresh_process(code).strip() == "True"


def test_at_the_end_of_the_process_memory_stays_and_tickets_are_told() -> None:
    in_fresh_process(
        """
import weakref, numpy as np
from fastmm._native.parcel import keep_memory
from fastmm.transport.lifetime import Ledger
ledger, array = Ledger(), np.zeros(100, np.uint8)
memory = weakref.ref(array)
ticket = ledger.reserve(100)
parcels = ticket.parcels([array])
keep_memory()  # as at exit, before pyzmq drops all it holds
del array, parcels
assert ticket.done and memory() is not None
"""
    )


LEAVING = """
import sys, zmq, numpy as np
from fastmm.transport.lifetime import Ledger
ledger, push = Ledger(), zmq.Context().socket(zmq.PUSH)
push.sndhwm = 0
push.connect(sys.argv[1])
for value in range(1, 21):
    array = np.full(8 << 20, value, np.uint8)
    push.send_multipart(ledger.reserve(array.nbytes).parcels([array]), copy=False)
del array
"""


def test_what_arrives_of_a_process_that_ends_in_the_middle_of_sending_is_whole_and_right(
    context: zmq.Context[Any], tmp_path: Path
) -> None:
    pull = context.socket(zmq.PULL)
    pull.rcvhwm = 1
    monitor = pull.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    pull.bind(f"ipc://{tmp_path / 's'}")
    with subprocess.Popen([sys.executable, "-c", LEAVING, f"ipc://{tmp_path / 's'}"]) as sender:
        assert sender.wait(60) == 0
        if monitor.poll(1000):  # it may have ended before it was connected
            while pull.poll(0):
                values = np.frombuffer(pull.recv(copy=False).buffer, np.uint8)
                assert (values == values[0]).all()
                assert values.size == 8 << 20
    pull.disable_monitor()

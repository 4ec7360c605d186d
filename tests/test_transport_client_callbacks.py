"""Functions of the user's that the client calls, and what they may do with the client. Nothing of it may hang."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
import zmq
from support.clients import LIMIT, driven, seen, text, tokens
from support.raw_engine import raw_engine

from fastmm import TransportError
from fastmm.schema import FinishReason
from fastmm.transport import EngineClient


def in_time(act: Any) -> Any:
    """What `act` returns in a thread of its own, which must come to an end."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(act()), daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive(), "it hangs"
    return got[0]


class Listener:
    """Does something with the client, once, when the first outputs come."""

    def __init__(self, act: Any) -> None:
        self.act = act
        self.client: Any = None
        self.came: list[Any] = []

    def __call__(self, message: Any) -> None:
        if message.outputs and not self.came:
            self.came.append(None)
            try:
                self.came[0] = self.act(self.client)
            except TransportError as error:
                self.came[0] = error


def test_a_listener_may_abort_and_send():
    def act(client: Any) -> Any:
        client.abort("hang-1")
        return client.generate(text("count-2"))

    listener = Listener(act)
    with driven(on_outputs=listener) as (client, _):
        listener.client = client
        outputs = client.generate(text("hang-1"))
        assert in_time(lambda: next(outputs)).finish_reason == FinishReason.ABORT
        assert seen(client, "abort") == [[["hang-1"]]]
        assert in_time(lambda: tokens(listener.came[0])) == [0, 1, 2]


def test_a_listener_that_waits_for_an_answer_is_told_that_it_would_wait_for_ever():
    listener = Listener(lambda client: client.call_utility("pid"))
    with driven(on_outputs=listener) as (client, _):
        listener.client = client
        assert in_time(lambda: tokens(client.generate(text("count-1")))) == [0, 1, 2]
        assert isinstance(listener.came[0], TransportError)
        assert "middle of receiving" in str(listener.came[0])


def test_a_listener_may_close_the_client():
    listener = Listener(lambda client: client.close())
    with driven(on_outputs=listener) as (client, _):
        listener.client = client
        outputs = client.generate(text("hang-1"))

        def rest() -> None:
            with pytest.raises(TransportError, match="closed"):
                list(outputs)  # perhaps with the first output, perhaps not any more

        in_time(rest)
        in_time(client.close)
        assert client._connection is None


def test_a_signals_handler_may_close_the_client_and_is_told_not_to_wait_for_answers():
    came: list[str] = []

    def handler(*_: Any) -> None:
        with pytest.raises(TransportError, match="middle of receiving"):
            client.call_utility("pid")
        came.append("refused")
        client.close()
        came.append("closed")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with driven() as (client, _):
            outputs = client.generate(text("hang-1"))
            next(outputs)
            main = threading.main_thread().ident
            assert main is not None

            def send() -> None:
                while client._turns._holder is None:
                    pass
                time.sleep(0.1)  # it is in zmq by now
                signal.pthread_kill(main, signal.SIGUSR1)

            thread = threading.Thread(target=send)
            thread.start()
            begun = time.monotonic()
            with pytest.raises(TransportError, match="closed"):
                outputs.next(timeout=LIMIT)
            assert time.monotonic() - begun < LIMIT / 2
            thread.join(LIMIT)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert came == ["refused", "closed"]


def test_progress_cannot_start_the_client_again():
    came: list[TransportError] = []

    def progress(state: Any) -> None:
        if not came:
            try:
                client.start()
            except TransportError as error:
                came.append(error)

    client = EngineClient(progress=progress, startup_timeout=LIMIT)
    with raw_engine(client.bind()), client:
        assert "started before" in str(came[0])
        assert tokens(client.generate(text("count-1"))) == [0, 1, 2]


@pytest.mark.parametrize("which", ["input_address", "handshake_address"])
def test_a_stray_of_an_engines_name_that_comes_and_goes_does_not_end_the_startup(which):
    client = EngineClient("tcp://127.0.0.1:0", input="tcp://127.0.0.1:0", output="tcp://127.0.0.1:0", startup_timeout=LIMIT)
    with zmq.Context() as context:
        client.bind()
        starting = threading.Thread(target=client.start, daemon=True)
        starting.start()
        with context.socket(zmq.DEALER) as stray:
            stray.linger = 1000
            stray.identity = b"\0\0"
            stray.connect(getattr(client, which))
            stray.send(b"junk")
            time.sleep(0.3)
        time.sleep(0.3)
        with raw_engine(client.handshake_address):
            starting.join(LIMIT)
            assert client.alive == (0,)
            assert tokens(client.generate(text("count-1"))) == [0, 1, 2]
            client.close()


def test_the_id_of_an_iterator_that_was_dropped_is_free_at_once():
    with driven() as (client, _):
        for _ in range(20):
            for output in client.generate(text("hang-1")):
                assert output.new_token_ids == [7]
                break
        assert client.counters["live"] <= 1


def test_an_ipc_address_where_somebody_listens_is_not_taken_away(tmp_path):
    address = f"ipc://{tmp_path}/handshake"
    first = EngineClient(address, startup_timeout=LIMIT)
    first.bind()
    second = EngineClient(address)
    with pytest.raises(TransportError, match="listens"):
        second.bind()
    with raw_engine(address), first:
        assert tokens(first.generate(text("count-1"))) == [0, 1, 2]
    (tmp_path / "handshake").unlink(missing_ok=True)
    (tmp_path / "handshake").touch()  # what a process left that was killed
    second.bind()
    second.close()

"""Engines that die, and what becomes of who waits. Engines are processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from support.clients import LIMIT, driven, seen, text, tokens
from support.requests import request as mm_request

from fastmm import EngineDead, TransportError

BOTH = pytest.mark.parametrize("handshake", [None, "tcp://127.0.0.1:0"], ids=["ipc", "tcp"])


def told_in(outputs: Any) -> tuple[EngineDead, float]:
    """The error that ends these outputs, and how long it took."""
    begun = time.monotonic()
    with pytest.raises(EngineDead) as caught:
        outputs.next(timeout=LIMIT)
    return caught.value, time.monotonic() - begun


@BOTH
def test_a_killed_engine_ends_all_that_wait_within_two_seconds(handshake):
    with driven(handshake=handshake, input=handshake, output=handshake) as (client, processes):
        streams = [client.generate(text(f"hang-{i}")) for i in range(5)]
        for stream in streams:
            next(stream)
        failed: list[BaseException] = []

        def call() -> None:
            try:
                client.call_utility("hang")
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        while not client._registry._calls:
            pass
        processes[0].kill()
        for stream in streams:
            error, seconds = told_in(stream)
            assert seconds < 2
            assert "engine 0" in str(error)
        thread.join(LIMIT)
        assert [type(error) for error in failed] == [EngineDead]
        for act in (lambda: client.generate(text("count-1")), lambda: client.call_utility("pid")):
            with pytest.raises(EngineDead):
                act()
        assert client.alive == ()
        begun = time.monotonic()
    assert time.monotonic() - begun < LIMIT / 2


def test_an_engine_that_is_killed_before_it_ever_answered_is_noticed_too():
    with driven(2, handshake="tcp://127.0.0.1:0", input="tcp://127.0.0.1:0", output="tcp://127.0.0.1:0") as (client, processes):
        stream = client.generate(text("mute-1", data_parallel_rank=1))
        processes[1].kill()
        assert told_in(stream)[1] < 2


@BOTH
@pytest.mark.parametrize("action", ["exit", "dead"])
def test_an_engine_that_ends_on_its_own_delivers_what_it_had_sent_before(handshake, action):
    with driven(handshake=handshake, input=handshake, output=handshake) as (client, _):
        stream = client.generate(text(f"{action}-1"))
        assert stream.next(timeout=LIMIT).new_token_ids == [7]
        error, _ = told_in(stream)
        if action == "dead":
            assert "ENGINE_CORE_DEAD" in str(error)


@BOTH
@pytest.mark.parametrize("how", ["kill", "dead"])
def test_one_dead_engine_of_two_ends_only_its_own_requests(handshake, how):
    with driven(2, handshake=handshake, input=handshake, output=handshake) as (client, processes):
        mine = client.generate(text("hang-1", data_parallel_rank=1))
        other = client.generate(text("hang-2", data_parallel_rank=0))
        next(mine), next(other)
        if how == "kill":
            processes[1].kill()
        else:
            lethal = client.generate(text("dead-1", data_parallel_rank=1))
        assert told_in(mine)[1] < 2
        assert client.alive == (0,)
        assert client.counters["live"] == 1 + (how == "dead" and not lethal._live.ended)
        for i in range(4):  # the next ones avoid it
            assert tokens(client.generate(text(f"count-{i}"))) == [0, 1, 2]
        with pytest.raises(EngineDead, match="engine 1"):
            client.generate(text("count-9", data_parallel_rank=1))
        assert client.call_utility("pid") == processes[0].pid
        processes[0].kill()
        told_in(other)
        with pytest.raises(EngineDead, match="all engines"):
            client.generate(text("count-9"))


def test_an_engine_that_owes_an_answer_and_is_silent_counts_as_dead():
    with driven(silence_timeout=0.3) as (client, processes):
        time.sleep(0.4)  # it owes nothing: it may be silent
        assert tokens(client.generate(text("count-1"))) == [0, 1, 2]
        os.kill(processes[0].pid, signal.SIGSTOP)
        try:
            error, seconds = told_in(client.generate(text("count-2")))
            assert "said nothing for 0.3 s" in str(error)
            assert 0.2 < seconds < LIMIT / 2
            with pytest.raises(EngineDead):
                client.generate(text("count-3"))
        finally:
            os.kill(processes[0].pid, signal.SIGCONT)


@BOTH
def test_what_a_hung_engine_never_read_is_let_go_of_and_others_have_the_room(handshake):
    options = {"silence_timeout": 1.0, "max_inflight_nbytes": 1 << 20}
    with driven(2, handshake=handshake, input=handshake, output=handshake, **options) as (client, processes):
        os.kill(processes[1].pid, signal.SIGSTOP)
        try:
            payload = np.ones(16 << 20, np.float32)
            told_in(client.generate(mm_request(payload, request_id="count-1", data_parallel_rank=1)))
            assert client.ledger.wait(LIMIT), client.ledger.counters
            assert len(list(client.generate(mm_request(payload, request_id="count-2"), timeout=LIMIT))) == 16
        finally:
            os.kill(processes[1].pid, signal.SIGCONT)


def test_who_waits_for_room_is_woken_when_the_engine_dies():
    with driven(max_inflight_nbytes=1000, silence_timeout=0.5) as (client, processes):
        os.kill(processes[0].pid, signal.SIGSTOP)
        try:
            first = client.generate(mm_request(np.ones(8 << 20, np.float32), request_id="count-1"))
            begun = time.monotonic()
            try:
                second = client.generate(mm_request(np.ones(8 << 20, np.float32), request_id="count-2"))
                told_in(second)
            except TransportError:
                pass
            assert time.monotonic() - begun < LIMIT / 2
            told_in(first)
        finally:
            os.kill(processes[0].pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "act",
    [
        lambda client: client.generate(mm_request(np.ones(8 << 20, np.float32), request_id="count-1")),
        lambda client: client.call_utility("echo", bytes(8 << 20)),
    ],
    ids=["request", "call"],
)
def test_an_error_that_is_kept_keeps_no_room(act):
    import zmq

    with driven(max_inflight_nbytes=1 << 20) as (client, _):

        def refuse(*_: Any) -> None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)

        from fastmm.transport import core

        send, core.send_frames = core.send_frames, refuse
        try:
            with pytest.raises(EngineDead) as kept:
                act(client)
        finally:
            core.send_frames = send
        assert client.ledger.counters["inflight"] == 0
        assert "its connection is gone" in str(kept.value)


def test_a_stray_connection_that_comes_and_goes_does_no_harm():
    import zmq

    with driven(handshake="tcp://127.0.0.1:0", input="tcp://127.0.0.1:0", output="tcp://127.0.0.1:0") as (client, _):
        stream = client.generate(text("hang-1"))
        next(stream)
        with zmq.Context() as context:
            for kind, address in ((zmq.DEALER, client.input_address), (zmq.PUSH, client.output_address)):
                with context.socket(kind) as stray:
                    stray.linger = 1000
                    stray.connect(address)
                    stray.send(b"hello")
        while not client.counters["broken"]:
            pass
        assert tokens(client.generate(text("count-1"))) == [0, 1, 2]
        assert client.counters["live"] == 1
        assert seen(client, "abort") == []


def test_the_process_ends_though_nobody_closed_the_client():
    code = """
import sys
from support.raw_engine import raw_engine
from fastmm import EngineCoreRequest
from fastmm.transport import EngineClient
client = EngineClient(startup_timeout=20)
with raw_engine(client.bind()):
    client.start()
    stream = client.generate(EngineCoreRequest("hang-1", [1]))
    assert next(stream).new_token_ids == [7]
    sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, env={**os.environ, "PYTHONPATH": os.path.dirname(__file__)})
    assert done.returncode == 3

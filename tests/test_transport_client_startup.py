"""How the client for threads starts, and what it makes of the engines that come."""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
import zmq
from support.clients import LIMIT, driven, seen, text, tokens
from support.raw_engine import READY, raw_engine
from support.requests import request as mm_request

from fastmm import (
    CompatError,
    EngineDead,
    SamplingParams,
    TransportError,
    TransportTimeout,
)
from fastmm.schema import FinishReason
from fastmm.transport import EngineClient


@pytest.mark.parametrize("handshake", [None, "tcp://127.0.0.1:0", "tcp://localhost:*"])
def test_an_engine_is_driven_on_ipc_and_tcp(handshake):
    with driven(handshake=handshake) as (client, _):
        outputs = list(client.generate(text("count-1")))
    assert [output.new_token_ids for output in outputs] == [[0], [1], [2]]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]


def test_ipc_sockets_lie_in_a_directory_that_only_its_user_may_enter_and_go_with_the_client():
    with driven() as (client, _):
        addresses = [client.handshake_address, client.input_address, client.output_address]
        assert all(address.startswith("ipc://") for address in addresses)
        directory = os.path.dirname(addresses[0].removeprefix("ipc://"))
        assert os.stat(directory).st_mode & 0o777 == 0o700
    assert not os.path.exists(directory)


def test_a_free_port_is_resolved_and_told_to_the_engines():
    with driven(handshake="tcp://127.0.0.1:0", input="tcp://127.0.0.1:0", output="tcp://127.0.0.1:*") as (client, _):
        assert not client.handshake_address.endswith((":0", ":*"))
        init = seen(client, "init")[0][0]
        assert init["addresses"]["inputs"] == [client.input_address]
        assert init["addresses"]["outputs"] == [client.output_address]
        assert client.input_address.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:0", "tcp://192.0.2.1:5570", "tcp://*:0", "tcp://example.com:1", "tcp://[::]:0"]
)
@pytest.mark.parametrize("name", ["handshake", "input", "output"])
def test_what_other_machines_can_reach_is_bound_only_when_asked_for_by_name(name, address):
    with pytest.raises(TransportError, match="allow_remote"):
        EngineClient(**{name: address})


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1", "udp://127.0.0.1:1", "tcp://:5", "tcp://127.0.0.1:99999", "ipc://", "x"]
)
def test_an_address_that_is_none_is_refused_when_the_client_is_made(address):
    with pytest.raises(TransportError):
        EngineClient(address)


def test_an_address_in_use_is_a_clear_error_and_leaves_nothing_open():
    with driven(handshake="tcp://127.0.0.1:0", input="tcp://127.0.0.1:0") as (client, _):
        other = EngineClient(client.input_address)
        with pytest.raises(TransportError, match="cannot bind"):
            other.bind()
        other.close()


def test_all_interfaces_need_a_name_to_tell_the_engines():
    with pytest.raises(TransportError, match="advertise"):
        EngineClient("tcp://127.0.0.1:0", input="tcp://0.0.0.0:0", allow_remote=True)
    with driven(handshake="tcp://0.0.0.0:0", input=None, allow_remote=True, advertise="127.0.0.1") as (client, _):
        assert client.handshake_address.startswith("tcp://127.0.0.1:")
        assert tokens(client.generate(text("count-1"))) == [0, 1, 2]


def test_engines_say_what_they_are():
    with driven(2) as (client, _):
        assert [engine.rank for engine in client.engines] == [0, 1]
        assert [engine.identity for engine in client.engines] == [b"\x00\x00", b"\x01\x00"]
        engine = client.engines[0]
        assert (engine.dtype, engine.vllm_version, engine.max_model_len, engine.num_gpu_blocks) == (
            "bfloat16",
            "0.33.0",
            4096,
            128,
        )
        assert engine.ready["mystery"] == [1]


@pytest.mark.parametrize("ready", [None, {}, {"dtype": None, "vllm_version": 7, "max_model_len": "many"}])
def test_missing_and_strange_keys_of_the_ready_response_do_no_harm(ready):
    with driven(ready=ready) as (client, _):
        assert client.engines[0].dtype is None
        assert tokens(client.generate(text("count-1"))) == [0, 1, 2]


def test_engines_that_do_not_come_are_named_when_the_time_is_over():
    client = EngineClient(engines=3, startup_timeout=1.0)
    address = client.bind()
    states = []
    client._progress = states.append
    begun = time.monotonic()
    with raw_engine(address, 1), pytest.raises(TransportTimeout, match=r"engine 0 has not said HELLO.*engine 2") as caught:
        client.start()
    assert time.monotonic() - begun < LIMIT
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(TransportError):
        client.generate(text("count-1"))


def test_progress_is_told_from_the_beginning_to_the_end():
    states: list[Any] = []
    with driven(2, progress=states.append):
        pass
    assert states[0] == {0: "waiting", 1: "waiting"}
    assert states[-1] == {0: "ready", 1: "ready"}
    assert all(before != after for before, after in itertools.pairwise(states))


def test_an_engine_that_dies_while_it_loads_ends_the_wait():
    client = EngineClient(startup_timeout=LIMIT)
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.identity = b"\x00\x00"
    socket.connect(client.bind())
    socket.send(b"\x83\xa6status\xa5HELLO\xa5local\xc2\xa8headless\xc3")
    said: list[Any] = []
    client._progress = lambda state: (said.append(state), state[0] == "connected" and context.destroy(linger=0))
    begun = time.monotonic()
    with pytest.raises(EngineDead, match="while it was loading"):
        client.start()
    assert time.monotonic() - begun < LIMIT / 2


def test_close_ends_a_wait_for_engines():
    client = EngineClient(startup_timeout=600.0)
    client._progress = lambda state: threading.Thread(target=client.close).start()
    with pytest.raises(TransportError, match="closed"):
        client.start()
    client.close()


@pytest.mark.parametrize(("where", "what"), [(os, "eventfd"), (threading.Thread, "start")])
def test_a_start_that_fails_at_its_end_leaves_nothing_open(where, what, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError(24, "no more")

    client = EngineClient(startup_timeout=LIMIT)
    address = client.bind()
    with raw_engine(address), monkeypatch.context() as patched:
        patched.setattr(where, what, fail)
        with pytest.raises(OSError, match="no more"):
            client.start()
    assert not os.path.exists(address.removeprefix("ipc://"))
    assert (client._context, client._wake_fd) == (None, -1)
    with pytest.raises(TransportError, match="closed"):
        client.generate(text("count-1"))
    client.close()


def test_an_engine_older_than_0_22_is_refused_and_a_newer_one_warned_of():
    with pytest.raises(CompatError, match=r"0\.21"):
        with driven(ready={**READY, "vllm_version": "0.21.0"}):
            pass
    with pytest.warns(RuntimeWarning, match=r"0\.77"):
        with driven(ready={**READY, "vllm_version": "0.77.0"}) as (client, _):
            assert tokens(client.generate(text("count-1"))) == [0, 1, 2]


@pytest.mark.parametrize(("version", "elements"), [("0.22.1", 20), ("0.28.0", 21), ("0.33.0", 22)])
def test_requests_are_written_in_the_layout_of_the_engines_version(version, elements):
    with driven(ready={**READY, "vllm_version": version}) as (client, _):
        list(client.generate(text("count-1")))
        assert seen(client, "add")[0][1] == elements


def test_payloads_are_cast_to_the_engines_dtype_unless_another_is_asked_for():
    for options, nbytes in (
        ({}, 20000),
        ({"dtype": None}, 40000),
        ({"dtype": "float32"}, 40000),
        ({"dtype": "float16"}, 20000),
    ):
        with driven(**options) as (client, _):
            request = mm_request(np.ones(10000, np.float32), request_id="count-1", sampling_params=SamplingParams(max_tokens=1))
            list(client.generate(request))
            assert seen(client, "add")[0][2] == nbytes


def test_what_strangers_send_after_the_startup_is_bounded():
    with driven() as (client, _), zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(client._bound().input_address)
        sent = 0
        while sent < 20000 and stranger.poll(500, zmq.POLLOUT):
            stranger.send(bytes(4096))
            sent += 1
        assert sent < 20000
        assert tokens(client.generate(text("count-1"))) == [0, 1, 2]

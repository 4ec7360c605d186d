"""The engine's side: typed events in, outputs out, and a broken message costs that message only."""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.bare_client import PATIENCE_MS, BareClient, client_and_engine
from support.forks import in_child

import fastmm
from fastmm.errors import DecodeError, EncodeError, Overloaded, PeerClosed, TransportError, TransportTimeout
from fastmm.schema import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, LogprobsLists
from fastmm.transport import Abort, Add, EngineServer, StartWave, UtilityCall
from fastmm.transport.control import abort_message, start_dp_wave_message, utility_message

PATIENCE_S = PATIENCE_MS / 1000
ADD, ABORT, WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"


def request_frames(request_id: str, client_index: int = 0, image: bool = False) -> list[Any]:
    features = None
    if image:
        features = fastmm.build_features(tensors={"pixel_values": np.ones((1, 1024), np.float32)}, batched={"pixel_values"},
                                         placeholders=[(0, 1)], hashes=["h"], prompt_token_ids=[1])  # fmt: skip
    return fastmm.encode_request(EngineCoreRequest(request_id, [1, 2], features, client_index=client_index))


def test_messages_come_as_typed_events_in_their_order(tmp_path: Path) -> None:
    with client_and_engine(tmp_path, decoder=fastmm.Decoder(tensors="numpy")) as (client, engine):
        client.send([ADD, *request_frames("a", image=True)])
        client.send([ABORT, abort_message(["a", "b"])])
        client.send([UTILITY, *utility_message(0, 7, "is_sleeping", [1, "x"])])
        client.send([WAVE, start_dp_wave_message(3, 1)])
        added = engine.get(PATIENCE_S)
        assert isinstance(added, Add)
        assert (added.request.request_id, added.request.prompt_token_ids, added.client_index) == ("a", [1, 2], 0)
        assert engine.get(PATIENCE_S) == Abort(["a", "b"], 0)
        assert engine.get(PATIENCE_S) == UtilityCall(0, 7, "is_sleeping", [1, "x"])
        assert engine.get(PATIENCE_S) == StartWave(3, 1)
        counters = engine.counters
        assert [counters[name] for name in ("adds", "aborts", "utilities", "waves", "failed", "dropped")] == [1, 1, 1, 1, 0, 0]


def test_what_the_engine_says_of_itself_reaches_the_client(tmp_path: Path) -> None:
    client = BareClient(tmp_path)
    heard: list[Any] = []
    greeting = threading.Thread(target=lambda: heard.append(client.greet(2)))
    greeting.start()
    with (
        EngineServer(client.address, rank=1, ready={"dtype": "float16"}),
        EngineServer(client.address, rank=0, ready={"dtype": "bfloat16"}, local=True, headless=False) as zero,
    ):
        greeting.join(PATIENCE_S)
        first, second = heard[0].engines
        assert (first.rank, first.dtype, first.local, first.headless) == (0, "bfloat16", True, False)
        assert (second.rank, second.dtype, second.local, second.headless) == (1, "float16", False, True)
        assert zero.addresses == client.addresses
    client.close()


def test_a_client_that_is_started_anew_while_an_engine_waits_for_its_answer_is_told_anew(tmp_path: Path) -> None:
    client = BareClient(tmp_path)
    router, hello = client.context.socket(zmq.ROUTER), []

    def start_anew() -> None:
        assert client.handshake.poll(PATIENCE_MS)
        hello.append(client.handshake.recv_multipart())
        client.handshake.close()
        client.handshake = router
        router.linger = 0
        router.bind(client.address)
        client.greet()

    starting = threading.Thread(target=start_anew)
    starting.start()
    with EngineServer(client.address) as engine:
        starting.join(PATIENCE_S)
        assert len(hello) == 1
        assert engine.addresses == client.addresses
        assert engine.parallel_config == {}
    client.close()


def test_outputs_and_answers_reach_the_client_they_are_for(tmp_path: Path) -> None:
    with client_and_engine(tmp_path, 2, rank=0) as (client, engine):
        client.send([ADD, *request_frames("for-0")], 0)
        client.send([ADD, *request_frames("for-1", client_index=1)], 1)
        for _ in range(2):
            event = engine.get(PATIENCE_S)
            assert isinstance(event, Add)
            finish = FinishReason.STOP if event.client_index else None
            engine.send_output(EngineCoreOutput(event.request.request_id, [9], finish_reason=finish), event.client_index)
        one, two = client.hear(0), client.hear(1)
        assert ([output.request_id for output in one.outputs], one.finished_requests, one.engine_index) == (["for-0"], None, 0)
        assert ([output.request_id for output in two.outputs], two.finished_requests) == (["for-1"], {"for-1"})
        call = UtilityCall(1, 5, "whatever", [])
        engine.send_utility_result(call, {"a": [1]})
        engine.send_utility_result(call, failure="no such method")
        answers = [client.hear(1).utility_output for _ in range(2)]
        assert answers[0] is not None
        assert answers[1] is not None
        assert answers[0].result is not None
        assert (answers[0].call_id, answers[0].failure_message, answers[0].result.result) == (5, None, {"a": [1]})
        assert (answers[1].failure_message, answers[1].result) == ("no such method", None)
        for index in (2, -1):
            with pytest.raises(TransportError, match="client below 2"):
                engine.send_outputs(EngineCoreOutputs(), index)


def broken_messages() -> list[tuple[str, list[Any], str]]:
    """What, the message, and what becomes of it: ``failed`` with a readable id, ``answered`` for a call, else ``dropped``."""
    main, aux = (bytes(memoryview(frame)) for frame in request_frames("an-id", image=True))
    text = bytes(memoryview(request_frames("an-id")[0]))
    unpacked = msgpack.unpackb(text)
    return [
        ("a main frame cut by one byte", [ADD, text[:-1]], "failed"),
        ("one trailing byte", [ADD, text + b"\0"], "failed"),
        ("a missing aux frame", [ADD, main], "failed"),
        ("an aux frame too short", [ADD, main, aux[:-4]], "failed"),
        ("an aux frame nobody points to", [ADD, main, aux, b"more"], "failed"),
        ("token ids that are none", [ADD, msgpack.packb([*unpacked[:1], ["x"], *unpacked[2:]])], "failed"),
        ("too few elements", [ADD, msgpack.packb(["an-id", [1]])], "failed"),
        ("a client that is not there", [ADD, *request_frames("an-id", client_index=9)], "failed"),
        ("a client below zero", [ADD, *request_frames("an-id", client_index=-1)], "failed"),
        (
            "a pickle",
            [ADD, msgpack.packb(["an-id", [1], msgpack.ExtType(1, b"cos\nsystem\n(S'x'\ntR."), *unpacked[3:]])],
            "failed",
        ),
        ("deep nesting", [ADD, b"\xdc\x00\x16\xa5an-id" + b"\x91" * 100_000], "failed"),
        ("an id cut short", [ADD, text[:6]], "dropped"),
        ("an id that is no str", [ADD, msgpack.packb([7, *unpacked[1:]])], "dropped"),
        ("an id that is no UTF-8", [ADD, text.replace(b"an-id", b"an\xff-d")], "dropped"),
        ("no main frame", [ADD], "dropped"),
        ("an empty main frame", [ADD, b""], "dropped"),
        ("a map", [ADD, b"\x80"], "dropped"),
        ("an unknown type", [b"\x09", text], "dropped"),
        ("a type of two bytes", [b"\x00\x00", text], "dropped"),
        ("an internal type", [b"\x04", b""], "dropped"),
        ("an empty message", [b""], "dropped"),
        ("an abort of numbers", [ABORT, b"\x91\x01"], "dropped"),
        ("an abort without ids", [ABORT], "dropped"),
        ("a utility call of three", [UTILITY, b"\x93\x00\x05\xa1x"], "answered"),
        ("a utility call of nobody", [UTILITY, *utility_message(4, 5, "x")], "answered"),
        ("a utility call cut short", [UTILITY, *[frame[:-1] for frame in utility_message(1, 5, "x")]], "answered"),
        ("a utility call of no id", [UTILITY, b"\x94\x00\xa1x\xa1x\x90"], "dropped"),
        ("a utility call of nothing", [UTILITY, b"\x91\x00"], "dropped"),
        ("a utility call of no frame", [UTILITY], "dropped"),
        ("a wave that is none", [WAVE, b"\xc0"], "dropped"),
    ]


@pytest.mark.parametrize(
    ("what", "message", "becomes"), broken_messages(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_broken_message_costs_that_message_only(what: str, message: list[Any], becomes: str, tmp_path: Path) -> None:
    with client_and_engine(tmp_path, 2) as (client, engine):
        client.send(message, 1)
        client.send([ADD, *request_frames("the-next-one", client_index=1)], 1)
        event = engine.get(PATIENCE_S)
        assert isinstance(event, Add)
        assert event.request.request_id == "the-next-one"
        assert {name: engine.counters[name] for name in ("failed", "dropped")} == {
            "failed": int(becomes != "dropped"),
            "dropped": int(becomes == "dropped"),
        }
        assert engine.last_fault is not None
        if becomes == "failed":
            outputs = client.hear(1)  # its sender's, whatever the message says
            (output,) = outputs.outputs
            assert (output.request_id, output.finish_reason, output.new_token_ids) == ("an-id", FinishReason.ERROR, [])
            assert output.error is not None
            assert (output.error.code, output.error.message, output.error.retryable) == (
                "validation_error",
                engine.last_fault,
                False,
            )
            assert outputs.finished_requests == {"an-id"}
        elif becomes == "answered":
            answer = client.hear(1).utility_output
            assert answer is not None
            assert (answer.call_id, answer.failure_message, answer.result) == (5, engine.last_fault, None)
        assert not client.outputs[0].poll(0)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_bytes_come_the_server_goes_on(data: st.DataObject, tmp_path: Path) -> None:
    good = [bytes(memoryview(frame)) for frame in request_frames("r", image=True)]
    with client_and_engine(tmp_path) as (client, engine):
        for _ in range(20):
            mutated = bytearray(good[0])
            for _ in range(data.draw(st.integers(1, 4))):
                mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
            kind = data.draw(st.sampled_from([ADD, ADD, ADD, ABORT, UTILITY, WAVE, b"", b"\xff"]))
            client.send([kind, bytes(mutated), *good[1 : data.draw(st.integers(1, 2))]])
        client.send([ADD, *request_frames("the last")])
        ids = []
        while "the last" not in ids:
            event = engine.get(PATIENCE_S)
            if isinstance(event, Add):
                ids.append(event.request.request_id)


def test_a_failed_answer_that_finds_no_room_is_dropped_and_holds_nobody_up(tmp_path: Path) -> None:
    with client_and_engine(tmp_path, max_inflight_nbytes=1) as (client, engine):
        held = engine.ledger.reserve(1)
        client.send([ADD, request_frames("x")[0][:-1]])
        client.send([ABORT, abort_message([])])
        assert isinstance(engine.get(PATIENCE_S), Abort)
        assert engine.counters["failed"] == 1
        assert "could not be told" in (engine.last_fault or "")
        held.cancel()


def test_large_outputs_are_not_copied_and_are_free_when_they_have_left(tmp_path: Path) -> None:
    with client_and_engine(tmp_path) as (client, engine):
        ids = np.arange(1 << 18, dtype=np.int64).reshape(1, -1)
        memory = weakref.ref(ids)
        logprobs = LogprobsLists(ids, np.zeros((1, 1), np.float32), np.zeros(1, np.int64))
        engine.send_output(EngineCoreOutput("r", [1], new_logprobs=logprobs))
        ids = np.array(ids[0, :3])
        del logprobs
        (output,) = client.hear().outputs
        assert output.new_logprobs is not None
        assert np.array_equal(np.asarray(output.new_logprobs.logprob_token_ids)[0, :3], ids)
        assert engine.ledger.wait(PATIENCE_S)
        assert memory() is None


def test_outputs_are_bounded_and_who_waits_for_a_client_that_has_gone_is_told(tmp_path: Path) -> None:
    with client_and_engine(tmp_path, max_inflight_nbytes=1 << 20, patience=0.2, linger=0.0) as (client, engine):
        big = LogprobsLists(np.zeros((64, 1 << 20), np.float32), np.zeros((1, 1), np.float32), np.zeros(1, np.int64))
        client.close()
        outputs = EngineCoreOutputs(outputs=[EngineCoreOutput("r", [1], new_logprobs=big)])
        engine.send_outputs(outputs)  # alone it may be larger than the bound
        with pytest.raises(Overloaded):
            engine.send_outputs(outputs, wait=False)
        with pytest.raises(TransportTimeout):
            engine.send_outputs(outputs, timeout=0.01)
        with pytest.raises(PeerClosed, match="client 0 of engine 0 has gone"):
            engine.send_outputs(outputs)


def test_iteration_ends_when_all_clients_have_gone_and_not_before(tmp_path: Path) -> None:
    with client_and_engine(tmp_path, 2, patience=0.3) as (client, engine):
        client.inputs[0].close()
        with pytest.raises(TransportTimeout):
            engine.get(0.6)  # the other one is there
        client.send([ABORT, abort_message(["x"])], 1)
        client.inputs[1].close(linger=1000)
        assert list(engine) == [Abort(["x"], 1)]
        with pytest.raises(PeerClosed, match="all clients"):
            engine.get(PATIENCE_S)
        assert engine.clients_gone == (0, 1)


def test_a_long_poll_sees_that_all_clients_have_gone(tmp_path: Path) -> None:
    with client_and_engine(tmp_path, patience=0.3) as (client, engine):
        client.inputs[0].close()
        with pytest.raises(PeerClosed, match="all clients"):
            engine.poll(PATIENCE_S)


def test_no_thread_waits_on_a_monitor_that_another_may_read(tmp_path: Path) -> None:
    with client_and_engine(tmp_path, 2) as (_, engine):
        assert [socket for socket, _ in engine._poller.sockets] == engine._inputs


def test_a_client_that_comes_back_in_time_is_served_as_before(tmp_path: Path) -> None:
    with client_and_engine(tmp_path, patience=None) as (client, engine):
        endpoint = client.addresses.inputs[0]
        client.inputs[0].close()
        deadline = time.monotonic() + PATIENCE_S
        while not engine.clients_gone:
            assert not engine.poll(0.01)
            assert time.monotonic() < deadline
        router = client.context.socket(zmq.ROUTER)
        router.router_mandatory = True
        router.bind(endpoint)
        while True:
            try:
                router.send_multipart([b"\0\0", ABORT, abort_message(["again"])])
                break
            except zmq.ZMQError:
                assert time.monotonic() < deadline
                assert not engine.poll(0.01)
        assert engine.get(PATIENCE_S) == Abort(["again"], 0)
        assert engine.poll(0) is False
        assert engine.clients_gone == ()


def test_a_block_that_fails_tells_the_clients_that_the_engine_is_dead(tmp_path: Path) -> None:
    client = BareClient(tmp_path, 2)
    greeting = threading.Thread(target=client.greet)
    greeting.start()

    def die() -> None:
        with EngineServer(client.address):
            greeting.join(PATIENCE_S)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        die()
    for index in range(2):
        (frame,) = client.hear_raw(index)
        assert frame.bytes == b"ENGINE_CORE_DEAD"
    client.close()


def test_stop_ends_an_iteration_from_another_thread(tmp_path: Path) -> None:
    with client_and_engine(tmp_path) as (client, engine):
        client.send([ABORT, abort_message(["x"])])
        threading.Timer(0.05, engine.stop).start()
        assert list(engine) == [Abort(["x"], 0)]


def test_one_client_that_floods_does_not_starve_another(tmp_path: Path) -> None:
    with client_and_engine(tmp_path, 2) as (client, engine):
        for _ in range(200):
            client.send([ABORT, abort_message(["flood"])], 0)
        client.send([ABORT, abort_message(["other"])], 1)
        time.sleep(0.2)  # until all lie there; were they late, the test would be weaker, not wrong
        seen = [engine.get(PATIENCE_S) for _ in range(10)]
        assert Abort(["other"], 1) in seen
        assert engine.poll(0)
        assert engine.poll(0)  # looking takes nothing away
        assert sum(1 for _ in range(191) if engine.get(PATIENCE_S)) == 191


def test_outputs_may_be_sent_from_several_threads(tmp_path: Path) -> None:
    with client_and_engine(tmp_path) as (client, engine):

        def send(name: str) -> None:
            for index in range(100):
                engine.send_output(EngineCoreOutput(f"{name}-{index}", [index]))

        threads = [threading.Thread(target=send, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        heard = [client.hear().outputs[0].request_id for _ in range(400)]
        for thread in threads:
            thread.join(PATIENCE_S)
        for name in "abcd":
            assert [request_id for request_id in heard if request_id[0] == name] == [f"{name}-{index}" for index in range(100)]


def test_what_cannot_be_sent_or_connected_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(TransportTimeout, match="no client answered"):
        EngineServer(f"ipc://{tmp_path / 'nobody'}", linger=0).connect(0.1)
    with pytest.raises(TransportError, match="cannot connect to nonsense"):
        EngineServer("nonsense").connect()
    with pytest.raises(TransportError, match="is connected"):
        EngineServer("ipc://x").get(0)
    with client_and_engine(tmp_path) as (client, engine):
        with pytest.raises(EncodeError):
            engine.send_output(EngineCoreOutput("x", [1 << 80]))
        with pytest.raises(TransportTimeout):
            engine.get(0.01)
        with pytest.raises(TransportError, match="not connected yet"):
            engine.connect()
        assert engine.counters["sent"] == engine.counters["inflight"] == 0
        engine.close()
        engine.close()
        with pytest.raises(TransportError, match="is connected"):
            engine.send_output(EngineCoreOutput("x", [1]))
        assert list(engine) == []
    client = BareClient(tmp_path)

    def junk() -> None:
        identity, _ = client.handshake.recv_multipart()
        client.handshake.send_multipart([identity, b"junk"])

    answering = threading.Thread(target=junk)
    answering.start()
    with pytest.raises(TransportError, match="msgpack map"):
        EngineServer(client.address, linger=0).connect(PATIENCE_S)
    answering.join()
    client.close()
    assert issubclass(DecodeError, ValueError)


def test_a_forked_child_is_told_that_the_engine_is_not_its_own(tmp_path: Path) -> None:
    def leave() -> None:
        with engine:
            raise ValueError("in the child only")

    with client_and_engine(tmp_path) as (client, engine):
        with engine._send_lock:  # as another thread may at that moment
            for act in (lambda: engine.get(1), engine.poll, lambda: engine.fail_request("a", "b"), engine.connect):
                told = in_child(act)
                assert told.startswith("TransportError")
                assert "process" in told
            assert in_child(engine.close) == in_child(engine.send_dead) == "None"
            assert in_child(leave).startswith("ValueError")
        client.send([ABORT, abort_message(["a"])])
        assert engine.get(PATIENCE_S) == Abort(["a"], 0)
        engine.fail_request("a", "b")
        assert client.hear().outputs[0].request_id == "a"

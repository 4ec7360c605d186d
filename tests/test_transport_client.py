"""The client for threads, against an engine in a process of its own."""

from __future__ import annotations

import gc
import os
import threading
import time

import numpy as np
import pytest
from support.clients import LIMIT, driven, seen, text, tokens
from support.forks import in_child
from support.raw_engine import READY
from support.requests import request as mm_request

from fastmm import (
    EngineCoreRequest,
    Overloaded,
    PoolingParams,
    SamplingParams,
    SchemaError,
    TransportError,
    TransportTimeout,
    UtilityFailed,
)
from fastmm.errors import SchemaValueError
from fastmm.schema import FinishReason
from fastmm.transport import EngineClient
from fastmm.transport import client as client_module

# --- requests ---------------------------------------------------------------------------------------------------------


def test_many_threads_get_their_own_answers():
    results: dict[str, list[int]] = {}

    def ask(client: EngineClient, name: int) -> None:
        for i in range(20):
            request_id = f"count-{name}-{i}"
            results[request_id] = tokens(client.generate(text(request_id, max_tokens=1 + (name + i) % 5)))

    with driven() as (client, _):
        threads = [threading.Thread(target=ask, args=(client, name)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert client.counters["live"] == 0
    assert len(results) == 160
    for request_id, got in results.items():
        name, i = map(int, request_id.split("-")[1:])
        assert got == list(range(1 + (name + i) % 5))


def test_a_live_id_is_refused_and_a_finished_one_is_free():
    with driven() as (client, _):
        outputs = client.generate(text("hang-1"))
        with pytest.raises(SchemaValueError, match="live"):
            client.generate(text("hang-1"))
        assert next(outputs).new_token_ids == [7]
        outputs.close()
        assert tokens(client.generate(text("count-1"))) == [0, 1, 2]
        assert tokens(client.generate(text("count-1"))) == [0, 1, 2]


@pytest.mark.parametrize(
    "bad", [object(), EngineCoreRequest(3, [1]), text("count-1", priority=2**70)], ids=["none", "id", "value"]
)  # type: ignore[arg-type]
def test_a_request_that_cannot_be_written_leaves_no_trace(bad):
    with driven() as (client, _):
        with pytest.raises((SchemaError, ValueError)):
            client.generate(bad)
        assert client.counters["live"] == 0
        assert client.outstanding() == {0: 0}
        assert client.ledger.counters["inflight"] == 0
        assert tokens(client.generate(text("count-1"))) == [0, 1, 2]
        assert [entry[0] for entry in seen(client, "add")] == ["count-1"]


@pytest.mark.parametrize("leave", ["break", "close", "with", "drop"])
def test_leaving_early_aborts_on_the_engine(leave):
    with driven() as (client, _):
        if leave == "break":
            for _output in client.generate(text("hang-1")):
                break
        else:
            outputs = client.generate(text("hang-1"))
            next(outputs)
            if leave == "close":
                outputs.close()
            elif leave == "with":
                with outputs:
                    pass
            else:
                del outputs
        deadline = time.monotonic() + LIMIT
        while not seen(client, "abort") and time.monotonic() < deadline:
            pass
        assert seen(client, "abort") == [[["hang-1"]]]
        assert client.counters["live"] == 0


def test_a_finished_request_is_not_aborted():
    with driven() as (client, _):
        outputs = client.generate(text("count-1"))
        list(outputs)
        outputs.close()
        del outputs
        gc.collect()
        list(client.generate(text("count-2")))
        assert seen(client, "abort") == []


def test_abort_ends_the_iteration_with_an_output_that_says_so():
    with driven() as (client, _):
        outputs = client.generate(text("hang-1"))
        next(outputs)
        client.abort(["hang-1", "nobody"])
        assert [output.finish_reason for output in outputs] == [FinishReason.ABORT]
        client.abort("hang-1")
        assert seen(client, "abort") == [[["hang-1"]]]


def test_what_an_engine_ends_on_its_own_ends_here():
    with driven() as (client, _):
        assert [output.finish_reason for output in client.generate(text("gone-1"))] == [None, FinishReason.ABORT]
        assert client.counters["live"] == 0


def test_a_request_that_fails_in_the_engine_says_why():
    with driven() as (client, _):
        (output,) = client.generate(text("error-1"))
        assert output.finish_reason == FinishReason.ERROR
        assert (output.error.code, output.error.message) == ("c", "m")


def test_messages_that_cannot_be_read_cost_themselves_only(caplog):
    with driven() as (client, _):
        for i in range(3):
            assert tokens(client.generate(text(f"junk-{i}"))) == [0, 1, 2]
        assert client.counters["broken"] == 9
    assert sum("cannot be read" in record.message for record in caplog.records) == 1


def test_outputs_that_nobody_asked_for_are_passed_over():
    with driven() as (client, _):
        assert tokens(client.generate(text("other-1"))) == [0, 1, 2]
        assert client.counters == {"live": 0, "unknown": 2, "broken": 0}


def test_next_with_a_timeout_leaves_the_request_alive():
    with driven() as (client, _):
        outputs = client.generate(text("hang-1"))
        assert outputs.next(timeout=LIMIT).new_token_ids == [7]
        with pytest.raises(TransportTimeout):
            outputs.next(timeout=0.01)
        assert client.counters["live"] == 1


def test_who_polls_with_no_time_at_all_receives():
    with driven() as (client, _):
        client._attend_if_free = lambda: None  # nobody receives for him
        outputs = client.generate(text("hang-1"))
        deadline = time.monotonic() + LIMIT
        while True:
            try:
                assert outputs.next(timeout=0).new_token_ids == [7]
                break
            except TransportTimeout:
                assert time.monotonic() < deadline


def test_a_time_that_is_over_is_over_also_while_messages_for_others_come(monkeypatch):
    with driven() as (client, _):
        client._attend_if_free = lambda: None
        outputs = client.generate(text("mute-1"))
        with monkeypatch.context() as patched:
            patched.setattr(client_module, "receive_frames", lambda *_: [b""])  # without end
            for timeout in (0, 0.05):
                with pytest.raises(TransportTimeout):
                    outputs.next(timeout=timeout)


def test_the_requests_memory_is_held_until_it_is_sent_and_no_longer():
    with driven() as (client, _):
        payload = np.ones(1 << 20, np.float32)
        before = payload.ctypes.data
        outputs = client.generate(mm_request(payload, request_id="count-1", sampling_params=SamplingParams(max_tokens=1)))
        assert before
        list(outputs)
        assert client.ledger.wait(LIMIT)
        assert client.ledger.counters["inflight_nbytes"] == 0
        assert client.ledger.counters["peak_nbytes"] >= 1 << 21


def test_late_outputs_of_an_aborted_request_never_reach_a_new_one_of_its_id():
    with driven() as (client, processes):
        for _ in range(3):
            outputs = client.generate(text("count-1", max_tokens=2000))
            assert next(outputs).new_token_ids == [0]
            outputs.close()
        assert tokens(client.generate(text("count-1"))) == [0, 1, 2]
        request = text("count-1")
        assert {output.request_id for output in client.generate(request)} == {"count-1"}
        assert request.request_id == "count-1"
        assert client.counters["live"] == 0
        held = client.generate(text("hang-1"))
        held.close()
        held = client.generate(text("hang-1"))
        with pytest.raises(SchemaValueError, match="live"):
            client.generate(text("hang-1"))
        client.abort("hang-1")
        assert [output.request_id for output in held][-1:] == ["hang-1"]
        added, aborted = [entry[0] for entry in seen(client, "add")], [entry[0] for entry in seen(client, "abort")]
        assert len(set(added)) > 3
        assert aborted[-2:] == [[added[-2]], [added[-1]]]
        assert processes[0].poll() is None


def test_a_prompt_that_the_model_has_no_room_for_never_reaches_the_engine():
    with driven(ready={**READY, "max_model_len": 8}) as (client, _):
        for length in (8, 9, 100):
            with pytest.raises(SchemaValueError, match=rf"{length}"):
                client.generate(text("count-1", ids=[1] * length))
        pooling = EngineCoreRequest("count-2", [1] * 8, pooling_params=PoolingParams())
        assert len(list(client.generate(pooling))) == 16
        assert tokens(client.generate(text("count-1", ids=[1] * 7))) == [0, 1, 2]
        assert [entry[0] for entry in seen(client, "add")] == ["count-2", "count-1"]


# --- utility calls ----------------------------------------------------------------------------------------------------


def test_utility_calls_return_what_the_engine_returns_or_raise_what_it_says():
    with driven() as (client, processes):
        assert client.call_utility("echo", 1, "a", [2.5, None]) == [1, "a", [2.5, None]]
        assert client.call_utility("pid", timeout=LIMIT) == processes[0].pid
        with pytest.raises(UtilityFailed, match="Call to fail failed: as asked"):
            client.call_utility("fail")
        with pytest.raises(TransportTimeout, match="hang"):
            client.call_utility("hang", timeout=0.05)
        with pytest.raises((SchemaError, ValueError)):
            client.call_utility("echo", object())
        assert client._registry._calls == {}


def test_large_arguments_of_a_utility_call_are_in_the_ledger():
    with driven() as (client, _):
        assert client.call_utility("pid", np.ones(1 << 20, np.float32), timeout=LIMIT)
        assert client.ledger.counters["peak_nbytes"] > 1 << 22
        assert client.ledger.wait(LIMIT)


def test_two_threads_cannot_iterate_over_one_request():
    with driven() as (client, _):
        outputs = client.generate(text("mute-1"))

        def wait() -> None:
            with pytest.raises(TransportError):
                next(outputs)

        thread = threading.Thread(target=wait)
        thread.start()
        while not outputs._asked:
            pass
        with pytest.raises(RuntimeError):
            next(outputs)
        client.close()
        thread.join(LIMIT)


def test_a_utility_call_reaches_all_engines_or_the_one_that_is_named():
    with driven(2) as (client, processes):
        assert client.call_utility_all("pid") == {0: processes[0].pid, 1: processes[1].pid}
        assert client.call_utility("pid", rank=1) == processes[1].pid
        with pytest.raises(SchemaValueError):
            client.call_utility("pid", rank=2)


# --- several engines --------------------------------------------------------------------------------------------------


def test_requests_go_where_the_least_work_is_outstanding():
    with driven(2) as (client, _):
        held = [client.generate(text(f"mute-{i}")) for i in range(10)]
        assert client.outstanding() == {0: 5, 1: 5}
        long = [client.generate(text("mute-long", ids=[1] * 4000))]
        more = [client.generate(text(f"mute-more-{i}")) for i in range(4)]
        assert sorted(client.outstanding().values()) == [6, 9]  # the four went where the long prompt did not
        del held, long, more


def test_a_rank_is_obeyed():
    with driven(2) as (client, _):
        held = [client.generate(text(f"mute-{i}", data_parallel_rank=1)) for i in range(3)]
        assert client.outstanding() == {0: 0, 1: 3}
        with pytest.raises(SchemaValueError, match="rank"):
            client.generate(text("mute-9", data_parallel_rank=2))
        del held


def test_each_answer_goes_to_its_asker_with_two_engines():
    with driven(2) as (client, _):
        outputs = [client.generate(text(f"count-{i}", max_tokens=1 + i % 7)) for i in range(50)]
        assert [tokens(output) for output in outputs] == [list(range(1 + i % 7)) for i in range(50)]
        assert sum(len(seen(client, "add", rank)) for rank in (0, 1)) == 50


def test_idle_engines_of_a_group_are_told_when_a_wave_begins():
    with driven(2, ready={**READY, "data_parallel_size": 2}) as (client, _):
        list(client.generate(text("count-1", data_parallel_rank=0)))
        list(client.generate(text("count-2", data_parallel_rank=0)))
        assert seen(client, "wave", 1) == [[[0, 0]]]  # once, and not to the one that has the request
        assert seen(client, "wave", 0) == []
        client.call_utility("wave", 0, rank=0)
        list(client.generate(text("count-3", data_parallel_rank=1)))
        assert seen(client, "wave", 0) == [[[1, 1]]]
        assert seen(client, "add", 1)[-1][-1] == 1  # the request knows the wave
        client.call_utility("wave", 0, rank=1)  # an old one
        client.call_utility("start", 5, rank=1)
        assert seen(client, "wave", 0)[1:] == [[[5, 1]]]
        client.close()


def test_a_wave_that_ends_over_a_request_that_came_late_begins_again():
    with driven(2, waves=True) as (client, _):
        held = client.generate(text("mute-1", data_parallel_rank=0))
        client.call_utility("wave", 0, rank=0)
        assert seen(client, "wave", 1) == [[[0, 0]], [[1, None]]]
        del held


def test_engines_that_are_no_group_hear_of_no_waves():
    with driven(2) as (client, _):
        list(client.generate(text("count-1", data_parallel_rank=0)))
        assert seen(client, "wave", 1) == []


def test_answers_come_here_whatever_client_a_request_names():
    with driven() as (client, _):
        list(client.generate(text("count-1", client_index=7)))
        assert seen(client, "add")[0][3] == 0


# --- room -------------------------------------------------------------------------------------------------------------


def test_overloaded_is_raised_by_who_will_not_wait_and_leaves_no_trace():
    with driven(max_inflight_nbytes=1000) as (client, processes):
        os.kill(processes[0].pid, 19)  # SIGSTOP: it reads nothing more
        try:
            held = [client.generate(mm_request(np.ones(8 << 20, np.float32), request_id="count-1"))]
            with pytest.raises(Overloaded):
                client.generate(mm_request(np.ones(1 << 20, np.float32), request_id="count-2"), wait=False)
            with pytest.raises(TransportTimeout):
                client.generate(mm_request(np.ones(1 << 20, np.float32), request_id="count-3"), timeout=0.05)
            assert client.counters["live"] == 1
            held.append(client.generate(text("count-4")))  # what ZMQ copies needs no room
        finally:
            os.kill(processes[0].pid, 18)  # SIGCONT
        held.append(client.generate(mm_request(np.ones(1 << 20, np.float32), request_id="count-5")))
        for outputs in held:
            list(outputs)
        assert client.ledger.wait(LIMIT)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_closing_aborts_what_is_live_ends_who_waits_and_can_be_done_twice():
    with driven() as (client, _):
        outputs = client.generate(text("hang-1"))
        next(outputs)
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                next(outputs)
            except BaseException as error:
                failed.append(error)

        def call() -> None:
            try:
                client.call_utility("hang")
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=wait), threading.Thread(target=call)]
        for thread in threads:
            thread.start()
        while not client._registry._calls:
            pass
        client.close()
        for thread in threads:
            thread.join(LIMIT)
        client.close()
        assert [type(error) for error in failed] == [TransportError] * 2
        for act in (lambda: client.generate(text("count-1")), lambda: client.call_utility("pid"), lambda: client.abort("x")):
            with pytest.raises(TransportError, match="closed"):
                act()
        with pytest.raises(TransportError):
            client.start()


def test_a_client_that_was_never_started_says_so_and_closes():
    client = EngineClient()
    with pytest.raises(TransportError, match="not started"):
        client.generate(text("count-1"))
    client.close()


def test_a_client_that_is_dropped_unclosed_leaves_nothing_behind():
    client = EngineClient()
    directory = os.path.dirname(client.bind().removeprefix("ipc://"))
    client.itself = client  # type: ignore[attr-defined]
    del client
    gc.collect()
    assert not os.path.exists(directory)


def test_a_forked_child_is_told_that_the_client_is_not_its_own():
    with driven() as (client, _):
        outputs = client.generate(text("hang-1"))
        acts = {
            "generate": lambda: client.generate(text("count-1")),
            "bind": client.bind,
            "start": client.start,
            "abort": lambda: client.abort("hang-1"),
            "call": lambda: client.call_utility("pid"),
            "next": lambda: next(outputs),
            "next(timeout)": lambda: outputs.next(timeout=0.1),
        }
        for name, act in acts.items():
            with client._lock:  # as another thread may at that moment
                told = in_child(act)
            assert "TransportError: the client belongs to the process" in told, name
        for act in (client.close, outputs.close):
            with client._lock:
                assert in_child(act) == "None"
        assert next(outputs).new_token_ids == [7]
        assert tokens(client.generate(text("count-1"))) == [0, 1, 2]


def test_a_client_that_a_forked_child_drops_is_the_parents_still():
    with driven() as (client, _):
        directory = os.path.dirname(client.input_address.removeprefix("ipc://"))
        assert in_child(client._finalizer) == "None"
        assert os.path.exists(directory)
        assert tokens(client.generate(text("count-1"))) == [0, 1, 2]

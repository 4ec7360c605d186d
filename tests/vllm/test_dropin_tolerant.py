"""An engine core outlives what it cannot decode: vLLM's own input thread, on real sockets, with the drop-in and without it."""

import logging
import queue
import threading
from types import SimpleNamespace

import msgpack
import msgspec
import pytest
import torch
import zmq
from vllm.v1.engine import EngineCoreRequest, FinishReason, core, core_client
from vllm.v1.serial_utils import MsgpackEncoder as VllmEncoder

from fastmm.integrations.vllm import counters, plugin, tolerant, trial
from fastmm.integrations.vllm import log as log_module

ADD, ABORT, WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"
WAIT = 20


def request(request_id="r-1", client_index=0, **members):
    return EngineCoreRequest(
        **{**trial.REQUIRED, "request_id": request_id, "pooling_params": None, "sampling_params": core_params(), **members},
        client_index=client_index,
    )


def core_params():
    from vllm import SamplingParams

    return SamplingParams(max_tokens=2)


def frames_of(message):
    return [bytes(memoryview(frame).cast("B")) for frame in VllmEncoder().encode(message)]


class InputThread:
    """The input thread of a real EngineCoreProc, the rest of the engine left out, and a client's ROUTER before it."""

    def __init__(self, clients=1, engine_class=core.EngineCoreProc):
        engine = self.engine = object.__new__(engine_class)
        engine.tensor_ipc_receiver = None
        engine.mm_receiver_cache = None
        engine.request_block_hasher = None
        engine.engine_index = 0
        engine.input_queue, engine.output_queue, engine.aborts_queue = queue.Queue(), queue.Queue(), queue.Queue()
        engine.addresses = SimpleNamespace(outputs=[f"client {n}" for n in range(clients)])
        engine._make_ready_response = dict
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.ready = threading.Event()
        self.error = None
        self.thread = threading.Thread(target=self._run, args=(f"tcp://127.0.0.1:{port}",), daemon=True)
        self.thread.start()
        assert self.socket.poll(WAIT * 1000)
        self.identity = self.socket.recv_multipart()[0]

    def _run(self, address):
        try:
            self.engine.process_input_sockets([address], None, b"\x00\x00", self.ready)
        except Exception as error:
            self.error = error

    def send(self, kind, *frames):
        self.socket.send_multipart([self.identity, kind, *frames])

    def takes(self):
        """The next thing on the engine's queue."""
        return self.engine.input_queue.get(timeout=WAIT)

    def answers(self):
        """The next thing for a client: its index, and the one output."""
        client_index, outputs = self.engine.output_queue.get(timeout=WAIT)
        (output,) = outputs.outputs
        return client_index, output

    def lives(self):
        """A good request after all that gets through, and nothing else is waiting."""
        self.send(ADD, *frames_of(request("good")))
        kind, (taken, _) = self.takes()
        return (
            (kind.value, taken.request_id) == (ADD, "good")
            and self.engine.input_queue.empty()
            and self.engine.output_queue.empty()
        )

    def close(self):
        self.engine.input_queue = None  # this, the thread does not survive
        self.send(ADD, *frames_of(request("last")))
        self.thread.join(WAIT)
        self.socket.close()
        self.context.term()


@pytest.fixture(params=["on", "shadow"])
def mode(request):
    plugin.switch_on(request.param)
    yield request.param
    plugin.switch_off()


@pytest.fixture
def thread(mode):
    running = InputThread()
    yield running
    running.close()


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(log_module, "_times", {})
    with caplog.at_level(logging.INFO, logger="vllm.fastmm"):
        yield caplog


def changed(position, value, request_id="broken", client_index=0):
    """The frames of a multimodal request with one element of its array replaced."""
    frames = frames_of(request(request_id, client_index, mm_features=trial.features()))
    elements = msgspec.msgpack.decode(frames[0])
    elements[position] = value
    return [msgspec.msgpack.encode(elements), *frames[1:]]


WHOLE = frames_of(request("broken", mm_features=trial.features()))
# What can be read of the id is all in front of the damage.
WITH_AN_ID = {
    "cut in the middle": [WHOLE[0][: len(WHOLE[0]) // 2], *WHOLE[1:]],
    "cut at the end": [WHOLE[0][:-1], *WHOLE[1:]],
    "only the id": [b"\xdc\x00\x16\xa6broken"],
    "no payload came": WHOLE[:1],
    "half the payload came": [WHOLE[0], WHOLE[1][:100], *WHOLE[2:]],
    "ids of the wrong type": changed(1, {"a": 1}),
    "ids that are strings": changed(1, ["a", "b"]),
    "features that are a string": changed(2, "none"),
    "a feature that is a number": changed(2, [7]),
    "a feature that lacks its members": changed(2, [{"data": None}]),
    "sampling params that are a list": changed(3, [1, 2]),
    "too short an array": [msgpack.packb(["broken", [1], None])],
    "an extension nobody knows": changed(9, msgspec.msgpack.Ext(99, b"x")),
    "a pickle": changed(9, msgspec.msgpack.Ext(1, b"cos\nsystem\n(S'true'\ntR.")),
    "an unknown dtype": changed(9, ["float99", [1], msgspec.msgpack.Ext(3, b"1234")]),
    "a frame that does not exist": changed(9, ["float32", [1000], 77]),
    "a shape that does not fit": changed(9, ["float32", [3, 5], msgspec.msgpack.Ext(3, b"1234")]),
}
WITHOUT = {
    "no frame at all": [],
    "an empty frame": [b""],
    "no msgpack": [b"\xc1\xc1\xc1"],
    "a map": [msgpack.packb({"request_id": "broken"})],
    "an id that is a number": changed(0, 7),
    "an id that is no UTF-8": [b"\xdc\x00\x16\xa6\xff\xfe\xfd\xfc\xfb\xfa"],
    "an array that promises too much": [b"\xdd\xff\xff\xff\xff"],
}


@pytest.mark.parametrize("name", WITH_AN_ID)
def test_without_the_drop_in_such_a_message_ends_the_thread(name):
    running = InputThread()
    running.send(ADD, *WITH_AN_ID[name])
    running.thread.join(WAIT)
    assert not running.thread.is_alive()
    assert running.error is not None
    running.socket.close()
    running.context.term()


def test_a_request_that_cannot_be_decoded_is_answered_as_failed_and_the_next_one_runs(thread, log):
    for count, (name, frames) in enumerate(WITH_AN_ID.items(), 1):
        thread.send(ADD, *frames)
        client_index, output = thread.answers()
        assert (client_index, output.request_id, output.finish_reason) == (0, "broken", FinishReason.ERROR), name
        assert thread.lives(), name
        said = [r.getMessage() for r in log.records if "answered as failed" in r.getMessage()]
        assert len(said) == count, name
        assert "request 'broken' could not be decoded" in said[-1]


def test_a_request_without_a_readable_id_is_dropped_and_the_next_one_runs(thread, log):
    before = counters.values()["dropped"]
    for count, (name, frames) in enumerate(WITHOUT.items(), 1):
        thread.send(ADD, *frames)
        assert thread.lives(), name
        assert counters.values()["dropped"] == before + count, name
    assert log.text.count("its id cannot be read") == len(WITHOUT)


@pytest.mark.parametrize("kind", [ABORT, UTILITY, WAVE])
def test_any_other_message_that_cannot_be_decoded_is_dropped(kind, thread, log):
    for frames in ([], [b""], [b"\xc1"], [b"\x94\x00"], [b"\xdb\xff\xff\xff\xff"]):
        thread.send(kind, *frames)
        taken_kind, taken = thread.takes()
        assert (taken_kind.value, taken) == (kind, tolerant.DROPPED)
        thread.engine._handle_client_request(taken_kind, taken)  # what the engine's main loop does with it: nothing
        assert thread.lives()
    if kind == ABORT:  # also goes a shorter way, where unknown ids are passed over
        assert thread.engine.aborts_queue.get_nowait() is tolerant.DROPPED
    assert log.text.count("is dropped") == 5


CALL = frames_of((0, 2**63 + 7, "is_sleeping", ()))[0]
BROKEN_CALLS = [CALL[:-1], CALL[:-3], CALL[:11], msgpack.packb([0, 2**63 + 7, "x", msgpack.ExtType(9, b"")])]


@pytest.mark.parametrize("main", BROKEN_CALLS)
def test_a_utility_call_that_cannot_be_decoded_is_answered_as_failed(main, thread):
    thread.send(UTILITY, main)
    thread.engine._handle_client_request(*thread.takes())
    client_index, outputs = thread.engine.output_queue.get(timeout=WAIT)
    assert (client_index, outputs.utility_output.call_id) == (0, 2**63 + 7)
    assert "could not be decoded" in outputs.utility_output.failure_message
    assert core.MsgpackEncoder().encode(outputs)  # it can be sent
    assert thread.lives()


def test_what_begins_as_a_utility_call_and_is_none_or_has_no_caller_is_dropped(thread):
    for kind, main in ((ABORT, CALL[:-1]), (UTILITY, b"\x94\x01" + CALL[2:-1]), (UTILITY, b"\x94\xff" + CALL[2:-1])):
        thread.send(kind, main)
        thread.engine._handle_client_request(*thread.takes())
        assert thread.lives()
    ids = thread.engine.aborts_queue.get_nowait()
    assert {}.keys().isdisjoint(ids)  # read as ids of requests, they can be looked up


ODD = [5, None, "ab", {"a": 1}, [[1]], [0, 1, "m"], [0, 1, "m", 5], [0, 1, "m", [], 1], [0, 1, 2, []], ["a", 1], [1, 2, 3]]


@pytest.mark.parametrize("kind", [ABORT, UTILITY, WAVE, b"\x04"])
def test_a_message_that_is_not_of_the_kind_that_its_type_says_is_dropped(kind, thread, log):
    thread.engine.ignore_start_dp_wave = False
    odd = [*ODD, [0, 9, "is_sleeping", []]] if kind != UTILITY else [*ODD, ["a", "b"], ["a", "b", "c", "d"], [True, 9, "x", []]]
    for message in odd:
        thread.send(kind, msgpack.packb(message))
        taken_kind, taken = thread.takes()
        thread.engine._handle_client_request(taken_kind, taken)
        while not thread.engine.aborts_queue.empty():
            assert {}.keys().isdisjoint(thread.engine.aborts_queue.get_nowait())
        while not thread.engine.output_queue.empty():  # its call id could be read
            assert kind == UTILITY
            assert thread.engine.output_queue.get_nowait()[1].utility_output.failure_message
        assert thread.lives(), message
    assert log.text.count("fastmm: ") == len(odd)


def test_the_call_that_the_input_thread_answers_itself_is_dropped_when_its_arguments_are_not_its_own(thread):
    method = getattr(core, "FT_UTILITY_METHOD", None)
    for arguments in ([], [5], [{}], [{"a": 1}]) if method else ():
        thread.send(UTILITY, msgpack.packb([0, 9, method, arguments]))
        thread.engine._handle_client_request(*thread.takes())
        assert thread.engine.output_queue.get(timeout=WAIT)[1].utility_output.call_id == 9
        assert thread.lives()


def test_waves_and_aborts_of_every_kind_that_vllm_sends_get_through(thread):
    for kind, message in ((WAVE, (3, None)), (WAVE, (3, 1)), (ABORT, []), (ABORT, ["a"]), (ABORT, list("abcd"))):
        thread.send(kind, msgspec.msgpack.encode(message))
        taken_kind, taken = thread.takes()
        assert (taken_kind.value, taken) == (kind, list(message))


@pytest.mark.parametrize("client_index", [1, 99, -1])
def test_nothing_is_sent_to_a_client_that_does_not_exist(client_index, thread, log):
    thread.engine.add_request = lambda *_: pytest.fail("added")
    for kind, message in ((ADD, request("r-1", client_index)), (UTILITY, (client_index, 9, "is_sleeping", ()))):
        thread.send(kind, *frames_of(message))
        thread.engine._handle_client_request(*thread.takes())
        assert thread.lives()
    assert log.text.count(f"a message of client {client_index} is dropped: there are 1") == 2


def test_no_failed_preprocessing_is_answered_to_a_client_that_does_not_exist(thread, log):
    def fail(request):
        raise ValueError("cannot be preprocessed")

    thread.engine.preprocess_add_request = fail
    thread.send(ADD, *frames_of(request("r-1", 99)))
    thread.send(ADD, *frames_of(request("r-2", 0)))
    client_index, outputs = thread.engine.output_queue.get(timeout=WAIT)
    assert (client_index, [output.request_id for output in outputs.outputs]) == (0, ["r-2"])
    assert thread.engine.output_queue.empty()
    del thread.engine.preprocess_add_request
    assert thread.lives()
    assert "a message of client 99 is dropped" in log.text


@pytest.mark.parametrize("kind", [b"\x63", b"", b"READ", b"\x00\x00"])
def test_a_message_of_an_unknown_type_is_dropped(kind, thread, log):
    for frames in ([], [b"\xc1"], frames_of(["r-1"])):
        thread.send(kind, *frames)
        taken_kind, taken = thread.takes()
        assert taken_kind == core.EngineCoreRequestType.WAKEUP
        thread.engine._handle_client_request(taken_kind, taken)  # nothing
        assert thread.lives()
    assert log.text.count("of an unknown type is dropped") == 3


def test_an_engine_core_of_another_make_is_left_as_it_is(mode, monkeypatch, log):
    monkeypatch.delattr(core.EngineCoreProc, "_handle_request_preproc_error")
    running = InputThread()
    running.send(ADD, b"\xc1")
    running.thread.join(WAIT)
    assert isinstance(running.error, msgspec.DecodeError)
    assert "EngineCoreProc._handle_request_preproc_error is missing" in log.text
    running.socket.close()
    running.context.term()


def test_the_engine_of_data_parallel_ranks_drops_them_too(mode):
    running = InputThread(engine_class=core.DPEngineCoreProc)
    running.engine.ignore_start_dp_wave = False
    for kind in (WAVE, UTILITY, ABORT):
        running.send(kind, b"\xc1")
        running.engine._handle_client_request(*running.takes())
    assert running.lives()
    running.close()


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        (changed(1, "x", client_index=2), [2]),
        (changed(1, "x", client_index=7), [0, 1, 2]),  # no such client
        ([WHOLE[0][:40]], [0, 1, 2]),  # damage before the index: all are told, those who do not know the id pass it over
        ([msgpack.packb(["broken", [1], None])], [0]),  # left out: the default
    ],
)
def test_the_client_that_sent_it_is_told(frames, told, mode):
    running = InputThread(clients=3)
    running.send(ADD, *frames)
    assert [running.answers()[0] for _ in told] == told
    assert running.lives()
    running.close()


def test_the_client_takes_the_answer_for_its_failed_request(thread):
    """What goes back over the wire is what vLLM's own client reads."""
    thread.send(ADD, *changed(1, "x"))
    _, outputs = thread.engine.output_queue.get(timeout=WAIT)
    frames = core.MsgpackEncoder().encode_into(outputs, bytearray())
    read = core_client.MsgpackDecoder(core_client.EngineCoreOutputs).decode(frames)
    assert read.finished_requests == {"broken"}
    assert [(o.request_id, o.finish_reason) for o in read.outputs] == [("broken", FinishReason.ERROR)]


def test_good_messages_go_their_way(thread):
    thread.send(ADD, *frames_of(request("r-7", mm_features=trial.features())))
    kind, (taken, _) = thread.takes()
    assert kind.value == ADD
    assert torch.equal(taken.mm_features[1].data["pixel_values"].data, trial.features()[1].data["pixel_values"].data)
    thread.send(ABORT, *frames_of(["r-7", "r-8"]))
    assert thread.takes()[1] == ["r-7", "r-8"]
    thread.send(UTILITY, *frames_of((0, 9, "is_sleeping", ())))
    assert list(thread.takes()[1]) == [0, 9, "is_sleeping", []]
    assert thread.engine.output_queue.empty()


def test_an_error_of_preprocessing_is_still_vllms(thread, monkeypatch):
    seen = []
    monkeypatch.setattr(core.EngineCoreProc, "preprocess_add_request", lambda self, request: 1 / 0)
    monkeypatch.setattr(
        core.EngineCoreProc, "_send_error_outputs_to_client", lambda self, ids, client: seen.append((ids, client))
    )
    thread.send(ADD, *frames_of(request("r-9", client_index=0)))
    thread.send(ABORT, *frames_of(["x"]))
    thread.takes()
    assert seen == [(["r-9"], 0)]


def test_nothing_of_a_payload_is_in_the_log(thread, log):
    secret = "tell nobody"
    damaged = [
        changed(1, [1, secret]),
        changed(9, [secret, [1], msgspec.msgpack.Ext(3, b"1234")]),
        changed(9, ["float32", [77], msgspec.msgpack.Ext(3, secret.encode())]),
        changed(2, [{"data": {secret: 1}}]),
        changed(3, {secret: secret}),
        changed(7, [secret]),
    ]
    for count, frames in enumerate(damaged, 1):
        thread.send(ADD, *frames)
        thread.lives() if count == 5 else thread.answers()  # vLLM passes over parameters it does not know
    assert log.text.count("answered as failed") == 5
    assert "tell" not in log.text


def test_decoders_made_elsewhere_raise_as_ever(mode):
    decoder = core_client.MsgpackDecoder(EngineCoreRequest)
    with pytest.raises(msgspec.DecodeError):
        decoder.decode([b"\xc1"])
    assert type(decoder) is core.MsgpackDecoder
    assert not hasattr(decoder, "_tolerates")

"""FASTMM_VLLM=1 in vLLM's own processes, offline: the same answers to the last bit, with the switch on both sides or on one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import CASES
from conftest import HERE, STARTUP_S, Reference
from dropin_pairings import ANSWERED, MALFORMED, SOME
from engines import Process
from front_end import Answer

from fastmm.integrations.vllm.counters import read_directory

PAIRINGS = ("both", "front end only", "engine only", "by another way")


class Pairings:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))

    def answer(self, pairing: str, case: str) -> Answer:
        return Answer.from_reference(self.result[pairing]["answers"][case])

    def counters(self, pairing: str) -> dict[str, dict[str, Any]]:
        """Process name to counters, of the processes that made an encoder or a decoder with fastmm in them."""
        kept = read_directory(self._path.with_suffix(f".{pairing.replace(' ', '-')}"))
        return {entry["process"]: entry for entry in kept.values() if entry["encoders"] or entry["decoders"]}

    def messages(self) -> Iterator[tuple[str, str, list[bytes]]]:
        import msgpack

        with self._path.with_suffix(".frames").open("rb") as file:
            yield from msgpack.Unpacker(file, max_buffer_size=1 << 30)


@pytest.fixture(scope="session")
def pairings(
    model: str,
    model_directory: Path,
    reference: Reference,  # first: one engine at a time
    vllm_environment: dict[str, str],
    engine_log: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Pairings:
    output = tmp_path_factory.mktemp("pairings") / f"{model}.json"
    command = [sys.executable, str(HERE / "dropin_pairings.py"), model, str(model_directory), str(output)]
    with Process(command, log=engine_log(f"pairings-{model}"), environment=vllm_environment) as process:
        assert process.wait(3 * STARTUP_S) == 0, process.log()
    return Pairings(output)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_every_answer_is_the_one_that_vllm_gives_without_it(pairings, reference, pairing):
    answered = pairings.result[pairing]["answers"]
    assert set(answered) == set(CASES if pairing != "by another way" else SOME)
    for case in answered:
        assert pairings.answer(pairing, case) == reference.answer(case), case


def test_it_was_at_work_in_both_processes_where_it_was_switched_on(pairings):
    processes = pairings.counters("both")
    assert set(processes) == {"MainProcess", "EngineCore"}
    front, core = processes["MainProcess"], processes["EngineCore"]
    assert (front["encoders"], front["decoders"]) == (1, 1)
    assert (core["encoders"], core["decoders"]) == (1, 2)
    # Each side read what the other wrote.
    assert front["encoded"] == core["decoded"] > len(CASES)
    assert core["encoded"] == front["decoded"] > len(CASES)


def test_it_was_at_work_in_one_process_where_it_was_switched_on_in_one(pairings):
    (front,) = pairings.counters("front end only").values()
    assert front["process"] == "MainProcess"
    assert min(front["encoded"], front["decoded"]) > len(CASES)
    (core,) = pairings.counters("engine only").values()
    assert core["process"] == "EngineCore"
    assert min(core["encoded"], core["decoded"]) > len(CASES)


def test_it_was_at_work_where_photographs_go_another_way(pairings, model):
    processes = pairings.counters("by another way")
    core, front = processes["EngineCore"], processes["MainProcess"]
    assert front["encoded"] >= core["decoded"] > len(SOME)
    if model == "llava":  # through shared memory: the worker decodes them, and the front end encoded them once more
        assert processes["VllmWorker-0"]["decoded"] > 0
        assert front["encoded"] > core["decoded"]
    assert all(counted["refused"] == 0 for counted in processes.values())


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_nothing_was_left_to_vllms_own_code(pairings, pairing):
    for process, counted in pairings.counters(pairing).items():
        assert counted["faults"] == 0, process


def test_an_engine_that_gets_malformed_requests_lives_and_answers_the_next_one(pairings, reference):
    assert pairings.result["malformed"] == {name: ["broken", "ERROR"] for name in MALFORMED if name in ANSWERED}
    (core,) = pairings.counters("engine only").values()
    assert core["answered"] == len(ANSWERED)
    assert core["dropped"] == len(MALFORMED) - len(ANSWERED) + 2  # and an abort and a utility call
    assert Answer.from_reference(pairings.result["after malformed"]) == reference.answer("one")


@pytest.fixture(scope="session")
def corpus(pairings: Pairings, reference: Reference) -> list[tuple[str, str, list[bytes]]]:
    """All that crossed between two real processes: vLLM's own on both sides, and fastmm's in the engine."""
    return [*reference.messages(), *pairings.messages()]


def test_the_corpus_has_requests_outputs_aborts_utility_calls_and_stats(corpus):
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder

    sent = {what for direction, what, _ in corpus if direction == "sent"}
    assert {"EngineCoreRequest", "list", "tuple"} <= sent  # list: an abort, tuple: a utility call
    frames_received = [list(map(bytearray, frames)) for _, what, frames in corpus if what == "EngineCoreOutputs"]
    received = [MsgpackDecoder(EngineCoreOutputs).decode(frames) for frames in frames_received]
    utilities = [outputs.utility_output for outputs in received if outputs.utility_output is not None]
    assert any(utility.failure_message for utility in utilities)
    assert any(utility.failure_message is None for utility in utilities)
    assert any(outputs.scheduler_stats for outputs in received)
    assert any(outputs.finished_requests for outputs in received)
    assert any(len(frames) > 1 for direction, _, frames in corpus if direction == "received")


def kind_of(what: str) -> Any:
    from vllm.v1 import engine

    return getattr(engine, what, None)


def test_both_decode_the_corpus_to_equal_objects(corpus):
    from vllm.v1.serial_utils import MsgpackDecoder

    from fastmm.integrations.vllm import codec
    from fastmm.integrations.vllm.compare import difference

    for number, (_, what, frames) in enumerate(corpus):
        received = [bytearray(frame) for frame in frames]
        theirs = MsgpackDecoder(kind_of(what)).decode(received)
        ours = codec.MsgpackDecoder(kind_of(what)).decode(received)
        assert difference(theirs, ours) is None, (number, what)


def test_both_encode_the_corpus_to_equal_bytes_and_the_captured_ones(corpus):
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from fastmm.integrations.vllm import codec
    from fastmm.integrations.vllm.compare import frames_difference

    buffer = bytearray()
    theirs, ours = MsgpackEncoder(), codec.MsgpackEncoder()
    for number, (_, what, frames) in enumerate(corpus):
        message = MsgpackDecoder(kind_of(what)).decode([bytearray(frame) for frame in frames])
        written = theirs.encode(message)
        assert frames_difference(written, ours.encode(message)) is None, (number, what)
        assert frames_difference(written, ours.encode_into(message, buffer)) is None, (number, what)
        assert frames_difference(frames, written) is None, (number, what)

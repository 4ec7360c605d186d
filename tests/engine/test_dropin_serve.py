"""``FASTMM_VLLM=1 vllm serve``: HTTP requests with photographs and streaming, through several API servers, and an engine beside."""

from __future__ import annotations

import base64
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from cases import CASES, photograph
from conftest import STARTUP_S, Reference
from engines import Process, engine_arguments, free_port, vllm_command

from fastmm.integrations.vllm.counters import read_directory

API_SERVERS = {"llava": 4, "qwen2vl": 1}


class Server:
    def __init__(self, process: Process, port: int, counters: Path) -> None:
        self.process = process
        self.address = f"http://127.0.0.1:{port}"
        self._counters = counters

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self.address + path, json.dumps({"model": "tiny", **body}).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=120)

    def chat(self, case: str, **body: Any) -> Any:
        """The response to a case asked as a chat; the photographs travel as data URLs."""
        sampling = {**CASES[case].sampling_params(), "logprobs": True, "top_logprobs": 3}
        images = [{"type": "image_url", "image_url": {"url": data_url(name)}} for name in CASES[case].photographs]
        content = [*images, {"type": "text", "text": CASES[case].text}]
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **{**sampling, **body})

    def counters(self) -> dict[str, list[dict[str, Any]]]:
        """Process name to the counters of the processes with that name that made a codec."""
        found: dict[str, list[dict[str, Any]]] = {}
        for entry in read_directory(self._counters).values():
            if entry["encoders"] or entry["decoders"]:
                found.setdefault(entry["process"], []).append(entry)
        return found


def data_url(name: str) -> str:
    file = BytesIO()
    photograph(name).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


@pytest.fixture(scope="module")
def server(
    model: str,
    model_directory: Path,
    reference: Reference,  # first: one engine at a time
    vllm_environment: dict[str, str],
    engine_log: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    port, counters = free_port(), tmp_path_factory.mktemp("counters")
    words = ["serve", str(model_directory), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
    words += ["--api-server-count", str(API_SERVERS[model])]
    environment = {**vllm_environment, "FASTMM_VLLM": "1", "FASTMM_VLLM_COUNTERS": str(counters)}
    command = vllm_command(*words, *engine_arguments())
    with Process(command, log=engine_log(f"serve-{model}"), environment=environment) as process:
        process.wait_for_line("Application startup complete", STARTUP_S)
        yield Server(process, port, counters)


ASKED = ("one", "other", "two", "two, swapped", "text")


@pytest.mark.parametrize("case", ASKED)
def test_a_chat_with_photographs_gets_the_answer_that_vllm_gives_without_it(server, reference, case):
    body = json.load(server.chat(case))
    (choice,) = body["choices"]
    assert choice["message"]["content"] == reference.text(case)
    expected = reference.answer(case)
    assert body["usage"]["prompt_tokens"] == len(reference.prompt_token_ids(case))
    assert logprobs_of(choice) == [row[token] for row, token in zip(expected.logprobs, expected.token_ids, strict=True)]
    assert choice["finish_reason"] == expected.finish_reason


def test_a_stream_brings_the_same_answer_piece_by_piece(server, reference):
    pieces = []
    with server.chat("two", stream=True) as response:
        for line in response:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                pieces += json.loads(line[6:])["choices"]
    assert "".join(piece["delta"].get("content") or "" for piece in pieces) == reference.text("two")
    assert len(pieces) > 3
    expected = reference.answer("two")
    streamed = [value for piece in pieces if piece.get("logprobs") for value in logprobs_of(piece)]
    assert streamed == [row[token] for row, token in zip(expected.logprobs, expected.token_ids, strict=True)]


def test_requests_at_once_get_their_own_answers(server, reference):
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        case = ASKED[number % len(ASKED)]
        answers[number] = (case, json.load(server.chat(case))["choices"][0]["message"]["content"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert len(answers) == 24
    for case, text in answers.values():
        assert text == reference.text(case), case


def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(server, reference):
    with server.post("/v1/completions", prompt="what is this ?", max_tokens=2000, ignore_eos=True, stream=True) as response:
        response.readline()
    body = json.load(server.chat("one"))
    assert body["choices"][0]["message"]["content"] == reference.text("one")


def test_it_was_at_work_in_every_process(server, model):
    """After the others: what the counters of each process say."""
    processes = server.counters()
    cores = [entry for name, entries in processes.items() if name.startswith("EngineCore") for entry in entries]
    fronts = [entry for name, entries in processes.items() if not name.startswith("EngineCore") for entry in entries]
    (core,) = cores
    assert len(fronts) >= API_SERVERS[model], processes
    assert core["decoded"] == sum(front["encoded"] for front in fronts) > len(ASKED)
    assert core["encoded"] >= sum(front["decoded"] for front in fronts) > len(ASKED)
    assert all(entry["faults"] == entry["refused"] == 0 for entry in [*cores, *fronts])
    assert server.process.log(100_000).count("in place of the encoder and decoder of vLLM") == len(cores) + len(fronts)

"""fastmm's client and server together: whose memory is held until when, and what a client sees of a server's troubles."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.sabotage import break_requests

import fastmm
from fastmm.errors import EngineDead, UtilityFailed
from fastmm.schema import EngineCoreOutput, EngineCoreRequest, FinishReason
from fastmm.schema.profile import PROFILES
from fastmm.transport import Abort, Add, AsyncEngineClient, EngineClient, EngineServer, UtilityCall

PATIENCE_S = 30.0


@contextmanager
def serving(address: str, serve: Callable[[EngineServer], None], **options: Any) -> Iterator[list[EngineServer]]:
    """A server on a thread of its own, which runs `serve`."""
    servers: list[EngineServer] = []

    def run() -> None:
        try:
            with EngineServer(address, **options) as engine:
                servers.append(engine)
                serve(engine)
        except ZeroDivisionError:
            pass  # a test's own

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield servers
    finally:
        for engine in servers:
            engine.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def request_of(request_id: str, pixels: np.ndarray | None = None) -> EngineCoreRequest:
    features = None
    if pixels is not None:
        features = fastmm.build_features(
            tensors={"pixel_values": pixels},
            batched={"pixel_values"},
            placeholders=[(0, 1)],
            hashes=["h"],
            prompt_token_ids=[1],
        )
    return EngineCoreRequest(request_id, [1], features)


def answer_all(engine: EngineServer) -> None:
    for event in engine:
        if isinstance(event, Add):
            total = 0
            for feature in event.request.mm_features or ():
                total += int(np.asarray(feature.data["pixel_values"].data).view(np.uint8).sum())
            engine.send_output(EngineCoreOutput(event.request.request_id, [total % 1000]), event.client_index)
            engine.send_output(
                EngineCoreOutput(event.request.request_id, [], finish_reason=FinishReason.STOP), event.client_index
            )
        elif isinstance(event, UtilityCall):
            if event.method == "fail":
                engine.send_utility_result(event, failure="this engine cannot")
            else:
                engine.send_utility_result(event, [event.method, *event.args])


DECODER = {"decoder": fastmm.Decoder(tensors="numpy")}


def test_a_requests_memory_is_free_when_it_has_been_sent_while_its_answer_is_still_awaited() -> None:
    go_on = threading.Event()

    def serve(engine: EngineServer) -> None:
        event = engine.get(PATIENCE_S)
        assert isinstance(event, Add)
        del event
        go_on.wait(PATIENCE_S)
        engine.send_output(EngineCoreOutput("r", [7], finish_reason=FinishReason.STOP))
        answer_all(engine)

    client = EngineClient(startup_timeout=PATIENCE_S)
    with serving(client.bind(), serve, **DECODER), client:
        pixels = np.ones((1, 1 << 22), np.float32)
        memory = weakref.ref(pixels)
        outputs = client.generate(request_of("r", pixels))
        del pixels
        assert client.ledger.wait(PATIENCE_S)
        gc.collect()
        assert memory() is None
        assert not go_on.is_set()
        go_on.set()
        assert [output.new_token_ids for output in outputs] == [[7]]


def test_a_broken_request_ends_with_an_error_that_says_why_and_the_next_one_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_requests(monkeypatch, "broken", "lost")
    client = EngineClient(startup_timeout=PATIENCE_S)
    with serving(client.bind(), answer_all, **DECODER), client:
        (output,) = client.generate(request_of("broken", np.zeros((1, 1 << 20), np.float32)))
        assert output.finish_reason is FinishReason.ERROR
        assert output.error is not None
        assert output.error.message.startswith("DecodeError: $.mm_features[0].data['pixel_values']")
        assert [o.new_token_ids for o in client.generate(request_of("next", np.full((1, 4), 1, np.float32)))] == [[764], []]
        assert client.call_utility("echo", 1, "x", timeout=PATIENCE_S) == ["echo", 1, "x"]
        with pytest.raises(UtilityFailed, match="this engine cannot"):
            client.call_utility("fail", timeout=PATIENCE_S)


def test_a_server_that_fails_ends_what_is_pending() -> None:
    def serve(engine: EngineServer) -> None:
        engine.get(PATIENCE_S)
        raise ZeroDivisionError

    client = EngineClient(startup_timeout=PATIENCE_S)
    with serving(client.bind(), serve), client, pytest.raises(EngineDead):
        list(client.generate(request_of("r")))


def test_an_answer_left_early_aborts_the_request_on_the_server() -> None:
    aborted: list[str] = []
    heard = threading.Event()

    def serve(engine: EngineServer) -> None:
        for event in engine:
            if isinstance(event, Add):
                engine.send_output(EngineCoreOutput(event.request.request_id, [1]))
            elif isinstance(event, Abort):
                aborted.extend(event.request_ids)
                heard.set()

    async def main() -> None:
        client = AsyncEngineClient(startup_timeout=PATIENCE_S)
        with serving(client.bind(), serve):
            async with client:
                async for output in client.generate(request_of("r")):
                    assert output.new_token_ids == [1]
                    break
                assert await asyncio.to_thread(heard.wait, PATIENCE_S)
        assert len(aborted) == 1

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_two_servers_share_the_load_and_each_answer_goes_to_its_asker() -> None:
    async def main() -> None:
        client = AsyncEngineClient(engines=2, startup_timeout=PATIENCE_S)
        address = client.bind()
        with serving(address, answer_all, rank=0, **DECODER) as zero, serving(address, answer_all, rank=1, **DECODER) as one:
            async with client:

                async def ask(index: int) -> list[int]:
                    pixels = np.full((1, 3), index, np.uint8)
                    return [ids for output in [o async for o in client.generate(request_of(f"r{index}", pixels))]
                            for ids in output.new_token_ids]  # fmt: skip

                answers = await asyncio.gather(*[ask(index) for index in range(200)])
                assert answers == [[3 * index % 1000] for index in range(200)]
            counts = [servers[0].counters["adds"] for servers in (zero, one)]
        assert sum(counts) == 200
        assert min(counts) >= 60

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_it_all_works_over_tcp_as_well() -> None:
    client = EngineClient("tcp://127.0.0.1:0", startup_timeout=PATIENCE_S)
    address = client.bind()
    assert address.startswith("tcp://127.0.0.1:")
    with serving(address, answer_all, ready={"dtype": "bfloat16"}, **DECODER), client:
        for index in range(20):
            pixels = np.ones((1, 1 << 20), np.float32)
            answers = [output.new_token_ids for output in client.generate(request_of(f"r{index}", pixels))]
            assert answers == [[(0x3F + 0x80) * (1 << 20) % 1000], []]  # 1.0 in bfloat16: 3f80
        assert client.ledger.wait(PATIENCE_S)


@pytest.mark.parametrize("version", [profile.name + ".0" for profile in PROFILES])
def test_a_server_of_an_older_release_and_its_client_speak_that_releases_layout(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_requests(monkeypatch, "broken", "more")
    client = EngineClient(startup_timeout=PATIENCE_S)
    ready = {"dtype": "bfloat16", "vllm_version": version}
    with serving(client.bind(), answer_all, ready=ready) as servers, client:
        assert [output.new_token_ids for output in client.generate(request_of("text"))] == [[0], []]
        (output,) = client.generate(request_of("broken"))
        assert output.finish_reason is FinishReason.ERROR
        if output.error is not None:  # younger releases say why
            assert output.error.message == servers[0].last_fault
        assert client.call_utility("echo", 1, timeout=PATIENCE_S) == ["echo", 1]
        assert servers[0].counters["failed"] == 1

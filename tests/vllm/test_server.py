"""Both sides of the startup, and `EngineServer`, against vLLM's own functions and classes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from peers import vllm_decode, vllm_encoder
from support.bare_client import PATIENCE_MS, BareClient, client_and_engine
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.utils import CoreEngine, EngineZmqAddresses, wait_for_engine_startup

import fastmm
from fastmm.schema import LogprobsLists
from fastmm.transport import Abort, Add, EngineServer, UtilityCall
from fastmm.transport.handshake import ClientHandshake, EngineHandshake, engine_identity

PATIENCE_S = PATIENCE_MS / 1000

READY = EngineCoreReadyResponse(
    max_model_len=4096,
    num_gpu_blocks=7,
    block_size=16,
    dp_stats_address=None,
    dtype="bfloat16",
    vllm_version="0.33.0",
    world_size=1,
    data_parallel_size=1,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    decode_context_parallel_size=1,
    data_parallel_rank=0,
    max_num_seqs=8,
    max_num_batched_tokens=4096,
    instance_id="i",
    supports_lora=False,
    max_loras=0,
)


def in_thread(function: Callable[..., Any], *arguments: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function(*arguments)), daemon=True)
    thread.start()
    return thread, found


def test_vllms_engine_understands_our_client(tmp_path: Path) -> None:
    client = BareClient(tmp_path, 2)
    config = {"data_parallel_size": 2, "data_parallel_master_ip": "127.0.0.1"}
    handshake = ClientHandshake(client.addresses, 1, config)
    with client.context.socket(zmq.DEALER) as dealer:
        dealer.identity = engine_identity(0)
        dealer.connect(client.address)
        parallel = SimpleNamespace()
        thread, found = in_thread(EngineCoreProc.startup_handshake, dealer, False, True, parallel)
        assert client.handshake.poll(PATIENCE_MS)
        answer = handshake.on_handshake(client.handshake.recv_multipart())
        assert answer is not None
        client.handshake.send_multipart(answer)
        thread.join(PATIENCE_S)
    (addresses,) = found
    assert addresses == EngineZmqAddresses(list(client.addresses.inputs), list(client.addresses.outputs))
    assert vars(parallel) == config
    handshake.on_input([engine_identity(0), msgspec.msgpack.encode(READY)])
    handshake.on_handshake([engine_identity(0), msgspec.msgpack.encode({"status": "READY", "local": False, "headless": True})])
    (info,) = handshake.engines
    assert (info.dtype, info.vllm_version, info.max_model_len, info.num_gpu_blocks) == ("bfloat16", "0.33.0", 4096, 7)
    assert (info.local, info.headless) == (False, True)
    assert info.ready == msgspec.to_builtins(READY)  # every key of the release that is installed
    client.close()


def test_vllms_client_waits_for_our_engines(tmp_path: Path) -> None:
    client = BareClient(tmp_path)
    engines = [CoreEngine(0, local=True), CoreEngine(1, local=False)]
    parallel = SimpleNamespace(
        data_parallel_size_local=1, data_parallel_hybrid_lb=False, data_parallel_external_lb=False, local_engines_only=False
    )
    launch = SimpleNamespace(
        addresses=EngineZmqAddresses(list(client.addresses.inputs), list(client.addresses.outputs)),
        engine_manager=None,
        coordinator=None,
        watched_frontend_processes=(),
    )
    thread, found = in_thread(wait_for_engine_startup, client.handshake, engines, parallel, False, SimpleNamespace(), launch)
    ready = msgspec.to_builtins(READY)
    with (
        EngineServer(client.address, rank=0, local=True, headless=False, ready=ready) as engine,
        EngineServer(client.address, rank=1, local=False, headless=True, ready=ready),
    ):
        thread.join(PATIENCE_S)
        assert found == [None]
        assert engine.addresses == client.addresses
        said = {}
        for _ in range(2):
            assert client.inputs[0].poll(PATIENCE_MS)
            identity, response = client.inputs[0].recv_multipart()
            said[identity] = msgspec.msgpack.decode(response, type=EngineCoreReadyResponse)
        assert said == {b"\0\0": READY, b"\1\0": READY}
    client.close()


def test_messages_of_vllms_encoder_come_as_events_and_its_decoder_reads_our_answers(tmp_path: Path) -> None:
    encoder = vllm_encoder(256)
    with client_and_engine(tmp_path) as (client, engine):
        request = EngineCoreRequest("r", [1, 2], None, SamplingParams(max_tokens=3), None, 1.0, None, None, None)
        client.send([b"\x00", *encoder.encode(request)])
        client.send([b"\x01", *encoder.encode(["r"])])
        client.send([b"\x03", *encoder.encode((0, 1 << 60, "add_lora", (1, {"a": None})))])
        added = engine.get(PATIENCE_S)
        assert isinstance(added, Add)
        assert added.request.sampling_params is not None
        assert (added.request.request_id, added.request.sampling_params.max_tokens) == ("r", 3)
        assert engine.get(PATIENCE_S) == Abort(["r"], 0)
        call = engine.get(PATIENCE_S)
        assert call == UtilityCall(0, 1 << 60, "add_lora", [1, {"a": None}])

        def heard() -> EngineCoreOutputs:
            outputs: EngineCoreOutputs = vllm_decode([frame.buffer for frame in client.hear_raw()], EngineCoreOutputs)
            return outputs

        assert isinstance(call, UtilityCall)
        engine.send_utility_result(call, ["generate"])
        engine.send_utility_result(call, failure="no")
        answer, failure = heard().utility_output, heard().utility_output
        assert answer is not None
        assert answer.result is not None
        assert (answer.call_id, answer.failure_message, answer.result.result) == (1 << 60, None, ["generate"])
        assert failure is not None
        assert (failure.failure_message, failure.result) == ("no", None)

        logprobs = LogprobsLists(np.arange(300).reshape(1, -1), np.ones((1, 300), np.float32), np.zeros(1, np.int64))
        engine.send_output(
            fastmm.EngineCoreOutput("r", [5], new_logprobs=logprobs, finish_reason=fastmm.schema.FinishReason.STOP)
        )
        outputs = heard()
        assert outputs.finished_requests == {"r"}
        assert outputs.outputs[0].finish_reason is FinishReason.STOP
        assert np.array_equal(outputs.outputs[0].new_logprobs.logprob_token_ids, logprobs.logprob_token_ids)

        client.send([b"\x00", encoder.encode(request)[0][:-1]])
        client.send([b"\x01", *encoder.encode(["next"])])
        assert engine.get(PATIENCE_S) == Abort(["next"], 0)
        (output,) = heard().outputs
        assert (output.request_id, output.finish_reason) == ("r", FinishReason.ERROR)
        assert output.error.code == "validation_error"


def test_both_sides_of_ours_say_the_bytes_that_vllm_says() -> None:
    engine = EngineHandshake(0, local=True, headless=False)
    assert engine.hello() == [msgspec.msgpack.encode({"status": "HELLO", "local": True, "headless": False})]
    assert engine.ready() == [msgspec.msgpack.encode({"status": "READY", "local": True, "headless": False})]
    assert EngineCoreProc.ENGINE_CORE_DEAD == b"ENGINE_CORE_DEAD"


@pytest.mark.parametrize("config", [{}, {"data_parallel_size": 2}])
def test_our_init_message_is_vllms_byte_for_byte(config: dict[str, Any]) -> None:
    from vllm.v1.engine.utils import EngineHandshakeMetadata

    from fastmm.transport import Addresses

    handshake = ClientHandshake(Addresses(("i",), ("o",), None, None, "s"), 1, config)
    (_, init) = handshake.on_handshake([b"\0\0", *EngineHandshake(0).hello()]) or (None, None)
    theirs = EngineHandshakeMetadata(EngineZmqAddresses(["i"], ["o"], None, None, "s"), config)
    assert init == msgspec.msgpack.encode(theirs)

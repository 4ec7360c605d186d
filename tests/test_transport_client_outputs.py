"""What engines send comes out as typed objects, through real sockets; the engine is an `EngineServer` in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.clients import LIMIT, text

import fastmm
from fastmm.schema import (
    EngineCoreEvent,
    EngineCoreEventType,
    FinishReason,
    LogprobsLists,
    LogprobsTensors,
    SchedulerStats,
    WireTensor,
)
from fastmm.transport import Add, EngineClient, EngineServer


@contextmanager
def answered(fields: Callable[[], dict[str, Any]], message: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """A client of an engine that answers every request with one output of these fields."""

    def serve() -> None:
        with EngineServer(
            address, ready={"vllm_version": "0.33.0"}, encoder=fastmm.Encoder(threshold=256), patience=0.1
        ) as engine:
            for event in engine:
                if isinstance(event, Add):
                    output = fastmm.EngineCoreOutput(event.request.request_id, [1], finish_reason=FinishReason.STOP, **fields())
                    engine.send_outputs(fastmm.EngineCoreOutputs(outputs=[output], **(message or {})), event.client_index)

    client = EngineClient(startup_timeout=LIMIT, **options)
    address = client.bind()
    thread = threading.Thread(target=serve)
    thread.start()
    with client:
        yield client
    thread.join(LIMIT)


@pytest.mark.parametrize("tokens", [1, 3, 4000], ids=["inline", "some inline", "frames"])
def test_logprobs_are_arrays_inline_or_in_frames_of_their_own(tokens):
    ids = np.arange(tokens * 6, dtype=np.int32).reshape(tokens, 6)
    values = np.linspace(-9, 0, tokens * 6, dtype=np.float32).reshape(tokens, 6)
    ranks = np.arange(tokens, dtype=np.int32)
    with answered(lambda: {"new_logprobs": LogprobsLists(ids, values, ranks, [0, tokens])}) as client:
        (output,) = client.generate(text("1"))
        got = output.new_logprobs
        for array, sent in ((got.logprob_token_ids, ids), (got.logprobs, values), (got.sampled_token_ranks, ranks)):
            assert type(array) is np.ndarray
            assert (array.dtype, array.shape) == (sent.dtype, sent.shape)
            assert np.array_equal(array, sent)
        assert got.cu_num_generated_tokens == [0, tokens]


def test_prompt_logprobs_that_the_engine_sent_as_tensors_are_arrays_unless_torch_is_asked_for():
    torch = pytest.importorskip("torch")
    ids, values, ranks = torch.arange(600).reshape(100, 6), torch.rand(100, 6), torch.arange(100)
    for tensors, kind in (("numpy", np.ndarray), ("torch", torch.Tensor), ("wire", WireTensor)):
        fields = {"new_prompt_logprobs_tensors": LogprobsTensors(ids, values, ranks)}
        with answered(lambda fields=fields: fields, tensors=tensors) as client:
            (output,) = client.generate(text("1"))
            got = output.new_prompt_logprobs_tensors
            assert all(type(tensor) is kind for tensor in (got.logprob_token_ids, got.logprobs, got.selected_token_ranks))
            if tensors == "numpy":
                assert np.array_equal(got.logprobs, values.numpy())


def test_pooling_outputs_events_and_statistics_are_typed():
    pooled = np.arange(1000, dtype=np.float32)
    events = [EngineCoreEvent(EngineCoreEventType.QUEUED, 1.5), EngineCoreEvent(EngineCoreEventType.SCHEDULED, 2.5)]
    messages: list[Any] = []
    with answered(
        lambda: {"pooling_output": pooled, "events": events, "stop_reason": "end"},
        {"scheduler_stats": SchedulerStats(num_running_reqs=3), "weight_version": "w"},
        on_outputs=messages.append,
    ) as client:
        (output,) = client.generate(text("1"))
        assert np.array_equal(output.pooling_output, pooled)
        assert [(event.type, event.timestamp) for event in output.events] == [
            (EngineCoreEventType.QUEUED, 1.5),
            (EngineCoreEventType.SCHEDULED, 2.5),
        ]
        assert output.stop_reason == "end"
        assert client.scheduler_stats[0].num_running_reqs == 3
        assert [message.weight_version for message in messages] == ["w"]


def test_statistics_are_kept_of_ones_own_engines_only():
    with answered(dict, {"scheduler_stats": SchedulerStats(num_running_reqs=3)}) as client:
        message = fastmm.EngineCoreOutputs(engine_index=7, scheduler_stats=SchedulerStats())
        assert client._read([bytes(frame) for frame in fastmm.Encoder().encode(message)]) is not None
        list(client.generate(text("1")))
        assert list(client.scheduler_stats) == [0]


def test_a_listener_that_fails_harms_nobody(caplog):
    with answered(dict, on_outputs=lambda message: 1 / 0) as client:
        assert len(list(client.generate(text("1")))) == 1
    assert "on_outputs failed" in caplog.text

"""The wire profile of the vLLM that is installed here: what that release itself writes and reads.

`make test-vllm` runs this with 0.33; with VLLM=0.31.0 or another release it is that one that judges.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import vllm
from peers import received
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, UtilityOutput
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

import fastmm
from fastmm import schema
from fastmm.schema.profile import profile_for

HERE = profile_for(vllm.__version__)


def our_request(**more: Any) -> fastmm.EngineCoreRequest:
    return fastmm.EngineCoreRequest("r", [1, 2, 3], arrival_time=1.5, priority=4, cache_salt="s", **more)


def their_request(**more: Any) -> EngineCoreRequest:
    fields = {"pooling_params": None, "sampling_params": None, "lora_request": None} | more
    return EngineCoreRequest(request_id="r", prompt_token_ids=[1, 2, 3], mm_features=None, arrival_time=1.5, cache_salt="s",
                             data_parallel_rank=None, priority=4, **fields)  # fmt: skip


PAIRS = {
    "plain": (our_request, their_request),
    "lora": (
        lambda: our_request(lora_request=fastmm.LoRARequest("a", 7, "/a", "base", True, True)),
        lambda: their_request(lora_request=LoRARequest("a", 7, "/a", base_model_name="base", load_inplace=True, is_3d_lora_weight=True)),
    ),
    "pooling": (
        lambda: our_request(pooling_params=fastmm.PoolingParams(task="embed", dimensions=8)),
        lambda: their_request(pooling_params=PoolingParams(task="embed", dimensions=8)),
    ),
    "sampling": (
        lambda: our_request(sampling_params=fastmm.SamplingParams(max_tokens=5, temperature=0.0, logprobs=2, stop_token_ids=[9])),
        lambda: their_request(sampling_params=SamplingParams(max_tokens=5, temperature=0.0, logprobs=2, stop_token_ids=[9])),
    ),
}  # fmt: skip


def test_every_class_has_the_fields_that_the_profile_says() -> None:
    for cls in (EngineCoreRequest, EngineCoreOutput, EngineCoreOutputs, PoolingParams, LoRARequest):
        assert HERE.layouts[cls.__name__] == cls.__struct_fields__
    assert HERE.layouts["LogprobsTensors"] == LogprobsTensors._fields
    names = set(SamplingParams.__struct_fields__)
    if HERE.name == "0.31":  # had another thing by this name
        names.discard("prompt_logprob_token_ids")
    assert set(HERE.layouts["SamplingParams"]) == names


@pytest.mark.parametrize("kind", PAIRS)
def test_a_request_is_byte_for_byte_that_of_this_release(kind: str) -> None:
    ours, theirs = (make() for make in PAIRS[kind])
    golden = [bytes(frame) for frame in MsgpackEncoder().encode(theirs)]
    assert [bytes(frame) for frame in fastmm.encode_request(ours, profile=HERE)] == golden
    # The release's own objects, too, with and without a profile.
    assert [bytes(frame) for frame in fastmm.encode_request(theirs, profile=HERE)] == golden
    assert [bytes(frame) for frame in fastmm.encode_request(theirs)] == golden


@pytest.mark.parametrize("kind", PAIRS)
def test_this_release_reads_it_and_we_read_this_release(kind: str) -> None:
    ours, theirs = (make() for make in PAIRS[kind])
    frames = fastmm.encode_request(ours, profile=HERE)
    decoded = MsgpackDecoder(EngineCoreRequest).decode(received(frames))
    assert MsgpackEncoder().encode(decoded) == MsgpackEncoder().encode(theirs)
    assert fastmm.decode_request(MsgpackEncoder().encode(theirs)) == ours


@pytest.mark.parametrize("engine", ["0.22", "0.25", "0.28", "0.31", "0.32", "0.33"])
@pytest.mark.parametrize("kind", PAIRS)
def test_its_objects_are_written_for_engines_of_other_releases(kind: str, engine: str) -> None:
    """As fastmm's own are, but that fields at the end which this release does not know are left to their defaults."""
    ours, theirs = (make() for make in PAIRS[kind])
    mine, other = (fastmm.encode_request(request, profile=engine) for request in (ours, theirs))
    assert len(other[0]) <= len(mine[0])
    assert fastmm.decode_request(other, profile=engine) == fastmm.decode_request(mine, profile=engine) == ours


def test_its_outputs_are_read_with_and_without_its_name() -> None:
    logprobs = LogprobsLists(np.arange(4).reshape(2, 2), np.ones((2, 2), np.float32), np.arange(2))
    tensors = LogprobsTensors(torch.ones(300, 2), torch.ones(300, 2), torch.ones(300))
    output = EngineCoreOutput("r", [7, 8], logprobs, tensors, torch.ones(500), FinishReason.STOP, trace_headers={"a": "b"},
                              kv_transfer_params={"k": 1}, num_nans_in_logits=3)  # fmt: skip
    message = EngineCoreOutputs(
        1, [output], SchedulerStats(num_running_reqs=5), 2.5, UtilityOutput(7, None, UtilityResult([1])), {"r"}
    )
    frames = MsgpackEncoder().encode(message)
    for profile in (None, HERE, HERE.name):
        got = fastmm.Decoder(schema.EngineCoreOutputs, profile=profile).decode(received(frames))
        (one,) = got.outputs
        assert (one.request_id, one.new_token_ids, one.finish_reason) == ("r", [7, 8], schema.FinishReason.STOP)
        assert (one.trace_headers, one.kv_transfer_params, one.num_nans_in_logits) == ({"a": "b"}, {"k": 1}, 3)
        assert one.new_logprobs.logprob_token_ids.tolist() == [[0, 1], [2, 3]]
        assert torch.equal(one.new_prompt_logprobs_tensors.logprobs, torch.ones(300, 2))
        assert torch.equal(one.pooling_output, torch.ones(500))
        assert got.scheduler_stats.num_running_reqs == 5
        assert got.utility_output.result.result == [1]
        assert got.finished_requests == {"r"}


def test_our_outputs_are_read_by_its_clients() -> None:
    ours = schema.EngineCoreOutputs(2, [schema.EngineCoreOutput("r", [7], finish_reason=schema.FinishReason.LENGTH,
                                                                trace_headers={"a": "b"}, num_nans_in_logits=1)], timestamp=1.0)  # fmt: skip
    got = MsgpackDecoder(EngineCoreOutputs).decode(received(fastmm.Encoder(profile=HERE).encode(ours)))
    assert (got.engine_index, got.outputs[0].finish_reason, got.outputs[0].trace_headers) == (
        2,
        FinishReason.LENGTH,
        {"a": "b"},
    )
    assert got.outputs[0].num_nans_in_logits == 1

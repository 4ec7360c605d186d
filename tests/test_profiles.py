"""The wire of each vLLM release from 0.22 to 0.33: its layouts written, read, and told apart."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from support.releases import MINORS, prefill_stats, release, stats

import fastmm
from fastmm import CompatError, DecodeError, EncodeError
from fastmm.errors import SchemaError
from fastmm.schema import (
    CUDAGraphStat,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    KVCacheEvictionEvent,
    LateChunkingParams,
    LogprobsTensors,
    LoRARequest,
    PoolingParams,
    PrefillStats,
    SamplingParams,
    SchedulerStats,
    UtilityOutput,
    UtilityResult,
)
from fastmm.schema import profile as profiles
from fastmm.schema.profile import NEWEST, OLDEST, PROFILES, profile_for, profile_of_ready

ALL = pytest.mark.parametrize("minor", MINORS)


def profile(minor: int) -> profiles.WireProfile:
    return PROFILES[minor - 22]


def full_request(minor: int) -> EngineCoreRequest:
    """Every field that the release has, set to something of its own."""
    request = EngineCoreRequest(
        "r",
        [1, 2, 3],
        sampling_params=None,
        pooling_params=PoolingParams(True, 8, 1, [5], "embed", True, False),
        arrival_time=1.5,
        lora_request=LoRARequest("adapter", 7, "/a", "base", True, True),
        cache_salt="salt",
        data_parallel_rank=1,
        prompt_is_token_ids=[True, False, True],
        client_index=2,
        current_wave=3,
        priority=4,
        trace_headers={"k": "v"},
        resumable=True,
        external_req_id="x",
        reasoning_ended=False,
        reasoning_parser_kwargs={"a": 1},
        abort_immediately=True,
    )
    if minor >= 28:
        request.session_id = "session"
    return request


# --- requests ---------------------------------------------------------------------------------------------------------


@ALL
def test_a_request_is_byte_for_byte_that_of_the_release(minor: int) -> None:
    their, request = release(minor), full_request(minor)
    values = {name: getattr(request, name) for name in their.request.__struct_fields__}
    pooling, lora = request.pooling_params, request.lora_request
    assert pooling is not None
    assert lora is not None
    values["pooling_params"] = their.pooling(
        **{name: getattr(pooling, name) for name in their.pooling.__struct_fields__ if name != "output_kind"}
    )
    values["lora_request"] = their.lora(
        **{name: getattr(lora, name) for name in their.lora.__struct_fields__ if name != "tensorizer_config_dict"}
    )
    golden = msgspec.msgpack.encode(their.request(**values))
    assert fastmm.encode_request(request, profile=profile(minor)) == [golden]
    assert fastmm.encode_request(request, profile=f"0.{minor}.0") == [golden]
    assert fastmm.Encoder(profile=f"0.{minor}").encode_many([request, request]) == [[golden], [golden]]


@ALL
def test_the_release_reads_what_was_meant(minor: int) -> None:
    their, request = release(minor), full_request(minor)
    decoded = msgspec.msgpack.decode(fastmm.encode_request(request, profile=profile(minor))[0], type=their.request)
    for name in their.request.__struct_fields__:
        if name not in ("lora_request", "pooling_params"):
            assert getattr(decoded, name) == getattr(request, name)
    lora = msgspec.convert(decoded.lora_request, their.lora)
    assert (lora.lora_name, lora.load_inplace, lora.is_3d_lora_weight) == ("adapter", True, True)
    assert msgspec.convert(decoded.pooling_params, their.pooling).task == "embed"


@ALL
def test_lengths_are_those_of_the_release(minor: int) -> None:
    their, wire = release(minor), profile(minor)
    assert wire.request_elements == len(their.request.__struct_fields__)
    assert wire.output_elements == len(their.output.__struct_fields__)
    assert wire.outputs_elements == len(their.outputs.__struct_fields__)
    assert wire.layouts["LoRARequest"] == their.lora.__struct_fields__
    assert wire.layouts["EngineCoreOutput"] == their.output.__struct_fields__


@ALL
def test_every_release_s_requests_are_read_with_and_without_its_name(minor: int) -> None:
    request = full_request(minor)
    frames = fastmm.encode_request(request, profile=profile(minor))
    assert fastmm.decode_request(frames) == request
    assert fastmm.decode_request(frames, profile=profile(minor)) == request


@ALL
def test_payloads_are_cast_in_place_as_ever(minor: int) -> None:
    values = np.arange(4096, dtype=np.float32).reshape(64, 64)
    address = values.ctypes.data
    elem = fastmm.MmFieldElem(values, fastmm.MmBatchedField())
    feature = fastmm.MmFeatureSpec({"pixel_values": elem}, "image", "i", fastmm.PlaceholderRange(0, 2), "h")
    request = EngineCoreRequest("r", [1, 2], [feature], arrival_time=1.0, prompt_embeds=np.ones((2, 300), np.float32))
    frames = fastmm.encode_request(request, dtype="bfloat16", profile=profile(minor))
    assert [memoryview(frame).nbytes for frame in frames[1:]] == [8192, 1200]
    assert np.frombuffer(frames[1], np.uint8).ctypes.data == address
    assert fastmm.decode_request(frames, tensors="wire") == fastmm.decode_request(
        fastmm.encode_request(request, dtype="bfloat16"), tensors="wire"
    )


def test_without_a_profile_a_request_is_the_newest() -> None:
    assert fastmm.encode_request(full_request(33)) == fastmm.encode_request(full_request(33), profile=NEWEST)


UNKNOWN_THERE = [
    (27, "session_id", lambda: EngineCoreRequest("r", [1], session_id="s")),
    (30, "kv_hints", lambda: EngineCoreRequest("r", [1], kv_hints=fastmm.schema.KvHintsEnvelope("1", "m", []))),
    (32, "late_chunking_params", lambda: PoolingParams(late_chunking_params=LateChunkingParams(16))),
    (26, "stream_interval", lambda: SamplingParams(stream_interval=2)),
    (28, "trace_decode_token_ids", lambda: SamplingParams(trace_decode_token_ids=[1])),
    (29, "watermarking", lambda: SamplingParams(watermarking=False)),
    (30, "prompt_logprob_start", lambda: SamplingParams(prompt_logprob_start=0)),
    (31, "prompt_logprob_token_ids", lambda: SamplingParams(prompt_logprob_token_ids=np.ones((2, 2), np.int64))),
    (25, "ec_transfer_params", lambda: EngineCoreOutput("r", [1], ec_transfer_params={})),
    (31, "weight_version", lambda: EngineCoreOutputs(weight_version="w")),
]


@pytest.mark.parametrize(("minor", "name", "make"), UNKNOWN_THERE)
def test_what_the_engine_s_release_lacks_is_refused_not_lost(minor: int, name: str, make: Any) -> None:
    value = make()
    with pytest.raises(EncodeError, match=rf"0\.{minor} has no {name}") as caught:
        fastmm.Encoder(profile=profile(minor)).encode([value])
    assert caught.value.path == f"$[0].{name}"
    fastmm.Encoder(profile=profile(minor + 1)).encode([value])


def test_a_refusal_leaves_the_request_uncast() -> None:
    embeds = np.ones((2, 300), np.float32)
    request = EngineCoreRequest(
        "r", [1], prompt_embeds=embeds, pooling_params=None, sampling_params=SamplingParams(), kv_hints=None
    )
    request.session_id = "s"
    with pytest.raises(EncodeError, match="session_id"):
        fastmm.encode_request(request, dtype="bfloat16", profile="0.22")
    assert request.prompt_embeds is embeds
    assert (embeds == 1).all()


@pytest.mark.parametrize("minor", [22, 27, 30, 31, 33])
def test_sampling_parameters_at_their_defaults_suit_every_release(minor: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, stop_token_ids=[7], logprobs=2)
    assert fastmm.Encoder(profile=profile(minor)).encode(params) == fastmm.Encoder().encode(params)


def test_a_subclass_of_a_request_is_one() -> None:
    class Mine(EngineCoreRequest):
        __slots__ = ()

    request = Mine("r", [1], arrival_time=1.0)
    assert len(msgpack.unpackb(fastmm.encode_request(request, profile="0.22")[0])) == 20


@pytest.mark.parametrize("front", [22, 28, 31, 33])
@pytest.mark.parametrize("engine", [22, 28, 31, 32, 33])
def test_objects_of_one_release_are_written_for_an_engine_of_another(front: int, engine: int) -> None:
    """A front end with vLLM in its process, beside an engine of another vLLM: fields go by name, not by place."""
    theirs, there = release(front, "vllm"), release(engine)
    lora = theirs.lora("adapter", 7, "/a", "base", load_inplace=True)
    request = theirs.request("r", [1, 2], None, None, theirs.pooling(task="embed"), 1.5, lora, None, None, priority=9)
    (main,) = fastmm.encode_request(request, profile=profile(engine))
    # Trailing fields that the front end's class lacks are left off, and default in the engine.
    assert len(msgpack.unpackb(main)) == min(len(theirs.request.__struct_fields__), len(there.request.__struct_fields__))
    decoded = msgspec.msgpack.decode(main, type=there.request)
    assert (decoded.request_id, decoded.prompt_token_ids, decoded.priority) == ("r", [1, 2], 9)
    read = msgspec.convert(decoded.lora_request, there.lora)
    assert (read.lora_name, read.base_model_name, read.load_inplace, read.is_3d_lora_weight) == ("adapter", "base", True, False)
    assert msgspec.convert(decoded.pooling_params, there.pooling).task == "embed"


def test_a_foreign_object_s_field_that_the_engine_lacks_is_refused_too() -> None:
    theirs = release(31, "vllm")
    lora = theirs.lora("adapter", 7, "/a", tensorizer_config_dict={"k": 1})
    with pytest.raises(EncodeError, match="tensorizer_config_dict"):
        fastmm.Encoder(profile="0.32").encode(lora)
    assert len(msgpack.unpackb(fastmm.Encoder(profile="0.31").encode(lora)[0])) == 7


def test_classes_of_the_same_name_that_are_nobody_s_stay_as_they_are() -> None:
    own = release(22).request("r", [1], None, None, None, 1.0, None, None, None)
    assert fastmm.Encoder(profile="0.33").encode(own) == fastmm.Encoder().encode(own)


# --- outputs ----------------------------------------------------------------------------------------------------------


def their_outputs(minor: int) -> Any:
    """A message of outputs as an engine of the release builds it."""
    their = release(minor)
    array = ["<i8", [1, 2], msgpack_raw(np.array([[3, 4]]))]
    logprobs = [
        array,
        ["<f4", [1, 2], msgpack_raw(np.array([[0.5, 0.25]], np.float32))],
        ["<i8", [1], msgpack_raw(np.array([1]))],
        None,
    ]
    tensor = ["float32", [2], msgpack_raw(np.ones(2, np.float32))]
    output = their.output(
        "r",
        [11, 12],
        logprobs,
        their.logprobs_tensors(tensor, tensor, tensor),
        tensor,
        1,
        "stop",
        [{"type": 1, "timestamp": 0.5}],
        {"kv": 1},
        trace_headers={"h": "v"},
        prefill_stats=prefill_stats(minor),
        routed_experts=array,
        num_nans_in_logits=3,
    )
    if minor >= 26:
        output.ec_transfer_params = {"ec": 2}
    if minor >= 28:
        output.mm_cache_miss_hashes = ["miss"]
        output.new_sampling_mask = [array, array, [1, 2]]
    if minor >= 29:
        output.spec_decode_metrics = {"num_spec_tokens": 1, "histogram": [2], "num_draft_tokens": 3,
                                      "per_step_accepted": [4], "per_step_drafted": [5]}  # fmt: skip
    if minor >= 31:
        output.prompt_token_id_logprobs = tensor
    if minor >= 33:
        output.error = {"code": "c", "message": "m", "retryable": True}
    outputs = their.outputs(3, [output], stats(minor), 2.5, [7, None, [None, {"v": 1}]], {"r"}, 4, 5)
    if minor >= 32:
        outputs.weight_version = "w"
    return outputs


def msgpack_raw(array: np.ndarray[Any, Any]) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(3, array.tobytes())


@ALL
@pytest.mark.parametrize("named", [False, True])
def test_every_release_s_outputs_are_read_with_and_without_its_name(minor: int, named: bool) -> None:
    main = msgspec.msgpack.encode(their_outputs(minor))
    decoded = fastmm.Decoder(EngineCoreOutputs, tensors="numpy", profile=profile(minor) if named else None).decode([main])
    assert (decoded.engine_index, decoded.timestamp, decoded.finished_requests) == (3, 2.5, {"r"})
    assert (decoded.wave_complete, decoded.start_wave) == (4, 5)
    assert decoded.weight_version == ("w" if minor >= 32 else None)
    assert decoded.utility_output == UtilityOutput(7, None, UtilityResult({"v": 1}))
    (output,) = decoded.outputs
    assert (output.request_id, output.new_token_ids) == ("r", [11, 12])
    assert output.new_logprobs.logprob_token_ids.tolist() == [[3, 4]]
    assert output.new_logprobs.logprobs.tolist() == [[0.5, 0.25]]
    assert type(output.new_prompt_logprobs_tensors) is LogprobsTensors
    assert output.new_prompt_logprobs_tensors.logprobs.tolist() == [1, 1]
    assert output.pooling_output.tolist() == [1, 1]
    assert (output.finish_reason, output.stop_reason, output.finished) == (FinishReason.LENGTH, "stop", True)
    assert [(event.type, event.timestamp) for event in output.events] == [(1, 0.5)]
    assert output.kv_transfer_params == {"kv": 1}
    assert output.ec_transfer_params == ({"ec": 2} if minor >= 26 else None)
    assert output.trace_headers == {"h": "v"}
    assert output.prefill_stats == PrefillStats(1, 2, 3, 4, 5, 6 if minor >= 26 else 0)
    assert output.routed_experts.tolist() == [[3, 4]]
    assert output.num_nans_in_logits == 3
    assert output.mm_cache_miss_hashes == (["miss"] if minor >= 28 else None)
    assert (output.new_sampling_mask is not None) == (minor >= 28)
    assert (output.spec_decode_metrics is not None) == (minor >= 29)
    assert (output.prompt_token_id_logprobs is not None) == (minor >= 31)
    assert (output.error is not None) == (minor >= 33)
    scheduler = decoded.scheduler_stats
    assert type(scheduler) is SchedulerStats
    assert (scheduler.num_running_reqs, scheduler.kv_cache_usage, scheduler.waiting_lora_adapters) == (1, 0.5, {"a": 1})
    assert scheduler.prefix_cache_stats.preempted_hits == 6
    assert scheduler.kv_cache_eviction_events == [KVCacheEvictionEvent(1.0, 2.0, (1.5,))]
    assert scheduler.cudagraph_stats == CUDAGraphStat(1, 2, 3, "FULL")
    assert scheduler.spec_decoding_stats.num_draft_tokens_per_pos == ([6] if minor >= 24 else [])
    assert (scheduler.iteration_details is not None) == (minor >= 26)


@ALL
def test_outputs_of_ours_are_read_by_a_client_of_the_release(minor: int) -> None:
    their = release(minor)
    ours = EngineCoreOutputs(
        1,
        [EngineCoreOutput("r", [5], finish_reason=FinishReason.STOP, kv_transfer_params={"k": 1}, trace_headers={"a": "b"},
                          prefill_stats=PrefillStats(4), num_nans_in_logits=2)],
        timestamp=1.0,
        finished_requests={"r"},
    )  # fmt: skip
    (main,) = fastmm.Encoder(profile=profile(minor)).encode(ours)
    outputs = msgspec.msgpack.decode(main, type=their.outputs)
    assert len(msgpack.unpackb(main)) == profile(minor).outputs_elements
    assert len(outputs.outputs[0]) == profile(minor).output_elements
    output = msgspec.convert(outputs.outputs[0], their.output)
    assert (output.request_id, output.finish_reason, output.kv_transfer_params) == ("r", 0, {"k": 1})
    assert (output.trace_headers, output.num_nans_in_logits) == ({"a": "b"}, 2)
    assert fastmm.Decoder(EngineCoreOutputs).decode([main]) == ours


def test_a_newer_sender_s_fields_at_the_end_are_skipped() -> None:
    output = msgpack.unpackb(fastmm.Encoder().encode(EngineCoreOutput("r", [1], num_nans_in_logits=1))[0])
    main = msgpack.packb([0, [[*output, {"new": [1]}, "more"]], None, 1.0, None, None, None, None, None, "newer"])
    decoded = fastmm.Decoder(EngineCoreOutputs).decode([main])
    assert decoded.outputs == [EngineCoreOutput("r", [1], num_nans_in_logits=1)]


def test_a_profile_settles_what_a_length_cannot() -> None:
    """13 elements are the whole output of 0.22; in a sender of 0.26 or newer they would be its first 13."""
    cut = ["r", [1], None, None, None, None, None, None, None, {"ec": 1}, {"h": "v"}, None, None]
    assert fastmm.Decoder(EngineCoreOutput, profile="0.33").decode([msgpack.packb(cut)]).ec_transfer_params == {"ec": 1}
    with pytest.raises(DecodeError, match="trace_headers"):
        fastmm.Decoder(EngineCoreOutput).decode([msgpack.packb(cut)])
    with pytest.raises(DecodeError, match="trace_headers"):
        fastmm.Decoder(EngineCoreOutput, profile="0.25").decode([msgpack.packb(cut)])


@pytest.mark.parametrize("length", [2, 5, 9, 10, 12])
def test_a_shorter_output_takes_its_defaults_in_every_release(length: int) -> None:
    whole = ["r", [1], None, None, None, 1, None, None, {"k": 1}, {"h": "v"}, None, None]
    for name in ("0.22", "0.25"):
        decoded = fastmm.Decoder(EngineCoreOutput, profile=name).decode([msgpack.packb(whole[:length])])
        assert decoded.trace_headers == ({"h": "v"} if length > 9 else None)
        assert decoded.ec_transfer_params is None
        assert decoded.num_nans_in_logits == 0


@pytest.mark.parametrize("cut", range(1, 60, 3))
def test_an_older_output_cut_short_is_an_error_with_a_path(cut: int) -> None:
    main = msgspec.msgpack.encode(their_outputs(22))
    with pytest.raises(DecodeError):
        fastmm.Decoder(EngineCoreOutputs, profile="0.22").decode([main[:-cut]])


def test_an_error_in_an_older_output_names_the_field() -> None:
    output = ["r", [1], None, None, None, None, None, None, None, {"h": 5}, None, None, 0]
    with pytest.raises(DecodeError) as caught:
        fastmm.Decoder(EngineCoreOutput).decode([msgpack.packb(output)])
    assert caught.value.path == "$.trace_headers['h']"


def test_an_older_lora_request_is_checked_like_one_of_today() -> None:
    request = ["r", [1], None, None, None, 1.0, ["a", 0, "/a", None, None, False, False], None, None]
    with pytest.raises(DecodeError, match="lora_int_id"):
        fastmm.decode_request(msgpack.packb(request))


def test_ids_whose_log_probabilities_0_31_was_asked_for_come_as_the_list_they_are() -> None:
    params = {"prompt_logprob_token_ids": [4, 5], "prompt_logprob_start": 1}
    request = msgpack.packb(["r", [1], None, params, None, 1.0, None, None, None])
    sampling = fastmm.decode_request(request, profile="0.31").sampling_params
    assert sampling is not None
    assert sampling.prompt_logprob_token_ids == [4, 5]


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("0.22.0", "0.22"),
        ("0.22", "0.22"),
        ("0.25.1", "0.25"),
        ("v0.28.0", "0.28"),
        ("0.28.0.post2", "0.28"),
        ("0.30.0rc3", "0.30"),
        ("0.32.0+cpu", "0.32"),
        ("0.33.0", "0.33"),
        ("0.33.1rc1.dev12", "0.33"),
        ("0.33.1rc1.dev12+g0123abc.d20260101", "0.33"),
        (" 0.31.0\n", "0.31"),
    ],
)
def test_a_version_names_its_wire_without_a_warning(version: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert profile_for(version).name == name


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "_warned", set())


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("version", ["0.34.0", "0.100.0", "1.0.0", "dev", "0.1.dev1+g0123abc", "", "latest", "9" * 5000 + ".1"])
def test_a_version_that_is_not_known_is_the_newest_and_warned_of_once(version: str) -> None:
    with pytest.warns(RuntimeWarning, match="taken to be those of 0.33"):
        assert profile_for(version) is NEWEST
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert profile_for(version) is NEWEST


@pytest.mark.usefixtures("fresh")
def test_many_threads_are_warned_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=profile_for, args=("0.99.0",)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert len(caught) == 1


@pytest.mark.parametrize("version", ["0.21.2", "0.18.0", "0.9.0.1", "0.0.1", "0.6.6.post1"])
def test_a_version_older_than_0_22_is_refused(version: str) -> None:
    with pytest.raises(CompatError, match=r"expected 0\.22 or newer"):
        profile_for(version)
    with pytest.raises(CompatError):
        fastmm.Encoder(profile=version)
    with pytest.raises(CompatError):
        fastmm.Decoder(EngineCoreOutputs, profile=version)


def test_an_engine_that_does_not_say_its_version_is_0_22_or_not_vllm() -> None:
    assert profile_of_ready({"max_model_len": 1, "num_gpu_blocks": 1, "dp_stats_address": None, "dtype": "bfloat16"}) is OLDEST
    assert profile_of_ready({}) is NEWEST
    assert profile_of_ready({"dp_stats_address": None, "vllm_version": "0.28.1"}).name == "0.28"
    assert profile_for(None) is NEWEST


@pytest.mark.parametrize("option", [33, b"0.33", 0.33, ["0.33"]])
def test_what_names_no_profile_is_refused(option: Any) -> None:
    for make in (fastmm.Encoder, lambda profile: fastmm.Decoder(EngineCoreOutputs, profile=profile)):
        with pytest.raises(SchemaError):
            make(profile=option)


def test_profiles_are_values() -> None:
    for wire in PROFILES:
        assert copy.deepcopy(wire) is wire
        assert PROFILES[wire.index] is wire
    with pytest.raises(AttributeError):
        NEWEST.name = "0.34"  # type: ignore[misc]

"""The positional classes of vLLM 0.22 to 0.33 as each release declares them: msgspec structs to write and read with.

Names, order, defaults and the kinds that matter for the layout, written down release by release from the sources of the
wheels, and on purpose not derived from `fastmm.schema.profile`, which they are there to judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

MINORS = range(22, 34)

_REQUEST = [
    ("request_id", str),
    ("prompt_token_ids", list[int] | None),
    ("mm_features", list[Any] | None),
    ("sampling_params", Any),
    ("pooling_params", Any),
    ("arrival_time", float),
    ("lora_request", Any),
    ("cache_salt", str | None),
    ("data_parallel_rank", int | None),
    ("prompt_embeds", Any, None),
    ("prompt_is_token_ids", list[bool] | None, None),
    ("client_index", int, 0),
    ("current_wave", int, 0),
    ("priority", int, 0),
    ("trace_headers", Mapping[str, str] | None, None),
    ("resumable", bool, False),
    ("external_req_id", str | None, None),
    ("reasoning_ended", bool | None, None),
    ("reasoning_parser_kwargs", dict[str, Any] | None, None),
    ("abort_immediately", bool, False),
]
_SESSION = ("session_id", str | None, None)
_HINTS = ("kv_hints", Any, None)

_OUTPUT_22 = [
    ("request_id", str),
    ("new_token_ids", list[int]),
    ("new_logprobs", Any, None),
    ("new_prompt_logprobs_tensors", Any, None),
    ("pooling_output", Any, None),
    ("finish_reason", int | None, None),
    ("stop_reason", int | str | None, None),
    ("events", list[Any] | None, None),
    ("kv_transfer_params", dict[str, Any] | None, None),
    ("trace_headers", Mapping[str, str] | None, None),
    ("prefill_stats", Any, None),
    ("routed_experts", Any, None),
    ("num_nans_in_logits", int, 0),
]
_OUTPUT_26 = [*_OUTPUT_22[:9], ("ec_transfer_params", dict[str, Any] | None, None), *_OUTPUT_22[9:]]
_OUTPUT_28 = [*_OUTPUT_26, ("mm_cache_miss_hashes", list[str] | None, None), ("new_sampling_mask", Any, None)]
_OUTPUT_29 = [*_OUTPUT_28, ("spec_decode_metrics", Any, None)]
_OUTPUT_31 = [*_OUTPUT_29, ("prompt_token_id_logprobs", Any, None)]
_OUTPUT_33 = [*_OUTPUT_31, ("error", Any, None)]

_OUTPUTS_22 = [
    ("engine_index", int, 0),
    ("outputs", list[Any], []),
    ("scheduler_stats", Any, None),
    ("timestamp", float, 0.0),
    ("utility_output", Any, None),
    ("finished_requests", set[str] | None, None),
    ("wave_complete", int | None, None),
    ("start_wave", int | None, None),
]
_OUTPUTS_32 = [*_OUTPUTS_22, ("weight_version", str | None, None)]

_POOLING_22 = [
    ("use_activation", bool | None, None),
    ("dimensions", int | None, None),
    ("step_tag_id", int | None, None),
    ("returned_token_ids", list[int] | None, None),
    ("task", str | None, None),
    ("requires_token_ids", bool, False),
    ("skip_reading_prefix_cache", bool | None, None),
    ("late_interaction_params", Any, None),
    ("extra_kwargs", dict[str, Any] | None, None),
    ("output_kind", int, 2),
]
_POOLING_33 = [*_POOLING_22, ("late_chunking_params", Any, None)]

_LORA_22 = [
    ("lora_name", str),
    ("lora_int_id", int),
    ("lora_path", str, ""),
    ("base_model_name", str | None, None),
    ("tensorizer_config_dict", dict[str, Any] | None, None),
    ("load_inplace", bool, False),
    ("is_3d_lora_weight", bool, False),
]
_LORA_32 = [*_LORA_22[:4], *_LORA_22[5:]]


def _at(minor: int, table: dict[int, list[Any]]) -> list[Any]:
    return table[max(since for since in table if since <= minor)]


class LogprobsTensors22(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any
    selected_token_ranks: Any
    cu_num_generated_tokens: list[int] | None = None


class LogprobsTensors29(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any
    selected_token_ranks: Any
    cu_num_generated_tokens: list[int] | None = None
    cu_num_generated_tokens_tensor: Any = None


@cache
def release(minor: int, module: str = "tests") -> SimpleNamespace:
    """The classes of vLLM 0.`minor`: `request`, `output`, `outputs`, `pooling`, `lora`, `sampling_keys`...

    With ``module="vllm"`` they pass for vLLM's own.
    """

    def struct(name: str, table: dict[int, list[Any]]) -> type[msgspec.Struct]:
        return msgspec.defstruct(name, _at(minor, table), array_like=True, omit_defaults=True, module=module)

    return SimpleNamespace(
        request=struct(
            "EngineCoreRequest",
            {22: _REQUEST, 28: [*_REQUEST, _SESSION], 31: [*_REQUEST, _SESSION, _HINTS]},
        ),
        output=struct(
            "EngineCoreOutput",
            {22: _OUTPUT_22, 26: _OUTPUT_26, 28: _OUTPUT_28, 29: _OUTPUT_29, 31: _OUTPUT_31, 33: _OUTPUT_33},
        ),
        outputs=struct("EngineCoreOutputs", {22: _OUTPUTS_22, 32: _OUTPUTS_32}),
        pooling=struct("PoolingParams", {22: _POOLING_22, 33: _POOLING_33}),
        lora=struct("LoRARequest", {22: _LORA_22, 32: _LORA_32}),
        logprobs_tensors=LogprobsTensors29 if minor >= 29 else LogprobsTensors22,
    )


# What a scheduler's statistics are in each release: a map, so only names.
_STATS_22 = {
    "num_running_reqs": 1,
    "num_waiting_reqs": 2,
    "num_skipped_waiting_reqs": 3,
    "step_counter": 4,
    "current_wave": 5,
    "kv_cache_usage": 0.5,
    "prefix_cache_stats": {"reset": False, "requests": 1, "queries": 2, "hits": 3,
                           "preempted_requests": 4, "preempted_queries": 5, "preempted_hits": 6},
    "connector_prefix_cache_stats": None,
    "kv_cache_eviction_events": [{"lifetime_seconds": 1.0, "idle_seconds": 2.0, "reuse_gaps_seconds": [1.5]}],
    "spec_decoding_stats": {"num_spec_tokens": 1, "num_drafts": 2, "num_draft_tokens": 3, "num_accepted_tokens": 4,
                            "num_accepted_tokens_per_pos": [5]},
    "kv_connector_stats": None,
    "waiting_lora_adapters": {"a": 1},
    "running_lora_adapters": {},
    "cudagraph_stats": {"num_unpadded_tokens": 1, "num_padded_tokens": 2, "num_paddings": 3, "runtime_mode": "FULL"},
    "perf_stats": None,
}  # fmt: skip
_PREFILL_22 = {"num_prompt_tokens": 1, "num_computed_tokens": 2, "num_cached_tokens": 3, "num_local_cached_tokens": 4,
               "num_external_cached_tokens": 5}  # fmt: skip


def stats(minor: int) -> dict[str, Any]:
    """`SchedulerStats` of a release, as its map."""
    found = dict(_STATS_22)
    if minor >= 24:
        found["spec_decoding_stats"] = found["spec_decoding_stats"] | {"num_draft_tokens_per_pos": [6]}
    if minor >= 26:
        found["iteration_details"] = {"iteration_index": 1, "num_ctx_requests": 2, "num_ctx_tokens": 3,
                                      "num_generation_requests": 4, "num_generation_tokens": 5, "elapsed_ms": 6.0,
                                      "num_encoder_inputs": 7, "num_encoder_output_tokens": 8, "is_dummy": True}  # fmt: skip
    if minor >= 31:
        found["ec_connector_stats"] = {"k": 1}
    if minor >= 32:
        found["num_kv_fetch_reqs_by_stage"] = {"s": 1}
        found["prefix_cache_stats"] = found["prefix_cache_stats"] | {"hits_by_source": {"local": 1}}
    return found


def prefill_stats(minor: int) -> dict[str, int]:
    """`PrefillStats` of a release, as its map."""
    return _PREFILL_22 | ({"num_cache_creation_tokens": 6} if minor >= 26 else {})

"""vLLM's own classes as a family (see tests/support/families.py).

Written for the newest release; with an older one, fields and classes that it lacks are left out.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import vllm
from support.families import numpy_array, torch_tensor
from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.lora.request import LoRARequest
from vllm.multimodal import inputs
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1 import engine
from vllm.v1.metrics import perf, stats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import UtilityResult
from vllm.v1.spec_decode.metrics import SpecDecodingStats

OLDER = tuple(map(int, vllm.__version__.split(".")[:2])) < (0, 33)


def _fitting(make: Callable[..., Any]) -> Callable[..., Any]:
    """The class; of an older release, called with the fields that it has."""
    if not OLDER:
        return make
    known = set(inspect.signature(make).parameters)

    def made(*values: Any, **fields: Any) -> Any:
        return make(*values, **{name: value for name, value in fields.items() if name in known})

    return made


def _maybe(module: str, name: str) -> Callable[..., Any]:
    """A class that older releases do not have: None stands for what it would make."""
    try:
        found: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    except ImportError:
        found = None
    return found if found is not None else lambda *values, **fields: None


def _request(request_id: str, prompt_token_ids: Any, **fields: Any) -> engine.EngineCoreRequest:
    required = (
        *("mm_features", "sampling_params", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"),
        "arrival_time",
    )
    return _fitting(engine.EngineCoreRequest)(request_id, prompt_token_ids, **(dict.fromkeys(required) | fields))


def _sampling(**fields: Any) -> SamplingParams:
    if "ndarray" not in str(SamplingParams.__annotations__.get("prompt_logprob_token_ids")):
        fields.pop("prompt_logprob_token_ids", None)  # a list of int in 0.31
    return _fitting(SamplingParams)(**fields)


FAMILY = SimpleNamespace(
    name="vllm",
    tensor=torch_tensor,
    array=numpy_array,
    request=_request,
    sampling=_sampling if OLDER else SamplingParams,
    structured=_fitting(StructuredOutputsParams),
    repetition=RepetitionDetectionParams,
    output_kind=RequestOutputKind,
    pooling=_fitting(PoolingParams),
    late_interaction=_maybe("vllm.pooling_params", "LateInteractionParams"),
    late_chunking=_maybe("vllm.pooling_params", "LateChunkingParams"),
    lora=_fitting(LoRARequest),
    feature=inputs.MultiModalFeatureSpec,
    placeholder=inputs.PlaceholderRange,
    item=inputs.MultiModalKwargsItem,
    elem=inputs.MultiModalFieldElem,
    batched=inputs.MultiModalBatchedField,
    flat=inputs.MultiModalFlatField,
    shared=inputs.MultiModalSharedField,
    kv_hints=_maybe("vllm.v1.kv_hints", "KvHintsEnvelope"),
    kv_action=_maybe("vllm.v1.kv_hints", "KvHintAction"),
    outputs=_fitting(engine.EngineCoreOutputs),
    output=_fitting(engine.EngineCoreOutput),
    finish_reason=engine.FinishReason,
    event=engine.EngineCoreEvent,
    event_type=engine.EngineCoreEventType,
    utility_output=engine.UtilityOutput,
    utility_result=UtilityResult,
    logprobs_lists=LogprobsLists,
    logprobs_tensors=LogprobsTensors,
    sampling_mask=_maybe("vllm.v1.outputs", "SamplingMaskLists"),
    error=_maybe("vllm.outputs", "RequestError"),
    scheduler_stats=_fitting(stats.SchedulerStats),
    iteration_details=_maybe("vllm.v1.metrics.stats", "SchedulerIterationDetails"),
    prefix_cache_stats=stats.PrefixCacheStats,
    eviction=stats.KVCacheEvictionEvent,
    spec_decoding=SpecDecodingStats,
    cudagraph=CUDAGraphStat,
    perf=perf.PerfStats,
    debug_perf=perf.DebugPerfStats,
    prefill_stats=stats.PrefillStats,
    spec_decode_metrics=_maybe("vllm.v1.metrics.stats", "RequestSpecDecodeMetrics"),
)

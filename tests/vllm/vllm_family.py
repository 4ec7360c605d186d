"""vLLM's own classes as a family (see tests/support/families.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from support.families import numpy_array, torch_tensor
from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.lora.request import LoRARequest
from vllm.multimodal import inputs
from vllm.outputs import RequestError
from vllm.pooling_params import LateChunkingParams, LateInteractionParams, PoolingParams
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1 import engine
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.metrics import perf, stats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, SamplingMaskLists
from vllm.v1.serial_utils import UtilityResult
from vllm.v1.spec_decode.metrics import SpecDecodingStats


def _request(request_id: str, prompt_token_ids: Any, **fields: Any) -> engine.EngineCoreRequest:
    required = (
        *("mm_features", "sampling_params", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"),
        "arrival_time",
    )
    return engine.EngineCoreRequest(request_id, prompt_token_ids, **(dict.fromkeys(required) | fields))


FAMILY = SimpleNamespace(
    name="vllm",
    tensor=torch_tensor,
    array=numpy_array,
    request=_request,
    sampling=SamplingParams,
    structured=StructuredOutputsParams,
    repetition=RepetitionDetectionParams,
    output_kind=RequestOutputKind,
    pooling=PoolingParams,
    late_interaction=LateInteractionParams,
    late_chunking=LateChunkingParams,
    lora=LoRARequest,
    feature=inputs.MultiModalFeatureSpec,
    placeholder=inputs.PlaceholderRange,
    item=inputs.MultiModalKwargsItem,
    elem=inputs.MultiModalFieldElem,
    batched=inputs.MultiModalBatchedField,
    flat=inputs.MultiModalFlatField,
    shared=inputs.MultiModalSharedField,
    kv_hints=KvHintsEnvelope,
    kv_action=KvHintAction,
    outputs=engine.EngineCoreOutputs,
    output=engine.EngineCoreOutput,
    finish_reason=engine.FinishReason,
    event=engine.EngineCoreEvent,
    event_type=engine.EngineCoreEventType,
    utility_output=engine.UtilityOutput,
    utility_result=UtilityResult,
    logprobs_lists=LogprobsLists,
    logprobs_tensors=LogprobsTensors,
    sampling_mask=SamplingMaskLists,
    error=RequestError,
    scheduler_stats=stats.SchedulerStats,
    iteration_details=stats.SchedulerIterationDetails,
    prefix_cache_stats=stats.PrefixCacheStats,
    eviction=stats.KVCacheEvictionEvent,
    spec_decoding=SpecDecodingStats,
    cudagraph=CUDAGraphStat,
    perf=perf.PerfStats,
    debug_perf=perf.DebugPerfStats,
    prefill_stats=stats.PrefillStats,
    spec_decode_metrics=stats.RequestSpecDecodeMetrics,
)

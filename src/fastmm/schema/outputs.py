"""What the engine sends back."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ._record import Record, TensorLike
from .stats import PrefillStats, RequestSpecDecodeMetrics, SchedulerStats


class FinishReason(enum.IntEnum):
    """Why a request ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class EngineCoreEventType(enum.IntEnum):
    """What happened to a request in the engine."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


@dataclass(slots=True, eq=False)
class EngineCoreEvent(Record):
    """An event of one request; `timestamp` in seconds of the engine's monotonic clock."""

    __wire__: ClassVar[str] = "map"

    type: EngineCoreEventType
    timestamp: float


@dataclass(slots=True, eq=False)
class LogprobsLists(Record):
    """Log probabilities of the sampled tokens: arrays (tokens, k + 1), (tokens, k + 1) and (tokens,)."""

    __wire__: ClassVar[str] = "array"

    logprob_token_ids: TensorLike
    logprobs: TensorLike
    sampled_token_ranks: TensorLike
    cu_num_generated_tokens: list[int] | None = None


@dataclass(slots=True, eq=False)
class LogprobsTensors(Record):
    """Log probabilities of the prompt's tokens: tensors (tokens, k + 1), (tokens, k + 1) and (tokens,)."""

    __wire__: ClassVar[str] = "array"

    logprob_token_ids: TensorLike
    logprobs: TensorLike
    selected_token_ranks: TensorLike
    cu_num_generated_tokens: list[int] | None = None
    cu_num_generated_tokens_tensor: TensorLike | None = None


@dataclass(slots=True, eq=False)
class SamplingMaskLists(Record):
    """Which tokens stayed after top-k, top-p and min-p, in compressed rows."""

    __wire__: ClassVar[str] = "array"

    token_ids: TensorLike
    offsets: TensorLike | None = None
    cu_num_generated_tokens: list[int] | None = None


@dataclass(slots=True, eq=False)
class RequestError(Record):
    """Why one request failed while the engine lives on."""

    __wire__: ClassVar[str] = "map"

    code: str
    message: str
    retryable: bool = False


@dataclass(slots=True, eq=False)
class EngineCoreOutput(Record):
    """One request's share of a step. Fields and defaults are those of vLLM 0.33, in wire order."""

    __wire__: ClassVar[str] = "array"

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsTensors | None = None
    pooling_output: TensorLike | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: Mapping[str, str] | None = None
    prefill_stats: PrefillStats | None = None
    routed_experts: TensorLike | None = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: SamplingMaskLists | None = None
    spec_decode_metrics: RequestSpecDecodeMetrics | None = None
    prompt_token_id_logprobs: TensorLike | None = None
    error: RequestError | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


@dataclass(slots=True, eq=False)
class UtilityResult(Record):
    """The value a utility call returned; `type_info` is not None only where vLLM was started to allow pickles."""

    __wire__: ClassVar[str] = "array"

    type_info: Any = field(default=None, kw_only=True)
    result: Any = None


@dataclass(slots=True, eq=False)
class UtilityOutput(Record):
    """The answer to a utility call: a failure message or a result."""

    __wire__: ClassVar[str] = "array"

    call_id: int
    failure_message: str | None = None
    result: UtilityResult | None = None


@dataclass(slots=True, eq=False)
class EngineCoreOutputs(Record):
    """One message of the engine. A `timestamp` of 0.0 becomes the monotonic clock's now, in seconds."""

    __wire__: ClassVar[str] = "array"

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = time.monotonic()

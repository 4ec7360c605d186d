"""A request to the engine, and the types of message a client sends."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ._record import Record, TensorLike
from .multimodal import MmFeatureSpec
from .params import LoRARequest, PoolingParams, SamplingParams


class EngineCoreRequestType(enum.Enum):
    """The one-byte frame before the main frame of a client's message."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"


@dataclass(slots=True, eq=False)
class KvHintAction(Record):
    """One hint about the KV cache; `payload` holds plain values only."""

    __wire__: ClassVar[str] = "map"

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


@dataclass(slots=True, eq=False)
class KvHintsEnvelope(Record):
    """Hints about the KV cache that an orchestrator attached to a request."""

    __wire__: ClassVar[str] = "map"

    protocol_version: str
    message_id: str
    actions: list[KvHintAction]


@dataclass(slots=True, eq=False)
class EngineCoreRequest(Record):
    """What the engine needs to run one request. Fields and defaults are those of vLLM 0.33, in wire order.

    Only `request_id` and `prompt_token_ids` must be given: what vLLM requires beside them defaults to None, and
    `arrival_time` (seconds since the epoch) to now.
    """

    __wire__: ClassVar[str] = "array"

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[MmFeatureSpec] | None = None
    sampling_params: SamplingParams | None = None
    pooling_params: PoolingParams | None = None
    arrival_time: float = field(default_factory=time.time)
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: TensorLike | None = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: KvHintsEnvelope | None = None

"""Sampling, pooling and adapter parameters, as vLLM 0.33 has them on the wire."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import SchemaError, SchemaValueError
from ._record import Record, TensorLike

# A temperature between zero and this is raised to it, below the smaller one it means greedy; both as the engine does.
_MIN_TEMPERATURE = 1e-2
_GREEDY_TEMPERATURE = 1e-5

# What the engine's decoder takes; it is a closed set there.
_POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify", "plugin", "embed&token_classify")


class RequestOutputKind(enum.Enum):
    """What an output holds: all tokens so far, the new ones only, or all of them once at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True, eq=False)
class StructuredOutputsParams(Record):
    """A constraint on the output; exactly one of the first five and `structural_tag` must be set."""

    __wire__: ClassVar[str] = "map"

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    # Set by the front end once it has chosen a backend.
    _backend: str | None = field(default=None, init=False)
    _backend_was_auto: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise SchemaValueError(
                f"exactly one of {', '.join(names)} must be set, not {', '.join(given) or 'none'}",
                path="StructuredOutputsParams",
            )


@dataclass(slots=True, eq=False)
class RepetitionDetectionParams(Record):
    """Ends generation when a pattern of tokens repeats; a `max_pattern_size` of 0 switches it off."""

    __wire__: ClassVar[str] = "map"

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_pattern_size <= self.max_pattern_size:
            raise SchemaValueError(
                f"0 <= min_pattern_size <= max_pattern_size must hold, got {self.min_pattern_size} and {self.max_pattern_size}",
                path="RepetitionDetectionParams",
            )
        if self.max_pattern_size > 0 and self.min_count < 2:
            raise SchemaValueError(f"must be at least 2, got {self.min_count}", path="RepetitionDetectionParams.min_count")


def _refuse(name: str, rule: str, value: object) -> SchemaValueError:
    return SchemaValueError(f"must be {rule}, got {value!r}", path=f"SamplingParams.{name}")


@dataclass(slots=True, eq=False)
class SamplingParams(Record):
    """How the engine picks tokens. Fields, defaults and normalisation are those of vLLM 0.33.

    Out-of-range values are a `SchemaValueError` that names the field. A field that still holds its very default object is
    left out on the wire. Assigning to a field later is allowed and not checked again.
    """

    __wire__: ClassVar[str] = "map-omit-defaults"

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: bool | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: TensorLike | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    _eos_token_id: int | None = None
    _all_stop_token_ids: set[int] = field(default_factory=set)
    _watermarking_skipped: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    _bad_words_token_ids: list[list[int]] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        if 0 < self.temperature < _MIN_TEMPERATURE:
            self.temperature = _MIN_TEMPERATURE
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        # Doubles are dropped, the order of first appearance kept.
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or ()))
        self.bad_words = list(dict.fromkeys(self.bad_words or ()))
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        if self.stop and not self.include_stop_str_in_output:
            self.output_text_buffer_length = max(map(len, self.stop)) - 1
        self._check()
        if self.temperature < _GREEDY_TEMPERATURE:
            # These constants are the default objects themselves (one per module), so the fields stay off the wire.
            self.top_p = 1.0
            self.top_k = 0
            self.min_p = 0.0
            if self.n > 1:
                raise _refuse("n", "1 with a temperature of 0", self.n)
        self._all_stop_token_ids.update(self.stop_token_ids)
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    def _check(self) -> None:
        if not isinstance(self.n, int):
            raise SchemaError(f"must be an int, not {type(self.n).__name__}", path="SamplingParams.n")
        if self.n < 1:
            raise _refuse("n", "at least 1", self.n)
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise _refuse(name, "within [-2, 2]", getattr(self, name))
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise _refuse("repetition_penalty", "finite and above 0", self.repetition_penalty)
        if not 0.0 <= self.temperature <= 2.0:
            raise _refuse("temperature", "within [0, 2]", self.temperature)
        if not 0.0 < self.top_p <= 1.0:
            raise _refuse("top_p", "within (0, 1]", self.top_p)
        if not isinstance(self.top_k, int):
            raise SchemaError(f"must be an int, not {type(self.top_k).__name__}", path="SamplingParams.top_k")
        if self.top_k < -1:
            raise _refuse("top_k", "0 (off) or at least 1", self.top_k)
        if not 0.0 <= self.min_p <= 1.0:
            raise _refuse("min_p", "within [0, 1]", self.min_p)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _refuse("max_tokens", "at least 1", self.max_tokens)
        if self.min_tokens < 0:
            raise _refuse("min_tokens", "at least 0", self.min_tokens)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        if self.stream_interval is not None and self.stream_interval < 1:
            raise _refuse("stream_interval", "at least 1", self.stream_interval)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value < -1:
                raise _refuse(name, "-1 (all) or at least 0", value)
        budget = self.thinking_token_budget
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise _refuse("thinking_token_budget", "an int of at least 0, or -1 for no limit", budget)
        if not all(isinstance(token_id, int) for token_id in self.stop_token_ids or ()):
            raise SchemaError("must hold nothing but int", path="SamplingParams.stop_token_ids")
        if not all(self.stop or ()):
            raise _refuse("stop", "without empty strings", self.stop)
        if self.stop and not self.detokenize:
            raise _refuse("stop", "empty when detokenize is False", self.stop)
        if not all(self.bad_words or ()):
            raise _refuse("bad_words", "without empty strings", self.bad_words)


@dataclass(slots=True, eq=False)
class LateInteractionParams(Record):
    """Late-interaction scoring on the worker: ``"cache_query"`` or ``"score_doc"``."""

    __wire__: ClassVar[str] = "array"

    mode: str
    query_key: str
    query_uses: int | None = None


@dataclass(slots=True, eq=False)
class LateChunkingParams(Record):
    """Mean pooling over chunks of `chunk_size` tokens."""

    __wire__: ClassVar[str] = "array"

    chunk_size: int

    def __post_init__(self) -> None:
        if type(self.chunk_size) is not int or not 0 < self.chunk_size < 2**63:
            raise SchemaValueError(
                f"must be an int within [1, 2**63), got {self.chunk_size!r}", path="LateChunkingParams.chunk_size"
            )


@dataclass(slots=True, eq=False)
class PoolingParams(Record):
    """How the engine pools, for embedding and classification models."""

    __wire__: ClassVar[str] = "array"

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: LateInteractionParams | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    late_chunking_params: LateChunkingParams | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in _POOLING_TASKS:
            raise SchemaValueError(f"must be one of {', '.join(_POOLING_TASKS)}, got {self.task!r}", path="PoolingParams.task")
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise SchemaValueError(f"must be FINAL_ONLY, got {self.output_kind!r}", path="PoolingParams.output_kind")


@dataclass(slots=True, eq=False)
class LoRARequest(Record):
    """An adapter to use; `lora_int_id` is unique to it and above 0."""

    __wire__: ClassVar[str] = "array"

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise SchemaValueError(f"must be above 0, got {self.lora_int_id}", path="LoRARequest.lora_int_id")
        if not self.lora_path:
            raise SchemaValueError("must not be empty", path="LoRARequest.lora_path")

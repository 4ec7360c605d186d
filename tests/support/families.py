"""One way to write a request down, for fastmm's classes and for vLLM's.

A *family* is a namespace of constructors with the same names and keywords, plus `tensor` and `array` for the leaves. What is
written against a family can be built of fastmm's own classes where vLLM is not installed, and of vLLM's where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

# Name on the wire to bytes of one element.
TORCH_DTYPES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
NUMPY_DTYPES = [
    *("|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8", "<c8", "<c16"),
    *(">u2", ">i2", ">u4", ">i4", ">u8", ">i8", ">f2", ">f4", ">f8", ">c8", ">c16"),
    *("<U2", ">U3", "|S3"),
]


def pattern(nbytes: int, seed: int, *, of_bool: bool = False) -> bytes:
    """Bytes that depend on nothing but the arguments: no random generator's stream is for ever."""
    values = (np.arange(nbytes, dtype=np.int64) * 37 + seed * 101 + 11) % 251
    return (values % 2 if of_bool else values).astype(np.uint8).tobytes()


def _nelem(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def torch_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    """A torch tensor of the pattern."""
    import torch

    element = getattr(torch, dtype)
    if not _nelem(shape):
        return torch.empty(shape, dtype=element)
    data = pattern(_nelem(shape) * element.itemsize, seed, of_bool=dtype == "bool")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(element).reshape(shape)


def numpy_bytes(dtype: str, shape: tuple[int, ...], seed: int = 0) -> bytes:
    """The pattern for a numpy dtype; text is made of letters."""
    element = np.dtype(dtype)
    nbytes = _nelem(shape) * element.itemsize
    if element.kind == "U":
        letters = np.frombuffer(pattern(nbytes // 4, seed), np.uint8) % 26 + 97
        return letters.astype(np.dtype("u4").newbyteorder(dtype[0])).tobytes()
    return pattern(nbytes, seed, of_bool=element.kind == "b")


def numpy_array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """A numpy array of the pattern, byte order as spelt."""
    return np.frombuffer(bytearray(numpy_bytes(dtype, shape, seed)), np.dtype(dtype)).reshape(shape)


def fastmm_family(leaves: str = "torch") -> SimpleNamespace:
    """fastmm's classes; `leaves` is ``"torch"`` (and numpy arrays) or ``"wire"`` (both as `WireTensor`)."""
    from fastmm import schema

    def wire_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Any:
        nbytes = _nelem(shape) * TORCH_DTYPES[dtype]
        return schema.WireTensor(dtype, shape, pattern(nbytes, seed, of_bool=dtype == "bool"))

    def wire_array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Any:
        return schema.WireTensor(dtype, shape, numpy_bytes(dtype, shape, seed))

    return SimpleNamespace(
        name="fastmm",
        tensor=torch_tensor if leaves == "torch" else wire_tensor,
        array=numpy_array if leaves == "torch" else wire_array,
        request=schema.EngineCoreRequest,
        sampling=schema.SamplingParams,
        structured=schema.StructuredOutputsParams,
        repetition=schema.RepetitionDetectionParams,
        output_kind=schema.RequestOutputKind,
        pooling=schema.PoolingParams,
        late_interaction=schema.LateInteractionParams,
        late_chunking=schema.LateChunkingParams,
        lora=schema.LoRARequest,
        feature=schema.MmFeatureSpec,
        placeholder=schema.PlaceholderRange,
        item=dict,
        elem=schema.MmFieldElem,
        batched=schema.MmBatchedField,
        flat=schema.MmFlatField,
        shared=schema.MmSharedField,
        kv_hints=schema.KvHintsEnvelope,
        kv_action=schema.KvHintAction,
        outputs=schema.EngineCoreOutputs,
        output=schema.EngineCoreOutput,
        finish_reason=schema.FinishReason,
        event=schema.EngineCoreEvent,
        event_type=schema.EngineCoreEventType,
        utility_output=schema.UtilityOutput,
        utility_result=schema.UtilityResult,
        logprobs_lists=schema.LogprobsLists,
        logprobs_tensors=schema.LogprobsTensors,
        sampling_mask=schema.SamplingMaskLists,
        error=schema.RequestError,
        scheduler_stats=schema.SchedulerStats,
        iteration_details=schema.SchedulerIterationDetails,
        prefix_cache_stats=schema.PrefixCacheStats,
        eviction=schema.KVCacheEvictionEvent,
        spec_decoding=schema.SpecDecodingStats,
        cudagraph=schema.CUDAGraphStat,
        perf=schema.PerfStats,
        debug_perf=schema.DebugPerfStats,
        prefill_stats=schema.PrefillStats,
        spec_decode_metrics=schema.RequestSpecDecodeMetrics,
    )


# SamplingParams, field by field: values that are not the default, and such that are but may be another object.
# A value that is a function is called with the family.
SAMPLING_VALUES: dict[str, list[Any]] = {
    "n": [2, 1],
    "presence_penalty": [0.5, -2.0, float("0.0")],
    "frequency_penalty": [1.25, 2],
    "repetition_penalty": [1.1, float("1.0")],
    "temperature": [0, 0.0, 0.7, 2.0, float("1.0"), 0.001],
    "watermarking": [True, False],
    "top_p": [0.9, float("1.0")],
    "top_k": [40, -1, 0],
    "min_p": [0.05, float("0.0")],
    "seed": [7, -1, 2**63, 2**64 - 1],
    "stop": ["end", ["a", "\u00e9nd"], []],
    "stop_token_ids": [[2], [128009, 5, 5, 2**31]],
    "ignore_eos": [True],
    "max_tokens": [None, 1, 4096, 16],
    "min_tokens": [3],
    "logprobs": [0, 5, -1, True],
    "prompt_logprobs": [0, 1, -1],
    "prompt_logprob_token_ids": [
        lambda f: f.array("<i8", (2, 3)),
        lambda f: f.array("<i4", (16, 8)),
        lambda f: f.array("<i8", (0, 4)),
    ],
    "prompt_logprob_start": [0, 12],
    "logprob_token_ids": [[1, 2, 3]],
    "flat_logprobs": [True],
    "detokenize": [False],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "include_stop_str_in_output": [True],
    "output_kind": [lambda f: f.output_kind.DELTA, lambda f: f.output_kind.FINAL_ONLY, lambda f: f.output_kind.CUMULATIVE],
    "stream_interval": [4],
    "skip_clone": [True],
    "output_text_buffer_length": [9],
    "_eos_token_id": [151645],
    "_all_stop_token_ids": [lambda f: {151643}, lambda f: set()],
    "_watermarking_skipped": [True],
    "structured_outputs": [
        lambda f: f.structured(json={"type": "object", "properties": {"a": {"type": "integer"}}}),
        lambda f: f.structured(json='{"type": "string"}', disable_any_whitespace=True),
        lambda f: f.structured(regex=r"\d+"),
        lambda f: f.structured(choice=["yes", "no"], whitespace_pattern=" "),
        lambda f: f.structured(grammar="root ::= 'a'"),
        lambda f: f.structured(json_object=True, disable_additional_properties=True),
        lambda f: f.structured(structural_tag="{}"),
    ],
    "logit_bias": [{5: 1.5, 100000: -100.0}, {}],
    "allowed_token_ids": [[1, 2], []],
    "extra_args": [{"a": 1, "b": [1.5, None, {"c": "d"}], "e": b"xyz"}, {}],
    "bad_words": [["damn"], []],
    "_bad_words_token_ids": [[[1, 2], [3]]],
    "skip_reading_prefix_cache": [True, False],
    "thinking_token_budget": [0, 512, -1],
    "repetition_detection": [
        lambda f: f.repetition(max_pattern_size=8, min_pattern_size=2, min_count=3),
        lambda f: f.repetition(),
    ],
    "routed_experts_prompt_start": [3],
    "trace_decode_token_ids": [[9, 8, 7]],
}


def value_of(value: Any, family: SimpleNamespace) -> Any:
    """A value of `SAMPLING_VALUES`; containers are made anew, so that no two requests share one."""
    if callable(value):
        return value(family)
    if isinstance(value, (list, dict)):
        return type(value)(value)
    return value


def all_sampling(family: SimpleNamespace) -> Any:
    """Every field set to something else than its default."""
    chosen = {name: value_of(values[0], family) for name, values in SAMPLING_VALUES.items()}
    chosen |= {"n": 1, "detokenize": True, "temperature": 0.7, "max_tokens": 100}
    return family.sampling(**chosen)


Builder = Callable[[SimpleNamespace], Any]

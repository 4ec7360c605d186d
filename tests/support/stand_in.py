"""What of vLLM the drop-in's native half stands on, in a few lines: the classes of its features, a request, a codec of msgspec's.

With it that half runs where there is no vLLM, under the sanitizers above all. The real one is in tests/vllm.
"""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from fastmm._native.vllm_decoder import VllmDecoder, adopt_classes
from fastmm._native.vllm_encoder import VllmEncoder
from fastmm.errors import DecodeError, FastmmError


@dataclass(frozen=True)
class PlaceholderRange:
    offset: int
    length: int
    is_embed: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class MultiModalBatchedField:
    keep_on_cpu: bool = False


@dataclass(frozen=True, kw_only=True)
class MultiModalFlatField:
    keep_on_cpu: bool = False
    slices: Any
    dim: int = 0


@dataclass(frozen=True, kw_only=True)
class MultiModalSharedField:
    keep_on_cpu: bool = False
    batch_size: int


@dataclass
class MultiModalFieldElem:
    data: Any
    field: Any


class MultiModalKwargsItem(UserDict):  # type: ignore[type-arg]
    pass


@dataclass
class MultiModalFeatureSpec:
    data: MultiModalKwargsItem | None
    modality: str
    identifier: str
    mm_position: PlaceholderRange
    mm_hash: str | None = None


class Request(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):  # type: ignore[call-arg]
    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[MultiModalFeatureSpec] | None
    sampling_params: Any
    pooling_params: Any
    arrival_time: float
    lora_request: Any
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: torch.Tensor | None = None


# msgspec looks the annotations up here, and would not know torch's tensor without its hook.
adopt_classes(
    MultiModalFeatureSpec,
    PlaceholderRange,
    MultiModalKwargsItem,
    MultiModalFieldElem,
    {"batched": MultiModalBatchedField, "flat": MultiModalFlatField, "shared": MultiModalSharedField},
    torch.Tensor,
)


class Refused(DecodeError, msgspec.ValidationError):
    """As the drop-in's MalformedMessageError."""


class TheirEncoder:
    """msgspec's, and a hook that knows little."""

    asked = 0

    def enc_hook(self, obj: Any) -> Any:
        if isinstance(obj, complex):
            return [obj.real, obj.imag]
        raise TypeError(f"their hook does not know a {type(obj).__name__}")

    def encode(self, obj: Any) -> list[Any]:
        self.asked += 1
        return [msgspec.msgpack.encode(obj, enc_hook=self.enc_hook)]

    def encode_into(self, obj: Any, buf: bytearray) -> list[Any]:
        self.asked += 1
        buf[:] = msgspec.msgpack.encode(obj, enc_hook=self.enc_hook)
        return [buf]


class StandInEncoder(VllmEncoder, TheirEncoder):
    def __init__(self, size_threshold: int = 256, oob_tensor_consumer: Any = None, **options: Any) -> None:
        VllmEncoder.__init__(self, size_threshold, oob_tensor_consumer, **options)


class TheirDecoder:
    """The hooks, as far as ours does not answer."""

    def dec_hook(self, t: Any, obj: Any) -> Any:
        if t is MultiModalKwargsItem:  # a small message, which msgspec reads first
            return MultiModalKwargsItem(obj)
        return complex(*obj) if t is complex else obj

    def ext_hook(self, code: int, data: memoryview) -> Any:
        raise NotImplementedError(f"Extension type code {code} is not supported")


class StandInDecoder(VllmDecoder, TheirDecoder):
    def __init__(self, t: Any = Request, share_mem: bool = True, oob_tensor_provider: Any = None, *, cut: bool = True) -> None:
        self.options = (t, share_mem, oob_tensor_provider)
        args = () if t is None else (t,)
        self.decoder = msgspec.msgpack.Decoder(*args, dec_hook=self.dec_hook, ext_hook=self.ext_hook)
        options: dict[str, Any] = {}
        if t is Request and cut:
            options = {"ids": (1, "prompt_token_ids"), "features": (2, "mm_features"), "feature": MultiModalFeatureSpec}
        elif t in (MultiModalKwargsItem, torch.Tensor):
            options = {"whole": t}
        VllmDecoder.__init__(self, self.decoder.decode, t, **options, tensor_class=torch.Tensor, array_class=np.ndarray)
        self.share_mem, self.pin_tensors, self.oob_tensor_provider = share_mem, False, oob_tensor_provider

    def another(self) -> StandInDecoder:
        return StandInDecoder(*self.options)

    def refusal(self, error: Exception) -> Exception | None:
        if isinstance(error, (msgspec.DecodeError, MemoryError)):
            return None
        if isinstance(error, FastmmError):
            return Refused(error.message, path=error.path)
        return Refused(f"{type(error).__name__}: {error}")

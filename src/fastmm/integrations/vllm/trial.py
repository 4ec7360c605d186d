"""A few messages through vLLM's encoder and decoder and through fastmm's, before fastmm takes their place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.multimodal import inputs
from vllm.sampling_params import SamplingParams
from vllm.v1 import engine, serial_utils
from vllm.v1.outputs import LogprobsLists

from . import codec
from .compare import difference, frames_difference
from .originals import VllmDecoder, VllmEncoder

# The members that a request must be given, in every version since 0.22; the others have defaults.
REQUIRED: dict[str, Any] = {
    "request_id": "fastmm-trial",
    "prompt_token_ids": [1, 255, 65536],
    "mm_features": None,
    "sampling_params": None,
    "pooling_params": None,
    "arrival_time": 1.5,
    "lora_request": None,
    "cache_salt": None,
    "data_parallel_rank": None,
}


def try_out() -> Iterator[str]:
    """Say what differs between vLLM's encoder and decoder and fastmm's; nothing where nothing does."""
    for name, message, kind in messages():
        yield from _compare(name, message, kind)


def messages() -> Iterator[tuple[str, Any, Any]]:
    """What crosses the sockets, in small: a name, the message, the type it is decoded to."""
    request = engine.EngineCoreRequest
    yield "a text request", request(**{**REQUIRED, "sampling_params": SamplingParams(max_tokens=4, stop=["x"])}), request
    yield "a multimodal request", request(**{**REQUIRED, "mm_features": features()}), request
    output = engine.EngineCoreOutput(request_id="fastmm-trial", new_token_ids=[7])
    yield "an output", engine.EngineCoreOutputs(outputs=[output]), engine.EngineCoreOutputs
    for width in (2, 100):  # arrays on both sides of the threshold
        arrays = (np.arange(width, dtype=np.int32)[None], np.ones((1, width), np.float32), np.array([3]))
        output = engine.EngineCoreOutput("fastmm-trial", [7], LogprobsLists(*arrays), pooling_output=torch.ones(width))
        yield f"an output with {width} log probabilities", engine.EngineCoreOutputs(outputs=[output]), engine.EngineCoreOutputs
    answer = engine.UtilityOutput(7, result=serial_utils.UtilityResult({"a": [True, None, 1.5, "x"]}))
    yield "the answer to a call", engine.EngineCoreOutputs(utility_output=answer), engine.EngineCoreOutputs
    yield "a call", (0, 2**63, "is_sleeping", (1, "x")), None
    yield "an abort", ["fastmm-trial"], None


def features() -> list[Any]:
    """Two images over the three kinds of fields, with tensors on both sides of the threshold."""
    pixels = torch.arange(4 * 64, dtype=torch.float32).reshape(4, 64)
    slices = [slice(0, 2), slice(2, 4)]
    made = []
    is_embed = torch.tensor([True, False, True, True])
    for number, part in enumerate(slices):
        fields = {
            "pixel_values": (pixels[part], inputs.MultiModalFlatField(slices=slices, dim=0)),
            "grid": (torch.tensor([1, 2, 2 + number]), inputs.MultiModalBatchedField(keep_on_cpu=True)),
            "scale": (torch.tensor(0.5), inputs.MultiModalSharedField(batch_size=2)),
        }
        item = inputs.MultiModalKwargsItem({key: _element(data, field, key) for key, (data, field) in fields.items()})
        made.append(
            inputs.MultiModalFeatureSpec(
                data=item,
                modality="image",
                identifier=f"trial-{number}",
                mm_position=inputs.PlaceholderRange(offset=number * 4, length=4, is_embed=is_embed),
                mm_hash=f"trial-{number}",
            )
        )
    return made


def _element(data: Any, field: Any, key: str) -> Any:
    members = inputs.MultiModalFieldElem.__dataclass_fields__
    named = {"modality": "image", "key": key}  # members of older versions
    return inputs.MultiModalFieldElem(data=data, field=field, **{k: v for k, v in named.items() if k in members})


def _compare(name: str, message: Any, kind: Any) -> Iterator[str]:
    theirs, ours = VllmEncoder(), codec.MsgpackEncoder()
    frames = theirs.encode(message)
    if found := frames_difference(frames, ours.encode(message)):
        yield f"{name}, encoded: {found}"
    into = bytearray()
    if found := frames_difference(frames, ours.encode_into(message, into)):
        yield f"{name}, encoded into a buffer: {found}"
    received = [bytearray(frame) for frame in frames]
    if found := difference(VllmDecoder(kind).decode(received), codec.MsgpackDecoder(kind).decode(received)):
        yield f"{name}, decoded: {found}"


__all__ = ["messages", "try_out"]

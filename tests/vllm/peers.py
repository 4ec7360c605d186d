"""The real peer and ours, with the options under which they are compared."""

from __future__ import annotations

import random
import warnings
from functools import cache
from typing import Any

from corpus import THRESHOLDS, Corpus
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import fastmm

OUR_TYPE = {EngineCoreRequest: fastmm.EngineCoreRequest, EngineCoreOutputs: fastmm.EngineCoreOutputs}


@cache
def vllm_encoder(threshold: int) -> MsgpackEncoder:
    return MsgpackEncoder(threshold)


@cache
def our_encoder(threshold: int, *, dedup: bool = False) -> Any:
    return fastmm.Encoder(dtype=None, dedup=dedup, threshold=threshold)


def received(frames: Any) -> list[bytearray]:
    """Frames as a peer gets them: other memory, writable."""
    return [bytearray(memoryview(frame).tobytes()) for frame in frames]


def vllm_decode(frames: Any, of_type: type | None = EngineCoreRequest) -> Any:
    """What the real decoder makes of frames of either encoder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where data came as bin, which is read-only
        return MsgpackDecoder(of_type).decode(received(frames))


def draw(seed: int, *, odd: bool = False) -> tuple[Any, int]:
    """The message of a seed (three requests to one message of outputs) and its threshold."""
    rng = random.Random(seed)
    corpus = Corpus(rng, odd=odd)
    message = corpus.request() if seed % 4 else corpus.outputs()
    return message, rng.choice(THRESHOLDS)

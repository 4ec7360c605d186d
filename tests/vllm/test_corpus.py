"""Promise 1, same wire: a generated corpus against the real vLLM 0.33.0, both ways."""

import collections
import dataclasses

import numpy as np
import pytest
import torch
from convert import to_fastmm
from corpus import THRESHOLDS, Corpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peers import OUR_TYPE, draw, our_encoder, vllm_decode, vllm_encoder
from support.compare import assert_same, assert_same_frames
from support.families import NUMPY_DTYPES, SAMPLING_VALUES, TORCH_DTYPES
from support.reference import reference_encode
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

import fastmm

SEEDS = 3200  # a fourth of them are outputs: 2,400 requests
CHUNK = 200
chunks = pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))


def seeds(first):
    """Seeds of a chunk."""
    return range(first, first + CHUNK)


def test_the_corpus_has_every_kind():
    """What the promise lists, counted: else a change of the generator could quietly empty it."""
    seen = collections.Counter()

    def count(value):
        if isinstance(value, torch.Tensor):
            seen[f"torch {value.dtype}".replace("torch.", "")] += 1
            seen["0-d"] += not value.dim()
            seen["empty"] += not value.numel()
            seen["strided"] += not value.is_contiguous()
        elif isinstance(value, np.ndarray):
            seen[f"numpy {value.dtype.str}"] += 1
        elif isinstance(value, slice):
            seen["tensor bound"] += isinstance(value.stop, torch.Tensor)
        elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            for item in value:
                seen["nested"] += isinstance(item, (list, tuple))
                count(item)
        elif isinstance(value, (dict, collections.UserDict)):
            for item in value.values():
                count(item)
        elif dataclasses.is_dataclass(value) or hasattr(value, "__struct_fields__") or hasattr(value, "_fields"):
            seen[type(value).__name__] += 1
            names = getattr(value, "__struct_fields__", None) or getattr(value, "_fields", None)
            for name in names or [field.name for field in dataclasses.fields(value)]:
                content = getattr(value, name)
                seen[f"{type(value).__name__}.{name}"] += content is not None
                seen["element without data"] += type(value).__name__ == "MultiModalFieldElem" and content is None
                seen["flat, other dim"] += type(value).__name__ == "MultiModalFlatField" and name == "dim" and content != 0
                count(content)

    for seed in range(SEEDS):
        message, threshold = draw(seed, odd=bool(seed & 8))
        seen[f"threshold {threshold}"] += 1
        count(message)
    expected = {
        *(f"torch {name}" for name in TORCH_DTYPES),
        *(f"numpy {name}" for name in NUMPY_DTYPES),
        *(f"threshold {threshold}" for threshold in THRESHOLDS),
        *(f"EngineCoreRequest.{name}" for name in EngineCoreRequest.__struct_fields__),
        *(f"EngineCoreOutput.{name}" for name in EngineCoreOutput.__struct_fields__),
        *(f"SamplingParams.{name}" for name in SAMPLING_VALUES),
        *(
            "MultiModalBatchedField",
            "MultiModalFlatField",
            "MultiModalSharedField",
            "flat, other dim",
            "PlaceholderRange.is_embed",
        ),
        *("0-d", "empty", "strided", "nested", "tensor bound", "element without data", "LoRARequest", "PoolingParams"),
        *("StructuredOutputsParams", "RepetitionDetectionParams", "LogprobsLists", "SchedulerStats", "UtilityOutput"),
    }
    assert {kind for kind in expected if seen[kind] < 5} == set()
    assert seen["EngineCoreRequest"] >= 2000


@chunks
def test_same_bytes_as_vllm_for_vllms_objects(first):
    for seed in seeds(first):
        message, threshold = draw(seed, odd=bool(seed & 8))
        expected = vllm_encoder(threshold).encode(message)
        assert_same_frames(our_encoder(threshold).encode(message), expected)
        buffer = bytearray(seed % 300)
        frames = our_encoder(threshold).encode_into(message, buffer)
        assert frames[0] is buffer
        assert_same_frames(frames, expected)


@chunks
def test_same_bytes_as_vllm_for_our_own_classes(first):
    for seed in seeds(first):
        message, threshold = draw(seed, odd=bool(seed & 8))
        expected = vllm_encoder(threshold).encode(message)
        ours = to_fastmm(message)
        assert_same_frames(reference_encode(ours, threshold), expected)
        assert_same_frames(our_encoder(threshold).encode(ours), expected)


@chunks
def test_vllm_decodes_our_deduplicated_frames_to_an_equal_object(first):
    for seed in seeds(first):
        message, threshold = draw(seed)
        frames = our_encoder(threshold, dedup=True).encode(message)
        expected = vllm_encoder(threshold).encode(message)
        assert len(frames) <= len(expected)
        decoded = vllm_decode(frames, type(message))
        assert_same(decoded, vllm_decode(expected, type(message)))
        assert_same(decoded, message)


@chunks
def test_we_decode_vllms_frames_to_what_vllm_decodes(first):
    for seed in seeds(first):
        message, threshold = draw(seed)
        frames = vllm_encoder(threshold).encode(message)
        decoded = fastmm.Decoder(type=OUR_TYPE[type(message)], tensors="torch").decode(frames)
        assert_same(decoded, vllm_decode(frames, type(message)))


@chunks
def test_what_we_decode_encodes_to_the_same_bytes_again(first):
    for seed in seeds(first):
        message, threshold = draw(seed)
        frames = vllm_encoder(threshold).encode(message)
        decoded = fastmm.Decoder(type=OUR_TYPE[type(message)], tensors="wire").decode(frames)
        again = vllm_decode(our_encoder(threshold).encode(decoded), type(message))
        assert_same(again, vllm_decode(frames, type(message)))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False), threshold=st.sampled_from(THRESHOLDS))
def test_any_request_has_the_same_bytes(rng, threshold):
    message = Corpus(rng, odd=True).request()
    expected = vllm_encoder(threshold).encode(message)
    assert_same_frames(our_encoder(threshold).encode(message), expected)
    assert_same_frames(our_encoder(threshold).encode(to_fastmm(message)), expected)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False), threshold=st.sampled_from(THRESHOLDS))
def test_any_outputs_have_the_same_bytes(rng, threshold):
    message = Corpus(rng, odd=True).outputs()
    expected = vllm_encoder(threshold).encode(message)
    assert_same_frames(our_encoder(threshold).encode(message), expected)


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
KEYS = st.text() | st.integers(-(2**63), 2**64 - 1)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tree=st.recursive(
        SCALARS,
        lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.frozensets(KEYS),
        max_leaves=40,
    )
)
def test_any_plain_tree_has_the_same_bytes(tree):
    """ABORT and UTILITY messages: what stands in them is free."""
    message = (0, 2**40, "method", tree)
    assert_same_frames(our_encoder(256).encode(message), vllm_encoder(256).encode(message))

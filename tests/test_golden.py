"""The wire held by bytes that the real vLLM encoder wrote, without vLLM installed."""

import importlib.util

import pytest
from support import golden
from support.families import fastmm_family
from support.golden_cases import CASES
from support.reference import reference_encode

import fastmm

DOCUMENT = golden.load()
LEAVES = ["torch", "wire"] if importlib.util.find_spec("torch") else ["wire"]


def compiled(obj, threshold):
    return fastmm.Encoder(dtype=None, dedup=False, threshold=threshold).encode(obj)


def compiled_into(obj, threshold):
    buffer = bytearray(b"stale" * 100)
    frames = fastmm.Encoder(dtype=None, dedup=False, threshold=threshold).encode_into(obj, buffer)
    assert frames[0] is buffer
    return frames


ENCODERS = {"reference": reference_encode, "fastmm": compiled, "fastmm-into": compiled_into}


def test_the_golden_file_is_of_the_release_we_promise():
    assert DOCUMENT["made_by"]["vllm"] == "0.33.0"
    assert list(DOCUMENT["cases"]) == [case.name for case in CASES]


@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_bytes_as_vllm(case, encoder, leaves):
    golden_case = DOCUMENT["cases"][case.name]
    frames = ENCODERS[encoder](case.build(fastmm_family(leaves)), golden_case["threshold"])
    assert [golden.describe(frame) for frame in frames] == golden_case["frames"]

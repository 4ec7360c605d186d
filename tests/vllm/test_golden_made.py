"""The golden file is what the installed vLLM writes today, and what we write of vLLM's own objects."""

import pytest
from make_golden import golden_cases
from peers import our_encoder
from support import golden
from support.golden_cases import CASES
from vllm_family import FAMILY


def test_the_golden_file_is_what_vllm_writes():
    assert golden_cases() == golden.load()["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_bytes_from_vllms_objects(case):
    frames = our_encoder(case.threshold).encode(case.build(FAMILY))
    assert [golden.describe(frame) for frame in frames] == golden.load()["cases"][case.name]["frames"]

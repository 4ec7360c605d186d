"""Before any engine: what our front end makes of a photograph is what vLLM's own front end sent."""

from __future__ import annotations

import pytest
import torch
from cases import CASES

import fastmm

WITH_PHOTOGRAPHS = [name for name, case in CASES.items() if case.photographs]


@pytest.mark.parametrize("case", CASES)
def test_the_prompt_is_the_one_vllm_expanded(front, reference, case):
    assert front.request(case).prompt_token_ids == reference.prompt_token_ids(case)


@pytest.mark.parametrize("case", WITH_PHOTOGRAPHS)
def test_photographs_become_the_bits_that_vllm_sends(front, reference, case):
    theirs = fastmm.decode_request(reference.frames_of_requests()[case])
    ours = fastmm.decode_request(fastmm.encode_request(front.request(case), dtype="bfloat16"))
    assert len(ours.mm_features) == len(theirs.mm_features) == len(CASES[case].photographs)
    for mine, its in zip(ours.mm_features, theirs.mm_features, strict=True):
        assert (mine.modality, mine.mm_position.offset, mine.mm_position.length) == (
            its.modality,
            its.mm_position.offset,
            its.mm_position.length,
        )
        assert set(mine.data) == set(its.data)
        for key in mine.data:
            assert mine.data[key].data.dtype == its.data[key].data.dtype
            assert torch.equal(torch.as_tensor(mine.data[key].data), torch.as_tensor(its.data[key].data)), key


def test_swapped_photographs_and_others_have_other_answers(reference):
    fingerprints = [
        str(reference.answer(case)) for case in ("one", "other", "two", "two, swapped", "two, one replaced", "the same twice")
    ]
    assert len(set(fingerprints)) == len(fingerprints)

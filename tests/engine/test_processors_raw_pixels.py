"""An engine as vLLM starts it by itself: it normalises Qwen2-VL's pixels, so HfProcessor must leave them raw."""

from __future__ import annotations

import numpy as np
import pytest
from cases import CASES
from engines import free_port, headless_engine
from front_end import Answer, sampling_of

import fastmm
from fastmm.processors import HfProcessor
from fastmm.transport import EngineClient

NAMES = ("one", "other", "two", "two, swapped")


@pytest.fixture(scope="module")
def client(models, vllm_environment, engine_log):
    port = free_port()
    log = engine_log("engine-that-normalises")
    with headless_engine(models("qwen2vl"), port, log=log, environment=vllm_environment, mm_device_do_normalize=True):
        with EngineClient(f"tcp://127.0.0.1:{port}", startup_timeout=180) as client:
            yield client


def answer(client: EngineClient, directory, case: str, raw: bool) -> Answer:
    processor = HfProcessor.from_pretrained(str(directory), raw_pixels=raw)
    params = fastmm.SamplingParams(**sampling_of(CASES[case]))
    request = processor.request(
        CASES[case].prompt("qwen2vl"), images=CASES[case].images(), request_id=f"{case}-{raw}", sampling_params=params
    )
    if raw:
        assert all(str(feature.data["pixel_values"].data.dtype) == "torch.uint8" for feature in request.mm_features)
    return Answer.of(client.generate(request, timeout=60))


@pytest.mark.parametrize("case", NAMES)
def test_raw_pixels_get_the_answer_and_normalised_ones_would_not(client, models, references, case):
    wanted = references("qwen2vl").answer(case)
    directory = models("qwen2vl")
    found = answer(client, directory, case, raw=True)
    assert found.token_ids == wanted.token_ids
    # It normalises in its own arithmetic: close, and not the last bit.
    assert np.allclose([max(row.values()) for row in found.logprobs], [max(row.values()) for row in wanted.logprobs], atol=0.15)
    assert answer(client, directory, case, raw=False).token_ids != wanted.token_ids

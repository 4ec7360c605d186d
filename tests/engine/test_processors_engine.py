"""End to end: photograph, HfProcessor, pool, build_features, client, real engine; the answers are vLLM's own to the last bit."""

from __future__ import annotations

import base64
import functools
import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from cases import CASES, SUFFIX
from front_end import sampling_of

import fastmm
from fastmm.processors import HfProcessor, ProcessorPool, ResultStore, Work, to_features, to_request
from fastmm.processors.testing import check_processor

WITH_PHOTOGRAPHS = [name for name, case in CASES.items() if case.photographs]
_numbers = itertools.count()


def photograph(name: str) -> bytes:
    """The file as it lies on the disk, as a front end fetches it."""
    found = importlib.util.find_spec("skimage")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "data" / f"{name}.{SUFFIX[name]}").read_bytes()


def work_of(case: str, model: str) -> Work:
    """Photographs come in each of the ways a client may send them."""
    images, prefetched = [], []
    for i, name in enumerate(CASES[case].photographs):
        data = photograph(name)
        if i % 3 == 0:
            images.append(f"https://photographs.example/{name}")
            prefetched.append(data)
        elif i % 3 == 1:
            images.append("data:image/png;base64," + base64.b64encode(data).decode())
        else:
            images.append(data)
    return Work(request_id=f"processed-{next(_numbers)}", text=CASES[case].prompt(model), images=images, prefetched=prefetched)


@pytest.fixture(scope="session")
def processor(model_directory) -> HfProcessor:
    return HfProcessor.from_pretrained(str(model_directory))


@pytest.fixture(scope="session", params=["threads", "processes"])
def pool(request, model_directory, processor):
    if request.param == "threads":
        made = ProcessorPool(processor, workers=2, store=ResultStore())
    else:
        load = functools.partial(HfProcessor.from_pretrained, str(model_directory))
        made = ProcessorPool(load, executor="processes", workers=2, store=ResultStore())
    with made:
        yield made


def request_of(processed, case: str) -> fastmm.EngineCoreRequest:
    params = fastmm.SamplingParams(**sampling_of(CASES[case]))
    return to_request(processed, f"engine-{next(_numbers)}", params)


@pytest.mark.parametrize("case", WITH_PHOTOGRAPHS)
def test_a_photograph_becomes_the_bits_that_vllm_sends(processor, reference, model, case):
    theirs = fastmm.decode_request(reference.frames_of_requests()[case])
    work = work_of(case, model)
    request = processor.request(work.text, images=work.images, prefetched=work.prefetched)
    ours = fastmm.decode_request(fastmm.encode_request(request, dtype="bfloat16"))
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert len(ours.mm_features) == len(theirs.mm_features) == len(CASES[case].photographs)
    for mine, its in zip(ours.mm_features, theirs.mm_features, strict=True):
        assert (mine.modality, mine.mm_position.offset, mine.mm_position.length) == (
            its.modality,
            its.mm_position.offset,
            its.mm_position.length,
        )
        assert set(mine.data) == set(its.data)
        for key, elem in mine.data.items():
            assert type(elem.field) is type(its.data[key].field)
            assert elem.field.keep_on_cpu == its.data[key].field.keep_on_cpu
            assert elem.data.dtype == its.data[key].data.dtype
            assert torch.equal(elem.data, its.data[key].data), key


@pytest.mark.parametrize("case", WITH_PHOTOGRAPHS)
def test_a_photograph_through_the_pool_and_the_client_has_vllms_answer(engine, pool, reference, model, case):
    processed = pool.submit(work_of(case, model)).result(60)
    assert engine.ask(request_of(processed, case)) == reference.answer(case)


def test_a_photograph_becomes_a_request_in_one_call(engine, processor, reference, model):
    params = fastmm.SamplingParams(**sampling_of(CASES["one"]))
    request = processor.request(
        CASES["one"].prompt(model), images=[photograph("astronaut")], sampling_params=params, request_id="one-call"
    )
    assert engine.ask(request) == reference.answer("one")


def test_what_was_parked_is_what_the_engine_gets(engine, pool, reference, model):
    work = work_of("two", model)
    pool.submit(work).result(60)
    assert engine.ask(request_of(pool.store.take(work.request_id), "two")) == reference.answer("two")
    assert pool.store.take(work.request_id) is None


def test_a_prompt_given_as_ids_is_expanded_as_its_text_is(processor, model):
    text = CASES["two"].prompt(model)
    photographs = [photograph("astronaut"), photograph("coffee")]
    ids = processor.tokenizer.encode(text)
    by_text, by_ids = processor.request(text, images=photographs), processor.request(prompt_token_ids=ids, images=photographs)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids
    assert by_text.mm_features == by_ids.mm_features


def test_the_same_photograph_has_the_same_hash_in_every_process(pool, processor, model):
    work = work_of("the same twice", model)
    first, second = to_features(pool.submit(work).result(60))
    here = processor.request(work.text, images=work.images, prefetched=work.prefetched).mm_features
    assert first.mm_hash == second.mm_hash == here[0].mm_hash


def test_hf_processor_passes_the_conformance_kit(processor, model):
    cases = ("one", "two", "text", "the same twice")
    check_processor(processor, [work_of(case, model) for case in cases], threads=4, rounds=2)

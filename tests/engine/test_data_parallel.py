"""Two real engines and the client for threads, over TCP: load is shared, each answer goes to its asker, one may die."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from cases import MIXED
from conftest import STARTUP_S
from engines import free_port, headless_engine
from front_end import Answer, FrontEnd

import fastmm
from fastmm.transport import EngineClient

MODEL = "llava"
LONG = {"max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def front(models):
    return FrontEnd(MODEL, models(MODEL))


@pytest.fixture(scope="module")
def reference(references):
    return references(MODEL)


@pytest.fixture(scope="module")
def engines(models, reference, vllm_environment, engine_log):
    """The processes of both, and a client that waited for both."""
    port = free_port()
    options = {"environment": vllm_environment, "of": 2}
    first = headless_engine(models(MODEL), port, log=engine_log("engine-0"), rank=0, **options)
    second = headless_engine(models(MODEL), port, log=engine_log("engine-1"), rank=1, **options)
    seen = []
    client = EngineClient(
        f"tcp://127.0.0.1:{port}",
        engines=2,
        input="tcp://127.0.0.1:0",
        output="tcp://127.0.0.1:0",
        startup_timeout=STARTUP_S,
        progress=seen.append,
    )
    with first, second, contextlib.closing(client):
        try:
            client.start()
        except Exception as error:
            raise AssertionError(f"no client: {error!r}\n{first.log()}\n{second.log()}") from error
        client.seen = seen
        yield (first, second), client


def ask(client, request):
    return Answer.of(client.generate(request))


def test_both_engines_are_waited_for_and_say_who_they_are(engines):
    _, client = engines
    assert [info.rank for info in client.engines] == [0, 1]
    assert {info.dtype for info in client.engines} == {"bfloat16"}
    assert client.seen[0] == {0: "waiting", 1: "waiting"}
    assert client.seen[-1] == {0: "ready", 1: "ready"}
    assert client.input_address.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", MIXED)
def test_a_rank_that_is_asked_for_answers(engines, front, reference, case, rank):
    _, client = engines
    request = front.request(case)
    request.data_parallel_rank = rank
    outputs = client.generate(request)
    assert client.outstanding()[rank] == 1
    assert client.outstanding()[1 - rank] == 0
    assert Answer.of(outputs) == reference.answer(case)


def test_a_hundred_requests_from_sixteen_threads_share_both(engines, front, reference):
    _, client = engines
    most = {0: 0, 1: 0}

    def one(number):
        case = MIXED[number % len(MIXED)]
        answer = ask(client, front.request(case, f"one of 100, {number}"))
        for rank, count in client.outstanding().items():
            most[rank] = max(most[rank], count)
        return (number, case, answer.token_ids) if answer.token_ids != reference.answer(case).token_ids else None

    with ThreadPoolExecutor(16) as pool:
        assert [wrong for wrong in pool.map(one, range(100)) if wrong] == []
    assert min(most.values()) > 1
    assert client.counters["live"] == 0
    assert client.ledger.wait(10)


def test_a_utility_call_asks_both(engines):
    _, client = engines
    assert client.call_utility_all("get_supported_tasks", timeout=20) == {0: ["generate"], 1: ["generate"]}
    with pytest.raises(fastmm.UtilityFailed, match="no_such_method"):
        client.call_utility("no_such_method", rank=1, timeout=20)


def test_outputs_left_early_abort_the_request(engines, front, reference):
    _, client = engines
    with client.generate(front.request("text", sampling=LONG)) as outputs:
        next(outputs)
    assert client.counters["live"] == 0
    assert ask(client, front.request("two")) == reference.answer("two")


@pytest.mark.ends_engine
def test_one_engine_killed_costs_its_requests_only(engines, front, reference):
    processes, client = engines
    streams = []
    for rank in (0, 1):
        request = front.request("text", sampling=LONG if rank else {"max_tokens": 400, "ignore_eos": True})
        request.data_parallel_rank = rank
        streams.append(client.generate(request))
    next(streams[1])
    begun = time.monotonic()
    processes[1].kill()
    with pytest.raises(fastmm.EngineDead):
        for _ in streams[1]:
            pass
    assert time.monotonic() - begun < 2.0
    assert len(Answer.of(streams[0]).token_ids) == 400
    assert client.alive == (0,)
    assert ask(client, front.request("two")) == reference.answer("two")


@pytest.mark.ends_engine
def test_an_engine_that_fails_says_so_and_whoever_waits_is_told(engines, front):
    """More placeholders than its pixels make embeddings for: the model fails on them, and vLLM's engine ends."""
    _, client = engines
    (info,) = [info for info in client.engines if info.rank in client.alive]
    request = front.request("one")
    (feature,) = request.mm_features
    at = feature.mm_position.offset
    request.prompt_token_ids[at:at] = request.prompt_token_ids[at : at + 1]
    feature.mm_position.length += 1
    other = client.generate(front.request("text", sampling=LONG))
    next(other)
    with pytest.raises(fastmm.EngineDead, match=f"engine {info.rank}"):
        ask(client, request)
    with pytest.raises(fastmm.EngineDead):
        for _ in other:
            pass
    assert client.alive == ()

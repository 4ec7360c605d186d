"""A real engine driven by AsyncEngineClient: what it answers is what it answers vLLM's own front end."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from cases import CASES, MIXED
from front_end import Answer

import fastmm
from fastmm.errors import UtilityFailed

WITH_PHOTOGRAPHS = [name for name, case in CASES.items() if case.photographs]


@contextlib.contextmanager
def encoder(engine, **options):
    """Another way to write requests, for the engine's one client, which has the usual one."""
    (known,) = engine.client._registry.engines
    usual, known.encoder = known.encoder, fastmm.Encoder(dtype="bfloat16", **options)
    try:
        yield known.encoder
    finally:
        known.encoder = usual


def test_the_engine_says_who_it_is(engine):
    (info,) = engine.client.engines
    assert (info.rank, info.dtype, info.vllm_version, info.max_model_len) == (0, "bfloat16", "0.32.0", 4096)
    assert info.headless
    assert info.num_gpu_blocks > 0
    assert info.ready["max_num_seqs"] == 16


@pytest.mark.parametrize("case", CASES)
def test_the_answer_is_the_one_vllms_own_front_end_gets(engine, front, reference, case):
    assert engine.ask(front.request(case)) == reference.answer(case)


@pytest.mark.parametrize("case", WITH_PHOTOGRAPHS)
def test_it_is_the_same_with_the_slices_of_all_items_in_each(engine, front, reference, case):
    assert engine.ask(front.request(case, full_slices=True)) == reference.answer(case)


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_same_with_everything_inside_the_main_frame(engine, front, reference, case):
    with encoder(engine, threshold=1 << 30) as inline:
        assert len(inline.encode(front.request(case))) == 1
        assert engine.ask(front.request(case)) == reference.answer(case)


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_same_with_a_frame_for_each_tensor_however_small(engine, front, reference, case):
    with encoder(engine, threshold=0, dedup=False):
        assert engine.ask(front.request(case)) == reference.answer(case)


def test_the_same_photograph_twice_crosses_once(engine, front, reference):
    request = front.request("the same twice")
    one, two = request.mm_features
    two.data["pixel_values"].data = one.data["pixel_values"].data
    with encoder(engine) as usual:
        frames = usual.encode(request)
        payload = sum(len(memoryview(frame)) for frame in frames[1:])
        assert payload < 1.1 * one.data["pixel_values"].data.nbytes
        assert engine.ask(request) == reference.answer("the same twice")


def test_swapped_photographs_are_told_apart(engine, front):
    answers = [engine.ask(front.request(case)) for case in ("two", "two, swapped", "two, one replaced")]
    assert answers[0] != answers[1] != answers[2] != answers[0]


def test_pixels_that_are_bfloat16_already_cross_as_they_are(engine, front, reference):
    import torch

    request = front.request("two")
    for feature in request.mm_features:
        feature.data["pixel_values"].data = feature.data["pixel_values"].data.to(torch.bfloat16)
    assert engine.ask(request) == reference.answer("two")


def test_vllms_own_request_objects_go_through_our_client(engine, reference):
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder

    decoder = MsgpackDecoder(EngineCoreRequest)
    for case, frames in reference.frames_of_requests().items():
        request = decoder.decode(frames)
        assert type(request) is EngineCoreRequest
        for number, feature in enumerate(request.mm_features or ()):
            feature.identifier = f"vllm's own, {case}, {number}"
        assert engine.ask(request) == reference.answer(case), case


def test_outputs_come_one_token_at_a_time(engine, front):
    async def collect():
        return [output async for output in engine.client.generate(front.request("text, long"))]

    outputs = engine.run(collect())
    assert [len(output.new_token_ids) for output in outputs] == [1] * 24
    assert [output.finished for output in outputs] == [False] * 23 + [True]


def test_two_hundred_requests_sixteen_at_a_time(engine, front, reference):
    async def ask_all():
        room, wrong = asyncio.Semaphore(16), []

        async def ask(number):
            case = MIXED[number % len(MIXED)]
            async with room:
                # Which requests share a step decides how vLLM adds up: the last bits of log probabilities may differ.
                answer = await engine.answer(front.request(case, f"one of 200, {number}"))
            if answer.token_ids != reference.answer(case).token_ids:
                wrong.append((number, case, answer.token_ids))

        await asyncio.gather(*map(ask, range(200)))
        return wrong

    assert engine.run(ask_all(), 300) == []
    assert engine.client.counters["live"] == 0
    assert engine.client.ledger.wait(10)


def test_a_loop_left_early_aborts_the_request_on_the_engine(engine, front):
    async def leave_early():
        request = front.request("text", "left early", sampling={"max_tokens": 3000, "ignore_eos": True})
        async with engine.client.generate(request) as outputs:
            async for output in outputs:
                if output.new_token_ids:
                    break
        # Ids are free again on both sides, and the engine works for nobody else: the rest of 3000 tokens would take it long.
        return await engine.answer(front.request("text", "left early"))

    assert engine.run(leave_early(), 10).finish_reason == "length"


def test_a_cancelled_task_aborts_its_request(engine, front, reference):
    async def cancel():
        request = front.request("two", "cancelled", sampling={"max_tokens": 3000, "ignore_eos": True})
        first = asyncio.Event()

        async def read():
            async for _ in engine.client.generate(request):
                first.set()

        task = asyncio.create_task(read())
        await first.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert engine.client.counters["live"] == 0
        return await engine.answer(front.request("one", "cancelled"))

    assert engine.run(cancel(), 20) == reference.answer("one")


def test_abort_by_id_ends_the_iterator_with_abort(engine, front):
    async def abort():
        request = front.request("text", "aborted", sampling={"max_tokens": 3000, "ignore_eos": True})
        outputs = await engine.client.add_request(request)
        seen = []
        async for output in outputs:
            seen.append(output)
            if len(seen) == 2:
                await engine.client.abort("aborted")
        return Answer.of(seen)

    answer = engine.run(abort(), 20)
    assert answer.finish_reason == "abort"
    assert len(answer.token_ids) < 3000


def test_the_engine_frees_what_was_aborted(engine, front):
    """After an abort nothing runs: the statistics that come with the next request's outputs count that one only."""
    seen = []
    registry = engine.client._registry
    take = registry.take

    def spy(message, now):
        if message.scheduler_stats is not None:
            seen.append((message.scheduler_stats.num_running_reqs, message.scheduler_stats.num_waiting_reqs))
        take(message, now)

    async def run():
        for number in range(4):
            request = front.request("text", f"freed {number}", sampling={"max_tokens": 3000, "ignore_eos": True})
            async for _ in engine.client.generate(request):
                break
        seen.clear()
        await engine.answer(front.request("text, long"))

    registry.take = spy
    try:
        engine.run(run(), 30)
    finally:
        del registry.take
    assert seen
    assert max(running + waiting for running, waiting in seen[2:]) <= 1


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("get_supported_tasks", ["generate"]),
        ("is_sleeping", False),
        ("is_scheduler_paused", False),
        ("reset_prefix_cache", True),
        ("reset_encoder_cache", None),
    ],
)
def test_utility_calls_are_answered(engine, method, answer):
    assert engine.run(engine.client.call_utility(method, timeout=20)) == answer


def test_a_failing_utility_call_is_an_exception_with_the_engines_message(engine, front, reference):
    with pytest.raises(UtilityFailed, match="no_such_method"):
        engine.run(engine.client.call_utility("no_such_method", 1, timeout=20))
    with pytest.raises(UtilityFailed, match="LoRA"):
        engine.run(engine.client.call_utility("list_loras", timeout=20))
    assert engine.ask(front.request("text")) == reference.answer("text")


def test_utility_calls_are_answered_while_requests_run(engine, front, reference):
    async def both():
        calls = [engine.client.call_utility("is_sleeping", timeout=30) for _ in range(8)]
        answer, *said = await asyncio.gather(engine.answer(front.request("two")), *calls)
        return answer, said

    assert engine.run(both()) == (reference.answer("two"), [False] * 8)


def test_a_request_that_cannot_be_encoded_costs_itself_only(engine, front, reference):
    broken = front.request("text", "broken")
    broken.trace_headers = {"x": object()}
    with pytest.raises(fastmm.FastmmError, match="trace_headers"):
        engine.ask(broken)
    assert engine.client.counters["live"] == 0
    assert engine.ask(front.request("text", "broken")) == reference.answer("text")


def test_a_prompt_that_would_end_the_engine_is_refused_before_it_leaves(engine, front, reference):
    too_long = front.request("text", "too long")
    too_long.prompt_token_ids = [8] * 5000
    with pytest.raises(fastmm.FastmmError, match="prompt_token_ids.*4096.*5000"):
        engine.ask(too_long)
    assert engine.ask(front.request("text", "too long")) == reference.answer("text")


@pytest.mark.ends_engine
def test_an_engine_killed_in_mid_stream_is_dead_within_two_seconds(engine, front):
    async def kill():
        sampling = {"max_tokens": 3000, "ignore_eos": True}
        requests = [front.request("text", f"doomed {number}", sampling=sampling) for number in range(8)]
        streams = [await engine.client.add_request(request) for request in requests]
        for outputs in streams:
            await outputs.__anext__()
        waiting = [asyncio.create_task(drain(outputs)) for outputs in streams]
        begun = asyncio.get_running_loop().time()
        engine.process.kill()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        return ended, asyncio.get_running_loop().time() - begun

    async def drain(outputs):
        async for _ in outputs:
            pass

    ended, seconds = engine.run(kill(), 30)
    assert [type(error) for error in ended] == [fastmm.EngineDead] * 8
    assert seconds < 2.0
    with pytest.raises(fastmm.EngineDead):
        engine.ask(front.request("text"))
    assert engine.client.counters["live"] == 0

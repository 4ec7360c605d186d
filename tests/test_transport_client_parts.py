"""The parts that both clients are made of, without sockets or processes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import sys
import threading
import time
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from support.clients import LIMIT, text

from fastmm import Encoder, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineDead, UtilityFailed, UtilityOutput
from fastmm.errors import SchemaValueError
from fastmm.schema import FinishReason, UtilityResult
from fastmm.transport import connection
from fastmm.transport.connection import Watch
from fastmm.transport.handshake import EngineInfo, engine_identity
from fastmm.transport.large import is_large
from fastmm.transport.registry import Call, Engine, Live, Registry
from fastmm.transport.turns import Turns
from fastmm.transport.waves import Start, Waves
from fastmm.transport.worker import Worker

# --- registry ---------------------------------------------------------------------------------------------------------


class Kept(Live):
    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.got: list[Any] = []

    def push(self, output: Any) -> None:
        self.got.append(output)

    fail = push


class KeptCall(Call):
    def __init__(self) -> None:
        super().__init__()
        self.got: list[Any] = []

    def answer(self, value: Any) -> None:
        self.got.append(value)

    fail = answer


def registry(engines: int = 1) -> Registry:
    encoder = Encoder()
    return Registry(Engine(EngineInfo(engine_identity(rank), rank, False, True), encoder) for rank in range(engines))


def added(to: Registry, request_id: str, **more: Any) -> Kept:
    live = Kept(request_id)
    to.add(live, text(request_id, **more))
    live.sent = True
    to.owe(live, 0.0)
    return live


def output(request_id: str, *tokens: int, finish: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, list(tokens), finish_reason=finish)


def said(*outputs: EngineCoreOutput, **more: Any) -> EngineCoreOutputs:
    return EngineCoreOutputs(outputs=list(outputs), **more)


def test_outputs_reach_their_request_and_the_last_ends_it():
    of = registry()
    one, two = added(of, "1"), added(of, "2")
    of.take(said(output("2", 5), output("1", 6, finish=FinishReason.STOP), output("3", 7)), 1.0)
    assert [got.new_token_ids for got in one.got] == [[6]]
    assert [got.new_token_ids for got in two.got] == [[5]]
    assert (one.ended, two.ended, len(of), of.unknown) == (True, False, 1, 1)
    of.take(said(output("1", 8)), 2.0)
    assert len(one.got) == 1
    assert added(of, "1").wire_id == "1"  # it ended on the engine, so its id is free


def test_what_the_engine_reports_as_finished_ends_without_an_output_of_its_own():
    of = registry()
    one = added(of, "1")
    of.take(said(finished_requests={"1", "2"}), 1.0)
    assert [got.finish_reason for got in one.got] == [FinishReason.ABORT]


def test_work_is_all_given_back():
    of = registry(2)
    lives = [added(of, f"{i}", ids=[1] * (i * 37 % 50)) for i in range(40)]
    of.take(said(*(output(f"{i}", 1) for i in range(10))), 1.0)
    of.take(said(*(output(f"{i}", 1, finish=FinishReason.STOP) for i in range(5, 15))), 1.0)
    of.abort(lives[:20])
    of.bury(of.engines[0], "why not")
    of.take(said(*(output(f"{i}", 1, finish=FinishReason.STOP) for i in range(40))), 1.0)
    assert [(engine.work, engine.live) for engine in of.engines] == [(0, set()), (0, set())]
    assert len(of) == 0


def test_engines_of_equal_work_take_turns():
    of = registry(4)
    turns = []
    for i in range(16):
        live = added(of, f"{i}")
        of.drop(live, finished=True)
        turns.append(live.engine.rank)
    assert sorted(turns) == sorted([0, 1, 2, 3] * 4)


def test_a_name_is_never_used_twice_while_the_engine_may_still_use_it():
    of = registry()
    names = set()
    for _ in range(5):
        live = added(of, "1")
        names.add(live.wire_id)
        with pytest.raises(SchemaValueError):
            added(of, "1")
        assert of.find(["1", "2"]) == [live]
        told = of.abort([live])
        assert told == {live.engine: [live.wire_id]}
    assert len(names) == 5
    live = added(of, "1")
    of.take(said(*(output(name, 1) for name in names)), 1.0)
    assert live.got == []
    last = output(live.wire_id, 2, finish=FinishReason.STOP)
    of.take(said(last), 1.0)
    assert live.got == [last]
    assert last.request_id == "1"


def test_what_was_never_sent_is_not_told_to_end():
    of = registry()
    live = Kept("1")
    of.add(live, text("1"))
    assert of.abort([live]) == {}
    assert added(of, "1").wire_id == "1"


def test_calls_are_answered_once_by_number():
    of = registry()
    one, two = KeptCall(), KeptCall()
    numbers = [of.call(call, of.engines[0]) for call in (one, two)]
    assert len(set(numbers)) == 2
    of.take(said(utility_output=UtilityOutput(numbers[1], None, UtilityResult([1, 2]))), 1.0)
    of.take(said(utility_output=UtilityOutput(numbers[1], None, UtilityResult(3))), 1.0)
    of.take(said(utility_output=UtilityOutput(numbers[0], "no")), 1.0)
    assert two.got == [[1, 2]]
    assert [type(error) for error in one.got] == [UtilityFailed]
    assert of.unknown == 1


def test_each_who_waits_for_a_dead_engine_gets_an_error_of_his_own():
    of = registry()
    lives = [added(of, f"{i}") for i in range(3)]
    call = KeptCall()
    of.call(call, of.engines[0])
    assert of.bury(of.engines[0], "gone")
    assert not of.bury(of.engines[0], "again")
    errors = [live.got[-1] for live in lives] + call.got
    assert all(type(error) is EngineDead and "gone" in str(error) for error in errors)
    assert len({id(error) for error in errors}) == 4


def test_only_an_engine_that_owes_something_can_be_silent_for_too_long():
    of = registry(2)
    assert (of.silent(100.0, 1.0), of.silent_at(1.0)) == ([], None)
    live = Kept("1")
    of.add(live, text("1", data_parallel_rank=1))
    assert (of.silent(100.0, 1.0), of.silent_at(1.0)) == ([], None)  # it was not sent yet
    of.owe(live, 50.0)
    of.owe(live, 55.0)  # once
    assert of.silent_at(1.0) == 51.0
    of.take(said(engine_index=1), 50.5)
    assert (of.silent(51.0, 1.0), of.silent(51.5, 1.0)) == ([], [of.engines[1]])
    of.drop(live)
    assert of.silent(100.0, 1.0) == []
    of.owe(live, 60.0)  # who sent it in another thread may be late to say so
    assert of.silent_at(1.0) is None
    call = KeptCall()
    of.call(call, of.engines[1])
    assert of.silent_at(1.0) is None
    of.owe(call, 70.0)
    assert of.silent_at(1.0) == 71.0
    of.forget(call)
    assert of.silent_at(1.0) is None


def test_an_id_that_another_request_goes_by_on_the_wire_reaches_its_own_request_all_the_same():
    of = registry()
    of.abort([added(of, "a")])
    users, renamed = added(of, "a~1"), added(of, "a")
    assert users.wire_id == "a~1"
    assert renamed.wire_id not in {"a", "a~1"}
    of.take(said(output(renamed.wire_id, 1), output("a~1", 2)), 1.0)
    assert [got.new_token_ids for got in renamed.got] == [[1]]
    assert [got.new_token_ids for got in users.got] == [[2]]
    for user_id in (renamed.wire_id, "a~1"):  # the wire id of another, which is a user's to take; and a live one
        if user_id == "a~1":
            with pytest.raises(SchemaValueError, match="live already"):
                added(of, user_id)
        else:
            assert user_id not in of
            third = added(of, user_id)
            assert third.wire_id not in {users.wire_id, renamed.wire_id}
            assert of.find([user_id]) == [third]
    assert of.abort([users])
    assert users.got[-1].finish_reason == FinishReason.ABORT
    of.abort([renamed, third])
    assert len(of) == 0
    again = added(of, "a")
    assert again.wire_id not in {"a", "a~1", renamed.wire_id, third.wire_id}  # all of them may still be spoken of


# --- waves ------------------------------------------------------------------------------------------------------------


def test_a_wave_begins_with_its_first_request_and_ends_when_an_engine_says_so():
    waves = Waves(True)
    assert waves.on_request(1) == Start(0, 1)
    assert waves.on_request(0) is None
    assert waves.on_outputs(EngineCoreOutputs(wave_complete=0), False) is None
    assert waves.on_outputs(EngineCoreOutputs(engine_index=1, wave_complete=0), True) is None  # the other says so, too
    assert waves.on_request(0) == Start(1, 0)
    assert waves.on_outputs(EngineCoreOutputs(wave_complete=1), True) == Start(2, None)
    assert waves.on_outputs(EngineCoreOutputs(engine_index=1, start_wave=2), True) is None
    assert waves.on_outputs(EngineCoreOutputs(engine_index=1, start_wave=3), True) == Start(3, 1)


def test_engines_that_know_no_waves_hear_of_none():
    waves = Waves(False)
    assert waves.on_request(0) is None
    assert waves.on_outputs(EngineCoreOutputs(start_wave=3), True) is None


# --- turns ------------------------------------------------------------------------------------------------------------


class Post:
    """What a socket would bring: queues to put into, in any order, some after a while."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.letters: SimpleQueue[Any] = SimpleQueue()
        self.inside = 0
        self.turns = Turns(self.lock, self.receive)

    def receive(self, queue: Any, deadline: float | None) -> None:
        self.inside += 1
        assert self.inside == 1  # one at a time
        try:
            while queue.empty():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return
                try:
                    to, what = self.letters.get(timeout=left)
                except Empty:
                    return
                with self.lock:
                    to.put(what)
        finally:
            self.inside -= 1


@pytest.mark.parametrize("seed", range(5))
def test_each_gets_what_is_his_whoever_received_it(seed):
    post, chance = Post(), random.Random(seed)
    queues: list[Any] = [SimpleQueue() for _ in range(8)]
    got: list[list[int]] = [[] for _ in queues]

    def wait(index: int) -> None:
        while len(got[index]) < 200:
            with contextlib.suppress(Empty):
                got[index].append(post.turns.wait(queues[index], 0.001 if index % 3 == 0 else None))

    threads = [threading.Thread(target=wait, args=(index,), daemon=True) for index in range(len(queues))]
    for thread in threads:
        thread.start()
    letters = [(index, number) for index in range(len(queues)) for number in range(200)]
    order = [index for index, _ in letters]
    chance.shuffle(order)
    numbers = [iter(range(200)) for _ in queues]
    for index in order:
        post.letters.put((queues[index], next(numbers[index])))
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert got == [list(range(200))] * len(queues)
    assert post.turns.take()


def test_who_waits_in_vain_gives_the_turn_away():
    post = Post()
    mine: Any = SimpleQueue()
    with pytest.raises(Empty):
        post.turns.wait(mine, 0.01)
    with pytest.raises(Empty):
        post.turns.wait(mine, 0)
    other = threading.Thread(target=post.turns.take)
    other.start()
    other.join()
    with pytest.raises(Empty):  # nobody receives, and the turn is held: the wait still ends
        post.turns.wait(mine, 0.01)
    post.turns.leave()
    post.letters.put((mine, 5))
    assert post.turns.wait(mine, None) == 5


def test_no_interrupt_loses_the_turn():
    """A signal's handler may raise at any step of Python code, as Ctrl-C does: a tracer that raises at each line in its turn."""

    class Interrupt(BaseException):
        pass

    post = Post()
    code = Turns.wait.__code__, Turns._step_back.__code__
    source = inspect.getsource(sys.modules[Turns.__module__]).splitlines()
    lines = sorted({line for one in code for _, _, line in one.co_lines() if line and source[line - 1].strip() != "try:"})
    interrupted = 0
    for line in lines:

        def trace(frame: Any, event: str, _: Any, line: int = line) -> Any:
            if frame.f_code in code and event in ("line", "call"):
                if event == "line" and frame.f_lineno == line:
                    sys.settrace(None)
                    frame.f_trace = None
                    raise Interrupt
                return trace
            return None

        mine: Any = SimpleQueue()
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            post.turns.wait(mine, 0.01)
        except Interrupt:
            interrupted += 1
        except Empty:
            pass
        finally:
            sys.settrace(before)
        assert post.turns.take(), f"lost at line {line}"
        post.turns.leave()
    assert interrupted > 5


# --- worker -----------------------------------------------------------------------------------------------------------


def test_jobs_are_done_in_order_and_those_taken_back_are_not_done_at_all():
    async def main() -> None:
        worker, done, gate = Worker("worker"), [], threading.Event()
        first = asyncio.create_task(worker.submit(gate.wait).result(lambda: None))
        rest = [asyncio.create_task(worker.submit(done.append, i).result(lambda: None)) for i in range(5)]
        await asyncio.sleep(0)
        rest[2].cancel()
        await asyncio.wait([rest[2]])
        gate.set()
        await asyncio.gather(first, *rest, return_exceptions=True)
        worker.close()
        assert done == [0, 1, 3, 4]

    asyncio.run(main())


def test_a_job_at_work_is_waited_for_even_if_cancelled_again_and_again():
    async def main() -> None:
        worker, begun, gate = Worker("worker"), threading.Event(), threading.Event()
        over: list[str] = []

        def work() -> None:
            begun.set()
            gate.wait(LIMIT)
            over.append("work")
            raise ValueError("nobody's any more")

        task = asyncio.create_task(worker.submit(work).result(lambda: over.append("asked")))
        await asyncio.to_thread(begun.wait, LIMIT)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.001)
        assert not task.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert over == ["asked", "work"]
        with pytest.raises(ZeroDivisionError):
            await worker.submit(divmod, 1, 0).result(lambda: None)
        assert await worker.submit(divmod, 7, 2).result(lambda: None) == (3, 1)
        worker.close()

    asyncio.run(main())


# --- connections ------------------------------------------------------------------------------------------------------


class FrameOf:
    """Of a connection that is only a number here."""

    def __init__(self, fd: int, address: str) -> None:
        self._known = {"__fd": fd, "Peer-Address": address}

    def get(self, name: str) -> Any:
        return self._known[name]


def test_what_one_engine_says_under_anothers_number_ties_no_connection_to_that():
    none = 1 << 20  # no descriptor of this process
    watch = Watch((0, 1))
    for rank in (0, 1):
        watch.on_ready(rank, FrameOf(none + rank, f"0:0:{100 + rank}"))
    watch.on_output(0, FrameOf(none + 3, "0:0:101"))
    assert watch.lost_output(none + 3) is None
    watch.on_output(0, FrameOf(none + 2, "0:0:100"))
    assert watch.learning
    watch.on_output(1, FrameOf(none + 3, "0:0:101"))
    assert not watch.learning
    assert [watch.lost_output(none + 2), watch.lost_output(none + 3)] == [0, 1]


@pytest.mark.parametrize("at", range(1, 5))
def test_an_exception_between_two_frames_leaves_no_half_message_behind(monkeypatch, at):
    class Interrupt(BaseException):
        pass

    sent: list[Any] = []

    def send(socket: Any, frame: Any, flags: int, copy: bool) -> None:
        sent.append((bytes(frame), flags))
        if len(sent) == at:
            raise Interrupt  # as a handler does when the call is over

    monkeypatch.setattr(connection, "_send", send)
    with pytest.raises(Interrupt):
        connection.send_frames(None, [b"1", b"2", b"3", b"4"])  # type: ignore[arg-type]
    assert [frame for frame, _ in sent] == [b"1", b"2", b"3", b"4"]
    assert [bool(flags) for _, flags in sent] == [True, True, True, False]


# --- what is large ----------------------------------------------------------------------------------------------------


def test_a_request_is_large_by_its_prompt_too():
    assert not is_large(text("1", ids=range(1000)))
    assert is_large(text("1", ids=range(1 << 19)))
    assert not is_large(text("1", ids=range(1 << 19)), 8 << 20)
    assert not is_large(EngineCoreRequest("1", None))

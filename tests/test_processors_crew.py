"""Crew: what a pool decides under its lock, step by step, with workers that start and die when the test says so."""

from __future__ import annotations

from concurrent.futures import Executor, Future

import pytest
from support.processors import until

from fastmm.errors import ProcessorError, ProcessorOverloaded
from fastmm.processors import Work
from fastmm.processors.crew import Crew, Job
from fastmm.processors.worker import Failure

NOT_A_PROCESS = 2**22 + 1  # no pid is that high


class Nothing(Executor):
    def __init__(self, index: int) -> None:
        self.index = index
        self.ended = False

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.ended = True


class Stage:
    """A crew whose workers are processes, as far as it knows."""

    def __init__(self, workers: int, queue_size: int) -> None:
        self.made: list[Nothing] = []
        self.births: list[Future[object]] = []
        self.started: list[tuple[str, int]] = []
        self.failed: list[tuple[str, str]] = []
        self.hosts: dict[str, object] = {}
        self.no_thread = self.no_process = False
        self.crew = Crew(workers, queue_size, None, None, make=self.make, ready=self.ready, start=self.start, fail=self.fail)

    def make(self, index: int) -> Executor:
        if self.no_thread:
            raise RuntimeError("can't start new thread")
        self.made.append(Nothing(index))
        return self.made[-1]

    def ready(self, executor: Executor) -> Future[object]:
        if self.no_process:
            raise OSError("too many open files")
        self.births.append(Future())
        return self.births[-1]

    def start(self, job: Job, host) -> None:
        self.started.append((job.rid, host.index))
        self.hosts[job.rid] = host

    def fail(self, job: Job, error) -> None:
        if self.crew.claim(job, "failed"):
            self.failed.append((job.rid, str(error)))

    def submit(self, rid: str) -> Job:
        job = Job(self.crew, Work(request_id=rid))
        self.crew.admit(job, parked=False)
        return job

    def finish(self, job: Job) -> None:
        assert self.crew.claim(job, "completed")
        self.crew.release(job, self.hosts[job.rid])


LOAD_FAILED = Failure("ProcessorError", "no weights", {}, "")


def test_requests_wait_for_workers_that_start_and_each_gets_one():
    stage = Stage(workers=2, queue_size=0)
    stage.submit("a")
    stage.submit("b")
    with pytest.raises(ProcessorOverloaded):
        stage.submit("c")
    assert stage.started == []
    stage.births[1].set_result(NOT_A_PROCESS)
    stage.births[0].set_result(NOT_A_PROCESS)
    assert stage.started == [("a", 1), ("b", 0)]


def test_a_worker_that_was_made_for_a_refused_request_starts_all_the_same():
    stage = Stage(workers=2, queue_size=0)
    stage.submit("a")
    stage.submit("b")
    stage.births[0].set_result(LOAD_FAILED)  # the other one may still live: nobody fails yet
    assert stage.failed == []
    with pytest.raises(ProcessorOverloaded):
        stage.submit("c")
    assert len(stage.births) == 3
    for birth in stage.births[1:]:
        birth.set_result(NOT_A_PROCESS)
    assert sorted(stage.started) == [("a", 1), ("b", 0)]


def test_when_the_last_worker_cannot_start_what_waits_fails():
    stage = Stage(workers=2, queue_size=5)
    for rid in "abc":
        stage.submit(rid)
    stage.births[0].set_result(LOAD_FAILED)
    stage.births[1].set_result(LOAD_FAILED)
    assert stage.failed == [(rid, "no worker could start: no weights") for rid in "abc"]
    until(lambda: all(executor.ended for executor in stage.made))
    stage.submit("d")  # a later one tries again
    stage.births[2].set_result(NOT_A_PROCESS)
    assert stage.started == [("d", 0)]


def test_a_process_that_dies_as_it_starts_is_tried_again_but_not_for_ever():
    stage = Stage(workers=1, queue_size=5)
    stage.submit("a")
    for i in range(5):
        assert stage.failed == []
        stage.births[i].set_exception(RuntimeError("killed"))
    assert [rid for rid, _ in stage.failed] == ["a"]
    assert len(stage.births) == 5


def test_a_replacement_has_the_index_of_what_it_replaces():
    stage = Stage(workers=3, queue_size=5)
    jobs = [stage.submit(rid) for rid in "abc"]
    for birth in stage.births:
        birth.set_result(NOT_A_PROCESS)
    stage.crew.replace(stage.hosts["b"])
    assert [executor.index for executor in stage.made] == [0, 1, 2, 1]
    until(lambda: stage.made[1].ended)
    stage.crew.replace(stage.hosts["b"])  # who comes second finds it done
    assert len(stage.made) == 4
    stage.finish(jobs[0])


def test_a_request_whose_worker_is_gone_goes_before_those_that_wait():
    stage = Stage(workers=1, queue_size=5)
    first, second = stage.submit("a"), stage.submit("b")
    stage.births[0].set_result(NOT_A_PROCESS)
    host = stage.hosts["a"]
    stage.crew.replace(host)
    assert stage.crew.again(first, host) is True
    assert stage.crew.counters["queued"] == 2
    stage.births[1].set_result(NOT_A_PROCESS)
    assert [rid for rid, _ in stage.started] == ["a", "a"]
    stage.finish(first)
    stage.finish(second)
    assert [rid for rid, _ in stage.started] == ["a", "a", "b"]
    assert stage.crew.close(0)[0] is True


def test_a_request_that_was_cancelled_is_not_started_again():
    stage = Stage(workers=1, queue_size=5)
    job = stage.submit("a")
    stage.births[0].set_result(NOT_A_PROCESS)
    assert job.cancel()
    assert stage.crew.again(job, stage.hosts["a"]) is False
    stage.crew.release(job, stage.hosts["a"])
    stage.submit("a")
    assert [rid for rid, _ in stage.started] == ["a", "a"]


def test_a_process_that_the_system_refuses_fails_the_request_and_the_next_one_tries_again():
    stage = Stage(workers=1, queue_size=0)
    stage.no_process = True
    stage.submit("a")
    assert stage.failed == [("a", "no worker could start: OSError: too many open files")]
    assert stage.crew.counters["queued"] == stage.crew.counters["workers"] == 0
    assert stage.crew.start(0) is False
    stage.no_process = False
    stage.submit("a")
    stage.births[0].set_result(NOT_A_PROCESS)
    assert stage.started == [("a", 0)]


def test_an_executor_that_cannot_be_made_is_a_refusal_where_there_is_no_other():
    stage = Stage(workers=2, queue_size=1)
    stage.no_thread = True
    with pytest.raises(ProcessorError, match="no worker could start: RuntimeError"):
        stage.submit("a")
    assert stage.crew.start(0) is False
    stage.no_thread = False
    first = stage.submit("a")
    stage.births[0].set_result(NOT_A_PROCESS)
    stage.no_thread = True
    stage.submit("b")  # waits for the one that there is
    stage.finish(first)
    assert stage.started == [("a", 0), ("b", 0)]


@pytest.mark.parametrize("lacks", ["no_thread", "no_process"])
def test_what_waits_for_a_worker_that_cannot_be_replaced_fails(lacks):
    stage = Stage(workers=1, queue_size=5)
    first, _ = stage.submit("a"), stage.submit("b")
    stage.births[0].set_result(NOT_A_PROCESS)
    setattr(stage, lacks, True)
    stage.crew.replace(stage.hosts["a"])
    assert [rid for rid, _ in stage.failed] == ["b"]
    assert stage.crew.again(first, stage.hosts["a"]) is True
    assert [rid for rid, _ in stage.failed] == ["b", "a"]
    assert stage.crew.close(0)[0] is True

"""A pool of processors over any executor: bounded, cancellable, and whole again after whatever a processor does."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor
from typing import Any

from ..errors import FastmmError, ProcessorDied, ProcessorError, ProcessorTimeout
from . import executors, worker
from .aio import awaitable_of
from .carry import Carrier
from .casting import cast_result, wire_dtype
from .contract import Budgets, Processor, Tokenizer, Work
from .crew import Crew, Host, Job
from .crossing import Crossing, Resend, Trip
from .run import process_work
from .store import ResultStore
from .words import error_text

__all__ = ["ProcessorPool"]

_PACKERS = 4
_log = logging.getLogger("fastmm")


class ProcessorPool:
    """Runs requests through a processor, many at a time.

    Parameters
    ----------
    processor
        A `Processor`; the name of one (an entry point of ``fastmm.processors``); or a class or function without arguments
        that makes one where it runs, once per process.
    tokenizer
        Handed to the processor; it, or a class or function that makes it.
    executor
        None: `workers` threads. ``"processes"``: as many processes. Any `concurrent.futures.Executor`: `workers` is how
        many requests it is given at a time. It stays its owner's: the pool does not shut it down. A function that makes an
        executor: it does, and calls the function again to replace one that broke.
    workers
        Requests at work at the same time.
    queue_size
        Requests that wait. One more is refused at once.
    timeout
        Seconds that one request may be at work, None for no bound. Neither its time in the queue counts nor the start of
        a worker. Of workers on other machines nobody knows when they begin: there it is the time since it was handed over.
    store
        Where results are parked, besides being the result of the future.
    budgets
        What a request may ask for; None: the defaults of `Budgets`.
    dtype
        What floating features end in (``"bfloat16"``, or the type of torch or numpy): the worker casts them, so that half
        the bytes cross, and whoever encodes the result has nothing to cast. None: as the processor made them.
    load
        ``load(processor, tokenizer) -> (processor, tokenizer)``: how they are made ready, once per process.
    run
        ``run(processor, work, tokenizer, budgets=...) -> result``: everything that a worker does with a request: media,
        processing, validation, the caller's hashes.
    carrier
        How work and results cross to another process.

    Notes
    -----
    What else a serving stack may want to change is a method: `wrap`, `affinity`, `make_executor`, `replace_executor`,
    `kill_worker`. All methods may be called from any thread.

    A thread that hangs cannot be ended. Its request fails, another thread takes its place, and it is forgotten: it costs
    its memory, and no capacity, until it comes back. A process that hangs is killed.
    """

    def __init__(
        self,
        processor: Processor | str | Callable[[], Processor],
        *,
        tokenizer: Tokenizer | Callable[[], Tokenizer] | None = None,
        executor: Executor | Callable[[], Executor] | str | None = None,
        workers: int = 8,
        queue_size: int = 8192,
        timeout: float | None = None,
        store: ResultStore | None = None,
        budgets: Budgets | None = None,
        dtype: Any = None,
        load: Callable[[Any, Any], tuple[Any, Any]] = worker.load_both,
        run: Callable[..., Any] = process_work,
        carrier: Carrier | None = None,
    ) -> None:
        for name, value, least in (("workers", workers, 1), ("queue_size", queue_size, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ProcessorError(f"expected an int of at least {least}, got {value!r}", path=f"ProcessorPool.{name}")
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0):
            raise ProcessorError(f"expected seconds above 0 or None, got {timeout!r}", path="ProcessorPool.timeout")
        self.store = store
        self.budgets = budgets
        self._run = run
        self._dtype = wire_dtype(dtype)
        self._timeout = timeout
        self._make: Callable[[], Executor] | None = None
        given: Executor | None = None
        if isinstance(executor, Executor):
            given = executor
        elif callable(executor):
            self._make = executor
            given = executor()
        elif executor is not None and executor != "processes":
            raise ProcessorError(
                f"expected None, 'processes', an Executor or a function that makes one, got {executor!r}",
                path="ProcessorPool.executor",
            )
        self._crossing: Crossing | None = None
        self._packers: ThreadPoolExecutor | None = None
        self._local: tuple[Any, Any] = (None, None)
        if executor == "processes" or (given is not None and not executors.is_local(given)):
            self._crossing = Crossing(processor, tokenizer, budgets, self._dtype, load, run, carrier or Carrier())
            # Packing large media takes as long as copying them: not on a caller's event loop, nor on an executor's thread.
            self._packers = ThreadPoolExecutor(min(_PACKERS, workers), thread_name_prefix="fastmm-pack")
        else:
            self._local = load(processor, tokenizer)
        self._crew = Crew(
            workers,
            queue_size,
            timeout,
            given,
            make=lambda index: self.make_executor(index),
            ready=self._ready if self._crossing else None,
            start=self._start,
            fail=self._fail,
        )
        self._over = threading.Event()
        if timeout is not None:
            arguments = (weakref.ref(self), timeout, self._over)
            threading.Thread(target=_watch, args=arguments, name="fastmm-watchdog", daemon=True).start()

    # --- what a serving stack may want to change ----------------------------------------------------------------------

    def wrap(self, work: Work, processed: Any) -> Any:
        """What is parked and completed in place of a worker's result. Called in this process; what it raises fails the
        request."""
        return processed

    def affinity(self, index: int) -> Collection[int] | None:
        """The CPUs of a worker (0, 1...) that the pool starts; None: whatever the system chooses."""
        return None

    def make_executor(self, index: int) -> Executor:
        """An executor of one worker, for a pool that was given none."""
        cpus = self.affinity(index)
        if self._crossing is not None:
            return executors.process_executor(worker.begin_process, (self._crossing.spec, cpus))
        pin = None if cpus is None else functools.partial(worker.pin, cpus)
        return executors.DaemonThreadExecutor(f"fastmm-processor-{index}", pin)

    def replace_executor(self, executor: Executor) -> Executor:
        """What takes the place of an executor that was given, and broke or hangs. A cluster's mends itself, and stays."""
        return self._make() if self._make is not None else executors.same_again(executor)

    def kill_worker(self, pid: int) -> None:
        """End a process of an executor that was given, on this machine, because its request hangs."""
        executors.kill_process(pid)

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, work: Work) -> Future[Any]:
        """Put a request to work.

        Returns
        -------
        concurrent.futures.Future
            Of the result. Its `cancel` is that of the pool. It fails with a `FastmmError`: what the processor raised as
            `ProcessorError`, `ProcessorTimeout`, `ProcessorDied`, and those of media, extensions, validation and store.

        Raises
        ------
        ProcessorOverloaded
            As many requests as may wait do.
        DuplicateRequest
            A request of this id is at work, or its result is parked.
        ProcessorError
            The pool is shut down, or that is no `Work`.
        """
        if not isinstance(work, Work):
            raise ProcessorError(f"expected a Work, got {type(work).__name__}")
        job = Job(self._crew, work)
        self._crew.admit(job, parked=self.store is not None and job.rid in self.store)
        return job

    def asubmit(self, work: Work) -> asyncio.Future[Any]:
        """`submit` for the running event loop. The request is at work at once; cancelling what is returned cancels it."""
        return awaitable_of(self.submit(work))

    def cancel(self, rid: str) -> bool:
        """Cancel a request. A result that arrives later is dropped, never parked. Whether it was still at work."""
        job = self._crew.job(rid)
        return job is not None and job.cancel()

    def start(self, timeout: float | None = None) -> bool:
        """Start all workers and wait until they are ready; whether all are. Without it each starts when it is needed."""
        return self._crew.start(timeout)

    @property
    def counters(self) -> dict[str, int]:
        """Now: ``queued``, ``running``, ``workers``. So far: ``submitted``, of which ``completed``, ``failed`` or
        ``cancelled``; ``refused``; ``timeouts`` and ``died``, which failed; ``resent`` because their worker broke before
        it began; results ``dropped`` that came too late; workers ``replaced``."""
        return self._crew.counters

    def shutdown(self, timeout: float | None = 5.0) -> bool:
        """Take no more requests, let those that were taken come to an end, and after `timeout` seconds fail the rest.

        May be called more than once, and from several threads. Processes that the pool started have ended afterwards; of
        its threads only those that hang are left. An executor that it was given goes on.

        Returns
        -------
        bool
            Whether every request came to an end by itself.
        """
        end = None if timeout is None else time.monotonic() + timeout
        clean, left, hosts = self._crew.close(timeout)
        for job in left:
            self._fail(job, ProcessorError(f"the pool was shut down before request {job.rid!r} was done"))
        self._over.set()
        if self._crew.own or self._make is not None:
            self._end(hosts, end)
        if self._packers is not None:
            self._packers.shutdown(wait=False)
        for job in left:
            if self._crossing is not None and job.trip is not None:
                self._crossing.discard(job.trip)
        return clean

    def __enter__(self) -> ProcessorPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        crew: Crew | None = self.__dict__.get("_crew")  # None: it was never whole
        if crew is None:
            return
        self._over.set()
        if crew.abandon():
            warnings.warn(f"{type(self).__name__} was not shut down", ResourceWarning, source=self, stacklevel=2)

    # --- to an executor -----------------------------------------------------------------------------------------------

    def _ready(self, executor: Executor) -> Future[Any]:
        assert self._crossing is not None
        return executor.submit(worker.ready, self._crossing.spec.key)

    def _start(self, job: Job, host: Host) -> None:
        """A request has a slot: hand it over. Whatever prevents that is its failure."""
        executor = job.executor = host.executor
        try:
            if self._packers is not None:
                if self._is_small(job.work):
                    self._send(job, host)
                else:
                    self._packers.submit(self._send, job, host)
            elif isinstance(executor, executors.DaemonThreadExecutor):
                executor.post(self._at_work, job, host)
            else:
                executor.submit(self._at_work, job, host).add_done_callback(functools.partial(self._not_at_work, job, host))
        except Exception as error:  # its owner shut it down, for one
            self._fail(job, ProcessorDied(f"the executor takes no more requests: {error_text(error)}"))
            self._crew.release(job, host)

    def _at_work(self, job: Job, host: Host) -> None:
        """All of a request that is processed in this process, on a worker's thread."""
        work = job.work
        try:
            if work is not None:  # not cancelled meanwhile
                result = self._run(self._local[0], work, self._local[1], budgets=self.budgets)
                self._complete(job, result if self._dtype is None else cast_result(result, self._dtype))
        except BaseException as error:
            self._fail(job, _as_ours(error))
        finally:
            work = None  # an error that is kept keeps this frame
            self._crew.release(job, host)

    def _not_at_work(self, job: Job, host: Host, inner: Future[Any]) -> None:
        if inner.cancelled():
            self._fail(job, ProcessorDied("the executor was shut down with the request in its queue"))
            self._crew.release(job, host)

    def _is_small(self, work: Work | None) -> bool:
        """Whether packing a request takes no longer than changing threads."""
        assert self._crossing is not None
        if work is None:
            return True
        nbytes = 0
        prefetched = work.prefetched if isinstance(work.prefetched, (list, tuple)) else ()  # a worker says what is wrong
        for source in (work.text or "", *(media.source for media in work.media), *prefetched):
            found = len(source) if isinstance(source, (str, bytes)) else getattr(source, "nbytes", None)
            if not isinstance(found, int):
                return False
            nbytes += found
        return nbytes < self._crossing.carrier.inline_nbytes

    def _send(self, job: Job, host: Host) -> None:
        """Pack a request and hand it over, to a worker that is in another process. Raises nothing: a packer's thread has nobody
        to tell."""
        assert self._crossing is not None
        job.trip = trip = job.trip or Trip()
        try:
            if self._sent(job, host, trip):
                return
        except FastmmError as error:  # whose traceback would keep the frames of whoever called submit
            self._fail(job, error.with_traceback(None))
        except Exception as error:  # also of what a serving stack overrides, where the executor broke
            self._fail(job, ProcessorDied(f"the executor takes no requests: {error_text(error)}"))
        self._crossing.discard(trip)
        self._crew.release(job, host)

    def _sent(self, job: Job, host: Host, trip: Trip) -> bool:
        """Whether the request keeps its slot: it was handed over, or will be once more."""
        assert self._crossing is not None
        executor, work = host.executor, job.work
        job.executor = executor
        if work is None:  # cancelled meanwhile
            return False
        try:
            job.inner = inner = self._crossing.send(trip, work, executor)
        except BrokenExecutor as error:
            return self._broke(job, host, executor, error)
        inner.add_done_callback(functools.partial(self._came_back, job, host, executor))
        return True

    # --- from an executor to whoever waits ----------------------------------------------------------------------------

    def _came_back(self, job: Job, host: Host, executor: Executor, inner: Future[Any]) -> None:
        """An executor is done with a request that crossed, in whatever way. Called on a thread of the executor's."""
        kept = False
        try:
            error = CancelledError() if inner.cancelled() else inner.exception()
            kept = self._settle(job, host, executor, inner.result() if error is None else error)
        except BaseException as unforeseen:
            self._fail(job, _as_ours(unforeseen))
        finally:
            if not kept:
                job.inner = None
                self._crew.release(job, host)

    def _settle(self, job: Job, host: Host, executor: Executor, reply: Any) -> bool:
        """Whether the request is sent once more, and keeps its slot."""
        assert self._crossing is not None
        trip = job.trip
        assert trip is not None
        if isinstance(reply, BrokenExecutor):
            return self._broke(job, host, executor, reply)
        if isinstance(reply, BaseException):
            self._died(job, ProcessorDied(f"the executor lost the request: {error_text(reply)}"))
        elif job.done():
            self._crew.count("dropped")
        else:
            try:
                self._complete(job, self._crossing.result(trip, reply))
                return False  # all that it had was read
            except Resend:
                self._crossing.discard(trip)
                return self._crew.again(job, host)
            except FastmmError as error:
                self._fail(job, error)
        self._crossing.discard(trip)
        return False

    def _broke(self, job: Job, host: Host, executor: Executor, error: BaseException) -> bool:
        """A worker of the executor died: was it this request's? If not, it is sent again."""
        assert self._crossing is not None
        trip = job.trip
        assert trip is not None
        lost = self._crossing.was_lost(trip, alone=host.slots == 1)
        self._crossing.discard(trip)
        if self._crew.own:
            self._crew.replace(host)
        else:
            self._crew.renew(host, executor, self.replace_executor)
        if job.done():  # cancelled, or given up because it hung
            return False
        if not lost and not trip.exhausted:
            self._crew.count("resent")
            return self._crew.again(job, host)
        self._died(job, ProcessorDied(f"the process that worked on request {job.rid!r} died: {error_text(error)}"))
        return False

    def _complete(self, job: Job, processed: Any) -> None:
        if not self._crew.claim(job, "completed"):
            self._crew.count("dropped")
            return
        work, job.work = job.work, None
        assert work is not None
        try:
            result = self.wrap(work, processed)
            if self.store is not None:
                self.store.park(job.rid, result)
        except BaseException as error:
            work = processed = result = None
            self._crew.count("completed", -1)
            self._crew.count("failed")
            job.set_exception(_without_locals(_as_ours(error)))
        else:
            job.set_result(result)

    def _fail(self, job: Job, error: FastmmError) -> None:
        if self._crew.claim(job, "failed"):
            job.work = None
            job.set_exception(_without_locals(error))

    def _died(self, job: Job, error: ProcessorDied) -> None:
        if not job.done():  # else it failed before, as one that hung
            self._crew.count("died")
            self._fail(job, error)

    # --- workers that are gone, or as good as -------------------------------------------------------------------------

    def _look(self) -> float | None:
        """The watchdog's: gives up what is past its deadline; the next deadline."""
        late, following = self._crew.late(time.monotonic(), self._elapsed)
        for job, host in late:
            self._crew.count("timeouts")
            self._fail(job, ProcessorTimeout(f"request {job.rid!r} was at work for more than {self._timeout} s"))
            try:
                self._give_up(job, host)
            except Exception:  # of a method that a serving stack overrides: the others must not wait for ever
                _log.exception("a worker that hangs could not be replaced")
            finally:
                self._crew.gave_up()
        return following

    def _elapsed(self, job: Job) -> float | None:
        if self._crossing is None or self._crew.own:
            return math.inf  # it was at work from the moment that it had its slot
        if job.trip is None or job.executor is None:
            return None
        return self._crossing.elapsed(job.trip, job.executor)

    def _give_up(self, job: Job, host: Host) -> None:
        """Free the slot of a request that hangs, with a worker to fill it."""
        if self._crew.own:
            self._crew.replace(host)
            return
        assert job.executor is not None
        if self._crossing is None:
            self._crew.renew(host, job.executor, self.replace_executor)
        elif job.trip is not None:
            pid = self._crossing.pid(job.trip)
            if job.inner is not None and not executors.is_stdlib(job.executor):
                job.inner.cancel()  # or a cluster gives it to the next worker when this one is gone
            if pid is not None:
                self.kill_worker(pid)
            self._crossing.discard(job.trip)
        self._crew.offer(host)

    def _end(self, hosts: list[Host], end: float | None) -> None:
        """Shut down executors of the pool's own within what is left of the time."""

        pids = {pid for host in hosts for pid in (host.pid, *executors.processes_of(host.executor)) if pid is not None}
        # One thread each: they wait, and once told not to wait an executor cannot be waited for any more.
        closing = [threading.Thread(target=host.executor.shutdown, name="fastmm-shutdown", daemon=True) for host in hosts]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(None if end is None else max(0.1, end - time.monotonic()))
        if any(thread.is_alive() for thread in closing):
            for pid in pids:
                executors.kill_process(pid)
            for thread in closing if pids else ():
                thread.join(5.0)


def _watch(pool: weakref.ref[ProcessorPool], timeout: float, over: threading.Event) -> None:
    """The watchdog, which keeps no pool alive. A request that begins after a look is due no earlier than `timeout` later:
    nobody need wake it."""
    wait = timeout
    while not over.wait(wait):
        found = pool()
        if found is None:
            return
        following = found._look()
        del found
        wait = timeout if following is None else min(timeout, max(0.0, following - time.monotonic()))


def _as_ours(error: BaseException) -> FastmmError:
    if isinstance(error, FastmmError):
        return error
    found = ProcessorError(error_text(error))
    found.__cause__ = error
    return found


def _without_locals(error: FastmmError) -> FastmmError:
    """The error, whose tracebacks keep their lines and no variables: who keeps a failed future keeps no request."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            waiting += [found.__cause__, found.__context__]
    return error

"""Who is at work on what: the requests of a pool, its queue, and its workers, which are replaced when they are gone.

A *host* is an executor with a number of slots. Those that a pool makes itself have one worker and one slot each, so that a
worker that died or hangs is replaced alone; an executor that it was given is one host with all of the slots. A request waits
in the queue until a slot is free, so that no executor ever has more than it works on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from ..errors import DuplicateRequest, FastmmError, ProcessorError, ProcessorOverloaded
from . import executors, worker
from .contract import Work
from .words import error_text

if TYPE_CHECKING:
    from .crossing import Trip

__all__ = ["Crew", "Host", "Job"]

_GONE_MAX = 16
_STALE_MAX = 64  # jobs in the queue that are no more, beside as many as do wait
_EXTENDED_MAX = 9  # deadlines of one job
_STILLBORN_MAX = 5  # then whatever kills them will kill the next one, too


class Host:
    """An executor and its slots. Its fields change under the crew's lock."""

    __slots__ = ("executor", "index", "pid", "slots")

    def __init__(self, executor: Executor, index: int, slots: int = 1) -> None:
        self.executor = executor
        self.index = index  # of the worker, for its affinity; a replacement has that of what it replaces
        self.slots = slots
        self.pid: int | None = None  # of a process that the pool started


class Job(Future[Any]):
    """One request, and the future that its caller holds."""

    def __init__(self, crew: Crew, work: Work) -> None:
        super().__init__()
        self.crew = crew
        self.work: Work | None = work  # None once it is over: a future that is kept does not keep the request
        self.rid = work.request_id
        self.queued = False
        self.host: Host | None = None  # whose slot it holds
        self.deadline = float("inf")
        self.extended = 0
        self.executor: Executor | None = None  # that it was handed to,
        self.inner: Future[Any] | None = None  # and what that gave for it
        self.trip: Trip | None = None  # where it is at work in another process

    def cancel(self) -> bool:
        """Cancel the request, at work or not: its result is dropped when it comes. False once it is complete."""
        if not super().cancel():
            return False
        self.crew.cancelled(self)
        return True


class Crew:
    """The state of a pool, under one lock. What it calls back is called without the lock, unless said otherwise.

    Parameters
    ----------
    workers, queue_size, timeout
        Of the pool.
    given
        The executor that the pool was given, or None: then `make` makes one for each worker.
    make
        ``make(index) -> Executor``. Called under the lock.
    ready
        ``ready(executor) -> Future | None``: of the pid of a process that the executor must start first; None where it
        need not.
    start
        ``start(job, host)``: the job has got a slot. Raises nothing.
    fail
        ``fail(job, error)``: the job can get none.
    """

    def __init__(
        self,
        workers: int,
        queue_size: int,
        timeout: float | None,
        given: Executor | None,
        *,
        make: Callable[[int], Executor],
        ready: Callable[[Executor], Future[Any]] | None,
        start: Callable[[Job, Host], None],
        fail: Callable[[Job, FastmmError], None],
    ) -> None:
        self.workers = workers
        self.queue_size = queue_size
        self.timeout = timeout
        self.own = given is None
        self._make = make
        self._ready = ready
        self._start_one = start
        self._fail = fail
        self._local = threading.local()
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)  # notified when nothing is left to do, and when a worker is ready
        self._jobs: dict[str, Job] = {}  # by request id, until complete, failed or cancelled
        self._queue: deque[Job] = deque()  # cancelled ones stay in it, and are passed over
        self._queued = 0
        self._running: dict[Job, None] = {}  # those that hold a slot
        self._giving_up = 0  # hosts whose job hangs, and that are being replaced,
        self._giver: int | None = None  # by this thread
        self._hosts: list[Host] = []
        self._idle: list[Host] = []  # one entry for each free slot
        # Executors that broke are not let go of at once: where the last reference goes on their own thread, which holds their
        # lock then, Python 3.13 waits for itself.
        self._gone: deque[Executor] = deque(maxlen=_GONE_MAX)
        self._starting = 0
        self._stillborn = 0  # processes that died before they were ready, one after the other
        self._closed = False
        self._counts = dict.fromkeys(
            ("submitted", "completed", "failed", "cancelled", "refused", "timeouts", "died", "resent", "dropped", "replaced"), 0
        )
        _crews.add(self)
        if given is not None:
            self._hosts.append(Host(given, 0, workers))
            self._idle.extend(self._hosts * workers)

    def _start(self, job: Job, host: Host) -> None:
        """Start a job. What that frees at once, because it fails at once, is started afterwards and not within: a long queue
        before an executor that refuses everything must not become as deep a stack."""
        waiting: deque[tuple[Job, Host]] | None = getattr(self._local, "waiting", None)
        if waiting is not None:
            waiting.append((job, host))
            return
        self._local.waiting = waiting = deque([(job, host)])
        try:
            while waiting:
                self._start_one(*waiting.popleft())
        finally:
            self._local.waiting = None

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    @property
    def counters(self) -> dict[str, int]:
        with self._lock:
            slots = sum(host.slots for host in self._hosts)
            return {"queued": self._queued, "running": len(self._running), "workers": slots, **self._counts}

    def job(self, rid: str) -> Job | None:
        with self._lock:
            return self._jobs.get(rid)

    # --- in -----------------------------------------------------------------------------------------------------------

    def admit(self, job: Job, *, parked: bool) -> None:
        """Take a job: it gets a slot, a new worker, or a place in the queue. Or is refused, and nothing has changed."""
        fresh: Host | None = None
        refusal: ProcessorError | None = None
        with self._lock:
            if self._closed:
                raise ProcessorError("the pool is shut down")
            if parked or job.rid in self._jobs:
                self._counts["refused"] += 1
                raise DuplicateRequest(f"request {job.rid!r} {'has a result that is parked' if parked else 'is at work'}")
            host = self._idle.pop() if self._idle else None
            if host is None and self.own and len(self._hosts) < self.workers:
                try:
                    fresh = self._grow()
                except Exception as error:
                    if not self._hosts:  # else it waits for one of those
                        self._counts["refused"] += 1
                        raise ProcessorError(f"no worker could start: {error_text(error)}") from error
                host = None if self._ready else fresh
            if host is None and self._queued >= self.queue_size + self._starting:
                self._counts["refused"] += 1
                refusal = ProcessorOverloaded(f"the queue is full: {self._queued} requests wait")
            else:
                self._counts["submitted"] += 1
                self._jobs[job.rid] = job
                if host is None:
                    self._enqueue(job, self._queue.append)
                else:
                    self._assign(job, host)
        if fresh is not None and self._ready is not None:
            self._begin(fresh)
        if refusal is not None:
            raise refusal
        if host is not None:
            self._start(job, host)

    def _enqueue(self, job: Job, put: Callable[[Job], None]) -> None:
        job.host = None
        job.queued = True
        self._queued += 1
        put(job)

    def _assign(self, job: Job, host: Host) -> None:
        job.queued = False
        job.host = host
        if self.timeout is not None:
            job.deadline = time.monotonic() + self.timeout
        self._running[job] = None

    def _next(self, host: Host) -> Job | None:
        """Under the lock: a slot of the host is free. The job that takes it; or it is idle now, or its host was replaced."""
        if host not in self._hosts:
            return None
        while self._queue:
            job = self._queue.popleft()
            if job.queued:
                self._queued -= 1
                self._assign(job, host)
                return job
        self._idle.append(host)
        return None

    def offer(self, host: Host) -> None:
        """A slot is free."""
        with self._lock:
            job = self._next(host)
        if job is not None:
            self._start(job, host)

    # --- out ----------------------------------------------------------------------------------------------------------

    def claim(self, job: Job, outcome: str) -> bool:
        """Of all that may end a job, exactly one does: who gets True here sets its result, or its exception, and it counts
        as `outcome`."""
        with self._lock:
            if self._jobs.get(job.rid) is not job or not job.set_running_or_notify_cancel():
                return False
            self._forget(job)
            self._counts[outcome] += 1
            return True

    def cancelled(self, job: Job) -> None:
        """A job's own `cancel` succeeded. What it holds a slot for goes on to its end, unheeded."""
        with self._lock:
            if self._jobs.get(job.rid) is job:
                self._forget(job)
                job.work = None
                self._counts["cancelled"] += 1

    def _forget(self, job: Job) -> None:
        del self._jobs[job.rid]
        if job.queued:
            job.queued = False
            self._queued -= 1
            if len(self._queue) > 2 * self._queued + _STALE_MAX:
                self._queue = deque(waiting for waiting in self._queue if waiting.queued)
        self._tell_if_quiet()

    def _is_quiet(self) -> bool:
        if self._jobs or self._running:
            return False
        # The thread that replaces fails the job, too: what that calls back may close the pool, and must not wait for itself.
        return not self._giving_up or self._giver == threading.get_ident()

    def _tell_if_quiet(self) -> None:
        if self._is_quiet():
            self._quiet.notify_all()

    def release(self, job: Job, host: Host) -> None:
        """Give a job's slot to the next one, unless somebody else did."""
        following = None
        with self._lock:
            if job.host is host:
                del self._running[job]
                job.host = None
                following = self._next(host)
            self._tell_if_quiet()
        if following is not None:
            self._start(following, host)

    def again(self, job: Job, host: Host) -> bool:
        """Start a job once more, which goes before any that wait. Not when somebody ended it meanwhile: False."""
        following: Job | None = job
        free = host
        with self._lock:
            if job.host is not host or job.done():
                return False
            del self._running[job]
            if host in self._hosts:
                self._assign(job, host)
            else:  # its worker is gone
                self._enqueue(job, self._queue.appendleft)
                following = None
                if self._idle:
                    free = self._idle.pop()
                    following = self._next(free)
            waiting = self._in_vain()
        if following is not None:
            self._start(following, free)
        self._refuse(waiting, None)
        return True

    def late(self, now: float, elapsed: Callable[[Job], float | None]) -> tuple[list[tuple[Job, Host]], float | None]:
        """The jobs that are past their deadline, which lose their slots here, and the next deadline. `gave_up` must follow
        for each of them: who closes the crew waits for it, so as to meet the replacement and not what hangs.

        ``elapsed(job)``, called under the lock: seconds that the job has been at work, where that is less than it has had its
        slot; None where nobody has begun with it, which gives it more time, though not for ever.
        """
        found = []
        assert self.timeout is not None
        with self._lock:
            for job in list(self._running):
                if job.deadline > now:
                    continue
                assert job.host is not None
                spent = elapsed(job)
                if spent is None and job.extended < _EXTENDED_MAX:
                    job.extended += 1
                    job.deadline = now + self.timeout
                elif spent is not None and spent < self.timeout:
                    job.deadline = now + self.timeout - spent
                else:
                    del self._running[job]
                    found.append((job, job.host))
                    job.host = None
            self._giving_up += len(found)
            self._giver = threading.get_ident()
            return found, min((job.deadline for job in self._running), default=None)

    def gave_up(self) -> None:
        with self._lock:
            self._giving_up -= 1
            self._tell_if_quiet()

    # --- workers ------------------------------------------------------------------------------------------------------

    def start(self, timeout: float | None) -> bool:
        """Start all workers; whether all are ready within `timeout` seconds."""
        fresh = []
        with self._lock:
            if self._closed:
                raise ProcessorError("the pool is shut down")
            with contextlib.suppress(Exception):  # those that could be made must begin all the same
                while self.own and len(self._hosts) < self.workers:
                    fresh.append(self._grow())
        for host in fresh:
            self._begin(host)
        with self._quiet:
            self._quiet.wait_for(lambda: not self._starting, timeout)
            return not self._starting and (not self.own or len(self._hosts) == self.workers)

    def _grow(self, index: int | None = None) -> Host:
        """Under the lock: another worker of the pool's own. It must `_begin`, without the lock."""
        if index is None:
            taken = {host.index for host in self._hosts}
            index = next(i for i in range(len(taken) + 1) if i not in taken)
        host = Host(self._make(index), index)
        self._hosts.append(host)
        self._starting += self._ready is not None
        return host

    def _begin(self, host: Host) -> None:
        if self._ready is None:
            self.offer(host)
            return
        try:
            future = self._ready(host.executor)
        except Exception as error:  # the system may have no process left to give
            self._begun(host, error)
        else:
            future.add_done_callback(functools.partial(self._answered, host))

    def _answered(self, host: Host, future: Future[Any]) -> None:
        self._begun(host, (future.exception() or future.result()) if not future.cancelled() else None)

    def _begun(self, host: Host, said: Any) -> None:
        """A process is ready, and said its pid, or never will be: then what waits fails, unless others take it."""
        waiting: list[Job] = []
        fresh: Host | None = None
        with self._lock:
            self._starting -= 1
            known = host in self._hosts
            if known and isinstance(said, int):
                host.pid = said
                self._stillborn = 0
            elif known:
                self._hosts.remove(host)
                self._gone.append(host.executor)
                self._stillborn += 1
                if not isinstance(said, worker.Failure) and self._stillborn < _STILLBORN_MAX:
                    with contextlib.suppress(Exception):  # it was killed, maybe: another one may live
                        fresh = self._grow(host.index)
                waiting = self._in_vain()
            self._quiet.notify_all()
        if known and isinstance(said, int):
            self.offer(host)
            return
        if isinstance(said, int):  # the pool was shut down meanwhile
            executors.kill_process(said)
        executors.retire(host.executor)
        if fresh is not None:
            self._begin(fresh)
        self._refuse(waiting, said.error() if isinstance(said, worker.Failure) else said)

    def _in_vain(self) -> list[Job]:
        """Under the lock: what waits, where there is no worker left to wait for."""
        return [] if self._hosts else [job for job in self._queue if job.queued]

    def _refuse(self, jobs: list[Job], cause: BaseException | None) -> None:
        for job in jobs:
            text = "" if cause is None else f": {cause if isinstance(cause, FastmmError) else error_text(cause)}"
            refusal = ProcessorError(f"no worker could start{text}")
            refusal.__cause__ = cause
            self._fail(job, refusal)

    def replace(self, host: Host) -> None:
        """Another worker in place of one of the pool's own, which is ended."""
        fresh: Host | None = None
        cause: Exception | None = None
        with self._lock:
            if host not in self._hosts:
                return
            self._hosts.remove(host)
            self._gone.append(host.executor)
            self._idle = [other for other in self._idle if other is not host]
            pid, host.pid = host.pid, None
            self._counts["replaced"] += 1
            try:
                fresh = self._grow(host.index)
            except Exception as error:  # the next request tries again
                cause = error
            waiting = self._in_vain()
        if pid is not None:
            executors.kill_process(pid)
        executors.retire(host.executor)
        if fresh is not None:
            self._begin(fresh)
        self._refuse(waiting, cause)

    def renew(self, host: Host, executor: Executor, make: Callable[[Executor], Executor]) -> None:
        """Another executor in place of one that the pool was given; the first who asks gets it done."""
        with self._lock:
            if host.executor is executor and not (self._closed and not self._jobs):
                self._gone.append(executor)
                host.executor = make(executor)
                self._counts["replaced"] += host.executor is not executor

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self, timeout: float | None) -> tuple[bool, list[Job], list[Host]]:
        """Admit nothing more and wait; whether all came to an end, what did not, and the hosts that there were."""
        with self._quiet:
            self._closed = True
            clean = self._quiet.wait_for(self._is_quiet, timeout)
            left = [*self._jobs.values(), *(job for job in self._running if job.done())]
            for job in self._running:
                job.host = None
            self._running.clear()
            hosts, self._hosts, self._idle = self._hosts, [], []
        return clean, left, hosts

    def abandon(self) -> bool:
        """Nobody will use the crew any more: whether nobody had closed it, and workers were left, which end now."""
        closed, self._closed = self._closed, True
        hosts, self._hosts = self._hosts, []
        for host in hosts:
            if isinstance(host.executor, executors.DaemonThreadExecutor):
                host.executor.shutdown(wait=False)
        return not closed and self.own and bool(hosts)

    def kill(self) -> None:
        """The program ends: processes of the pool's own end now, whatever they do."""
        self._closed = True
        hosts, self._hosts = self._hosts, []
        if self.own and self._ready is not None:
            for host in hosts:
                self._gone.append(host.executor)
                for pid in executors.processes_of(host.executor):
                    executors.kill_process(pid)


_crews: weakref.WeakSet[Crew] = weakref.WeakSet()


def _at_exit() -> None:
    for crew in list(_crews):
        crew.kill()


# Before concurrent.futures waits for its processes, as it does at the end of a program: one that hangs would keep that from
# ending. Its own hook was registered when it was imported, and the last one registered is called first. The standard library
# has no public name for this; without it there is only the wait.
getattr(threading, "_register_atexit", lambda hook: None)(_at_exit)

"""The executors that a pool makes itself: one worker each, so that a worker can be replaced without the others noticing."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from .. import shm

__all__ = [
    "DaemonThreadExecutor",
    "is_local",
    "is_stdlib",
    "kill_process",
    "pid_of",
    "process_executor",
    "processes_of",
    "retire",
    "same_again",
]

_log = logging.getLogger("fastmm")


class DaemonThreadExecutor(Executor):
    """One thread that the interpreter does not wait for when it ends.

    `concurrent.futures.ThreadPoolExecutor` joins its threads at exit, always: a processor that hangs would keep the whole
    program from ending, long after its pool was shut down.
    """

    def __init__(self, name: str, initializer: Callable[[], None] | None = None) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._initializer = initializer
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        if self._initializer is not None:
            try:
                self._initializer()
            except Exception:  # an affinity that the system refuses must not cost a worker
                _log.exception("a worker's initializer failed; it works without")
        get = self._calls.get
        while (call := get()) is not None:
            function, args = call
            try:
                function(*args)
            except BaseException:  # whatever it was, the next request is not to blame
                _log.exception("a call that raises nothing did")
            del call, function, args  # an idle thread keeps nothing of a request

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function that raises nothing, and that nobody waits for: half the price of `submit`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._calls.put((function, args))

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.post(_run_for, future, function, args, kwargs)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._calls.put(None)
        if wait and threading.current_thread() is not self.thread:
            self.thread.join()


def _run_for(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


def process_executor(initializer: Callable[..., None], initargs: tuple[Any, ...]) -> Executor:
    """One process, started afresh: a fork of a process with threads may inherit a lock that nobody will open."""
    import multiprocessing

    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=initializer, initargs=initargs)


def same_again(executor: Executor) -> Executor:
    """A fresh executor in place of one of the standard library's that broke or hangs; any other mends itself."""
    # The settings are private attributes in every version of Python; what is not there takes its default.
    workers = getattr(executor, "_max_workers", None)
    initializer, initargs = getattr(executor, "_initializer", None), getattr(executor, "_initargs", ())
    if type(executor) is ProcessPoolExecutor:
        return ProcessPoolExecutor(workers, getattr(executor, "_mp_context", None), initializer, initargs)
    if type(executor) is ThreadPoolExecutor:
        return ThreadPoolExecutor(workers, initializer=initializer, initargs=initargs)
    return executor


def is_local(executor: Executor) -> bool:
    """Whether an executor runs in this process, so that nothing needs to cross."""
    interpreters = getattr(concurrent.futures, "InterpreterPoolExecutor", ())  # a kind of threads that share no objects
    return isinstance(executor, (ThreadPoolExecutor, DaemonThreadExecutor)) and not isinstance(executor, interpreters)


def retire(executor: Executor) -> None:
    """Shut down an executor that nothing will be asked of any more, without waiting for it.

    On a thread of its own: from Python 3.12 on an executor whose process died calls back while it holds the lock that its
    own `shutdown` takes.
    """
    with contextlib.suppress(RuntimeError):  # no thread can be started: it ends when its last reference goes
        threading.Thread(target=executor.shutdown, kwargs={"wait": False}, name="fastmm-retire", daemon=True).start()


def is_stdlib(executor: Executor) -> bool:
    return isinstance(executor, (ProcessPoolExecutor, ThreadPoolExecutor, DaemonThreadExecutor))


def processes_of(executor: Executor) -> list[int]:
    """The pids of an executor that the pool made, while it has any."""
    return list(getattr(executor, "_processes", None) or ())


def kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def pid_of(process: str) -> int | None:
    """The pid in a `shm.process_key`, where that process lives and can be named from here."""
    _, user, space, pid, start = process.split("-")[:5]
    own = shm.process_key().split("-")
    if [user, space] != own[1:3] or not shm.is_alive(int(pid), int(start)):
        return None
    return int(pid)

"""One thread that does what would hold up an event loop, one job after the other."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__all__ = ["Job", "Worker"]


class Job:
    """A call that waits for the thread, or is at work there. All but `_run` belongs to the event loop that made it."""

    __slots__ = ("_args", "_begun", "_function", "_future", "_lock", "_loop", "_over", "request_id")

    def __init__(self, worker: Worker, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function: Callable[..., Any] | None = function
        self._args = args
        self._loop = asyncio.get_running_loop()
        self._lock = worker._lock
        self._begun = False
        self._over = False
        self.request_id = ""  # whose it is
        self._future: asyncio.Future[Any] | None = self._loop.create_future()

    async def result(self, when_cancelled: Callable[[], object]) -> Any:
        """What the call returned.

        Cancelled while the call waits, it is never made. Cancelled while it is at work, this lasts until it is over all the
        same, for what it writes to must not be the caller's again before; `when_cancelled` may hasten that.
        """
        future = self._future
        assert future is not None
        try:
            return await future
        except asyncio.CancelledError:
            if self._cancel():
                raise
            when_cancelled()
            while not self._over:
                future = self._future = self._loop.create_future()
                # What the call raised is nobody's now, and being cancelled again changes nothing.
                with contextlib.suppress(Exception, asyncio.CancelledError):
                    await future
            raise
        finally:
            # An error's traceback has this frame: with the future, which has the error, it would be a circle that keeps
            # the request's memory.
            del future
            self._future = None

    def _cancel(self) -> bool:
        """Take the job back; False where it has begun."""
        with self._lock:
            if self._begun:
                return False
            self._function = None
            self._args = ()
            return True

    def refuse(self, error: Exception) -> None:
        """Fail a job that waits; one that has begun goes on."""
        if self._cancel():
            self._end(None, error)

    def _run(self) -> None:
        with self._lock:
            function, args = self._function, self._args
            self._function, self._args = None, ()
            self._begun = True
        if function is None:
            return
        value, failure = None, None
        try:
            value = function(*args)
        except BaseException as error:
            failure = error
        del function, args  # a request's memory must not wait for the next job
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._end, value, failure)
        del failure  # whose traceback has this frame: a circle that would keep the request's memory

    def _end(self, value: Any, failure: BaseException | None) -> None:
        self._over = True
        future = self._future
        if future is None or future.done():
            return
        if failure is None:
            future.set_result(value)
        else:
            future.set_exception(failure)


class Worker:
    """The thread. `ThreadPoolExecutor` does the same and costs 30 us more for each job."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Job:
        """Have the thread call a function when all that was submitted before is done. From any event loop."""
        job = Job(self, function, args)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the thread when all that was submitted is done."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job._run()
            del job

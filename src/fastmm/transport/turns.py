"""Threads that wait for answers of one socket: one of them receives for all, and passes the turn on when he has his own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from ..errors import TransportError

__all__ = ["Turns"]

Queue: TypeAlias = "SimpleQueue[Any]"

# Put into the queue of one who waits: the turn is free.
_TURN = object()


class Turns:
    """Who receives. Answers come into a queue of each who waits; whoever has the turn puts them there.

    Parameters
    ----------
    lock
        Held around everything that puts into the queues.
    receive
        ``receive(queue, deadline)`` puts what comes into the queues, until there is something in this one or the deadline is
        over (None: there is none). Called with the turn and without the lock.
    """

    def __init__(self, lock: threading.Lock, receive: Callable[[Queue, float | None], None]) -> None:
        self._lock = lock
        self._receive = receive
        # Who has the turn, by his queue, and his thread. Plain attributes under the lock: a signal's handler may raise after
        # any call, so a call's result (a lock's acquire()) could be lost, and the turn with it.
        self._holder: Queue | None = None
        self._thread = 0
        self._followers: deque[Queue] = deque()  # of those who wait without the turn

    @property
    def mine(self) -> bool:
        """Whether this thread has the turn already: in a callback, or a signal's handler, of its own receiving."""
        return self._holder is not None and self._thread == threading.get_ident()

    def wait(self, queue: Queue, timeout: float | None) -> Any:
        """What comes into one's own queue first; `Empty` where nothing does within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        concerned = False  # whether the turn, or an offer of it, may be ours
        waited = False  # who has no time at all looks once all the same: he may be the only one who receives
        try:
            while True:
                with self._lock:
                    while not queue.empty():
                        item = queue.get()
                        if item is not _TURN:
                            return item
                    if waited and deadline is not None and time.monotonic() >= deadline:
                        raise Empty
                    concerned = True
                    if self._holder is None:
                        self._thread = threading.get_ident()
                        self._holder = queue
                    elif self._holder is not queue:
                        if self._thread == threading.get_ident():
                            raise TransportError(
                                "an answer cannot be waited for in the middle of receiving (on_outputs, a signal)"
                            )
                        if queue not in self._followers:
                            self._followers.append(queue)
                if self._holder is queue:
                    self._receive(queue, deadline)
                    waited = True
                    continue
                try:
                    item = queue.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
                except Empty:
                    waited = True
                    continue
                if item is not _TURN:
                    return item
        finally:
            try:
                if concerned:
                    self._step_back(queue)
            except BaseException:  # a signal's handler raised: nobody must be left waiting for a turn that is lost
                self._step_back(queue)
                raise

    def take(self, timeout: float = 0.0) -> bool:
        """Take the turn without having anything to wait for; whether it was free, or became so in time."""
        queue: Queue = SimpleQueue()
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                if self._holder is None:
                    self._thread = threading.get_ident()
                    self._holder = queue
                    return True
                left = deadline - time.monotonic()
                if left > 0:
                    self._followers.append(queue)
            if left <= 0:
                return False
            with contextlib.suppress(Empty):
                queue.get(timeout=left)
            with self._lock:
                if queue in self._followers:
                    self._followers.remove(queue)

    def leave(self) -> None:
        """Give away the turn that was taken."""
        with self._lock:
            self._holder = None
            self._offer()

    def _step_back(self, queue: Queue) -> None:
        with self._lock:
            if self._holder is queue:
                self._holder = None
            elif queue in self._followers:
                self._followers.remove(queue)
            if self._holder is None:
                self._offer()

    def _offer(self) -> None:
        if self._followers:
            self._followers.popleft().put(_TURN)

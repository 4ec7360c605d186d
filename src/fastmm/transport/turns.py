"""Threads that wait for answers of one socket: one of them receives for all, and passes the turn on when he has his own."""

from __future__ import annotations

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
        self._turn = threading.Lock()
        self._holder = 0  # the thread that has it
        self._followers: deque[Queue] = deque()  # of those who wait without the turn

    @property
    def mine(self) -> bool:
        """Whether this thread has the turn already: in a callback, or a signal's handler, of its own receiving."""
        return self._holder == threading.get_ident()

    def wait(self, queue: Queue, timeout: float | None) -> Any:
        """What comes into one's own queue first; `Empty` where nothing does within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                while not queue.empty():
                    item = queue.get()
                    if item is not _TURN:
                        return item
                if deadline is not None and time.monotonic() >= deadline:
                    raise Empty
                receives = self._turn.acquire(blocking=False)
                if receives:
                    self._holder = threading.get_ident()
                elif self._holder == threading.get_ident():
                    raise TransportError(
                        "an answer cannot be waited for in the middle of receiving (on_outputs, a signal's handler)"
                    )
                else:
                    self._followers.append(queue)
            if receives:
                try:
                    self._receive(queue, deadline)
                finally:
                    self.leave()
            else:
                item = None
                try:
                    item = queue.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
                except Empty:
                    pass
                finally:  # a KeyboardInterrupt, too, must leave nobody waiting for a turn that was offered here
                    with self._lock:
                        if queue in self._followers:
                            self._followers.remove(queue)
                        elif item is not _TURN:
                            self._offer()
                if item is not None and item is not _TURN:
                    return item

    def take(self, timeout: float = 0.0) -> bool:
        """Take the turn without having anything to wait for; whether it was free, or became so in time."""
        taken = self._turn.acquire(timeout=timeout) if timeout else self._turn.acquire(blocking=False)
        if taken:
            self._holder = threading.get_ident()
        return taken

    def leave(self) -> None:
        """Give the turn away."""
        with self._lock:
            self._holder = 0
            self._turn.release()
            self._offer()

    def _offer(self) -> None:
        if self._followers:
            self._followers.popleft().put(_TURN)

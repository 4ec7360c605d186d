"""The asyncio face of a pool's future: results reach the event loop in batches, so that it is woken once for many."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from concurrent.futures import Future
from typing import Any

__all__ = ["awaitable_of"]


class _Mailbox:
    """Futures that other threads have completed, on their way to one event loop."""

    __slots__ = ("__weakref__", "_done", "_loop", "_woken")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._done: deque[_Awaitable] = deque()
        self._woken = False

    def put(self, awaitable: _Awaitable) -> None:
        """Any thread. The loop looks again if it may have looked before this: the flag falls before it begins."""
        self._done.append(awaitable)
        if not self._woken:
            self._woken = True
            loop = self._loop()
            try:
                if loop is not None:
                    loop.call_soon_threadsafe(self._empty)
            except RuntimeError:  # the loop is closed: nobody waits
                self._done.clear()

    def _empty(self) -> None:
        self._woken = False
        while self._done:
            self._done.popleft().settle()


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = weakref.WeakKeyDictionary()


class _Awaitable(asyncio.Future[Any]):
    """What `asyncio.wrap_future` makes, with the same meaning: cancelling it cancels the other, too."""

    _of: Future[Any]

    def settle(self) -> None:
        if self.done():
            return
        if self._of.cancelled():
            super().cancel()
        elif (error := self._of.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(self._of.result())

    def cancel(self, msg: Any = None) -> bool:
        if not super().cancel(msg):
            return False
        self._of.cancel()
        return True


def awaitable_of(future: Future[Any]) -> asyncio.Future[Any]:
    """An awaitable of the running event loop for a future that another thread completes."""
    loop = asyncio.get_running_loop()
    mailbox = _mailboxes.get(loop)
    if mailbox is None:
        mailbox = _mailboxes.setdefault(loop, _Mailbox(loop))
    awaitable = _Awaitable(loop=loop)
    awaitable._of = future
    put = mailbox.put
    future.add_done_callback(lambda future: put(awaitable))
    return awaitable

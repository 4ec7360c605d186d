"""The ledger of what is on its way: whose memory ZMQ still reads, how many bytes, and who must wait for room.

ZMQ reads a frame that it did not copy until it has written it to its connection, or has thrown it away with the connection,
the socket or the context. The ledger knows when, without pyzmq's trackers: what is sent are parcels (`fastmm._native.parcel`),
which tell their ticket when ZMQ drops them.

    ticket = ledger.reserve(nbytes_of(frames))          # or await ledger.areserve(...)
    socket.send_multipart(ticket.parcels(frames), copy=False)
    ticket.add_done_callback(...)                       # ZMQ is done with all frames: their memory is free again
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import zmq.utils.garbage  # its handler at exit must be registered before ours, to run after it

from .._native.parcel import Room, Ticket, keep_memory, nbytes_of
from ..errors import Overloaded, TransportTimeout

__all__ = ["Ledger", "Ticket", "nbytes_of"]

# How often a wait for room asks whether it still makes sense.
_CHECK_EVERY_S = 0.1

_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()


class Ledger:
    """Bounds the bytes on their way, and says when their memory is free. For any number of sockets, threads and event loops.

    Parameters
    ----------
    max_inflight_nbytes
        How many bytes may be on their way at once. A message larger than that goes when nothing else is on its way.

    Notes
    -----
    Who waits is served in the order of coming, threads and coroutines alike; a small message does not overtake a large one.
    Frames that ZMQ copied (those under the socket's ``copy_threshold``, 64 KiB) count as done when the list that
    `Ticket.parcels` returned is dropped.

    A forked child starts with an empty ledger: what the parent had on its way is the parent's.
    """

    def __init__(self, max_inflight_nbytes: int = 1 << 30) -> None:
        self._room = Room(max_inflight_nbytes)
        _ledgers.add(self)

    def reserve(
        self,
        nbytes: int,
        *,
        wait: bool = True,
        timeout: float | None = None,
        check: Callable[[], object] | None = None,
    ) -> Ticket:
        """Room for a message.

        Parameters
        ----------
        nbytes
            Of all its frames: see `nbytes_of`.
        wait
            Block until there is room. False: raise at once where there is none.
        timeout
            How many seconds to block at most.
        check
            Called a few times a second while it waits; what it raises ends the wait. The place in the queue is kept.

        Returns
        -------
        Ticket
            Dropped without having been used, it gives its room back.

        Raises
        ------
        Overloaded
            There is no room now, and `wait` is False.
        TransportTimeout
            There was none within `timeout`.
        """
        ticket = self._room.enter(nbytes, None)
        if ticket is not None:
            return ticket
        if not wait:
            raise Overloaded(f"no room for {nbytes} bytes: {self.said}")
        woken = _Woken()
        ticket = self._room.enter(nbytes, woken.wake)
        assert ticket is not None
        try:
            if check is None:
                woken.wait(timeout)
            else:
                for left in _slices(timeout):
                    if woken.wait(left):
                        break
                    check()
        except BaseException:  # KeyboardInterrupt, or what the check raised
            self._room.leave(ticket)
            raise
        return self._in_time(ticket, timeout)

    async def areserve(
        self,
        nbytes: int,
        *,
        wait: bool = True,
        timeout: float | None = None,
        check: Callable[[], object] | None = None,
    ) -> Ticket:
        """`reserve`, for a coroutine: waits without holding up the event loop. A cancelled wait leaves no trace."""
        ticket = self._room.enter(nbytes, None)
        if ticket is not None:
            return ticket
        if not wait:
            raise Overloaded(f"no room for {nbytes} bytes: {self.said}")
        woken = _WokenLoop()
        ticket = self._room.enter(nbytes, woken.wake)
        assert ticket is not None
        woken.on_lost = ticket.cancel
        try:
            if check is None:
                await woken.wait(timeout)
            else:
                for left in _slices(timeout):
                    if await woken.wait(left):
                        break
                    check()
        except BaseException:  # cancelled, thrown away, or what the check raised
            self._room.leave(ticket)
            raise
        return self._in_time(ticket, timeout)

    def _in_time(self, ticket: Ticket, timeout: float | None) -> Ticket:
        """The ticket of a wait that is over, where it was admitted."""
        if not ticket.admitted:
            self._room.leave(ticket)
            raise TransportTimeout(f"no room for {ticket.nbytes} bytes within {timeout:g} s: {self.said}")
        return ticket

    def wait(self, timeout: float | None = None) -> bool:
        """Block until nothing is on its way; False where something still is after `timeout` seconds."""
        if not self._room.inflight:
            return True
        woken = _Woken()
        self._room.call_when_empty(woken.wake)
        try:
            return woken.wait(timeout)
        finally:
            self._room.call_no_more(woken.wake)

    async def await_done(self, timeout: float | None = None) -> bool:
        """`wait`, for a coroutine."""
        if not self._room.inflight:
            return True
        woken = _WokenLoop()
        self._room.call_when_empty(woken.wake)
        try:
            return await woken.wait(timeout)
        finally:
            self._room.call_no_more(woken.wake)

    def guard(self, buffer: bytearray, *, wait: bool = True, timeout: float | None = None) -> None:
        """Return when `buffer`, which an `Encoder.encode_into` wrote, is not on its way, so that it may be written again.

        Raises
        ------
        Overloaded
            It is on its way, and `wait` is False.
        TransportTimeout
            It still was after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (ticket := self._room.ticket_of(buffer)) is not None:
            if not wait:
                raise Overloaded(f"a buffer of {len(buffer)} bytes is still on its way")
            woken = _Woken()
            ticket.add_done_callback(woken.wake)
            try:
                if not woken.wait(None if deadline is None else deadline - time.monotonic()):
                    raise TransportTimeout(f"a buffer of {len(buffer)} bytes was on its way for {timeout:g} s")
            finally:
                ticket.remove_done_callback(woken.wake)

    async def aguard(self, buffer: bytearray, *, wait: bool = True, timeout: float | None = None) -> None:
        """`guard`, for a coroutine."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (ticket := self._room.ticket_of(buffer)) is not None:
            if not wait:
                raise Overloaded(f"a buffer of {len(buffer)} bytes is still on its way")
            woken = _WokenLoop()
            ticket.add_done_callback(woken.wake)
            try:
                if not await woken.wait(None if deadline is None else deadline - time.monotonic()):
                    raise TransportTimeout(f"a buffer of {len(buffer)} bytes was on its way for {timeout:g} s")
            finally:
                ticket.remove_done_callback(woken.wake)

    @property
    def counters(self) -> dict[str, int]:
        """``inflight`` (messages), ``inflight_nbytes``, ``peak_nbytes``, ``max_inflight_nbytes``, ``waiting`` (for room),
        ``admitted`` and ``finished`` (messages, since the ledger was made)."""
        room = self._room
        return {
            "inflight": room.inflight,
            "inflight_nbytes": room.inflight_nbytes,
            "peak_nbytes": room.peak_nbytes,
            "max_inflight_nbytes": room.limit_nbytes,
            "waiting": room.waiting,
            "admitted": room.admitted,
            "finished": room.finished,
        }

    @property
    def said(self) -> str:
        """How full it is, in words."""
        room = self._room
        return (
            f"{room.inflight_nbytes} bytes in {room.inflight} messages are on their way, of at most {room.limit_nbytes}, "
            f"and {room.waiting} wait"
        )


def _slices(timeout: float | None) -> Iterator[float]:
    """How long to wait at once, until `timeout` is over."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while deadline is None or (left := deadline - time.monotonic()) > 0:
        yield _CHECK_EVERY_S if deadline is None else min(_CHECK_EVERY_S, left)


class _Woken:
    """What a thread waits for, once. A lock, not an Event: an Event's own lock may be held where a parcel dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self, _: Any = None) -> None:
        self._lock.release()

    def wait(self, timeout: float | None) -> bool:
        return self._lock.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))


class _WokenLoop:
    """What a coroutine waits for, once. Woken from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()
        self.on_lost: Callable[[], object] | None = None
        """Called where the loop is closed, and nobody will ever take what there was to wait for."""

    def wake(self, _: Any = None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._settle)
        except RuntimeError:
            if self.on_lost is not None:
                self.on_lost()

    def _settle(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self, timeout: float | None) -> bool:
        if timeout is None:
            await self._future
            return True
        done, _ = await asyncio.wait([self._future], timeout=timeout)
        return bool(done)


def _after_fork_in_child() -> None:
    for ledger in list(_ledgers):
        ledger._room.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
# pyzmq ends with the interpreter, and drops all it keeps for libzmq, whose threads may still be sending.
atexit.register(keep_memory)
assert zmq.utils.garbage.gc is not None

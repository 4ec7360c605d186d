"""The client for asyncio. All of it runs on one event loop, but for the encoding of large requests.

The loop watches the sockets' own descriptors, which is what ``zmq.asyncio`` does as well. Its sockets make futures, timers and
tasks of it for each message, which cost 28 of 94 microseconds of an empty round trip (measured), so they are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NoReturn

import zmq

from ..errors import Overloaded, SchemaError, TransportError, TransportTimeout
from ..schema import EngineCoreOutput
from .aio_live import AsyncCall, AsyncLive
from .connection import receive_frames, send_frames
from .control import ADD, UTILITY
from .core import ClientCore, copied, left, utility_frames, without_frames
from .large import INLINE_NBYTES, is_large
from .lifetime import Ticket, nbytes_of
from .registry import Ended, Engine, Live, request_id_of
from .worker import Job, Worker

__all__ = ["AsyncEngineClient", "AsyncOutputs"]

# How many messages are taken before the event loop has its turn.
_AT_ONCE = 64
# How often who closes on another loop looks whether the client's own still runs.
_LOOK_EVERY_S = 0.1


class AsyncOutputs(AsyncIterator[EngineCoreOutput]):
    """The outputs of one request, until it is finished.

    It is sent when the first is asked for, where `AsyncEngineClient.add_request` did not send it before. Left, dropped, closed
    or cancelled before the end, it aborts the request on the engine.
    """

    def __init__(self, client: AsyncEngineClient, request: Any, wait: bool, timeout: float | None) -> None:
        self._client = client
        self._request = request
        self._wait = wait
        self._timeout = timeout
        self._live: AsyncLive | None = None
        self._over = False

    def __aiter__(self) -> AsyncOutputs:
        return self

    async def _send(self) -> None:
        request, self._request = self._request, None  # its memory is held as long as ZMQ needs it, not as long as the outputs
        try:
            await self._client._submit(self, request, self._wait, self._timeout)
        except BaseException:
            self._over = True
            raise

    async def __anext__(self) -> EngineCoreOutput:
        if self._over:
            raise StopAsyncIteration
        live = self._live
        if live is None:
            await self._send()
            live = self._live
            assert live is not None
        elif asyncio.get_running_loop() is not self._client._loop:
            self._client._other_loop()
        while not live.items:
            if live.error is not None:
                error, live.error, self._over = live.error, None, True
                raise error
            if live.waiter is not None:
                raise RuntimeError("two tasks iterate over one request's outputs")
            live.waiter = asyncio.get_running_loop().create_future()
            try:
                await live.waiter
            except BaseException:  # cancelled
                live.waiter = None
                self._abort()
                raise
        output = live.items.popleft()
        if output.finish_reason is not None:
            self._over = True
        return output

    def _abort(self) -> None:
        if not self._over:
            self._over = True
            if self._live is not None:
                self._client._abort([self._live])

    async def aclose(self) -> None:
        """Abort the request, where it has not ended. On any event loop."""
        if self._live is None or asyncio.get_running_loop() is self._client._loop:
            self._abort()
        elif not self._over:
            self._over = True
            self._client._abandon(self._live)

    async def __aenter__(self) -> AsyncOutputs:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # May run on any thread, in the middle of anything: the event loop does the rest.
        live = getattr(self, "_live", None)
        if live is not None and not self._over and not live.ended:
            self._client._abandon(live)


class AsyncEngineClient(ClientCore):
    """A client of vLLM's EngineCore for asyncio.

        async with AsyncEngineClient("tcp://127.0.0.1:5570") as client:
            async for output in client.generate(request):
                print(output.new_token_ids, output.finish_reason)

    It belongs to the event loop that it was started on. Requests leave in the order in which they were asked for; one with
    more than 1 MiB of payload is encoded and cast in a thread, so that the loop stays free.

    Parameters
    ----------
    inline_nbytes
        Requests of up to so many bytes of payload are encoded, and cast, on the loop. On the way to the thread and back a
        request of a few MB loses more time than its cast takes: where a loop may be held up for a tenth of a millisecond,
        8 MiB here is quicker.
    handshake, **options
        See `ClientCore`.
    """

    def __init__(self, handshake: str | None = None, *, inline_nbytes: int = INLINE_NBYTES, **options: Any) -> None:
        if isinstance(inline_nbytes, bool) or not isinstance(inline_nbytes, int) or inline_nbytes < 0:
            raise SchemaError(f"expected a number of bytes for inline_nbytes, got {inline_nbytes!r:.40}")
        self._inline_nbytes = inline_nbytes
        super().__init__(handshake, **options)

    def _make_face(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: Worker | None = None  # waits for the engines first, and then encodes and sends large requests
        self._readers: list[int] = []  # descriptors that the loop watches
        self._clock: asyncio.TimerHandle | None = None
        # Around what leaves by the input socket, for the loop and the worker both send.
        self._send_lock = threading.Lock()
        self._end_lock = threading.Lock()
        self._queued = 0  # how much the worker has to send: while that is nothing, small requests may leave from the loop
        self._abandoned: deque[AsyncLive] = deque()  # iterators that were dropped
        self._stuck = False  # whether the worker waits for room
        self._impatient: set[Job] = set()  # what the worker has to send, and must not wait for room
        self._progress_error: BaseException | None = None
        self._started: asyncio.Task[None] | None = None
        self._ended: asyncio.Task[None] | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind the sockets, where `bind` did not, and wait for the engines. `progress` is called on the event loop.

        Raises
        ------
        TransportTimeout
            Not all engines were ready in time. Whatever is raised, the client is closed then.
        """
        self._check_owner()
        if self._loop is not None:
            raise TransportError("the client was started before")
        self._loop = loop = asyncio.get_running_loop()
        self._worker = Worker("fastmm-engine-client")
        job = self._worker.submit(self._start, self._progress_on(loop))
        self._started = loop.create_task(job.result(self._closing.set))
        try:
            await asyncio.shield(self._started)
        except BaseException as error:
            await self.close()
            if self._progress_error is not None and isinstance(error, Exception):
                raise self._progress_error from None
            raise
        if self._progress_error is not None:
            await self.close()
            raise self._progress_error
        if self._closing.is_set():
            raise TransportError("the client was closed while it waited for its engines")
        connection = self._bound()
        self._watch_socket(connection.output, self._on_output)
        self._watch_socket(connection.input_monitor, self._on_monitor)
        self._watch_socket(connection.output_monitor, self._on_monitor)
        self._set_clock()

    def _progress_on(self, loop: asyncio.AbstractEventLoop) -> Callable[[dict[int, str]], object] | None:
        progress = self._progress
        if progress is None:
            return None

        def tell(state: dict[int, str]) -> None:
            if self._progress_error is None:
                try:
                    progress(state)
                except BaseException as error:  # start() raises it
                    self._progress_error = error
                    self._closing.set()

        return lambda state: loop.call_soon_threadsafe(tell, state)

    async def close(self) -> None:
        """Abort what is live on the engines, end whoever waits with `TransportError`, and close. As often as liked.

        On any event loop, also when that of the client has ended.
        """
        if self._owner != os.getpid():
            return  # a forked child: the sockets are the parent's
        self._closing.set()
        loop = asyncio.get_running_loop()
        own = self._loop
        if own is not None and own is not loop and own.is_running():  # in another thread
            with contextlib.suppress(RuntimeError):  # it has just been closed
                closing = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.close(), own))
                while own.is_running():
                    done, _ = await asyncio.wait([closing], timeout=_LOOK_EVERY_S)
                    if done:
                        await closing
                        return
        if self._ended is None or self._ended.get_loop() is not loop:
            self._ended = loop.create_task(self._close())
        await asyncio.shield(self._ended)  # who is cancelled here leaves it to end on its own

    aclose = close

    async def _close(self) -> None:
        loop = asyncio.get_running_loop()
        if self._started is not None and self._started.get_loop() is loop:
            await asyncio.wait([self._started])
            if not self._started.cancelled():
                self._started.exception()  # whoever called start() and was cancelled does not want to know
        if self._loop is not None and not self._loop.is_closed():
            for descriptor in self._readers:
                self._loop.remove_reader(descriptor)
        if self._clock is not None:
            self._clock.cancel()
        if self._closed is None:
            self._end("the client was closed")
        self._closed = "the client is closed"
        worker, self._worker = self._worker or Worker("fastmm-engine-client"), None
        try:
            await worker.submit(self._let_go).result(lambda: None)  # the worker comes to it when it has nothing else to do
        finally:
            worker.close()

    def _close_at_exit(self) -> None:
        """There is no loop any more."""
        self._closing.set()
        self._closed = "the client is closed"
        self._let_go()

    def _let_go(self) -> None:
        with self._end_lock:  # as it may be closed on two event loops
            super()._let_go()

    async def __aenter__(self) -> AsyncEngineClient:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- requests ---------------------------------------------------------------------------------------------------

    def generate(self, request: Any, *, wait: bool = True, timeout: float | None = None) -> AsyncOutputs:
        """Iterate over the outputs of a request until it is finished. It is sent when the first is asked for.

        Parameters
        ----------
        request
            An `EngineCoreRequest` of fastmm or of vLLM. Its ``client_index`` and ``current_wave`` are written.
        wait, timeout
            Whether to wait, and how many seconds, where `max_inflight_nbytes` are on their way.

        Raises
        ------
        EngineDead
            From the iterator: the engine is dead, or dies.
        SchemaError, EncodeError
            From the iterator: the request cannot be sent; nothing was, and the client has forgotten it.
        Overloaded, TransportTimeout
            From the iterator: there was no room.
        """
        return AsyncOutputs(self, request, wait, timeout)

    async def add_request(self, request: Any, *, wait: bool = True, timeout: float | None = None) -> AsyncOutputs:
        """`generate`, with the request sent when this returns. Dropping what it returns aborts the request."""
        outputs = AsyncOutputs(self, request, wait, timeout)
        await outputs._send()
        return outputs

    async def _submit(self, outputs: AsyncOutputs, request: Any, wait: bool, timeout: float | None) -> None:
        self._check_loop()
        deadline = None if timeout is None else time.monotonic() + timeout
        live = AsyncLive(request_id_of(request))
        if self._abandoned:  # their ids are free
            self._abort_abandoned()
        self._admit(live, request)
        outputs._live = live
        try:
            frames = None
            if not self._queued and not is_large(request, self._inline_nbytes):
                frames = self._encode(live, request)
                if copied(frames):
                    self._send_request(live, frames)
                    return
                try:
                    ticket = self.ledger.reserve(nbytes_of(frames), wait=False)
                except Overloaded:
                    if not wait:
                        raise
                else:
                    self._send_request(live, ticket.parcels(frames))
                    return
            try:
                await self._send_in_turn(live, request, frames, wait, deadline)
            except TransportTimeout:
                raise TransportTimeout(
                    f"no room for request {live.request_id!r:.80} within {timeout:g} s: {self.ledger.said}"
                ) from None
        except Ended:
            pass  # the iterator tells
        except BaseException as error:
            if live.sent:
                self._abort([live])
            else:
                self._registry.drop(live)
            if isinstance(error, TransportError):
                frames = ticket = None
                raise without_frames(error)  # noqa: B904
            raise

    async def _send_in_turn(
        self, live: AsyncLive, request: Any, frames: Sequence[Any] | None, wait: bool, deadline: float | None
    ) -> None:
        """Have the worker encode and send, when all that was asked for before is sent."""
        worker = self._worker
        assert worker is not None
        if not wait and self._stuck:
            raise self._overloaded(live.request_id)
        job = worker.submit(self._encode_and_send, live, request, frames, wait, deadline)
        del request, frames
        if not wait:
            self._impatient.add(job)
            job.request_id = live.request_id
        try:
            # Cancelled at work: what the worker has sent is aborted, and what it has not it sees to have ended.
            await self._in_turn(job, lambda: self._abort([live]), deadline, TransportTimeout())
        except zmq.ZMQError as error:
            raise self._not_sent(live.engine, error) from None
        finally:
            self._impatient.discard(job)
        self._registry.owe(live, time.monotonic())
        if self._waves.enabled:
            self._tell_wave(self._waves.on_request(live.engine.rank))

    async def _in_turn(
        self, job: Job, when_cancelled: Callable[[], object], deadline: float | None, late: TransportTimeout | None
    ) -> None:
        """Wait until the worker has done a job; raise `late` where it has not begun it by then."""
        timer = None
        if deadline is not None and late is not None:
            timer = asyncio.get_running_loop().call_later(deadline - time.monotonic(), job.refuse, late)
        self._queued += 1
        try:
            await job.result(when_cancelled)
        finally:
            self._queued -= 1
            if timer is not None:
                timer.cancel()

    def _encode_and_send(
        self, live: Live, request: Any, frames: Sequence[Any] | None, wait: bool, deadline: float | None
    ) -> None:
        """The worker's part: all of it but the registry, which is the loop's."""
        live.check()
        if frames is None:
            frames = self._encode(live, request)
        if not copied(frames):
            frames = self._reserve(live, nbytes_of(frames), wait, deadline).parcels(frames)
        message = [live.engine.identity, ADD, *frames]
        with self._send_lock:
            # In this order: who ends it on the loop sees that it is sent, or is seen here. Aborts wait for the lock.
            live.sent = True
            live.check()
            send_frames(self._bound().input, message)

    def _reserve(self, live: Live, nbytes: int, wait: bool, deadline: float | None) -> Ticket:
        """Room for a request; the worker's."""
        try:
            return self.ledger.reserve(nbytes, wait=False)
        except Overloaded:
            if not wait:
                raise
        self._stuck = True
        try:
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._refuse_impatient)
            return self.ledger.reserve(nbytes, timeout=left(deadline), check=live.check)
        finally:
            self._stuck = False

    def _refuse_impatient(self) -> None:
        """The worker waits for room: what stands behind it and must not wait has none either."""
        if self._stuck:
            for job in self._impatient:
                job.refuse(self._overloaded(job.request_id))

    def _overloaded(self, request_id: str) -> Overloaded:
        return Overloaded(f"no room for request {request_id!r:.80} behind others that wait: {self.ledger.said}")

    def _send(self, engine: Engine, frames: Sequence[Any]) -> None:
        with self._send_lock:
            super()._send(engine, frames)

    def _check_loop(self) -> None:
        self._check_open()
        if asyncio.get_running_loop() is not self._loop:
            self._other_loop()

    def _other_loop(self) -> NoReturn:
        self._check_owner()
        raise TransportError("the client belongs to the event loop that it was started on, and this is another")

    def _let_input_forget(self) -> None:
        with self._send_lock:
            super()._let_input_forget()

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests here and on their engines. Their iterators end with an output that says ABORT; other ids are ignored."""
        self._check_loop()
        self._abort(self._registry.find([request_ids] if isinstance(request_ids, str) else request_ids))

    def _abort(self, lives: Iterable[Live]) -> None:
        if self._closed is None:
            self._tell_aborts(self._registry.abort(lives))

    def _abandon(self, live: AsyncLive) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._abandoned.append(live)
                self._loop.call_soon_threadsafe(self._abort_abandoned)

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            self._abort([self._abandoned.popleft()])

    # --- utility calls ----------------------------------------------------------------------------------------------

    async def call_utility(self, method: str, *args: Any, rank: int | None = None, timeout: float | None = None) -> Any:
        """Have the engines call a method of theirs, and return what it returned; of several engines, the first's.

        Parameters
        ----------
        method, args
            What exists depends on the engine: ``get_supported_tasks``, ``is_sleeping``, ``reset_prefix_cache``, ...
        rank
            The engine that is meant. None: all that live.

        Raises
        ------
        UtilityFailed
            It could not; the message is the engine's.
        TransportTimeout
            No answer came within `timeout` seconds.
        EngineDead
            An engine died meanwhile.
        """
        return next(iter((await self.call_utility_all(method, *args, rank=rank, timeout=timeout)).values()))

    async def call_utility_all(
        self, method: str, *args: Any, rank: int | None = None, timeout: float | None = None
    ) -> dict[int, Any]:
        """`call_utility`, with what each engine returned, by rank."""
        self._check_loop()
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._queued:  # behind the requests that were asked for before
            worker = self._worker
            assert worker is not None
            late_error = None if timeout is None else TransportTimeout(f"{method!r} could not be sent within {timeout:g} s")
            await self._in_turn(worker.submit(int), lambda: None, deadline, late_error)
            self._check_open()
        calls: list[AsyncCall] = []
        try:
            for engine in self._registry.call_targets(rank):
                call = AsyncCall()
                self._registry.call(call, engine)
                calls.append(call)
            for call in calls:
                frames = utility_frames(call, method, args)
                with contextlib.suppress(Ended):  # its engine died, and the answer is there
                    if not copied(frames):
                        ticket = await self.ledger.areserve(nbytes_of(frames), timeout=left(deadline), check=call.check)
                        frames = ticket.parcels(frames)
                    call.check()
                    self._send(call.engine, [UTILITY, *frames])
                    self._registry.owe(call, time.monotonic())
            _, waiting = await asyncio.wait([call.future for call in calls], timeout=left(deadline))
            if waiting:
                late = ", ".join(call.engine.name for call in calls if not call.future.done())
                raise TransportTimeout(f"no answer to {method!r} within {timeout:g} s from {late}")
            return {call.engine.rank: call.future.result() for call in calls}
        except TransportError as error:
            frames, ticket = [], None
            raise without_frames(error)  # noqa: B904
        finally:
            for call in calls:
                self._registry.forget(call)

    # --- receiving --------------------------------------------------------------------------------------------------

    def _watch_socket(self, socket: zmq.Socket[bytes], callback: Callable[[], None]) -> None:
        """Have the loop call `callback` when something comes.

        A ZMQ socket's descriptor is readable once for any number of messages, so a callback must read until nothing is left.
        """
        assert self._loop is not None
        descriptor = socket.FD
        self._loop.add_reader(descriptor, self._guarded, callback)
        self._readers.append(descriptor)
        self._loop.call_soon(self._guarded, callback)  # for what came before

    def _guarded(self, callback: Callable[[], None]) -> None:
        if self._closed is not None:
            return
        try:
            callback()
        except BaseException as error:  # a fault of ours: whoever waits must not wait for ever
            self._end(f"the client failed to receive: {error!r}")
            raise

    def _on_output(self) -> None:
        if self._take_waiting(_AT_ONCE):
            assert self._loop is not None
            self._loop.call_soon(self._guarded, self._on_output)

    def _take_waiting(self, limit: int) -> bool:
        """Take what lies in the socket; whether there may be more."""
        output = self._bound().output
        for _ in range(limit):
            try:
                frames = receive_frames(output, zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._take(frames, time.monotonic())
        return True

    def _on_monitor(self) -> None:
        self._look_at_connections(time.monotonic())
        self._set_clock()

    def _set_clock(self) -> None:
        """Have the loop look at the clock when the next engine may count as dead."""
        if self._clock is not None:
            self._clock.cancel()
        look, now = self._next_look(), time.monotonic()
        if look is None and self._silence_timeout is not None:
            look = now + self._silence_timeout  # what is owed from now on is due no sooner
        if look is not None:
            assert self._loop is not None
            self._clock = self._loop.call_later(max(0.0, look - now), self._guarded, self._on_clock)

    def _on_clock(self) -> None:
        while self._take_waiting(1000):  # what an engine said before it went
            pass
        self._look_at_clock(time.monotonic())
        self._set_clock()

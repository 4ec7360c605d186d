"""The client for threads.

Whoever waits for an answer receives, for himself and for all who wait beside him: one has the turn, and passes it on when he
has what he waited for. So an answer to a lone thread wakes no other thread on its way. A thread of the client's own watches
for connections that break, and for streams that were dropped.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import zmq

from ..errors import TransportError, TransportTimeout
from ..schema import EngineCoreOutput
from .connection import receive_frames
from .control import UTILITY
from .core import FORKED, ClientCore, copied, left, utility_frames, without_frames
from .lifetime import nbytes_of
from .registry import Call, Ended, Live, request_id_of
from .turns import Turns

__all__ = ["EngineClient", "Outputs"]

# How often the client's own thread takes what nobody waits for, and looks who is dead.
_ATTEND_EVERY_MS = 1000
# How long it leaves the turn to others before it looks again at an engine that is due.
_LOOK_AGAIN_S = 0.005
# How long who receives may take to see that the client closes.
_LEAVE_S = 5.0
# Where the output socket is reached from within.
_NUDGE = "inproc://fastmm-nudge"


class _Live(Live):
    __slots__ = ("queue",)

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.queue: SimpleQueue[Any] = SimpleQueue()

    def push(self, output: EngineCoreOutput) -> None:
        self.queue.put(output)

    def fail(self, error: BaseException) -> None:
        self.queue.put(error)


class _Call(Call):
    __slots__ = ("queue",)

    def __init__(self) -> None:
        super().__init__()
        self.queue: SimpleQueue[Any] = SimpleQueue()

    def answer(self, value: Any) -> None:
        self.queue.put((value,))

    def fail(self, error: BaseException) -> None:
        self.queue.put(error)


class _ParentsTurns(Turns):
    """In a forked child, where nobody may receive."""

    def wait(self, queue: SimpleQueue[Any], timeout: float | None) -> Any:
        raise TransportError(FORKED)


class Outputs(Iterator[EngineCoreOutput]):
    """The outputs of one request, until it is finished. Dropped or closed before that, it aborts the request on the engine."""

    def __init__(self, client: EngineClient, live: _Live) -> None:
        self._client = client
        self._live = live
        self._over = False
        self._asked = False

    @property
    def request_id(self) -> str:
        return self._live.request_id

    def __iter__(self) -> Outputs:
        return self

    def __next__(self) -> EngineCoreOutput:
        return self.next()

    def next(self, timeout: float | None = None) -> EngineCoreOutput:
        """The next output; `TransportTimeout` where none came within `timeout` seconds, and the request goes on."""
        if self._over:
            raise StopIteration
        if self._asked:
            raise RuntimeError("two threads iterate over one request's outputs")
        self._asked = True
        try:
            item = self._client._turns.wait(self._live.queue, timeout)
        except Empty:
            raise TransportTimeout(f"no output of {self.request_id!r:.80} within {timeout:g} s") from None
        finally:
            self._asked = False
        if isinstance(item, BaseException):
            self._over = True
            try:
                raise item
            finally:
                del item  # its traceback has this frame
        if item.finish_reason is not None:
            self._over = True
        return item  # type: ignore[no-any-return]

    def close(self) -> None:
        """Abort the request, where it has not ended."""
        if not self._over:
            self._over = True
            self._client._abort([self._live])

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        # May run anywhere, even in a thread that holds the client's lock: the client's own thread does the rest.
        if not getattr(self, "_over", True) and not self._live.ended:
            self._client._abandon(self._live)


class EngineClient(ClientCore):
    """A client of vLLM's EngineCore for threads; any number of them may use it at once.

        with EngineClient("tcp://127.0.0.1:5570") as client:
            for output in client.generate(request):
                print(output.new_token_ids, output.finish_reason)

    Parameters
    ----------
    handshake, **options
        See `ClientCore`.
    """

    def _make_face(self) -> None:
        self._lock = threading.Lock()  # around the registry and the sockets that requests leave by
        self._life = threading.RLock()  # around start and close
        self._starting = False
        self._thread: threading.Thread | None = None
        self._turns: Turns = Turns(self._lock, self._receive)
        self._patience_ms = -1  # the output socket's rcvtimeo
        self._nudge: zmq.Socket[bytes] | None = None  # to the output socket, to wake who receives; the thread's own
        self._abandoned: deque[_Live] = deque()
        self._wake_fd = -1

    def _disown(self) -> None:
        self._turns = _ParentsTurns(self._lock, self._receive)

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind the sockets, where `bind` did not, and wait for the engines. Blocks as long as `startup_timeout` says.

        Raises
        ------
        TransportTimeout
            Not all engines were ready in time. Whatever is raised, the client is closed then.
        """
        with self._life:
            self._check_owner()
            if self._thread is not None or self._starting:
                raise TransportError("the client was started before")
            self._starting = True
            try:
                self._start(self._progress)
                self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._bound().output.bind(_NUDGE)
                assert self._context is not None
                self._nudge = self._context.socket(zmq.PUSH)
                self._nudge.connect(_NUDGE)
                self._thread = threading.Thread(target=self._watch_over, name="fastmm-engine-client", daemon=True)
                self._thread.start()
            except BaseException:
                self._closing.set()
                self._shut()
                raise
            finally:
                self._starting = False

    def close(self) -> None:
        """Abort what is live on the engines, end whoever waits with `TransportError`, and close. From any thread; often."""
        if self._owner != os.getpid():
            return  # a forked child: the sockets are the parent's
        self._closing.set()
        if self._turns.mine:
            # Called by on_outputs, or a signal's handler, in the middle of receiving: it ends when this thread is out of it.
            threading.Thread(target=self.close, name="fastmm-engine-client-close", daemon=True).start()
            return
        with self._life:
            if self._starting:
                return  # called from the progress callback: start() sees it and ends
            self._shut()

    def _shut(self) -> None:
        """End the client's own thread, and let go of all that it and the client have."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread() and thread.ident is not None:
            self._wake()
            thread.join()
            self._turns.take(_LEAVE_S)  # and keep it: nobody receives any more
        self._closed = "the client is closed"
        if self._nudge is not None:
            self._nudge.close()
        self._let_go()
        if self._wake_fd >= 0:
            fd, self._wake_fd = self._wake_fd, -1
            os.close(fd)

    def _close_at_exit(self) -> None:
        self.close()

    def __enter__(self) -> EngineClient:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- requests ---------------------------------------------------------------------------------------------------

    def generate(self, request: Any, *, wait: bool = True, timeout: float | None = None) -> Outputs:
        """Send a request, and iterate over its outputs until it is finished.

        Parameters
        ----------
        request
            An `EngineCoreRequest` of fastmm or of vLLM. Its ``client_index`` and ``current_wave`` are written.
        wait, timeout
            Whether to wait, and how many seconds, where `max_inflight_nbytes` are on their way.

        Returns
        -------
        Outputs
            An iterator. Dropped or closed before the end, it aborts the request on the engine.

        Raises
        ------
        EngineDead
            The engine is dead; from the iterator too, where it dies later.
        SchemaError, EncodeError
            The request cannot be sent; nothing was, and the client has forgotten it.
        Overloaded, TransportTimeout
            There was no room.
        """
        live = _Live(request_id_of(request))
        with self._lock:
            self._check_open()
            if self._abandoned:  # their ids are free
                self._abort_abandoned()
            self._admit(live, request)
        try:
            frames = self._encode(live, request)
            if not copied(frames):
                ticket = self.ledger.reserve(nbytes_of(frames), wait=wait, timeout=timeout, check=live.check)
                frames = ticket.parcels(frames)
            with self._lock:
                self._send_request(live, frames)
            return Outputs(self, live)
        except Ended:
            return Outputs(self, live)  # which tells
        except BaseException as error:
            with self._lock:
                if live.sent:  # a signal's handler raised
                    self._tell_aborts(self._registry.abort([live]))
                else:
                    self._registry.drop(live)
            if isinstance(error, TransportError):
                frames, ticket = [], None
                raise without_frames(error)  # noqa: B904
            raise

    add_request = generate

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests here and on their engines. Their iterators end with an output that says ABORT; other ids are ignored."""
        with self._lock:
            self._check_open()
            lives = self._registry.find([request_ids] if isinstance(request_ids, str) else request_ids)
            self._tell_aborts(self._registry.abort(lives))

    def _abort(self, lives: Iterable[Live]) -> None:
        with self._lock:
            if self._closed is None:
                self._tell_aborts(self._registry.abort(lives))

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            live = self._abandoned.popleft()
            if self._closed is None:
                self._tell_aborts(self._registry.abort([live]))

    def _abandon(self, live: _Live) -> None:
        self._abandoned.append(live)
        self._wake()

    # --- utility calls ----------------------------------------------------------------------------------------------

    def call_utility(self, method: str, *args: Any, rank: int | None = None, timeout: float | None = None) -> Any:
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
        return next(iter(self.call_utility_all(method, *args, rank=rank, timeout=timeout).values()))

    def call_utility_all(
        self, method: str, *args: Any, rank: int | None = None, timeout: float | None = None
    ) -> dict[int, Any]:
        """`call_utility`, with what each engine returned, by rank."""
        deadline = None if timeout is None else time.monotonic() + timeout
        calls: list[_Call] = []
        try:
            with self._lock:
                self._check_open()
                for engine in self._registry.call_targets(rank):
                    call = _Call()
                    self._registry.call(call, engine)
                    calls.append(call)
            for call in calls:
                frames = utility_frames(call, method, args)
                with contextlib.suppress(Ended):  # its engine died, and the answer is there
                    if not copied(frames):
                        frames = self.ledger.reserve(nbytes_of(frames), timeout=left(deadline), check=call.check).parcels(
                            frames
                        )
                    with self._lock:
                        call.check()
                        self._send(call.engine, [UTILITY, *frames])
                        self._registry.owe(call, time.monotonic())
            return {call.engine.rank: self._answer(call, method, timeout, deadline) for call in calls}
        except TransportError as error:
            frames = []
            raise without_frames(error)  # noqa: B904
        finally:
            with self._lock:
                for call in calls:
                    self._registry.forget(call)

    def _answer(self, call: _Call, method: str, timeout: float | None, deadline: float | None) -> Any:
        try:
            item = self._turns.wait(call.queue, left(deadline))
        except Empty:
            raise TransportTimeout(f"{call.engine.name} did not answer {method!r} within {timeout:g} s") from None
        if isinstance(item, BaseException):
            try:
                raise item
            finally:
                del item  # its traceback has this frame
        return item[0]

    # --- receiving --------------------------------------------------------------------------------------------------

    def _receive(self, queue: SimpleQueue[Any], deadline: float | None) -> None:
        """Take messages until something came into this queue. Only with the turn."""
        output = self._bound().output
        # Also where others' messages never stop coming. Who has no time left has a millisecond, as where none come.
        last = None if deadline is None else max(deadline, time.monotonic() + 0.001)
        while queue.empty():
            until = deadline
            if self._suspects or self._silence_timeout is not None:
                with self._lock:
                    look = self._next_look()
                if look is None and self._silence_timeout is not None:
                    look = time.monotonic() + self._silence_timeout  # what is owed from now on is due no sooner
                if look is not None and (until is None or look < until):
                    until = look
            patience_ms = -1 if until is None else int(max(0.0, until - time.monotonic()) * 1000) + 1
            if patience_ms != self._patience_ms:
                self._patience_ms = output.rcvtimeo = patience_ms
            try:
                self._take_one(receive_frames(output))
            except zmq.Again:
                self._attend()
                if deadline is not None and time.monotonic() >= deadline:
                    return
            else:
                if last is not None and time.monotonic() >= last:
                    return

    def _take_one(self, frames: Sequence[Any]) -> None:
        if len(frames) == 1 and not len(frames[0]):
            return  # a nudge
        on_outputs = self._on_outputs
        if on_outputs is None:
            with self._lock:
                self._take(frames, time.monotonic())
            return
        with self._lock:
            message = self._read(frames)
        if message is not None:
            try:
                self._report(on_outputs, message)  # without the lock: it may call the client
            finally:
                with self._lock:
                    self._hand_out(message, time.monotonic())

    def _attend(self) -> None:
        """Take what lies in the socket, and then look who is dead. Only with the turn."""
        output = self._bound().output
        with contextlib.suppress(zmq.Again):
            while True:
                self._take_one(receive_frames(output, zmq.NOBLOCK))
        with self._lock:
            self._look_at_clock(time.monotonic())

    def _attend_if_free(self) -> None:
        """`_attend`, where nobody else receives."""
        if self._turns.take():
            try:
                self._attend()
            finally:
                self._turns.leave()

    # --- the client's own thread ------------------------------------------------------------------------------------

    def _wake(self) -> None:
        fd = self._wake_fd
        if fd >= 0:
            with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody is there
                os.eventfd_write(fd, 1)

    def _watch_over(self) -> None:
        nudge = self._nudge
        assert nudge is not None
        why = "the client was closed"
        try:
            self._watch_over_until_closed(nudge)
        except BaseException as error:  # a fault of ours: whoever waits must not wait for ever
            why = f"the client's thread failed: {error!r}"
            raise
        finally:
            with self._lock:
                self._end(why)
            nudge.send(b"")  # who receives sees that there is nothing to wait for

    def _watch_over_until_closed(self, nudge: zmq.Socket[bytes]) -> None:
        connection = self._bound()
        poller = zmq.Poller()
        for source in (connection.input_monitor, connection.output_monitor, self._wake_fd):
            poller.register(source, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(_ATTEND_EVERY_MS))
            if self._wake_fd in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                with self._lock:
                    self._abort_abandoned()
            if connection.input_monitor in ready or connection.output_monitor in ready:
                with self._lock:
                    self._look_at_connections(time.monotonic())
                nudge.send(b"")  # who receives has to look at the clock earlier than he thought
            self._attend_if_free()
            while not self._closing.is_set():
                with self._lock:
                    look = self._next_suspect()
                if look is None:
                    break
                time.sleep(max(_LOOK_AGAIN_S, look - time.monotonic()))
                self._attend_if_free()

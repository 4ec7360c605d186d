"""The client for threads. One thread of its own receives; whoever asks encodes and sends on his own."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import zmq

from ..errors import TransportError, TransportTimeout
from ..schema import EngineCoreOutput
from .connection import receive_frames
from .core import ClientCore, copied
from .lifetime import Ticket, nbytes_of
from .registry import Call, Engine, Live, request_id_of

__all__ = ["EngineClient", "Outputs"]

# How many messages are taken before monitors and clock are looked at again.
_AT_ONCE = 256
# How long a wait for room goes on before it looks whether the request still lives.
_LOOK_EVERY_S = 0.25


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
        self.queue: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def answer(self, value: Any) -> None:
        self.queue.put((value, None))

    def fail(self, error: BaseException) -> None:
        self.queue.put((None, error))


class Outputs(Iterator[EngineCoreOutput]):
    """The outputs of one request, until it is finished. Dropped or closed before that, it aborts the request on the engine."""

    def __init__(self, client: EngineClient, live: _Live) -> None:
        self._client = client
        self._live = live
        self._get = live.queue.get
        self._over = False

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
        try:
            item = self._get(timeout=timeout)
        except Empty:
            raise TransportTimeout(f"no output of {self.request_id!r:.80} within {timeout:g} s") from None
        if isinstance(item, BaseException):
            self._over = True
            raise item
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
        self._abandoned: deque[_Live] = deque()
        self._wake_fd = -1

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
            if self._thread is not None:
                raise TransportError("the client was started before")
            self._starting = True
            try:
                self._start(self._progress)
            except BaseException:
                self._closing.set()
                self._closed = "the client is closed"
                self._let_go()
                raise
            finally:
                self._starting = False
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._receive, name="fastmm-engine-client", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Abort what is live on the engines, end whoever waits with `TransportError`, and close. From any thread; often."""
        if self._owner != os.getpid():
            return  # a forked child: the sockets are the parent's
        self._closing.set()
        with self._life:
            if self._starting:
                return  # called from the progress callback: start() sees it and ends
            thread, self._thread = self._thread, None
            if thread is not None and thread is not threading.current_thread():
                self._wake()
                thread.join()
            with self._lock:
                if self._closed is None:
                    self._end("the client was closed")
                self._closed = "the client is closed"
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
            self._admit(live, request)
        try:
            frames = self._encode(live, request)
            if not copied(frames):
                frames = self._reserve(live, nbytes_of(frames), wait, timeout).parcels(frames)
            with self._lock:
                self._send_request(live, frames)
        except BaseException:
            with self._lock:
                self._registry.drop(live)
            raise
        return Outputs(self, live)

    add_request = generate

    def _reserve(self, live: Live, nbytes: int, wait: bool, timeout: float | None) -> Ticket:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _LOOK_EVERY_S if deadline is None else min(_LOOK_EVERY_S, deadline - time.monotonic())
            try:
                return self.ledger.reserve(nbytes, wait=wait, timeout=left)
            except TransportTimeout:
                # Who waits for the room of an engine that is dead but keeps its connection would wait for ever.
                if live.ended or (deadline is not None and time.monotonic() >= deadline):
                    raise

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
                    calls.append(self._call(engine, method, args))
            return {call.engine.rank: _answer(call, method, timeout, deadline) for call in calls}
        finally:
            with self._lock:
                for call in calls:
                    self._registry.forget(call)

    def _call(self, engine: Engine, method: str, args: Any) -> _Call:
        call = _Call()
        call_id = self._registry.call(call, engine, time.monotonic())
        try:
            self._send(engine, self._utility_frames(call_id, method, args))
        except BaseException:
            self._registry.forget(call)
            raise
        return call

    # --- the thread that receives -----------------------------------------------------------------------------------

    def _wake(self) -> None:
        fd = self._wake_fd
        if fd >= 0:
            with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody is there
                os.eventfd_write(fd, 1)

    def _receive(self) -> None:
        try:
            self._receive_until_closed()
        except BaseException as error:  # a fault of ours: whoever waits must not wait for ever
            with self._lock:
                self._end(f"the client's receiving thread failed: {error!r}")
            raise

    def _receive_until_closed(self) -> None:
        connection = self._bound()
        output = connection.output
        poller = zmq.Poller()
        for source in (output, connection.input_monitor, connection.output_monitor, self._wake_fd):
            poller.register(source, zmq.POLLIN)
        while not self._closing.is_set():
            with self._lock:
                look = self._next_look()
            if look is None:
                look_in = self._silence_timeout  # what is owed from now on is due no sooner
            else:
                look_in = max(0.0, look - time.monotonic())
            ready = dict(poller.poll(None if look_in is None else int(look_in * 1000) + 1))
            while output in ready and self._take_waiting(output) and not self._closing.is_set():
                pass
            if self._wake_fd in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                while self._abandoned:
                    self._abort([self._abandoned.popleft()])
            now = time.monotonic()
            with self._lock:
                if connection.input_monitor in ready or connection.output_monitor in ready:
                    self._look_at_connections(now)
                if look is None or look > now:
                    continue
            self._take_waiting(output)  # what an engine said before it went
            with self._lock:
                self._look_at_clock(now)

    def _take_waiting(self, output: zmq.Socket[bytes]) -> bool:
        """Take what lies in the socket; whether there may be more."""
        for _ in range(_AT_ONCE):
            try:
                frames = receive_frames(output, zmq.NOBLOCK)
            except zmq.Again:
                return False
            with self._lock:
                self._take(frames, time.monotonic())
        return True


def _answer(call: _Call, method: str, timeout: float | None, deadline: float | None) -> Any:
    try:
        value, error = call.queue.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
    except Empty:
        raise TransportTimeout(f"{call.engine.name} did not answer {method!r} within {timeout:g} s") from None
    if error is not None:
        raise error
    return value

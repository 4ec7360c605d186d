"""The engine's side: for an engine of one's own, for the demo, and as the peer in tests and benchmarks.

with EngineServer("ipc:///run/engines/handshake", ready={"dtype": "bfloat16"}) as engine:
    for event in engine:
        if isinstance(event, Add):
            engine.send_outputs(EngineCoreOutputs(outputs=[...]), event.client_index)
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import zmq

from ..codec import Decoder, Encoder
from ..errors import DecodeError, EncodeError, FastmmError, PeerClosed, TransportError, TransportTimeout
from ..schema import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    RequestError,
    UtilityOutput,
    UtilityResult,
)
from ..schema.profile import profile_of_ready
from .connection import MONITOR_EVENT
from .control import (
    ENGINE_CORE_DEAD,
    StartWave,
    UtilityCall,
    read_abort,
    read_request_type,
    read_start_dp_wave,
    read_utility,
)
from .handshake import Addresses, EngineHandshake
from .lifetime import Ledger, nbytes_of
from .salvage import salvage_call_id, salvage_request

__all__ = ["Abort", "Add", "EngineServer", "StartWave", "UtilityCall"]

# How often a wait looks whether it was called off, or its clients have gone.
_LOOK_EVERY_S = 0.1
_CONNECTED, _LOST = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


class Add(NamedTuple):
    """A new request, and the client that wants its outputs."""

    request: EngineCoreRequest
    client_index: int


class Abort(NamedTuple):
    """Requests that a client has given up. Ids that the engine does not know, or has finished, are no mistake."""

    request_ids: list[str]
    client_index: int


Event = Add | Abort | UtilityCall | StartWave


class ReadsRequests(Protocol):
    """What `EngineServer` asks of a decoder."""

    def decode(self, frames: Any, /) -> Any:
        """The request in the frames behind the type's, or a `DecodeError`."""


class EngineServer:
    """An engine's sockets: requests come in as typed events, outputs go out.

    One thread receives (`get`, iteration); outputs may be sent from any.

    Parameters
    ----------
    handshake
        Where the client waits for its engines: the handshake address.
    rank
        Which engine this is.
    ready
        What the clients are told of it: ``dtype``, ``vllm_version``, ``max_model_len``, ``num_gpu_blocks``...
    local, headless
        What is said in the handshake: see `EngineHandshake`.
    decoder
        Reads requests; None for one with fastmm's defaults. ``Decoder(token_ids="array", tensors="numpy")`` is faster.
    encoder
        Writes outputs; None for one with fastmm's defaults, in the layout of the ``vllm_version`` that `ready` names.
    max_inflight_nbytes
        How many bytes of outputs may be on their way.
    patience
        Seconds that a client may be disconnected before it counts as gone: `get` raises `PeerClosed` and iteration ends
        when all have gone. None: wait for ever.
    linger
        Seconds that closing waits for outputs to leave.

    Notes
    -----
    A message that cannot be read costs that message only: a request whose id can still be read is answered as failed
    (``finish_reason`` ERROR, with a `RequestError`), and so is a utility call; anything else is dropped. `counters` has both.
    """

    def __init__(
        self,
        handshake: str,
        *,
        rank: int = 0,
        ready: Mapping[str, Any] | None = None,
        local: bool = False,
        headless: bool = True,
        decoder: ReadsRequests | None = None,
        encoder: Encoder | None = None,
        max_inflight_nbytes: int = 1 << 30,
        patience: float | None = 5.0,
        linger: float = 1.0,
    ) -> None:
        self._owner = os.getpid()
        self._handshake_address = handshake
        self._handshake = EngineHandshake(rank, local=local, headless=headless, ready=ready or {})
        self.rank = rank
        self.ledger = Ledger(max_inflight_nbytes)
        self.addresses: Addresses | None = None
        """Where the clients are, from `connect` on."""
        profile = profile_of_ready(ready or {})  # clients take ours from the same words
        self._decoder: ReadsRequests = decoder if decoder is not None else Decoder(EngineCoreRequest, profile=profile)
        self._encoder = encoder if encoder is not None else Encoder(profile=profile)
        self._patience = patience
        self._linger_ms = int(linger * 1000)
        self._context: zmq.Context[Any] | None = None
        self._inputs: list[zmq.Socket[bytes]] = []
        self._outputs: list[zmq.Socket[bytes]] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        self._lost: dict[int, float] = {}  # client index -> since when it is disconnected
        self._poller = zmq.Poller()
        self._next_input = 0
        self._pending: deque[Event] = deque()
        self._send_lock = threading.Lock()
        self._monitor_lock = threading.Lock()
        self._stopped = threading.Event()
        self._counts = dict.fromkeys(("adds", "aborts", "utilities", "waves", "failed", "dropped", "sent"), 0)
        self.last_fault: str | None = None
        """What was wrong with the last message that failed or was dropped."""

    @property
    def parallel_config(self) -> Mapping[str, Any]:
        """What the client said of the data parallel group, from `connect` on."""
        return self._handshake.parallel_config

    # --- life ----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> EngineServer:
        if self._context is None:
            self.connect()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None and issubclass(kind, Exception):
                self.send_dead()
        finally:
            self.close()

    def connect(self, timeout: float = 300.0) -> None:
        """Do the handshake, and connect to each client.

        Raises
        ------
        TransportTimeout
            Nobody answered within `timeout` seconds.
        TransportError
            The answer is none, or an address cannot be used.
        """
        self._check_owner()
        if self._context is not None:
            raise TransportError("expected an engine server that is not connected yet")
        self._context = zmq.Context()
        try:
            socket = self._socket(zmq.DEALER, self._handshake_address)
            monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_CONNECTED | _LOST)
            try:
                self.addresses = self._handshake.on_init(self._say_hello(socket, monitor, timeout))
                self._connect_clients(self.addresses)
                socket.send_multipart(self._handshake.ready())
            finally:
                socket.disable_monitor()
                monitor.close()
                socket.close()
        except BaseException:
            self._let_go()
            raise

    def _say_hello(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], timeout: float) -> list[bytes]:
        """The client's answer. A client that was started anew meanwhile is told anew."""
        socket.send_multipart(self._handshake.hello())
        lost, deadline = False, time.monotonic() + timeout
        while not socket.poll(int(_LOOK_EVERY_S * 1000)):
            for event in _events(monitor):
                if event == _CONNECTED and lost:
                    socket.send_multipart(self._handshake.hello())
                lost = event == _LOST
            if time.monotonic() > deadline:
                raise TransportTimeout(f"no client answered at {self._handshake_address} within {timeout:g} s")
            if self._stopped.is_set():
                raise TransportError("the engine server was stopped while it waited for its client")
        return socket.recv_multipart()

    def _connect_clients(self, addresses: Addresses) -> None:
        for address in addresses.outputs:
            self._outputs.append(self._socket(zmq.PUSH, address))
        for address in addresses.inputs:
            socket = self._socket(zmq.DEALER, address)
            self._inputs.append(socket)
            monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_CONNECTED | _LOST)
            self._monitors.append(monitor)
            # The monitors are not polled: who waits for room to send reads them too, and a socket bears one thread at a time.
            self._poller.register(socket, zmq.POLLIN)
            socket.send(self._handshake.ready_response())

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        assert self._context is not None
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = self._linger_ms
        # The ledger bounds what is on its way; a high-water mark would count messages.
        socket.sndhwm = socket.rcvhwm = 0
        if kind == zmq.DEALER:
            socket.identity = self._handshake.identity
        try:
            if "[" in address:
                socket.ipv6 = True
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise TransportError(f"cannot connect to {address}: {error.strerror}") from None
        return socket

    def stop(self) -> None:
        """End an iteration, and a `connect`, within a tenth of a second. From any thread, or a signal's handler."""
        self._stopped.set()

    def close(self) -> None:
        """Close the sockets; what is still to leave has `linger` seconds. Called by the thread that receives."""
        self._stopped.set()
        self._let_go()

    def _check_owner(self) -> None:
        if self._owner != os.getpid():
            raise TransportError("the engine server belongs to the process that made it: a forked child needs one of its own")

    def _let_go(self) -> None:
        if self._owner != os.getpid():
            return  # a forked child: the sockets are the parent's, and its threads may have held the locks
        with self._send_lock, self._monitor_lock:
            context, self._context = self._context, None
            if context is None:
                return
            for socket in self._inputs:
                socket.disable_monitor()
            for socket in (*self._monitors, *self._inputs, *self._outputs):
                socket.close()
            self._inputs, self._outputs, self._monitors, self._poller = [], [], [], zmq.Poller()
        context.term()

    # --- what comes in -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Event]:
        """Events as they come, until `stop`, `close`, or all clients have gone."""
        while not self._stopped.is_set():
            try:
                event = self._receive(_LOOK_EVERY_S)
            except PeerClosed:
                return
            if event is not None:
                yield event

    def get(self, timeout: float | None = None) -> Event:
        """The next event.

        Raises
        ------
        TransportTimeout
            None came within `timeout` seconds.
        PeerClosed
            All clients have gone for longer than `patience`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _LOOK_EVERY_S if deadline is None else min(_LOOK_EVERY_S, max(0.0, deadline - time.monotonic()))
            event = self._receive(left)
            if event is not None:
                return event
            if deadline is not None and time.monotonic() >= deadline:
                raise TransportTimeout(f"no message came within {timeout:g} s")

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether an event lies ready for `get`, within `timeout` seconds."""
        if not self._pending:
            event = self._receive(timeout)
            if event is not None:
                self._pending.append(event)
        return bool(self._pending)

    def _receive(self, timeout: float) -> Event | None:
        """One event, where one comes within `timeout`; messages that are none do not count as waiting."""
        self._check_owner()
        if self._pending:
            return self._pending.popleft()
        if self._context is None:
            raise TransportError("expected an engine server that is connected")
        deadline = time.monotonic() + timeout
        while True:
            count = len(self._inputs)
            for step in range(count):  # each client in its turn: one that floods must not starve another
                index = (self._next_input + step) % count
                try:
                    frames = self._inputs[index].recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    continue
                self._next_input = index + 1
                event = self._read(frames, index)
                if event is not None:
                    return event
                if time.monotonic() >= deadline:  # broken messages may come faster than they can be read
                    return None
                break
            else:
                self._look_at_monitors()
                # What a client sent before it went still counts: it may have come since we looked.
                if all(self._gone(index) for index in range(count)) and not self._poller.poll(0):
                    raise PeerClosed(f"all clients of engine {self.rank} have gone")
                left_ms = int(min(deadline - time.monotonic(), _LOOK_EVERY_S) * 1000)
                if not self._poller.poll(max(0, left_ms)) and time.monotonic() >= deadline - 0.001:
                    return None

    def _look_at_monitors(self) -> None:
        """Note which clients are there."""
        with self._monitor_lock:
            for index, monitor in enumerate(self._monitors):
                for event in _events(monitor):
                    if event == _LOST:
                        self._lost.setdefault(index, time.monotonic())
                    elif event == _CONNECTED:
                        self._lost.pop(index, None)

    def _gone(self, index: int) -> bool:
        """Whether a client has been disconnected for longer than we wait for it."""
        since = self._lost.get(index)
        return since is not None and self._patience is not None and time.monotonic() - since >= self._patience

    def _read(self, frames: Sequence[zmq.Frame], index: int) -> Event | None:
        """The event in a message of client `index`; None where it is none, and the client was told if it can be."""
        kind = None
        try:
            kind = read_request_type(frames[0])
            data = frames[1:]
            if kind is EngineCoreRequestType.ADD:
                request = self._decoder.decode(data)
                if not 0 <= request.client_index < len(self._outputs):
                    raise DecodeError(f"expected the index of a client below {len(self._outputs)}, got {request.client_index}")
                self._counts["adds"] += 1
                return Add(request, request.client_index)
            if kind is EngineCoreRequestType.ABORT:
                aborted = Abort(read_abort(data), index)
                self._counts["aborts"] += 1
                return aborted
            if kind is EngineCoreRequestType.UTILITY:
                call = read_utility(data)
                if not 0 <= call.client_index < len(self._outputs):
                    raise DecodeError(f"expected the index of a client below {len(self._outputs)}, got {call.client_index}")
                self._counts["utilities"] += 1
                return call
            wave = read_start_dp_wave(data)
            self._counts["waves"] += 1
            return wave
        except Exception as error:  # whatever one message does to us, the next one is read
            self._fail(frames, index, kind, error)
            return None

    def _fail(self, frames: Sequence[zmq.Frame], index: int, kind: EngineCoreRequestType | None, error: Exception) -> None:
        self.last_fault = f"{type(error).__name__}: {error}"
        # Told is the client whose socket it came from: what the broken message says of that may be part of the damage.
        told = None
        if kind is EngineCoreRequestType.ADD and len(frames) > 1:
            request_id = salvage_request(frames[1].buffer).request_id
            if request_id is not None:
                told = self._failed_request(request_id, RequestError("validation_error", self.last_fault))
        elif kind is EngineCoreRequestType.UTILITY and len(frames) > 1:
            call_id = salvage_call_id(frames[1].buffer)
            if call_id is not None:
                told = EngineCoreOutputs(utility_output=UtilityOutput(call_id, self.last_fault))
        if told is None:
            self._counts["dropped"] += 1
            return
        self._counts["failed"] += 1
        try:
            self.send_outputs(told, index, wait=False)
        except FastmmError as unsent:
            self.last_fault += f" (and its sender could not be told: {unsent})"

    # --- what goes out -------------------------------------------------------------------------------------------------

    def send_outputs(
        self, outputs: EngineCoreOutputs, client_index: int = 0, *, wait: bool = True, timeout: float | None = None
    ) -> None:
        """Send a step's outputs to one client. Large tensors are not copied: do not write to them until they have left.

        Raises
        ------
        Overloaded
            ``max_inflight_nbytes`` are on their way, and `wait` is False.
        TransportTimeout
            They still were after `timeout` seconds.
        PeerClosed
            They still were, and the client has gone for longer than `patience`.
        EncodeError
            The outputs cannot be written; nothing was sent.
        """
        outputs.engine_index = self.rank
        self._send(self._encoder.encode(outputs), client_index, wait, timeout)

    def send_output(self, output: EngineCoreOutput, client_index: int = 0) -> None:
        """Send one request's share of a step, alone; with its last one the request is finished."""
        finished = {output.request_id} if output.finished else None
        self.send_outputs(EngineCoreOutputs(outputs=[output], finished_requests=finished), client_index)

    def fail_request(
        self,
        request_id: str,
        message: str,
        client_index: int = 0,
        *,
        code: str = "validation_error",
        retryable: bool = False,
    ) -> None:
        """Say that a request has failed while the engine lives on."""
        self.send_outputs(self._failed_request(request_id, RequestError(code, message, retryable)), client_index)

    def _failed_request(self, request_id: str, error: RequestError) -> EngineCoreOutputs:
        output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error)
        outputs = EngineCoreOutputs(outputs=[output], finished_requests={request_id})
        try:
            self._encoder.encode(outputs)
        except EncodeError:  # an older release's layout: it has no place for the reason
            output.error = None
        return outputs

    def send_utility_result(self, call: UtilityCall, result: Any = None, *, failure: str | None = None) -> None:
        """Answer a utility call: with a result, or with why it failed."""
        answer = UtilityOutput(call.call_id, failure, None if failure is not None else UtilityResult(result=result))
        self.send_outputs(EngineCoreOutputs(utility_output=answer), call.client_index)

    def send_dead(self) -> None:
        """Tell every client that this engine ends with an error. A ``with`` block that an exception leaves does so."""
        if self._owner != os.getpid():
            return  # it is not for a forked child to say
        with self._send_lock:
            for socket in self._outputs:
                if not socket.closed:
                    socket.send(ENGINE_CORE_DEAD)

    def _send(self, frames: list[Any], client_index: int, wait: bool, timeout: float | None) -> None:
        self._check_owner()
        if self._context is None:
            raise TransportError("expected an engine server that is connected")
        if not 0 <= client_index < len(self._outputs):
            raise TransportError(f"expected the index of a client below {len(self._outputs)}, got {client_index}")
        ticket = self.ledger.reserve(
            nbytes_of(frames), wait=wait, timeout=timeout, check=lambda: self._check_client(client_index)
        )
        with self._send_lock:
            if self._context is None:  # closed meanwhile
                raise TransportError("expected an engine server that is connected")
            self._outputs[client_index].send_multipart(ticket.parcels(frames), copy=False)
            self._counts["sent"] += 1

    def _check_client(self, client_index: int) -> None:
        """Raise where nobody will take what waits for room."""
        self._look_at_monitors()
        if self._context is None:
            raise TransportError("the engine server was closed")
        if self._gone(client_index):
            raise PeerClosed(f"client {client_index} of engine {self.rank} has gone")

    @property
    def clients_gone(self) -> tuple[int, ...]:
        """The indices of the clients that are not connected at the moment, as far as `get` has seen."""
        return tuple(self._lost)

    @property
    def counters(self) -> dict[str, int]:
        """``adds``, ``aborts``, ``utilities``, ``waves`` (messages read), ``failed`` (broken requests that were answered),
        ``dropped`` (messages that nobody could be told of), ``sent``, and those of the ledger."""
        return {**self._counts, **self.ledger.counters}


def _events(monitor: zmq.Socket[bytes]) -> Iterator[int]:
    """What a monitor has seen since it was last asked."""
    while True:
        try:
            yield MONITOR_EVENT.unpack_from(monitor.recv_multipart(zmq.NOBLOCK)[0])[0]
        except zmq.Again:
            return

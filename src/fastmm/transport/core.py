"""What both faces of the client share: options, startup, encoding, and what a message from an engine does.

The faces differ in who receives, who waits and how. `ClientCore` is used by one of them at a time: `EngineClient` holds its
lock around it, `AsyncEngineClient` its event loop.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import zmq

from ..codec import Decoder, Encoder
from ..errors import DecodeError, TransportError
from ..schema import EngineCoreOutputs, SchedulerStats
from ..schema.profile import WireProfile, as_profile, profile_of_ready
from .address import Addressing
from .connection import COPIED_NBYTES, Connection, Watch, disconnected, send_frames
from .control import ABORT, ADD, START_DP_WAVE, abort_message, is_engine_dead, start_dp_wave_message, utility_message
from .handshake import EngineInfo
from .lifetime import Ledger
from .options import check_callable, check_group, check_heartbeat, check_seconds
from .registry import Call, Engine, Live, Registry
from .waves import Start, Waves

__all__ = ["ClientCore"]

_log = logging.getLogger("fastmm.transport")

# Which of its engines' clients this is: they are told of no other.
_CLIENT_INDEX = 0
FORKED = "the client belongs to the process that made it: a forked child needs one of its own"
# How long after a connection broke the engine counts as dead: what it had sent before is read first.
_GRACE_S = 0.05
_CASTS = {"bfloat16", "float16", "float32"}
# Heartbeats on TCP by default: a host that is lost without a word is noticed within the second number.
_HEARTBEAT_S = (10.0, 60.0)

_clients: weakref.WeakSet[ClientCore] = weakref.WeakSet()


class ClientCore:
    """Options and state of a client.

    Parameters
    ----------
    handshake
        The address that engines say HELLO to: ``tcp://127.0.0.1:5570``, ``ipc://path``; port 0 is any that is free. None: ipc
        in a directory that only this user can enter (`handshake_address` says where, after `bind`).
    engines
        How many engines to wait for, of the ranks 0, 1, ...; or their ranks.
    input, output
        Addresses of the sockets that engines are told to use. None: ipc in that directory; or, where the handshake is TCP
        beyond loopback, TCP on the same host.
    startup_timeout
        Seconds until all engines must be ready. Engines load for minutes.
    max_inflight_nbytes
        How many bytes may be on their way to the engines at once. Who wants to send more waits.
    progress
        Called as ``progress({rank: state})`` at the beginning of the wait for the engines and at every change. States are
        ``"waiting"`` (for its HELLO), ``"connected"``, ``"started"``, ``"ready"``.
    dtype
        What floating payloads are cast to: ``"engine"``, the dtype that the engine said; ``"bfloat16"``, ``"float16"``,
        ``"float32"``; None: nothing is cast.
    inplace
        With a cast, the request's floating payloads are handed over and cast where they lie. See `fastmm.encode_request`.
    threshold, dedup, hook
        As in `fastmm.encode_request`.
    profile
        The wire: a `WireProfile`, its name (``"0.28"``), or None for that of the version the engine said.
    tensors
        What tensors among the outputs become: ``"numpy"``, ``"torch"`` or ``"wire"``.
    heartbeat
        ``(every, lost_after)`` in seconds: ZMTP heartbeats, so that an engine's host that is lost without a word counts as
        dead. None: every 10 s, lost after 60 s, on TCP; False: none.
    on_outputs
        Called as ``on_outputs(message)`` with every `EngineCoreOutputs` before its outputs are handed out: for statistics and
        what else concerns no single request. Called where messages are received, so be short. It may call the client, but
        wait for no answer.
    silence_timeout
        An engine that owes an answer and says nothing at all for so many seconds counts as dead. None: it may take its time.
    parallel_config, coordinator
        What the engines are told of their data parallel group: the map ``parallel_config`` of the init message; and addresses
        of a vLLM coordinator (``coordinator_input``, ``coordinator_output``, ``frontend_stats_publish_address``).
    waves
        Whether the engines are a group that steps together, and must be told of waves. None: as their ready responses say.
    allow_remote
        Addresses that other machines can reach are refused unless this is True.
    advertise
        The host that engines are told in place of the one that was bound, for ``0.0.0.0`` or behind a translated address.
    linger
        Seconds that the last messages (aborts) may take to leave when the client closes.
    """

    def __init__(
        self,
        handshake: str | None = None,
        *,
        engines: int | Sequence[int] = 1,
        input: str | None = None,
        output: str | None = None,
        startup_timeout: float = 600.0,
        max_inflight_nbytes: int = 1 << 30,
        progress: Callable[[dict[int, str]], object] | None = None,
        dtype: Any = "engine",
        inplace: bool = True,
        threshold: int | None = None,
        dedup: bool = True,
        hook: Callable[[Any], Any] | None = None,
        profile: WireProfile | str | None = None,
        tensors: str = "numpy",
        on_outputs: Callable[[EngineCoreOutputs], object] | None = None,
        heartbeat: tuple[float, float] | Literal[False] | None = None,
        silence_timeout: float | None = None,
        parallel_config: Mapping[str, Any] | None = None,
        coordinator: Mapping[str, str | None] | None = None,
        waves: bool | None = None,
        allow_remote: bool = False,
        advertise: str | None = None,
        linger: float = 1.0,
    ) -> None:
        check_group(engines, parallel_config, coordinator)
        check_heartbeat(heartbeat)
        check_seconds("startup_timeout", startup_timeout)
        check_seconds("linger", linger)
        if silence_timeout is not None:
            check_seconds("silence_timeout", silence_timeout, zero=False)
        check_callable("progress", progress)
        check_callable("on_outputs", on_outputs)
        self._addressing = Addressing(handshake, input, output, allow_remote=allow_remote, advertise=advertise)
        self._expected = engines
        self._startup_timeout = startup_timeout
        self._progress = progress
        self._dtype = dtype
        self._encoding: dict[str, Any] = {"inplace": inplace, "threshold": threshold, "dedup": dedup, "hook": hook}
        self._profile = as_profile(profile)
        Encoder(dtype=None if isinstance(dtype, str) and dtype == "engine" else dtype, **self._encoding)  # to check them
        if heartbeat is None:
            heartbeat = _HEARTBEAT_S if self._addressing.tcp else False
        self._heartbeat = heartbeat or None
        self._on_outputs = on_outputs
        self.scheduler_stats: dict[int, SchedulerStats] = {}
        """The last that each engine sent, by rank; engines send them with their outputs, where they keep any."""
        self._silence_timeout = silence_timeout
        self._parallel_config = parallel_config
        self._coordinator = dict(coordinator or {})
        self._group = waves
        self._linger = linger
        self.ledger = Ledger(max_inflight_nbytes)
        """What is on its way: `Ledger.wait`, `Ledger.counters`."""
        self._decoder = Decoder(EngineCoreOutputs, tensors=tensors)
        self._context: zmq.Context[Any] | None = None
        self._connection: Connection | None = None
        self._watch = Watch(())
        self._registry = Registry(())
        self._waves = Waves(False)
        self._infos: tuple[EngineInfo, ...] = ()
        self._suspects: dict[int, tuple[float, str]] = {}  # rank -> when it counts as dead, and why
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._closing = threading.Event()
        self._closed: str | None = "the client was not started"  # why nothing can be sent
        self._broken = 0
        self._warned = False
        self._owner = os.getpid()
        self._make_face()
        _clients.add(self)

    def _make_face(self) -> None:
        """What a face has beside this."""

    def _disown(self) -> None:
        """In a forked child, after `_make_face`: let nobody touch what is the parent's."""

    # --- what a user may ask ----------------------------------------------------------------------------------------

    @property
    def engines(self) -> tuple[EngineInfo, ...]:
        """What the engines said of themselves, by rank; those that died are still here."""
        return self._infos

    @property
    def alive(self) -> tuple[int, ...]:
        """The ranks of the engines that are not dead."""
        return tuple(engine.rank for engine in self._registry.alive)

    @property
    def handshake_address(self) -> str:
        """Where engines say HELLO; known from `bind` on."""
        return self._bound().handshake_address

    @property
    def input_address(self) -> str:
        """Where engines get requests from; they are told."""
        return self._bound().input_address

    @property
    def output_address(self) -> str:
        """Where engines send outputs to; they are told."""
        return self._bound().output_address

    @property
    def counters(self) -> dict[str, int]:
        """``live`` requests, ``unknown`` outputs (late ones of what was aborted), ``broken`` messages nobody could read."""
        return {"live": len(self._registry), "unknown": self._registry.unknown, "broken": self._broken}

    def outstanding(self) -> dict[int, int]:
        """Live requests by the rank of their engine."""
        return {engine.rank: len(engine.live) for engine in self._registry.engines}

    def bind(self) -> str:
        """Bind the sockets, for whoever starts engines after that; the handshake's address. `start` binds what is not bound."""
        self._check_owner()
        if self._connection is None:
            if self._closing.is_set():
                raise TransportError("the client is closed")
            self._context = zmq.Context()
            try:
                self._connection = Connection(self._context, self._addressing, heartbeat=self._heartbeat, linger=self._linger)
                # For a client that nobody closes: left to the garbage collector, its context would end before its sockets,
                # and wait for them for ever.
                self._finalizer = weakref.finalize(
                    self, _release, self._connection, self._context, self._addressing, self._owner
                )
                self._finalizer.atexit = False
            except BaseException:
                self._let_go()
                raise
        return self._connection.handshake_address

    def _bound(self) -> Connection:
        if self._connection is None:
            raise TransportError("the client's sockets are not bound")
        return self._connection

    # --- startup and end --------------------------------------------------------------------------------------------

    def _start(self, progress: Callable[[dict[int, str]], object] | None) -> None:
        """Bind, and wait for the engines. Blocks; called off by `_closing`."""
        self.bind()
        infos, watch = self._bound().start(
            self._expected,
            parallel_config=self._parallel_config,
            coordinator=self._coordinator,
            timeout=self._startup_timeout,
            progress=progress,
            called_off=self._closing.is_set,
        )
        self._infos = infos
        self._watch = watch
        encoders: dict[Any, Encoder] = {}
        engines = []
        for info in infos:
            profile = self._profile or profile_of_ready({**info.ready, "vllm_version": info.vllm_version})
            dtype = self._dtype
            if isinstance(dtype, str) and dtype == "engine":
                dtype = info.dtype if info.dtype in _CASTS else None
            key = (str(dtype), profile.name)
            if key not in encoders:
                encoders[key] = Encoder(dtype=dtype, profile=profile, **self._encoding)
            engines.append(Engine(info, encoders[key]))
        self._registry = Registry(engines)
        group = self._group
        if group is None:
            group = len(engines) > 1 and any(_whole(info.ready.get("data_parallel_size")) > 1 for info in infos)
        self._waves = Waves(group)
        self._closed = None

    def _end(self, why: str) -> None:
        """Send nothing any more, and end whoever waits."""
        self._closed = why
        self._tell_aborts(self._registry.end_all(TransportError, why))

    def _let_go(self) -> None:
        """Close sockets and context. Blocks until what lingers has left, as long as `linger` says."""
        if self._finalizer is not None:
            self._finalizer.detach()
        _release(self._connection, self._context, self._addressing, self._owner)
        self._connection = self._context = None

    def _close_at_exit(self) -> None:
        """Close, for the end of the process."""
        raise NotImplementedError

    def _check_owner(self) -> None:
        if self._owner != os.getpid():
            raise TransportError(FORKED)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise TransportError(self._closed)

    # --- sending ----------------------------------------------------------------------------------------------------

    def _admit(self, live: Live, request: Any) -> Engine:
        """Take a request in, and write the client's index and the wave into it."""
        engine = self._registry.add(live, request)
        if request.client_index != _CLIENT_INDEX:
            request.client_index = _CLIENT_INDEX
        if self._waves.enabled and request.current_wave != self._waves.current:
            request.current_wave = self._waves.current
        return engine

    def _encode(self, live: Live, request: Any) -> list[Any]:
        """The frames of a request, under the id that its engine knows it by. From any thread."""
        if live.wire_id is live.request_id:
            return live.engine.encoder.encode(request)
        request.request_id = live.wire_id
        try:
            return live.engine.encoder.encode(request)
        finally:
            request.request_id = live.request_id

    def _send_request(self, live: Live, frames: Sequence[Any]) -> None:
        """Send an encoded request, unless it has ended meanwhile."""
        if live.ended:
            return
        engine = live.engine
        live.sent = True
        self._send(engine, [ADD, *frames])
        self._registry.owe(live, time.monotonic())
        if self._waves.enabled:
            self._tell_wave(self._waves.on_request(engine.rank))

    def _send(self, engine: Engine, frames: Sequence[Any]) -> None:
        """Send ``[type, ...]``. Never blocks; raises `EngineDead` where the connection is gone."""
        try:
            send_frames(self._bound().input, [engine.identity, *frames])
        except zmq.ZMQError as error:
            raise self._not_sent(engine, error) from None

    def _not_sent(self, engine: Engine, error: zmq.ZMQError) -> TransportError:
        if error.errno == zmq.EHOSTUNREACH:
            self._bury(engine, "its connection is gone")
            return engine.dead()
        return TransportError(f"cannot send to {engine.name}: {error.strerror}")

    def _tell(self, engine: Engine, frames: Sequence[Any]) -> None:
        """`_send` what nobody waits for: to an engine that is gone it need not be said."""
        try:
            self._send(engine, frames)
        except TransportError as error:
            _log.debug("%s", error)

    def _tell_aborts(self, told: Mapping[Engine, Iterable[str]]) -> None:
        for engine, request_ids in told.items():
            self._tell(engine, [ABORT, abort_message(request_ids)])

    def _tell_wave(self, start: Start | None) -> None:
        if start is not None:
            message = start_dp_wave_message(start.wave, start.exclude)
            for engine in self._registry.alive:
                if engine.rank != start.exclude:
                    self._tell(engine, [START_DP_WAVE, message])

    # --- receiving --------------------------------------------------------------------------------------------------

    def _take(self, frames: Sequence[Any], now: float) -> None:
        """A message of an engine."""
        message = self._read(frames)
        if message is not None:
            if self._on_outputs is not None:
                self._report(self._on_outputs, message)
            self._hand_out(message, now)

    def _read(self, frames: Sequence[Any]) -> EngineCoreOutputs | None:
        """What an engine says, frames of ZMQ while `_watch.learning`. What cannot be read costs itself only."""
        try:
            message: EngineCoreOutputs = self._decoder.decode(frames)
        except DecodeError as error:
            if is_engine_dead(frames):
                self._take_death(frames)
                return None
            self._broken += 1
            if not self._warned:
                self._warned = True
                _log.warning("an engine sent what cannot be read (said once, then counted): %s", error)
            return None
        if self._watch.learning and isinstance(frames[0], zmq.Frame):
            self._watch.on_output(message.engine_index, frames[0])
        if message.scheduler_stats is not None and message.engine_index in self._registry.by_rank:
            self.scheduler_stats[message.engine_index] = message.scheduler_stats
        return message

    def _report(self, on_outputs: Callable[[EngineCoreOutputs], object], message: EngineCoreOutputs) -> None:
        try:
            on_outputs(message)
        except Exception:
            _log.exception("on_outputs failed")

    def _hand_out(self, message: EngineCoreOutputs, now: float) -> None:
        self._registry.take(message, now)
        if self._waves.enabled:
            self._tell_wave(self._waves.on_outputs(message, bool(len(self._registry))))

    def _take_death(self, frames: Sequence[Any]) -> None:
        alive = self._registry.alive
        rank = self._watch.who(frames[0]) if isinstance(frames[0], zmq.Frame) else None
        engine = self._registry.by_rank.get(rank) if rank is not None else alive[0] if len(alive) == 1 else None
        if engine is not None:
            self._bury(engine, "it said so (ENGINE_CORE_DEAD)")
        # Else it cannot be told which engine said it; its connections break when it ends, and tell.

    def _look_at_connections(self, now: float) -> None:
        """Take what the monitors say."""
        connection = self._bound()
        for rank in map(self._watch.lost_input, disconnected(connection.input_monitor)):
            self._suspect(rank, "its input connection broke", now)
        for rank in map(self._watch.lost_output, disconnected(connection.output_monitor)):
            self._suspect(rank, "its output connection broke", now)

    def _suspect(self, rank: int | None, why: str, now: float) -> None:
        if rank is not None:
            self._suspects.setdefault(rank, (now + _GRACE_S, why))

    def _next_suspect(self) -> float | None:
        """When the next engine whose connection broke counts as dead."""
        return min((when for when, _ in self._suspects.values()), default=None)

    def _next_look(self) -> float | None:
        """When `_look_at_clock` has something to do, as things stand."""
        suspect = self._next_suspect()
        silent = None if self._silence_timeout is None else self._registry.silent_at(self._silence_timeout)
        return silent if suspect is None else suspect if silent is None else min(suspect, silent)

    def _look_at_clock(self, now: float) -> None:
        """Bury who is due. The output socket must have been emptied before."""
        for rank, (when, why) in list(self._suspects.items()):
            if when <= now:
                del self._suspects[rank]
                self._bury(self._registry.by_rank[rank], why)
                self._let_input_forget()
        timeout = self._silence_timeout
        if timeout is not None:
            for engine in self._registry.silent(now, timeout):
                told = [live.wire_id for live in engine.live if live.sent]
                self._bury(engine, f"it owed an answer and said nothing for {timeout:g} s")
                if told:
                    self._tell(engine, [ABORT, abort_message(told)])  # should it wake up, it need not go on
                self._watch.cut(engine.rank)

    def _let_input_forget(self) -> None:
        """Have ZMQ let go of what lay in a broken connection: it does when its socket is next used, and nobody may use it."""
        self._bound().input.getsockopt(zmq.EVENTS)

    def _bury(self, engine: Engine, why: str) -> None:
        if self._registry.bury(engine, why):
            _log.warning("%s is dead: %s", engine.name, why)


def utility_frames(call: Call, method: str, args: Sequence[Any]) -> list[Any]:
    """The frames of a utility call behind the type's."""
    return utility_message(_CLIENT_INDEX, call.call_id, method, args)


def copied(frames: Sequence[Any]) -> bool:
    """Whether ZMQ copies these frames as they are sent: one that is small. Nothing has to be kept for it."""
    return len(frames) == 1 and len(frames[0]) < COPIED_NBYTES


def left(deadline: float | None) -> float | None:
    """How many seconds are left until then."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def without_frames(error: TransportError) -> TransportError:
    """The error without its traceback, whose frames have the request's: who keeps an error must not keep room in the ledger."""
    error.__context__ = None
    return error.with_traceback(None)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _release(connection: Connection | None, context: zmq.Context[Any] | None, addressing: Addressing, owner: int) -> None:
    if os.getpid() != owner:
        return  # dropped in a forked child: all of it is the parent's
    if connection is not None:
        connection.close()
    if context is not None:
        context.term()
    addressing.close()


def _close_all() -> None:
    for client in list(_clients):
        if client._owner == os.getpid() and client._connection is not None:
            client._close_at_exit()


def _forget_in_child() -> None:
    for client in list(_clients):
        client._closed = FORKED
        client._make_face()  # locks that a thread held which is not here
        client._disown()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_in_child)

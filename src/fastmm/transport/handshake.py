"""vLLM's startup handshake, both sides, without sockets: messages in, messages out.

The client binds a ROUTER for the handshake. An engine connects a DEALER and says HELLO; the client answers with the addresses
of its sockets; the engine connects to those, sends one ready response to each input socket, and says READY on the handshake.
The ready response and READY travel on two sockets, so either may come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgpack

from ..errors import TransportError

__all__ = ["Addresses", "ClientHandshake", "EngineHandshake", "EngineInfo", "engine_identity", "engine_rank"]

# A handshake message is some hundred bytes; a ready response some thousand. What is larger is not one.
_LONGEST_NBYTES = 1 << 20

State = Literal["waiting", "connected", "started", "ready"]


def engine_identity(rank: int) -> bytes:
    """What the ROUTER calls the engine of `rank`, the first frame of each message to it: two bytes, little-endian."""
    if not 0 <= rank <= 0xFFFF:
        raise TransportError(f"expected an engine's rank from 0 to 65535, got {rank}")
    return rank.to_bytes(2, "little")


def engine_rank(identity: Any) -> int | None:
    """The rank that an identity names, or None where it is not one of an engine."""
    return int.from_bytes(identity, "little") if len(identity) == 2 else None


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where an engine finds the sockets of its clients: one input and one output for each client, by client index.

    Parameters
    ----------
    inputs
        ROUTER sockets that requests come from.
    outputs
        PULL sockets that outputs go to.
    coordinator_input, coordinator_output, frontend_stats_publish_address
        Those of vLLM's data parallel coordinator, where there is one.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """As the init message has it."""
        return {
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "coordinator_input": self.coordinator_input,
            "coordinator_output": self.coordinator_output,
            "frontend_stats_publish_address": self.frontend_stats_publish_address,
        }

    @classmethod
    def from_wire(cls, value: Any) -> Addresses:
        """From the map of an init message; keys that are not known are passed over.

        Raises
        ------
        TransportError
            A key is missing or of another kind.
        """
        if not isinstance(value, Mapping):
            raise TransportError(f"expected a map of addresses, got {_kind(value)}")
        lists: dict[str, tuple[str, ...]] = {}
        for name in ("inputs", "outputs"):
            given = value.get(name)
            if not isinstance(given, (list, tuple)) or not given or not all(isinstance(address, str) for address in given):
                raise TransportError(f"expected {name!r} to be a list of addresses, got {_kind(given)}")
            lists[name] = tuple(given)
        if len(lists["inputs"]) != len(lists["outputs"]):
            raise TransportError(
                f"expected an output address for each of {len(lists['inputs'])} input addresses, got {len(lists['outputs'])}"
            )
        others: dict[str, str | None] = {}
        for name in ("coordinator_input", "coordinator_output", "frontend_stats_publish_address"):
            given = value.get(name)
            if given is not None and not isinstance(given, str):
                raise TransportError(f"expected {name!r} to be an address or nil, got {_kind(given)}")
            others[name] = given
        return cls(lists["inputs"], lists["outputs"], **others)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine said of itself when it started.

    Attributes
    ----------
    identity, rank
        Its name on the ROUTER, and the number that stands for.
    local, headless
        Whether it was started beside its client; whether it was started without a front end of its own.
    dtype, vllm_version, max_model_len, num_gpu_blocks
        From the ready response; None where it did not say.
    ready
        Everything that it said, keys that fastmm does not know included.
    """

    identity: bytes
    rank: int
    local: bool
    headless: bool
    dtype: str | None = None
    vllm_version: str | None = None
    max_model_len: int | None = None
    num_gpu_blocks: int | None = None
    ready: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Engine:
    """One engine's way through the handshake."""

    rank: int
    hello: dict[str, Any] | None = None  # None until HELLO
    started: dict[str, Any] | None = None  # READY, None until it comes
    response: dict[str, Any] | None = None  # the ready response, None until it comes

    @property
    def state(self) -> State:
        if self.hello is None:
            return "waiting"
        if self.started is not None and self.response is not None:
            return "ready"
        return "connected" if self.started is None and self.response is None else "started"

    def info(self) -> EngineInfo:
        said = {**(self.hello or {}), **(self.started or {}), **(self.response or {})}
        local, headless = said.pop("local", False), said.pop("headless", False)
        said.pop("status", None)

        def text(name: str) -> str | None:
            return said[name] if isinstance(said.get(name), str) else None

        def whole(name: str) -> int | None:
            value = said.get(name)
            return value if isinstance(value, int) and not isinstance(value, bool) else None

        return EngineInfo(
            identity=engine_identity(self.rank),
            rank=self.rank,
            local=local is True,
            headless=headless is True,
            dtype=text("dtype"),
            vllm_version=text("vllm_version"),
            max_model_len=whole("max_model_len"),
            num_gpu_blocks=whole("num_gpu_blocks"),
            ready=said,
        )


class ClientHandshake:
    """The client's side: what to answer, and when all engines are there.

    What does not belong to the handshake (junk, an engine nobody waits for, a second READY) is passed over and counted: a
    stray peer must not end a client that waits for others.

    Parameters
    ----------
    addresses
        What the engines are told.
    engines
        How many engines are waited for, of the ranks 0, 1, ...; or their ranks.
    parallel_config
        What the engines are told of their data parallel group; empty where they are not one.
    """

    def __init__(
        self, addresses: Addresses, engines: int | Sequence[int] = 1, parallel_config: Mapping[str, Any] | None = None
    ) -> None:
        ranks = range(engines) if isinstance(engines, int) else sorted(set(engines))
        if not ranks:
            raise TransportError(f"expected at least one engine to wait for, got {engines!r}")
        self._engines = {engine_identity(rank): _Engine(rank) for rank in ranks}
        message = {"addresses": addresses.to_wire(), "parallel_config": dict(parallel_config or {})}
        self._init_message: bytes = msgpack.packb(message)
        self.ignored = 0
        """How many messages were passed over."""
        self.last_ignored: str | None = None
        """Why the last of them was."""

    def on_handshake(self, frames: Sequence[Any]) -> list[bytes] | None:
        """Take a message of the handshake's ROUTER, ``[identity, map]``.

        Returns
        -------
        list or None
            What to send back there, ``[identity, answer]``, or None where there is nothing to say.
        """
        read = self._read(frames, "the handshake")
        if read is None:
            return None
        engine, said = read
        status = said.get("status")
        if status == "HELLO" and engine.started is None and engine.response is None:
            # A second HELLO is that of an engine that lost its connection, or was started again: it is answered again.
            engine.hello = said
            return [engine_identity(engine.rank), self._init_message]
        if status == "READY" and engine.hello is not None and engine.started is None:
            engine.started = said
            return None
        what = f"status {status[:32]!r}" if isinstance(status, str) else "no status"
        self._ignore(f"{what} from engine {engine.rank}, which is {engine.state}")
        return None

    def on_input(self, frames: Sequence[Any]) -> None:
        """Take a message of the input ROUTER, ``[identity, map]``: an engine's ready response, empty for some versions."""
        read = self._read(frames, "the input socket", empty=True)
        if read is None:
            return
        engine, said = read
        if engine.hello is None or engine.response is not None:
            self._ignore(f"a ready response from engine {engine.rank}, which is {engine.state}")
            return
        engine.response = said

    @property
    def done(self) -> bool:
        """Whether every engine said READY and sent its ready response."""
        return all(engine.state == "ready" for engine in self._engines.values())

    @property
    def engines(self) -> tuple[EngineInfo, ...]:
        """Those that are ready, by rank."""
        return tuple(engine.info() for engine in self._engines.values() if engine.state == "ready")

    @property
    def state(self) -> dict[int, State]:
        """How far each engine is: ``"waiting"`` for its HELLO, ``"connected"``, ``"started"`` (one of READY and the ready
        response is there), ``"ready"``."""
        return {engine.rank: engine.state for engine in self._engines.values()}

    def missing(self) -> str:
        """Who is waited for, in words, for a timeout's message."""
        said = "; ".join(
            f"engine {rank} {'has not said HELLO' if state == 'waiting' else f'is {state}, not ready'}"
            for rank, state in self.state.items()
            if state != "ready"
        )
        if self.ignored:
            said += f" ({self.ignored} other messages were passed over, the last: {self.last_ignored})"
        return said

    def _read(self, frames: Sequence[Any], where: str, *, empty: bool = False) -> tuple[_Engine, dict[str, Any]] | None:
        if len(frames) != 2:
            self._ignore(f"a message of {len(frames)} frames on {where}")
            return None
        identity = bytes(memoryview(frames[0])[:16])
        engine = self._engines.get(identity)
        if engine is None:
            rank = engine_rank(identity)
            self._ignore(f"a message on {where} from " + (f"rank {rank}" if rank is not None else repr(identity)))
            return None
        if empty and not memoryview(frames[1]).nbytes:
            return engine, {}
        try:
            return engine, _map_of(frames[1])
        except TransportError as error:
            self._ignore(f"from engine {engine.rank} on {where}: {error}")
            return None

    def _ignore(self, why: str) -> None:
        self.ignored += 1
        self.last_ignored = why


class EngineHandshake:
    """The engine's side.

    Parameters
    ----------
    rank
        Which engine this is.
    local, headless
        What HELLO and READY say: vLLM's engines are local where their client started them, and headless where it did not.
    ready
        What the ready response says: ``dtype``, ``vllm_version``, ``max_model_len``, ``num_gpu_blocks``... None for an empty
        message, as some versions send it.
    """

    def __init__(
        self, rank: int = 0, *, local: bool = False, headless: bool = True, ready: Mapping[str, Any] | None = None
    ) -> None:
        self.identity = engine_identity(rank)
        self.rank = rank
        self.parallel_config: dict[str, Any] = {}
        """What the client said of the data parallel group, from `on_init` on."""
        self._flags = {"local": local, "headless": headless}
        try:
            self._response: bytes = b"" if ready is None else msgpack.packb(dict(ready))
        except (TypeError, ValueError, OverflowError) as error:
            raise TransportError(f"expected plain values in the ready response: {error}") from None

    def hello(self) -> list[bytes]:
        """The first message on the handshake."""
        return [msgpack.packb({"status": "HELLO", **self._flags})]

    def on_init(self, frames: Sequence[Any]) -> Addresses:
        """Take the client's answer to HELLO.

        Raises
        ------
        TransportError
            It is not one.
        """
        if len(frames) != 1:
            raise TransportError(f"expected an init message of one frame, got {len(frames)}")
        said = _map_of(frames[0])
        config = said.get("parallel_config", {})
        if not isinstance(config, dict):
            raise TransportError(f"expected 'parallel_config' to be a map, got {_kind(config)}")
        addresses = Addresses.from_wire(said.get("addresses"))
        self.parallel_config = config
        return addresses

    def ready_response(self) -> bytes:
        """The first message to each input socket, one frame: the client cannot answer an engine it has not heard."""
        return self._response

    def ready(self, **more: Any) -> list[bytes]:
        """The last message on the handshake, with `more` keys such as ``parallel_config_hash``."""
        return [msgpack.packb({"status": "READY", **self._flags, **more})]


def _map_of(frame: Any) -> dict[str, Any]:
    """A small msgpack map with text keys."""
    view = memoryview(frame)
    if view.nbytes > _LONGEST_NBYTES:
        raise TransportError(f"expected a small map, got {view.nbytes} bytes")
    try:
        value = msgpack.unpackb(view, strict_map_key=False)
    except Exception as error:  # msgpack raises its own, ValueErrors and UnicodeErrors
        raise TransportError(
            f"expected a msgpack map, got {view.nbytes} bytes that are none ({type(error).__name__})"
        ) from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise TransportError(f"expected a msgpack map with text keys, got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}" if value is not None else "nothing"

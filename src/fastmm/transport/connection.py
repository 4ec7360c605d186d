"""The client's sockets, the startup over them, and which connection is which engine's.

ZMQ hides connections behind its sockets. Two things bring them back: a message's frames know the file descriptor that they were
read from, and the socket's monitor says which file descriptor was disconnected. So the ready response ties an engine to its
input connection, and its first outputs to its output connection; when the process ends, however it ends, the kernel closes
both, and the monitor says so within a millisecond, on ipc and TCP alike (measured with SIGKILL).
"""

from __future__ import annotations

import contextlib
import os
import socket as stdlib_socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from ..errors import EngineDead, TransportError, TransportTimeout
from .address import Addressing, bind
from .handshake import Addresses, ClientHandshake, EngineInfo, engine_rank

__all__ = ["Connection", "Watch"]

# A monitor's first frame: the event, and its value, which is a file descriptor for what is asked for here.
MONITOR_EVENT = struct.Struct("=Hi")
# Frames from this size on are sent without a copy: pyzmq's copy_threshold.
COPIED_NBYTES = 65536
# The kernel's room in an ipc connection to an engine.
_ROOM_NBYTES = 1 << 18
# How often a wait looks whether it was called off.
_LOOK_EVERY_S = 0.05


def descriptor(frame: zmq.Frame) -> int | None:
    """The file descriptor of the connection that a frame came from; None where this libzmq does not say."""
    try:
        return int(frame.get("__fd"))
    except (zmq.ZMQError, TypeError, ValueError):
        return None


def peer(frame: zmq.Frame) -> str | None:
    """The peer of the connection: its IP address, or on ipc its user, group and process."""
    try:
        return str(frame.get("Peer-Address"))
    except (zmq.ZMQError, TypeError, ValueError):
        return None


class Watch:
    """Which engine is at the other end of which connection."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._inputs: dict[int, int] = {}
        self._outputs: dict[int, int] = {}
        self._peers: dict[int, str | None] = {}
        self._inodes: dict[int, int] = {}  # descriptor -> what it stood for when it was told: descriptors are used again
        self._ranks = set(ranks)
        self.learning = True
        """Whether an engine's output connection is not known yet: outputs are then received with their descriptors."""

    def on_ready(self, rank: int, frame: zmq.Frame) -> None:
        """A ready response came on the input socket."""
        fd = descriptor(frame)
        if fd is not None:
            self._inputs[fd] = rank
            self._inodes[fd] = inode(fd)
            widen(fd)
        self._peers[rank] = peer(frame)

    def on_output(self, rank: int, frame: zmq.Frame) -> None:
        """An output of this engine came in this frame."""
        fd = descriptor(frame)
        if fd is None:
            self.learning = False
        elif rank in self._ranks:
            known = self._peers.get(rank)
            if known is not None and known != peer(frame):
                return  # what another peer says under this engine's number must not bury this engine when that peer ends
            self._outputs[fd] = rank
            self._inodes[fd] = inode(fd)
            self.learning = len(set(self._outputs.values())) < len(self._ranks)

    def cut(self, rank: int) -> None:
        """Break an engine's connections: for one that counts as dead and is not, so that ZMQ lets go of what it never read."""
        for fd, other in [*self._inputs.items(), *self._outputs.items()]:
            if other == rank:
                with contextlib.suppress(OSError), stdlib_socket.socket(fileno=os.dup(fd)) as connection:
                    if inode(connection.fileno()) == self._inodes[fd]:
                        connection.shutdown(stdlib_socket.SHUT_RDWR)

    def who(self, frame: zmq.Frame) -> int | None:
        """Whose connection an output's frame came from, where that is sure."""
        fd = descriptor(frame)
        rank = self._outputs.get(fd) if fd is not None else None
        if rank is not None:
            return rank
        if len(self._ranks) == 1:
            return next(iter(self._ranks))
        address = peer(frame)
        known = set(self._outputs.values())
        same = [rank for rank, other in self._peers.items() if other == address and address is not None and rank not in known]
        return same[0] if len(same) == 1 else None

    def lost_input(self, fd: int) -> int | None:
        """An input connection is gone: whose it was."""
        return self._inputs.pop(fd, None)

    def lost_output(self, fd: int) -> int | None:
        """An output connection is gone: whose it was. A stray's, and one that never brought an output, is nobody's."""
        return self._outputs.pop(fd, None)


class Connection:
    """Three bound sockets and their monitors: handshake (ROUTER, for the startup only), input (ROUTER), output (PULL).

    Any thread may use it, one at a time.

    Parameters
    ----------
    heartbeat
        Seconds between ZMTP heartbeats, and of silence after which a connection counts as cut; None for none.
    """

    def __init__(
        self, context: zmq.Context[Any], addressing: Addressing, *, heartbeat: tuple[float, float] | None, linger: float
    ) -> None:
        self._sockets: list[zmq.Socket[bytes]] = []
        self._monitored: list[zmq.Socket[bytes]] = []
        try:
            self._context = context
            self.handshake = self._socket(zmq.ROUTER, heartbeat, linger)
            self.input = self._socket(zmq.ROUTER, heartbeat, linger)
            self.output = self._socket(zmq.PULL, heartbeat, linger)
            self.handshake_monitor = self._monitor(self.handshake)
            self.input_monitor = self._monitor(self.input)
            self.output_monitor = self._monitor(self.output)
            self.handshake_address = addressing.told(bind(self.handshake, addressing.address("handshake")))
            inputs = addressing.told(bind(self.input, addressing.address("input")))
            outputs = addressing.told(bind(self.output, addressing.address("output")))
        except BaseException:
            self.close()
            raise
        self.input_address = inputs
        self.output_address = outputs

    def _socket(self, kind: int, heartbeat: tuple[float, float] | None, linger: float) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(socket)
        socket.linger = int(linger * 1000)
        # The ledger bounds what is on its way. A high-water mark here would count messages, and drop or block unseen.
        socket.sndhwm = 0
        if kind == zmq.PULL:
            socket.rcvhwm = 0
        else:
            # It keeps its bound on what lies unread: after the startup nobody reads it, whoever sends to it.
            socket.router_mandatory = True  # a message to an engine that is not there is an error, not silence
        if heartbeat is not None:
            socket.heartbeat_ivl = int(heartbeat[0] * 1000)
            socket.heartbeat_timeout = int(heartbeat[1] * 1000)
            # A heartbeat waits behind what is being sent: where that is a large frame, TCP must give the connection up.
            socket.tcp_maxrt = int(heartbeat[1] * 1000)
        return socket

    def _monitor(self, socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        monitor.linger = 0
        self._monitored.append(socket)
        self._sockets.append(monitor)
        return monitor

    def start(
        self,
        engines: int | Sequence[int],
        *,
        parallel_config: Mapping[str, Any] | None,
        coordinator: Mapping[str, str | None],
        timeout: float,
        progress: Callable[[dict[int, str]], object] | None,
        called_off: Callable[[], bool],
    ) -> tuple[tuple[EngineInfo, ...], Watch]:
        """Wait until all engines are ready.

        Raises
        ------
        TransportTimeout
            They were not within `timeout` seconds. The message says who is missing.
        EngineDead
            One went away while it was loading.
        TransportError
            The wait was called off.
        """
        addresses = Addresses((self.input_address,), (self.output_address,), **coordinator)
        handshake = ClientHandshake(addresses, engines, parallel_config)
        watch = Watch(list(handshake.state))
        loading: dict[int, int] = {}  # descriptor on the handshake socket -> rank
        poller = zmq.Poller()
        for socket in (self.handshake, self.input, self.handshake_monitor, self.input_monitor):
            poller.register(socket, zmq.POLLIN)
        deadline = time.monotonic() + timeout
        state: dict[int, str] | None = None
        while True:
            if state != handshake.state:
                state = dict(handshake.state)
                if progress is not None:
                    progress(dict(state))
            if handshake.done:
                break
            if called_off():
                raise TransportError(f"the client was closed while it waited for its engines: {handshake.missing()}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransportTimeout(f"not all engines were ready within {timeout:g} s: {handshake.missing()}")
            poller.poll(max(1, int(min(left, _LOOK_EVERY_S) * 1000)))
            # Disconnections are asked for first and acted on last: what a peer said before it went still counts.
            gone, gone_input = disconnected(self.handshake_monitor), disconnected(self.input_monitor)
            for frames in waiting(self.input):
                ignored = handshake.ignored
                handshake.on_input(frames)
                rank = engine_rank(frames[0].bytes)
                if rank is not None and handshake.ignored == ignored:  # else it is a stray's, whose end means nothing
                    watch.on_ready(rank, frames[1])
            for frames in waiting(self.handshake):
                ignored = handshake.ignored
                answer = handshake.on_handshake(frames)
                rank = engine_rank(frames[0].bytes)
                fd = descriptor(frames[-1])
                if fd is not None and rank is not None and handshake.ignored == ignored:
                    loading[fd] = rank
                if answer is not None:
                    with contextlib.suppress(zmq.ZMQError):  # it said HELLO and went
                        self.handshake.send_multipart(answer)
            for fd in gone:
                rank = loading.pop(fd, None)
                if rank is not None and handshake.state[rank] == "connected" and rank not in loading.values():
                    raise EngineDead(f"engine {rank} went away while it was loading")
            for fd in gone_input:
                rank = watch.lost_input(fd)
                if rank is not None:
                    raise EngineDead(f"engine {rank} went away while others were loading")
        self._end(self.handshake, self.handshake_monitor)
        return handshake.engines, watch

    def _end(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        socket.disable_monitor()
        self._monitored.remove(socket)
        for ended in (monitor, socket):
            ended.close()
            self._sockets.remove(ended)

    def unwatch(self) -> None:
        """Stop the monitors. Comes before the end of any socket: a monitor outlives its socket badly."""
        for socket in self._monitored:
            socket.disable_monitor()
        self._monitored = []

    def close(self) -> None:
        """Close all sockets; what is still to leave lingers in the context as long as was said."""
        self.unwatch()
        for socket in self._sockets:
            if not socket.closed:
                socket.close()
        self._sockets = []


# What `Socket.send_multipart` and `recv_multipart` come down to; their own way to it costs more than all the rest of a text's
# round trip (5 to 15 us for three small frames, and under one this way, measured).
_send = zmq.backend.Socket.send
_recv = zmq.backend.Socket.recv
_MORE = int(zmq.SNDMORE)


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Any]) -> None:
    """Send a message. ZMQ copies small frames, and keeps large ones until they are sent."""
    calls = [(socket, frame, _MORE, len(frame) < COPIED_NBYTES) for frame in frames]
    calls[-1] = (socket, frames[-1], 0, calls[-1][3])
    left = iter(calls)
    try:
        for call in left:  # with nothing else to call, so that where something raises, this frame was sent, almost always
            _send(*call)
    except zmq.ZMQError:  # refused, with its first frame
        raise
    except BaseException:  # a signal's handler raised: the next message would be taken for the rest of half a message
        with contextlib.suppress(zmq.ZMQError):  # it raised before the first: nothing was sent, and nobody is dead for it
            for call in left:
                _send(*call)
        raise


def receive_frames(socket: zmq.Socket[bytes], flags: int = 0) -> list[zmq.Frame]:
    """Receive a message: the memory that ZMQ received it in."""
    frame = _recv(socket, flags, False)
    frames = [frame]
    while frame.more:
        frame = _recv(socket, flags, False)
        frames.append(frame)
    return frames


def waiting(socket: zmq.Socket[bytes], limit: int = 1000) -> Sequence[list[zmq.Frame]]:
    """The messages that lie in a socket, up to so many."""
    messages: list[list[zmq.Frame]] = []
    while len(messages) < limit:
        try:
            messages.append(receive_frames(socket, zmq.NOBLOCK))
        except zmq.Again:
            break
    return messages


def inode(fd: int) -> int:
    """What tells a connection from a later one of the same descriptor; 0 where it is gone."""
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return 0


def widen(fd: int) -> None:
    """Give an ipc connection room for more: a large message then takes fewer turns of its two ends (4% of 2.4 MB, measured).

    TCP sees to that itself, and only as long as nobody else does.
    """
    with contextlib.suppress(OSError):
        with stdlib_socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family == stdlib_socket.AF_UNIX:
                connection.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_SNDBUF, _ROOM_NBYTES)


def disconnected(monitor: zmq.Socket[bytes]) -> list[int]:
    """The descriptors of the connections that are gone, as far as the monitor has said."""
    gone = []
    for frames in waiting(monitor):
        event, value = MONITOR_EVENT.unpack_from(frames[0].bytes)
        if event == zmq.EVENT_DISCONNECTED:
            gone.append(value)
    return gone

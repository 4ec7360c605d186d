"""Messages as lists of frames over a ROUTER (front end, binds) and a DEALER (engine, connects), as vLLM has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from ..errors import PeerClosed, TransportError, TransportTimeout

# How often a wait looks whether the peer still lives.
_LOOK_EVERY_MS = 50


def engine_identity(rank: int) -> bytes:
    """What the ROUTER calls the engine of `rank`, the first frame of each message to it: two bytes, little-endian."""
    return rank.to_bytes(2, "little")


def bind_router(path: Path) -> zmq.Socket[bytes]:
    """The front end's socket, at the ipc address `path`. The caller closes it."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.linger = 0
    socket.router_mandatory = True  # a message to an engine that is not there is an error, not silence
    return _at(socket, socket.bind, path)


def connect_dealer(path: Path, rank: int) -> zmq.Socket[bytes]:
    """The socket of the engine of `rank`, to the front end at the ipc address `path`. The caller closes it."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.identity = engine_identity(rank)
    # What was sent last must still leave when the engine ends; a front end that is gone must not hold it up for ever.
    socket.linger = 1000
    return _at(socket, socket.connect, path)


def _at(socket: zmq.Socket[bytes], attach: Callable[[str], Any], path: Path) -> zmq.Socket[bytes]:
    try:
        attach(f"ipc://{path}")
    except zmq.ZMQError as error:
        socket.close()
        raise TransportError(f"cannot use the ipc address {path}: {error.strerror}") from None
    return socket


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Any]) -> None:
    """Send one message. ZMQ keeps each frame, not a copy of it, until it has left: nobody may write to its memory.

    Frames under ``zmq.COPY_THRESHOLD`` (64 KiB) are an exception: ZMQ copies those, which costs less than keeping them.
    """
    try:
        socket.send_multipart(frames, copy=False)
    except zmq.ZMQError as error:
        raise TransportError(f"cannot send {len(frames)} frames: {error.strerror}") from None


def receive_frames(
    socket: zmq.Socket[bytes], timeout_s: float, peer_lives: Callable[[], bool] = lambda: True
) -> list[zmq.Frame]:
    """Wait for one message, and return its frames: the memory ZMQ received them in, not copies.

    Raises
    ------
    TransportTimeout
        Nothing came within `timeout_s` seconds.
    PeerClosed
        Nothing came, and `peer_lives` says that nothing will.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        lives = peer_lives()  # asked before the poll: what a peer sent before it ended still counts
        left_ms = max(0, int((deadline - time.monotonic()) * 1000))
        if socket.poll(min(left_ms, _LOOK_EVERY_MS)):
            return socket.recv_multipart(copy=False)
        if not lives:
            raise PeerClosed("the other process ended before it answered")
        if not left_ms:
            raise TransportTimeout(f"no message came within {timeout_s:g} s")

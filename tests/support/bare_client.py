"""A client of raw sockets, which can send what no client of fastmm would."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from fastmm import Decoder, EngineCoreOutputs
from fastmm.transport import Addresses, EngineServer
from fastmm.transport.handshake import ClientHandshake, engine_identity

PATIENCE_MS = 20_000
_names = itertools.count()


class BareClient:
    """Binds the sockets of `count` clients at ipc addresses in `directory`."""

    def __init__(self, directory: Path, count: int = 1) -> None:
        self.context = zmq.Context[Any]()
        name = next(_names)
        self.handshake, self.address = self._bind(zmq.ROUTER, directory / f"{name}-h")
        inputs = [self._bind(zmq.ROUTER, directory / f"{name}-i{index}") for index in range(count)]
        outputs = [self._bind(zmq.PULL, directory / f"{name}-o{index}") for index in range(count)]
        self.inputs, self.outputs = [socket for socket, _ in inputs], [socket for socket, _ in outputs]
        self.addresses = Addresses(tuple(address for _, address in inputs), tuple(address for _, address in outputs))
        self._decoder = Decoder(EngineCoreOutputs, tensors="numpy")

    def _bind(self, kind: int, path: Path) -> tuple[zmq.Socket[Any], str]:
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        socket.bind(f"ipc://{path}")
        return socket, f"ipc://{path}"

    def greet(self, engines: int = 1) -> ClientHandshake:
        """Do the handshake with so many engines."""
        handshake = ClientHandshake(self.addresses, engines)
        poller = zmq.Poller()
        for socket in (self.handshake, self.inputs[0]):
            poller.register(socket, zmq.POLLIN)
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while not handshake.done:
            assert time.monotonic() < deadline, handshake.missing()
            for socket, _ in poller.poll(100):
                frames = socket.recv_multipart()
                if socket is self.handshake:
                    answer = handshake.on_handshake(frames)
                    if answer:
                        socket.send_multipart(answer)
                else:
                    handshake.on_input(frames)
        for other in self.inputs[1:]:
            for _ in range(engines):
                assert other.poll(PATIENCE_MS)
                other.recv_multipart()
        return handshake

    def send(self, frames: Sequence[Any], index: int = 0, rank: int = 0) -> None:
        """``[type, main, ...]`` to an engine, from the client `index`."""
        self.inputs[index].send_multipart([engine_identity(rank), *frames])

    def hear_raw(self, index: int = 0) -> list[Any]:
        assert self.outputs[index].poll(PATIENCE_MS), "no output came"
        return self.outputs[index].recv_multipart(copy=False)

    def hear(self, index: int = 0) -> EngineCoreOutputs:
        outputs: EngineCoreOutputs = self._decoder.decode(self.hear_raw(index))
        return outputs

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextmanager
def client_and_engine(directory: Path, count: int = 1, **options: Any) -> Iterator[tuple[BareClient, EngineServer]]:
    """Both, connected. The engine belongs to this thread."""
    client = BareClient(directory, count)
    greeting = threading.Thread(target=client.greet)
    greeting.start()
    try:
        with EngineServer(client.address, **options) as engine:
            greeting.join(PATIENCE_MS / 1000)
            yield client, engine
    finally:
        greeting.join(PATIENCE_MS / 1000)
        client.close()

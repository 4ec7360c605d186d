"""An engine for tests, of pyzmq and msgpack: what it does with a request is said by the request's id.

    count-...    as many outputs of one token as ``max_tokens`` says
    hang-...     one output, then nothing
    mute-...     nothing
    exit-...     one output, then the process ends without a word
    dead-...     one output, then ENGINE_CORE_DEAD, then the process ends
    junk-...     messages that cannot be read, then as count
    gone-...     one output, then the id among finished_requests
    other-...    outputs for ids that nobody asked for, then as count
    error-...    an output with an error

Utility calls: ``seen`` (what came, in order), ``echo``, ``fail``, ``hang``, ``pid``. ``wave`` sends its argument as a
``wave_complete``, ``start`` as a ``start_wave``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import zmq

ERROR, LENGTH = 3, 1


class RawEngine:
    def __init__(self, handshake: str, rank: int = 0, ready: dict[str, Any] | None = None, hwm: int = 0) -> None:
        self.rank = rank
        self.context = zmq.Context()
        identity = rank.to_bytes(2, "little")
        self.seen: list[Any] = []
        self.handshake = self.context.socket(zmq.DEALER)
        self.handshake.identity = identity
        self.handshake.connect(handshake)
        self.handshake.send(msgpack.packb({"status": "HELLO", "local": False, "headless": True}))
        init = msgpack.unpackb(self.handshake.recv())
        addresses = init["addresses"]
        self.seen.append(["init", init])
        self.input = self.context.socket(zmq.DEALER)
        self.input.identity = identity
        self.input.rcvhwm = hwm
        self.input.connect(addresses["inputs"][0])
        self.output = self.context.socket(zmq.PUSH)
        self.output.connect(addresses["outputs"][0])
        self.input.send(msgpack.packb(ready or {}) if ready is not None else b"")
        self.handshake.send(msgpack.packb({"status": "READY", "local": False, "headless": True}))

    def send(self, **fields: Any) -> None:
        message: list[Any] = [self.rank, [], None, 0.0, None, None, None, None, None]
        names = ("engine", "outputs", "stats", "timestamp", "utility", "finished", "wave_complete", "start_wave")
        for name, value in fields.items():
            message[names.index(name)] = value
        self.output.send(msgpack.packb(message))

    @staticmethod
    def one(request_id: str, tokens: list[int], finish: int | None = None, error: Any = None) -> list[Any]:
        fields: list[Any] = [None] * 19
        fields[0], fields[1], fields[5], fields[13], fields[18] = request_id, tokens, finish, 0, error
        return fields

    def run(self) -> None:
        parent = os.getppid()
        while True:
            if not self.input.poll(1000):
                if os.getppid() != parent:
                    return  # a test that was killed leaves no engine behind
                continue
            kind, *frames = self.input.recv_multipart()
            if kind == b"\x00":
                self.on_add(msgpack.unpackb(frames[0], strict_map_key=False), frames)
            elif kind == b"\x01":
                self.seen.append(["abort", msgpack.unpackb(frames[0])])
            elif kind == b"\x02":
                self.seen.append(["wave", msgpack.unpackb(frames[0])])
            elif kind == b"\x03":
                self.on_utility(*msgpack.unpackb(frames[0], strict_map_key=False))

    def on_add(self, request: list[Any], frames: list[bytes]) -> None:
        request_id = request[0]
        self.seen.append(["add", request_id, len(request), sum(map(len, frames[1:])), request[11], request[12]])
        action = request_id.partition("-")[0]
        first = [self.one(request_id, [7])]
        if action in {"hang", "exit", "dead", "gone"}:
            self.send(outputs=first)
        if action in {"exit", "dead"}:
            if action == "dead":
                self.output.send(b"ENGINE_CORE_DEAD")
            self.output.close(linger=1000)  # destroy() would set its linger to what it is given
            self.context.destroy(linger=1000)
            os._exit(1)
        if action == "gone":
            self.send(finished=[request_id])
        if action == "junk":
            self.output.send(b"\xc1")
            self.output.send(msgpack.packb({"no": "array"}))
            self.output.send_multipart([msgpack.packb([0]), b"surplus"])
        if action == "other":
            self.send(outputs=[self.one("stranger", [1], LENGTH)], finished=["another"])
            self.send(utility=[12345678, None, [None, 1]])
        if action == "error":
            self.send(outputs=[self.one(request_id, [], ERROR, {"code": "c", "message": "m", "retryable": False})])
        if action in {"count", "junk", "other"}:
            n = request[3]["max_tokens"] if request[3] and "max_tokens" in request[3] else 16
            for i in range(n):
                self.send(outputs=[self.one(request_id, [i], LENGTH if i == n - 1 else None)])

    def on_utility(self, client_index: int, call_id: int, method: str, args: list[Any]) -> None:
        if method == "hang":
            return
        if method == "fail":
            self.send(utility=[call_id, "Call to fail failed: as asked", None])
            return
        if method == "wave":
            self.send(wave_complete=args[0])
        if method == "start":
            self.send(start_wave=args[0])
        result = {"seen": self.seen, "echo": args, "pid": os.getpid()}.get(method)
        self.send(utility=[call_id, None, [None, result]])


READY = {"dtype": "bfloat16", "vllm_version": "0.33.0", "max_model_len": 4096, "num_gpu_blocks": 128, "mystery": [1]}


@contextlib.contextmanager
def raw_engine(handshake: str, rank: int = 0, ready: Any = READY, delay: float = 0.0) -> Iterator[subprocess.Popen[bytes]]:
    """The engine in a process of its own, killed at the end."""
    settings = json.dumps({"handshake": handshake, "rank": rank, "ready": ready, "delay": delay})
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    process = subprocess.Popen([sys.executable, "-m", "support.raw_engine", settings], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main() -> None:
    settings = json.loads(sys.argv[1])
    time.sleep(settings.pop("delay"))
    RawEngine(**settings).run()


if __name__ == "__main__":
    main()

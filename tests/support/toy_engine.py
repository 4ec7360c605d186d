"""An engine in a process of its own, made of `EngineServer`: answers say who gave them, to which request, and what it got.

    python toy_engine.py HANDSHAKE [--rank N] [--step SECONDS] [--patience SECONDS]

It keeps its running requests in a batch, as engines do, and gives each one token per step, of `max_tokens`. Token number i of
a request is ``token(request_id, i)``; the first output's `kv_transfer_params` has the engine's rank and `checksum(request)`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import fastmm
from fastmm.schema import EngineCoreOutput, EngineCoreOutputs, FinishReason
from fastmm.transport import Abort, Add, EngineServer
from fastmm.transport.control import UtilityCall

READY = {"dtype": "float32", "vllm_version": "0.33.0", "max_model_len": 1 << 20, "num_gpu_blocks": 1, "dp_stats_address": None}


def token(request_id: str, index: int) -> int:
    return (zlib.crc32(request_id.encode()) + index) & 0x7FFFFFFF


def checksum(request: Any) -> int:
    """Of the ids and of every payload."""
    found = zlib.crc32(np.asarray(request.prompt_token_ids, np.int64).tobytes())
    for feature in request.mm_features or ():
        for elem in feature.data.values():
            found = zlib.crc32(np.ascontiguousarray(elem.data).data, found)
    return found


def make_request(request_id: str, seed: int, *, nbytes: int = 0, max_tokens: int = 3, **more: Any) -> Any:
    """Text, or with an image of so many bytes; its content follows from the seed."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 150_000, 4 + seed % 60).tolist()
    features = None
    if nbytes:
        pixels = rng.integers(0, 1 << 20, nbytes // 4, dtype=np.int32).view(np.float32).reshape(1, -1)
        pixels[~np.isfinite(pixels)] = 1.0
        elem = fastmm.MmFieldElem(pixels, fastmm.MmBatchedField())
        features = [fastmm.MmFeatureSpec({"pixel_values": elem}, "image", "i", fastmm.PlaceholderRange(0, 2), "h")]
    return fastmm.EngineCoreRequest(
        request_id, ids, features, fastmm.SamplingParams(max_tokens=max_tokens), arrival_time=1.0, **more
    )


def assert_answered(request_id: str, sum_of_request: int, outputs: Sequence[Any], *, max_tokens: int = 3) -> int:
    """That a request's outputs are its own, whole, in order and once; the rank of the engine that gave them."""
    assert [token for output in outputs for token in output.new_token_ids] == [token(request_id, i) for i in range(max_tokens)]
    assert [output.request_id for output in outputs] == [request_id] * len(outputs)
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [FinishReason.LENGTH]
    told = outputs[0].kv_transfer_params
    assert told["checksum"] == sum_of_request
    return int(told["rank"])


class _Running:
    __slots__ = ("checksum", "client_index", "given", "max_tokens", "request_id")

    def __init__(self, added: Add) -> None:
        request = added.request
        self.request_id = request.request_id
        self.client_index = added.client_index
        self.max_tokens = request.sampling_params.max_tokens if request.sampling_params else 1
        self.checksum = checksum(request)
        self.given = 0


class ToyEngine:
    def __init__(self, server: EngineServer, step_s: float) -> None:
        self.server = server
        self.step_s = step_s
        self.running: dict[str, _Running] = {}
        self.added = 0

    def run(self) -> None:
        for event in self.server:
            self.take(event)
            while self.running:
                while self.server.poll(0.0):
                    self.take(self.server.get())
                self.step()
                if self.step_s:
                    time.sleep(self.step_s)

    def take(self, event: Any) -> None:
        if isinstance(event, Add):
            self.added += 1
            self.running[event.request.request_id] = _Running(event)
        elif isinstance(event, Abort):
            for request_id in event.request_ids:
                self.running.pop(request_id, None)
        elif isinstance(event, UtilityCall):
            self.answer(event)

    def answer(self, call: UtilityCall) -> None:
        if call.method == "seen":
            self.server.send_utility_result(call, {"added": self.added, "running": len(self.running), **self.server.counters})
        elif call.method == "hang":
            time.sleep(call.args[0])
        elif call.method == "end":
            os._exit(1)
        else:
            self.server.send_utility_result(call, failure=f"no method {call.method}")

    def step(self) -> None:
        steps: dict[int, list[EngineCoreOutput]] = {}
        for one in list(self.running.values()):
            output = EngineCoreOutput(one.request_id, [token(one.request_id, one.given)])
            if one.given == 0:
                output.kv_transfer_params = {"rank": self.server.rank, "checksum": one.checksum}
            one.given += 1
            if one.given == one.max_tokens:
                output.finish_reason = FinishReason.LENGTH
                del self.running[one.request_id]
            steps.setdefault(one.client_index, []).append(output)
        for client_index, outputs in steps.items():
            finished = {output.request_id for output in outputs if output.finish_reason is not None}
            self.server.send_outputs(EngineCoreOutputs(outputs=outputs, finished_requests=finished or None), client_index)


@contextmanager
def toy_engine(
    handshake: str, rank: int = 0, *, step: float = 0.0, patience: float = 5.0, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """The process; `prefix` is put before its command line (``ip netns exec NAME``)."""
    command = [sys.executable, __file__, handshake, f"--rank={rank}", f"--step={step}", f"--patience={patience}"]
    process = subprocess.Popen([*prefix, *command])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("handshake")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--step", type=float, default=0.0)
    parser.add_argument("--patience", type=float, default=5.0)
    options = parser.parse_args()
    decoder = fastmm.Decoder(tensors="numpy")
    with EngineServer(options.handshake, rank=options.rank, ready=READY, decoder=decoder, patience=options.patience) as server:
        ToyEngine(server, options.step).run()


if __name__ == "__main__":
    main()

"""The engine of bench_transport: one process that serves any number of clients, and answers each request with one output.

    python -m bench.transport_engine HANDSHAKE...

It decodes each request to torch tensors and says that it is finished. Of requests whose id begins with ``check`` it says what
it got: type, shape and a checksum of every payload, under ``kv_transfer_params``.
"""

from __future__ import annotations

import sys
import zlib
from typing import Any

import zmq

import fastmm
from fastmm.schema import EngineCoreOutput, EngineCoreOutputs, FinishReason
from fastmm.transport.control import ADD
from fastmm.transport.handshake import EngineHandshake

# What vLLM 0.33's clients require of a ready response, beside what fastmm's looks at.
READY = {
    "max_model_len": 1 << 20,
    "num_gpu_blocks": 1,
    "block_size": 16,
    "dp_stats_address": None,
    "dtype": "bfloat16",
    "vllm_version": "0.33.0",
    "world_size": 1,
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "data_parallel_rank": 0,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 1 << 20,
    "instance_id": "bench",
    "supports_lora": False,
    "max_loras": 0,
}


def contents(request: Any) -> dict[str, Any]:
    """What a request's payloads are."""
    import torch

    found = {}
    for index, feature in enumerate(request.mm_features or ()):
        for name, elem in feature.data.items():
            array = elem.data.flatten().view(torch.uint8).numpy()
            found[f"{index}.{name}"] = [str(elem.data.dtype), list(elem.data.shape), zlib.crc32(array)]
    return found


def join(context: zmq.Context[Any], address: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """The input and the output socket for the client that waits at a handshake's address."""
    shake = EngineHandshake(rank=0, local=True, headless=True, ready=READY)
    handshake = context.socket(zmq.DEALER)
    handshake.identity = shake.identity
    handshake.connect(address)
    handshake.send_multipart(shake.hello())
    addresses = shake.on_init(handshake.recv_multipart())
    inputs = context.socket(zmq.DEALER)
    inputs.identity = shake.identity
    inputs.connect(addresses.inputs[0])
    inputs.send(shake.ready_response())
    handshake.send_multipart(shake.ready())
    outputs = context.socket(zmq.PUSH)
    outputs.connect(addresses.outputs[0])
    return inputs, outputs


def main() -> None:
    import torch

    torch.set_num_threads(1)
    context = zmq.Context.instance()
    poller = zmq.Poller()
    answers = {}
    for address in sys.argv[1:]:
        inputs, outputs = join(context, address)
        answers[inputs] = outputs
        poller.register(inputs, zmq.POLLIN)
    decoder, encoder = fastmm.Decoder(), fastmm.Encoder()
    while True:
        for socket, _ in poller.poll():
            kind, *frames = socket.recv_multipart(copy=False)
            if bytes(kind) != ADD:
                continue
            request = decoder.decode(frames)
            told = contents(request) if request.request_id.startswith("check") else None
            output = EngineCoreOutput(request.request_id, [7], finish_reason=FinishReason.STOP, kv_transfer_params=told)
            del request, frames
            answers[socket].send_multipart(encoder.encode(EngineCoreOutputs(0, [output])))


if __name__ == "__main__":
    main()

"""Processes at the other end of a torch queue: ours, or vLLM's own classes where vLLM is installed."""

from __future__ import annotations

from typing import Any

import numpy as np


def make_request(seed: int, *, leaves: int = 3) -> Any:
    """A request with `leaves` tensors of different types, filled from the seed; they are views of larger tensors."""
    import torch

    import fastmm

    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.uint8]
    features = []
    for index in range(leaves):
        base = (
            torch.arange(64 * 300).add(seed * 1000 + index).remainder(251).to(kinds[(seed + index) % len(kinds)]).view(64, 300)
        )
        elem = fastmm.MmFieldElem(base[8 : 8 + 16 + index], fastmm.MmBatchedField())
        features.append(
            fastmm.MmFeatureSpec({"pixel_values": elem}, "image", f"i{index}", fastmm.PlaceholderRange(2 * index, 2), "h")
        )
    return fastmm.EngineCoreRequest(f"r{seed}", list(range(2 * leaves)), features, arrival_time=1.0)


def contents(request: Any) -> list[tuple[str, list[int], bytes]]:
    """Type, shape and bytes of a decoded request's leaves, fastmm's or vLLM's."""
    found = []
    for feature in request.mm_features:
        for elem in feature.data.values():
            array = elem.data.contiguous().flatten().view(_uint8()).numpy()
            found.append((str(elem.data.dtype), list(elem.data.shape), np.ascontiguousarray(array).tobytes()))
    return found


def _uint8() -> Any:
    import torch

    return torch.uint8


def received(request: Any) -> list[bytearray]:
    """Its frames, as a peer gets them."""
    import fastmm

    return [bytearray(frame) for frame in fastmm.encode_request(request)]


def send(queue: Any, pipe: Any, maker: str) -> None:
    """A process that encodes: for each seed it is told, the frames; ends on None."""
    import fastmm

    if maker == "vllm":
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.tensor_ipc import TensorIpcSender
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        encoder: Any = MsgpackEncoder(256, TensorIpcSender(queue))
        make = lambda seed: MsgpackDecoder(EngineCoreRequest).decode(received(make_request(seed)))  # noqa: E731
    else:
        from fastmm.transport.torch_shm import TorchShmConsumer

        encoder = fastmm.Encoder(oob_tensor_consumer=TorchShmConsumer(queue))
        make = make_request
    while (seed := pipe.recv()) is not None:
        pipe.send([bytes(frame) for frame in encoder.encode(make(seed))])
    pipe.recv()  # stays until told: its memory is handed over by a thread of its own


def receive(queue: Any, pipe: Any, maker: str) -> None:
    """A process that decodes: for each list of frames, what the request holds; ends on None."""
    import fastmm

    if maker == "vllm":
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.tensor_ipc import TensorIpcReceiver
        from vllm.v1.serial_utils import MsgpackDecoder

        decoder: Any = MsgpackDecoder(EngineCoreRequest, oob_tensor_provider=TensorIpcReceiver(queue))
    else:
        from fastmm.transport.torch_shm import TorchShmProvider

        decoder = fastmm.Decoder(oob_tensor_provider=TorchShmProvider(queue))
    while (frames := pipe.recv()) is not None:
        try:
            pipe.send(contents(decoder.decode(frames)))
        except Exception as error:
            pipe.send(repr(error))

"""vLLM's own request objects through fastmm's clients, over real sockets to a server that reads them with vLLM's own decoder."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from vllm.multimodal import inputs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder

import fastmm
from fastmm.schema import FinishReason
from fastmm.transport import Add, AsyncEngineClient, EngineClient, EngineServer

LIMIT = 30.0


class Reads:
    """vLLM's decoder as a server's, and what it read."""

    def __init__(self) -> None:
        self.decoder = MsgpackDecoder(EngineCoreRequest)
        self.read: list[Any] = []

    def decode(self, frames: Any) -> Any:
        request = self.decoder.decode(frames)
        self.read.append(request)
        return request


def served(address: str) -> tuple[threading.Thread, Reads]:
    reads = Reads()

    def serve() -> None:
        with EngineServer(
            address, ready={"dtype": "bfloat16", "vllm_version": "0.33.0"}, decoder=reads, patience=0.1
        ) as engine:
            for event in engine:
                if isinstance(event, Add):
                    output = fastmm.EngineCoreOutput(event.request.request_id, [7], finish_reason=FinishReason.STOP)
                    engine.send_output(output, event.client_index)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread, reads


def request(name: str, patches: int) -> EngineCoreRequest:
    generator = torch.Generator().manual_seed(patches)
    data = inputs.MultiModalKwargsItem(
        {
            "pixel_values": inputs.MultiModalFieldElem(
                torch.rand(patches, 1176, generator=generator), inputs.MultiModalBatchedField()
            ),
            "image_grid_thw": inputs.MultiModalFieldElem(torch.tensor([1, 2, patches // 2]), inputs.MultiModalBatchedField()),
        }
    )
    feature = inputs.MultiModalFeatureSpec(data, "image", "i", inputs.PlaceholderRange(1, 2), "h")
    return EngineCoreRequest(name, [1, 2, 3], [feature], SamplingParams(max_tokens=5), None, 1.5, None, None, None)


def check(read: list[Any], sizes: list[int]) -> None:
    assert [(got.request_id, got.sampling_params.max_tokens) for got in read] == [(f"r-{n}", 5) for n in sizes]
    for got, patches in zip(read, sizes, strict=True):
        pixels = got.mm_features[0].data["pixel_values"].data
        generator = torch.Generator().manual_seed(patches)
        assert torch.equal(pixels, torch.rand(patches, 1176, generator=generator).to(torch.bfloat16))
        assert got.mm_features[0].data["image_grid_thw"].data.tolist() == [1, 2, patches // 2]


SIZES = [4, 64, 1024]  # inline and small, on the event loop, in the worker


@pytest.mark.parametrize("face", ["threads", "asyncio"])
def test_vllms_own_requests_arrive_as_vllm_reads_them(face: str) -> None:
    if face == "threads":
        client = EngineClient(startup_timeout=LIMIT)
        thread, reads = served(client.bind())
        with client:
            for size in SIZES:
                assert [output.new_token_ids for output in client.generate(request(f"r-{size}", size))] == [[7]]
    else:
        thread, reads = asyncio.run(asyncio.wait_for(driven(), LIMIT))
    thread.join(LIMIT)
    check(reads.read, SIZES)


async def driven() -> tuple[threading.Thread, Reads]:
    client = AsyncEngineClient(startup_timeout=LIMIT)
    thread, reads = served(client.bind())
    async with client:
        for size in SIZES:
            assert [output.new_token_ids async for output in client.generate(request(f"r-{size}", size))] == [[7]]
    return thread, reads

"""Round trips to an engine in another process: fastmm's clients beside vLLM 0.33's own, driving the same engine process.

    python -m bench.bench_transport [--json FILE] [--rounds N]

A trip is: cast the request's float32 payloads to bfloat16, encode, send over ipc, decode there to torch tensors, an answer of one
output back, decoded here. vLLM's side is its real client classes (SyncMPClient, AsyncMPClient) and its way to cast,
``tensor.to(bfloat16)``; fastmm's casts in place. One torch thread on either side. Before each trip, and outside of it, the
payloads are filled anew.

Before anything is timed, the engine says what it got of each client: types, shapes and checksums must be equal. "p50" and "p99"
are of trips one at a time, every client in turn; "a second" is of trips with several requests on their way. "fastmm inline" is the
client of asyncio told to encode requests of every size on its loop (`inline_nbytes`), as vLLM's does, not in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import fastmm
from fastmm.transport.handshake import Addresses, ClientHandshake

from .support import Record, alone, quiet

WIDTH = 1176


@dataclass(frozen=True)
class Case:
    """`images` of so many patches; trips timed one at a time, and requests on their way at once."""

    images: int
    patches: int
    trips: int
    at_once: int
    bar: float | None = None


CASES = {
    "text, 512 ids": Case(0, 0, 400, 16),
    "1 x 1,024 patches": Case(1, 1024, 120, 4, 1.35),
    "8 x 1,024 patches": Case(8, 1024, 30, 2),
    "1 x 8,192 patches": Case(1, 8192, 30, 2),
}


# --- requests ---------------------------------------------------------------------------------------------------------


class Work:
    """Requests of one case in one family of classes, over float32 payloads of their own, filled anew for each trip."""

    def __init__(self, case: Case, template: Any, make: Callable[..., Any]) -> None:
        self.template = template
        self.payloads = [template.clone() for _ in range(case.images)]
        self.request, self.elems = make(case, self.payloads)

    def fill(self, request_id: str, *, exactly: bool = False) -> Any:
        """Write the payloads as a processor just has, and no other memory; or `exactly` with the template."""
        for elem, payload in zip(self.elems, self.payloads, strict=True):
            if exactly:
                payload.copy_(self.template)
            else:
                payload.fill_(0.5)
            elem.data = payload
        self.request.request_id = request_id
        return self.request


def ids_of(case: Case) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids, and the placeholder of each image: one in four patches is a token, as with Qwen2-VL."""
    each = case.patches // 4
    ids = list(range(1000, 1512)) if not case.images else []
    places = []
    for _ in range(case.images):
        ids.append(3)
        places.append((len(ids), each))
        ids += [6] * each + [4]
    return ids, places


def our_request(case: Case, payloads: list[Any]) -> tuple[Any, list[Any]]:
    import torch

    ids, places = ids_of(case)
    batched = fastmm.MmBatchedField()
    elems = [fastmm.MmFieldElem(payload, batched) for payload in payloads]
    features = []
    for index, (elem, (offset, length)) in enumerate(zip(elems, places, strict=True)):
        grid = fastmm.MmFieldElem(torch.tensor([1, 32, case.patches // 32]), fastmm.MmBatchedField(keep_on_cpu=True))
        data = {"pixel_values": elem, "image_grid_thw": grid}
        features.append(fastmm.MmFeatureSpec(data, "image", f"i{index}", fastmm.PlaceholderRange(offset, length), f"h{index}"))
    request = fastmm.EngineCoreRequest(
        "", ids, features or None, fastmm.SamplingParams(max_tokens=64), arrival_time=1764430000.25
    )
    return request, elems


def vllm_request(case: Case, payloads: list[Any]) -> tuple[Any, list[Any]]:
    import torch
    from vllm.multimodal import inputs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    ids, places = ids_of(case)
    batched = inputs.MultiModalBatchedField()
    elems = [inputs.MultiModalFieldElem(payload, batched) for payload in payloads]
    features = []
    for index, (elem, (offset, length)) in enumerate(zip(elems, places, strict=True)):
        grid = inputs.MultiModalFieldElem(
            torch.tensor([1, 32, case.patches // 32]), inputs.MultiModalBatchedField(keep_on_cpu=True)
        )
        data = inputs.MultiModalKwargsItem({"pixel_values": elem, "image_grid_thw": grid})
        place = inputs.PlaceholderRange(offset, length)
        features.append(inputs.MultiModalFeatureSpec(data, "image", f"i{index}", place, f"h{index}"))
    sampling = SamplingParams(max_tokens=64)
    return EngineCoreRequest("", ids, features or None, sampling, None, 1764430000.25, None, None, None), elems


def cast_as_vllm(elems: list[Any]) -> None:
    import torch

    for elem in elems:
        elem.data = elem.data.to(torch.bfloat16)


# --- clients ----------------------------------------------------------------------------------------------------------


class Contender:
    """One client: `trip` sends filled works and returns the outputs of all of them, in any order."""

    make: Callable[..., Any]

    def trip(self, works: list[Work]) -> list[Any]:
        raise NotImplementedError


class OurSync(Contender):
    make = staticmethod(our_request)

    def __init__(self, client: Any) -> None:
        self.client = client

    def trip(self, works: list[Work]) -> list[Any]:
        outputs = [self.client.generate(work.request) for work in works]
        return [output for each in outputs for output in each]


class VllmSync(Contender):
    make = staticmethod(vllm_request)

    def __init__(self, client: Any) -> None:
        self.client = client

    def trip(self, works: list[Work]) -> list[Any]:
        for work in works:
            cast_as_vllm(work.elems)
            self.client.add_request(work.request)
        found: list[Any] = []
        while len(found) < len(works):
            found += self.client.get_output().outputs
        return found


class Loop(Contender):
    """A client of asyncio, its event loop driven from outside: one call of `run` is one trip."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: Any) -> None:
        self.loop = loop
        self.client = client

    def trip(self, works: list[Work]) -> list[Any]:
        return self.loop.run_until_complete(self.trips(works))

    def trips(self, works: list[Work]) -> Coroutine[Any, Any, list[Any]]:
        raise NotImplementedError


class OurAsync(Loop):
    make = staticmethod(our_request)

    async def one(self, work: Work) -> list[Any]:
        return [output async for output in self.client.generate(work.request)]

    async def trips(self, works: list[Work]) -> list[Any]:
        if len(works) == 1:
            return await self.one(works[0])
        return [output for outputs in await asyncio.gather(*map(self.one, works)) for output in outputs]


class VllmAsync(Loop):
    make = staticmethod(vllm_request)

    async def trips(self, works: list[Work]) -> list[Any]:
        for work in works:
            cast_as_vllm(work.elems)
            await self.client.add_request_async(work.request)
        found: list[Any] = []
        while len(found) < len(works):
            found += (await self.client.get_output_async()).outputs
        return found


# --- who talks to whom ------------------------------------------------------------------------------------------------


def vllm_config() -> Any:
    """What vLLM's client classes read of their configuration, and nothing else: the whole one wants a model."""
    new = types.SimpleNamespace
    parallel = new(enable_elastic_ep=False, data_parallel_size=1, data_parallel_index=0, data_parallel_size_local=1,
                   data_parallel_rank_local=None, local_engines_only=False, enable_fault_tolerance=False, _coord_store_port=0)  # fmt: skip
    cache = new(num_gpu_blocks=0, block_size=16, mamba_block_size=None, effective_attention_block_size=None)
    return new(parallel_config=parallel, cache_config=cache, model_config=new(multimodal_config=None, max_model_len=1 << 30))


def shake_hands(address: str, told: Addresses) -> None:
    """vLLM's client classes leave the handshake to their launcher, which is not here: ours, in a thread."""
    import zmq

    shake = ClientHandshake(told, 1)
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(address)

    def answer() -> None:
        while shake.state[0] == "waiting" or shake.state[0] == "connected":
            frames = shake.on_handshake(socket.recv_multipart())
            if frames is not None:
                socket.send_multipart(frames)
        socket.close()

    threading.Thread(target=answer, daemon=True).start()


def vllm_client(cls: type, told: Addresses) -> Any:
    from vllm.v1.engine import core_client

    plain = core_client.MPClient.__init__

    def given_addresses(self: Any, *args: Any, **options: Any) -> None:
        options["client_addresses"] = {"input_address": told.inputs[0], "output_address": told.outputs[0]}
        plain(self, *args, **options)

    with mock.patch.object(core_client.MPClient, "__init__", given_addresses):
        return cls(vllm_config(), None, False)


@contextmanager
def contenders(with_vllm: bool = True) -> Iterator[dict[str, Contender]]:
    """All clients, connected to one engine process."""
    from fastmm.transport import AsyncEngineClient, EngineClient

    found: dict[str, Contender] = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastmm-bench-")))
        sync, loop = EngineClient(startup_timeout=60), asyncio.new_event_loop()
        stack.callback(loop.close)

        async def make(**options: Any) -> Any:
            return AsyncEngineClient(startup_timeout=60, **options)

        asynchronous = {
            "fastmm async": loop.run_until_complete(make()),
            "fastmm inline": loop.run_until_complete(make(inline_nbytes=64 << 20)),
        }
        addresses = [sync.bind(), *(client.bind() for client in asynchronous.values())]
        told = []
        for name in ("a", "b") if with_vllm else ():
            told.append(Addresses((f"ipc://{directory}/{name}-in",), (f"ipc://{directory}/{name}-out",)))
            addresses.append(f"ipc://{directory}/{name}-handshake")
            shake_hands(addresses[-1], told[-1])
        engine = subprocess.Popen([sys.executable, "-m", "bench.transport_engine", *addresses])
        stack.callback(engine.wait)
        stack.callback(engine.kill)
        stack.enter_context(sync)
        for client in asynchronous.values():
            loop.run_until_complete(client.start())
            stack.callback(lambda client=client: loop.run_until_complete(client.close()))
        if with_vllm:
            from vllm.v1.engine.core_client import AsyncMPClient, SyncMPClient

            theirs = vllm_client(SyncMPClient, told[0])
            stack.callback(theirs.shutdown)
            found["vLLM sync"] = VllmSync(theirs)

            async def construct() -> Any:
                return vllm_client(AsyncMPClient, told[1])

            other = loop.run_until_complete(construct())
            stack.callback(other.shutdown)
            found["vLLM async"] = VllmAsync(loop, other)
        found["fastmm sync"] = OurSync(sync)
        found.update((name, OurAsync(loop, client)) for name, client in asynchronous.items())
        yield found


# --- measuring --------------------------------------------------------------------------------------------------------


def check(name: str, clients: dict[str, Contender], works: dict[str, list[Work]]) -> None:
    got = {}
    for who, client in clients.items():
        work = works[who][0]
        work.fill(f"check-{who}", exactly=True)
        (output,) = client.trip([work])
        got[who] = output.kv_transfer_params
    first = next(iter(got.values()))
    if not all(other == first for other in got.values()):
        raise SystemExit(f"not timed: of {name!r} the engine got other payloads from one client than from another")


def measure(name: str, case: Case, clients: dict[str, Contender], rounds: int | None) -> list[Record]:
    import torch

    template = torch.rand(case.patches or 1, WIDTH) * 4 - 2
    works = {who: [Work(case, template, client.make) for _ in range(case.at_once)] for who, client in clients.items()}
    check(name, clients, works)
    numbers = count()
    alone_s: dict[str, list[float]] = {who: [] for who in clients}
    rate: dict[str, list[float]] = {who: [] for who in clients}
    for turn in range(rounds or case.trips):
        for who, client in clients.items():
            work = works[who][0]
            work.fill(f"r{next(numbers)}")
            start = time.perf_counter()
            client.trip([work])
            alone_s[who].append(time.perf_counter() - start)
        if turn % 4 == 0:
            for who, client in clients.items():
                for work in works[who]:
                    work.fill(f"r{next(numbers)}")
                start = time.perf_counter()
                client.trip(works[who])
                rate[who].append(case.at_once / (time.perf_counter() - start))
    records: list[Record] = []
    what = {"bench": "transport", "case": name}
    for who in clients:
        cuts = statistics.quantiles(alone_s[who], n=100, method="inclusive")
        middle = statistics.median(rate[who])
        records.append({"kind": "figure", **what, "contender": who, "p50": cuts[49], "p99": cuts[98], "per_second": middle})
    for face, their_face in (("sync", "sync"), ("async", "async"), ("inline", "async")):
        ours, theirs = f"fastmm {face}", f"vLLM {their_face}"
        if theirs in clients:
            trip = statistics.median(t / o for o, t in zip(alone_s[ours], alone_s[theirs], strict=True))
            many = statistics.median(o / t for o, t in zip(rate[ours], rate[theirs], strict=True))
            met = None if case.bar is None else trip >= case.bar
            records.append(
                {
                    "kind": "bar",
                    **what,
                    "ours": ours,
                    "theirs": theirs,
                    "bar": case.bar,
                    "ratio": trip,
                    "met": met,
                    "ratio_per_second": many,
                }
            )
    return records


def run(rounds: int | None = None) -> list[Record]:
    logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        import vllm  # noqa: F401
    except ImportError:
        with_vllm = False
    else:
        with_vllm = True
    records: list[Record] = []
    with quiet(), contenders(with_vllm) as clients:
        for name, case in CASES.items():
            records += measure(name, case, clients, rounds)
    return records


def show(records: list[Record]) -> None:
    width = max(len(name) for name in CASES) + 2
    print(f"{'round trip, cast included':{width + 14}}{'p50 us':>10}{'p99 us':>10}{'a second':>10}")
    for record in records:
        if record["kind"] == "figure":
            cells = f"{record['p50'] * 1e6:10.0f}{record['p99'] * 1e6:10.0f}{record['per_second']:10.0f}"
            print(f"{record['case']:{width}}{record['contender']:14}{cells}")
        else:
            bar = "" if record["bar"] is None else f"   bar {record['bar']:g} {'met' if record['met'] else 'MISSED'}"
            print(
                f"{'':{width}}{record['ours']}: {record['ratio']:.2f}x as quick one at a time, "
                f"{record['ratio_per_second']:.2f}x as many a second{bar}"
            )
    print()


if __name__ == "__main__":
    alone(run, show, "bench_transport", (__doc__ or "").partition("\n")[0])

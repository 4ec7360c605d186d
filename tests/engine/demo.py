"""``make demo-vllm``: photographs go to a real vLLM engine through fastmm's client, tokens come back.

The engine runs headless on the CPU, with a tiny model of random weights: its words mean nothing, but each photograph, and each
order of photographs, has words of its own. Meanwhile vLLM's own front end is asked the same in another process: what it gets is
what fastmm must get, to the last bit of the log probabilities.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cases import SUFFIX, Case, photograph
from engines import Process, engine_environment, headless_engine
from front_end import Answer, FrontEnd
from models import WRITERS, write_model

import fastmm
from fastmm.transport import AsyncEngineClient

HERE = Path(__file__).resolve().parent
STARTUP_S = 300.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make demo-vllm ARGS=", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("photographs", nargs="*", default=["astronaut", "coffee"], metavar="PHOTOGRAPH",
                        help=f"a path, or one of {', '.join(SUFFIX)} (default: astronaut coffee)")  # fmt: skip
    parser.add_argument("--model", choices=WRITERS, default="qwen2vl", help="which tiny model (default: qwen2vl)")
    parser.add_argument("--text", default="what is this ?", help="what is asked (default: what is this ?)")
    parser.add_argument("--alone", action="store_true", help="do not ask vLLM's own front end; twice as quick")
    given = parser.parse_args()
    for name in given.photographs:
        if name not in SUFFIX and not Path(name).is_file():
            parser.error(f"{name}: no such file, and none of {', '.join(SUFFIX)}")
    if len(given.photographs) > 8:
        parser.error(f"the engine takes 8 photographs a request, got {len(given.photographs)}")
    return given


def cases_of(given: argparse.Namespace) -> dict[str, Case]:
    """Each photograph alone; then all of them, and all of them the other way round."""
    names = [Path(name).stem for name in given.photographs]
    cases = {name: Case((path,), given.text) for name, path in zip(names, given.photographs, strict=True)}
    if len(names) > 1:
        cases[" + ".join(names)] = Case(tuple(given.photographs), given.text)
        cases[" + ".join(reversed(names))] = Case(tuple(reversed(given.photographs)), given.text)
    return cases


def row(label: str, text: str) -> None:
    print(f"{label:<16}{text}", flush=True)


async def ask(client: AsyncEngineClient, front: FrontEnd, name: str, case: Case) -> Answer:
    """One request; its words are printed as they come."""
    request = front.request(case)
    payload = sum(feature.data["pixel_values"].data.nbytes for feature in request.mm_features or ())
    tokens = len(request.prompt_token_ids)
    print()
    row("photographs", f"{name}: {payload:,} bytes of float32 pixels, {tokens:,} prompt tokens")
    print(f"{'tokens':<16}", end="", flush=True)
    answer, begun, first = Answer(), time.perf_counter(), 0.0
    async for output in client.generate(request):
        first = first or time.perf_counter() - begun
        answer.add(output)
        print(front.processor.tokenizer.decode(output.new_token_ids), end=" ", flush=True)
    print(f" ({answer.finish_reason})")
    row("times", f"{first * 1e3:.0f} ms to the first token, {(time.perf_counter() - begun) * 1e3:.0f} ms to the last")
    return answer


async def drive(engine: Process, model: Path, given: argparse.Namespace, handshake: str) -> dict[str, Answer]:
    begun = time.perf_counter()

    def progress(states: dict[int, str]) -> None:
        row("engine", f"{time.perf_counter() - begun:5.1f} s: {states[0]}")

    front = FrontEnd(given.model, model)
    client = AsyncEngineClient(handshake, startup_timeout=STARTUP_S, progress=progress)
    starting = asyncio.ensure_future(client.start())
    try:
        while not starting.done():
            await asyncio.wait([starting], timeout=1)
            if not engine.alive:
                raise SystemExit(f"the engine ended with exit status {engine.process.returncode}\n{engine.log()}")
        await starting
        (info,) = client.engines
        row("", f"vLLM {info.vllm_version}, {info.dtype}, {info.max_model_len:,} tokens, {info.num_gpu_blocks:,} blocks")
        row("it says it can", ", ".join(await client.call_utility("get_supported_tasks")))
        return {name: await ask(client, front, name, case) for name, case in cases_of(given).items()}
    finally:
        await client.close()


def free_address() -> tuple[int, str]:
    from engines import free_port

    port = free_port()
    return port, f"tcp://127.0.0.1:{port}"


def differing(ours: dict[str, Answer], theirs: dict[str, Any]) -> Iterable[str]:
    return [name for name, answer in ours.items() if answer != Answer.from_reference(theirs[name])]


def main() -> int:
    given = arguments()
    with tempfile.TemporaryDirectory(prefix="fastmm-demo-vllm-") as scratch:
        root = Path(scratch)
        model = write_model(given.model, root / given.model)
        environment = engine_environment(root / "cache")
        for name in given.photographs:
            row("photograph", "{}: {} x {}".format(name, *photograph(name).size))
        row("model", f"a tiny {given.model} of random weights, {(model / 'model.safetensors').stat().st_size:,} bytes")
        port, handshake = free_address()
        cases = root / "cases.json"
        cases.write_text(
            json.dumps({name: dataclasses.asdict(case) for name, case in cases_of(given).items()}), encoding="utf-8"
        )
        output = root / "reference"
        output.mkdir()
        with headless_engine(model, port, log=root / "engine.log", environment=environment) as engine:
            row("", f"vllm serve --headless, process {engine.process.pid}, dials {handshake}")
            ours = asyncio.run(drive(engine, model, given, handshake))
        if given.alone:
            return 0
        print("\nNow vLLM's own front end, with an engine of its own, is asked the same...", flush=True)
        command = [sys.executable, str(HERE / "reference.py"), given.model, str(model), str(output), str(cases)]
        with Process(command, log=root / "reference.log", environment=environment) as process:
            if process.wait(STARTUP_S + 60):
                print(process.log(), file=sys.stderr)
                return 1
        theirs = json.loads((output / "answers.json").read_text(encoding="utf-8"))
        different = differing(ours, theirs)
        tokens = sum(len(answer.token_ids) for answer in ours.values())
        numbers = sum(len(step) for answer in ours.values() for step in answer.logprobs)
    if different:
        print(f"different: vLLM's own front end gets other answers to {', '.join(different)}")
        return 1
    print(f"equal: {tokens} tokens and {numbers} log probabilities, to those that vLLM's own front end gets, to the last bit")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except fastmm.FastmmError as error:
        raise SystemExit(f"demo-vllm: {error}") from error

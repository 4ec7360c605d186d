"""The drop-in in a real front end, a real engine, or both: ``python dropin_pairings.py MODEL DIRECTORY OUTPUT``.

An offline LLM answers every case with fastmm in both processes, in the front end only, in the engine only; and some of them
with the photographs going another way. OUTPUT becomes JSON. In the last pairing the engine also gets malformed messages, requests
are aborted and utilities called, and what crosses between the two processes is written down as in `reference`, into OUTPUT with
the suffix ``.frames``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cases import CASES
from reference import ENGINE_OPTIONS, Recorder, answer

MALFORMED = {
    "no msgpack": [b"\xc1"],
    "an id and nothing else": [b"\xdc\x00\x16\xa6broken"],
    "ids that are strings": [b"\x99\xa6broken\x91\xa1x\xc0\xc0\xc0\xcb\x3f\xf8" + bytes(6) + b"\xc0\xc0\xc0"],
    "a frame that does not exist": [
        b"\x9a\xa6broken\x91\x01\xc0\xc0\xc0\xcb\x3f\xf8" + bytes(6) + b"\xc0\xc0\xc0\x93\xa7float32\x91\x04\x07"
    ],
    "no frame": [],
}
# Photographs that do not travel in the request's frames: through shared memory to the worker, which decodes them; and handed
# over by torch, out of band.
ANOTHER_WAY: dict[str, dict[str, Any]] = {
    "llava": {"mm_processor_cache_gb": 1, "mm_processor_cache_type": "shm"},
    "qwen2vl": {"mm_tensor_ipc": "torch_shm"},
}
SOME = ("one", "two", "two, swapped", "the same twice", "text")
ANSWERED = {name for name, frames in MALFORMED.items() if frames and b"broken" in frames[0]}


def start(directory: str, counters: Path, engine_switch: str, **options: Any) -> Any:
    from vllm import LLM

    os.environ["FASTMM_VLLM"] = engine_switch  # what the engine's process, which is spawned, will find
    os.environ["FASTMM_VLLM_COUNTERS"] = str(counters)
    return LLM(directory, **{**ENGINE_OPTIONS, **options})


def stop(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


def answers(llm: Any, model: str, cases: Iterable[str] = CASES) -> dict[str, Any]:
    return {name: answer(llm, model, CASES[name]) for name in cases}


def send_malformed(llm: Any) -> dict[str, Any]:
    """What the engine says to each malformed ADD: the id it names and the reason it gives; and what it does afterwards."""
    client = llm.llm_engine.engine_core
    said: dict[str, Any] = {}
    for name, frames in MALFORMED.items():
        client.input_socket.send_multipart([client.core_engine, b"\x00", *frames])
        if name in ANSWERED:
            outputs = []
            while not outputs:  # some messages bring only stats
                outputs = client.get_output().outputs
            (output,) = outputs
            said[name] = [output.request_id, output.finish_reason.name]
    for kind in (b"\x01", b"\x03"):
        client.input_socket.send_multipart([client.core_engine, kind, b"\xc1"])
    return said


def abort_and_call(llm: Any) -> None:
    """Requests that are aborted while they run, and utility calls, one of which fails."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    endless = SamplingParams(max_tokens=1000, ignore_eos=True)
    for name in ("abort-1", "abort-2"):
        engine.add_request(name, {"prompt": "what is this ?"}, endless)
    engine.step()
    engine.abort_request(["abort-1", "abort-2", "abort-unknown"])
    core = engine.engine_core
    core.is_sleeping()
    core.reset_prefix_cache()
    core.execute_dummy_batch()
    core.get_supported_tasks()
    llm.collective_rpc("get_supported_tasks")
    try:
        core.call_utility("no_such_utility", 1, "two", None)
    except Exception:
        pass
    else:
        raise AssertionError("a utility that does not exist did not fail")


def main(model: str, directory: str, output: str) -> None:
    path = Path(output)
    result: dict[str, Any] = {}

    def places(name: str) -> Path:
        return path.with_suffix(f".{name.replace(' ', '-')}")

    # The front end loads its plugins when the first LLM is made.
    llm = start(directory, places("both"), "1")
    result["both"] = {"answers": answers(llm, model)}
    stop(llm)

    from fastmm.integrations.vllm import counters, plugin

    def start_counting(name: str) -> Path:
        os.environ["FASTMM_VLLM_COUNTERS"] = str(places(name))
        counters.open_file()
        return places(name)

    llm = start(directory, start_counting("by another way"), "1", **ANOTHER_WAY[model])
    result["by another way"] = {"answers": answers(llm, model, SOME)}
    stop(llm)

    llm = start(directory, start_counting("front end only"), "0")
    result["front end only"] = {"answers": answers(llm, model)}
    stop(llm)

    plugin.switch_off()
    llm = start(directory, places("engine only"), "1", disable_log_stats=False)
    Recorder(path.with_suffix(".frames"))
    result["engine only"] = {"answers": answers(llm, model)}
    abort_and_call(llm)
    result["malformed"] = send_malformed(llm)
    result["after malformed"] = answer(llm, model, CASES["one"])
    stop(llm)
    path.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

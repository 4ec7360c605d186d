"""vLLM's own front end answers every case; run in a process of its own: ``python reference.py MODEL DIRECTORY OUTPUT [CASES]``.

CASES is a JSON file, name to the fields of a `Case`; without it the cases are `cases.CASES`.

OUTPUT is a directory. ``answers.json`` there is case to answer; ``messages.frames`` is every message that crossed between vLLM's
front end and its engine core meanwhile: a stream of msgpack arrays ``[direction, what, frames]``, where direction is ``"sent"``
or ``"received"`` and what is the name of the encoded object's type or of the type that was decoded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgpack
from cases import CASES, Case

# Both ways of starting an engine get these: what they leave alone is the same too.
ENGINE_OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "seed": 0,
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": 16,
    "enable_prefix_caching": False,
    "mm_processor_cache_gb": 0,
    # Else vLLM sends raw bytes for some models, and the engine makes floats of them: there would be nothing to cast.
    "mm_device_do_normalize": False,
    "limit_mm_per_prompt": {"image": 8},
}


class Recorder:
    """Writes down every message that vLLM's codec makes or reads in this process."""

    def __init__(self, path: Path) -> None:
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self._file = path.open("wb")
        self._wrap(MsgpackEncoder, "encode", self._sent)
        self._wrap(MsgpackDecoder, "decode", self._received)

    @staticmethod
    def _wrap(owner: type, name: str, then: Any) -> None:
        plain = getattr(owner, name)

        def method(self: Any, argument: Any) -> Any:
            result = plain(self, argument)
            then(self, argument, result)
            return result

        setattr(owner, name, method)

    def _sent(self, _: Any, message: Any, frames: Any) -> None:
        self._write("sent", type(message).__name__, frames)

    def _received(self, _: Any, frames: Any, result: Any) -> None:
        self._write("received", type(result).__name__, [frames] if isinstance(frames, (bytes, bytearray)) else frames)

    def _write(self, *entry: Any) -> None:
        direction, what, frames = entry
        frames = [bytes(memoryview(getattr(frame, "buffer", frame)).cast("B")) for frame in frames]
        self._file.write(msgpack.packb([direction, what, frames]))
        self._file.flush()


def logprobs_of(positions: Any) -> Any:
    """For each position token id to log probability, in the order vLLM gives; None where it has none."""
    return positions and [position and [[token, entry.logprob] for token, entry in position.items()] for position in positions]


def answer(llm: Any, model: str, case: Case) -> dict[str, Any]:
    from vllm import SamplingParams

    prompt: dict[str, Any] = {"prompt": case.prompt(model)}
    if case.photographs:
        prompt["multi_modal_data"] = {"image": case.images()}
    (output,) = llm.generate(prompt, SamplingParams(**case.sampling_params()), use_tqdm=False)
    (completion,) = output.outputs
    return {
        "prompt_token_ids": list(output.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "logprobs": logprobs_of(completion.logprobs),
        "prompt_logprobs": logprobs_of(output.prompt_logprobs),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }


def main(model: str, directory: str, output: str, given: str | None = None) -> None:
    from vllm import LLM

    cases = CASES
    if given is not None:
        cases = {name: Case(**fields) for name, fields in json.loads(Path(given).read_text(encoding="utf-8")).items()}

    Recorder(Path(output) / "messages.frames")
    llm = LLM(directory, **ENGINE_OPTIONS)
    answers = {name: answer(llm, model, case) for name, case in cases.items()}
    (Path(output) / "answers.json").write_text(json.dumps(answers, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

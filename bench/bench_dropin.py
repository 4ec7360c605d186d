"""The drop-in beside what it stands in for: vLLM's own MsgpackEncoder and MsgpackDecoder, on vLLM's own objects.

    python -m bench.bench_dropin [--json FILE] [--rounds N]

The rows are those of bench_encode. Both encoders must write the very same bytes, and what both decoders make of them must
encode to those bytes again, before anything is timed. Frames come to the decoders as `zmq.Frame` objects, as a socket gives
them.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

from .bench_encode import ROWS, build, frame_bytes, vllm_classes
from .support import ROUNDS, Bar, Evictor, Record, alone, cold, figures, judged, quiet, show_table, warm

# A row of bench_encode: the bar of decoding, warm. Nothing may be slower than vLLM.
DECODE_BARS = {
    "text, 16 ids": 1,
    "text, 2,048 ids": 1,
    "1 image": 1.3,
    "8 images": 2,
    "64 small images, one field": 8,
    "64 small images, a slices list each": 8,
    "1 image, as served": 1,
    "8 images, as served": 1,
    "64 small images, as served": 1,
}
OUTPUTS = ("1 token", "64 requests, a token each", "logprobs of 5 tokens", "abort", "utility call")
BAR_OF_THE_REST = 1


def small_message(case: str) -> Any:
    """What crosses beside requests."""
    import numpy as np
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import LogprobsLists

    def output(number: int, **more: Any) -> Any:
        return EngineCoreOutput(request_id=f"request-{number}", new_token_ids=[1234], **more)

    if case == "abort":
        return ["request-1", "request-2"]
    if case == "utility call":
        return (0, 2**40, "get_supported_tasks", ())
    if case == "logprobs of 5 tokens":
        lists = LogprobsLists(np.zeros((1, 6), np.int32), np.zeros((1, 6), np.float32), np.zeros(1, np.int32), None)
        return EngineCoreOutputs(outputs=[output(1, new_logprobs=lists)], timestamp=1.5)
    return EngineCoreOutputs(outputs=[output(i) for i in range(1 if case == "1 token" else 64)], timestamp=1.5)


def timed(
    bench: str,
    case: str,
    calls: dict[str, Callable[[], object]],
    bars: tuple[Any, Any],
    rounds: int | None,
    evict: Evictor | None,
) -> list[Record]:
    slow = case.startswith(("64 small", "256"))
    records: list[Record] = []
    for caches, factor in zip(("warm", "cold"), bars, strict=True):
        if caches == "warm":
            seconds = warm(calls, rounds or (15 if slow else ROUNDS))
        elif evict is not None:
            seconds = cold(calls, rounds or (11 if slow else 31), evict)
        else:
            continue
        what = {"bench": bench, "case": case, "caches": caches}
        records += figures(seconds, **what) + judged(seconds, [Bar("fastmm", "vLLM", factor)], **what)
    return records


def of_message(
    case: str, message: Any, of_type: Any, encode_bars: Any, decode_bar: Any, rounds: Any, evict: Any
) -> list[Record]:
    import zmq
    from vllm.v1 import serial_utils as theirs

    from fastmm.integrations import vllm as ours

    encoders = {"vLLM": theirs.MsgpackEncoder(), "fastmm": ours.MsgpackEncoder()}
    decoders = {"vLLM": theirs.MsgpackDecoder(of_type), "fastmm": ours.MsgpackDecoder(of_type)}
    written = frame_bytes(encoders["vLLM"].encode(message))
    frames = [zmq.Frame(frame) for frame in written]
    again = [frame_bytes(encoders["vLLM"].encode(decoder.decode(frames))) for decoder in decoders.values()]
    if not frame_bytes(encoders["fastmm"].encode(message)) == written == again[0] == again[1]:
        raise SystemExit(f"not timed: the frames of {case!r} differ, or what they decode to")
    encode = {name: lambda encoder=encoder: encoder.encode(message) for name, encoder in encoders.items()}
    decode = {name: lambda decoder=decoder: decoder.decode(frames) for name, decoder in decoders.items()}
    records = timed("drop-in encode", case, encode, encode_bars, rounds, evict)
    return records + timed("drop-in decode", case, decode, (decode_bar, None), rounds, evict)


def run(rounds: int | None = None) -> list[Record]:
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest

    logging.getLogger("vllm").setLevel(logging.ERROR)
    evict = Evictor()
    records: list[Record] = []
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of frames that are read-only
        for case in ROWS:
            bars = ROWS[case][2:]
            request = build(case, vllm_classes())
            records += of_message(case, request, EngineCoreRequest, bars, DECODE_BARS.get(case), rounds, evict)
        for case in OUTPUTS:
            message = small_message(case)
            of_type = None if isinstance(message, (list, tuple)) else EngineCoreOutputs
            records += of_message(case, message, of_type, (BAR_OF_THE_REST, None), BAR_OF_THE_REST, rounds, None)
    return records


def show(records: list[Record]) -> None:
    show_table([r for r in records if r["bench"] == "drop-in encode"], "drop-in, encode")
    show_table([r for r in records if r["bench"] == "drop-in decode"], "drop-in, decode")


if __name__ == "__main__":
    alone(run, show, "bench_dropin", __doc__.partition("\n")[0])

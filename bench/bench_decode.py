"""Decoding requests: fastmm's Decoder beside vLLM 0.33's MsgpackDecoder, on the very same frames.

    python -m bench.bench_decode [--json FILE] [--rounds N]

Each makes its own classes: vLLM msgspec structs and dataclasses, fastmm its schema classes; both make torch tensors over the
frames. The frames are `zmq.Frame` objects, as a socket gives them. Both results, encoded again by the encoder of their own
side, must be those frames byte for byte before anything is timed.

"msgspec alone" reads the main frame into plain lists and dicts and makes no tensor: what vLLM's decoder stands on.
"""

from __future__ import annotations

import logging
import warnings

import fastmm
from fastmm._native.decoder import Decoder

from .bench_encode import build, frame_bytes, vllm_classes
from .support import Bar, Evictor, Record, alone, cold, figures, judged, quiet, show_table, warm

# A row of bench_encode: what the ids as a list must reach, and as an array.
ROWS = {
    "text, 16 ids": (None, None),
    "text, 2,048 ids": (1.1, 8),
    "1 image, as served": (1.4, 5),
    "8 images, as served": (3.5, 8),
    "64 small images, as served": (15, 20),
    "1 image": (None, None),
    "8 images": (None, None),
    "64 small images, one field": (None, None),
    "64 small images, a slices list each": (None, None),
}


def against_vllm(case: str, rounds: int | None, evict: Evictor) -> list[Record]:
    import msgspec
    import zmq
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    written = frame_bytes(MsgpackEncoder().encode(build(case, vllm_classes())))
    frames = [zmq.Frame(frame) for frame in written]
    theirs, plain = MsgpackDecoder(EngineCoreRequest), msgspec.msgpack.Decoder(ext_hook=lambda code, data: data)
    as_list, as_array = Decoder(), Decoder(token_ids="array")
    mine = as_list.decode(frames)
    other = as_array.decode(frames)
    other.prompt_token_ids = other.prompt_token_ids.tolist()
    encoder = fastmm.Encoder(dedup=False)
    if not (
        written
        == frame_bytes(MsgpackEncoder().encode(theirs.decode(frames)))
        == frame_bytes(encoder.encode(mine))
        == frame_bytes(encoder.encode(other))
    ):
        raise SystemExit(f"not timed: what {case!r} decodes to differs")
    del mine, other
    calls = {
        "vLLM": lambda: theirs.decode(frames),
        "ids as a list": lambda: as_list.decode(frames),
        "ids as an array": lambda: as_array.decode(frames),
        "msgspec alone": lambda: plain.decode(written[0]),
    }
    records = []
    for caches in ("warm", "cold"):
        if caches == "warm":
            seconds = warm(calls, rounds or 25)
        else:
            seconds = cold(calls, rounds or 25, evict)
        what = {"bench": "decode", "case": case, "caches": caches}
        factors = ROWS[case] if caches == "warm" else (None, None)
        bars = [Bar(ours, "vLLM", factor) for ours, factor in zip(("ids as a list", "ids as an array"), factors, strict=True)]
        records += figures(seconds, **what) + judged(seconds, bars, **what)
    return records


def run(rounds: int | None = None) -> list[Record]:
    logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="The given buffer is not writable")  # vLLM's way over read-only frames
    evict = Evictor()
    records: list[Record] = []
    with quiet():
        for case in ROWS:
            records += against_vllm(case, rounds, evict)
    return records


def show(records: list[Record]) -> None:
    show_table(records, "decode")


if __name__ == "__main__":
    alone(run, show, "bench_decode", __doc__.partition("\n")[0])

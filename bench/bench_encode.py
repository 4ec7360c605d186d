"""Encoding requests: fastmm beside vLLM 0.33's MsgpackEncoder, and beside msgspec with a hook.

    python -m bench.bench_encode [--json FILE] [--rounds N]

A prompt is 2,048 ids long, the images' placeholders among them. An image is a bfloat16 tensor of patches, a slice of one
batch, and a small tensor with its grid. "as served" adds sampling parameters. Both encoders get the very same vLLM objects,
and must write the very same bytes before anything is timed.

The second table is what a clever user writes by hand: plain dicts of numpy views, msgspec with a hook that collects the
buffers. It carries the same ids, field metadata and payloads, not on vLLM's wire.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

import fastmm

from .support import ROUNDS, Bar, Evictor, Record, alone, cold, figures, judged, quiet, show_table, warm

WIDTH = 1176  # of a patch: 14 x 14 x 3 x 2
# images, patches of one, the bar warm, the bar cold
ROWS = {
    "text, 16 ids": (0, 0, 1.7, 1.5),
    "text, 2,048 ids": (0, 0, 3, 1.7),
    "text, 2,048 ids, some 0": (0, 0, None, None),
    "1 image": (1, 1024, 7, 4.5),
    "8 images": (8, 1024, 22, 5),
    "64 small images, one field": (64, 64, 90, 14),
    "64 small images, a slices list each": (64, 64, 35, None),
    "256 tiny images, one field": (256, 16, 100, None),
    "1 image, as served": (1, 1024, None, None),
    "8 images, as served": (8, 1024, None, None),
    "64 small images, as served": (64, 64, None, None),
}
HAND_BARS = {"1 image": None, "8 images": 2.5, "64 small images, one field": 1.7}


def vllm_classes() -> SimpleNamespace:
    from vllm.multimodal import inputs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    absent = dict.fromkeys(["sampling_params", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"])
    return SimpleNamespace(
        request=lambda **fields: EngineCoreRequest(**(absent | fields)),
        sampling=SamplingParams,
        feature=inputs.MultiModalFeatureSpec,
        placeholder=inputs.PlaceholderRange,
        item=inputs.MultiModalKwargsItem,
        elem=inputs.MultiModalFieldElem,
        batched=inputs.MultiModalBatchedField,
        flat=inputs.MultiModalFlatField,
    )


def fastmm_classes() -> SimpleNamespace:
    return SimpleNamespace(
        request=fastmm.EngineCoreRequest,
        sampling=fastmm.SamplingParams,
        feature=fastmm.MmFeatureSpec,
        placeholder=fastmm.PlaceholderRange,
        item=dict,
        elem=fastmm.MmFieldElem,
        batched=fastmm.MmBatchedField,
        flat=fastmm.MmFlatField,
    )


def build(case: str, classes: SimpleNamespace) -> Any:
    """The request of a row, made of either family's classes."""
    import torch

    images, patches = ROWS[case][:2]
    pixels = torch.arange(images * patches * WIDTH, dtype=torch.int32).to(torch.bfloat16).reshape(-1, WIDTH)
    bounds = [(i * patches, (i + 1) * patches) for i in range(images)]

    def field() -> Any:
        return classes.flat(slices=[(slice(*pair),) for pair in bounds], dim=0)

    one, grid_field = field(), classes.batched(keep_on_cpu=True)
    length = patches // 4  # placeholders of an image: 2 x 2 patches each
    count = 16 if case == "text, 16 ids" else 2048
    ids = [(i * 7919) % 151_000 for i in range(count - images * length)]
    if case == "text, 2,048 ids, some 0":
        ids[::20] = [0] * len(ids[::20])  # a byte of text in some vocabularies
    features = []
    for i, pair in enumerate(bounds):
        item = {
            "pixel_values": classes.elem(data=pixels[slice(*pair)], field=field() if "a slices list each" in case else one),
            "image_grid_thw": classes.elem(data=torch.tensor([1, patches // 8, 8]), field=grid_field),
        }
        position = classes.placeholder(offset=len(ids), length=length)
        ids += [151_655] * length
        features.append(
            classes.feature(
                data=classes.item(item), modality="image", identifier=f"{i:064x}", mm_position=position, mm_hash=f"{i:064x}"
            )
        )
    more = {"sampling_params": classes.sampling(temperature=0.7, max_tokens=512)} if case.endswith("as served") else {}
    return classes.request(
        request_id="request-1", prompt_token_ids=ids, mm_features=features or None, arrival_time=1764430000.25, **more
    )


def frame_bytes(frames: Any) -> list[bytes]:
    return [memoryview(frame).tobytes() for frame in frames]


# --- against vLLM ---------------------------------------------------------------------------------------------------------


def against_vllm(case: str, rounds: int | None, evict: Evictor) -> list[Record]:
    from vllm.v1.serial_utils import MsgpackEncoder

    request = build(case, vllm_classes())
    ours, theirs, plain = fastmm.Encoder(), MsgpackEncoder(), fastmm.Encoder(dedup=False)
    if not frame_bytes(ours.encode(request)) == frame_bytes(plain.encode(request)) == frame_bytes(theirs.encode(request)):
        raise SystemExit(f"not timed: the frames of {case!r} differ")
    calls = {"vLLM": lambda: theirs.encode(request), "fastmm": lambda: ours.encode(request)}
    slow = ROWS[case][0] >= 64
    records = []
    for caches, factor in zip(("warm", "cold"), ROWS[case][2:], strict=True):
        if caches == "warm":
            seconds = warm(calls, rounds or (15 if slow else ROUNDS))
        else:
            seconds = cold(calls, rounds or (11 if slow else 31), evict)
        what = {"bench": "encode", "case": case, "caches": caches}
        records += figures(seconds, **what) + judged(seconds, [Bar("fastmm", "vLLM", factor)], **what)
    return records


# --- against what one writes by hand --------------------------------------------------------------------------------------


class ByHand:
    """msgspec and a hook over plain dicts of numpy views."""

    def __init__(self) -> None:
        import msgspec

        self.encoder = msgspec.msgpack.Encoder(enc_hook=self.hook)
        self.buffers: list[Any] = []

    def hook(self, array: np.ndarray) -> Any:
        if array.nbytes < 256:
            return (array.dtype.str, array.shape, array.tobytes())
        self.buffers.append(array.data)
        return (array.dtype.str, array.shape, len(self.buffers))

    def encode(self, tree: Any) -> list[Any]:
        self.buffers = []
        return [self.encoder.encode(tree), *self.buffers]


def plain_tree(request: Any) -> dict[str, Any]:
    """The request as nested dicts and lists; bfloat16 as the two bytes that numpy knows."""
    import torch

    slices: dict[int, list[Any]] = {}  # one list per field object, as by hand

    def field(value: Any) -> list[Any]:
        if not hasattr(value, "slices"):
            return ["batched"]
        rows = slices.setdefault(id(value), [[[s.start, s.stop, s.step] for s in row] for row in value.slices])
        return ["flat", rows, value.dim]

    def array(tensor: torch.Tensor) -> np.ndarray:
        return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()

    return {
        "request_id": request.request_id,
        "prompt_token_ids": request.prompt_token_ids,
        "mm_features": [
            {
                "data": {key: {"data": array(elem.data), "field": field(elem.field)} for key, elem in feature.data.items()},
                "modality": feature.modality,
                "identifier": feature.identifier,
                "offset": feature.mm_position.offset,
                "length": feature.mm_position.length,
                "mm_hash": feature.mm_hash,
            }
            for feature in request.mm_features
        ],
        "arrival_time": request.arrival_time,
    }


def against_hand(case: str, rounds: int | None) -> list[Record]:
    request = build(case, fastmm_classes())
    tree = plain_tree(request)
    ours, hand = fastmm.Encoder(), ByHand()
    if frame_bytes(ours.encode(request)[1:]) != frame_bytes(hand.encode(tree)[1:]):
        raise SystemExit(f"not timed: the payloads of {case!r} differ")
    calls = {"msgspec by hand": lambda: hand.encode(tree), "fastmm": lambda: ours.encode(request)}
    seconds = warm(calls, rounds or ROUNDS)
    what = {"bench": "encode by hand", "case": case, "caches": "warm"}
    bar = Bar("fastmm", "msgspec by hand", HAND_BARS[case])
    return figures(seconds, **what) + judged(seconds, [bar], **what)


# --- memory ---------------------------------------------------------------------------------------------------------------

MEMORY_NBYTES = 100 << 20
MEMORY_CASES = {
    "fastmm, cast in place": ("fastmm", {"dtype": "bfloat16"}),
    "fastmm, cast out of place": ("fastmm", {"dtype": "bfloat16", "inplace": False}),
    "fastmm, as it is": ("fastmm", {}),
    "fastmm, inline": ("fastmm", {"threshold": 2**62}),
    "vLLM after .to(bfloat16)": ("vllm-cast", {}),
    "vLLM, as it is": ("vllm", {}),
    "vLLM, inline": ("vllm", {"size_threshold": 2**62}),
}


def memory_of(case: str) -> list[int]:
    """Runs in a process of its own: the peak over what was resident, of the first and of the second message."""
    import torch

    kind, options = MEMORY_CASES[case]
    if kind == "fastmm":
        classes, encoder = fastmm_classes(), fastmm.Encoder(**options)
    else:
        from vllm.v1.serial_utils import MsgpackEncoder

        classes, encoder = vllm_classes(), MsgpackEncoder(**options)
    peaks = []
    for number in range(3):
        patches = (1 if number == 0 else MEMORY_NBYTES // 4 // WIDTH) + 1  # the first, tiny, warms up the code
        pixels = torch.full((patches, WIDTH), float(number))
        field = classes.flat(slices=[(slice(0, patches),)], dim=0)

        def request(leaf: Any, field: Any = field) -> Any:
            item = classes.item({"pixel_values": classes.elem(data=leaf, field=field)})
            position = classes.placeholder(offset=0, length=1)
            feature = classes.feature(data=item, modality="image", identifier="i", mm_position=position, mm_hash="i")
            return classes.request(request_id="r", prompt_token_ids=[1], mm_features=[feature], arrival_time=0.0)

        before = status_kib("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts anew
        frames = encoder.encode(request(pixels.to(torch.bfloat16) if kind == "vllm-cast" else pixels))
        peaks.append((status_kib("VmHWM") - before) << 10)
        del frames, pixels
    return peaks[1:]


def status_kib(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":"))


def memory() -> list[Record]:
    records = []
    for case in MEMORY_CASES:
        done = subprocess.run(
            [sys.executable, "-m", "bench.bench_encode", "--memory", case], capture_output=True, text=True, check=True
        )
        first, second = json.loads(done.stdout.splitlines()[-1])
        records.append(
            {"bench": "encode memory", "kind": "figure", "contender": case, "first_nbytes": first, "second_nbytes": second}
        )
    return records


# --- all of it ------------------------------------------------------------------------------------------------------------


def run(rounds: int | None = None) -> list[Record]:
    logging.getLogger("vllm").setLevel(logging.ERROR)
    evict = Evictor()
    records: list[Record] = []
    with quiet():
        for case in ROWS:
            records += against_vllm(case, rounds, evict)
        for case in HAND_BARS:
            records += against_hand(case, rounds)
    return records + memory()


def show(records: list[Record]) -> None:
    show_table([r for r in records if r["bench"] == "encode"], "encode, vLLM's objects")
    show_table([r for r in records if r["bench"] == "encode by hand"], "encode, fastmm's own classes")
    print(f"{'peak memory over the request itself, 100 MB of float32':56}{'first':>10}{'second':>10}")
    for r in records:
        if r["bench"] == "encode memory":
            print(f"{r['contender']:56}{r['first_nbytes'] / 1e6:>7.1f} MB{r['second_nbytes'] / 1e6:>7.1f} MB")
    print()


def main() -> None:
    if sys.argv[1:2] == ["--memory"]:
        print(json.dumps(memory_of(sys.argv[2])))
    else:
        alone(run, show, "bench_encode", __doc__.partition("\n")[0])


if __name__ == "__main__":
    main()

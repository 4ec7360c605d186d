"""Features: build and encode beside vLLM's from_hf_inputs and encoder; n samples of one prompt beside n single encodes.

    python -m bench.bench_features [--json FILE] [--rounds N]

The first table is a server's path from a processor's batch to frames: flat float32 patches, a grid tensor per image, the
sizes (a shared tensor), a placeholder and a hash per image. Both sides split, build the request and encode it. vLLM's column
"int slices" is the best a caller can do: slices made of plain ints, where `flat_from_sizes` leaves 0-d tensors. Before
anything is timed, both sides' frames are decoded by the real vLLM and must hold the same data.

The second is 16 samples of one prompt with 8 images, from features to 16 messages:

- "samples": `fan_out`, then `encode_many`;
- "single encodes": 16 requests with features of their own, each encoded by itself, as when a gateway rebuilds everything for
  each sample (building them is not in the figure);
- "vLLM": its encoder for each of the 16 children that its parallel sampling makes, with slices of plain ints.

To bfloat16, from float32 as processors give it, "samples" casts in place once, "single encodes" casts 16 times in place, each
its own memory, and "vLLM" once by `.to(bfloat16)`. As they are, nobody casts, and what is saved is the walk.
"""

from __future__ import annotations

import copy
import logging
import time
from typing import Any

import fastmm

from .support import Bar, Evictor, Record, alone, cold, figures, judged, quiet, show_table, warm

WIDTH = 1176  # of a patch: 14 x 14 x 3 x 2
EMBED = 151_655
# images, patches of one, the bar warm
ROWS = {
    "1 image": (1, 1024, None),
    "8 images": (8, 1024, 5),
    "64 small images": (64, 64, 30),
    "256 tiny images": (256, 16, None),
}
SAMPLES = 16
SAMPLES_BAR = 10


class Batch:
    """What a processor hands over for n images, and the prompt around them."""

    def __init__(self, images: int, patches: int) -> None:
        import torch

        self.n, self.patches = images, patches
        count = images * patches
        self.tensors = {
            "pixel_values": torch.arange(count * WIDTH, dtype=torch.int32).to(torch.float32).reshape(count, WIDTH),
            "image_grid_thw": torch.tensor([[1, patches // 8, 8]] * images),
            "patches_per_image": torch.full((images,), patches),
        }
        length = max(1, patches // 4)
        self.ids: list[int] = [1, 2, 3]
        self.placeholders = []
        for _ in range(images):
            self.placeholders.append((len(self.ids), length))
            self.ids += [EMBED] * length + [4, 5]
        self.hashes = [f"{i:064x}" for i in range(images)]

    def features(self) -> list[fastmm.MmFeatureSpec]:
        return fastmm.build_features(
            tensors=self.tensors,
            flat={"pixel_values": "patches_per_image"},
            batched={"image_grid_thw"},
            keep_on_cpu={"image_grid_thw"},
            placeholders=self.placeholders,
            hashes=self.hashes,
            prompt_token_ids=self.ids,
            embed_token_id=EMBED,
        )

    def request(self, **more: Any) -> fastmm.EngineCoreRequest:
        fields = {"request_id": "request-1", "prompt_token_ids": self.ids, "arrival_time": 1.0} | more
        return fastmm.EngineCoreRequest(mm_features=self.features(), **fields)

    def vllm_request(self, *, plain: bool = False, **more: Any) -> Any:
        """`plain`: slices of ints."""
        from vllm.multimodal import inputs
        from vllm.v1.engine import EngineCoreRequest

        config = inputs.MultiModalFieldConfig
        if plain:
            flat = config.flat("image", [slice(i * self.patches, (i + 1) * self.patches) for i in range(self.n)])
        else:
            flat = config.flat_from_sizes("image", self.tensors["patches_per_image"])
        configs = {
            "pixel_values": flat,
            "image_grid_thw": config.batched("image", keep_on_cpu=True),
            "patches_per_image": config.shared("image", self.n),
        }
        items = inputs.MultiModalKwargsItems.from_hf_inputs(self.tensors, configs)["image"]
        features = [
            inputs.MultiModalFeatureSpec(
                data=item,
                modality="image",
                identifier=digest,
                mm_position=inputs.PlaceholderRange(offset=offset, length=length),
                mm_hash=digest,
            )
            for item, digest, (offset, length) in zip(items, self.hashes, self.placeholders, strict=True)
        ]
        absent = dict.fromkeys(["sampling_params", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"])
        fields = absent | {"request_id": "request-1", "prompt_token_ids": self.ids, "arrival_time": 1.0} | more
        return EngineCoreRequest(mm_features=features, **fields)


def decoded(frames: Any) -> Any:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder

    return MsgpackDecoder(EngineCoreRequest).decode([bytearray(memoryview(frame).tobytes()) for frame in frames])


def same_data(case: str, ours: Any, theirs: Any) -> None:
    """Both as decoded by vLLM: ids, positions and every leaf."""
    import torch

    equal = ours.prompt_token_ids == theirs.prompt_token_ids and len(ours.mm_features) == len(theirs.mm_features)
    for mine, peer in zip(ours.mm_features, theirs.mm_features, strict=False):
        equal = (
            equal and mine.mm_position == peer.mm_position and mine.mm_hash == peer.mm_hash and set(mine.data) == set(peer.data)
        )
        equal = equal and all(torch.equal(elem.data, peer.data[key].data) for key, elem in mine.data.items())
    if not equal:
        raise SystemExit(f"not timed: what vLLM decodes for {case!r} differs")


# --- one batch ------------------------------------------------------------------------------------------------------------


def one_batch(case: str, rounds: int | None, evict: Evictor) -> list[Record]:
    from vllm.v1.serial_utils import MsgpackEncoder

    images, patches, factor = ROWS[case]
    batch, ours, theirs = Batch(images, patches), fastmm.Encoder(), MsgpackEncoder()
    calls = {
        "vLLM": lambda: theirs.encode(batch.vllm_request()),
        "vLLM, int slices": lambda: theirs.encode(batch.vllm_request(plain=True)),
        "fastmm": lambda: ours.encode(batch.request()),
    }
    peer = decoded(calls["vLLM"]())
    for name in ("vLLM, int slices", "fastmm"):
        same_data(case, decoded(calls[name]()), peer)
    split = {"fastmm, build alone": batch.features}
    slow = images >= 256
    if slow:
        del calls["vLLM"]  # a third of a second
    records = []
    for caches in ("warm", "cold"):
        times = rounds or (5 if slow else 15)
        seconds = warm(calls | split, times) if caches == "warm" else cold(calls, times, evict)
        what = {"bench": "features", "case": case, "caches": caches}
        bar = factor if caches == "warm" else None
        bars = [Bar("fastmm", "vLLM", bar), Bar("fastmm", "vLLM, int slices", bar)]
        records += figures(seconds, **what) + judged(seconds, bars, **what)
    return records


# --- samples --------------------------------------------------------------------------------------------------------------


class Samples:
    """16 samples of one prompt in three ways; `dtype`: what the float32 features are to be on the wire, or None."""

    def __init__(self, dtype: str | None) -> None:
        from vllm.v1.serial_utils import MsgpackEncoder

        self.dtype = dtype
        self.batch = Batch(8, 1024)
        self.own = [Batch(8, 1024) for _ in range(SAMPLES)] if dtype else [self.batch] * SAMPLES
        self.encoder, self.peer = fastmm.Encoder(dtype=dtype), MsgpackEncoder()

    def prepare(self) -> None:
        """Fresh float32 leaves: those of the last call are cast by now, and their memory holds other numbers."""
        from vllm.sampling_params import SamplingParams

        options = {"temperature": 0.7, "max_tokens": 512}
        self.request = self.batch.request(sampling_params=fastmm.SamplingParams(n=SAMPLES, **options))
        self.requests = [
            batch.request(request_id=f"{i}_request-1", sampling_params=fastmm.SamplingParams(n=1, **options))
            for i, batch in enumerate(self.own)
        ]
        self.theirs = self.batch.vllm_request(plain=True, sampling_params=SamplingParams(n=SAMPLES, **options))

    def together(self) -> list[Any]:
        return self.encoder.encode_many(fastmm.fan_out(self.request, SAMPLES))

    def one_by_one(self) -> list[Any]:
        return [self.encoder.encode(request) for request in self.requests]

    def by_vllm(self) -> list[Any]:
        """Its features cast once, as its processor would, then a child for each sample."""
        child = copy.copy(self.theirs)
        if self.dtype:
            child.mm_features = [self.cast(feature) for feature in child.mm_features]
        child.sampling_params = copy.copy(child.sampling_params)
        child.sampling_params.n = 1
        messages = []
        for i in range(SAMPLES):
            child.request_id = f"{i}_request-1"
            messages.append(self.peer.encode(child))
        return messages

    def cast(self, feature: Any) -> Any:
        import torch

        cast = copy.copy(feature)
        cast.data = copy.copy(feature.data)
        elem = copy.copy(feature.data["pixel_values"])
        elem.data = elem.data.to(getattr(torch, self.dtype or ""))
        cast.data["pixel_values"] = elem
        return cast


def samples(case: str, dtype: str | None, bars: list[Bar], rounds: int | None) -> list[Record]:
    made = Samples(dtype)
    calls = {"vLLM": made.by_vllm, "single encodes": made.one_by_one, "samples": made.together}
    made.prepare()
    expected = [decoded(frames) for frames in made.by_vllm()]  # first: it leaves the batch as it is
    for name in ("single encodes", "samples"):
        for got, peer in zip([decoded(frames) for frames in calls[name]()], expected, strict=True):
            if got.request_id != peer.request_id:
                raise SystemExit(f"not timed: the ids of {case!r}, {name}, differ")
            same_data(f"{case}: {name}", got, peer)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds or 25):
        for name, call in calls.items():
            call()  # its own state of the caches
            spent = 0.0
            times = 8 if name == "samples" else 1  # as long on the clock as the others, or a busy machine hits it harder
            for _ in range(times):
                made.prepare()
                start = time.perf_counter()
                call()
                spent += time.perf_counter() - start
            seconds[name].append(spent / times)
    what = {"bench": "samples", "case": case, "caches": "warm"}
    return figures(seconds, **what) + judged(seconds, bars, **what)


def run(rounds: int | None = None) -> list[Record]:
    logging.getLogger("vllm").setLevel(logging.ERROR)
    evict = Evictor()
    records: list[Record] = []
    with quiet():
        for case in ROWS:
            records += one_batch(case, rounds, evict)
        against = [Bar("samples", "single encodes", SAMPLES_BAR), Bar("samples", "vLLM")]
        records += samples(f"{SAMPLES} x 8 images, to bfloat16", "bfloat16", against, rounds)
        against = [Bar("samples", "vLLM", SAMPLES_BAR), Bar("samples", "single encodes")]
        records += samples(f"{SAMPLES} x 8 images, as they are", None, against, rounds)
    return records


def show(records: list[Record]) -> None:
    show_table([r for r in records if r["bench"] == "features"], "a batch to frames")
    show_table([r for r in records if r["bench"] == "samples"], "samples of one prompt")


def main() -> None:
    alone(run, show, "bench_features", __doc__.partition("\n")[0])


if __name__ == "__main__":
    main()

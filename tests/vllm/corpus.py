"""Random requests and outputs made of vLLM's own objects.

Every draw comes from one `random.Random`, so a seed names a request; hypothesis passes a `Random` of its own and shrinks it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from support.families import NUMPY_DTYPES, SAMPLING_VALUES, TORCH_DTYPES, numpy_array, pattern, value_of
from vllm.exceptions import VLLMValidationError
from vllm_family import FAMILY as F

THRESHOLDS = [0, 1, 255, 256, 2**62]
_WORDS = ["", "a", "image", "pixel_values", "caf\u00e9", "\u20ac\U0001f600", "x" * 31, "y" * 32, "z" * 255, "w" * 256]
_INTS = [0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63, 2**64 - 1, -1, -32, -33, -128, -129, -32769, -(2**63)]
_FLOATS = [0.0, -0.0, 1.0, 0.1, 1e300, 5e-324, float("inf"), float("-inf"), float("nan")]


def viewable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it where an extent of 1 has an odd stride: contiguous to torch, yet vLLM's view raises."""
    if tensor.is_contiguous() and tensor.dim() and tensor.stride(-1) != 1:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


class Corpus:
    """Draws from `rng`.

    Parameters
    ----------
    rng
        Where every choice comes from.
    odd
        Whether to draw what does not come back from vLLM's decoder as it went in: sets and arrays where vLLM's types say
        nothing (an array there decodes to the raw triple, index of the frame included), an int for a float.
    """

    def __init__(self, rng: random.Random, *, odd: bool = False) -> None:
        self.rng = rng
        self.odd = odd
        self.made: list[torch.Tensor] = []  # to draw aliases from

    # --- plain values

    def chance(self, percent: int) -> bool:
        return self.rng.randint(0, 99) < percent

    def pick(self, choices: Any) -> Any:
        return choices[self.rng.randint(0, len(choices) - 1)]

    def text(self) -> str:
        return self.pick(_WORDS)

    def integer(self) -> int:
        return self.pick(_INTS) if self.chance(50) else self.rng.randint(-(2**20), 2**20)

    def number(self) -> Any:
        return self.pick([self.integer(), self.pick(_FLOATS), self.chance(50)])

    def count(self) -> int:
        """A length; those around the borders of the headers are likely."""
        return self.pick([0, 1, 1, 2, 2, 3, 5, 15, 16, 17])

    def token_ids(self) -> list[int]:
        count = self.pick([0, 1, 2, 15, 16, 17, 100, 700])
        top = self.pick([127, 255, 65535, 152064, 2**32 - 1, 2**40])
        return [self.rng.randint(0, top) for _ in range(count)]

    def plain(self, depth: int = 3) -> Any:
        """What may stand in a field of type Any."""
        kind = self.rng.randint(0, 9 if depth else 4)
        if kind <= 1:
            return self.text()
        if kind <= 3:
            return self.number()
        if kind == 4:
            return self.pick([None, b"", b"bytes", bytearray(b"\x00" * 300), memoryview(b"view")])
        if kind == 5 and self.odd:
            return self.pick([self.array, self.tensor])()
        if kind == 6:
            return tuple(self.plain(depth - 1) for _ in range(self.rng.randint(0, 3)))
        if kind == 7 and self.odd:
            return self.pick([set(), {3}, frozenset({5, 6}), {"a"}])
        if kind == 8:
            return [self.plain(depth - 1) for _ in range(self.rng.randint(0, 17))]
        return self.plain_map(depth - 1)

    def plain_map(self, depth: int = 3, *, keys: Any = None) -> dict[Any, Any]:
        keys = keys or self.pick([self.text, self.text, self.integer])
        return {keys(): self.plain(depth) for _ in range(self.count())}

    # --- leaves

    def shape(self) -> tuple[int, ...]:
        return tuple(self.pick([0, 1, 1, 2, 3, 4, 5, 7]) for _ in range(self.pick([0, 1, 1, 2, 2, 3, 4])))

    def tensor(self, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """A tensor of any dtype, shape and layout; now and then one that was made before, or a view of it."""
        if dtype is None and shape is None and self.made and self.chance(15):
            again = self.pick(self.made)
            return again if not again.dim() or self.chance(50) else viewable(again[: self.rng.randint(0, again.shape[0])])
        dtype = dtype or self.pick(list(TORCH_DTYPES))
        if shape is None:
            if self.chance(20):  # around the thresholds
                shape = (max(0, self.pick([1, 254, 255, 256, 257]) // TORCH_DTYPES[dtype]),)
            else:
                shape = self.shape()
        layout = self.pick(["dense", "dense", "transposed", "strided", "expanded", "offset", "permuted", "gradient"])
        if layout == "transposed" and len(shape) >= 2:
            made = self._dense(dtype, (*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2)
        elif layout == "strided" and shape:
            made = self._dense(dtype, (*shape[:-1], 2 * shape[-1]))[..., ::2]
        elif layout == "expanded" and shape:
            made = self._dense(dtype, (*shape[:-1], 1)).expand(shape)
        elif layout == "offset" and shape:
            made = self._dense(dtype, (shape[0] + 3, *shape[1:]))[3:]
        elif layout == "permuted" and shape:
            made = self._dense(dtype, shape[::-1]).permute(*range(len(shape) - 1, -1, -1))
        else:
            made = self._dense(dtype, shape)
            if layout == "gradient" and dtype in ("float32", "bfloat16", "float64"):
                made = torch.nn.Parameter(made) if self.chance(50) else made.requires_grad_()
        made = viewable(made)
        self.made.append(made)
        return made

    def _dense(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        element = getattr(torch, dtype)
        nelem = int(np.prod(shape, dtype=np.int64))
        if not nelem:
            return torch.empty(shape, dtype=element)
        data = pattern(nelem * element.itemsize, self.rng.randint(0, 250), of_bool=dtype == "bool")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(element).reshape(shape)

    def array(self, dtypes: list[str] | None = None, shape: tuple[int, ...] | None = None) -> np.ndarray[Any, Any]:
        """An array of any dtype, byte order, shape and layout."""
        dtype = self.pick(dtypes or NUMPY_DTYPES)
        shape = self.shape() if shape is None else shape
        seed = self.rng.randint(0, 250)
        layout = self.pick(["dense", "dense", "fortran", "strided", "reversed", "broadcast", "readonly"])
        if layout == "fortran":
            return np.asfortranarray(numpy_array(dtype, shape, seed))
        if layout == "strided" and shape:
            return numpy_array(dtype, (*shape[:-1], 2 * shape[-1]), seed)[..., ::2]
        if layout == "reversed" and shape:
            return numpy_array(dtype, shape, seed)[::-1]
        if layout == "broadcast" and shape:
            return np.broadcast_to(numpy_array(dtype, (*shape[:-1], 1), seed), shape)
        made = numpy_array(dtype, shape, seed)
        if layout == "readonly":
            made.flags.writeable = False
        return made

    # --- requests

    def nested(self, depth: int = 3) -> Any:
        kind = self.rng.randint(0, 9)
        if kind <= 5 or not depth:
            return self.tensor()
        if kind <= 7:
            return self.number()
        items = [self.nested(depth - 1) for _ in range(self.rng.randint(0, 4))]
        return tuple(items) if self.chance(30) else items

    def bound(self) -> Any:
        value = self.rng.randint(0, 70000)
        return self.pick([value, value, None, torch.tensor(value), np.int64(value), -1])

    def slice(self) -> slice:
        return slice(self.bound(), self.bound(), self.pick([None, None, 1, 2]))

    def field(self) -> Any:
        keep_on_cpu = self.chance(30)
        kind = self.rng.randint(0, 3)
        if kind == 0:
            return F.batched(keep_on_cpu=keep_on_cpu)
        if kind == 1:
            return F.shared(batch_size=self.rng.randint(0, 300), keep_on_cpu=keep_on_cpu)
        if kind == 2:
            slices = [self.slice() for _ in range(self.count())]
            return F.flat(slices=self.pick([slices, tuple(slices)]), keep_on_cpu=keep_on_cpu)
        return F.flat(
            slices=[tuple(self.slice() for _ in range(2)) for _ in range(self.rng.randint(1, 17))],
            dim=self.pick([1, -1, 2]),
            keep_on_cpu=keep_on_cpu,
        )

    def features(self) -> list[Any]:
        """Features whose items share field objects or have their own, as a batch of a processor does."""
        keys = ["pixel_values", "image_grid_thw", "caf\u00e9", "k" * 40][: self.rng.randint(0, 4)]
        shared = {key: self.field() for key in keys}
        features = []
        for index in range(self.pick([0, 1, 1, 2, 3, 5, 16])):
            item = F.item(
                {
                    key: F.elem(
                        data=None if self.chance(10) else self.nested(),
                        field=shared[key] if self.chance(70) else self.field(),
                    )
                    for key in keys
                    if self.chance(90)
                }
            )
            length = self.rng.randint(0, 300)
            features.append(
                F.feature(
                    data=None if self.chance(10) else item,
                    modality=self.pick(["image", "audio", "video"]),
                    identifier=f"{self.text()}{index}",
                    mm_position=F.placeholder(
                        self.rng.randint(0, 70000), length, self.tensor("bool", (length,)) if self.chance(30) else None
                    ),
                    mm_hash=self.text() if self.chance(50) else None,
                )
            )
        return features

    def sampling(self) -> Any:
        """SamplingParams with any of its fields set; drawn again where vLLM refuses the combination."""
        while True:
            names = [name for name in SAMPLING_VALUES if self.chance(self.pick([5, 30, 80]))]
            fields = {name: value_of(self.pick(SAMPLING_VALUES[name]), F) for name in names}
            if "extra_args" in fields and self.chance(70):
                fields["extra_args"] = self.plain_map(keys=self.text)
            if "prompt_logprob_token_ids" in fields and self.chance(50):
                fields["prompt_logprob_token_ids"] = self.array(["<i8", "<i4"], (self.rng.randint(0, 20), 7))
            if not self.odd:
                for name in ("temperature", "frequency_penalty"):
                    fields |= {name: float(fields[name])} if name in fields else {}
            try:
                return F.sampling(**fields)
            except VLLMValidationError:
                continue

    def pooling(self) -> Any:
        return F.pooling(
            use_activation=self.pick([None, True]),
            dimensions=self.pick([None, 64]),
            returned_token_ids=self.pick([None, [1, 2]]),
            task=self.pick([None, "embed", "token_embed", "plugin"]),
            late_interaction_params=self.pick([None, F.late_interaction("cache_query", "k", 3)]),
            extra_kwargs=self.pick([None, {"a": 1}]),
            late_chunking_params=self.pick([None, F.late_chunking(7)]),
        )

    def request(self) -> Any:
        fields: dict[str, Any] = {"arrival_time": self.pick([0.0, 1764430000.25, 1e-9])}
        if self.chance(80):
            fields["mm_features"] = self.features()
        if self.chance(50):
            fields["sampling_params"] = self.sampling()
        elif self.chance(30):
            fields["pooling_params"] = self.pooling()
        if self.chance(20):
            fields["lora_request"] = F.lora(
                "ad", self.rng.randint(1, 2**40), "/p", base_model_name=self.pick([None, "m"]), load_inplace=self.chance(50)
            )
        if self.chance(20):
            fields["prompt_embeds"] = self.tensor(self.pick(["float32", "bfloat16", "float16"]))
            fields["prompt_is_token_ids"] = [self.chance(50) for _ in range(self.count())]
        optional = {
            "cache_salt": self.text,
            "data_parallel_rank": lambda: self.rng.randint(0, 9),
            "client_index": lambda: self.rng.randint(0, 300),
            "current_wave": lambda: self.rng.randint(0, 2**33),
            "priority": lambda: self.rng.randint(-70000, 70000),
            "trace_headers": lambda: {"traceparent": self.text()},
            "resumable": lambda: self.chance(50),
            "external_req_id": self.text,
            "reasoning_ended": lambda: self.chance(50),
            "reasoning_parser_kwargs": lambda: self.plain_map(keys=self.text),
            "abort_immediately": lambda: self.chance(50),
            "session_id": self.text,
            "kv_hints": lambda: F.kv_hints("1", "m", [F.kv_action("a", "pin", "2", {"ttl": self.number()})] * self.count()),
        }
        fields |= {name: make() for name, make in optional.items() if self.chance(15)}
        return F.request(self.text(), self.token_ids() if self.chance(90) else None, **fields)

    # --- outputs

    def logprobs(self) -> Any:
        rows = self.rng.randint(0, 20)
        return F.logprobs_lists(
            self.array(["<i4", "<i8"], (rows, 6)),
            self.array(["<f4"], (rows, 6)),
            self.array(["<i4"], (rows,)),
            self.pick([None, [0, 1, rows]]),
        )

    def output(self) -> Any:
        optional = {
            "new_logprobs": self.logprobs,
            "new_prompt_logprobs_tensors": lambda: F.logprobs_tensors(
                self.tensor("int32", (5, 2)),
                self.tensor("float32", (5, 2)),
                self.tensor("int32", (5,)),
                None,
                self.pick([None, self.tensor("int32", (2,))]),
            ),
            "pooling_output": self.tensor,
            "finish_reason": lambda: self.pick(list(F.finish_reason)),
            "stop_reason": lambda: self.pick([5, "end"]),
            "events": lambda: [F.event(self.pick(list(F.event_type)), self.pick(_FLOATS)) for _ in range(self.count())],
            "kv_transfer_params": lambda: {"a": self.plain()},
            "ec_transfer_params": lambda: {"b": self.plain()},
            "trace_headers": lambda: {"t": self.text()},
            "prefill_stats": lambda: F.prefill_stats(num_prompt_tokens=self.rng.randint(0, 70000)),
            "routed_experts": self.array,
            "num_nans_in_logits": lambda: self.rng.randint(0, 3),
            "mm_cache_miss_hashes": lambda: [self.text()],
            "new_sampling_mask": lambda: F.sampling_mask(
                self.array(["<i4"], (7,)), self.pick([None, self.array(["<i8"], (2,))])
            ),
            "spec_decode_metrics": lambda: F.spec_decode_metrics(2, [1, 2], 3),
            "prompt_token_id_logprobs": lambda: self.tensor("float32"),
            "error": lambda: F.error("c", "m", self.chance(50)),
        }
        fields = {name: make() for name, make in optional.items() if self.chance(20)}
        return F.output(self.text(), self.token_ids(), **fields)

    def stats(self) -> Any:
        return F.scheduler_stats(
            num_running_reqs=self.rng.randint(0, 300),
            num_kv_fetch_reqs_by_stage=self.pick([{}, {"in_progress": 3}]),
            kv_cache_usage=self.pick(_FLOATS),
            iteration_details=self.pick([None, F.iteration_details(1, 2, 3, 4, 5, 6.5, is_dummy=True)]),
            connector_prefix_cache_stats=self.pick([None, F.prefix_cache_stats(hits=self.rng.randint(0, 9))]),
            kv_cache_eviction_events=self.pick([[], [F.eviction(1.5, 2.5, (0.5,))]]),
            spec_decoding_stats=self.pick([None, F.spec_decoding(2)]),
            kv_connector_stats=self.pick([None, {"a": self.plain()}]),
            running_lora_adapters=self.pick([{}, {"ad": 2}]),
            cudagraph_stats=self.pick([None, F.cudagraph(1, 2, 3, "FULL")]),
            perf_stats=self.pick([None, F.perf(1, 2, 3, self.pick([None, F.debug_perf(0.5)]))]),
        )

    def outputs(self) -> Any:
        return F.outputs(
            engine_index=self.rng.randint(0, 300),
            outputs=[self.output() for _ in range(self.pick([0, 1, 2, 5, 17]))],
            scheduler_stats=self.stats() if self.chance(30) else None,
            timestamp=self.pick([1.5, 1e9]),
            utility_output=F.utility_output(self.integer(), self.pick([None, "no"]), F.utility_result(self.plain()))
            if self.chance(20)
            else None,
            finished_requests=self.pick([None, set(), {"a"}]),
            wave_complete=self.pick([None, 3]),
            start_wave=self.pick([None, 70000]),
            weight_version=self.pick([None, "w"]),
        )

"""A front end as a user writes one: photographs through the HuggingFace processor, `build_features`, a request."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cases import CASES, Case
from models import EMBED_TOKEN

import fastmm

_numbers = itertools.count()


def runs_of(ids: list[int], token: int, lengths: Iterable[int]) -> list[tuple[int, int]]:
    """Where each item's tokens lie. Items may touch, so their lengths say where one ends."""
    found, at = [], 0
    for length in lengths:
        at = ids.index(token, at)
        assert ids[at : at + length] == [token] * length
        found.append((at, length))
        at += length
    return found


class FrontEnd:
    """Makes requests for one of the two models out of cases."""

    def __init__(self, model: str, directory: Path) -> None:
        import transformers

        self.model = model
        self.processor = transformers.AutoProcessor.from_pretrained(directory)

    def batch(self, case: Case) -> dict[str, Any]:
        """What the processor makes of it: ``input_ids`` of one row, float32 pixels, for Qwen2-VL the grids."""
        images = case.images() or None
        return dict(self.processor(text=[case.prompt(self.model)], images=images, return_tensors="pt"))

    def features(self, case: Case, batch: dict[str, Any], ids: list[int], **options: Any) -> list[Any] | None:
        if not case.photographs:
            return None
        if self.model == "llava":
            lengths = [(112 // 14) ** 2] * len(case.photographs)
            tensors = {"pixel_values": batch["pixel_values"]}
            fields: dict[str, Any] = {"batched": {"pixel_values"}}
        else:
            patches = batch["image_grid_thw"].prod(-1)
            lengths = (patches // 4).tolist()
            tensors = {"pixel_values": batch["pixel_values"], "image_grid_thw": batch["image_grid_thw"]}
            fields = {
                "flat": {"pixel_values": patches.tolist()},
                "batched": {"image_grid_thw"},
                "keep_on_cpu": {"image_grid_thw"},
            }
        # The engine keeps what its vision tower made by hash.  New ones each time: this request's pixels are what is read.
        options.setdefault("hashes", [f"image-{next(_numbers)}" for _ in case.photographs])
        return fastmm.build_features(
            tensors=tensors,
            placeholders=runs_of(ids, EMBED_TOKEN[self.model], lengths),
            prompt_token_ids=ids,
            embed_token_id=EMBED_TOKEN[self.model],
            **fields,
            **options,
        )

    def request(
        self, case: Case | str, request_id: str | None = None, *, sampling: dict[str, Any] | None = None, **options: Any
    ):
        """The request of a case; `options` go to `build_features`, `sampling` to `SamplingParams`."""
        case = CASES[case] if isinstance(case, str) else case
        batch = self.batch(case)
        ids = batch["input_ids"][0].tolist()
        return fastmm.EngineCoreRequest(
            request_id=request_id or f"request-{next(_numbers)}",
            prompt_token_ids=ids,
            mm_features=self.features(case, batch, ids, **options),
            sampling_params=fastmm.SamplingParams(**sampling_of(case, sampling)),
        )


def sampling_of(case: Case, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """As vLLM's front end completes them: the model's end of sequence stops it, unless that is to be ignored."""
    from models import END

    asked = {**case.sampling_params(), **(more or {})}
    return asked if asked.get("ignore_eos") else {"_eos_token_id": END, "_all_stop_token_ids": {END}, **asked}


def table(entry: Any) -> list[dict[int, float]]:
    """Log probabilities of an output: for each token a dict, as vLLM's front end gives them."""
    ids, values = np.asarray(entry.logprob_token_ids), np.asarray(entry.logprobs)
    return [dict(zip(row.tolist(), numbers.tolist(), strict=True)) for row, numbers in zip(ids, values, strict=True)]


@dataclass
class Answer:
    """All outputs of one request put together, in the form of the reference's."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, output: Any) -> None:
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs += table(output.new_logprobs)
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt_logprobs = (self.prompt_logprobs or [None]) + table(output.new_prompt_logprobs_tensors)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason.name.lower()
            self.stop_reason = output.stop_reason

    @classmethod
    def of(cls, outputs: Iterable[Any]) -> Answer:
        answer = cls()
        for output in outputs:
            answer.add(output)
        return answer

    @classmethod
    def from_reference(cls, entry: dict[str, Any]) -> Answer:
        def rows(positions: Any) -> Any:
            return positions and [pairs and dict(pairs) for pairs in positions]

        names = ("token_ids", "finish_reason", "stop_reason")
        return cls(
            **{name: entry[name] for name in names},
            logprobs=rows(entry["logprobs"]) or [],
            prompt_logprobs=rows(entry["prompt_logprobs"]),
        )

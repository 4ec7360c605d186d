"""The requests whose answers are compared: photographs, a text, how to sample."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from models import IMAGE_TEXT
from PIL import Image

SUFFIX = {"astronaut": "png", "chelsea": "png", "coffee": "png", "rocket": "jpg"}


@cache
def photograph(name: str) -> Image.Image:
    """A picture by its path, or by the name it has in scikit-image: only the files are wanted, not the package."""
    if name not in SUFFIX:
        return Image.open(name).convert("RGB")
    found = importlib.util.find_spec("skimage")
    assert found is not None
    assert found.origin is not None
    return Image.open(Path(found.origin).parent / "data" / f"{name}.{SUFFIX[name]}").convert("RGB")


@dataclass(frozen=True)
class Case:
    """One request: what is asked, about which photographs, sampled how (keywords of vLLM's SamplingParams).

    A photograph is named, or is a path.
    """

    photographs: tuple[str, ...] = ()
    text: str = "what is this ?"
    sampling: dict[str, Any] = field(default_factory=dict)

    def images(self) -> list[Image.Image]:
        return [photograph(name) for name in self.photographs]

    def prompt(self, model: str) -> str:
        return f"user : {IMAGE_TEXT[model] * len(self.photographs)} {self.text} assistant :"

    def sampling_params(self) -> dict[str, Any]:
        return {"temperature": 0.0, "max_tokens": 8, "logprobs": 3, **self.sampling}


CASES: dict[str, Case] = {
    "one": Case(("astronaut",)),
    "other": Case(("chelsea",)),
    "two": Case(("astronaut", "coffee")),
    "two, swapped": Case(("coffee", "astronaut")),
    "two, one replaced": Case(("astronaut", "chelsea")),
    "the same twice": Case(("rocket", "rocket")),
    "four": Case(("astronaut", "chelsea", "coffee", "rocket"), "describe the picture ."),
    "text": Case((), "what is a photograph ?"),
    "text, long": Case((), "what is this of the picture and a photograph . " * 12, {"max_tokens": 24}),
    "prompt logprobs": Case((), "describe this photograph of a picture .", {"prompt_logprobs": 2}),
    "photograph and prompt logprobs": Case(("coffee",), "describe this .", {"prompt_logprobs": 1, "logprobs": 1}),
    "sampled with a seed": Case(("coffee",), "what is the picture ?", {"temperature": 0.9, "seed": 7, "top_k": 40}),
}
# Greedy cases that 200 requests are made of.
MIXED = ("one", "text", "two", "other", "text, long", "two, swapped", "the same twice", "four")

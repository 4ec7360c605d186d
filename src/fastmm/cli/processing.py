"""The demo's request as a processor makes it: the photographs' files go through a pool, by the name of a processor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fastmm
from fastmm.processors import Processed, ProcessorPool, Work, load_processor, to_request

from .errors import CommandError
from .request import IMAGE_PAD, VISION_END, VISION_START, WORDS, leaf_of

# What the second process paints from, and compares.
NEEDED = {"pixel_values", "image_grid_thw"}


class Processing:
    """A pool over the processor of a name, for the block of a ``with``.

    Parameters
    ----------
    name
        An entry point of ``fastmm.processors``, or ``module:attribute``.
    paths
        The photographs; their files are read here, as a front end fetches them.
    tensors
        What holds the patches: numpy arrays of a processor are shown as such tensors, over the same memory.
    """

    def __init__(self, name: str, paths: Sequence[Path], tensors: str) -> None:
        try:
            processor = load_processor(name)
        except fastmm.FastmmError as error:
            raise CommandError(f"--processor {name}: {error}") from None
        self._pool = ProcessorPool(processor, workers=2)
        self._name = name
        self._paths = paths
        self._files = [path.read_bytes() for path in paths]
        self._tensors = tensors
        self._count = 0

    def __enter__(self) -> Processing:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    async def request(self, name: str) -> fastmm.EngineCoreRequest:
        """The request of `name` that shows all photographs; processed anew each time."""
        self._count += 1
        work = Work(
            request_id=f"{name}-{self._count}",
            prompt_token_ids=[*WORDS, *[VISION_START, IMAGE_PAD, VISION_END] * len(self._files)],
            images=[path.resolve().as_uri() for path in self._paths],
            prefetched=self._files,
        )
        processed: Processed = await self._pool.asubmit(work)
        for item in processed.items:
            if set(item.features) != NEEDED:
                raise CommandError(
                    f"--processor {self._name}: the demo paints Qwen2-VL's patches, so it takes processors that make"
                    f" {' and '.join(sorted(NEEDED))}; this one makes {', '.join(sorted(item.features)) or 'nothing'}"
                )
        items = [dataclasses.replace(item, features=self._shown(item.features)) for item in processed.items]
        return to_request(dataclasses.replace(processed, items=items), name, fastmm.SamplingParams(max_tokens=64))

    def _shown(self, features: Any) -> dict[str, Any]:
        return {
            key: leaf_of(value, self._tensors) if isinstance(value, np.ndarray) else value for key, value in features.items()
        }

"""A good result of a processor, and what changes one thing in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastmm.errors import FastmmError, LimitError, ProcessorError
from fastmm.processors import Processed, ProcessedItem, Work, validate_processed

WORK = Work(request_id="r", images=[b"a", b"b"], audios=[b"c"])
F32 = np.zeros((2, 3), np.float32)


def item(modality: str = "image", at: int = 0, **changed: Any) -> ProcessedItem:
    given: dict[str, Any] = {"modality": modality, "features": {"x": F32}, "hash": "h", "spans": [(at, at + 1)]}
    return ProcessedItem(**{**given, **changed})


def good() -> list[ProcessedItem]:
    return [item(at=0), item(at=4), item("audio", at=8)]


def result(items: Any = None, ids: Any = None) -> Processed:
    return Processed(prompt_token_ids=list(range(12)) if ids is None else ids, items=good() if items is None else items)


def first(**changed: Any) -> Processed:
    """The first item changed."""
    return result([replace(good()[0], **changed), *good()[1:]])


def check(processed: Any, work: Work = WORK, **options: Any) -> None:
    validate_processed(work, processed, **options)


def refused(processed: Any, path: str, text: str = "", work: Work = WORK, **options: Any) -> None:
    with pytest.raises(FastmmError) as caught:
        check(processed, work, **options)
    assert isinstance(caught.value, (ProcessorError, LimitError))
    assert caught.value.path == path
    assert text in str(caught.value)

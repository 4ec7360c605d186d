"""The file of golden frames: what vLLM's encoder wrote for each case of `golden_cases`.

One JSON document. A frame is kept as hex, or, when it is long, as its size and SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parent.parent / "golden" / "frames.json"
_WHOLE_NBYTES = 6144


def describe(frame: Any) -> str | dict[str, Any]:
    """A frame as the file has it."""
    data = memoryview(frame).tobytes()
    if len(data) <= _WHOLE_NBYTES:
        return data.hex()
    return {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def load() -> dict[str, Any]:
    """The whole document: `made_by`, and `cases` by name."""
    document: dict[str, Any] = json.loads(PATH.read_text())
    return document


def save(made_by: dict[str, str], cases: dict[str, dict[str, Any]]) -> None:
    """Write the document, one case on a line so that a change shows as one."""
    rows = ",\n".join(f'  "{name}": {json.dumps(case)}' for name, case in cases.items())
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(f'{{"made_by": {json.dumps(made_by)}, "cases": {{\n{rows}\n}}}}\n')

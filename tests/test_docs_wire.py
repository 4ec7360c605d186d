"""What docs/wire.md shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgpack
import pytest

PAGE = (Path(__file__).resolve().parent.parent / "docs/wire.md").read_text(encoding="utf-8")


def test_the_code_on_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/wire.md", "exec"), names)
    message = msgpack.unpackb(names["frames"][0])
    assert (len(message), len(message[6])) == (21, 7)
    assert "0.31" in capsys.readouterr().out
    request = names["fastmm"].EngineCoreRequest("r", [1], prompt_embeds=torch.ones(1000), arrival_time=1.0)
    frames = names["encoder"].encode(request)
    assert len(frames) == 1
    assert torch.equal(names["decoder"].decode(frames).prompt_embeds, torch.ones(1000))

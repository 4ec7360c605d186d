"""What docs/server.md shows is what happens."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parent.parent / "docs/server.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_block_runs_and_prints_what_the_next_block_says() -> None:
    blocks = [(match[1], match[2]) for match in BLOCK.finditer(PAGE)]
    names: dict[str, object] = {}
    said = io.StringIO()
    compared = 0
    for language, source in blocks:
        if language == "python":
            with contextlib.redirect_stdout(said):
                exec(compile(source, "docs/server.md", "exec"), names)
        else:
            assert said.getvalue() == source
            said = io.StringIO()
            compared += 1
    assert compared == 2

"""What docs/engine.md shows is what happens."""

from __future__ import annotations

import contextlib
import io
import re
import socket
from pathlib import Path

PAGE = (Path(__file__).resolve().parent.parent / "docs/engine.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_block_runs_and_prints_what_the_next_block_says() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    names: dict[str, object] = {}
    said = io.StringIO()
    compared = 0
    for language, source in BLOCK.findall(PAGE):
        if language == "python":
            with contextlib.redirect_stdout(said):
                exec(compile(source.replace("5570", port), "docs/engine.md", "exec"), names)
        else:
            assert said.getvalue() == source
            said = io.StringIO()
            compared += 1
    assert compared == 1

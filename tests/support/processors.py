"""Processors for tests of the pool. What they do is asked for in the work's text; other processes import this module too."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fastmm.processors import Processed, ProcessedItem, Tokenizer, Work

IMAGE = np.zeros((4, 4, 3), np.uint8)
LONG = 60.0  # what never takes that long


def work(rid: str, text: str = "rows 1", **more) -> Work:
    return Work(request_id=rid, text=text, images=[IMAGE], **more)


class Obedient:
    """``rows N``: a result of so many rows; ``raise``, ``exit``, ``die``, ``hang FILE``, ``wait FILE``, ``unpicklable``..."""

    schema = None

    def __init__(self) -> None:
        self.pid = os.getpid()

    def process(self, work: Work, tokenizer: Tokenizer | None) -> Processed:
        command, _, argument = (work.text or "rows 1").partition(" ")
        return getattr(self, f"do_{command}")(work, argument)

    def do_rows(self, work: Work, argument: str) -> Processed:
        items = [image_item(int(argument), i) for i in range(len(work.images))]
        return Processed(prompt_token_ids=[0] + [7] * len(items) + [os.getpid()], items=items)

    def do_torch(self, work: Work, argument: str) -> Processed:
        import torch

        item = image_item(1, 0)
        values = torch.full((int(argument), 1024), 3.0)
        return Processed(
            prompt_token_ids=[0, 7, os.getpid()],
            items=[ProcessedItem(**{**fields(item), "features": {"pixel_values": values}})],
        )

    def do_media(self, work: Work, argument: str) -> Processed:
        return Processed(prompt_token_ids=[0, 7, sum(bytes(work.images[0].data)) % 1000], items=[image_item(1, 0)])

    def do_raise(self, work: Work, argument: str) -> Processed:
        raise ValueError(f"asked to raise {argument}")

    def do_awkward(self, work: Work, argument: str) -> Processed:
        raise Awkward(1, 2)

    def do_exit(self, work: Work, argument: str) -> Processed:
        sys.exit(3)

    def do_interrupt(self, work: Work, argument: str) -> Processed:
        raise KeyboardInterrupt

    def do_die(self, work: Work, argument: str) -> Processed:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")

    def do_wait(self, work: Work, argument: str) -> Processed:
        """Says that it has begun, and goes on once ``FILE.go`` is there."""
        Path(f"{argument}.tmp-{os.getpid()}-{threading.get_ident()}").write_text(str(os.getpid()))
        os.rename(f"{argument}.tmp-{os.getpid()}-{threading.get_ident()}", f"{argument}.begun")
        until(lambda: os.path.exists(f"{argument}.go"), 120)
        return self.do_rows(work, "1")

    def do_bad(self, work: Work, argument: str) -> Processed:
        return Processed(prompt_token_ids=[0, 7], items=[])


def image_item(rows: int, offset: int) -> ProcessedItem:
    values = np.full((rows, 1024), 3.0, np.float32)
    return ProcessedItem(modality="image", features={"pixel_values": values}, hash="ab" * 8, spans=[(1 + offset, 1 + offset)])


def fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


class Awkward(Exception):
    """Pickles, and does not unpickle: the standard executor for processes breaks over it."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("awkward")


class Unloadable(Obedient):
    def __init__(self) -> None:
        raise RuntimeError("no weights here")


class Deadly(Obedient):
    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def until(done: Callable[[], bool], timeout: float = 30.0) -> None:
    """Poll for what another process or thread does; fail, do not hang, when it does not."""
    end = time.monotonic() + timeout
    while not done():
        if time.monotonic() > end:
            raise AssertionError("it did not happen in time")
        time.sleep(0.002)


class Gate:
    """The test's side of ``wait FILE``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = f"wait {path}"

    def begun(self) -> int:
        """Waits until a worker is at it; its pid."""
        until(lambda: os.path.exists(f"{self.path}.begun"))
        return int(Path(f"{self.path}.begun").read_text())

    def open(self) -> None:
        Path(f"{self.path}.go").touch()


def segments() -> list[str]:
    """This process's segments, and what belongs to them, that have a name."""
    from fastmm import shm

    return [name for name in os.listdir("/dev/shm") if name.startswith(shm.process_key())]


def gates(tmp_path: Path, n: int) -> list[Gate]:
    return [Gate(tmp_path / f"gate-{i}") for i in range(n)]

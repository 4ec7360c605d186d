"""What a forked child finds, told within a time limit."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

from .clients import LIMIT


def in_child(act: Callable[[], Any]) -> str:
    """What `act` returned or raised in a forked child, as text. A child that hangs shows where, and is an error."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            faulthandler.dump_traceback_later(LIMIT, file=sys.__stderr__, exit=True)
            try:
                told = repr(act())
            except BaseException as error:
                told = f"{type(error).__name__}: {error}"
            os.write(writes, told.encode())
        finally:
            os._exit(0)
    os.close(writes)
    try:
        if not select.select([reads], [], [], LIMIT + 5)[0]:
            raise AssertionError("the forked child hangs")
        told = os.read(reads, 1 << 16).decode()
        if not told:
            raise AssertionError(f"the forked child said nothing: it hung for {LIMIT:g} s, or died")
        return told
    finally:
        os.close(reads)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

"""Counting memory: what is resident, the peak, and a process in which a large allocation fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_nbytes() -> int:
    """Of this process, now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE


def _status_nbytes(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":")) << 10


class PeakOverStart:
    """``with PeakOverStart() as peak: ...`` then ``peak.nbytes``: how far resident memory rose over what it was."""

    nbytes = 0

    def __enter__(self) -> PeakOverStart:
        self.start = _status_nbytes("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts anew (proc(5))
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = max(0, _status_nbytes("VmHWM") - self.start)


class NoRoomFor:
    """Inside, the process gets less than `nbytes` of fresh address space: whoever asks for a block of that size fails.

    malloc takes a block of 32 MiB or more straight from the kernel, always, so nothing large can come from what lies idle.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __enter__(self) -> None:
        import resource

        self.before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_status_nbytes("VmSize") + self.nbytes, self.before[1]))

    def __exit__(self, *_: object) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, self.before)


def in_fresh_process(code: str, *, timeout: float = 120) -> str:
    """Run code with the tests on its path; its output. Fails with what it wrote on stderr."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    }
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout

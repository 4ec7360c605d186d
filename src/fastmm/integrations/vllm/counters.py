"""How often what was done in this process: in memory, and in a file that others can read when somebody asked for one.

With ``FASTMM_VLLM_COUNTERS=DIRECTORY`` every process keeps its counters in ``DIRECTORY/<process id>.counters``, a small
file mapped into memory: it is there to be read whatever end the process comes to. This is how one sees, and the tests
prove, that fastmm was at work in each process.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

NAMES = ("encoded", "decoded", "faults", "differences", "refused", "answered", "dropped", "encoders", "decoders")
_LABEL_NBYTES = 64
_NBYTES = _LABEL_NBYTES + 8 * len(NAMES)

encoded, decoded, faults, differences, refused, answered, dropped, encoders, decoders = range(len(NAMES))
cells: Any = [0] * len(NAMES)  # or a view of the mapped file
_mapped: mmap.mmap | None = None


def add(counter: int) -> None:
    """One more. Not exact when two threads do it in the same instant; never torn."""
    cells[counter] += 1


def values() -> dict[str, int]:
    """The counters of this process by name."""
    return dict(zip(NAMES, cells))


def directory() -> str:
    """Where the counters are to be kept, or nothing."""
    return os.environ.get("FASTMM_VLLM_COUNTERS", "")


def open_file() -> None:
    """Keep this process's counters in its file from now on; a forked child begins one of its own."""
    global cells, _mapped
    if not (place := directory()):
        return
    os.makedirs(place, exist_ok=True)
    descriptor = os.open(os.path.join(place, f"{os.getpid()}.counters"), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.ftruncate(descriptor, _NBYTES)
        _mapped = mmap.mmap(descriptor, _NBYTES)
    finally:
        os.close(descriptor)
    cells = memoryview(_mapped)[_LABEL_NBYTES:].cast("Q")
    name_process()


def name_process() -> None:
    """Write this process's name into its file. A forked one does not have its own yet when the file is made."""
    from multiprocessing import current_process

    if _mapped is not None:
        _mapped[:_LABEL_NBYTES] = current_process().name.encode()[:_LABEL_NBYTES].ljust(_LABEL_NBYTES)


def read_directory(place: str | Path) -> dict[int, dict[str, Any]]:
    """The counters of every process that kept them there, by process id, with the process's name as ``process``."""
    found = {}
    for file in Path(place).glob("*.counters"):
        content = file.read_bytes()
        if len(content) == _NBYTES:
            numbers = struct.unpack(f"={len(NAMES)}Q", content[_LABEL_NBYTES:])
            found[int(file.stem)] = {
                "process": content[:_LABEL_NBYTES].decode(errors="replace").strip(),
                **dict(zip(NAMES, numbers)),
            }
    return found

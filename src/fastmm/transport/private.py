"""A directory for ipc sockets that only its user can enter."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# sockaddr_un.sun_path of Linux holds 108 bytes, the closing NUL included; the rest is left to a socket's own name.
_LONGEST_PATH_NBYTES = 107
_LONGEST_NAME_NBYTES = 16


@contextmanager
def private_directory() -> Iterator[Path]:
    """A new directory of mode 0700, removed with all it holds in the end.

    It lies in the system's directory for temporary files, or in ``/tmp`` where that path is too long for a Unix socket.
    """
    with tempfile.TemporaryDirectory(prefix="fastmm-") as first:
        if len(first.encode()) + 1 + _LONGEST_NAME_NBYTES <= _LONGEST_PATH_NBYTES:
            yield Path(first)
            return
    with tempfile.TemporaryDirectory(prefix="fastmm-", dir="/tmp") as second:
        yield Path(second)

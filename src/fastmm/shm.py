"""Segments of shared memory: room reserved up front, readers counted, orphans reclaimed.

A segment is a file in ``/dev/shm`` (a temporary directory where there is none) that only its user can open. Its name goes
with the last reader that was declared, its memory with the last view of it, in whatever process and however that ended. What
a killed process leaves behind is a name that nobody will read: the name says whose it is, and `sweep` removes it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import secrets
import struct
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ._native.mapping import Mapping
from .errors import SharedMemoryError, SharedMemoryFull

__all__ = ["ALIGNMENT", "Segment", "default_directory", "host_key", "is_alive", "new_name", "process_key", "sweep", "unlink"]

# Magic, readers that have yet to come, bytes of payload. The payload begins at the next multiple of a cache line.
_HEADER = struct.Struct("<8sIxxxxQ")
_MAGIC = b"fastmm\x00\x01"
ALIGNMENT = 64

# fastmm-<user>-<pid name space>-<pid>-<start of the process>-<random>
# A suffix is for what belongs to a segment and is none itself.
_NAME = re.compile(r"fastmm-(\d+)-(\d+)-(\d+)-(\d+)-[0-9a-f]+(?:\.\w+)?")
_PF_EXITING = 0x4  # include/linux/sched.h
_IOV_MAX = 512  # buffers in one call; Linux takes 1024


@functools.lru_cache(maxsize=1)
def default_directory() -> str:
    """Where segments lie: ``/dev/shm``, or a temporary directory on systems without."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def _start_of(pid: int) -> int | None:
    """When a process started, in ticks since boot; None when there is no such process, 0 where nobody says."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        if os.path.isdir("/proc/self"):
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return 0
    except OSError:
        return 0
    # The name of the program, in parentheses, may hold anything.
    fields = stat[stat.rindex(b")") + 2 :].split()
    # A process that was killed closes its files, which others notice, before it is a zombie: the flag says so from the start.
    if fields[0] in (b"Z", b"X") or int(fields[6]) & _PF_EXITING:
        return None
    return int(fields[19])


def is_alive(pid: int, start: int) -> bool:
    """Whether the process of this pid that started then has not ended; a start of 0 is not known."""
    found = _start_of(pid)
    return found is not None and (found == start or 0 in (found, start))


def _pid_space() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


_process: tuple[int, str] = (0, "")


def process_key() -> str:
    """This process, as names of segments begin: user, pid name space, pid and time of start. No two are alike."""
    global _process
    pid = os.getpid()
    if _process[0] != pid:  # the first time, or after a fork
        _process = (pid, f"fastmm-{os.getuid()}-{_pid_space()}-{pid}-{_start_of(pid) or 0}")
    return _process[1]


def host_key(directory: str | None = None) -> str:
    """What two processes have in common when one can attach a segment of the other: kernel, user, directory."""
    directory = directory or default_directory()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = os.uname().nodename
    found = os.stat(directory)
    return f"{boot}/{os.getuid()}/{found.st_dev}:{found.st_ino}"


def new_name() -> str:
    """A name that nobody else has, and that says whose it is."""
    return f"{process_key()}-{secrets.token_hex(8)}"


def sweep(directory: str | None = None) -> int:
    """Remove the segments of this user whose owner has ended; how many there were.

    Of processes in other name spaces (a container that shares ``/dev/shm``) nothing is known, so theirs stay.
    """
    directory = directory or default_directory()
    user, space = os.getuid(), _pid_space()
    alive: dict[tuple[int, int], bool] = {}
    removed = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is None:
                continue
            owner_user, owner_space, pid, start = map(int, match.groups())
            if (owner_user, owner_space) != (user, space):
                continue
            if (pid, start) not in alive:
                alive[pid, start] = is_alive(pid, start)
            if not alive[pid, start]:
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    os.unlink(entry.path)
                    removed += 1
    return removed


def _refusal(error: OSError, name: str, nbytes: int, directory: str) -> SharedMemoryError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
        found: SharedMemoryError = SharedMemoryFull(f"no room for a segment of {nbytes} bytes in {directory}")
    elif error.errno == errno.ENOENT:
        found = SharedMemoryError(f"there is no segment {name}: it was read by all its readers, or its owner removed it")
    else:
        found = SharedMemoryError(f"segment {name} of {nbytes} bytes in {directory}: {error.strerror or error}")
    found.errno = error.errno
    return found


class Segment:
    """One segment, seen by one process: as its owner (`create`) or as one of its readers (`attach`).

    Attributes
    ----------
    name, directory
        Where it is.
    nbytes
        Bytes of payload.
    buffer
        The payload, a writable view. Views of it may be kept: the memory is unmapped when the last one is let go.

    Notes
    -----
    As a context manager, `close` at the end; the owner also removes the name, so that no reader can come any more. Not to be
    used by two threads at once.
    """

    __slots__ = ("_mapping", "directory", "name", "nbytes", "owner")

    def __init__(self, name: str, directory: str, nbytes: int, mapping: Mapping | None, *, owner: bool) -> None:
        self.name = name
        self.directory = directory
        self.nbytes = nbytes
        self.owner = owner
        self._mapping = mapping

    @classmethod
    def create(
        cls,
        nbytes: int,
        *,
        readers: int = 1,
        name: str | None = None,
        directory: str | None = None,
        payload: Sequence[Any] | None = None,
    ) -> Segment:
        """Make a segment. All its room is reserved here: nothing fails, or ends the process, when it is written to.

        Parameters
        ----------
        nbytes
            Bytes of payload, at least 0.
        readers
            How many times it can be attached. The last one takes the name away.
        name
            One that `new_name` made, here or in another process, which then is the owner that `sweep` asks for. None: a new
            one. A segment that has the name is replaced.
        payload
            Buffers, `nbytes` long together, that the segment is filled with from its beginning. They are written, not
            mapped, so the segment has no `buffer`: this is the quick way where nobody writes to it afterwards.

        Raises
        ------
        SharedMemoryFull
            There is no room. Nothing was made.
        SharedMemoryError
            Another refusal of the system's.
        """
        if nbytes < 0 or readers < 1:
            raise SharedMemoryError(f"expected at least 0 bytes and 1 reader, got {nbytes} and {readers}")
        name = name or new_name()
        directory = directory or default_directory()
        path = os.path.join(directory, name)
        header = _HEADER.pack(_MAGIC, readers, nbytes).ljust(ALIGNMENT, b"\x00")
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = -1
        try:
            try:
                fd = os.open(path, flags, 0o600)
            except FileExistsError:  # of an earlier try that has ended
                os.unlink(path)
                fd = os.open(path, flags, 0o600)
            mapping = None
            if payload is None:
                _reserve(fd, ALIGNMENT + nbytes)
                _write(fd, (header,))
                mapping = Mapping(fd, ALIGNMENT + nbytes)
            else:  # a write that finds no room is an error, too, and takes half the time of reserving it first
                _write(fd, (header, *payload))
        except OSError as error:
            if fd >= 0:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            raise _refusal(error, name, nbytes, directory) from None
        except BaseException:
            os.unlink(path)
            raise
        finally:
            if fd >= 0:
                os.close(fd)
        return cls(name, directory, nbytes, mapping, owner=True)

    @classmethod
    def attach(cls, name: str, *, directory: str | None = None) -> Segment:
        """Be one of the declared readers of a segment.

        Raises
        ------
        SharedMemoryError
            It is not there (any more), it is no segment, or as many readers as were declared have come.
        """
        import fcntl

        directory = directory or default_directory()
        path = os.path.join(directory, name)
        if os.path.basename(name) != name:
            raise SharedMemoryError(f"a segment's name is that of a file, not {name!r}")
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            fcntl.flock(fd, fcntl.LOCK_EX)  # the kernel opens it again when a reader is killed here
            head = os.pread(fd, _HEADER.size, 0)
            magic, left, nbytes = _HEADER.unpack(head) if len(head) == _HEADER.size else (b"", 0, 0)
            found = os.fstat(fd)
            if magic != _MAGIC or found.st_size < ALIGNMENT + nbytes or found.st_uid != os.getuid():
                raise SharedMemoryError(f"{name} is no segment of this user's")
            if left == 0:
                raise SharedMemoryError(f"segment {name} had all its readers")
            mapping = Mapping(fd, ALIGNMENT + nbytes)
            if left == 1:
                os.unlink(path)
            os.pwrite(fd, _HEADER.pack(_MAGIC, left - 1, nbytes), 0)
        except SharedMemoryError:
            raise
        except OSError as error:
            raise _refusal(error, name, 0, directory) from None
        finally:
            if fd >= 0:
                os.close(fd)
        return cls(name, directory, nbytes, mapping, owner=False)

    @property
    def buffer(self) -> memoryview:
        if self._mapping is None:
            raise SharedMemoryError(f"segment {self.name} is not mapped here")
        return memoryview(self._mapping)[ALIGNMENT:]

    def close(self) -> None:
        """Let go of the memory here, as soon as no view of it is left. May be called twice."""
        self._mapping = None

    def unlink(self) -> bool:
        """Remove the name: readers that have come keep the memory, others come too late. Whether there was one."""
        return unlink(self.name, directory=self.directory)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
        if self.owner:
            self.unlink()

    def __repr__(self) -> str:
        return f"<fastmm segment {self.name} of {self.nbytes} bytes>"


def unlink(name: str, *, directory: str | None = None) -> bool:
    """Remove a segment's name, whoever made it. Whether there was one."""
    try:
        os.unlink(os.path.join(directory or default_directory(), name))
    except FileNotFoundError:
        return False
    return True


def _reserve(fd: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    else:
        os.ftruncate(fd, nbytes)


def _write(fd: int, buffers: Iterable[Any]) -> None:
    """All of the buffers one after the other, from the beginning of the file. The GIL is not held meanwhile."""
    left = [memoryview(buffer).cast("B") for buffer in buffers if len(memoryview(buffer).cast("B"))]
    offset = 0
    while left:
        written = os.pwritev(fd, left[:_IOV_MAX], offset)
        offset += written
        done = 0
        while done < len(left) and written >= len(left[done]):
            written -= len(left[done])
            done += 1
        del left[:done]
        if written:
            left[0] = left[0][written:]

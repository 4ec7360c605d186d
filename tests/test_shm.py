"""Segments of shared memory: room up front, readers counted, what killed processes leave is reclaimed."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from fastmm import FastmmError, shm
from fastmm.errors import SharedMemoryError, SharedMemoryFull
from fastmm.shm import Segment


@pytest.fixture
def directory(tmp_path):
    """A place where every file is this test's own, and none may be left."""
    yield str(tmp_path)
    assert os.listdir(tmp_path) == []


def python(source: str, *args: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), *args],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        **options,
    )


def mapped(name: str) -> bool:
    """Whether this process maps a file of that name, removed or not."""
    return name in Path("/proc/self/maps").read_text()


def test_what_one_process_writes_another_reads(directory):
    with Segment.create(1000, directory=directory) as segment:
        segment.buffer[:3] = b"abc"
        reader = python(
            """
            import sys
            from fastmm.shm import Segment
            segment = Segment.attach(sys.argv[1], directory=sys.argv[2])
            print(bytes(segment.buffer[:3]).decode(), segment.nbytes)
            segment.buffer[0:1] = b"X"
            """,
            segment.name,
            directory,
        )
        assert reader.communicate(timeout=60)[0].split() == ["abc", "1000"]
        assert bytes(segment.buffer[:3]) == b"Xbc"


def test_by_default_segments_lie_in_shared_memory():
    with Segment.create(10) as segment:
        assert Path("/dev/shm", segment.name).exists()
    assert not Path("/dev/shm", segment.name).exists()


def test_names_are_private_to_the_user(directory):
    with Segment.create(10, directory=directory) as segment:
        found = os.stat(Path(directory, segment.name))
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_uid == os.getuid()


def test_a_payload_is_written_in_one_go_from_many_buffers(directory):
    parts = [bytes([i % 256]) * (i % 7) for i in range(3000)]
    with Segment.create(sum(map(len, parts)), payload=parts, directory=directory) as segment:
        with pytest.raises(SharedMemoryError, match="not mapped"):
            segment.buffer
        assert bytes(Segment.attach(segment.name, directory=directory).buffer) == b"".join(parts)


def test_the_payload_begins_on_a_cache_line(directory):
    with Segment.create(64, directory=directory) as segment:
        assert np.frombuffer(segment.buffer, np.uint8).ctypes.data % shm.ALIGNMENT == 0


def test_an_empty_segment_is_a_segment(directory):
    Segment.create(0, directory=directory, payload=[]).close()
    (name,) = os.listdir(directory)
    assert Segment.attach(name, directory=directory).nbytes == 0


# --- readers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_the_name_goes_with_the_last_declared_reader(directory, readers):
    segment = Segment.create(10, readers=readers, directory=directory)
    path = Path(directory, segment.name)
    for _ in range(readers):
        assert path.exists()
        Segment.attach(segment.name, directory=directory).close()
    assert not path.exists()
    with pytest.raises(SharedMemoryError, match="all its readers"):
        Segment.attach(segment.name, directory=directory)
    assert segment.unlink() is False


def test_two_readers_of_one_handle_both_read_and_the_memory_goes_after_the_last(directory):
    owner = Segment.create(4096, readers=2, directory=directory)
    owner.buffer[:4] = b"data"
    owner.close()
    first = Segment.attach(owner.name, directory=directory)
    first_view = first.buffer
    first.close()
    assert bytes(first_view[:4]) == b"data"
    first_view.release()
    assert not mapped(owner.name)  # the first reader is done, ...
    second = Segment.attach(owner.name, directory=directory)
    assert bytes(second.buffer[:4]) == b"data"  # ... and the second finds the memory all the same
    assert mapped(owner.name)
    second.close()
    assert not mapped(owner.name)


def test_the_memory_lives_as_long_as_any_view(directory):
    segment = Segment.create(8000, directory=directory)
    segment.buffer[:] = bytes(range(250)) * 32
    reader = Segment.attach(segment.name, directory=directory)
    array = np.frombuffer(reader.buffer, np.uint8)[1000:2000]
    segment.close()
    reader.close()
    del segment
    assert bytes(array) == bytes(range(250)) * 4
    assert mapped(reader.name)
    del array
    assert not mapped(reader.name)


def test_many_readers_at_once_are_counted_exactly(directory):
    segment = Segment.create(10, readers=20, directory=directory)
    came, barrier = [], threading.Barrier(30)

    def read() -> None:
        barrier.wait(30)
        try:
            Segment.attach(segment.name, directory=directory)
        except SharedMemoryError:
            came.append(False)
        else:
            came.append(True)

    threads = [threading.Thread(target=read) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(came) == [False] * 10 + [True] * 20


def test_mappings_hold_no_descriptor(directory):
    before = len(os.listdir("/proc/self/fd"))
    kept = []
    for _ in range(50):
        segment = Segment.create(10, directory=directory)
        kept.append(Segment.attach(segment.name, directory=directory))
    assert len(os.listdir("/proc/self/fd")) == before


# --- no room ----------------------------------------------------------------------------------------------------------


def test_no_room_is_an_error_that_can_be_caught_and_nothing_is_left(directory, monkeypatch):
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryFull, match="no room for a segment of 100 bytes") as caught:
        Segment.create(100, directory=directory)
    assert isinstance(caught.value, FastmmError)
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.ENOSPC


def test_a_payload_that_finds_no_room_half_way_leaves_nothing(directory, monkeypatch):
    written = []
    write = os.pwritev

    def nearly_full(fd: int, buffers: list, offset: int) -> int:
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(write(fd, buffers[:1], offset))
        return written[0]

    monkeypatch.setattr(os, "pwritev", nearly_full)
    with pytest.raises(SharedMemoryFull):
        Segment.create(100, directory=directory, payload=[bytes(50), bytes(50)])


SMALL = """
    import subprocess, sys, os, resource
    from pathlib import Path
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"], check=True, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        print("skip"); sys.exit()
    from fastmm.errors import SharedMemoryFull
    from fastmm.shm import Segment
    try:
        Segment.create(100 << 20)
    except SharedMemoryFull as error:
        print(error)
    assert os.listdir("/dev/shm") == []
    kept = Segment.create(50 << 20)
    try:
        Segment.create(50 << 20, payload=[bytes(50 << 20)])
    except SharedMemoryFull as error:
        print("full")
    view = kept.buffer
    view[-1] = 1  # its room was reserved: writing never ends the process
    kept.close(); kept.unlink(); view.release()
    Segment.create(60 << 20).buffer[:] = bytes(60 << 20)
    print("room again")
"""


def small_shm(source: str) -> list[str]:
    """Run a program that sees a ``/dev/shm`` of 64 MiB; skip where a user may not mount one."""
    child = subprocess.run(
        [
            "unshare",
            "--mount",
            *([] if os.getuid() == 0 else ["--user", "--map-root-user"]),
            sys.executable,
            "-c",
            textwrap.dedent(source),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if child.stdout.startswith("skip") or "unshare" in child.stderr:
        pytest.skip("no mount name space of one's own here")
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


def test_a_small_dev_shm_and_a_large_tensor():
    lines = small_shm(SMALL)
    assert lines == ["no room for a segment of 104857600 bytes in /dev/shm", "full", "room again"]


# --- killed processes -------------------------------------------------------------------------------------------------

HOLDER = """
    import sys
    from fastmm.shm import Segment
    if sys.argv[3] == "attach":
        segment = Segment.attach(sys.argv[1], directory=sys.argv[2])
        view = segment.buffer
    else:
        segments = [Segment.create(1000, directory=sys.argv[2]) for _ in range(3)]
        segments.append(Segment.create(1000, readers=2, directory=sys.argv[2]))
    print("ready", flush=True)
    sys.stdin.read()
"""


def killed(*args: str) -> subprocess.Popen:
    holder = python(HOLDER, *args)
    assert holder.stdout.readline() == "ready\n"
    holder.send_signal(signal.SIGKILL)
    assert holder.wait(30) == -signal.SIGKILL
    return holder


def test_a_killed_reader_gives_its_memory_back(directory):
    segment = Segment.create(1000, readers=2, directory=directory)
    killed(segment.name, directory, "attach")
    Segment.attach(segment.name, directory=directory)  # the other reader is not disturbed, and is the last
    assert not Path(directory, segment.name).exists()


def test_what_a_killed_owner_leaves_is_swept(directory):
    holder = killed("-", directory, "create")
    names = os.listdir(directory)
    assert len(names) == 4
    assert all(f"-{holder.pid}-" in name for name in names)
    assert shm.sweep(directory) == 4
    assert shm.sweep(directory) == 0


def test_an_owner_that_ended_and_was_not_waited_for_counts_as_dead(directory):
    holder = python(HOLDER, "-", directory, "create")
    assert holder.stdout.readline() == "ready\n"
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert shm.sweep(directory) == 4
    holder.wait(30)


def test_sweep_leaves_the_living_and_what_is_not_ours_alone(directory):
    holder = python(HOLDER, "-", directory, "create")
    assert holder.stdout.readline() == "ready\n"
    own = Segment.create(10, directory=directory)
    space, pid = own.name.split("-")[2:4]
    others = [
        "another-file",
        f"fastmm-{os.getuid()}-{space}-x-1-00",
        f"fastmm-{os.getuid() + 1}-{space}-999999-1-00",  # another user's
        f"fastmm-{os.getuid()}-{int(space) + 1}-999999-1-00",  # of another pid name space: nothing is known of it
    ]
    for name in others:
        Path(directory, name).touch()
    assert shm.sweep(directory) == 0
    recycled = f"fastmm-{os.getuid()}-{space}-{pid}-1-00"  # our pid, of a process that had it before us
    Path(directory, recycled).touch()
    assert shm.sweep(directory) == 1
    for name in others:
        os.unlink(Path(directory, name))
    own.unlink()
    holder.communicate(timeout=30)  # ends, and leaves its names
    assert shm.sweep(directory) == 4


def test_a_name_made_here_and_used_by_another_process_is_ours(directory):
    """The owner is who made the name: a worker that is killed leaves what its parent knows, and removes."""
    name = shm.new_name()
    Segment.create(10, name=name, directory=directory).close()
    Segment.create(20, name=name, directory=directory).close()  # a second try replaces what is left of the first
    assert Segment.attach(name, directory=directory).nbytes == 20


def test_processes_are_told_apart_after_a_fork():
    before = shm.process_key()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, shm.process_key().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 200).decode() not in ("", before)
    os.close(read)
    os.close(write)
    assert shm.process_key() == before


def test_processes_of_one_host_have_one_key(directory):
    child = python("from fastmm import shm; print(shm.host_key())")
    assert child.communicate(timeout=60)[0].strip() == shm.host_key()
    assert shm.host_key(directory) != shm.host_key()


# --- what is no segment -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"fastmm", b"x" * 200, b"fastmm\x00\x01" + b"\x01\x00\x00\x00\x00\x00\x00\x00" + b"\xff" * 8 + b"\x00" * 40],
)
def test_attach_refuses_what_is_no_segment(directory, content):
    path = Path(directory, "fastmm-x")
    path.write_bytes(content)
    with pytest.raises(SharedMemoryError):
        Segment.attach("fastmm-x", directory=directory)
    assert path.exists()
    path.unlink()


def test_attach_refuses_paths_and_links(directory):
    with pytest.raises(SharedMemoryError, match="name is that of a file"):
        Segment.attach("../x", directory=directory)
    with Segment.create(10, directory=directory) as segment:
        link = Path(directory, "link")
        link.symlink_to(segment.name)
        with pytest.raises(SharedMemoryError):
            Segment.attach("link", directory=directory)
        link.unlink()


@pytest.mark.parametrize(("nbytes", "readers"), [(-1, 1), (10, 0)])
def test_sizes_and_readers_are_checked(nbytes, readers):
    with pytest.raises(SharedMemoryError):
        Segment.create(nbytes, readers=readers)

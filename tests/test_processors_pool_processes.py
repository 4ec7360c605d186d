"""ProcessorPool over processes, which are really killed: one failed request, no lost worker, nothing left in shared memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.processors import Deadly, Gate, Obedient, Unloadable, segments, until

from fastmm import shm
from fastmm.errors import ExtensionError, LimitError, ProcessorDied, ProcessorError, ProcessorTimeout
from fastmm.processors import Budgets, Processed, Work
from fastmm.processors.carry import Carrier
from fastmm.processors.pool import ProcessorPool
from fastmm.processors.store import ResultStore

pytestmark = pytest.mark.no_asan  # many interpreters start

IMAGE = np.zeros((4, 4, 3), np.uint8)
LONG = 120.0


def work(rid: str, text: str = "rows 1", **more) -> Work:
    return Work(request_id=rid, text=text, images=[IMAGE], **more)


def children() -> set[int]:
    """Processes of this one that have not ended; the helper that multiprocessing keeps is none of ours."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
            command = Path(stat.parent, "cmdline").read_bytes()
        except OSError:
            continue
        state, parent = text.rpartition(")")[2].split()[:2]
        if (
            int(parent) == os.getpid()
            and state not in "ZX"
            and b"resource_tracker" not in command
            and b"forkserver" not in command
        ):
            found.add(int(stat.parent.name))
    return found


@pytest.fixture(autouse=True)
def nothing_is_left():
    """After every test: no segment with a name, and no process."""
    before = children()
    yield
    until(lambda: not segments())
    until(lambda: not children() - before)


@pytest.fixture
def pool():
    with ProcessorPool(Obedient, executor="processes", workers=2, store=ResultStore()) as pool:
        yield pool


def maps_of_segments() -> list[range]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/fastmm-" in line:
            begin, end = re.match(r"([0-9a-f]+)-([0-9a-f]+)", line).groups()
            found.append(range(int(begin, 16), int(end, 16)))
    return found


# --- the way there and back -------------------------------------------------------------------------------------------


def test_requests_are_processed_in_other_processes(pool):
    pool.start(LONG)
    pids = set()
    for future in [pool.submit(work(str(i))) for i in range(40)]:
        pids.add(future.result(LONG).prompt_token_ids[-1])
    assert os.getpid() not in pids
    assert pids <= children()
    assert sorted(pool.store.drain()) == sorted(map(str, range(40)))


@pytest.mark.parametrize("text", ["rows 1000", "torch 1000"])
def test_a_large_result_is_not_copied_in_this_process(pool, text):
    if text.startswith("torch"):
        pytest.importorskip("torch")
    result = pool.submit(work("a", text)).result(LONG)
    values = result.items[0].features["pixel_values"]
    address = values.data_ptr() if text.startswith("torch") else values.ctypes.data
    assert values.sum() == 3.0 * 1000 * 1024
    assert any(address in mapping and address + values.nbytes - 1 in mapping for mapping in maps_of_segments())
    assert segments() == []  # the name went when the result came
    pool.store.take("a")
    del result, values
    until(lambda: not maps_of_segments())  # and the memory with the last view


def test_large_media_cross_by_shared_memory_and_are_read_where_they_lie(pool, monkeypatch):
    image = os.urandom(3_000_000)
    packed = []
    pack = Carrier.pack
    monkeypatch.setattr(
        Carrier, "pack", lambda self, *args, **options: packed.append(pack(self, *args, **options)) or packed[-1]
    )
    pool_ = ProcessorPool(Obedient, executor="processes", workers=1, budgets=Budgets(max_pixels=None))
    with pool_:
        request = Work(request_id="a", text="media", images=["https://example.org/a.png"], prefetched=[image])
        assert pool_.submit(request).result(LONG).prompt_token_ids[2] == sum(image) % 1000
    assert packed[0].name is not None
    assert packed[0].frames == ()


def test_no_room_in_shared_memory_is_slower_and_works(tmp_path):
    """A disk quota stands in for a full /dev/shm: both sides fall back to the executor's own pipe."""
    full = tmp_path / "full"
    full.mkdir()
    with ProcessorPool(Obedient, executor="processes", workers=1, carrier=NoRoom(directory=str(full))) as pool:
        result = pool.submit(work("a", "rows 500")).result(LONG)
        assert result.items[0].features["pixel_values"].sum() == 3.0 * 500 * 1024
    assert os.listdir(full) == []


class NoRoom(Carrier):
    """As `Carrier` is where a write says that there is no space left."""

    def pack(self, value, *, name=None, shared=True):
        write = os.pwritev

        def refuse(fd, buffers, offset):
            raise OSError(28, "No space left on device")

        os.pwritev = refuse
        try:
            parcel = super().pack(value, name=name, shared=shared)
        finally:
            os.pwritev = write
        assert parcel.name is None
        return parcel

    def __reduce__(self):
        return _no_room, (self.directory,)


def _no_room(directory):
    return NoRoom(directory=directory)


def test_errors_keep_their_class_and_what_they_say(pool):
    error = pool.submit(work("a", "raise here")).exception(LONG)
    assert type(error) is ProcessorError
    assert "asked to raise here" in str(error)
    assert "do_raise" in str(error.__cause__)  # the traceback over there
    error = pool.submit(work("b", extensions={"multimodal_x": 1})).exception(LONG)
    assert type(error) is ExtensionError
    assert error.http_status == 400
    assert len(pool.store) == 0
    with ProcessorPool(Obedient, executor="processes", workers=1, budgets=Budgets(max_output_nbytes=10)) as small:
        assert type(small.submit(work("c")).exception(LONG)) is LimitError


@pytest.mark.parametrize("text", ["awkward", "exit", "interrupt", "raise it", "bad"])
def test_no_exception_costs_a_worker(pool, text):
    pool.start(LONG)
    before = children()
    for i in range(3):
        with pytest.raises(ProcessorError):
            pool.submit(work(str(i), text)).result(LONG)
    assert pool.submit(work("after")).result(LONG)
    assert children() == before
    assert pool.counters["replaced"] == 0
    assert sorted(pool.store.drain()) == ["after"]


def test_what_cannot_cross_fails_its_request(pool):
    with pytest.raises(ProcessorError, match=r"cannot cross"):
        pool.submit(Work(request_id="a", images=[object()])).result(LONG)
    pool.submit(work("b")).result(LONG)


def test_a_processor_object_and_a_name_work_as_well():
    for processor in (Obedient(), "support.processors:Obedient"):
        with ProcessorPool(processor, executor="processes", workers=1) as pool:
            assert pool.submit(work("a")).result(LONG)


@pytest.mark.parametrize("hashes", [["\ud800"], [10**30], [None], [{1}], [object()], {"a": 1}, 5], ids=repr)
def test_a_callers_hash_is_never_a_reason_to_refuse(hashes):
    results = []
    for executor in (None, "processes"):
        with ProcessorPool(Obedient, executor=executor, workers=1) as pool:
            results.append(pool.submit(work("a", hashes=hashes)).result(LONG))
    assert results[0].items[0].hash == results[1].items[0].hash


DEEP: list[object] = []
for _ in range(2000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "value", [10**30, "\ud800", {"\ud800": 1}, DEEP, {1}, object()], ids=lambda value: type(value).__name__
)
def test_bad_extensions_are_the_clients_fault_on_either_executor(value):
    """This processor takes none, so they are an ExtensionError, with a status of 400."""
    for executor in (None, "processes"):
        with ProcessorPool(Obedient, executor=executor, workers=1) as pool:
            error = pool.submit(work("a", extensions={"multimodal_x": value})).exception(LONG)
        assert type(error) is ExtensionError
        assert error.http_status == 400


# --- death ------------------------------------------------------------------------------------------------------------


def test_a_killed_process_is_one_failed_request_and_no_lost_worker(pool, tmp_path):
    pool.start(LONG)
    gates = [Gate(tmp_path / f"gate-{i}") for i in range(2)]
    at_work = [pool.submit(work(f"w{i}", gate.text)) for i, gate in enumerate(gates)]
    queued = [pool.submit(work(str(i))) for i in range(10)]
    victim = gates[0].begun()
    gates[1].begun()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(ProcessorDied, match="'w0'"):
        at_work[0].result(LONG)
    gates[1].open()
    assert at_work[1].result(LONG)  # in the other process: it was not disturbed
    for future in queued:
        future.result(LONG)
    until(lambda: pool.counters["workers"] == 2)
    counters = pool.counters
    assert (counters["died"], counters["failed"], counters["replaced"]) == (1, 1, 1)
    assert sorted(pool.store.drain()) == sorted(["w1", *map(str, range(10))])


def test_a_processor_that_kills_its_process_every_time_is_one_failed_request_each(pool):
    for i in range(3):
        with pytest.raises(ProcessorDied):
            pool.submit(work(f"d{i}", "die")).result(LONG)
        pool.submit(work(f"after-{i}")).result(LONG)
    assert pool.counters["died"] == 3


def test_a_process_that_is_killed_while_it_is_idle_costs_no_request(pool):
    pool.start(LONG)
    for pid in children():
        os.kill(pid, signal.SIGKILL)
    for future in [pool.submit(work(str(i))) for i in range(10)]:
        future.result(LONG)
    assert pool.counters["failed"] == 0


def test_all_processes_killed_again_and_again_under_load(pool):
    """Every request comes to an end, and only those fail that were at work in a process that was killed."""
    pool.start(LONG)
    stop, kills = threading.Event(), 0

    def killer() -> None:
        nonlocal kills
        while not stop.wait(0.15):
            # Not those that are only starting: on a busy machine none would ever be ready.
            for pid in [host.pid for host in list(pool._crew._hosts) if host.pid is not None][:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    kills += 1

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        futures = [pool.submit(work(str(i), "rows 100")) for i in range(300)]
        failed = 0
        for future in futures:
            error = future.exception(LONG)
            assert error is None or isinstance(error, ProcessorDied)
            failed += error is not None
    finally:
        stop.set()
        thread.join(30)
    assert failed <= kills
    assert pool.counters["failed"] == failed
    assert len(pool.store.drain()) == 300 - failed
    assert pool.submit(work("after")).result(LONG)


def test_a_processor_that_cannot_be_made_fails_what_waits_and_says_why():
    with ProcessorPool(Unloadable, executor="processes", workers=1) as pool:
        for _ in range(2):  # and the next request tries again
            with pytest.raises(ProcessorError, match="no weights here"):
                pool.submit(work("a")).result(LONG)
        assert pool.start(LONG) is False


def test_a_process_that_dies_as_it_starts_fails_what_waits():
    with ProcessorPool(Deadly, executor="processes", workers=2) as pool:
        futures = [pool.submit(work(str(i))) for i in range(5)]
        for future in futures:
            with pytest.raises(ProcessorError, match="no worker could start"):
                future.result(LONG)


def test_processes_do_not_outlive_a_parent_that_is_killed(tmp_path):
    source = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from fastmm.processors import Work
from fastmm.processors.pool import ProcessorPool
from support.processors import Gate, Obedient
import numpy as np
if __name__ == "__main__":
    pool = ProcessorPool(Obedient, executor="processes", workers=2)
    pool.start()
    gate = Gate(Path(sys.argv[2]))
    future = pool.submit(Work(request_id="a", text=gate.text, images=[np.zeros((500, 500, 3), np.uint8)]))
    print(gate.begun(), flush=True)
    sys.stdin.read()
"""
    path = tmp_path / "parent.py"
    path.write_text(source)
    parent = subprocess.Popen(
        [sys.executable, str(path), str(Path(__file__).parent), str(tmp_path / "gate")],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    worker = int(parent.stdout.readline())
    left = [name for name in os.listdir("/dev/shm") if f"-{parent.pid}-" in name]
    assert left  # the mark of the request that is at work
    parent.kill()
    parent.wait(30)
    until(lambda: not Path(f"/proc/{worker}").exists() or " Z " in Path(f"/proc/{worker}/stat").read_text())
    with ProcessorPool(Obedient, executor="processes", workers=1):
        pass  # the next pool sweeps what is left of that one
    assert not [name for name in os.listdir("/dev/shm") if f"-{parent.pid}-" in name]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_program_that_forgets_to_shut_down_ends_all_the_same(tmp_path, hangs):
    source = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from fastmm.processors import ProcessorPool, Work
from support.processors import Gate, Obedient
import numpy as np
if __name__ == "__main__":
    pool = ProcessorPool(Obedient, executor="processes", workers=2)
    image = np.zeros((4, 4, 3), np.uint8)
    print(pool.submit(Work(request_id="a", images=[image])).result(60).prompt_token_ids[-1])
    if sys.argv[3] == "True":
        gate = Gate(Path(sys.argv[2]))
        pool.submit(Work(request_id="b", text=gate.text, images=[image]))
        print(gate.begun())
"""
    path = tmp_path / "forgetful.py"
    path.write_text(source)
    child = subprocess.run(
        [sys.executable, str(path), str(Path(__file__).parent), str(tmp_path / "gate"), str(hangs)],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert child.returncode == 0, child.stderr
    for pid in child.stdout.split():
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists())


# --- hangs, cancel, shutdown ------------------------------------------------------------------------------------------


def test_a_process_that_hangs_is_killed_and_replaced(tmp_path):
    gate = Gate(tmp_path / "gate")
    with ProcessorPool(Obedient, executor="processes", workers=1, timeout=2.0, store=ResultStore()) as pool:
        future = pool.submit(work("a", gate.text))
        hanging = gate.begun()
        with pytest.raises(ProcessorTimeout):
            future.result(LONG)
        assert pool.submit(work("b")).result(LONG).prompt_token_ids[-1] != hanging
        until(lambda: hanging not in children())
        counters = pool.counters
        assert (counters["timeouts"], counters["died"], counters["failed"], counters["replaced"]) == (1, 0, 1, 1)
        assert sorted(pool.store.drain()) == ["b"]


def test_the_time_that_a_process_takes_to_start_is_not_the_requests(tmp_path):
    with ProcessorPool(SlowToLoad, executor="processes", workers=1, timeout=2.0) as pool:
        pool.submit(work("a")).result(LONG)
        assert pool.counters["timeouts"] == 0


class SlowToLoad(Obedient):
    def __init__(self) -> None:
        time.sleep(2.5)
        super().__init__()


def test_a_cancelled_result_is_dropped_and_its_segment_removed(pool, tmp_path):
    gate = Gate(tmp_path / "gate")
    future = pool.submit(work("a", gate.text))
    gate.begun()
    assert pool.cancel("a")
    with pytest.raises(CancelledError):
        future.result(0)
    gate.open()
    until(lambda: pool.counters["dropped"] == 1)
    until(lambda: not segments())
    assert len(pool.store) == 0


def test_shutdown_kills_what_hangs_within_its_deadline(tmp_path):
    gate = Gate(tmp_path / "gate")
    pool = ProcessorPool(Obedient, executor="processes", workers=2)
    pool.start(LONG)
    futures = [pool.submit(work("a", gate.text)), pool.submit(work("b"))]
    gate.begun()
    futures[1].result(LONG)
    begin = time.monotonic()
    assert pool.shutdown(timeout=0.3) is False
    assert time.monotonic() - begin < 20
    with pytest.raises(ProcessorError, match="shut down"):
        futures[0].result(0)


def test_shutdown_while_processes_start(tmp_path):
    pool = ProcessorPool(SlowToLoad, executor="processes", workers=2)
    future = pool.submit(work("a"))
    pool.shutdown(timeout=0.1)
    with pytest.raises(ProcessorError, match="shut down"):
        future.result(0)


# --- executors that were given ----------------------------------------------------------------------------------------


@pytest.fixture
def given():
    executor = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))
    yield executor
    executor.shutdown(wait=True, cancel_futures=True)


def test_runs_on_a_process_pool_that_it_was_given(given):
    with ProcessorPool(Obedient, executor=given, workers=2) as pool:
        for future in [pool.submit(work(str(i), "rows 200")) for i in range(20)]:
            assert future.result(LONG).items[0].features["pixel_values"].sum() == 3.0 * 200 * 1024
    assert given.submit(int).result(LONG) == 0  # it is its owner's


def test_the_processor_is_sent_once_to_each_process_of_an_executor_that_was_given(given, tmp_path):
    with ProcessorPool(CountsUnpickling(str(tmp_path)), executor=given, workers=2) as pool:
        for future in [pool.submit(work(str(i))) for i in range(30)]:
            future.result(LONG)
    assert 1 <= len(os.listdir(tmp_path)) <= 4  # two may be on their way to one process


class CountsUnpickling(Obedient):
    def __init__(self, directory: str) -> None:
        super().__init__()
        self.directory = directory

    def __setstate__(self, state):
        self.__dict__.update(state)
        Path(self.directory, f"{os.getpid()}-{time.monotonic_ns()}").touch()


@pytest.mark.parametrize("as_function", [False, True])
def test_a_killed_process_of_an_executor_that_was_given_is_one_failed_request(given, tmp_path, as_function):
    """It breaks as a whole. Those requests that were not in the killed process are done again by its replacement."""
    gates = [Gate(tmp_path / f"gate-{i}") for i in range(2)]
    executor = _two_processes if as_function else given
    with ProcessorPool(Obedient, executor=executor, workers=3, store=ResultStore()) as pool:
        at_work = [pool.submit(work(f"w{i}", gate.text)) for i, gate in enumerate(gates)]
        rest = [pool.submit(work(str(i))) for i in range(10)]
        victim = gates[0].begun()
        gates[1].begun()
        gates[1].open()
        until(lambda: at_work[1].done())
        again = pool.submit(work("w2", Gate(tmp_path / "gate-2").text))
        Gate(tmp_path / "gate-2").begun()
        os.kill(victim, signal.SIGKILL)
        Gate(tmp_path / "gate-2").open()
        with pytest.raises(ProcessorDied, match="'w0'"):
            at_work[0].result(LONG)
        assert again.result(LONG)
        for future in rest:
            future.result(LONG)
        counters = pool.counters
        assert (counters["died"], counters["failed"], counters["replaced"]) == (1, 1, 1)
        assert len(pool.store.drain()) == 12
        replacement = pool._crew._hosts[0].executor
    if not as_function:
        replacement.shutdown(wait=True)


def _two_processes() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))


def test_a_hang_on_a_process_pool_that_was_given_is_killed(tmp_path):
    gate = Gate(tmp_path / "gate")
    with ProcessorPool(Obedient, executor=_two_processes, workers=2, timeout=2.0) as pool:
        pool.submit(work("first")).result(LONG)
        future = pool.submit(work("a", gate.text))
        hanging = gate.begun()
        with pytest.raises(ProcessorTimeout):
            future.result(LONG)
        until(lambda: hanging not in children())
        for future in [pool.submit(work(str(i))) for i in range(10)]:
            future.result(LONG)
        assert pool.counters["died"] == 0


def test_an_affinity_that_the_system_refuses_costs_no_process():
    class Pool(ProcessorPool):
        def affinity(self, index):
            return [100_000]

    with Pool(Obedient(), executor="processes", workers=1) as pool:
        pool.submit(work("a")).result(LONG)
        assert pool.counters["replaced"] == 0


def test_affinity_binds_a_process_that_the_pool_starts():
    last = max(os.sched_getaffinity(0))

    class Pool(ProcessorPool):
        def affinity(self, index):
            return [last]

    with Pool(Obedient, executor="processes", workers=1) as pool:
        pid = pool.submit(work("a")).result(LONG).prompt_token_ids[-1]
        assert os.sched_getaffinity(pid) == {last}


def test_a_worker_on_another_machine_is_sent_bytes_and_sends_bytes(given, monkeypatch):
    """One that has another host key stands in for one."""
    monkeypatch.setattr(shm, "host_key", lambda directory=None: "another machine")
    with ProcessorPool(Obedient, executor=given, workers=2, budgets=Budgets(max_pixels=None)) as pool:
        request = Work(request_id="a", text="media", images=[os.urandom(1_000_000)])
        assert isinstance(pool.submit(request).result(LONG), Processed)
        result = pool.submit(work("b", "rows 500")).result(LONG)
        assert result.items[0].features["pixel_values"].sum() == 3.0 * 500 * 1024
        assert maps_of_segments() == []
        assert pool._crossing._shared is False  # it asks only once


def test_a_processor_that_loads_slowly_on_an_executor_that_was_given_is_no_hang(tmp_path):
    """Nor is a process that is only starting: the time at work begins when a worker has all that it needs."""
    with ProcessorPool(SlowToLoad, executor=_two_processes, workers=2, timeout=2.0) as pool:
        for future in [pool.submit(work(str(i))) for i in range(4)]:
            future.result(LONG)
        assert pool.counters["timeouts"] == 0

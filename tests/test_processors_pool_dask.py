"""ProcessorPool over a cluster: dask.distributed's executor, on two real worker processes."""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import CancelledError

import numpy as np
import pytest
from support.processors import Gate, Obedient, Unloadable, segments, until

from fastmm.errors import ExtensionError, ProcessorError, ProcessorTimeout
from fastmm.processors import Budgets, Work
from fastmm.processors.pool import ProcessorPool
from fastmm.processors.store import ResultStore

distributed = pytest.importorskip("distributed")

pytestmark = pytest.mark.no_asan  # many interpreters start

IMAGE = np.zeros((4, 4, 3), np.uint8)
LONG = 120.0


def work(rid: str, text: str = "rows 1", **more) -> Work:
    return Work(request_id=rid, text=text, images=[IMAGE], **more)


@pytest.fixture(scope="module")
def client():
    settings = {
        "distributed.worker.use-file-locking": False,
        "distributed.comm.timeouts.connect": "60s",
        "distributed.admin.system-monitor.gil.enabled": False,
    }
    import dask

    with dask.config.set(settings):
        cluster = distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0, silence_logs="CRITICAL"
        )
        client = cluster.get_client()
        client.wait_for_workers(2, timeout=LONG)
        yield client
        client.close()
        for _ in range(2):
            with contextlib.suppress(KeyError):  # of a worker that was killed, and that it has lost track of
                cluster.close()


def make_whole(client) -> None:
    """Wait until the cluster has replaced what was killed. Under load it refuses a worker now and then whose predecessor's
    name it has not yet forgotten, and must be asked again."""
    try:
        client.wait_for_workers(2, timeout=20)
    except TimeoutError:
        client.cluster.scale(1)
        client.cluster.scale(2)
        client.wait_for_workers(2, timeout=LONG)


@pytest.fixture
def executor(client):
    make_whole(client)
    yield client.get_executor()
    until(lambda: not segments())


def pids(client) -> set[int]:
    """Of the workers that answer: one that was just killed may not have been missed yet."""
    return {pid for pid in client.run(os.getpid, on_error="return").values() if isinstance(pid, int)}


def test_requests_are_processed_on_both_workers(client, executor):
    with ProcessorPool(Obedient, executor=executor, workers=4, store=ResultStore()) as pool:
        seen = {
            pool_result.prompt_token_ids[-1]
            for pool_result in (f.result(LONG) for f in [pool.submit(work(str(i))) for i in range(40)])
        }
        assert seen == pids(client)
        assert sorted(pool.store.drain()) == sorted(map(str, range(40)))


def test_large_results_of_this_machine_come_by_shared_memory(executor):
    from test_processors_pool_processes import maps_of_segments

    with ProcessorPool(Obedient, executor=executor, workers=2) as pool:
        result = pool.submit(work("a", "rows 1000")).result(LONG)
        values = result.items[0].features["pixel_values"]
        assert values.sum() == 3.0 * 1000 * 1024
        assert any(values.ctypes.data in mapping for mapping in maps_of_segments())
        assert segments() == []


def test_to_workers_of_another_machine_media_and_results_travel_as_bytes(executor, monkeypatch):
    from test_processors_pool_processes import maps_of_segments

    from fastmm import shm

    monkeypatch.setattr(shm, "host_key", lambda directory=None: "another machine")
    with ProcessorPool(Obedient, executor=executor, workers=2, budgets=Budgets(max_pixels=None)) as pool:
        image = os.urandom(1_000_000)
        result = pool.submit(Work(request_id="a", text="media", images=[image])).result(LONG)
        assert result.prompt_token_ids[2] == sum(image) % 1000
        values = pool.submit(work("b", "rows 500")).result(LONG).items[0].features["pixel_values"]
        assert values.sum() == 3.0 * 500 * 1024
        assert maps_of_segments() == []


@pytest.mark.parametrize("text", ["raise it", "awkward", "exit", "bad"])
def test_an_exception_is_one_failed_request(client, executor, text):
    before = pids(client)
    with ProcessorPool(Obedient, executor=executor, workers=2, store=ResultStore()) as pool:
        with pytest.raises(ProcessorError):
            pool.submit(work("a", text)).result(LONG)
        with pytest.raises(ExtensionError):
            pool.submit(work("b", extensions={"multimodal_x": 1})).result(LONG)
        pool.submit(work("c")).result(LONG)
        assert sorted(pool.store.drain()) == ["c"]
    assert pids(client) == before


def test_a_processor_that_cannot_be_made_fails_its_requests(executor):
    with ProcessorPool(Unloadable, executor=executor) as pool:
        with pytest.raises(ProcessorError, match="no weights here"):
            pool.submit(work("a")).result(LONG)


def test_a_cancelled_result_is_dropped(executor, tmp_path):
    gate = Gate(tmp_path / "gate")
    with ProcessorPool(Obedient, executor=executor, workers=2, store=ResultStore()) as pool:
        future = pool.submit(work("a", gate.text))
        gate.begun()
        assert pool.cancel("a")
        with pytest.raises(CancelledError):
            future.result(0)
        gate.open()
        until(lambda: pool.counters["dropped"] == 1)
        assert len(pool.store) == 0


def test_a_killed_worker_costs_no_more_than_its_request_and_is_replaced(client, executor, tmp_path):
    """The cluster starts another one, and gives it what was lost: here not even that request fails."""
    gate = Gate(tmp_path / "gate")
    with ProcessorPool(Obedient, executor=executor, workers=2, store=ResultStore()) as pool:
        first = pool.submit(work("a", gate.text))
        victim = gate.begun()
        rest = [pool.submit(work(str(i), "rows 100")) for i in range(20)]
        gate.open()
        os.kill(victim, signal.SIGKILL)
        for future in rest:
            future.result(LONG)
        assert first.result(LONG).prompt_token_ids[-1] != victim
        assert len(pool.store.drain()) == 21
    make_whole(client)
    until(lambda: len(pids(client)) == 2, LONG)


def test_a_processor_that_kills_every_worker_is_one_failed_request(client, executor):
    with ProcessorPool(Obedient, executor=executor, workers=1, store=ResultStore()) as pool:
        with pytest.raises(ProcessorError, match="KilledWorker"):
            pool.submit(work("a", "die")).result(LONG)
        assert pool.counters["died"] == 1
        make_whole(client)
        pool.submit(work("b")).result(LONG)
        assert sorted(pool.store.drain()) == ["b"]


def test_a_hang_is_one_failed_request_and_its_worker_is_replaced(client, executor, tmp_path):
    gate = Gate(tmp_path / "gate")
    with ProcessorPool(Obedient, executor=executor, workers=2, timeout=5.0, store=ResultStore()) as pool:
        pool.submit(work("warm")).result(LONG)
        future = pool.submit(work("a", gate.text))
        hanging = gate.begun()
        with pytest.raises(ProcessorTimeout):
            future.result(LONG)
        until(lambda: hanging not in pids(client), LONG)
        assert (pool.counters["timeouts"], pool.counters["died"], pool.counters["failed"]) == (1, 0, 1)
        make_whole(client)
    with ProcessorPool(Obedient, executor=executor, workers=2) as pool:
        for future in [pool.submit(work(str(i))) for i in range(10)]:
            future.result(LONG)


def test_the_executor_is_its_owners(executor):
    with ProcessorPool(Obedient, executor=executor, workers=2) as pool:
        pool.submit(work("a")).result(LONG)
    assert executor.submit(int).result(LONG) == 0

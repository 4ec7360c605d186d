"""Two engines of our own behind one client: load is shared, each answer goes to its asker, a rank asked for is obeyed."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from support.toy_engine import assert_answered, checksum, make_request, toy_engine

from fastmm import EngineDead
from fastmm.errors import SchemaValueError
from fastmm.transport import AsyncEngineClient, EngineClient

LIMIT_S = 60.0

pytestmark = pytest.mark.no_asan  # three processes; what is compiled is tested elsewhere


@contextmanager
def engines(client: Any, count: int = 2, **options: Any) -> Iterator[list[Any]]:
    address = client.bind()
    with ExitStack() as stack:
        yield [stack.enter_context(toy_engine(address, rank, **options)) for rank in range(count)]


def drain(outputs: Any) -> None:
    while True:
        outputs.next(LIMIT_S)


def size_of(seed: int) -> int:
    return (0, 0, 400, 4000, 100_000, 2_000_000)[seed % 6]


@pytest.mark.parametrize("inline_nbytes", [0, 1 << 20, 8 << 20])
@pytest.mark.parametrize("handshake", [None, "tcp://127.0.0.1:0"])
def test_asyncio_tasks_share_two_engines_and_each_gets_its_own_answer(handshake: str | None, inline_nbytes: int) -> None:
    async def main() -> None:
        client = AsyncEngineClient(handshake, engines=2, startup_timeout=LIMIT_S, inline_nbytes=inline_nbytes)
        ranks: Counter[int] = Counter()

        async def one(number: int) -> None:
            request = make_request(f"r{number}", number, nbytes=size_of(number))
            expected = checksum(request)
            ranks[assert_answered(f"r{number}", expected, [output async for output in client.generate(request)])] += 1

        with engines(client):
            async with client:
                await asyncio.wait_for(asyncio.gather(*map(one, range(200))), LIMIT_S)
                seen = await client.call_utility_all("seen", timeout=LIMIT_S)
                assert client.ledger.wait(LIMIT_S)
                assert client.counters == {"live": 0, "unknown": 0, "broken": 0}
        assert sum(ranks.values()) == 200
        assert min(ranks.values()) >= 80
        assert {rank: said["added"] for rank, said in seen.items()} == dict(ranks)

    asyncio.run(main())


def test_threads_share_two_engines_and_each_gets_its_own_answer() -> None:
    client = EngineClient(engines=2, startup_timeout=LIMIT_S)
    ranks: Counter[int] = Counter()
    failed: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for number in range(first, first + 25):
                request = make_request(f"r{number}", number, nbytes=size_of(number))
                expected = checksum(request)
                ranks[assert_answered(f"r{number}", expected, list(client.generate(request)))] += 1
        except BaseException as error:
            failed.append(error)

    with engines(client), client:
        threads = [threading.Thread(target=work, args=(25 * number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
    assert not failed, failed[0]
    assert sum(ranks.values()) == 200
    assert min(ranks.values()) >= 80


def test_a_busy_engine_is_passed_over() -> None:
    """Least outstanding work: long requests on one engine send the short ones to the other."""
    client = EngineClient(engines=2, startup_timeout=LIMIT_S)
    with engines(client, step=0.002), client:
        long = [client.generate(make_request(f"long{i}", i, max_tokens=400, data_parallel_rank=0)) for i in range(10)]
        for outputs in long:
            outputs.next(LIMIT_S)
        for number in range(10):
            request = make_request(f"short{number}", number, max_tokens=1)
            expected = checksum(request)
            assert assert_answered(f"short{number}", expected, list(client.generate(request)), max_tokens=1) == 1
        for outputs in long:
            outputs.close()


def test_a_rank_that_is_asked_for_is_obeyed() -> None:
    client = EngineClient(engines=2, startup_timeout=LIMIT_S)
    with engines(client), client:
        asked = [0, 1, 1, 1, 1, 0, 1, 1]
        streams = []
        for number, rank in enumerate(asked):
            request = make_request(f"r{number}", number, data_parallel_rank=rank)
            streams.append((f"r{number}", checksum(request), client.generate(request)))
        assert [assert_answered(name, expected, list(outputs)) for name, expected, outputs in streams] == asked
        with pytest.raises(SchemaValueError, match="rank"):
            client.generate(make_request("other", 1, data_parallel_rank=2))
        assert client.counters["live"] == 0


def test_one_engine_lost_ends_its_requests_and_no_others() -> None:
    client = EngineClient(engines=2, startup_timeout=LIMIT_S)
    with engines(client, step=0.005) as processes, client:
        doomed = [client.generate(make_request(f"d{i}", i, max_tokens=10_000, data_parallel_rank=1)) for i in range(5)]
        kept = []
        for number in range(5):
            request = make_request(f"k{number}", number, max_tokens=100, data_parallel_rank=0)
            kept.append((f"k{number}", checksum(request), client.generate(request)))
        for outputs in doomed:
            outputs.next(LIMIT_S)
        processes[1].kill()
        for outputs in doomed:
            with pytest.raises(EngineDead):
                drain(outputs)
        for name, expected, outputs in kept:
            assert assert_answered(name, expected, list(outputs), max_tokens=100) == 0
        assert client.alive == (0,)
        with pytest.raises(EngineDead):
            client.generate(make_request("r", 1, data_parallel_rank=1))
        request = make_request("after", 1)
        expected = checksum(request)
        assert assert_answered("after", expected, list(client.generate(request))) == 0
        assert client.ledger.wait(LIMIT_S)


def test_requests_given_up_end_on_their_engines_too() -> None:
    client = EngineClient(engines=2, startup_timeout=LIMIT_S)
    with engines(client, step=0.001), client:
        for number in range(20):
            with client.generate(make_request(f"r{number}", number, max_tokens=100_000)) as outputs:
                outputs.next(LIMIT_S)
        for _ in range(1000):
            seen = client.call_utility_all("seen", timeout=LIMIT_S)
            if not any(said["running"] for said in seen.values()):
                break
        assert [said["running"] for said in seen.values()] == [0, 0]
        assert sum(said["added"] for said in seen.values()) == 20

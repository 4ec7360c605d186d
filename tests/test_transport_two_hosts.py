"""Client and engines on two hosts: a cable that is slow, cut and healed, cut for good; an engine lost with it.

Nothing hangs, what cannot be done is an error, what was promised arrives once.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from support.toy_engine import assert_answered, checksum, make_request, toy_engine
from support.two_hosts import A, Hosts, two_hosts, why_not

from fastmm import EngineDead
from fastmm.transport import AsyncEngineClient, EngineClient

LIMIT_S = 60.0

_reason = why_not()
pytestmark = [
    pytest.mark.skipif(_reason is not None, reason=_reason or ""),
    pytest.mark.no_asan,  # processes and a cable; what is compiled is tested elsewhere
]


@pytest.fixture(scope="module")
def cable() -> Iterator[Hosts]:
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no two hosts here: {error}")
        yield hosts


@pytest.fixture
def hosts(cable: Hosts) -> Hosts:
    cable.heal()
    cable.delay(0.0)
    return cable


@contextmanager
def driven(hosts: Hosts, count: int = 1, *, step: float = 0.0, **options: Any) -> Iterator[tuple[EngineClient, list[Any]]]:
    """A client on host a, its engines on host b. For use inside ``hosts.on("a", ...)``."""
    client = EngineClient(f"tcp://{A}:0", engines=count, startup_timeout=LIMIT_S, allow_remote=True, **options)
    with ExitStack() as stack:
        address = client.bind()
        prefix = hosts.command("b")
        processes = [stack.enter_context(toy_engine(address, rank, step=step, prefix=prefix)) for rank in range(count)]
        with client:
            yield client, processes


def ask(client: EngineClient, name: str, seed: int, **options: Any) -> tuple[str, int, int, Any]:
    request = make_request(name, seed, **options)
    return name, checksum(request), options.get("max_tokens", 3), client.generate(request, timeout=LIMIT_S)


def answered(asked: tuple[str, int, int, Any]) -> int:
    name, expected, max_tokens, outputs = asked
    found = []
    while not found or found[-1].finish_reason is None:
        found.append(outputs.next(LIMIT_S))
    return assert_answered(name, expected, found, max_tokens=max_tokens)


def drain(outputs: Any) -> None:
    while True:
        outputs.next(LIMIT_S)


def size_of(seed: int) -> int:
    return (0, 400, 100_000, 3_000_000)[seed % 4]


def test_requests_of_all_sizes_cross_and_are_answered(hosts: Hosts) -> None:
    def work() -> None:
        with driven(hosts) as (client, _):
            assert client.engines[0].vllm_version == "0.33.0"
            for asked in [ask(client, f"r{number}", number, nbytes=size_of(number)) for number in range(60)]:
                answered(asked)
            assert client.ledger.wait(LIMIT_S)

    hosts.on("a", work, 2 * LIMIT_S)


def test_a_slow_cable_delays_and_loses_nothing(hosts: Hosts) -> None:
    async def main() -> None:
        client = AsyncEngineClient(f"tcp://{A}:0", startup_timeout=LIMIT_S, allow_remote=True)

        async def one(number: int) -> None:
            request = make_request(f"r{number}", number, nbytes=size_of(number))
            expected = checksum(request)
            assert_answered(f"r{number}", expected, [output async for output in client.generate(request)])

        with toy_engine(client.bind(), prefix=hosts.command("b")):
            async with client:
                await asyncio.wait_for(asyncio.gather(*map(one, range(40))), LIMIT_S)
                hosts.delay(0.2)  # in the middle of it, too
                await asyncio.wait_for(asyncio.gather(*map(one, range(40, 60))), LIMIT_S)
                assert client.counters == {"live": 0, "unknown": 0, "broken": 0}

    hosts.delay(0.05)
    hosts.on("a", lambda: asyncio.run(main()), 3 * LIMIT_S)


def test_what_a_cut_held_up_arrives_once_when_it_is_healed(hosts: Hosts) -> None:
    def work() -> None:
        # Patient heartbeats: a cut shorter than this is no death.
        with driven(hosts, step=0.01, heartbeat=(1.0, 30.0)) as (client, _):
            running = [ask(client, f"running{number}", number, max_tokens=300) for number in range(5)]
            for _, _, _, outputs in running:
                assert outputs.next(LIMIT_S).new_token_ids  # it runs
            hosts.cut()
            during = [ask(client, f"during{number}", number, nbytes=size_of(number)) for number in range(8)]
            gone, _, _, given_up = ask(client, "given up", 1, max_tokens=100_000)
            assert gone == "given up"
            assert not client.ledger.wait(0.5)  # the large ones lie here
            given_up.close()
            hosts.heal()
            for asked in during:
                answered(asked)
            for name, expected, max_tokens, outputs in running:
                rest = [output.new_token_ids for output in outputs]
                assert len(rest) == max_tokens - 1
                assert rest == [[token] for token in expected_tokens(name, max_tokens)[1:]]
                assert expected
            assert client.ledger.wait(LIMIT_S)
            assert client.counters["live"] == 0
            deadline = time.monotonic() + LIMIT_S
            while client.call_utility("seen", timeout=LIMIT_S)["running"]:  # the abort crossed, too
                assert time.monotonic() < deadline

    hosts.on("a", work, 3 * LIMIT_S)


def expected_tokens(name: str, max_tokens: int) -> list[int]:
    from support.toy_engine import token

    return [token(name, index) for index in range(max_tokens)]


def test_a_cut_for_good_ends_every_request_and_gives_their_memory_back(hosts: Hosts) -> None:
    def work() -> None:
        with driven(hosts, step=0.01, heartbeat=(0.5, 2.0)) as (client, _):
            running = [ask(client, f"running{number}", number, max_tokens=100_000) for number in range(5)]
            for _, _, _, outputs in running:
                outputs.next(LIMIT_S)
            hosts.cut()
            large = [ask(client, f"large{number}", number, nbytes=3_000_000) for number in range(4)]
            for _, _, _, outputs in (*running, *large):
                with pytest.raises(EngineDead):
                    drain(outputs)
            with pytest.raises(EngineDead):
                ask(client, "after", 1)
            with pytest.raises(EngineDead):
                client.call_utility("seen", timeout=LIMIT_S)
            assert client.ledger.wait(LIMIT_S)
            assert client.counters["live"] == 0

    hosts.on("a", work, 3 * LIMIT_S)


def test_an_engine_that_is_killed_is_noticed_across_the_cable(hosts: Hosts) -> None:
    def work() -> None:
        with driven(hosts, 2, step=0.01) as (client, processes):
            doomed = [ask(client, f"d{number}", number, max_tokens=100_000, data_parallel_rank=1) for number in range(4)]
            kept = [ask(client, f"k{number}", number, max_tokens=100, data_parallel_rank=0) for number in range(4)]
            for _, _, _, outputs in doomed:
                outputs.next(LIMIT_S)
            processes[1].kill()
            for _, _, _, outputs in doomed:
                with pytest.raises(EngineDead):
                    drain(outputs)
            assert [answered(asked) for asked in kept] == [0, 0, 0, 0]
            assert answered(ask(client, "after", 1)) == 0
            assert client.alive == (0,)

    hosts.on("a", work, 3 * LIMIT_S)


def test_an_engine_lost_behind_a_cut_is_noticed_by_heartbeats_alone(hosts: Hosts) -> None:
    """Its host says nothing any more: no connection is closed, none is refused."""

    def work() -> None:
        with driven(hosts, step=0.01, heartbeat=(0.5, 2.0)) as (client, processes):
            _, _, _, outputs = ask(client, "r", 1, max_tokens=100_000)
            outputs.next(LIMIT_S)
            hosts.cut()
            processes[0].kill()
            with pytest.raises(EngineDead):
                drain(outputs)

    hosts.on("a", work, 3 * LIMIT_S)


def test_a_client_closes_at_once_while_the_cable_is_cut(hosts: Hosts) -> None:
    def work() -> None:
        with driven(hosts, step=0.01, heartbeat=(1.0, 60.0), linger=0.2) as (client, _):
            asked = [ask(client, f"r{number}", number, nbytes=3_000_000, max_tokens=100_000) for number in range(4)]
            asked[0][3].next(LIMIT_S)
            hosts.cut()
            more = ask(client, "more", 1, nbytes=3_000_000)
            client.close()
            assert more[3] is not None
            assert client.ledger.wait(LIMIT_S)

    hosts.on("a", work, 2 * LIMIT_S)


def test_engines_that_never_come_are_a_timeout_that_says_who(hosts: Hosts) -> None:
    def work() -> None:
        client = EngineClient(f"tcp://{A}:0", engines=2, startup_timeout=3.0, allow_remote=True)
        address = client.bind()
        hosts.cut()
        with toy_engine(address, 1, prefix=hosts.command("b")):
            with pytest.raises(TimeoutError, match="engine 0"):
                client.start()

    hosts.on("a", work, LIMIT_S)

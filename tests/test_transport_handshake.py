"""vLLM's startup handshake, both sides: what is said, in which order it may come, and what is passed over."""

from __future__ import annotations

import itertools
from typing import Any

import msgpack
import pytest

from fastmm.errors import TransportError
from fastmm.transport.handshake import (
    Addresses,
    ClientHandshake,
    EngineHandshake,
    EngineInfo,
    engine_identity,
    engine_rank,
)

ADDRESSES = Addresses(inputs=("ipc://in-0", "ipc://in-1"), outputs=("ipc://out-0", "ipc://out-1"))
READY = {
    "dtype": "bfloat16",
    "vllm_version": "0.33.0",
    "max_model_len": 4096,
    "num_gpu_blocks": 7,
    "a key of tomorrow": [1, {}],
}


def through(client: ClientHandshake, engine: EngineHandshake, ready_first: bool = True) -> Addresses:
    (answered_to, init) = client.on_handshake([engine.identity, *engine.hello()]) or []
    assert answered_to == engine.identity
    addresses = engine.on_init([init])
    response = [engine.identity, engine.ready_response()]
    if ready_first:
        assert client.on_handshake([engine.identity, *engine.ready()]) is None
        client.on_input(response)
    else:
        client.on_input(response)
        assert client.on_handshake([engine.identity, *engine.ready()]) is None
    return addresses


@pytest.mark.parametrize("ready_first", [True, False])
def test_both_sides_agree_whichever_of_ready_and_the_ready_response_comes_first(ready_first: bool) -> None:
    client = ClientHandshake(ADDRESSES, 1, {"data_parallel_size": 1})
    engine = EngineHandshake(0, local=True, headless=False, ready=READY)
    assert client.state == {0: "waiting"}
    assert not client.done
    assert through(client, engine, ready_first) == ADDRESSES
    assert engine.parallel_config == {"data_parallel_size": 1}
    assert client.done
    assert client.engines == (
        EngineInfo(b"\x00\x00", 0, True, False, "bfloat16", "0.33.0", 4096, 7, ready=READY),
    )  # unknown keys are kept
    assert client.ignored == 0


def test_the_bytes_are_those_that_vllm_exchanges() -> None:
    engine = EngineHandshake(258, ready={})
    assert engine.identity == b"\x02\x01"
    assert engine.hello() == [b"\x83\xa6status\xa5HELLO\xa5local\xc2\xa8headless\xc3"]
    assert engine.ready() == [b"\x83\xa6status\xa5READY\xa5local\xc2\xa8headless\xc3"]
    client = ClientHandshake(Addresses(("i",), ("o",)), [258])
    _, init = client.on_handshake([engine.identity, *engine.hello()]) or []
    assert msgpack.unpackb(init) == {
        "addresses": {
            "inputs": ["i"],
            "outputs": ["o"],
            "coordinator_input": None,
            "coordinator_output": None,
            "frontend_stats_publish_address": None,
        },
        "parallel_config": {},
    }


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_several_engines_come_in_any_order_and_are_listed_by_rank(order: tuple[int, ...]) -> None:
    client = ClientHandshake(ADDRESSES, 3)
    for rank in order:
        assert not client.done
        through(client, EngineHandshake(rank, ready={"dtype": f"d{rank}"}))
    assert client.done
    assert [(info.rank, info.dtype) for info in client.engines] == [(0, "d0"), (1, "d1"), (2, "d2")]


def test_missing_keys_and_an_empty_ready_response_are_fine() -> None:
    client = ClientHandshake(ADDRESSES)
    client.on_handshake([b"\0\0", msgpack.packb({"status": "HELLO"})])
    client.on_input([b"\0\0", b""])
    client.on_handshake([b"\0\0", msgpack.packb({"status": "READY", "num_gpu_blocks": 9})])  # where older engines said it
    (info,) = client.engines
    assert (info.local, info.headless, info.dtype, info.vllm_version, info.num_gpu_blocks) == (False, False, None, None, 9)


def test_a_value_of_another_kind_in_the_ready_response_counts_as_not_said() -> None:
    client = ClientHandshake(ADDRESSES)
    through(client, EngineHandshake(0, ready={"dtype": 3, "max_model_len": "long", "num_gpu_blocks": True}))
    (info,) = client.engines
    assert (info.dtype, info.max_model_len, info.num_gpu_blocks) == (None, None, None)
    assert info.ready["max_model_len"] == "long"


STRAY: list[tuple[str, list[bytes]]] = [
    ("rank 7", [b"\x07\x00", b"\x81\xa6status\xa5HELLO"]),
    ("b'somebody'", [b"somebody", b"\x81\xa6status\xa5HELLO"]),
    ("1 frames", [b"\0\0"]),
    ("0 frames", []),
    ("3 frames", [b"\0\0", b"", b"\x81\xa6status\xa5HELLO"]),
    ("none", [b"\0\0", b"\xc1"]),
    ("none", [b"\0\0", b""]),
    ("none", [b"\0\0", b"\x82\xa6status\xa5HELLO"]),
    ("none", [b"\0\0", b"\x91" * 100_000]),
    ("bytes", [b"\0\0", b"\0" * (1 << 20) + b"\0"]),
    ("list", [b"\0\0", b"\x91\xa5HELLO"]),
    ("text keys", [b"\0\0", b"\x81\x01\xa5HELLO"]),
    ("'GOODBYE'", [b"\0\0", b"\x81\xa6status\xa7GOODBYE"]),
    ("no status", [b"\0\0", b"\x80"]),
    ("no status", [b"\0\0", b"\x81\xa6status\x91\x01"]),
    ("READY", [b"\0\0", b"\x81\xa6status\xa5READY"]),  # before HELLO
]


@pytest.mark.parametrize(("why", "frames"), STRAY, ids=[f"{i}-{why}" for i, (why, _) in enumerate(STRAY)])
def test_a_stray_message_is_passed_over_counted_and_named(why: str, frames: list[bytes]) -> None:
    client = ClientHandshake(ADDRESSES)
    assert client.on_handshake(frames) is None
    assert client.ignored == 1
    assert client.last_ignored is not None
    assert why in client.last_ignored
    assert client.last_ignored in client.missing()
    assert client.state == {0: "waiting"}
    through(client, EngineHandshake(0, ready=READY))
    assert client.done


def test_a_ready_response_of_an_engine_that_never_said_hello_is_passed_over() -> None:
    client = ClientHandshake(ADDRESSES)
    client.on_input([b"\0\0", msgpack.packb(READY)])
    client.on_input([b"\x09\0", msgpack.packb(READY)])
    assert client.ignored == 2
    assert client.state == {0: "waiting"}


def test_a_second_hello_is_answered_again_until_the_engine_has_started() -> None:
    client, engine = ClientHandshake(ADDRESSES), EngineHandshake(0, ready=READY)
    first = client.on_handshake([engine.identity, *engine.hello()])
    assert first == client.on_handshake([engine.identity, *engine.hello()])
    through(client, engine)
    assert client.on_handshake([engine.identity, *engine.hello()]) is None
    assert client.on_handshake([engine.identity, *engine.ready()]) is None
    client.on_input([engine.identity, msgpack.packb({"dtype": "float16"})])
    assert client.ignored == 3
    assert client.engines[0].dtype == "bfloat16"  # the first word stands


def test_missing_says_who_is_waited_for() -> None:
    client = ClientHandshake(ADDRESSES, 3)
    through(client, EngineHandshake(1, ready={}))
    engine = EngineHandshake(2)
    client.on_handshake([engine.identity, *engine.hello()])
    assert client.missing() == "engine 0 has not said HELLO; engine 2 is connected, not ready"


BAD_INIT: list[tuple[str, list[Any]]] = [
    ("one frame", []),
    ("one frame", [b"\x80", b""]),
    ("msgpack map", [b"\xc1"]),
    ("map of addresses", [b"\x80"]),
    ("'inputs'", [msgpack.packb({"addresses": {}})]),
    ("'inputs'", [msgpack.packb({"addresses": {"inputs": [], "outputs": []}})]),
    ("'outputs'", [msgpack.packb({"addresses": {"inputs": ["a"], "outputs": [1]}})]),
    ("output address for each of 2", [msgpack.packb({"addresses": {"inputs": ["a", "b"], "outputs": ["c"]}})]),
    ("'coordinator_input'", [msgpack.packb({"addresses": {"inputs": ["a"], "outputs": ["c"], "coordinator_input": 3}})]),
    ("'parallel_config'", [msgpack.packb({"addresses": {"inputs": ["a"], "outputs": ["c"]}, "parallel_config": []})]),
]


@pytest.mark.parametrize(("what", "frames"), BAD_INIT, ids=[str(i) for i in range(len(BAD_INIT))])
def test_an_engine_names_what_is_wrong_with_its_clients_answer(what: str, frames: list[Any]) -> None:
    with pytest.raises(TransportError, match=what):
        EngineHandshake(0).on_init(frames)


def test_addresses_survive_the_wire_with_keys_nobody_knows() -> None:
    full = Addresses(("a",), ("b",), "c", "d", "e")
    assert Addresses.from_wire({**full.to_wire(), "of tomorrow": 1}) == full


def test_ranks_that_do_not_fit_two_bytes_and_no_engines_at_all_are_refused() -> None:
    assert engine_rank(engine_identity(65535)) == 65535
    assert engine_rank(b"abc") is None
    for rank in (-1, 65536):
        with pytest.raises(TransportError, match="rank"):
            engine_identity(rank)
    with pytest.raises(TransportError, match="at least one"):
        ClientHandshake(ADDRESSES, 0)
    with pytest.raises(TransportError, match="plain values"):
        EngineHandshake(0, ready={"dtype": object()})

"""Aborts, utility calls, waves and the frame of a dead engine: their bytes, and what is refused on the way in."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

import fastmm
from fastmm import DecodeError, SchemaError
from fastmm.schema import EngineCoreRequestType
from fastmm.transport import control


def test_golden_bytes() -> None:
    assert control.abort_message(["r1", "r2"]).hex() == "92a27231a27232"
    assert control.utility_message(0, 2**64 - 1, "is_sleeping") == [
        bytes.fromhex("9400cfffffffffffffffffab69735f736c656570696e6790")
    ]
    assert control.start_dp_wave_message(3).hex() == "9203c0"
    assert control.start_dp_wave_message(3, 1).hex() == "920301"
    assert (control.ADD, control.ABORT, control.START_DP_WAVE, control.UTILITY) == (b"\x00", b"\x01", b"\x02", b"\x03")


def test_what_is_written_comes_back() -> None:
    assert control.read_abort(control.abort_message(i for i in ("a", "ü", ""))) == ["a", "ü", ""]
    assert control.read_abort([zmq.Frame(control.abort_message([]))]) == []
    assert control.read_start_dp_wave([control.start_dp_wave_message(0, 2**16 - 1)]) == (0, 65535)
    call = control.read_utility(
        control.utility_message(1, 7, "add_lora", [fastmm.LoRARequest("a", 1, "/a"), {"k": [None, 1.5]}])
    )
    assert call == control.UtilityCall(1, 7, "add_lora", [["a", 1, "/a", None, False, False], {"k": [None, 1.5]}])


def test_a_large_tensor_among_the_arguments_travels_in_its_own_memory() -> None:
    weights = np.arange(1000, dtype=np.float32)
    frames = control.utility_message(0, 1, "load", [weights, weights])
    assert len(frames) == 3
    assert np.shares_memory(np.frombuffer(frames[1], np.float32), weights)
    call = control.read_utility(frames)
    assert call.args == [["<f4", [1000], 1], ["<f4", [1000], 2]]


def test_one_id_is_not_taken_for_its_letters() -> None:
    assert control.read_abort(control.abort_message("abc")) == ["abc"]


@pytest.mark.parametrize("ids", [[1], [b"r"], [None], ["a", 2.5]])
def test_an_id_that_is_no_str_is_not_sent(ids: list[Any]) -> None:
    with pytest.raises(SchemaError, match="str"):
        control.abort_message(ids)


@pytest.mark.parametrize(
    "make",
    [
        lambda: control.start_dp_wave_message(True),
        lambda: control.start_dp_wave_message(0, 2**64),
        lambda: control.start_dp_wave_message(1.0),  # type: ignore[arg-type]
        lambda: control.utility_message("0", 1, "m"),  # type: ignore[arg-type]
        lambda: control.utility_message(0, 2**64, "m"),
        lambda: control.utility_message(0, 1, b"m"),  # type: ignore[arg-type]
        lambda: control.utility_message(0, 1, "m", [object()]),
    ],
)
def test_what_the_engine_could_not_read_is_not_sent(make: Any) -> None:
    with pytest.raises(SchemaError):
        make()


REFUSED = [
    (control.read_abort, {"a": 1}),
    (control.read_abort, ["a", 1]),
    (control.read_abort, ["a", None]),
    (control.read_abort, [b"a"]),
    (control.read_abort, "a"),
    (control.read_start_dp_wave, 3),
    (control.read_start_dp_wave, [3]),
    (control.read_start_dp_wave, [3, 1, 1]),
    (control.read_start_dp_wave, [None, 1]),
    (control.read_start_dp_wave, [True, 1]),
    (control.read_start_dp_wave, [3, 1.0]),
    (control.read_utility, [0, 1, "m"]),
    (control.read_utility, [0, 1, "m", [], 5]),
    (control.read_utility, [None, 1, "m", []]),
    (control.read_utility, [0, 1.0, "m", []]),
    (control.read_utility, [0, False, "m", []]),
    (control.read_utility, [0, 1, b"m", []]),
    (control.read_utility, [0, 1, "m", {}]),
    (control.read_utility, [0, 1, "m", None]),
    (control.read_utility, {"method": "m"}),
]


@pytest.mark.parametrize(("read", "value"), REFUSED)
def test_another_shape_is_a_decode_error(read: Any, value: Any) -> None:
    with pytest.raises(DecodeError):
        read(msgpack.packb(value))


@pytest.mark.parametrize("read", [control.read_abort, control.read_start_dp_wave, control.read_utility])
@pytest.mark.parametrize("frames", [b"", [], b"\xc1", b"\x92", [b"\x90", b"surplus"], b"\x90\x90", b"\xd4\x01\x00"])
def test_bytes_that_are_no_message_are_a_decode_error(read: Any, frames: Any) -> None:
    with pytest.raises(DecodeError):
        read(frames)


def test_request_types_are_known_or_refused() -> None:
    for kind in EngineCoreRequestType:
        assert control.read_request_type(zmq.Frame(kind.value)) is kind
    for junk in (b"", b"\x04", b"\x05", b"\xff", b"\x00\x00", b"ADD" * 10**6):
        with pytest.raises(DecodeError, match="request type"):
            control.read_request_type(junk)


def test_only_the_whole_word_alone_says_that_an_engine_is_dead() -> None:
    dead = control.ENGINE_CORE_DEAD
    assert control.is_engine_dead([dead])
    assert control.is_engine_dead([zmq.Frame(dead)])
    for frames in ([], [dead, b""], [dead[:-1]], [dead + b"D"], [b"x" * len(dead)], [b""]):
        assert not control.is_engine_dead(frames)

"""A broken request's main frame still says whose it is, and no bytes at all make the reader raise."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastmm.transport.salvage import MOST_ID_CHARACTERS, salvage_call, salvage_request

WHOLE = [
    "r-1",
    [1, 2, 3],
    [{"data": {"pixel_values": ["float32", [2, 3], 1]}}],
    {},
    None,
    1.5,
    None,
    None,
    None,
    None,
    None,
    3,
    0,
]


def packed(*changes):
    values = list(WHOLE)
    for position, value in changes:
        values[position] = value
    return msgpack.packb(values)


def test_a_whole_request_says_its_id_and_its_client():
    assert salvage_request(packed()) == ("r-1", 3)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_read(kind):
    assert salvage_request(kind(packed())) == ("r-1", 3)


@pytest.mark.parametrize("change", [(1, "ids"), (2, 7), (2, [[[[]]]]), (3, b"\xff"), (5, None), (9, {1: 2})])
def test_a_wrong_type_on_the_way_hides_nothing(change):
    assert salvage_request(packed(change)) == ("r-1", 3)


def test_a_frame_cut_short_still_says_the_id():
    main = packed()
    after_the_id = 1 + 1 + len("r-1")  # array header, string header
    for length in range(after_the_id, len(main) - 2):
        assert salvage_request(main[:length]) == ("r-1", None)


def test_the_index_needs_nothing_that_comes_after_it():
    main = packed()
    assert salvage_request(main[:-1]) == ("r-1", 3)


def test_a_short_array_has_the_default_client():
    assert salvage_request(msgpack.packb(WHOLE[:9])) == ("r-1", 0)


@pytest.mark.parametrize("index", [True, -1, 1.0, "0", None, 1 << 40])
def test_an_index_that_is_none_is_not_believed(index):
    assert salvage_request(packed((11, index))) == ("r-1", None)


@pytest.mark.parametrize(
    "main",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x93",
        b"\xdd\xff\xff\xff\xff",
        msgpack.packb({"request_id": "r"}),
        msgpack.packb("r"),
        packed((0, 1)),
        packed((0, b"r")),
        packed((0, "")),
        packed((0, "x" * (MOST_ID_CHARACTERS + 1))),
        b"\x9d\xa2\xff\xfe",  # no UTF-8
        b"\x9d\xdb\xff\xff\xff\xffr",  # a string longer than the frame
        b"\x9d" * 5000,
    ],
)
def test_what_does_not_begin_as_a_request_has_no_id(main):
    assert salvage_request(main) == (None, None)


def test_deep_nesting_after_the_id_is_only_damage():
    assert salvage_request(b"\x9d\xa1r" + b"\x91" * 100_000) == ("r", None)


@given(st.binary(max_size=200))
def test_no_bytes_make_it_raise(main):
    salvage_request(main)


@given(st.integers(0, 400), st.integers(0, 255))
def test_no_flipped_byte_makes_it_raise(position, value):
    main = bytearray(packed())
    main[position % len(main)] = value
    salvage_request(main)


CALL = [2, 2**63 + 7, "is_sleeping", []]


def test_a_broken_utility_call_says_whose_it_is():
    main = msgpack.packb(CALL)
    for length in range(11, len(main) + 1):  # array header, client index, call id
        assert salvage_call(main[:length]) == (2, 2**63 + 7)


@pytest.mark.parametrize(
    "main",
    [
        b"",
        b"\x94",
        b"\x94\x02",
        b"\xc1",
        *map(msgpack.packb, (CALL[:3], ["r-1", *CALL[1:]], [-1, *CALL[1:]], [2, "7", "x", []])),
    ],
)
def test_what_does_not_begin_as_a_utility_call_has_no_caller(main):
    assert salvage_call(main) is None

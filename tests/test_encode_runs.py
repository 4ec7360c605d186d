"""Same wire: ids, slices and fields are written many at a time; wherever a run begins, breaks or ends, the bytes are the same."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory import in_fresh_process

from fastmm import EncodeError, Encoder, FastmmError, SchemaError, available_isas

msgspec = pytest.importorskip("msgspec")

ENCODER = Encoder()


def main(value):
    (frame,) = ENCODER.encode(value)
    return bytes(frame)


def plain(value):
    """The tree with every slice as the three numbers that it is on the wire."""
    if isinstance(value, slice):
        return [None if bound is None else int(bound) for bound in (value.start, value.stop, value.step)]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def assert_as_msgspec(value):
    assert main(value) == msgspec.msgpack.encode(plain(value))


INTEGERS = st.sampled_from(
    [
        0,
        1,
        127,
        128,
        255,
        256,
        65535,
        65536,
        2**31 - 1,
        2**31,
        2**32 - 1,
        2**32,
        2**60,
        2**63,
        2**64 - 1,
        -1,
        -32,
        -33,
        -(2**63),
    ]
)
ODD = st.sampled_from([None, True, False, 1.5, "x", b"y", [], (1,), {}])
RUN = st.tuples(INTEGERS | ODD, st.sampled_from([1, 1, 2, 3, 4, 5, 7, 8, 63, 64, 65, 127, 128, 129, 256, 300]))


@settings(max_examples=400, deadline=None)
@given(st.lists(RUN, max_size=8))
def test_runs_of_one_value_and_of_many(runs):
    assert_as_msgspec([value for value, count in runs for _ in range(count)])


@pytest.mark.parametrize("value", [0, 127, 128, 65535, 65536, 2**32 - 1, 2**32, 2**63, -1, -33, -(2**63), True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 127, 128, 129, 1000, 40_000])
def test_the_same_object_many_times(value, count):
    assert_as_msgspec([value] * count)
    assert_as_msgspec([7, *[value] * count, 8, 9])
    assert_as_msgspec([*range(300), *[value] * count, *range(300)])


def test_placeholders_between_text():
    rng = random.Random(1)
    for _ in range(100):
        ids = []
        for _ in range(rng.randint(1, 6)):
            ids += [rng.randrange(152_064) for _ in range(rng.randint(0, 300))]
            ids += [151_655] * rng.randint(0, 600)
        assert_as_msgspec(ids)


@pytest.mark.parametrize("position", [0, 1, 3, 4, 63, 127, 128, 129, 200, 299])
@pytest.mark.parametrize("odd", [2**64, -(2**63) - 1, 2**200])
def test_an_integer_that_does_not_fit_is_found_wherever_it_stands(position, odd):
    ids = list(range(1000, 1300))
    ids[position] = odd
    for tree, index in ((ids, position), ([odd] * 300, 0), ([*[5] * 200, odd], 200), ([*[5] * 200, *[odd] * 200], 200)):
        with pytest.raises(EncodeError, match=r"2\*\*64") as info:
            ENCODER.encode(tree)
        assert info.value.path == f"$[{index}]"


# --- slices ---------------------------------------------------------------------------------------------------------------

BOUNDS = st.none() | INTEGERS | st.booleans()
SLICES = st.builds(slice, BOUNDS, BOUNDS, BOUNDS)
ROWS = st.recursive(
    SLICES | ODD, lambda inner: st.lists(inner, max_size=5) | st.lists(inner, max_size=4).map(tuple), max_leaves=30
)


@settings(max_examples=500, deadline=None)
@given(st.lists(ROWS, max_size=12))
def test_slices_in_lists_and_tuples_of_any_shape(rows):
    assert_as_msgspec(rows)


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 127, 128, 129, 1000])
def test_rows_of_slices_as_flat_fields_have_them(count):
    for step in (1, 300, 70_000, 2**33):
        assert_as_msgspec([(slice(i * step, (i + 1) * step),) for i in range(count)])
        assert_as_msgspec([(slice(None), slice(i * step, (i + 1) * step)) for i in range(count)])
        assert_as_msgspec([[slice(i * step, (i + 1) * step)] for i in range(count)])
        assert_as_msgspec([slice(i * step, (i + 1) * step, None) for i in range(count)])
        assert_as_msgspec([slice(i) if i % 7 else (slice(i),) if i % 2 else (i, slice(i), None) for i in range(count)])
        assert_as_msgspec([(slice(i),) * 20 if i == count // 2 else (slice(i),) for i in range(count)])


class Index:
    def __index__(self):
        return 5


@pytest.mark.parametrize("position", [0, 1, 100, 127, 128, 200])
def test_a_bound_that_is_no_plain_integer_in_the_middle_of_a_run(position):
    rows = [(slice(i, i + 1),) for i in range(201)]
    rows[position] = (slice(Index(), 2**64 - 1),)
    assert main(rows) == msgspec.msgpack.encode(
        plain([(slice(5, 2**64 - 1),) if i == position else r for i, r in enumerate(rows)])
    )
    rows[position] = (slice(0, 1.5),)
    with pytest.raises(SchemaError) as info:
        ENCODER.encode({"slices": rows})
    assert info.value.path.startswith(f"$['slices'][{position}]")
    rows[position] = slice(2**64)
    with pytest.raises(EncodeError):
        ENCODER.encode(rows)


def test_subclasses_in_a_run():
    class Child(tuple):
        pass

    assert_as_msgspec([(slice(1),), Child((slice(2),)), (slice(3),), Child(), ()])


# --- fields ---------------------------------------------------------------------------------------------------------------

VALUES = [None, True, False, 0, 127, 128, 2**32, 2**63, -(2**63), 1.5, "", "x" * 31, "x" * 32, "x" * 300, "é", "\U0001f600" * 5]
VALUES += [b"", b"x" * 20, [], [1, 2, 3, 4], {}, {"a": 1}, (), (1,), msgspec.UNSET, [None] * 20]
NAME = st.integers(1, 300).map(lambda n: "n" * n) | st.sampled_from(
    ["a", "é" * 10, "b" * 14, "c" * 15, "d" * 16, "e" * 31, "f" * 32]
)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(NAME, unique=True, max_size=20),
    st.randoms(use_true_random=False),
    st.sampled_from(["slots", "dict", "struct", "array"]),
)
def test_fields_of_any_name_holding_anything(names, rng, kind):
    if kind == "struct" or kind == "array":
        values = [value for value in VALUES if value is not msgspec.UNSET or kind == "struct"]
        cls = msgspec.defstruct("S", names, array_like=kind == "array")
    else:
        values = VALUES
        cls = dataclasses.make_dataclass("D", names, slots=kind == "slots")
    made = cls(*[rng.choice(values) for _ in names])
    assert main([made, made]) == msgspec.msgpack.encode([made, made])


@pytest.mark.parametrize("kind", ["slots", "dict", "struct", "array"])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 40])
def test_an_error_names_the_field_wherever_it_stands_in_a_run(kind, count):
    names = [f"f{i}" for i in range(count)]
    cls = (
        msgspec.defstruct("S", names, array_like=kind == "array")
        if kind in ("struct", "array")
        else dataclasses.make_dataclass("D", names, slots=kind == "slots")
    )
    for bad in range(count):
        made = cls(*range(count))
        for wrong in (object(), 2**64, "\ud800", [1, 2, object()]):
            setattr(made, f"f{bad}", wrong)
            with pytest.raises(FastmmError) as info:
                ENCODER.encode([made])
            assert info.value.path.startswith(f"$[0].f{bad}")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 33_000), st.integers(0, 40))
def test_a_run_at_the_very_end_of_the_room(before, count):
    """The buffer grows between any two writes; nothing is lost there."""
    tree = ["x" * before, *[(slice(i, 2**40),) for i in range(count)], [2**32 - 1] * count, list(range(70_000, 70_000 + count))]
    encoder = Encoder()
    assert bytes(encoder.encode(tree)[0]) == msgspec.msgpack.encode(plain(tree))


@pytest.mark.parametrize("isa", available_isas())
def test_ids_are_the_same_by_every_kernel(isa):
    in_fresh_process(f"""
import os, random
os.environ["FASTMM_ISA"] = {isa!r}
import fastmm, msgspec
assert fastmm.selected_isa() == {isa!r}
encoder, rng = fastmm.Encoder(), random.Random(5)
edges = [1, 127, 128, 255, 256, 65535, 65536, 2**24, 2**30 - 1]
for top in (127, 255, 65535, 152064, 2**24, 2**30 - 1, None):
    for count in (*range(4, 80), 127, 128, 129, 500, 1000):
        ids = [rng.choice(edges) if top is None else rng.randint(1, top) for _ in range(count)]
        assert bytes(encoder.encode(ids)[0]) == msgspec.msgpack.encode(ids), (top, count)
""")

"""Same wire: plain values and containers are written as msgspec, and so vLLM, writes them. msgpack reads them back."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import math
import struct
import types
import uuid
from typing import NamedTuple

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastmm
from fastmm import EncodeError, Encoder, FastmmError, SchemaError

msgspec = pytest.importorskip("msgspec")

ENCODER = Encoder()


def main(value):
    frames = ENCODER.encode(value)
    assert len(frames) == 1
    return bytes(frames[0])


def assert_as_msgspec(value):
    assert main(value) == msgspec.msgpack.encode(value)


# --- trees ----------------------------------------------------------------------------------------------------------------

INTEGERS = st.integers(-(2**63), 2**64 - 1)
EDGES = [0, 31, 32, 127, 128, 255, 256, 65535, 65536, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
EDGES += [-1, -31, -32, -33, -127, -128, -129, -32768, -32769, -(2**31), -(2**31) - 1, -(2**63)]
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | INTEGERS | st.sampled_from(EDGES) | st.floats() | TEXT | st.binary()
KEYS = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | TEXT | st.binary(max_size=40)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=20)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=20)
        | st.frozensets(KEYS, max_size=5)
        | st.sets(INTEGERS, max_size=5)
    ),
    max_leaves=40,
)


@settings(max_examples=600, deadline=None)
@given(TREES)
def test_a_plain_tree_is_written_as_msgspec_writes_it(tree):
    assert_as_msgspec(tree)


def as_read(value):
    """What msgpack reads where the tree itself does not come back: tuples and sets are lists."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_read(item) for item in value]
    if isinstance(value, dict):
        return {key: as_read(item) for key, item in value.items()}
    return value


def same(a, b):
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(map(same, a.values(), b.values()))
    return type(a) is type(b) and a == b


@settings(max_examples=300, deadline=None)
@given(TREES)
def test_a_plain_tree_comes_back_from_msgpack(tree):
    assert same(msgpack.unpackb(main(tree), strict_map_key=False), as_read(tree))


@pytest.mark.parametrize("value", EDGES)
def test_an_integer_takes_its_shortest_form(value):
    assert_as_msgspec(value)
    assert_as_msgspec([value] * 5)  # the way of token ids
    assert_as_msgspec([value, None, value, 1.5, value])


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**40, -(10**40)])
def test_an_integer_beyond_the_wire_is_refused(value):
    for tree in (value, [value], [1, 2, 3, 4, value], {"a": value}):
        with pytest.raises(EncodeError, match=r"-2\*\*63 to 2\*\*64"):
            ENCODER.encode(tree)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-5, 2**32 + 5) | st.sampled_from(EDGES) | st.booleans(), max_size=700))
def test_token_ids_of_any_length_and_size_are_written_as_msgspec_writes_them(ids):
    assert_as_msgspec(ids)


@pytest.mark.parametrize("count", [*range(40), *range(120, 140), 255, 256, 257, 4095, 65535, 65536, 70000])
def test_token_ids_around_the_borders_of_a_chunk_and_of_a_header(count):
    ids = [(i * 7919) % 152_064 for i in range(count)]
    assert_as_msgspec(ids)
    assert_as_msgspec([*ids, "x"])
    assert_as_msgspec([*ids, -1, *ids])


@pytest.mark.parametrize("bits", [0x7FF8 << 48, 0xFFF8 << 48, 0x7FF0000000000001, 1, 0x8000 << 48, 0x7FEF_FFFF_FFFF_FFFF])
def test_a_float_keeps_its_bits(bits):
    value = struct.unpack(">d", struct.pack(">Q", bits))[0]
    assert main(value) == b"\xcb" + struct.pack(">Q", bits)


@pytest.mark.parametrize("nbytes", [0, 1, 31, 32, 255, 256, 65535, 65536, 100_000])
def test_text_and_bytes_around_the_borders_of_a_header(nbytes):
    assert_as_msgspec("x" * nbytes)
    assert_as_msgspec(b"x" * nbytes)
    assert_as_msgspec({"k" * nbytes: bytearray(nbytes)})


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 65535, 65536])
def test_containers_around_the_borders_of_a_header(count):
    for value in ([None] * count, (None,) * count, dict.fromkeys(range(count)), set(range(count)), frozenset(range(count))):
        assert_as_msgspec(value)


def test_a_lone_surrogate_is_refused_with_its_path():
    with pytest.raises(EncodeError, match="surrogate") as info:
        ENCODER.encode({"a": ["\ud800"]})
    assert info.value.path == "$['a'][0]"
    with pytest.raises(EncodeError, match="surrogate"):
        ENCODER.encode({"\udfff": 1})


# --- keys -----------------------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"
    TWO = 2
    PAIR = (1, "a")
    MAP = {"a": [1]}
    NOTHING = None
    HALF = 0.5


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 300


class Name(str, enum.Enum):
    A = "a"


class Shouted(str, enum.Enum):
    def __new__(cls, text):
        made = str.__new__(cls, text)
        made._value_ = text + "!"
        return made

    A = "a"


class Bits(enum.Flag):
    X = 1
    Y = 2


class IntBits(enum.IntFlag):
    X = 1
    Y = 2


class Asked(enum.Enum):
    A = 1

    @property
    def value(self):
        return "never"


MEMBERS = [*Colour, *Level, *Name, *Shouted, Bits.X | Bits.Y, Bits(0), IntBits.X | IntBits.Y, *Asked]


@pytest.mark.parametrize("member", MEMBERS, ids=repr)
def test_an_enum_is_its_value_wherever_it_stands(member):
    assert_as_msgspec(member)
    assert_as_msgspec([member, {"a": member}])
    assert_as_msgspec({member: 1})


def test_an_enum_whose_value_is_unknown_to_the_wire_is_refused():
    class Odd(enum.Enum):
        A = object()

    with pytest.raises(SchemaError):
        ENCODER.encode([Odd.A])


KEYS_OF_ALL_KINDS = [
    *("a", 1, -1, 2**64 - 1, 1.5, None, True, b"ab", (1, "a"), (), frozenset({1}), datetime.date(2020, 1, 2)),
    *(uuid.UUID(int=5), decimal.Decimal("1.50"), datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc)),
]


@pytest.mark.parametrize("key", KEYS_OF_ALL_KINDS, ids=repr)
def test_a_key_may_be_anything_that_can_be_written(key):
    assert_as_msgspec({key: 1})
    assert_as_msgspec({"first": None, key: {key: key}})


def test_a_subclass_of_str_is_a_key_but_no_value():
    class Text(str):
        pass

    assert main({Text("a"): 1, np.str_("b"): 2}) == main({"a": 1, "b": 2}) == msgspec.msgpack.encode({Text("a"): 1, "b": 2})
    with pytest.raises(SchemaError):
        ENCODER.encode([Text("a")])


class IntChild(int):
    pass


class FloatChild(float):
    pass


class DateChild(datetime.datetime):
    pass


@pytest.mark.parametrize("value", [IntChild(1), FloatChild(1), DateChild(2020, 1, 1)], ids=lambda v: type(v).__name__)
def test_subclasses_of_scalars_are_refused_as_values_and_keys(value):
    for tree in (value, [value], {value: 1}):
        with pytest.raises(SchemaError):
            ENCODER.encode(tree)
        with pytest.raises(TypeError):
            msgspec.msgpack.encode(tree)


def test_keys_keep_the_order_of_insertion():
    mapping = {"b": 1, "a": 2}
    mapping["c"] = mapping.pop("b")
    assert main(mapping) == b"\x82\xa1a\x02\xa1c\x01"


# --- sequences, mappings --------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: int
    right: str = "r"


class Reversed(list):
    def __iter__(self):
        return reversed(list(super().__iter__()))


class LyingDict(dict):
    def __iter__(self):
        return iter(["lie"])

    def items(self):
        return [("lie", 1)]

    def __len__(self):
        return 5


class LyingSet(set):
    def __iter__(self):
        return iter([7, 8])


def ordered():
    mapping = collections.OrderedDict(a=1, b=2)
    mapping.move_to_end("a")
    return mapping


@pytest.mark.parametrize(
    "value",
    [
        *(Pair(1), [Pair(1, "x")], Reversed([1, 2, 3]), LyingDict(a=1), ordered(), collections.defaultdict(list, a=[1])),
        *(collections.Counter("aab"), frozenset({"x", "y"}), {"x", "y", "z"}, [[[]]], ((),), {}, [], ()),
    ],
    ids=lambda v: type(v).__name__,
)
def test_subclasses_of_containers_are_read_as_msgspec_reads_them(value):
    assert_as_msgspec(value)


def test_a_set_with_an_iterator_of_its_own_is_written_whole():
    """msgspec counts the set and writes what the iterator gives: a message that nobody can read."""
    assert main(LyingSet({1})) == b"\x92\x07\x08"


def test_a_mapping_that_is_no_dict_is_written_as_the_dict_it_shows():
    """vLLM refuses most of these; its own UserDict, which fastmm cannot import, is one of them."""
    for mapping in (collections.UserDict(a=1), collections.ChainMap({"a": 1}), types.MappingProxyType({"a": 1})):
        assert main(mapping) == b"\x81\xa1a\x01"


@pytest.mark.parametrize(
    "value",
    [
        object(),
        object,
        range(3),
        iter([]),
        (x for x in ()),
        1j,
        ...,
        NotImplemented,
        len,
        np,
        collections.deque(),
        Exception("x"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_msgspec_refuses_is_refused_with_its_type_and_path(value):
    with pytest.raises(TypeError):
        msgspec.msgpack.encode(value)
    with pytest.raises(SchemaError, match=type(value).__name__) as info:
        ENCODER.encode({"a": [1, value]})
    assert info.value.path == "$['a'][1]"


# --- bytes, extensions ----------------------------------------------------------------------------------------------------

VIEWS = {
    "bytes": memoryview(b"abc"),
    "writable": memoryview(bytearray(b"abc")),
    "floats": memoryview(np.arange(3.0)),
    "matrix": memoryview(np.arange(6, dtype="i2").reshape(2, 3)),
    "big-endian": memoryview(np.arange(3, dtype=">f4")),
    "half": memoryview(np.arange(3, dtype="f2")),
    "text": memoryview(np.array(["ab", "c"])),
    "records": memoryview(np.zeros(2, dtype="i4,f8")),
    "bools": memoryview(np.array([True, False])),
    "complex": memoryview(np.ones(2, dtype="c8")),
    "scalar": memoryview(np.array(1.5)),
    "empty": memoryview(b""),
    "empty matrix": memoryview(np.zeros((0, 3))),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_contiguous_memoryview_is_its_bytes_whatever_its_format(name):
    assert_as_msgspec(VIEWS[name])


def test_a_strided_memoryview_is_refused():
    for view in (memoryview(b"abcdef")[::2], memoryview(np.arange(6).reshape(2, 3).T)):
        with pytest.raises(EncodeError, match="contiguous"):
            ENCODER.encode([view])


def test_a_released_memoryview_is_refused():
    view = memoryview(b"abc")
    view.release()
    with pytest.raises(FastmmError) as info:
        ENCODER.encode([view])
    assert info.value.path == "$[0]"


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 255, 256, 65535, 65536])
@pytest.mark.parametrize("code", [0, 5, 127, -128, -1])
def test_extensions_take_their_shortest_header(code, nbytes):
    for data in (bytes(nbytes), bytearray(nbytes), memoryview(bytes(nbytes))):
        assert_as_msgspec([msgspec.msgpack.Ext(code, data), 1])


def test_an_extension_of_msgpack_is_one_too():
    assert main(msgpack.ExtType(5, b"abcd")) == msgpack.packb(msgpack.ExtType(5, b"abcd"))
    assert main(msgpack.Timestamp(5, 7)) == msgpack.packb(msgpack.Timestamp(5, 7))


@pytest.mark.parametrize("code", [1, 2])
def test_an_extension_that_vllm_would_unpickle_is_never_written(code):
    with pytest.raises(SchemaError, match="pickle") as info:
        ENCODER.encode({"a": msgspec.msgpack.Ext(code, b"x")})
    assert info.value.path == "$['a']"


@pytest.mark.parametrize("code", [257, 258, -254, 128, -129, 2**40, "x", None, 1.0, b"1"])
def test_an_extension_code_is_a_byte_and_no_pickle_in_disguise(code):
    with pytest.raises(FastmmError) as info:
        ENCODER.encode([msgpack.ExtType(5, b"x")._replace(code=code)])
    assert info.value.path == "$[0]"


def test_raw_bytes_are_written_as_they_are():
    for raw in (b"\x93\x01\x02\x03", b""):
        assert main([msgspec.Raw(raw), 1]) == msgspec.msgpack.encode([msgspec.Raw(raw), 1])
    assert main(msgspec.Raw(memoryview(b"..\x05")[2:])) == b"\x05"


@pytest.mark.parametrize("tree", [[msgspec.UNSET], {"a": msgspec.UNSET}, msgspec.UNSET])
def test_unset_has_no_form_outside_structs(tree):
    with pytest.raises(SchemaError):
        ENCODER.encode(tree)


# --- numpy scalars, times -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scalar", "plain"),
    [
        *(
            (np.float64(1.5), 1.5),
            (np.float32(0.5), 0.5),
            (np.float16(2), 2.0),
            (np.int64(-3), -3),
            (np.uint64(2**64 - 1), 2**64 - 1),
        ),
        *((np.bool_(True), True), (np.int8(-128), -128), (np.str_("a"), "a"), (np.bytes_(b"a"), b"a"), (np.uint8(200), 200)),
    ],
)
def test_a_numpy_scalar_is_a_number(scalar, plain):
    assert main([scalar, {"a": scalar}]) == main([plain, {"a": plain}])


@pytest.mark.parametrize(
    "scalar",
    [
        np.complex64(1j),
        np.datetime64("2020-01-01"),
        np.timedelta64(5, "s"),
        np.longdouble(1),
        np.void(b"ab"),
        np.datetime64("NaT"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_other_numpy_scalars_are_refused_by_dtype(scalar):
    with pytest.raises(SchemaError, match="numpy scalar of dtype") as info:
        ENCODER.encode([scalar])
    assert info.value.path == "$[0]"


ZONES = (
    st.none()
    | st.sampled_from([datetime.timezone.utc])
    | st.integers(-1439, 1439).map(lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes)))
)


@settings(max_examples=400, deadline=None)
@given(
    st.datetimes(datetime.datetime(2, 1, 1), datetime.datetime(9998, 12, 31), timezones=ZONES)
    | st.dates()
    | st.times(timezones=ZONES)
    | st.timedeltas()
    | st.uuids()
    | st.decimals()
)
def test_times_uuids_and_decimals_are_written_as_msgspec_writes_them(value):
    assert_as_msgspec([value])
    if not (isinstance(value, decimal.Decimal) and value.is_snan()):
        assert_as_msgspec({value: value})


@pytest.mark.parametrize(
    "delta",
    [
        *(datetime.timedelta(), datetime.timedelta(1, 2, 3), datetime.timedelta(-1), datetime.timedelta(seconds=1.5)),
        *(datetime.timedelta(microseconds=-1), datetime.timedelta.max, datetime.timedelta.min, datetime.timedelta(0, 86399)),
    ],
)
def test_durations_at_their_borders(delta):
    assert_as_msgspec(delta)


def test_nothing_is_kept_of_one_message_in_the_next():
    first = main({"a": [1, "x", 2.5]})
    for odd in (object(), 2**70, "\ud800"):
        with pytest.raises(FastmmError):
            ENCODER.encode({"a": [1, "x", odd]})
        assert main({"a": [1, "x", 2.5]}) == first
    assert math.isnan(msgpack.unpackb(main(math.nan)))
    assert fastmm.encode_request({"a": [1, "x", 2.5]}) == [first]

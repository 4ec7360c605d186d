"""Same wire: dataclasses and msgspec structs of every kind are written as msgspec writes them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import subprocess
import sys
import typing
from typing import Any, Generic, TypeVar

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastmm
from fastmm import Encoder, FastmmError, SchemaError

msgspec = pytest.importorskip("msgspec")

ENCODER = Encoder()
Struct = msgspec.Struct
field = msgspec.field


def main(value):
    (frame,) = ENCODER.encode(value)
    return bytes(frame)


def assert_as_msgspec(value):
    assert main(value) == msgspec.msgpack.encode(value)


# --- structs --------------------------------------------------------------------------------------------------------------

DEFAULT_TEXT = "a text that is one object"


class Plain(Struct):
    a: Any
    b: Any = None


class Renamed(Struct, rename="camel"):
    some_name: Any
    other_name: Any = field(default=1, name="Ex")
    _private: Any = 2


class RenamedByFunction(Struct, rename=lambda name: "é" * 20 + name):
    a: Any


class LongNames(Struct):
    a_name_of_more_than_thirty_one_characters: Any
    another_name_of_more_than_thirty_one_characters: Any


class Omitting(Struct, omit_defaults=True):
    a: Any = None
    b: Any = 0
    c: Any = 1.5
    d: Any = DEFAULT_TEXT
    e: Any = field(default_factory=list)
    f: Any = field(default_factory=dict)
    g: Any = field(default_factory=set)
    h: Any = field(default_factory=list)
    i: Any = ()
    j: Any = field(default_factory=bytearray)
    k: Any = True
    m: Any = 1000


class OmittingRequired(Struct, omit_defaults=True, kw_only=True):
    a: Any = 1
    b: Any
    c: Any = 2
    d: Any


class OmittingArray(Struct, omit_defaults=True, array_like=True):
    a: Any = None
    b: Any = field(default_factory=list)


class Tagged(Struct, tag=True):
    a: Any


class TaggedByName(Struct, tag_field="kind", tag="the tag"):
    a: Any


class TaggedByNumber(Struct, tag=-70000):
    a: Any


class TaggedArray(Struct, tag="t", array_like=True):
    a: Any
    b: Any = None


class TaggedOmitting(Struct, tag=True, omit_defaults=True):
    a: Any = None
    b: Any = 1


class Frozen(Struct, frozen=True):
    a: Any


class WithDict(Struct, dict=True):
    a: Any


class Weak(Struct, weakref=True):
    a: Any


class Untracked(Struct, gc=False):
    a: Any


class Base(Struct):
    a: Any
    b: Any = 5


class Child(Base, kw_only=True):
    c: Any


class ChildArray(Base, array_like=True):
    c: Any = None


class Empty(Struct):
    pass


class EmptyArray(Struct, array_like=True):
    pass


class EmptyTagged(Struct, tag=True, omit_defaults=True):
    pass


T = TypeVar("T")


class Box(Struct, Generic[T]):
    value: T


def wide(count, **options):
    return msgspec.defstruct(f"Wide{count}", [(f"f{i}", Any, None) for i in range(count)], **options)


WIDE = [
    wide(count, **options)
    for count in (1, 14, 15, 16, 17, 300)
    for options in ({}, {"omit_defaults": True}, {"omit_defaults": True, "tag": True}, {"tag": 5}, {"array_like": True})
]
CONTENT = [
    None,
    0,
    1,
    1.5,
    float("1.5"),
    1000,
    int("1000"),
    DEFAULT_TEXT,
    "".join(DEFAULT_TEXT),
    [],
    [1],
    {},
    {"a": 1},
    set(),
    {2},
]
CONTENT += [(), (1,), frozenset(), bytearray(), True, False, "", msgspec.UNSET, Plain(1), TaggedArray(1), Omitting()]
CLASSES = [
    Plain,
    Renamed,
    LongNames,
    Omitting,
    OmittingRequired,
    OmittingArray,
    Tagged,
    TaggedByName,
    TaggedByNumber,
    TaggedArray,
]
CLASSES += [TaggedOmitting, Frozen, WithDict, Weak, Untracked, Base, Child, ChildArray, Empty, EmptyArray, EmptyTagged, Box]
CLASSES += [RenamedByFunction, *WIDE]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_struct_of_any_kind_is_written_as_msgspec_writes_it(cls):
    allowed = CONTENT
    if cls.__struct_config__.array_like:
        allowed = [value for value in CONTENT if value is not msgspec.UNSET]
    infos = msgspec.structs.fields(cls)
    for seed in range(40):
        rng = random.Random(seed)
        values = {info.name: rng.choice(allowed) for info in infos if info.required or rng.random() < 0.5}
        made = cls(**values)
        assert_as_msgspec([made, {"k": made}])


@pytest.mark.parametrize("cls", WIDE, ids=lambda cls: cls.__name__)
def test_the_header_of_a_struct_at_every_count_of_fields_present(cls):
    names = cls.__struct_fields__
    for present in {0, 1, 13, 14, 15, 16, len(names)}:
        assert_as_msgspec(cls(**dict.fromkeys(names[:present], 7)))


def test_unset_leaves_a_field_out_of_a_map_and_is_refused_in_an_array():
    assert_as_msgspec(Plain(msgspec.UNSET, 1))
    assert_as_msgspec(wide(16)(msgspec.UNSET))
    with pytest.raises(SchemaError) as info:
        ENCODER.encode(TaggedArray(msgspec.UNSET))
    assert info.value.path == "$.a"


def test_a_field_that_was_deleted_is_an_error_with_its_path():
    for cls in (Plain, TaggedArray, Omitting, Tagged):
        made = cls(1)
        del made.a
        with pytest.raises(SchemaError, match="not set") as info:
            ENCODER.encode([made])
        assert info.value.path == "$[0].a"


def test_a_path_names_the_attribute_not_the_name_on_the_wire():
    with pytest.raises(SchemaError) as info:
        ENCODER.encode(Renamed(object()))
    assert info.value.path == "$.some_name"


def test_subclasses_made_at_run_time_have_plans_of_their_own():
    for count in range(50):
        cls = msgspec.defstruct("Same", [(f"f{i}", Any) for i in range(count % 7)], rename=lambda name, c=count: f"{name}{c}")
        assert_as_msgspec(cls(*range(count % 7)))


@pytest.mark.parametrize("value", [Plain, TaggedArray, Omitting, int, type, list[int], typing.Any, dataclasses.MISSING])
def test_a_class_is_no_value(value):
    for tree in (value, [value], Plain(value)):
        with pytest.raises(SchemaError):
            ENCODER.encode(tree)


# --- dataclasses ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class D:
    a: Any
    b: Any = None


@dataclasses.dataclass(slots=True)
class Slots:
    a: Any
    b: Any = None


@dataclasses.dataclass(frozen=True)
class FrozenD:
    a: Any


@dataclasses.dataclass(slots=True, frozen=True, order=True)
class FrozenSlots:
    a: Any


@dataclasses.dataclass
class Inherits(D):
    c: Any = 3


@dataclasses.dataclass(slots=True)
class InheritsSlots(Slots):
    c: Any = 3


@dataclasses.dataclass
class DictOverSlots(Slots):
    c: Any = 3


@dataclasses.dataclass(slots=True)
class SlotsOverDict(D):
    c: Any = 3


class Undecorated(D):
    more = 5


class UndecoratedSlots(Slots):
    pass


@dataclasses.dataclass
class Special:
    kept: Any
    class_level: typing.ClassVar[int] = 1
    only_init: dataclasses.InitVar[int] = 2
    _private: Any = 3
    hidden: Any = dataclasses.field(default=4, init=False, repr=False)

    def __post_init__(self, only_init):
        self.extra = only_init

    @functools.cached_property
    def computed(self):
        return 9


@dataclasses.dataclass
class WithProperty:
    a: Any
    b: Any = 1

    @property
    def b(self):  # noqa: F811
        return self.__dict__["_b"]

    @b.setter
    def b(self, value):
        self._b = value if not isinstance(value, property) else 2


@dataclasses.dataclass
class WithGetattr:
    a: Any

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"computed {name}"


@dataclasses.dataclass
class Keyword(typing.Generic[T]):
    from_: T
    a_name_of_more_than_thirty_one_characters: Any = dataclasses.field(default_factory=dict, kw_only=True)


@dataclasses.dataclass
class NoFields:
    pass


@dataclasses.dataclass
class OfDict(dict):
    a: Any = 1


@dataclasses.dataclass
class OfList(list):
    a: Any = 1


DATACLASSES = [
    *(
        D(1),
        D([1], {"a": D(None)}),
        Slots(1, 2),
        FrozenD(1.5),
        FrozenSlots("x"),
        Inherits(1),
        InheritsSlots(1),
        DictOverSlots(1),
    ),
    *(
        SlotsOverDict(1),
        Undecorated(1),
        UndecoratedSlots(1),
        Special(1),
        WithProperty(1),
        WithGetattr(1),
        Keyword(1),
        NoFields(),
    ),
    *(OfDict(5), OfList(5), [D(1)] * 3, {"k": Slots(D(2))}, D(msgspec.UNSET, msgspec.UNSET), Slots(msgspec.UNSET)),
]


@pytest.mark.parametrize("value", DATACLASSES, ids=lambda v: type(v).__name__)
def test_a_dataclass_is_written_as_msgspec_writes_it(value):
    assert_as_msgspec(value)


def with_extras(value):
    value.added = 1
    return value


def without(value, name):
    delattr(value, name)
    return value


def reordered(value):
    a = value.__dict__.pop("a")
    value.__dict__["a"] = a
    return value


def looked_at(value):
    value.computed
    return value


@pytest.mark.parametrize(
    "value",
    [
        *(with_extras(D(1)), with_extras(Undecorated(1)), with_extras(UndecoratedSlots(1)), with_extras(DictOverSlots(1))),
        *(
            without(D(1), "a"),
            without(D(1), "b"),
            without(Slots(1), "a"),
            without(Inherits(1), "b"),
            without(DictOverSlots(1), "a"),
        ),
        *(reordered(D(1, 2)), reordered(Inherits(1)), reordered(with_extras(D(1, 2))), looked_at(Special(1))),
        without(WithGetattr(1), "a"),
    ],
)
def test_attributes_that_came_or_went_are_treated_as_msgspec_treats_them(value):
    assert_as_msgspec(value)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 20), st.booleans(), st.lists(st.integers(0, 19), max_size=6), st.randoms())
def test_dataclasses_made_at_run_time(count, slots, removed, random):
    cls = dataclasses.make_dataclass("Made", [f"f{i}" for i in range(count)], slots=slots)
    made = cls(*range(count))
    for index in {i for i in removed if i < count}:
        delattr(made, f"f{index}")
        if random.random() < 0.5:
            setattr(made, f"f{index}", "back")
    assert_as_msgspec(made)


def test_a_property_that_raises_is_an_error_with_its_path():
    @dataclasses.dataclass
    class Bad:
        a: Any = 1

        @property
        def a(self):  # noqa: F811
            raise RuntimeError("no")

        @a.setter
        def a(self, value):
            pass

    with pytest.raises(FastmmError) as info:
        ENCODER.encode([Bad()])
    assert info.value.path == "$[0].a"


def test_what_a_property_makes_lives_as_long_as_the_message():
    torch = pytest.importorskip("torch")

    @dataclasses.dataclass
    class Makes:
        a: Any = 1

        @property
        def a(self):  # noqa: F811
            return torch.full((100,), 7.0)

        @a.setter
        def a(self, value):
            pass

    frames = ENCODER.encode([Makes() for _ in range(50)])
    assert all(bytes(frame) == torch.full((100,), 7.0).numpy().tobytes() for frame in frames[1:])
    assert len(frames) == 51


@dataclasses.dataclass
class Unrelated:
    """Not a class of the wire: its fields of well-known names mean nothing."""

    mm_features: Any
    prompt_embeds: Any
    data: Any


def test_a_class_of_a_stranger_with_well_known_field_names_is_any_dataclass():
    np = pytest.importorskip("numpy")
    array = np.ones(200, dtype=np.float32)
    frames = Encoder(dtype="bfloat16").encode(Unrelated([array], array, array))
    assert msgpack.unpackb(frames[0])["data"] == ["<f4", [200], 1]
    assert array[0] == 1


def test_unset_is_known_before_any_struct_was_seen():
    code = (
        "import dataclasses, msgspec, fastmm\n"
        "D = dataclasses.make_dataclass('D', ['a', 'b'])\n"
        "value = D(msgspec.UNSET, 1)\n"
        "assert fastmm.Encoder().encode(value)[0] == msgspec.msgpack.encode(value)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- layouts that are not what they seem ----------------------------------------------------------------------------------


def test_a_class_derived_from_the_schema_without_slots_is_refused_or_written_whole():
    @dataclasses.dataclass
    class WithDict(fastmm.EngineCoreRequest):
        extra: int = 0

    @dataclasses.dataclass(slots=True)
    class WithSlots(fastmm.EngineCoreRequest):
        extra: int = 7

    class Plain(fastmm.EngineCoreRequest):
        pass

    base = fastmm.EngineCoreRequest("r", [1], arrival_time=0.0)
    with pytest.raises(SchemaError, match="slots"):
        ENCODER.encode([WithDict("r", [1])])
    assert main(WithSlots("r", [1], arrival_time=0.0)) == b"\xdc\x00\x17" + main(base)[3:] + b"\x07"
    assert main(Plain("r", [1], arrival_time=0.0)) == main(base)


def test_a_slot_that_a_property_hides_where_there_is_no_dict():
    class Hidden(Slots):
        __slots__ = ()

        @property
        def b(self):
            return [self.a, "computed"]

        @b.setter
        def b(self, value):
            pass

    assert_as_msgspec([Hidden(5), Hidden([1])])


def test_a_slot_of_another_class_is_not_read_at_its_word():
    class Wide:
        __slots__ = tuple(f"s{i}" for i in range(60))

    @dataclasses.dataclass(slots=True)
    class Narrow:
        w: Any = None

    Narrow.w = Wide.s59
    with pytest.raises(FastmmError):
        ENCODER.encode([Narrow.__new__(Narrow)])


def test_an_encoder_that_was_not_made_whole_or_twice_is_harmless():
    blank = Encoder.__new__(Encoder)
    for encode in (blank.encode, lambda value: blank.encode_into(value, bytearray()), lambda value: blank.encode_many([value])):
        with contextlib.suppress(FastmmError):
            encode([1, "a"])
    again = Encoder(threshold=0)
    before = again.encode([1])
    again.__init__(threshold=5)
    assert again.encode([1]) == before

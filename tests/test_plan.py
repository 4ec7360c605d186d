"""No leak: a type's plan is made once, is right for that type alone, and dies with it."""

from __future__ import annotations

import dataclasses
import enum
import gc
import threading
import weakref

import pytest
from support.memory import resident_nbytes

from fastmm import Encoder, FastmmError, SchemaError

ENCODER = Encoder()


def made_dataclass(index, slots=False):
    return dataclasses.make_dataclass(f"D{index % 3}", [f"f{index}", "same"], slots=slots)


@pytest.mark.parametrize("slots", [False, True])
def test_a_plan_dies_with_its_type(slots):
    cls = made_dataclass(0, slots)
    ENCODER.encode(cls(1, 2))
    gone = weakref.ref(cls)
    del cls
    gc.collect()
    assert gone() is None


def test_the_plan_of_an_enum_a_subclass_and_a_mapping_dies_too():
    class Colour(enum.Enum):
        RED = 1

    class Child(list):
        pass

    class Unknown:
        pass

    refs = []
    for value in (Colour.RED, Child(), [Child()]):
        ENCODER.encode(value)
    with pytest.raises(SchemaError):
        ENCODER.encode(Unknown())
    refs += [weakref.ref(cls) for cls in (Colour, Child, Unknown)]
    del Colour, Child, Unknown, value
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_a_struct_type_can_go():
    msgspec = pytest.importorskip("msgspec")
    cls = msgspec.defstruct("S", ["a", "b"], omit_defaults=True, tag=True)
    ENCODER.encode(cls(1, 2))
    gone = weakref.ref(cls)
    del cls
    gc.collect()
    assert gone() is None


@pytest.mark.no_asan
def test_ten_thousand_types_one_after_the_other_leave_nothing_behind():
    def round_of(start):
        for index in range(start, start + 1000):
            cls = made_dataclass(index, slots=index % 2 == 1)
            name = f"f{index}"
            (main,) = ENCODER.encode(cls(index, None))
            assert main[:2] == bytes([0x82, 0xA0 | len(name)])
            assert main[2 : 2 + len(name)] == name.encode()
        del cls
        gc.collect()

    round_of(0)
    before = resident_nbytes()
    for start in range(1000, 11_000, 1000):
        round_of(start)
    assert resident_nbytes() - before < 8 << 20


def test_more_types_at_once_than_the_cache_has_places():
    classes = [made_dataclass(index) for index in range(3000)]
    for _ in range(2):
        for index, cls in enumerate(classes):
            assert f"f{index}".encode() in ENCODER.encode(cls(1, 2))[0]


def test_an_address_that_is_used_again_is_another_type():
    """The plan of a dead type must not be found under its old address."""
    seen = set()
    reused = 0
    for index in range(2000):
        cls = type("Same", (), {"__slots__": ()}) if index % 2 else made_dataclass(index)
        reused += id(cls) in seen
        seen.add(id(cls))
        if index % 2:
            with pytest.raises(SchemaError):
                ENCODER.encode(cls())
        else:
            assert f"f{index}".encode() in ENCODER.encode(cls(1, 2))[0]
        del cls
        gc.collect(0)
    assert reused, "no address was used twice: the test shows nothing"


def test_plans_are_made_by_many_threads_at_once():
    classes = [made_dataclass(index, slots=True) for index in range(400)]
    wrong = []

    def encode_all(order):
        for index in order:
            if f"f{index}".encode() not in ENCODER.encode(classes[index](1, 2))[0]:
                wrong.append(index)

    threads = [threading.Thread(target=encode_all, args=(list(range(400))[::step],)) for step in (1, -1, 1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_type_that_fails_while_its_plan_is_made_fails_again_and_leaves_nothing():
    class Bad(type):
        @property
        def __dataclass_fields__(cls):
            raise RuntimeError("no fields today")

    class Value(metaclass=Bad):
        pass

    for _ in range(2):
        with pytest.raises(FastmmError) as info:
            ENCODER.encode({"a": [Value()]})
        assert info.value.path == "$['a'][0]"
    gone = weakref.ref(Value)
    del Value, info  # its traceback holds the class
    gc.collect()
    assert gone() is None
    assert ENCODER.encode([1]) == [b"\x91\x01"]

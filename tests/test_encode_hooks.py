"""Bad input is one clear error: hooks, consumers and other foreign code that runs in the middle of a walk."""

from __future__ import annotations

import collections
import dataclasses
import gc

import msgpack
import numpy as np
import pytest
from support.crashes import CRASHES
from support.memory import in_fresh_process
from support.requests import request, resolve, same_bytes, unpacked

from fastmm import EncodeError, Encoder, FastmmError, LimitError, MmFlatField, SchemaError, encode_request


class Thing:
    """Unknown to the wire."""

    def __init__(self, content=None):
        self.content = content


def read(frames):
    return msgpack.unpackb(memoryview(frames[0]), strict_map_key=False)


# --- hooks ----------------------------------------------------------------------------------------------------------------


def test_what_a_hook_returns_is_written_by_the_same_rules():
    encoder = Encoder(hook=lambda thing: thing.content)
    for content in (None, 1, "x", [1, [2]], {"a": (1,)}, {1, 2}, np.arange(3), slice(1, 2)):
        assert same_bytes(encoder.encode([Thing(content), 7])) == same_bytes(Encoder().encode([content, 7]))
    assert read(encoder.encode({"k": Thing(Thing(Thing(5)))})) == {"k": 5}


def test_a_hook_sees_only_what_the_wire_does_not_know():
    seen = []

    def hook(value):
        seen.append(value)
        return

    thing = Thing()
    Encoder(hook=hook).encode([1, "a", thing, {"k": [thing]}, np.ones(3), 1.5])
    assert seen == [thing, thing]


def test_the_key_of_a_mapping_may_come_from_a_hook():
    assert read(Encoder(hook=lambda thing: thing.content).encode({Thing("key"): 1})) == {"key": 1}


def test_without_a_hook_the_error_names_the_type_and_the_path():
    with pytest.raises(SchemaError, match=rf"{__name__}\.Thing.*hook") as info:
        Encoder().encode({"a": [1, {"b": Thing()}]})
    assert info.value.path == "$['a'][1]['b']"


@pytest.mark.parametrize("error", [RuntimeError("secret words"), KeyError("secret words"), RecursionError("secret words")])
def test_a_hook_that_raises_is_an_encode_error_with_its_cause(error):
    def hook(_):
        raise error

    with pytest.raises(EncodeError, match=type(error).__name__) as info:
        Encoder(hook=hook).encode({"a": [Thing()]})
    assert info.value.path == "$['a'][0]"
    assert info.value.__cause__ is error
    assert "secret" not in str(info.value)


def test_a_hook_may_raise_an_error_of_fastmm_which_gets_the_path():
    def hook(_):
        raise SchemaError("expected something else")

    with pytest.raises(SchemaError, match="expected something else") as info:
        Encoder(hook=hook).encode({"a": [Thing()]})
    assert info.value.path == "$['a'][0]"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_failure_of_input_goes_through_a_hook_as_it_is(stop):
    def hook(_):
        raise stop

    encoder = Encoder(hook=hook)
    with pytest.raises(stop):
        encoder.encode([Thing()])
    assert encoder.encode([1]) == [b"\x91\x01"]


@pytest.mark.parametrize("depth", [1, 64, 500])
def test_a_hook_that_returns_its_argument_meets_the_depth_limit(depth):
    calls = []

    def hook(value):
        calls.append(1)
        return value

    with pytest.raises(LimitError, match="max_depth"):
        Encoder(hook=hook, max_depth=depth).encode(Thing())
    assert len(calls) <= depth


def test_a_hook_that_wraps_for_ever_meets_the_depth_limit():
    with pytest.raises(LimitError, match="max_depth"):
        Encoder(hook=lambda value: [Thing(value)]).encode(Thing())


def test_a_hook_may_encode():
    encoder = Encoder(hook=lambda thing: bytes(encoder.encode([thing.content, "inner"])[0]))
    outer = read(encoder.encode([Thing(5), "outer", Thing(6)]))
    assert [msgpack.unpackb(outer[0]), outer[1], msgpack.unpackb(outer[2])] == [[5, "inner"], "outer", [6, "inner"]]


def test_a_hook_may_write_the_extensions_that_vllm_pickles():
    """In the drop-in, what vLLM itself would pickle when the operator allowed it goes through vLLM's own hook."""
    assert read(Encoder(hook=lambda _: msgpack.ExtType(1, b"x")).encode([Thing()])) == [msgpack.ExtType(1, b"x")]
    with pytest.raises(SchemaError):
        Encoder(hook=lambda _: 1).encode([Thing(), msgpack.ExtType(1, b"x")])


# --- what foreign code makes lives as long as the message ------------------------------------------------------------------


def test_fields_that_a_hook_makes_are_told_apart():
    """Their addresses are used again as soon as they are gone; what is kept by address must not be."""
    encoder = Encoder(hook=lambda thing: MmFlatField(slices=[(slice(0, thing.content),)], dim=0))
    assert [f[1]["slices"][0][0][1] for f in read(encoder.encode([Thing(i) for i in range(200)]))] == list(range(200))


@pytest.mark.parametrize(
    "make",
    [
        lambda n: np.full((40, 30), float(n)).T,
        lambda n: np.full((40, 30), float(n)),
        lambda n: np.full((40, 30), float(n))[::2],
        lambda n: np.full(1000, float(n))[::-1],
    ],
)
def test_arrays_that_a_hook_makes_are_told_apart(make):
    for options in ({}, {"threshold": 2**62}, {"dedup": False}):
        encoder = Encoder(hook=lambda thing: make(thing.content), **options)
        frames = encoder.encode([Thing(i) for i in range(60)])
        assert [np.frombuffer(resolve(t, frames)[2], "f8")[0] for t in unpacked(frames)] == list(range(60))


def test_payloads_that_a_hook_makes_are_told_apart_when_they_are_cast():
    torch = pytest.importorskip("torch")
    for threshold in (0, 2**62):
        encoder = Encoder(dtype="bfloat16", hook=lambda thing: torch.full((500,), float(thing.content)), threshold=threshold)
        frames = encoder.encode(request(*[Thing(i) for i in range(60)]))
        leaves = [item["data"]["pixel_values"]["data"] for item in unpacked(frames)[2]]
        values = [torch.frombuffer(bytearray(resolve(t, frames)[2]), dtype=torch.bfloat16)[0].item() for t in leaves]
        assert values == list(range(60))


def test_a_mapping_that_makes_its_values_when_asked():
    class Lazy(collections.abc.Mapping):
        def __getitem__(self, key):
            return np.full((40, 30), float(key)).T

        def __iter__(self):
            return iter(range(30))

        def __len__(self):
            return 30

    frames = Encoder().encode([Lazy(), Lazy()])
    for mapping in unpacked(frames):
        assert {k: np.frombuffer(resolve(t, frames)[2], "f8")[0] for k, t in mapping.items()} == {k: k for k in range(30)}


def test_nothing_that_a_hook_made_is_kept_after_the_message():
    import weakref

    made = []

    def hook(_):
        array = np.ones(1000)
        made.append(weakref.ref(array))
        return array

    encoder = Encoder(hook=hook)
    frames = encoder.encode([Thing(), Thing()])
    assert all(ref() is not None for ref in made)
    del frames
    gc.collect()
    assert [ref() for ref in made] == [None, None]


# --- a tree that changes during the walk ----------------------------------------------------------------------------------


def mutating(change):
    state = {}

    def hook(_):
        change(state["tree"])
        return 0

    def encode(tree):
        state["tree"] = tree
        return Encoder(hook=hook).encode(tree)

    return encode


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.clear(),
        lambda t: t.pop(),
        lambda t: t.append(1),
        lambda t: t.extend(range(10_000)),
        lambda t: t.__delitem__(0),
    ],
)
@pytest.mark.parametrize("rest", [0, 1, 5, 300])
def test_a_list_that_changes_its_length_is_an_error_or_a_whole_message(change, rest):
    tree = [1, Thing(), *([2.5] * rest)]
    try:
        frames = mutating(change)(tree)
    except EncodeError as error:
        assert "changed" in str(error)
    else:
        assert len(read(frames)) == 2 + rest


@pytest.mark.parametrize(
    "change",
    [
        *(
            lambda t: t.clear(),
            lambda t: t.popitem(),
            lambda t: t.update(new=1),
            lambda t: t.update({i: i for i in range(5000)}),
        ),
        *(lambda t: (t.pop("a"), t.update(z=1)), lambda t: t.update(a=None), lambda t: t.update(b=Thing)),
    ],
)
@pytest.mark.parametrize("rest", [0, 1, 50])
def test_a_dict_that_changes_is_an_error_or_a_whole_message(change, rest):
    tree = {"a": 1, "b": Thing(), **{f"k{i}": i for i in range(rest)}}
    try:
        frames = mutating(change)(tree)
    except FastmmError:
        pass
    else:
        assert len(read(frames)) == 2 + rest


@pytest.mark.parametrize(
    "case",
    [
        "tree = nest(); go(tree, lambda: tree.clear())",
        "tree = [nest()]; go(tree, lambda: tree.__setitem__(0, None))",
        'tree = {"a": nest(), "b": 1}; go(tree, lambda: tree.__setitem__("a", None))',
        'tree = {"a": nest(), "b": 1}; go(tree, lambda: tree.clear())',
        'r = EngineCoreRequest("r", None); r.trace_headers = nest(); go(r, lambda: setattr(r, "trace_headers", None))',
        'r = EngineCoreRequest("r", None); r.mm_features = nest(); go(r, lambda: setattr(r, "mm_features", None))',
        'D = dataclasses.make_dataclass("D", ["a", "b"]); d = D(nest(), 1); go(d, lambda: d.__dict__.clear())',
        'D = dataclasses.make_dataclass("D", ["a", "b"]); d = [D(nest(), 1)]; go(d, lambda: d.clear())',
        'D = dataclasses.make_dataclass("D", ["a", "b"], slots=True); d = D(nest(), nest()); go(d, lambda: setattr(d, "a", 1))',
        'd = [dataclasses.make_dataclass("D", ["a", "b"], slots=True)(nest(), nest())]; go(d, lambda: d.clear())',
        'd = [dataclasses.make_dataclass("D", ["a", "b"])(nest(), nest())]; go(d, lambda: d.clear())',
        'd = {dataclasses.make_dataclass("D", ["a"], eq=False)(nest()): nest()}; go(d, lambda: d.clear())',
        "d = [collections.UserDict(a=nest(), b=Thing())]; go(d, lambda: d.clear())",
        'u = collections.UserDict(a=nest(), b=Thing()); go(u, lambda: setattr(u, "data", {}))',
        'c = type("L", (list,), {})(nest()); d = [c]; del c; go(d, lambda: d.clear())',
        's = [{(1, "a"), Thing(), frozenset({Thing()})}]; go(s, lambda: s.clear())',
        'E = enum.Enum("E", {"A": nest()}); d = [E.A]; go(d, lambda: d.clear())',
        "d = [nest(), slice(Thing(), Thing())]; go(d, lambda: d.clear())",
    ],
)
def test_a_tree_that_a_hook_takes_apart_ends_in_no_crash(case):
    in_fresh_process(CRASHES + case)


def test_a_msgspec_struct_that_a_hook_takes_apart_ends_in_no_crash():
    pytest.importorskip("msgspec")
    in_fresh_process(
        CRASHES
        + """
import msgspec
for array_like in (False, True):
    S = msgspec.defstruct("S", ["a", "b"], array_like=array_like)
    s = S(nest(), nest()); go(s, lambda: setattr(s, "a", None))
    d = [S(nest(), nest())]; go(d, lambda: d.clear())
    d = [msgspec.defstruct("T", ["a", "b"], array_like=array_like, omit_defaults=True)(nest(), 1)]; go(d, lambda: d.clear())
"""
    )


def test_a_metaclass_that_takes_the_tree_apart_ends_in_no_crash():
    in_fresh_process(
        CRASHES
        + """
from support.requests import request
for place in range(4):
    for attribute in ("__dataclass_fields__", "__dlpack__", "__dlpack_c_exchange_api__", "__struct_fields__", "__wire__", "__array__"):
        class Meta(type):
            def __getattr__(cls, name):
                if name == attribute:
                    d.clear(); churn()
                raise AttributeError(name)
        class Odd(metaclass=Meta): pass
        d = [Odd(), nest()]
        tree = d
        if place == 1: tree = request(d)
        if place == 2: tree = {"a": d, "b": 1}
        if place == 3:
            tree = request(1); elem = tree.mm_features[0].data["pixel_values"]
            class Holder:
                def clear(self): elem.data = None; elem.field = None
            d = Holder(); elem.data = Odd(); elem.field = Odd()
        try: Encoder(hook=lambda _: 1).encode(tree)
        except fastmm.FastmmError as error: str(error)
"""
    )


def test_code_that_runs_in_slice_bounds_properties_mappings_and_iterators_may_take_the_tree_apart():
    in_fresh_process(
        CRASHES
        + """
class Index:
    def __index__(self):
        d.clear(); churn()
        return 3
d = [slice(Index(), Index(), Index()), nest()]
try: print(Encoder().encode(d))
except fastmm.FastmmError: pass

@dataclasses.dataclass
class P:
    a: object = 1
    b: object = 2
    @property
    def a(self):
        d.clear(); churn()
        return nest
    @a.setter
    def a(self, value): pass
d = [P(), P(), nest()]
try: Encoder(hook=lambda _: 1).encode(d)
except fastmm.FastmmError: pass

class M(collections.abc.Mapping):
    def __getitem__(self, key):
        d.clear(); churn()
        return [key] * 3
    def __iter__(self): return iter(range(5))
    def __len__(self): return 5
d = [M(), nest()]
try: Encoder(hook=lambda _: 1).encode(d)
except fastmm.FastmmError: pass

class S(set):
    def __iter__(self):
        d.clear(); churn()
        yield 1
d = [S({1, 2}), nest()]
try: Encoder(hook=lambda _: 1).encode(d)
except fastmm.FastmmError: pass

class D:
    def __dlpack_device__(self):
        d.clear(); churn()
        return (1, 0)
    def __dlpack__(self, **options): return np.ones(1000).__dlpack__()
d = [D(), nest()]
try: Encoder(hook=lambda _: 1).encode(d)
except fastmm.FastmmError: pass
"""
    )


@dataclasses.dataclass
class Raising:
    a: int = 1

    @property
    def a(self):  # noqa: F811
        raise ZeroDivisionError("secret words")

    @a.setter
    def a(self, value):
        pass


class RaisingIndex:
    def __index__(self):
        raise ZeroDivisionError("secret words")


class RaisingMapping(collections.abc.Mapping):
    def __getitem__(self, key):
        raise ZeroDivisionError("secret words")

    def __iter__(self):
        return iter("ab")

    def __len__(self):
        return 2


class RaisingSet(set):
    def __iter__(self):
        raise ZeroDivisionError("secret words")


class RaisingDLPack:
    def __dlpack_device__(self):
        raise ZeroDivisionError("no device")

    def __dlpack__(self):
        return None


@pytest.mark.parametrize(
    "value",
    [Raising(), slice(RaisingIndex()), RaisingMapping(), RaisingSet({1}), RaisingDLPack()],
    ids=lambda v: type(v).__name__,
)
def test_foreign_code_that_raises_is_one_error_with_its_path(value):
    with pytest.raises(FastmmError) as info:
        Encoder().encode({"k": [1, value]})
    assert info.value.path is not None
    assert info.value.path.startswith("$['k'][1]")
    assert "secret" not in str(info.value)


def test_a_key_whose_repr_raises_does_not_hide_the_error():
    class Key(str):
        def __repr__(self):
            raise ZeroDivisionError

    with pytest.raises(SchemaError, match="Thing") as info:
        Encoder().encode({Key("a"): Thing()})
    assert info.value.path.startswith("$")


@pytest.mark.parametrize("wrong", [5, "x", object()])
def test_a_hook_or_consumer_must_be_callable(wrong):
    for name in ("hook", "oob_tensor_consumer"):
        with pytest.raises(SchemaError, match=name):
            Encoder(**{name: wrong})
    with pytest.raises(SchemaError, match="hook"):
        encode_request([1], hook=wrong)


def test_a_hook_of_one_call_is_not_kept():
    import weakref

    class Caller:
        def hook(self, _):
            return 1

    caller = Caller()
    gone = weakref.ref(caller)
    assert read(encode_request([Thing()], hook=caller.hook)) == [1]
    del caller
    gc.collect()
    assert gone() is None

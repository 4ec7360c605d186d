"""Every field of every parameter class, one by one and together."""

import dataclasses

import msgspec
import pytest
from peers import our_encoder, vllm_decode, vllm_encoder
from support.compare import assert_same, assert_same_frames
from support.families import SAMPLING_VALUES, all_sampling, fastmm_family, value_of
from support.reference import reference_encode
from vllm.v1 import engine
from vllm_family import FAMILY as VLLM

import fastmm
from fastmm import schema

OURS = fastmm_family()
PAIRS = [
    (schema.EngineCoreRequest, engine.EngineCoreRequest),
    (schema.EngineCoreOutputs, VLLM.outputs),
    *(
        (getattr(OURS, name), getattr(VLLM, name))
        for name in vars(OURS)
        if dataclasses.is_dataclass(getattr(OURS, name)) and name not in ("request", "outputs", "utility_result")
    ),
]


def fields_of_vllm(cls):
    """Name, default and default factory of the fields of a struct, dataclass or named tuple; MISSING where there is none."""
    if issubclass(cls, msgspec.Struct):
        clean = lambda x: dataclasses.MISSING if x is msgspec.NODEFAULT else x  # noqa: E731
        return [(f.name, clean(f.default), clean(f.default_factory)) for f in msgspec.structs.fields(cls)]
    if dataclasses.is_dataclass(cls):
        return [(f.name, f.default, f.default_factory) for f in dataclasses.fields(cls)]
    return [(name, cls._field_defaults.get(name, dataclasses.MISSING), dataclasses.MISSING) for name in cls._fields]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda cls: cls.__name__)
def test_fields_have_vllms_names_order_and_defaults(ours, theirs):
    mine, others = dataclasses.fields(ours), fields_of_vllm(theirs)
    assert [f.name for f in mine] == [name for name, *_ in others]
    for field, (name, default, factory) in zip(mine, others, strict=True):
        if default is not dataclasses.MISSING:
            assert repr(field.default) == repr(default), name
        elif factory is not dataclasses.MISSING:
            assert field.default_factory.__name__ == factory.__name__, name
        elif ours is not schema.EngineCoreRequest or name in ("request_id", "prompt_token_ids"):
            # Of a request vLLM wants nine, we want two.
            assert field.default is field.default_factory is dataclasses.MISSING, name


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda cls: cls.__name__)
def test_classes_say_how_vllm_writes_them(ours, theirs):
    if issubclass(theirs, msgspec.Struct):
        config = theirs.__struct_config__
        expected = "array" if config.array_like else "map-omit-defaults" if config.omit_defaults else "map"
    else:
        expected = "array" if issubclass(theirs, tuple) else "map"
    assert ours.__wire__ == expected


@pytest.mark.parametrize(("name", "index"), [(name, i) for name, values in SAMPLING_VALUES.items() for i in range(len(values))])
def test_each_sampling_field_has_the_same_bytes(name, index):
    value = SAMPLING_VALUES[name][index]
    theirs, ours = (family.sampling(**{name: value_of(value, family)}) for family in (VLLM, OURS))
    expected = vllm_encoder(256).encode(theirs)
    assert_same_frames(reference_encode(ours), expected)
    assert_same_frames(our_encoder(256).encode(theirs), expected)
    assert_same_frames(our_encoder(256).encode(ours), expected)


def test_every_sampling_field_is_tried():
    assert set(SAMPLING_VALUES) == {field.name for field in dataclasses.fields(schema.SamplingParams)}


def test_all_sampling_fields_together_have_the_same_bytes():
    expected = vllm_encoder(256).encode(all_sampling(VLLM))
    assert_same_frames(our_encoder(256).encode(all_sampling(VLLM)), expected)
    assert_same_frames(our_encoder(256).encode(all_sampling(OURS)), expected)


REFUSED = [
    *({"n": 0}, {"n": 2, "temperature": 0}, {"presence_penalty": 2.1}, {"frequency_penalty": -3}, {"repetition_penalty": 0.0}),
    *({"repetition_penalty": float("inf")}, {"temperature": -0.1}, {"temperature": 2.5}, {"temperature": float("nan")}),
    *({"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -2}, {"min_p": -0.1}, {"min_p": 1.5}, {"max_tokens": 0}, {"min_tokens": -1}),
    *(
        {"min_tokens": 17},
        {"stream_interval": 0},
        {"logprobs": -2},
        {"prompt_logprobs": -2},
        {"stop": [""]},
        {"stop": "a", "detokenize": False},
    ),
    *({"bad_words": [""]}, {"thinking_token_budget": -2}, {"thinking_token_budget": 1.5}, {"thinking_token_budget": True}),
    *({"stop_token_ids": ["a"]}, {"n": 1.5}, {"top_k": 1.5}),
]


@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_what_vllm_refuses_in_sampling_we_refuse_and_name_the_field(fields):
    with pytest.raises(Exception):  # noqa: B017 - vLLM's own error type is no part of the promise
        VLLM.sampling(**fields)
    with pytest.raises(fastmm.SchemaError, match="|".join(fields)):
        OURS.sampling(**fields)


@pytest.mark.parametrize(
    "build",
    [
        lambda f: f.structured(),
        lambda f: f.structured(regex="a", grammar="b"),
        lambda f: f.repetition(min_pattern_size=3),
        lambda f: f.repetition(max_pattern_size=3, min_count=1),
        lambda f: f.pooling(output_kind=f.output_kind.DELTA),
        lambda f: f.pooling(task="encode"),
        lambda f: f.late_chunking(0),
        lambda f: f.lora("a", 0, "/p"),
        lambda f: f.lora("a", 1),
    ],
)
def test_what_vllm_refuses_elsewhere_we_refuse(build):
    with pytest.raises(Exception):  # noqa: B017
        build(VLLM)
    with pytest.raises(fastmm.SchemaError):
        build(OURS)


def test_the_pooling_tasks_are_vllms():
    from vllm.tasks import POOLING_TASKS

    for task in POOLING_TASKS:
        OURS.pooling(task=task)
    with pytest.raises(fastmm.SchemaError, match="task"):
        OURS.pooling(task="pool")


def test_a_default_that_was_assigned_again_is_left_out_as_vllm_does():
    theirs, ours = VLLM.sampling(temperature=0.5), OURS.sampling(temperature=0.5)
    for params in (theirs, ours):
        params.temperature = params.top_p
        params._all_stop_token_ids.add(3)
        params._all_stop_token_ids.clear()
        params.stop = []
    expected = vllm_encoder(256).encode(theirs)
    assert_same_frames(our_encoder(256).encode(theirs), expected)
    assert_same_frames(our_encoder(256).encode(ours), expected)


def test_vllm_decodes_our_own_request_to_what_was_said():
    request = OURS.request("r", [1, 2], sampling_params=all_sampling(OURS), lora_request=OURS.lora("a", 1, "/p"))
    assert_same(vllm_decode(our_encoder(256).encode(request)), request)

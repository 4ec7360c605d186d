"""Bad input is one clear error: options, depths, paths; no message names what is in a request."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from support.requests import feature, request, sent

from fastmm import (
    EncodeError,
    Encoder,
    EngineCoreRequest,
    FastmmError,
    LimitError,
    MmFlatField,
    PlaceholderRange,
    SamplingParams,
    SchemaError,
    encode_request,
)

# --- options --------------------------------------------------------------------------------------------------------------

WHOLE = ["threshold", "max_depth", "max_frames", "max_payload_nbytes"]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("wrong", [True, False, 1.0, 64.0, "5", b"5", [], object(), 2**63, -1, 10**30, np.float64(5)])
def test_a_limit_is_a_whole_number_within_bounds(name, wrong):
    encode_request([1])  # the encoder of the defaults is there already
    for make in (lambda: Encoder(**{name: wrong}), lambda: encode_request([1], **{name: wrong})):
        with pytest.raises(SchemaError, match=name):
            make()


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_number_may_be_of_any_integer_type(name):
    for value in (64, np.int64(64), np.uint8(64)):
        assert Encoder(**{name: value}).encode([1]) == encode_request([1], **{name: value}) == [b"\x91\x01"]


def test_depth_zero_and_too_deep_a_limit_are_refused():
    for wrong in (0, 1001, 10**6):
        with pytest.raises(SchemaError, match="max_depth"):
            Encoder(max_depth=wrong)


def test_unknown_options_are_refused():
    for make in (
        lambda: Encoder(nope=1),
        lambda: encode_request([1], nope=1),
        lambda: Encoder(5),
        lambda: encode_request([1], 5),
    ):
        with pytest.raises(TypeError):
            make()


@pytest.mark.parametrize("name", ["inplace", "dedup"])
@pytest.mark.parametrize("wrong", ["no", "False", 2, 0.5, [], None])
def test_a_switch_is_true_or_false(name, wrong):
    """`inplace="no"` must not be taken for a yes."""
    for make in (lambda: Encoder(**{name: wrong}), lambda: encode_request([1], **{name: wrong})):
        with pytest.raises(SchemaError, match=name):
            make()


def test_many_sets_of_options_one_after_the_other():
    for limit in range(1, 300):
        assert encode_request([1], max_frames=limit) == [b"\x91\x01"]


# --- depth ----------------------------------------------------------------------------------------------------------------


def nested(kind, depth, inner=1):
    for _ in range(depth):
        inner = {"list": lambda x: [x], "tuple": lambda x: (x,), "dict": lambda x: {"k": x}, "key": lambda x: {(x,): 1}}[kind](
            inner
        )
    return inner


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
def test_the_depth_limit_is_exact(kind):
    for limit in (1, 2, 64, 1000):
        Encoder(max_depth=limit).encode(nested(kind, limit, inner=None))
        with pytest.raises(LimitError, match=f"at most {limit} levels"):
            Encoder(max_depth=limit).encode(nested(kind, limit + 1, inner=None))


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
@pytest.mark.parametrize("depth", [500, 5000])
def test_a_tree_far_too_deep_is_an_error_and_the_process_lives(kind, depth):
    """A tensor inside 500 lists; then ten times that."""
    with pytest.raises(LimitError, match="max_depth") as info:
        encode_request(nested(kind, depth, np.ones(100)))
    assert info.value.path.startswith("$")
    assert len(str(info.value)) < 2000
    assert encode_request([1]) == [b"\x91\x01"]


def test_a_key_far_too_deep_is_an_error_too():
    with pytest.raises(LimitError, match="max_depth"):
        encode_request({nested("tuple", 200): 1})


def test_a_tree_that_holds_itself_is_an_error():
    loop = []
    loop.append(loop)
    mapping = {}
    mapping["self"] = mapping
    made = request(1)
    made.trace_headers = {"request": made}
    for tree in (loop, mapping, made):
        with pytest.raises(LimitError, match="max_depth"):
            encode_request(tree)


# --- paths ----------------------------------------------------------------------------------------------------------------


class Secret:
    """Must not show up anywhere."""

    def __repr__(self):
        return "the secret prompt"


def bad(place):
    made = request(np.ones(100), [1, [2, np.ones(3), (4, 5)]])
    place(made)
    return made


PATHS = {
    "$.mm_features[1].data['pixel_values'].data[1][2][1]": lambda m: (
        m.mm_features[1].data["pixel_values"].data[1].__setitem__(2, (4, Secret()))
    ),
    "$.mm_features[0].data['pixel_values'].data": lambda m: setattr(m.mm_features[0].data["pixel_values"], "data", Secret()),
    "$.mm_features[0].data['other'].data": lambda m: m.mm_features[0].data.__setitem__(
        "other", feature(Secret()).data["pixel_values"]
    ),
    "$.mm_features[0].modality": lambda m: setattr(m.mm_features[0], "modality", Secret()),
    "$.mm_features[1].mm_position.is_embed": lambda m: setattr(m.mm_features[1].mm_position, "is_embed", Secret()),
    "$.mm_features[2]": lambda m: m.mm_features.append(Secret()),
    "$.prompt_token_ids[2]": lambda m: m.prompt_token_ids.append(Secret()),
    "$.prompt_token_ids[200]": lambda m: setattr(m, "prompt_token_ids", [5] * 200 + [Secret()] + [5] * 200),
    "$.sampling_params.extra_args['k'][0]": lambda m: setattr(
        m, "sampling_params", SamplingParams(extra_args={"k": [Secret()]})
    ),
    "$.trace_headers['a']": lambda m: setattr(m, "trace_headers", {"a": Secret()}),
    "$.trace_headers[5]": lambda m: setattr(m, "trace_headers", {5: Secret()}),
    "$.session_id": lambda m: setattr(m, "session_id", Secret()),
    "$.prompt_embeds": lambda m: setattr(m, "prompt_embeds", Secret()),
    "$.lora_request[0]": lambda m: setattr(m, "lora_request", [Secret()]),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}], ids=str)
def test_an_error_names_the_very_path(path, options):
    made = bad(PATHS[path])
    with pytest.raises(SchemaError) as info:
        encode_request(made, **options)
    assert info.value.path == path
    assert str(info.value).startswith(path)
    assert "secret prompt" not in str(info.value)
    assert "Secret" in str(info.value)


def test_an_error_pickles_with_its_path():
    with pytest.raises(SchemaError) as info:
        encode_request([Secret()])
    again = pickle.loads(pickle.dumps(info.value))
    assert (type(again), again.path, str(again)) == (SchemaError, "$[0]", str(info.value))
    assert isinstance(again, TypeError)
    assert isinstance(again, FastmmError)


def test_a_path_is_short_however_long_its_keys_are():
    with pytest.raises(SchemaError) as info:
        encode_request({"k" * 10_000: {"l" * 10_000: Secret()}})
    assert len(info.value.path) < 300


WRONG_VALUES = {
    "text": "the secret prompt\ud800",
    "bytes": memoryview(b"the secret prompt")[::2],
    "number": 2**90 + 123456789,
    "array": np.array(["the secret prompt"], dtype=object),
    "records": np.array([(7777777,)], dtype=[("a", "i8")]),
    "times": np.array(["2020-01-01"], dtype="M8[D]"),
    "complex": 123456789j,
}


@pytest.mark.parametrize("what", WRONG_VALUES)
def test_no_error_carries_what_the_request_carries(what):
    for tree in ([WRONG_VALUES[what]], {"k": WRONG_VALUES[what]}):
        with pytest.raises(FastmmError) as info:
            encode_request(tree)
        for words in ("secret", "123456789", str(2**90 + 123456789), "7777777", "2020"):
            assert words not in str(info.value)


# --- slices ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        *(
            (slice(3), [None, 3, None]),
            (slice(1, 2, 3), [1, 2, 3]),
            (slice(None), [None, None, None]),
            (slice(-1, -(2**40)), [-1, -(2**40), None]),
        ),
        *(
            (slice(np.int64(5), np.uint8(7)), [5, 7, None]),
            (slice(np.array(5), 2**63), [5, 2**63, None]),
            (slice(True), [None, 1, None]),
        ),
    ],
    ids=str,
)
def test_slices_are_three_plain_integers_or_nil(bounds, expected):
    import msgpack

    assert msgpack.unpackb(encode_request([bounds])[0]) == [expected]
    assert msgpack.unpackb(encode_request([(bounds,), bounds, [bounds] * 3])[0]) == [[expected], expected, [expected] * 3]
    made = EngineCoreRequest(
        "r", [1], mm_features=[feature(1, field=MmFlatField(slices=[(slice(None), bounds), [bounds]], dim=1))]
    )
    tree = msgpack.unpackb(encode_request(made)[0])
    assert tree[2][0]["data"]["pixel_values"]["field"][1]["slices"] == [[[None] * 3, expected], [expected]]


def test_bounds_that_are_tensors_of_one_integer():
    torch = pytest.importorskip("torch")
    import msgpack

    bounds = slice(torch.tensor(3), torch.tensor([7]), torch.tensor(2, dtype=torch.uint8))
    assert msgpack.unpackb(encode_request(bounds)[0]) == [3, 7, 2]
    for wrong in (torch.tensor(1.5), torch.tensor([1, 2]), torch.tensor([])):
        with pytest.raises(FastmmError):
            encode_request([slice(wrong)])


@pytest.mark.parametrize("wrong", [1.7, 2.0, "1", b"1", [1], np.float64(1), np.array([1.5]), np.array([1, 2]), object(), 1j])
def test_other_bounds_are_refused_with_their_path(wrong):
    field = MmFlatField(slices=[(slice(0, 1),), (slice(1, wrong),)], dim=0)
    with pytest.raises(SchemaError, match="slice bounds") as info:
        encode_request(EngineCoreRequest("r", [1], mm_features=[feature(1, field=field)]))
    assert info.value.path.startswith("$.mm_features[0].data['pixel_values'].field.slices[1]")


def test_a_bound_beyond_the_wire_is_refused():
    with pytest.raises(EncodeError):
        encode_request([slice(2**64)])


# --- element data ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["text", {"a": 1}, {1}, "", slice(1), request(1), PlaceholderRange(0, 1)], ids=repr)
def test_element_data_is_a_tensor_a_number_or_a_list_of_these(wrong):
    for data in (wrong, [1, wrong], [[wrong]]):
        with pytest.raises(SchemaError) as info:
            encode_request(request(data))
        assert info.value.path.startswith("$.mm_features[0].data['pixel_values'].data")


def test_bytes_where_a_tensor_belongs_are_one():
    for data in (b"\x05\x06", bytearray(b"\x05\x06"), memoryview(b"\x05\x06")):
        assert sent(encode_request(request(data))) == ("uint8", (2,), b"\x05\x06")
        assert len(encode_request(request(data), threshold=0)) == 2


@pytest.mark.parametrize("wrong", ["batched", ["batched", {}], {"a": 1}, 5, PlaceholderRange(0, 1)], ids=repr)
def test_a_field_is_batched_flat_or_shared(wrong):
    made = request(1)
    made.mm_features[0].data["pixel_values"].field = wrong
    with pytest.raises(SchemaError) as info:
        encode_request(made)
    assert info.value.path == "$.mm_features[0].data['pixel_values'].field"

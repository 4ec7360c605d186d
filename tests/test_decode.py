"""Frames to objects: what comes back, and what is refused."""

import importlib.util

import msgpack
import numpy as np
import pytest
from support import raw
from support.compare import assert_same, leaf_of
from support.families import fastmm_family
from support.golden_cases import CASES
from support.reference import reference_encode

from fastmm._native.decoder import Decoder
from fastmm.errors import DecodeError, TruncatedError
from fastmm.schema import (
    EngineCoreOutputs,
    MmBatchedField,
    MmFieldElem,
    MmFlatField,
    MmSharedField,
    PlaceholderRange,
    RequestOutputKind,
    SamplingParams,
    TensorLike,
    WireTensor,
)

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
TENSORS = ["torch", "numpy", "wire"] if HAS_TORCH else ["numpy", "wire"]


def type_of(message):
    """What a decoder of golden messages must be told."""
    if isinstance(message, tuple):
        return None
    if isinstance(message, list):
        return list[TensorLike if leaf_of(message[0]) else type(message[0])]
    return type(message)


numpy_decoder = Decoder(tensors="numpy")


def decode(frames, **options):
    return Decoder(tensors="numpy", **options).decode(frames) if options else numpy_decoder.decode(frames)


def data_of(request):
    return request.mm_features[0].data["pixel_values"].data


# --- what comes back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", TENSORS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_golden_message_comes_back_equal(case, tensors):
    message = case.build(fastmm_family("wire"))
    decoded = Decoder(type_of(message), tensors=tensors).decode(reference_encode(message, case.threshold))
    if isinstance(message, tuple):
        message = list(message)
    for params in (getattr(message, "sampling_params", None), *(message if isinstance(message, list) else [])):
        if isinstance(params, SamplingParams):
            for name in ("temperature", "frequency_penalty"):
                setattr(params, name, float(getattr(params, name)))  # an int on the wire is a float here
    if case.name == "outputs-utility":  # a tensor amid plain values stays a tuple, for nothing says that it is one
        value = decoded.utility_output.result.result["a"]
        value[1] = WireTensor(*value[1])
    assert_same(decoded, message)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("everything", "flat-5", "text-2048-ids")])
def test_ids_as_an_array_are_the_same_numbers(case):
    message = case.build(fastmm_family("wire"))
    decoded = Decoder(tensors="wire", token_ids="array").decode(reference_encode(message, 256))
    assert decoded.prompt_token_ids.dtype == np.int64
    assert decoded.prompt_token_ids.flags.owndata
    assert decoded.prompt_token_ids.tolist() == message.prompt_token_ids


EDGES = [0, 1, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]


@pytest.mark.parametrize("token_ids", ["list", "array"])
@pytest.mark.parametrize("count", [*range(70), 511, 512, 513, 2048])
def test_ids_of_every_width_and_count(count, token_ids):
    for spread in (EDGES, [5], [151655], [151655] * 40 + [7, 300], [-1, -33, 3], range(1, 152064, 7919)):
        spread = list(spread)
        ids = [spread[(i * 5) % len(spread)] for i in range(count)]
        got = decode(raw.request(prompt_token_ids=ids), token_ids=token_ids).prompt_token_ids
        assert list(got) == ids


def test_an_id_above_int64_is_an_int_in_a_list_and_an_error_in_an_array():
    ids = [1] * 80 + [2**63, 2**64 - 1] + [2] * 80
    assert decode(raw.request(prompt_token_ids=ids)).prompt_token_ids == ids
    with pytest.raises(DecodeError, match="below 2\\*\\*63") as caught:
        decode(raw.request(prompt_token_ids=ids), token_ids="array")
    assert caught.value.path == "$.prompt_token_ids[80]"


@pytest.mark.parametrize("bad", [True, 1.0, "7", None, b"7", [7]])
def test_an_id_is_an_int_and_nothing_else(bad):
    for token_ids in ("list", "array"):
        with pytest.raises(DecodeError, match="expected int") as caught:
            decode(raw.request(prompt_token_ids=[151655] * 100 + [bad] + [3] * 100), token_ids=token_ids)
        assert caught.value.path == "$.prompt_token_ids[100]"
        assert caught.value.frame == 0


def test_nine_elements_take_the_defaults_and_a_newer_senders_are_skipped():
    nine = decode([raw.pack(raw.elements()[:9])])
    assert nine == decode(raw.request())
    assert (nine.prompt_embeds, nine.client_index, nine.resumable, nine.kv_hints) == (None, 0, False, None)
    assert decode([raw.pack([*raw.elements(), "new", {"a": [1, {"b": 2}]}, [[]]])]) == nine
    with pytest.raises(DecodeError, match="at least 9"):
        decode([raw.pack(raw.elements()[:8])])


def test_what_is_skipped_is_checked_all_the_same():
    whole = raw.pack([*raw.elements(), [1, "abc"]])
    with pytest.raises(DecodeError, match="0xc1"):
        decode([whole[:-4] + b"\xc1"])
    with pytest.raises(TruncatedError):
        decode([whole[:-1]])


def test_maps_take_defaults_and_skip_what_is_unknown():
    params = decode(raw.request(sampling_params={"max_tokens": 5, "from_the_future": [1, {"x": 2}], "_eos_token_id": 7}))
    params = params.sampling_params
    assert params == SamplingParams(max_tokens=5, **{"_eos_token_id": 7})
    assert params.stop == []  # normalised, as when it is made here
    first, second = (decode(raw.request(sampling_params={})).sampling_params for _ in range(2))
    assert first._all_stop_token_ids == set()
    assert first._all_stop_token_ids is not second._all_stop_token_ids


def test_a_required_field_that_is_missing_is_named():
    bad = raw.feature(None)
    del bad["modality"]
    with pytest.raises(DecodeError, match="MmFeatureSpec to have modality") as caught:
        decode(raw.request(mm_features=[raw.feature(None), bad]))
    assert caught.value.path == "$.mm_features[1]"


def test_keys_are_found_in_any_order_and_with_longer_headers():
    class Key(str):
        pass

    position = b"\x83\xd9\x06length\x02\xa8is_embed\xc0\xda\x00\x06offset\x01"
    main = raw.pack(raw.elements(mm_features=[raw.feature(None)]))
    plain = msgpack.packb({"offset": 0, "length": 2, "is_embed": None})
    assert main.count(plain) == 1
    assert decode([main.replace(plain, position)]).mm_features[0].mm_position == PlaceholderRange(1, 2)


def test_a_key_that_comes_twice_keeps_its_last_value():
    plain = msgpack.packb({"offset": 0, "length": 2, "is_embed": None})
    twice = b"\x84" + plain[1:] + b"\xa6offset\x05"
    main = raw.pack(raw.elements(mm_features=[raw.feature(None)])).replace(plain, twice)
    assert decode([main]).mm_features[0].mm_position.offset == 5
    assert Decoder(None).decode(b"\x82\xa1a\x01\xa1a\x02") == {"a": 2}


@pytest.mark.parametrize(
    ("written", "field"),
    [
        (["batched", {"keep_on_cpu": True}], MmBatchedField(keep_on_cpu=True)),
        (["batched", {}], MmBatchedField()),
        (["shared", {"keep_on_cpu": False, "batch_size": 3}], MmSharedField(batch_size=3)),
        (["flat", {"slices": [[0, 2, None], [2, None, -1]], "dim": 0}], MmFlatField(slices=[slice(0, 2), slice(2, None, -1)])),
        (["flat", {"slices": []}], MmFlatField(slices=[])),
        (
            ["flat", {"slices": [[[None, None, None], [0, 3, None]], []], "dim": 1, "keep_on_cpu": True}],
            MmFlatField(slices=[[slice(None), slice(0, 3)], []], dim=1, keep_on_cpu=True),
        ),
    ],
)
def test_every_kind_of_field(written, field):
    elem = decode(raw.item(data=None, field=written)).mm_features[0].data["pixel_values"]
    assert elem == MmFieldElem(None, field)


@pytest.mark.parametrize(
    "written",
    [
        ["ragged", {}],
        ["batched"],
        ["batched", {}, 1],
        ["batched", {"keep_on_cpu": 1}],
        ["shared", {}],
        ["shared", {"batch_size": True}],
        ["flat", {}],
        ["batched", {"keep_on_cpv": True}],
        ["flat", {"slices": [[0, 2]]}],
        ["flat", {"slices": [[0, 2, 1, 1]]}],
        ["flat", {"slices": [[0, 1.5, None]]}],
        ["flat", {"slices": [[True, 1, None]]}],
        ["flat", {"slices": [[[[0, 1, None]]]]}],
        ["flat", {"slices": [0, 1, None]}],
        ["flat", {"slices": None}],
        {"batched": {}},
        None,
        "batched",
    ],
)
def test_a_field_of_no_such_kind_is_an_error(written):
    with pytest.raises(DecodeError) as caught:
        decode(raw.item(data=None, field=written))
    assert caught.value.path.startswith("$.mm_features[0].data['pixel_values'].field")


def test_items_of_a_batch_share_their_field_and_no_other_does():
    ours = ["flat", {"slices": [[0, 1, None]], "dim": 0}]
    request = decode(
        raw.request(
            mm_features=[
                raw.feature(None, ours),
                raw.feature(None, ours),
                raw.feature(None, raw.BATCHED),
                raw.feature(None, ours),
            ]
        )
    )
    fields = [feature.data["pixel_values"].field for feature in request.mm_features]
    assert fields[0] is fields[1]
    assert fields[2] == MmBatchedField()
    assert fields[3] == fields[0]
    again = decode(raw.item(data=None, field=ours)).mm_features[0].data["pixel_values"].field
    assert again is not fields[0]


def test_numbers_come_back_exact():
    nested = [1, 2.5, True, False, -(2**63), 2**64 - 1, [], [[0.1]]]
    got = data_of(decode(raw.item(data=nested)))
    assert_same(got, nested)
    for scalar in (3, 2.5, True, False):
        assert_same(data_of(decode(raw.item(data=scalar))), scalar)
    assert data_of(decode(raw.item(data=None))) is None


@pytest.mark.parametrize("bad", [{}, b"x", "x", [None], [[1, None]], [{}], [b"x"]])
def test_elements_hold_tensors_and_numbers_only(bad):
    with pytest.raises(DecodeError):
        decode(raw.item(data=bad))


@needs_torch
def test_tensors_nest():
    import torch

    pair = ["float32", [2], raw.raw(np.array([1, 2], "<f4").tobytes())]
    got = data_of(Decoder().decode(raw.item(data=[pair, [pair, 3, 2.5]])))
    assert got[1][1:] == [3, 2.5]
    assert torch.equal(got[1][0], torch.tensor([1.0, 2.0]))


def test_enums_by_value_and_floats_from_ints():
    request = decode(raw.request(sampling_params={"output_kind": 2, "temperature": 1, "top_p": 1}, arrival_time=3))
    assert request.sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
    assert_same([request.arrival_time, request.sampling_params.temperature], [3.0, 1.0])
    with pytest.raises(DecodeError, match="none of its members"):
        decode(raw.request(sampling_params={"output_kind": 9}))


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("prompt_token_ids", "x"),
        ("client_index", True),
        ("client_index", 1.0),
        ("resumable", 1),
        ("arrival_time", "now"),
        ("arrival_time", True),
        ("arrival_time", None),
        ("trace_headers", {"a": 1}),
        ("trace_headers", {1: "a"}),
        ("prompt_is_token_ids", [1]),
        ("sampling_params", []),
        ("pooling_params", {}),
        ("kv_hints", {"protocol_version": "1"}),
    ],
)
def test_types_are_strict(field, bad):
    with pytest.raises(DecodeError) as caught:
        decode(raw.request(**{field: bad}))
    assert caught.value.path.startswith(f"$.{field}")
    assert caught.value.offset is not None


def test_values_that_a_class_refuses_are_a_decode_error():
    with pytest.raises(DecodeError, match="temperature") as caught:
        decode(raw.request(sampling_params={"temperature": 9.5}))
    assert caught.value.path == "$.sampling_params"
    with pytest.raises(DecodeError, match="stop") as caught:
        decode(raw.request(sampling_params={"stop": ["a secret", ""]}))
    assert "secret" not in str(caught.value)


def test_the_check_of_a_class_is_remembered_only_where_it_changes_nothing():
    for _ in range(3):
        params = decode(
            raw.request(sampling_params={"temperature": 0.001, "stop_token_ids": [5, 5], "bad_words": []})
        ).sampling_params
        assert (params.temperature, params.stop_token_ids, params._all_stop_token_ids) == (0.01, [5], {5})
        plain = {"stop": [], "stop_token_ids": [], "max_tokens": 3, "bad_words": [], "skip_reading_prefix_cache": False}
        params = decode(raw.request(sampling_params=plain)).sampling_params
        assert params == SamplingParams(max_tokens=3)
        params.stop.append("mine alone")
        with pytest.raises(DecodeError):
            decode(raw.request(sampling_params={"n": 0}))


# --- other messages -------------------------------------------------------------------------------------------------------


def test_aborts_and_utility_calls():
    assert Decoder(list[str]).decode(bytes.fromhex("92a27231a27232")) == ["r1", "r2"]
    with pytest.raises(DecodeError) as caught:
        Decoder(list[str]).decode(raw.pack(["r1", 2]))
    assert caught.value.path == "$[1]"
    call = [0, 2**64 - 1, "profile", [True, {"a": None}]]
    assert Decoder(None).decode(raw.pack(call)) == call
    assert Decoder(tuple[int, int, str, list]).decode([raw.pack(call)]) == tuple(call)


def test_outputs_take_the_monotonic_time_when_they_have_none():
    assert Decoder(EngineCoreOutputs).decode(b"\x94\x00\x90\xc0\xcb" + bytes(8)).timestamp > 0
    outputs = Decoder(EngineCoreOutputs).decode(raw.pack([0, [], None, 2.5, None, ["a", "b", "a"]]))
    assert outputs.timestamp == 2.5
    assert outputs.finished_requests == {"a", "b"}


def test_plain_values_stay_plain():
    value = {"a": [1, -1, 2.5, None, True, "é", b"\x00\xff"], 5: {}, None: 1, b"k": [["float32", [2], 1]], 1.5: 0, False: 2}
    assert Decoder(None).decode(raw.pack(value)) == value
    assert Decoder(object).decode(raw.pack(["uint8", [2], raw.raw(b"ab")])) == ["uint8", [2], b"ab"]
    with pytest.raises(DecodeError, match="map key"):
        Decoder(None).decode(b"\x81\x91\x01\x02")


def test_a_tensor_tuple_amid_plain_values_is_a_reference():
    frames = raw.request(b"12345678", reasoning_parser_kwargs={"t": ["float64", [1], 1]})
    assert decode(frames).reasoning_parser_kwargs == {"t": ["float64", [1], 1]}

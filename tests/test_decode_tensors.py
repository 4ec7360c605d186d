"""Tensors: what comes back, and which dtypes, shapes, indices and data are refused."""

import importlib.util
import pickle

import msgpack
import numpy as np
import pytest
from support import raw
from support.compare import leaf_of

from fastmm._native.decoder import Decoder
from fastmm.errors import DecodeError

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
TENSORS = ["torch", "numpy", "wire"] if HAS_TORCH else ["numpy", "wire"]

numpy_decoder = Decoder(tensors="numpy")


def decode(frames, **options):
    return Decoder(tensors="numpy", **options).decode(frames) if options else numpy_decoder.decode(frames)


def data_of(request):
    return request.mm_features[0].data["pixel_values"].data


# --- tensors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("name", ["<f4", ">f4", ">i8", "|b1", "|u1", "<U2", ">U3", "|S3", "<c16", "<f2"])
def test_numpy_types_keep_their_byte_order(name, copy):
    array = np.arange(6).astype(name).reshape(3, 2)
    for data, aux in ((raw.raw(array.tobytes()), []), (1, [array.tobytes()])):
        got = data_of(decode(raw.item(*aux, data=[array.dtype.str, [3, 2], data]), copy=copy))
        assert got.dtype.str == array.dtype.str
        assert got.flags.aligned
        np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("tensors", TENSORS)
@pytest.mark.parametrize("shape", [(), (0, 5), (3, 0), (0,), (1,), (2, 1, 3)])
@pytest.mark.parametrize("name", ["float32", "int64", "bool", "<f8"])
def test_every_shape_comes_back(name, shape, tensors):
    data = bytes(int(np.prod(shape, dtype=int)) * {"float32": 4, "int64": 8, "bool": 1, "<f8": 8}[name])
    for written, aux in ((raw.raw(data), []), (1, [data])):
        for copy in (False, True):
            got = data_of(Decoder(tensors=tensors, copy=copy).decode(raw.item(*aux, data=[name, list(shape), written])))
            leaf = leaf_of(got)
            assert (leaf.dtype, leaf.shape, leaf.data) == (name.replace("<f8", "float64"), shape, data)


@pytest.mark.parametrize("name", ["half", "float", "double", "long", "int", "torch.float32", "Float32", "", "f4", "=f4", "|f4", "<b1",
                                  "<f3", "|O", "<O8", "|V4", "<M8[ns]", "<m8", "<U0", "|S0", "object", "<f4\x00", "é", "<U99999999999",
                                  "quint8", "Tensor", "__class__", "<f4,<f4", "(2,)<f4"])  # fmt: skip
def test_only_the_wires_own_dtype_names(name):
    with pytest.raises(DecodeError, match="expected a dtype"):
        decode(raw.item(data=[name, [0], raw.raw(b"")]))


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ([-1], "negative"),
        ([2**63], "too large"),
        ([2**60], "bytes"),
        ([2**32, 2**32], "63 bits"),
        ([0, 2**62, 2**62], "63 bits"),
        ([True], "an extent"),
        ([1.0], "an extent"),
        ([None], "an extent"),
        ([[1]], "an extent"),
        ([1] * 65, "64 dimensions"),
        ("4", "an array"),
        (4, "an array"),
        (None, "an array"),
        ([5], "expected 20 bytes"),
        ([], "expected 4 bytes"),
        ([3, 0], "expected 0 bytes"),
    ],
)
def test_shapes_are_checked_before_anything_is_made(shape, match):
    for data, aux in ((raw.raw(bytes(16)), []), (1, [bytes(16)])):
        with pytest.raises(DecodeError, match=match) as caught:
            decode(raw.item(*aux, data=["float32", shape, data]))
        assert caught.value.path == "$.mm_features[0].data['pixel_values'].data"


def test_a_shape_and_a_size_that_differ_name_both():
    with pytest.raises(DecodeError, match=r"expected 6 bytes for 'float16' of shape \(3,\), got a frame of 5 bytes") as caught:
        decode(raw.item(b"12345", data=["float16", [3], 1]))
    assert caught.value.frame == 1
    with pytest.raises(DecodeError, match="expected 12 bytes"):
        decode(raw.item(b"", data=["float32", [3], 1]))


@pytest.mark.parametrize("index", [0, -1, 3, 5, 2**31, 2**64 - 1, -(2**63)])
def test_an_index_names_an_aux_frame(index):
    tuples = [["uint8", [4], 1], ["uint8", [4], 2], ["uint8", [4], index]]
    with pytest.raises(DecodeError, match="index of an aux frame, 1 to 2") as caught:
        decode(raw.item(b"abcd", b"efgh", data=tuples))
    assert caught.value.path == "$.mm_features[0].data['pixel_values'].data[2]"
    with pytest.raises(DecodeError, match="no aux frames"):
        decode(raw.item(data=["uint8", [4], 1]))


@pytest.mark.parametrize("bad", [True, False, None, 1.0, "1", b"abcd", [1], [97, 98, 99, 100]])
def test_tensor_data_is_an_index_or_an_ext(bad):
    with pytest.raises(DecodeError, match="data of a tensor"):
        decode(raw.item(b"abcd", data=["uint8", [4], bad]))


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_a_tensor_has_three_parts(count):
    with pytest.raises(DecodeError, match="expected a tensor"):
        decode(raw.request(prompt_embeds=["uint8", [0], raw.raw(b""), 1][:count]))


@pytest.mark.parametrize("code", [1, 2, 0, 4, -1, 127, -128])
def test_only_ext_3_is_data_and_pickles_are_never_loaded(code):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was loaded",))

    bomb = msgpack.ExtType(code, pickle.dumps(Bomb())) if code >= 0 else b"\xd6" + bytes([code & 255]) + b"1234"
    ext = bomb if code >= 0 else None
    for place in ({"mm_features": [raw.feature(["uint8", [4], ext])]}, {"reasoning_parser_kwargs": {"a": ext}}):
        frames = raw.request(**place)
        if ext is None:
            frames = [frames[0].replace(b"\x91\x04\xc0", b"\x91\x04" + bomb).replace(b"\xa1a\xc0", b"\xa1a" + bomb)]
        with pytest.raises(DecodeError, match=f"code {code}"):
            decode(frames)


def test_an_aux_frame_that_nothing_points_to_is_an_error():
    with pytest.raises(DecodeError, match="none does") as caught:
        decode(raw.item(b"abcd", b"efgh", data=["uint8", [4], 1]))
    assert caught.value.frame == 2
    with pytest.raises(DecodeError):
        decode(raw.request(b""))


def test_several_tuples_may_point_to_one_frame():
    got = data_of(decode(raw.item(b"abcdefgh", data=[["uint8", [8], 1], ["uint8", [2, 4], 1], ["int64", [1], 1]])))
    assert [a.tobytes() for a in got] == [b"abcdefgh"] * 3
    assert len({a.ctypes.data for a in got}) == 1


@pytest.mark.parametrize(
    "position",
    [
        {"offset": -1, "length": 2},
        {"offset": 0, "length": -2},
        {"offset": 2**63, "length": 2},
        {"offset": 0, "length": True},
        {"offset": 0},
        {"offset": 0, "length": 2, "is_embed": ["bool", [3], raw.raw(b"\x01\x00\x01")]},
        {"offset": 0, "length": 2, "is_embed": ["bool", [1, 2], raw.raw(b"\x01\x00")]},
        {"offset": 0, "length": 2, "is_embed": ["bool", [], raw.raw(b"\x01")]},
        {"offset": 0, "length": 2, "is_embed": ["uint8", [2], raw.raw(b"\x01\x00")]},
    ],
)
def test_a_placeholder_is_a_range_with_a_mask_of_its_length(position):
    with pytest.raises(DecodeError) as caught:
        decode(raw.item(mm_position=position))
    assert caught.value.path.startswith("$.mm_features[0].mm_position")


def test_a_mask_of_the_right_length_comes_back():
    for name in ("bool", "|b1"):
        position = {"offset": 3, "length": 2, "is_embed": [name, [2], raw.raw(b"\x01\x00")]}
        got = decode(raw.item(mm_position=position)).mm_features[0].mm_position
        assert got.is_embed.tolist() == [True, False]


# --- out of band ----------------------------------------------------------------------------------------------------------


def test_a_tensor_out_of_band_comes_from_the_provider():
    calls = []

    def provider(dtype, shape, meta):
        calls.append((dtype, shape, meta))
        return np.zeros(shape, dtype)

    meta = {"sender_id": "s", "message_id": 4, "tensor_id": 1}
    got = data_of(decode(raw.item(data=["float32", [2, 3], meta]), oob_tensor_provider=provider))
    assert got.shape == (2, 3)
    assert calls == [("float32", (2, 3), meta)]
    with pytest.raises(DecodeError, match="oob_tensor_provider"):
        decode(raw.item(data=["float32", [2, 3], meta]))


@pytest.mark.parametrize("result", [np.zeros((2, 2), "f4"), np.zeros((2, 3), "f8"), None, 5, "x"])
def test_what_a_provider_returns_is_checked(result):
    with pytest.raises(DecodeError, match="from oob_tensor_provider"):
        decode(raw.item(data=["float32", [2, 3], {}]), oob_tensor_provider=lambda *_: result)


def test_a_provider_that_fails_is_a_decode_error_with_its_cause():
    def provider(dtype, shape, meta):
        return meta["no such key"]

    with pytest.raises(DecodeError, match="oob_tensor_provider failed") as caught:
        decode(raw.item(data=["float32", [2], {}]), oob_tensor_provider=provider)
    assert isinstance(caught.value.__cause__, KeyError)


@needs_torch
def test_a_provider_of_torch_tensors():
    import torch

    def provider(dtype, shape, meta):
        return torch.ones(shape, dtype=getattr(torch, dtype))

    got = data_of(Decoder(oob_tensor_provider=provider).decode(raw.item(data=["bfloat16", [2, 3], {}])))
    assert got.dtype is torch.bfloat16

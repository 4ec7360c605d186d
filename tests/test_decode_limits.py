"""Limits, options, and what a frame may be."""

import pickle
from dataclasses import dataclass
from typing import ClassVar

import msgpack
import numpy as np
import pytest
from support import raw

from fastmm._native.decoder import Decoder
from fastmm._native.frame import Frame
from fastmm.errors import DecodeError, LimitError, SchemaError, TruncatedError
from fastmm.schema import (
    EngineCoreOutputs,
    EngineCoreRequest,
    WireTensor,
)

numpy_decoder = Decoder(tensors="numpy")


def decode(frames, **options):
    return Decoder(tensors="numpy", **options).decode(frames) if options else numpy_decoder.decode(frames)


def data_of(request):
    return request.mm_features[0].data["pixel_values"].data


# --- limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [EngineCoreRequest, EngineCoreOutputs, list[str], None])
def test_100_000_nested_arrays_are_a_limit(kind):
    for bomb in (b"\x91" * 100_000, b"\x91" * 100_000 + b"\xc0", b"\x81\xa0" * 50_000 + b"\xc0"):
        with pytest.raises(LimitError, match="max_depth"):
            Decoder(kind).decode(bomb)


def test_a_list_nested_500_deep_is_a_limit():
    nested = ["uint8", [1], raw.raw(b"x")]
    for _ in range(500):
        nested = [nested]
    with pytest.raises(LimitError, match="more than 64 deep"):
        decode(raw.item(data=nested))
    assert decode([msgpack.packb(raw.elements(mm_features=[raw.feature(nested)]))], max_depth=512).mm_features
    with pytest.raises(LimitError):
        decode([msgpack.packb([*raw.elements(), nested])])


def test_depth_is_counted_to_the_last_level():
    def nested(depth):
        return b"\x91" * (depth - 1) + b"\x90"

    assert Decoder(None, max_depth=7).decode(nested(7))
    with pytest.raises(LimitError):
        Decoder(None, max_depth=7).decode(nested(8))
    assert Decoder(None, max_depth=512).decode(nested(512))


@pytest.mark.parametrize("header", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
                                    b"\xc9\xff\xff\xff\xff\x03", b"\xdc\xff\xff", b"\xde\xff\xff", b"\xd9\xff"])  # fmt: skip
def test_a_length_beyond_the_frame_is_truncated_before_anything_is_made(header):
    for kind in (EngineCoreRequest, list[int], list[str], None):
        with pytest.raises(DecodeError):
            Decoder(kind).decode(header + b"abc")
    with pytest.raises(TruncatedError) as caught:
        Decoder(None).decode(header + b"abc")
    assert (caught.value.frame, caught.value.offset) == (0, 0)


def test_limits_of_elements_frames_and_bytes():
    with pytest.raises(LimitError, match="max_elements"):
        Decoder(list[int], max_elements=9).decode(raw.pack([1] * 10))
    assert Decoder(list[int], max_elements=10).decode(raw.pack([1] * 10)) == [1] * 10
    with pytest.raises(LimitError, match="max_elements"):
        Decoder(None, max_elements=9).decode(raw.pack([[1] * 4] * 2))
    frames = raw.item(b"ab", b"cd", data=[["uint8", [2], 1], ["uint8", [2], 2]])
    with pytest.raises(LimitError, match="max_frames"):
        decode(frames, max_frames=1)
    assert decode(frames, max_frames=2)
    with pytest.raises(LimitError, match="aux frames of 4 bytes are more than max_payload_nbytes, 3"):
        decode(frames, max_payload_nbytes=3)
    assert decode(frames, max_payload_nbytes=4)
    frames = raw.item(b"ab", data=[["uint8", [2], 1], ["uint8", [3], raw.raw(b"cde")]])
    with pytest.raises(LimitError, match="max_payload_nbytes"):
        decode(frames, max_payload_nbytes=4)
    assert decode(frames, max_payload_nbytes=5)


@pytest.mark.parametrize(
    "options",
    [
        {"tensors": "jax"},
        {"token_ids": "tuple"},
        {"max_depth": 0},
        {"max_depth": 513},
        {"max_depth": True},
        {"max_frames": -1},
        {"max_elements": 1.5},
        {"max_payload_nbytes": -1},
        {"copy": 1},
        {"copy": "no"},
        {"tensors": ["torch"]},
        {"oob_tensor_provider": 5},
        {"type": complex},
        {"type": list[complex]},
        {"type": list[str] | set[str]},
        {"type": 5},
        {"type": [int]},
    ],
)
def test_options_are_checked(options):
    with pytest.raises(SchemaError):
        Decoder(**options)


def test_a_limit_is_any_whole_number():
    with pytest.raises(LimitError, match="max_elements"):
        Decoder(list[int], max_elements=np.int64(9)).decode(raw.pack([1] * 10))
    assert Decoder(list[int], max_frames=0, max_payload_nbytes=0).decode(raw.pack([1])) == [1]


def test_a_decoder_is_whole_from_the_start_and_stays_as_it_was_made():
    assert isinstance(Decoder.__new__(Decoder, list[str]).decode(b"\x91\xa1x"), list)
    with pytest.raises(TruncatedError):
        Decoder.__new__(Decoder).decode(b"")

    def provider(dtype, shape, meta):
        decoder.__init__(None)  # ignored, as by every object that is made whole by __new__
        return np.zeros(shape, dtype)

    decoder = Decoder(tensors="numpy", oob_tensor_provider=provider)
    for _ in range(2):
        assert data_of(decoder.decode(raw.item(data=["float32", [2], {"at": 1}]))).tolist() == [0, 0]


def test_elements_of_slices_count_once():
    slices = [[[0, 1, None]] * 8] * 1000
    message = raw.item(data=None, field=["flat", {"keep_on_cpu": False, "slices": slices, "dim": 0}])
    assert decode(message, max_elements=34_100).mm_features
    with pytest.raises(LimitError, match="max_elements"):
        decode(message, max_elements=33_000)


def test_a_slot_of_another_class_is_no_slot_of_this_one():
    @dataclass(slots=True)
    class Wide:
        a: int
        b: int
        c: int
        d: int

    @dataclass(slots=True)
    class Narrow:
        __wire__: ClassVar[str] = "array"
        d: int

    Narrow.d = Wide.d  # lies behind the end of a Narrow
    with pytest.raises(SchemaError, match="d is not a slot"):
        Decoder(Narrow)


# --- frames ---------------------------------------------------------------------------------------------------------------


def test_frames_are_anything_with_a_buffer():
    zmq = pytest.importorskip("zmq")
    main, aux = raw.item(b"abcdefgh", data=["int64", [1], 1])
    for kind in (
        bytes,
        bytearray,
        memoryview,
        zmq.Frame,
        lambda b: np.frombuffer(b, np.uint8),
        lambda b: memoryview(b).cast("c"),
    ):
        for sequence in (list, tuple):
            assert data_of(decode(sequence([kind(main), kind(aux)]))).tobytes() == aux
        assert Decoder(list[str]).decode(kind(b"\x91\xa1x")) == ["x"]
    encoder = pytest.importorskip("fastmm._native.encoder")
    frames = encoder.Encoder(threshold=0).encode(decode([main, aux]))
    assert isinstance(frames[1], Frame)
    assert data_of(decode(frames)).ctypes.data == frames[1].address


@pytest.mark.parametrize(
    "bad", [[], (), [None], [5], ["text"], [b"\xc0", None], None, 5, "text", [np.zeros((4, 4))[:, 1]], [{}], {}]
)
def test_what_is_no_frame_is_an_error(bad):
    with pytest.raises(DecodeError):
        decode(bad)


def test_an_empty_main_frame_is_truncated_and_a_surplus_byte_an_error():
    for kind in (EngineCoreRequest, None):
        with pytest.raises(TruncatedError):
            Decoder(kind).decode(b"")
    main = raw.request()[0]
    with pytest.raises(DecodeError, match="1 more bytes") as caught:
        decode(main + b"\xc0")
    assert caught.value.offset == len(main)
    with pytest.raises(DecodeError):
        decode(main * 2)


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xc0\x80"])
def test_text_is_utf_8(bad):
    text = bytes([0xA0 | len(bad)]) + bad
    for main in (
        raw.pack(raw.elements()).replace(b"\xa1r", text, 1),
        raw.pack(raw.elements(trace_headers={})).replace(b"\x80", b"\x81" + text + b"\xa0", 1),
    ):
        with pytest.raises(DecodeError, match="UTF-8") as caught:
            decode(main)
        assert caught.value.__context__ is None  # Python's own error holds the bytes
        assert caught.value.__cause__ is None


def test_errors_name_the_place_and_never_the_payload():
    frames = raw.request(reasoning_parser_kwargs={"secret prompt": [1, {"deep": "secret" * 9}, raw.raw(b"secret")]})
    bad = frames[0].replace(b"\x03secret", b"\x01secret")
    with pytest.raises(DecodeError) as caught:
        decode(bad)
    assert caught.value.path == "$.reasoning_parser_kwargs['secret prompt'][2]"
    assert "secret" not in caught.value.message
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_long_key_is_cut_in_the_path():
    with pytest.raises(DecodeError) as caught:
        decode(raw.request(trace_headers={"k" * 500: 5}))
    assert len(caught.value.path) < 120


def test_the_receiver_goes_on_after_a_bad_message():
    good = raw.request()
    for bad in (good[0][:-1], good[0] + b"\x00", b"\xc1", b""):
        with pytest.raises(DecodeError):
            decode(bad)
        assert decode(good).request_id == "r"


def test_counters_tell_what_was_viewed_and_copied():
    decoder = Decoder(tensors="numpy")
    frames = raw.item(b"abcd", data=[["uint8", [4], 1], ["uint8", [2], raw.raw(b"xy")]])
    for _ in range(3):
        decoder.decode(frames)
    with pytest.raises(DecodeError):
        decoder.decode(b"\xc1")
    assert decoder.counters == {"messages": 3, "frames": 3, "nbytes_viewed": 12, "nbytes_copied": 6}


def test_wire_tensors_need_neither_torch_nor_numpy_types():
    got = data_of(Decoder(tensors="wire").decode(raw.item(b"\x80\x3f", data=["bfloat16", [1], 1])))
    assert got == WireTensor("bfloat16", (1,), b"\x80\x3f")

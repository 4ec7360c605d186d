"""What the real decoder lets through and we do not: shown on the real one first, so that the list stays true."""

import msgspec
import pytest
import torch
from peers import received, vllm_decode
from vllm.v1.serial_utils import MsgpackEncoder

import fastmm

RAW = 3  # ext code of inline tensor data
ONES = torch.ones(4).numpy().tobytes()


def frames_of(data, *aux, placeholder=None):
    """A request with one feature, written by hand: `data` is what stands in the element."""
    elem = {"data": data, "field": ["batched", {"keep_on_cpu": False}]}
    feature = {
        "data": {"k": elem},
        "modality": "image",
        "identifier": "i",
        "mm_position": placeholder or {"offset": 0, "length": 4, "is_embed": None},
        "mm_hash": None,
    }
    tail = [None, None, None, 0, 0, 0, None, False, None, None, None, False, None, None]
    request = ["r", [1, 2, 3, 4], [feature], None, None, 1.5, None, None, *tail]
    assert len(request) == 22
    return [msgspec.msgpack.encode(request), *aux]


def leaf(request):
    return request.mm_features[0].data["k"].data


def ext(data):
    return msgspec.msgpack.Ext(RAW, data)


def position(offset, length, is_embed=None):
    return {"offset": offset, "length": length, "is_embed": is_embed}


# Name, frames, and what the real decoder makes of them.
LENIENCIES = {
    "index 0 reads the main frame as data": (
        lambda: frames_of(["uint8", [-1], 0]),
        lambda request: leaf(request).numel() > 100,
    ),
    "index -1 reads the last frame": (lambda: frames_of(["float32", [4], -1], ONES), lambda request: leaf(request).sum() == 4),
    "True is an index": (lambda: frames_of(["float32", [4], True], ONES), lambda request: leaf(request).sum() == 4),
    "a negative extent": (lambda: frames_of(["float32", [-1], 1], ONES), lambda request: leaf(request).shape == (4,)),
    "a negative extent, inline": (
        lambda: frames_of(["float32", [2, -1], ext(ONES)]),
        lambda request: leaf(request).shape == (2, 2),
    ),
    "an aux frame that nothing points to": (
        lambda: frames_of(["float32", [4], 1], ONES, b"surplus"),
        lambda request: leaf(request).sum() == 4,
    ),
    "aux frames where no tensor is": (lambda: frames_of(3, ONES), lambda request: leaf(request) == 3),
    "a negative offset": (
        lambda: frames_of(3, placeholder=position(-7, 4)),
        lambda request: request.mm_features[0].mm_position.offset == -7,
    ),
    "a negative length": (
        lambda: frames_of(3, placeholder=position(0, -4)),
        lambda request: request.mm_features[0].mm_position.length == -4,
    ),
    "an is_embed of another length": (
        lambda: frames_of(3, placeholder=position(0, 4, ["bool", [2], ext(b"\1\0")])),
        lambda request: request.mm_features[0].mm_position.is_embed.shape == (2,),
    ),
    "the alias half": (lambda: frames_of(["half", [8], ext(ONES)]), lambda request: leaf(request).dtype == torch.float16),
    "the alias float": (lambda: frames_of(["float", [4], ext(ONES)]), lambda request: leaf(request).dtype == torch.float32),
    "the alias double": (lambda: frames_of(["double", [2], 1], ONES), lambda request: leaf(request).dtype == torch.float64),
    "the alias long": (lambda: frames_of(["long", [2], 1], ONES), lambda request: leaf(request).dtype == torch.int64),
    "bin as data": (lambda: frames_of(["float32", [4], ONES]), lambda request: leaf(request).sum() == 4),
    "a bool that is neither 0 nor 1": (
        lambda: frames_of(["bool", [4], ext(b"\7\1\0\1")]),
        lambda request: leaf(request).dtype == torch.bool,
    ),
}
# What DESIGN does not ask us to refuse: the bytes are taken as they are.
ALLOWED = {"a bool that is neither 0 nor 1"}


@pytest.mark.parametrize("name", LENIENCIES)
def test_the_real_decoder_lets_it_through(name):
    build, holds = LENIENCIES[name]
    assert holds(vllm_decode(build()))


@pytest.mark.parametrize("name", [name for name in LENIENCIES if name not in ALLOWED])
@pytest.mark.parametrize("tensors", ["torch", "numpy", "wire"])
def test_we_refuse_it(name, tensors):
    build, _ = LENIENCIES[name]
    with pytest.raises(fastmm.DecodeError) as caught:
        fastmm.decode_request(received(build()), tensors=tensors)
    # The message says where: a path or a frame.
    assert caught.value.path is not None or caught.value.frame is not None


# What escapes the real decoder as something else than a decode error, and ends the engine's input thread.
RAW_ESCAPES = {
    "an index past the frames": (lambda: frames_of(["float32", [4], 5], ONES), IndexError),
    "an unknown dtype": (lambda: frames_of(["float33", [4], 1], ONES), AttributeError),
    "a dtype that is no dtype": (lambda: frames_of(["nn", [4], 1], ONES), AssertionError),
    "an empty buffer for a shape that is not": (lambda: frames_of(["float32", [4], ext(b"")]), AssertionError),
    "bytes that do not fill the shape": (lambda: frames_of(["float16", [3], ext(b"12345")]), RuntimeError),
    "a shape that is too large": (lambda: frames_of(["float16", [2**60], ext(b"1234")]), RuntimeError),
    "an elem without data": (lambda: frames_of_elem({"field": ["batched", {}]}), KeyError),
    "an unknown field factory": (lambda: frames_of_elem({"data": 1, "field": ["spread", {}]}), AttributeError),
    "an unknown ext code": (lambda: frames_of(["float32", [4], msgspec.msgpack.Ext(9, ONES)]), NotImplementedError),
    "pickle": (lambda: frames_of(msgspec.msgpack.Ext(1, b"\x80\x04N.")), NotImplementedError),
    "cloudpickle": (lambda: frames_of(msgspec.msgpack.Ext(2, b"\x80\x04N.")), NotImplementedError),
}


def frames_of_elem(elem):
    frames = frames_of(3)
    request = msgspec.msgpack.decode(frames[0])
    request[2][0]["data"]["k"] = elem
    return [msgspec.msgpack.encode(request)]


@pytest.mark.parametrize("name", RAW_ESCAPES)
def test_the_real_decoder_lets_an_odd_error_escape(name):
    build, error = RAW_ESCAPES[name]
    with pytest.raises(error):
        vllm_decode(build())


@pytest.mark.parametrize("name", RAW_ESCAPES)
@pytest.mark.parametrize("tensors", ["torch", "numpy", "wire"])
def test_ours_is_a_decode_error(name, tensors):
    build, _ = RAW_ESCAPES[name]
    with pytest.raises(fastmm.DecodeError):
        fastmm.decode_request(received(build()), tensors=tensors)


def test_fewer_than_nine_elements_are_an_error_and_missing_ones_take_defaults():
    whole = msgspec.msgpack.decode(frames_of(3)[0])
    for count in range(9):
        frames = [msgspec.msgpack.encode(whole[:count])]
        with pytest.raises(msgspec.DecodeError):
            vllm_decode(frames)
        with pytest.raises(fastmm.DecodeError):
            fastmm.decode_request(frames)
    for count in range(9, 23):
        frames = [msgspec.msgpack.encode(whole[:count])]
        theirs, ours = vllm_decode(frames), fastmm.decode_request(frames)
        assert (ours.client_index, ours.session_id, ours.priority) == (theirs.client_index, theirs.session_id, theirs.priority)
    frames = [msgspec.msgpack.encode([*whole, "new", {"er": 1}])]
    assert fastmm.decode_request(frames).request_id == vllm_decode(frames).request_id == "r"


def test_the_ext_code_of_the_real_encoder_is_the_one_used_here():
    (main,) = MsgpackEncoder(256).encode(torch.ones(1))
    assert msgspec.msgpack.decode(main)[2].code == RAW

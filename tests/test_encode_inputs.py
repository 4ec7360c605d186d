"""Inputs at the edges of what is accepted: each is written right, or refused with its place."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading

import msgpack
import numpy as np
import pytest
from support.requests import feature

import fastmm
from fastmm import EncodeError, Encoder, EngineCoreRequest, SchemaError, WireTensor, decode_request, encode_request

torch = pytest.importorskip("torch")


def test_views_with_strides_counted_in_bytes_and_in_elements_are_different_memory():
    base = np.arange(80, dtype=np.float32)
    by_bytes, by_elements = base[::2][:10], torch.from_numpy(base)[::8]  # (10,), strides 8 bytes and 8 elements
    frames = Encoder(threshold=0).encode([by_bytes, by_elements])
    assert len(frames) == 3
    assert np.frombuffer(frames[1], np.float32).tolist() == by_bytes.tolist()
    assert np.frombuffer(frames[2], np.float32).tolist() == by_elements.tolist()


def test_a_subclass_without_slots_is_refused_by_name():
    @dataclasses.dataclass
    class Mine(EngineCoreRequest):
        extra: int = 0

    with pytest.raises(SchemaError, match="slots") as caught:
        encode_request(Mine("r", [1]))
    assert "extra" in caught.value.message


def test_a_slot_borrowed_from_another_class_is_not_read():
    class Wide:
        __slots__ = tuple(f"s{i}" for i in range(60))

    @dataclasses.dataclass
    class Narrow:
        a: int
        b: int

    Narrow.b = Wide.s59
    narrow = Narrow.__new__(Narrow)
    narrow.__dict__["a"] = 1
    with pytest.raises(EncodeError, match="TypeError"):  # Python's own answer, asked by getattr
        Encoder().encode(narrow)


@pytest.mark.parametrize("code", [257, -129, 2**40, "x", None])
def test_an_extension_code_that_is_no_byte_is_refused(code):
    with pytest.raises(EncodeError, match="code"):
        Encoder().encode(msgpack.ExtType(5, b"data")._replace(code=code))


@pytest.mark.parametrize(
    "ids",
    [np.arange(300), np.arange(5, dtype=">i4"), torch.arange(300), WireTensor("int32", (2,), bytes(8)), np.arange(3)[::-1]],
    ids=["numpy", "big-endian", "torch", "wire", "reversed"],
)
def test_token_ids_in_an_array_are_written_as_the_list_that_an_engine_reads(ids):
    expected = ids.numpy().tolist() if isinstance(ids, WireTensor) else ids.tolist()
    frames = encode_request(EngineCoreRequest("r", ids))
    assert msgpack.unpackb(bytes(frames[0]))[1] == expected
    arrived = decode_request(frames, token_ids="array")
    assert bytes(encode_request(arrived)[0]) == bytes(frames[0])


@pytest.mark.parametrize("ids", [np.arange(3.0), np.zeros((2, 2), int), torch.ones(2, dtype=torch.bool)])
def test_token_ids_of_another_kind_are_refused(ids):
    with pytest.raises(SchemaError, match="token ids") as caught:
        encode_request(EngineCoreRequest("r", ids))
    assert caught.value.path == "$.prompt_token_ids"


@pytest.mark.parametrize("buffer", [b"abc", bytearray(b"abc"), memoryview(b"abc")], ids=["bytes", "bytearray", "memoryview"])
def test_any_buffer_is_a_tensor_where_one_is_wanted(buffer):
    frames = encode_request(EngineCoreRequest("r", [1], [feature(buffer)]))
    data = decode_request(frames, tensors="numpy").mm_features[0].data["pixel_values"].data
    assert data.dtype == np.uint8
    assert data.tobytes() == b"abc"


def test_a_memoryview_keeps_its_type_and_shape():
    frames = encode_request(EngineCoreRequest("r", [1], [feature(memoryview(np.ones((3, 4), np.float32)))]))
    data = decode_request(frames).mm_features[0].data["pixel_values"].data
    assert data.dtype == torch.float32
    assert data.shape == (3, 4)


def test_long_doubles_are_no_payload_that_can_be_cast():
    request = EngineCoreRequest("r", [1], [feature(np.ones(3, np.longdouble))])
    assert encode_request(request)
    with pytest.raises(SchemaError, match="cast") as caught:
        encode_request(request, dtype="bfloat16")
    assert caught.value.path == "$.mm_features[0].data['pixel_values'].data"


def test_an_empty_leaf_does_not_keep_its_neighbour_from_being_cast_in_place():
    batch = np.arange(640, dtype=np.float32)
    request = EngineCoreRequest("r", [1], [feature(batch[:0]), feature(batch)])
    frames = encode_request(request, dtype="float16")
    assert frames[-1].address == batch.ctypes.data


def test_several_requests_that_are_none_are_refused():
    with pytest.raises(SchemaError, match="several requests"):
        fastmm.encode_requests(None)  # type: ignore[arg-type]


def test_a_list_that_a_generator_refills_is_written_as_it_is_when_all_are_there():
    features: list[fastmm.MmFeatureSpec] = []

    def refill():
        for word in ("first", "second"):
            features[:] = [dataclasses.replace(feature(1), identifier=word)]
            yield EngineCoreRequest(word, [1], features)

    written = [decode_request(frames).mm_features[0].identifier for frames in fastmm.encode_requests(refill())]
    assert written == ["second", "second"]


def test_a_sibling_that_copies_features_counts_their_bytes():
    features = [feature(torch.ones(1000))]
    requests = [EngineCoreRequest("a", [1], features), EngineCoreRequest("b", [1], features, prompt_embeds=torch.ones(1000))]
    with pytest.raises(fastmm.LimitError, match="4000 before"):
        fastmm.encode_requests(requests, max_payload_nbytes=5000)


def test_a_buffer_is_as_it_was_when_the_casts_fail():
    buffer = bytearray(b"before")
    request = EngineCoreRequest("r", [1], [feature(torch.ones(10)), feature(torch.ones(10, dtype=torch.float8_e4m3fn))])
    with pytest.raises(SchemaError, match="float8"):
        Encoder(dtype="bfloat16").encode_into(request, buffer)
    assert buffer == b"before"


def test_a_metaclass_that_fails_is_an_error_with_a_path():
    class Meta(type):
        def __getattr__(cls, name):
            raise RuntimeError("no")

    class Strange(metaclass=Meta):
        pass

    with pytest.raises(EncodeError, match="RuntimeError") as caught:
        Encoder().encode([1, Strange()])
    assert caught.value.path == "$[1]"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.no_asan  # the sanitizers' runtime does not like a fork beside threads
def test_a_child_forked_during_a_cast_may_cast_that_memory():
    tensor = torch.ones(60_000_000)
    request = EngineCoreRequest("r", [1], prompt_embeds=tensor)
    thread = threading.Thread(target=encode_request, args=(request,), kwargs={"dtype": "bfloat16"})
    thread.start()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            encode_request(EngineCoreRequest("r", [1], prompt_embeds=tensor), dtype="bfloat16")
        except BaseException:
            os._exit(1)
        os._exit(0)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0

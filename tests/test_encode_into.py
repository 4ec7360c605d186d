"""encode_into: the main frame in the caller's own buffer, or the buffer as it was."""

from __future__ import annotations

import numpy as np
import pytest
from support.memory import in_fresh_process
from support.requests import leaf, request, resolve, same_bytes, unpacked

from fastmm import EncodeError, Encoder, SchemaError

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("before", [0, 1, 10, 100_000])
@pytest.mark.parametrize("size", [0, 1, 100, 32_767, 32_768, 1_000_000])
def test_the_buffer_is_resized_to_exactly_the_message(size, before):
    encoder = Encoder()
    buffer = bytearray(b"z" * before)
    value = ["x" * size, np.arange(100)]
    frames = encoder.encode_into(value, buffer)
    assert frames[0] is buffer
    assert same_bytes(frames) == same_bytes(encoder.encode(value))


def test_one_buffer_for_message_after_message():
    encoder = Encoder(dtype="bfloat16")
    buffer = bytearray()
    for count in (1000, 1, 30_000, 0, 5):
        made = request(torch.ones(count), "x" * 0 or None)
        frames = encoder.encode_into(made, buffer)
        dtype, shape, data = resolve(unpacked(frames)[2][0]["data"]["pixel_values"]["data"], frames)
        assert (dtype, shape, len(data)) == ("bfloat16", (count,), 2 * count)


@pytest.mark.parametrize(
    "wrong", [b"bytes", None, memoryview(bytearray(10)), [], "text", np.zeros(10, np.uint8)], ids=lambda v: type(v).__name__
)
def test_the_buffer_must_be_a_bytearray(wrong):
    class Child(bytearray):
        pass

    for buffer in (wrong, Child()):
        with pytest.raises(SchemaError, match="bytearray"):
            Encoder().encode_into([1], buffer)


def test_a_failure_leaves_the_buffer_as_it_was():
    buffer = bytearray(b"what was there")
    for bad in (object(), [1, 2, object()], request(torch.ones(1000), object()), 2**80):
        with pytest.raises((SchemaError, EncodeError)):
            Encoder(dtype="bfloat16").encode_into(bad, buffer)
        assert buffer == b"what was there"


@pytest.mark.parametrize("text", ["same", "longer than before", "s"])
def test_a_buffer_that_is_still_exported_is_refused_before_anything_is_cast(text):
    buffer = bytearray()
    encoder = Encoder(dtype="bfloat16")
    encoder.encode_into("same", buffer)
    in_flight = memoryview(buffer)
    with pytest.raises(EncodeError, match="exported"):
        encoder.encode_into(text, buffer)
    tensor = torch.arange(1000.0)
    made = request(tensor)
    with pytest.raises(EncodeError, match="exported"):
        encoder.encode_into(made, buffer)
    assert leaf(made) is tensor
    assert torch.equal(tensor, torch.arange(1000.0))
    assert bytes(in_flight) == b"\xa4same"
    del in_flight
    assert encoder.encode_into(text, buffer) == [buffer]


def test_a_hook_that_exports_or_changes_the_buffer():
    buffer = bytearray(b"before")
    views = []

    def hook(_):
        views.append(memoryview(buffer))
        return 1

    with pytest.raises(EncodeError, match="exported"):
        Encoder(hook=hook).encode_into([object()], buffer)
    assert buffer == b"before"
    views.clear()

    def clear(_):
        buffer.clear()
        return 1

    assert Encoder(hook=clear).encode_into([object(), "x"], buffer) == [b"\x92\x01\xa1x"]


def test_the_buffer_may_be_part_of_what_is_written():
    buffer = bytearray(b"abc")
    assert Encoder().encode_into([buffer], buffer) == [b"\x91\xc4\x03abc"]


def test_a_buffer_that_another_thread_clears_during_the_casts_ends_in_no_crash():
    in_fresh_process("""
import sys, threading, torch, fastmm
from support.requests import request
sys.setswitchinterval(1e-6)
encoder, buffer, stop = fastmm.Encoder(dtype="bfloat16", inplace=False), bytearray(), False
made = request(torch.ones(400_000), *[torch.ones(20) for _ in range(500)])
def clear():
    while not stop:
        try: buffer.clear()
        except BufferError: pass
thread = threading.Thread(target=clear); thread.start()
for _ in range(200):
    encoder.encode_into(made, buffer)
stop = True; thread.join()
""")

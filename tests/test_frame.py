"""A Frame is an immutable, one-dimensional view of bytes that owns its memory."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import pickle
import sys
import weakref

import numpy as np
import pytest

import fastmm
from fastmm import Encoder, Frame, encode_request


def frame_of(array):
    return encode_request([array], threshold=0)[1]


@pytest.fixture
def array():
    return np.arange(1000, dtype=np.float32)


def test_a_frame_says_its_size_and_address(array):
    frame = frame_of(array)
    assert (frame.nbytes, len(frame), frame.address) == (4000, 4000, array.ctypes.data)
    assert repr(frame) == f"<fastmm.Frame of 4000 bytes at {array.ctypes.data:#x}>"
    assert type(frame) is fastmm.Frame is Frame


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_its_buffer_is_bytes_read_only_and_of_one_dimension(size):
    frame = frame_of(np.ones(size, dtype=np.float32))
    view = memoryview(frame)
    assert (view.format, view.itemsize, view.ndim, view.shape, view.strides) == ("B", 1, 1, (4 * size,), (1,))
    assert view.readonly
    assert view.c_contiguous
    assert view.nbytes == len(frame)
    assert view.obj is frame


def test_nobody_can_write_through_it(array):
    frame = frame_of(array)
    before = bytes(frame)
    with pytest.raises(TypeError):
        memoryview(frame)[0] = 1
    with pytest.raises((TypeError, BufferError)):
        (ctypes.c_char * 4000).from_buffer(frame)
    with pytest.raises((TypeError, BufferError)):
        io.BytesIO(b"x" * 10).readinto(frame)
    assert not np.frombuffer(frame, np.uint8).flags.writeable
    assert bytes(frame) == before
    if sys.version_info >= (3, 12):
        import inspect

        with pytest.raises(BufferError):
            frame.__buffer__(inspect.BufferFlags.WRITABLE)


@pytest.mark.parametrize("name", ["nbytes", "address", "owner", "new"])
def test_its_attributes_cannot_be_set(array, name):
    with pytest.raises(AttributeError):
        setattr(frame_of(array), name, 1)


def test_whatever_takes_bytes_takes_a_frame(array, tmp_path):
    frame = frame_of(array)
    data = array.tobytes()
    assert bytes(frame) == bytearray(frame) == data
    assert b"".join([frame, frame]) == data * 2
    assert io.BytesIO(frame).read() == data
    (tmp_path / "frame").write_bytes(frame)
    assert (tmp_path / "frame").read_bytes() == data
    assert np.array_equal(np.frombuffer(frame, np.float32), array)
    assert memoryview(frame)[4:8].tobytes() == data[4:8]
    assert memoryview(frame).cast("f")[5] == 5
    assert memoryview(frame) == data


def test_no_frame_is_made_by_hand_or_subclassed_or_pickled(array):
    with pytest.raises(TypeError, match="encode_request"):
        Frame()
    with pytest.raises(TypeError):
        type("Child", (Frame,), {})
    for way in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            way(frame_of(array))
    blank = Frame.__new__(Frame)
    assert (bytes(blank), len(blank), blank.nbytes) == (b"", 0, 0)


def test_a_frame_is_told_apart_by_identity(array):
    first, second = Encoder(dedup=False).encode([array, array])[1:]
    assert first != second
    assert first == first
    assert len({first, second}) == 2


def test_frames_that_come_and_go_are_used_again_and_hold_nothing(array):
    gone = []
    for _ in range(1000):
        value = np.ones(10)
        weakref.finalize(value, gone.append, 1)
        frame_of(value)
        del value
    gc.collect()
    assert len(gone) == 1000


def test_many_views_of_one_frame(array):
    frame = frame_of(array)
    references = sys.getrefcount(frame)
    views = [memoryview(frame) for _ in range(1000)]
    assert sys.getrefcount(frame) == references + 1000
    del views
    assert sys.getrefcount(frame) == references

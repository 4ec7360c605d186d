"""Who owns what after a decode, that nothing leaks, and that threads do not disturb each other."""

import gc
import importlib.util
import random
import subprocess
import sys
import threading
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest
from support import raw
from support.compare import assert_same
from support.families import fastmm_family
from support.golden_cases import CASES
from support.reference import reference_encode

from fastmm._native.decoder import Decoder
from fastmm._native.pool import pool_limit, pool_stats
from fastmm.errors import DecodeError
from fastmm.schema import EngineCoreRequest

HAS_TORCH = importlib.util.find_spec("torch") is not None
TENSORS = ["torch", "numpy", "wire"] if HAS_TORCH else ["numpy", "wire"]
EVERYTHING = next(case for case in CASES if case.name == "everything-at-0")


def data_of(request):
    return request.mm_features[0].data["pixel_values"].data


def address_of(tensor):
    if isinstance(tensor, np.ndarray):
        return tensor.ctypes.data
    return tensor.data_ptr() if hasattr(tensor, "data_ptr") else address_of_buffer(tensor.data)


def address_of_buffer(buffer):
    return np.frombuffer(buffer, np.uint8).ctypes.data


class Tracked(np.ndarray):
    """A frame that can be watched."""


def tracked(data):
    return np.frombuffer(bytearray(data), np.uint8).view(Tracked)


@pytest.mark.parametrize("tensors", TENSORS)
def test_a_tensor_of_an_aux_frame_lies_in_the_frame(tensors):
    for kind in (bytes, bytearray, memoryview, tracked):
        aux = kind(bytes(range(64)) * 64)
        got = data_of(Decoder(tensors=tensors).decode(raw.item(aux, data=["float32", [1024], 1])))
        assert address_of(got) == address_of_buffer(aux)


@pytest.mark.parametrize("tensors", TENSORS)
def test_the_frame_lives_as_long_as_the_tensor_and_no_longer(tensors):
    aux = tracked(bytes(range(64)))
    gone = weakref.ref(aux)
    got = data_of(Decoder(tensors=tensors).decode(raw.item(aux, data=[["float32", [16], 1], ["uint8", [64], 1]])))
    del aux
    gc.collect()
    assert gone() is not None
    first, second = got
    del got, first
    gc.collect()
    assert gone() is not None
    assert (
        bytes(getattr(second, "data", second) if tensors == "wire" else second.numpy() if tensors == "torch" else second)[:3]
        == b"\x00\x01\x02"
    )
    del second
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("tensors", TENSORS)
def test_inline_data_keeps_no_frame_alive(tensors):
    main = tracked(raw.item(data=["float32", [2], raw.raw(b"12345678")])[0])
    gone = weakref.ref(main)
    got = data_of(Decoder(tensors=tensors).decode(main))
    del main
    gc.collect()
    assert gone() is None
    assert address_of(got) % 8 == 0


def test_a_copy_keeps_no_frame_alive_and_may_be_written_to():
    for nbytes in (8, 65536, 1 << 21):
        aux = tracked(bytes(nbytes))
        gone = weakref.ref(aux)
        got = data_of(Decoder(tensors="numpy", copy=True).decode(raw.item(aux, data=["float32", [nbytes // 4], 1])))
        assert address_of(got) != address_of_buffer(aux)
        del aux
        gc.collect()
        assert gone() is None
        got[:] = 1.5
        assert got.sum() == 1.5 * nbytes / 4


@pytest.mark.parametrize("tensors", TENSORS)
def test_a_frame_that_many_tensors_point_to_is_copied_once(tensors):
    aux = bytearray(1 << 20)
    for options, frame in (({"copy": True}, aux), ({}, memoryview(bytearray(len(aux) + 1))[1:])):
        decoder = Decoder(tensors=tensors, **options)
        got = data_of(decoder.decode(raw.item(frame, data=[["complex128", [1 << 16], 1]] * 500)))
        assert decoder.counters["nbytes_copied"] == 1 << 20
        assert len({address_of(tensor) for tensor in got}) == 1


def test_arrays_are_read_only_where_the_frame_is():
    data = ["uint8", [4], 1]
    frozen = data_of(Decoder(tensors="numpy").decode(raw.item(b"abcd", data=data)))
    with pytest.raises(ValueError, match="read-only"):
        frozen[0] = 0
    aux = bytearray(b"abcd")
    open_ = data_of(Decoder(tensors="numpy").decode(raw.item(aux, data=data)))
    open_[0] = ord("z")
    assert aux == b"zbcd"
    with pytest.raises(BufferError):
        aux.append(0)  # the view pins it
    del open_
    aux.append(0)


@pytest.mark.parametrize("tensors", TENSORS)
@pytest.mark.parametrize("name", ["float32", "int64", "complex128", "bfloat16", "<f8"])
def test_misaligned_data_is_copied(name, tensors):
    whole = bytearray(range(65))
    itemsize = {"float32": 4, "int64": 8, "complex128": 16, "bfloat16": 2, "<f8": 8}[name]
    decoder = Decoder(tensors=tensors)
    offset = next(i for i in (1, 2) if (address_of_buffer(whole) + i) % 2)
    got = data_of(decoder.decode(raw.item(memoryview(whole)[offset : offset + itemsize], data=[name, [1], 1])))
    assert address_of(got) % itemsize == 0
    assert decoder.counters["nbytes_copied"] == itemsize
    assert decoder.counters["nbytes_viewed"] == 0


@pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
def test_a_read_only_frame_makes_no_warning():
    code = """
import sys, warnings
warnings.simplefilter("error")
from fastmm._native.decoder import Decoder
from support import raw
assert "torch" not in sys.modules
request = Decoder().decode(raw.item(b"abcd", data=["uint8", [4], 1]))
assert request.mm_features[0].data["pixel_values"].data.tolist() == [97, 98, 99, 100]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("tensors", TENSORS)
def test_references_to_frames_return_to_where_they_were(tensors):
    frames = [bytes(frame) for frame in reference_encode(EVERYTHING.build(fastmm_family("wire")), 0)]
    before = [sys.getrefcount(frame) for frame in frames]
    decoder = Decoder(tensors=tensors)
    for _ in range(20):
        request = decoder.decode(frames)
        assert sys.getrefcount(frames[1]) > before[1]
        del request
        for bad in (frames[:-1], [frames[0][:-1], *frames[1:]], [*frames, b""], [frames[0] + b"\xc0", *frames[1:]]):
            with pytest.raises(DecodeError):
                decoder.decode(bad)
        del bad
    gc.collect()
    assert [sys.getrefcount(frame) for frame in frames] == before


@pytest.mark.parametrize("tensors", TENSORS)
def test_tensors_and_frames_are_freed_in_any_order(tensors):
    count = 12
    data = [["int64", [4], i] for i in range(1, count + 1)]
    decoder = Decoder(tensors=tensors)
    stream = random.Random(7)
    for _ in range(30):
        aux = [tracked(np.full(4, i, "<i8").tobytes()) for i in range(count)]
        gone = [weakref.ref(a) for a in aux]
        got = data_of(decoder.decode(raw.item(*aux, data=data)))
        held = dict(enumerate(zip(got, aux)))
        del got, aux
        while held:
            index = stream.choice(list(held))
            tensor, _ = held.pop(index)
            values = tensor.numpy() if tensors == "wire" else tensor
            assert values.tolist() == [index] * 4
            del tensor, values, _
            assert gone[index]() is None
    assert len(gone) == count


# What is counted is blocks: numbers of them do not drift with the machine's load, as resident memory does.
@pytest.mark.parametrize("tensors", TENSORS)
def test_memory_is_flat_over_many_decodes_good_and_bad(tensors):
    message = EVERYTHING.build(fastmm_family("wire"))
    good = [bytes(frame) for frame in reference_encode(message, 0)]
    inline = [bytes(frame) for frame in reference_encode(message, 1 << 30)]
    bad = [
        good[:-1],
        [good[0][:-9], *good[1:]],
        [good[0] + b"\xc0", *good[1:]],
        [b"\x91" * 500],
        [good[0].replace(b"float32", b"float33")],
    ]
    bad += [[inline[0].replace(b"\xa4data", b"\xa4dat\xff")], [b"\xdc\x00\x16\xa1r\x93\x01\x02\xa1x"]]
    decoders = [Decoder(tensors=tensors), Decoder(tensors=tensors, copy=True, token_ids="array")]

    def round_trip(times):
        for _ in range(times):
            for decoder in decoders:
                decoder.decode(good)
                decoder.decode(inline)
                for frames in bad:
                    with pytest.raises(DecodeError):
                        decoder.decode(frames)

    def growth(times):
        before = tracemalloc.get_traced_memory()[0]
        round_trip(times)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    round_trip(20)
    tracemalloc.start()
    try:
        # Free lists of numpy and Python fill up at first; one object leaked a message would show in every window.
        windows = [growth(60)]
        while windows[-1] >= 60 * 16 and len(windows) < 12:
            windows.append(growth(60))
    finally:
        tracemalloc.stop()
    assert windows[-1] < 60 * 16, windows


@pytest.mark.no_asan  # freed memory is kept there for a while
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("tensors", TENSORS)
def test_resident_memory_is_flat_over_100_000_decodes(tensors):
    decoder = Decoder(tensors=tensors)
    aux = bytearray(4096)
    frames = raw.item(
        aux, data=[["float32", [1024], 1], ["int64", [3], raw.raw(bytes(24))]], field=["flat", {"slices": [[0, 1, None]]}]
    )

    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    for _ in range(10_000):
        decoder.decode(frames)
    before = resident()
    for _ in range(100_000):
        decoder.decode(frames)
    assert resident() - before < 2 << 20  # an object of 32 bytes for each message would be 3 MB
    aux.append(0)  # and nobody holds the frame


def test_names_that_never_come_again_are_not_kept():
    decoder = Decoder(tensors="numpy")

    def strange(index):
        data = [f"<U{index + 1}", [0], raw.raw(b"")]
        decoder.decode(raw.item(data=data))
        decoder.decode(raw.request(trace_headers={f"key-{index}": "v"}, sampling_params={"max_tokens": index + 1}))

    for index in range(2000):
        strange(index)
    gc.collect()
    before = sys.getallocatedblocks()
    for index in range(2000, 6000):
        strange(index)
    gc.collect()
    assert sys.getallocatedblocks() - before < 400


def test_pooled_copies_go_back_to_the_pool():
    pool_limit(1 << 28)
    decoder = Decoder(tensors="numpy", copy=True)
    frames = raw.item(bytes(1 << 20), data=["uint8", [1 << 20], 1])
    decoder.decode(frames)
    misses = pool_stats()["misses"]
    for _ in range(20):
        decoder.decode(frames)
    assert pool_stats()["misses"] == misses


def test_no_more_is_allocated_than_the_message_is_worth():
    huge = raw.item(data=["float32", [2**40], raw.raw(b"1234")])
    nested = [b"\xdd\x00\x0f\x00\x00" * 16 + bytes(2**20)]
    tracemalloc.start()
    try:
        for frames in (huge, nested, [b"\xdd\x7f\xff\xff\xff" + bytes(100)]):
            for kind in (EngineCoreRequest, list[int]) if frames is huge else (EngineCoreRequest, None, list[int]):
                with pytest.raises(DecodeError):
                    Decoder(kind, tensors="numpy").decode(frames)
                assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("tensors", TENSORS)
def test_one_decoder_serves_many_threads(tensors):
    messages = [
        case.build(fastmm_family("wire"))
        for case in CASES
        if case.name in ("everything", "flat-20", "text-2048-ids", "is-embed")
    ]
    frames = [[bytes(frame) for frame in reference_encode(message, 256)] for message in messages]
    decoder = Decoder(tensors=tensors)
    expected = [decoder.decode(each) for each in frames]
    assert_same(expected, messages)
    failures = []

    def work(seed):
        stream = random.Random(seed)
        try:
            for _ in range(5000):
                index = stream.randrange(len(frames))
                if stream.random() < 0.2:
                    with pytest.raises(DecodeError):
                        decoder.decode([frames[index][0][: stream.randrange(len(frames[index][0]))], *frames[index][1:]])
                    continue
                got = decoder.decode(frames[index])
                if stream.random() < 0.01:
                    assert_same(got, messages[index])
                else:
                    assert got.prompt_token_ids == messages[index].prompt_token_ids
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures

"""No copy: a frame starts where the tensor does, and no block of payload size is ever asked for.

What is counted: addresses; resident memory at its peak; and whether a message goes through in a process that cannot get a
block of a quarter of the payload.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.memory import in_fresh_process
from support.requests import feature, leaf, request, sent

from fastmm import Encoder, Frame, WireTensor, encode_request

torch = pytest.importorskip("torch")


def sources():
    base = torch.arange(10_000.0)
    yield base, base.data_ptr()
    yield base[100:600], base.data_ptr() + 400
    yield base.reshape(100, 100)[3:7], base.data_ptr() + 1200
    yield base.view(torch.int16), base.data_ptr()
    yield base.numpy(), base.data_ptr()
    yield base.numpy()[7:999], base.data_ptr() + 28
    yield torch.nn.Parameter(base), base.data_ptr()
    data = bytearray(4000)
    address = np.frombuffer(data, np.uint8).ctypes.data
    yield data_as(memoryview(data)), address
    yield WireTensor("float32", (900,), memoryview(data)[400:]), address + 400
    readonly = np.frombuffer(bytes(4000), np.float32)
    yield readonly, readonly.ctypes.data


def data_as(view):
    return WireTensor("float32", (view.nbytes // 4,), view)


@pytest.mark.parametrize("index", range(10))
def test_a_frame_starts_at_the_tensors_own_address(index):
    value, address = list(sources())[index]
    frames = encode_request(request(value))
    assert type(frames[1]) is Frame
    assert frames[1].address == address
    assert frames[1].nbytes == len(frames[1]) == len(sent(frames)[2])
    assert np.frombuffer(frames[1], np.uint8).ctypes.data == address


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["torch", "numpy", "wire", "rows of one batch"])
def test_a_frame_of_a_cast_in_place_starts_there_too(kind, dtype):
    base = torch.arange(40_000.0)
    array = base.numpy()
    value, address = {
        "torch": lambda: (base, base.data_ptr()),
        "numpy": lambda: (array, array.ctypes.data),
        "wire": lambda: (WireTensor("float32", (40_000,), array.data), array.ctypes.data),
        "rows of one batch": lambda: (base.reshape(40, 1000)[7:9], base.data_ptr() + 28_000),
    }[kind]()
    made = request(value)
    encoder = Encoder(dtype=dtype)
    frames = encoder.encode(made)
    assert frames[1].address == address
    assert encoder.counters["nbytes_copied"] == 0
    again = encoder.encode(made)  # bfloat16 now: nothing to cast, nothing to copy
    assert again[1].address == address
    assert encoder.counters["nbytes_cast"] == len(frames[1]) * 2
    assert leaf(made) is not value


def test_nothing_but_tensors_below_the_threshold_is_copied():
    encoder = Encoder()
    encoder.encode(request(torch.ones(63), torch.ones(64), torch.ones(1000), np.ones(1000)))
    assert encoder.counters["nbytes_copied"] == 63 * 4
    assert encoder.counters["nbytes_viewed"] == 64 * 4 + 4000 + 8000


def test_a_view_of_something_large_brings_none_of_the_rest():
    base = torch.zeros(10_000_000)
    frames = encode_request([base[5:105], base[-100:]])
    assert [len(frame) for frame in frames[1:]] == [400, 400]


# --- memory, in a process of its own --------------------------------------------------------------------------------------

PRELUDE = """
import gc, numpy, torch, fastmm, fastmm._native.pool
from support.memory import NoRoomFor, PeakOverStart
from support.requests import feature, request
MIB = 1 << 20
torch.set_num_threads(1)
def payload():
    return torch.full((100, MIB // 4), 1.5)  # 100 MiB
for options in ({}, {"dtype": "bfloat16"}, {"threshold": 2**62}):  # the code is loaded, small buffers are there
    fastmm.Encoder(**options).encode(request(torch.ones(1000), torch.ones(30, 30).t()))
"""


def measured(body):
    return in_fresh_process(PRELUDE + body)


@pytest.mark.no_asan
def test_a_request_of_100_mib_needs_no_memory():
    measured("""
for options in ({}, {"dtype": "bfloat16"}, {"dtype": "float16"}, {"dtype": "bfloat16", "dedup": False}):
    for make in (
        lambda: request(payload()),
        lambda: request(*payload()),
        lambda: request(payload().numpy()),
        lambda: request([*payload()], prompt_embeds=payload()[:50]),
    ):
        made = make()
        encoder = fastmm.Encoder(**options)
        with NoRoomFor(8 * MIB), PeakOverStart() as peak:
            frames = encoder.encode(made)
            again = encoder.encode(made)
        assert sum(len(frame) for frame in frames[1:]) >= (50 if options else 100) * MIB
        assert peak.nbytes < 2 * MIB, (options, peak.nbytes)
        del frames, again, made
""")


@pytest.mark.no_asan
def test_the_counter_sees_a_copy_where_there_is_one():
    """The same measures, on what must copy: a block of payload size is not to be had, and with room the peak rises."""
    measured("""
tensor = payload()
for options, leaf in (
    ({"threshold": 2**62}, tensor),
    ({"dtype": "bfloat16", "inplace": False}, tensor),
    ({}, tensor.t()),
):
    fastmm._native.pool.pool_limit(0)  # nothing of the last round
    fastmm._native.pool.pool_limit(256 * MIB)
    try:
        with NoRoomFor(8 * MIB):
            fastmm.Encoder(**options).encode(request(leaf))
    except MemoryError:
        pass
    else:
        raise SystemExit(f"a copy went unnoticed: {options}")
    with PeakOverStart() as peak:
        frames = fastmm.Encoder(**options).encode(request(leaf))
    assert peak.nbytes > 45 * MIB, (options, peak.nbytes)
    del frames
""")


@pytest.mark.no_asan
def test_out_of_place_needs_half_the_payload_once_and_nothing_from_then_on():
    measured("""
encoder = fastmm.Encoder(dtype="bfloat16", inplace=False)
made = request(payload())
with PeakOverStart() as first:
    frames = encoder.encode(made)
assert 45 * MIB < first.nbytes < 55 * MIB, first.nbytes
del frames
for _ in range(3):
    with NoRoomFor(8 * MIB), PeakOverStart() as warm:
        frames = encoder.encode(made)
    del frames
    assert warm.nbytes < 2 * MIB, warm.nbytes
""")


@pytest.mark.no_asan
def test_the_pool_is_everybodys():
    """What one encoder gave back, another one takes."""
    measured("""
made = request(payload())
fastmm.Encoder(dtype="bfloat16", inplace=False).encode(made)
with NoRoomFor(8 * MIB), PeakOverStart() as warm:
    fastmm.Encoder(dtype="float16", inplace=False).encode(made)
    fastmm.encode_request(made, dtype="bfloat16", inplace=False)
assert warm.nbytes < 2 * MIB, warm.nbytes
""")


@pytest.mark.no_asan
def test_a_failing_message_needs_no_memory_and_gives_all_back():
    measured("""
made = request(payload())
made.session_id = object()
with NoRoomFor(8 * MIB), PeakOverStart() as peak:
    for options in ({}, {"dtype": "bfloat16"}):
        for _ in range(5):
            try:
                fastmm.Encoder(**options).encode(made)
            except fastmm.SchemaError:
                pass
            else:
                raise SystemExit("no error")
assert peak.nbytes < 2 * MIB, peak.nbytes
""")


@pytest.mark.no_asan
def test_no_memory_is_a_memory_error_and_leaves_all_as_it_was():
    measured("""
tensor, strided = payload(), payload().t()
made = request(tensor, strided)
encoder = fastmm.Encoder(dtype="bfloat16")
for _ in range(3):
    try:
        with NoRoomFor(8 * MIB):
            encoder.encode(made)
    except MemoryError:
        pass
    else:
        raise SystemExit("no error")
    assert made.mm_features[0].data["pixel_values"].data is tensor
    assert bool((tensor == 1.5).all())
frames = encoder.encode(made)
assert len(frames) == 3
assert bool((made.mm_features[0].data["pixel_values"].data == 1.5).all())
""")


@pytest.mark.no_asan
def test_no_memory_for_the_casts_leaves_the_buffer_of_encode_into_as_it_was():
    measured("""
buffer = bytearray(b"what was there")
made = request(payload())
encoder = fastmm.Encoder(dtype="bfloat16", inplace=False)
for _ in range(3):
    try:
        with NoRoomFor(8 * MIB):
            encoder.encode_into(made, buffer)
    except MemoryError:
        pass
    else:
        raise SystemExit("no error")
    assert buffer == b"what was there", buffer
assert len(encoder.encode_into(made, buffer)) == 2
""")


@pytest.mark.no_asan
def test_encode_into_copies_the_main_frame_and_nothing_else():
    measured("""
made = request(payload())
buffer = bytearray(100_000)
with NoRoomFor(8 * MIB), PeakOverStart() as peak:
    frames = fastmm.Encoder(dtype="bfloat16").encode_into(made, buffer)
assert frames[0] is buffer and len(frames[1]) == 50 * MIB
assert peak.nbytes < 2 * MIB, peak.nbytes
""")


@pytest.mark.no_asan
def test_many_samples_of_one_prompt_need_no_more_than_one():
    measured("""
features = request(payload()).mm_features
requests = [fastmm.EngineCoreRequest(f"r{i}", [1], mm_features=features) for i in range(64)]
with NoRoomFor(8 * MIB), PeakOverStart() as peak:
    sent = fastmm.encode_requests(requests, dtype="bfloat16")
assert len(sent) == 64 and all(frames[1].address == sent[0][1].address for frames in sent)
assert peak.nbytes < 2 * MIB, peak.nbytes
""")


def test_metadata_of_a_shared_field_is_written_once_and_copied():
    """n items of one field object: linear work, though the wire has n slices for each of n items."""
    from fastmm import MmFlatField

    asked = []

    class Counted:
        def __init__(self, value):
            self.value = value

        def __index__(self):
            asked.append(self.value)
            return self.value

    field = MmFlatField(slices=[(slice(Counted(i), Counted(i + 1)),) for i in range(50)], dim=0)
    features = [feature(torch.ones(4), field=field) for _ in range(50)]
    from fastmm import EngineCoreRequest

    frames = encode_request(EngineCoreRequest("r", [1], mm_features=features))
    assert len(asked) == 100
    assert bytes(frames[0]).count(b"\xa6slices") == 50

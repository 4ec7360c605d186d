"""What build_features makes, on the wire: nothing lost, nothing copied, metadata that grows as the items do."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.items import KINDS, address_of, arguments, array_of, prompt_of, qwen, tensor, torch_or_skip

import fastmm
from fastmm import FlatSizes, WireTensor, build_features


def request_of(given_arguments, **fields):
    features = build_features(**given_arguments)
    ids = given_arguments["prompt_token_ids"]
    return fastmm.EngineCoreRequest("r", list(ids), mm_features=features, arrival_time=1.0, **fields)


def received(frames):
    return [bytes(memoryview(frame)) for frame in frames]


# --- nothing lost -------------------------------------------------------------------------------------------------------

DTYPES = ["?", "i1", "u1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "u2", "u4", "u8"]


@st.composite
def splits(draw):
    """A batch of some dtype and shape, sizes that add up to one of its extents, and which axis that is."""
    ndim = draw(st.integers(1, 4))
    dim = draw(st.integers(0, ndim - 1))
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    shape = [draw(st.integers(0, 4)) for _ in range(ndim)]
    shape[dim] = sum(sizes)
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    count = int(np.prod(shape))
    batch = np.frombuffer(np.random.default_rng(draw(st.integers(0, 99))).bytes(count * dtype.itemsize), dtype).reshape(shape)
    return (batch & 1 if dtype.kind == "b" else batch).copy(), sizes, dim


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150)
@given(
    split=splits(), threshold=st.sampled_from([0, 1, 16, 256]), tensors=st.sampled_from(["numpy", "wire"]), full=st.booleans()
)
def test_any_split_decoded_and_joined_again_is_the_batch(kind, split, threshold, tensors, full):
    batch, sizes, dim = split
    if kind == "torch":
        torch_or_skip()
    n = len(sizes)
    rows = np.arange(n * 3, dtype=np.int32).reshape(n, 3)
    ids, places = prompt_of([2] * n)
    made = {
        "tensors": {"flat": tensor(kind, batch), "rows": tensor(kind, rows), "all": tensor(kind, batch)},
        "placeholders": places,
        "hashes": [str(i) for i in range(n)],
        "prompt_token_ids": ids,
        "flat": {"flat": FlatSizes(sizes, dim)},
        "batched": {"rows"},
        "full_slices": full,
    }
    frames = fastmm.encode_request(request_of(made), threshold=threshold)
    features = fastmm.decode_request(received(frames), tensors=tensors).mm_features
    found = [array_of(feature.data["flat"].data) for feature in features]
    assert all(leaf.dtype == batch.dtype for leaf in found)
    assert np.concatenate(found, axis=dim).tobytes() == np.ascontiguousarray(batch).tobytes()
    assert [leaf.shape[dim] for leaf in found] == sizes
    assert np.array_equal(np.stack([array_of(feature.data["rows"].data) for feature in features]), rows)
    for i, feature in enumerate(features):
        assert array_of(feature.data["all"].data).tobytes() == np.ascontiguousarray(batch).tobytes()
        field = feature.data["flat"].field
        own = field.slices[i if full else 0]
        own = own[dim] if dim else own
        assert (own.start, own.stop, field.dim) == (sum(sizes[:i]), sum(sizes[: i + 1]), dim)


def test_a_mask_comes_back():
    ids, places = prompt_of([300, 5])
    ids[places[0][0] + 7] = 0
    made = arguments(2, tensors={"x": np.zeros(2)}, batched={"x"}, prompt_token_ids=ids, placeholders=places)
    frames = fastmm.encode_request(request_of(made | {"embed_token_id": ids[places[0][0]]}))
    first, second = fastmm.decode_request(received(frames), tensors="numpy").mm_features
    assert np.flatnonzero(~first.mm_position.is_embed).tolist() == [7]
    assert second.mm_position.is_embed is None


def test_cached_items_come_back_as_none():
    frames = fastmm.encode_request(request_of(qwen("numpy", [200, 3, 100], cached={0, 1})))
    assert len(frames) == 2  # the last one's patches; grid and sizes are small
    first, second, third = fastmm.decode_request(received(frames), tensors="numpy").mm_features
    assert first.data is second.data is None
    assert first.mm_hash == "hash-0"
    assert len(third.data["pixel_values"].data) == 100


# --- nothing copied -------------------------------------------------------------------------------------------------------


def frame_addresses(frames):
    return [frame.address for frame in frames[1:]]


@pytest.mark.parametrize("kind", KINDS)
def test_frames_start_inside_the_batch(kind):
    made = qwen(kind, [100, 50, 200], width=10)
    start = address_of(made["tensors"]["pixel_values"])
    frames = fastmm.encode_request(request_of(made))
    assert [address - start for address in frame_addresses(frames)] == [0, 100 * 40, 150 * 40]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_cast_in_place_reaches_the_memory_of_the_batch(kind):
    made = qwen(kind, [100, 50, 200], width=10)
    batch = made["tensors"]["pixel_values"]
    start = address_of(batch)
    values = array_of(batch).copy()
    request = request_of(made)
    frames = fastmm.encode_request(request, dtype="float16")
    assert [address - start for address in frame_addresses(frames)] == [0, 100 * 40, 150 * 40]
    joined = np.concatenate([np.frombuffer(frame, np.float16) for frame in received(frames)[1:]])
    assert np.array_equal(joined.reshape(350, 10), values.astype(np.float16))
    assert received(fastmm.encode_request(request, dtype="float16")) == received(frames)
    leaf = request.mm_features[1].data["pixel_values"].data
    assert type(leaf) is type(batch)
    assert leaf.shape == (50, 10)


def test_a_read_only_batch_is_never_written_to():
    made = qwen("numpy", [100, 50], width=10)
    batch = made["tensors"]["pixel_values"]
    batch.flags.writeable = False
    values = batch.copy()
    fastmm.encode_request(request_of(made), dtype="float16")
    assert np.array_equal(batch, values)
    made["tensors"]["pixel_values"] = WireTensor("float32", batch.shape, batch.tobytes())
    content = bytes(made["tensors"]["pixel_values"].data)
    fastmm.encode_request(request_of(made), dtype="float16")
    assert bytes(made["tensors"]["pixel_values"].data) == content


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [0, 1])
def test_no_memory_of_payload_size_is_taken(kind, dim):
    shape = [1, 1 << 20]
    if dim == 0:
        shape.reverse()
    batch = tensor(kind, np.zeros(shape, np.float32))
    if kind == "wire":
        batch.numpy()  # numpy is warm
    made = arguments(4, tensors={"x": batch, "y": batch}, flat={"x": FlatSizes([1 << 18] * 4, dim)})
    build_features(**made)
    tracemalloc.start()
    try:
        features = build_features(**made)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 10
    start = address_of(batch)
    assert [address_of(feature.data["x"].data) - start for feature in features] == [i << 20 for i in range(4)]


# --- metadata -------------------------------------------------------------------------------------------------------------


def metadata_nbytes(n, **changes):
    """Bytes of a request's main frame without its ids; every aux frame is payload."""
    made = qwen("numpy", [3] * n, width=100, **changes)
    made["hashes"] = [f"{i:064x}" for i in range(n)]
    request = request_of(made)
    request.prompt_token_ids = []
    return len(memoryview(fastmm.encode_request(request)[0]).cast("B"))


def test_metadata_is_linear_in_the_number_of_items():
    per_item = {n: metadata_nbytes(n) / n for n in (10, 100, 1000)}
    # Larger offsets, slices and frame numbers take a few bytes more; nothing else may grow.
    assert per_item[100] < per_item[10] + 8
    assert per_item[1000] < per_item[100] + 16
    assert per_item[1000] < 600


def test_full_slices_are_not_linear_and_that_is_why_they_are_not_the_default():
    assert metadata_nbytes(1000, full_slices=True) > 10 * metadata_nbytes(1000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 10, 100])
def test_a_shared_tensor_is_one_frame(kind, n):
    shared = tensor(kind, np.arange(1000, dtype=np.float32))
    request = request_of(arguments(n, tensors={"x": shared, "y": shared}))
    frames = fastmm.encode_request(request)
    assert len(frames) == 2
    assert frame_addresses(frames) == [address_of(shared)]
    features = fastmm.decode_request(received(frames), tensors="numpy").mm_features
    assert all(np.array_equal(feature.data[key].data, array_of(shared)) for feature in features for key in "xy")


def test_a_shared_tensor_is_cast_once():
    encoder = fastmm.Encoder(dtype="float16")
    shared = np.arange(1000, dtype=np.float32)
    expected = shared.astype(np.float16).tobytes()
    frames = encoder.encode(request_of(arguments(50, tensors={"x": shared})))
    assert encoder.counters["nbytes_cast"] == 4000
    assert received(frames)[1:] == [expected]


@pytest.mark.parametrize("kind", KINDS)
def test_one_tensor_under_two_keys_is_cast_once_and_right(kind):
    batch = tensor(kind, np.arange(4000, dtype=np.float32).reshape(4, 1000))
    expected = array_of(batch).astype(np.float16)
    encoder = fastmm.Encoder(dtype="float16")
    made = arguments(4, tensors={"x": batch, "y": batch}, batched={"x"}, flat={"y": [1, 1, 1, 1]})
    frames = encoder.encode(request_of(made))
    features = fastmm.decode_request(received(frames), tensors="numpy").mm_features
    assert np.array_equal(np.stack([feature.data["x"].data for feature in features]), expected)
    assert np.array_equal(np.concatenate([feature.data["y"].data for feature in features]), expected)
    assert encoder.counters["nbytes_cast"] == 16000
    assert len(frames) == 5

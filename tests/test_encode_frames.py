"""Same wire: which tensors are inline and which frames of their own, in which order, how many, and what the limits say."""

from __future__ import annotations

import array

import msgpack
import numpy as np
import pytest
from support.payloads import bits
from support.requests import request, resolve, same_bytes, sent, triple, unpacked

from fastmm import (
    EncodeError,
    Encoder,
    Frame,
    LimitError,
    MmBatchedField,
    MmFieldElem,
    PlaceholderRange,
    SamplingParams,
    SchemaError,
    WireTensor,
    encode_request,
)

torch = pytest.importorskip("torch")

PLAIN = Encoder(threshold=256)


# --- thresholds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0, 1, 16, 255, 256, 257, 2**62, 2**63 - 1])
@pytest.mark.parametrize("nbytes", [0, 1, 2, 15, 16, 17, 255, 256, 257])
@pytest.mark.parametrize("kind", ["torch", "numpy", "wire", "buffer"])
def test_a_tensor_is_inline_when_strictly_smaller_than_the_threshold(kind, nbytes, threshold):
    data = bytes(i % 251 for i in range(nbytes))
    value = {
        "torch": lambda: torch.tensor(list(data), dtype=torch.uint8),
        "numpy": lambda: np.frombuffer(data, np.uint8),
        "wire": lambda: WireTensor("uint8", (nbytes,), data),
        "buffer": lambda: array.array("B", data),
    }[kind]()
    frames = Encoder(threshold=threshold).encode([value, "after"])
    assert len(frames) == (1 if nbytes < threshold else 2)
    got, after = unpacked(frames)
    assert after == "after"
    assert resolve(got, frames) == ("uint8" if kind in ("torch", "wire") else "|u1", (nbytes,), data)


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 255, 256, 65535, 65536])
def test_the_header_of_inline_data_is_the_shortest(nbytes):
    frames = Encoder(threshold=2**62).encode(torch.zeros(nbytes, dtype=torch.uint8))
    assert bytes(frames[0]).endswith(msgpack.packb(msgpack.ExtType(3, bytes(nbytes))))


def test_the_threshold_is_vllms_variable_unless_it_is_given(monkeypatch):
    value = torch.zeros(100, dtype=torch.uint8)
    monkeypatch.delenv("VLLM_MSGPACK_ZERO_COPY_THRESHOLD", raising=False)
    assert Encoder().threshold == 256
    assert len(encode_request(value)) == 1
    monkeypatch.setenv("VLLM_MSGPACK_ZERO_COPY_THRESHOLD", "100")
    assert Encoder().threshold == 100
    assert len(encode_request(value)) == 2
    assert len(encode_request(value, threshold=101)) == 1
    monkeypatch.setenv("VLLM_MSGPACK_ZERO_COPY_THRESHOLD", "0")
    assert len(encode_request(torch.zeros(0))) == 2


@pytest.mark.parametrize("text", ["", "many", "-1", "1.5", "0x10", "\udcff", "1" * 40])
def test_a_threshold_variable_that_is_no_number_is_a_clear_error(monkeypatch, text):
    monkeypatch.setenv("VLLM_MSGPACK_ZERO_COPY_THRESHOLD", text)
    with pytest.raises(SchemaError, match="VLLM_MSGPACK_ZERO_COPY_THRESHOLD"):
        Encoder()
    with pytest.raises(SchemaError, match="VLLM_MSGPACK_ZERO_COPY_THRESHOLD"):
        encode_request([1])
    Encoder(threshold=5).encode([1])  # not asked where it is given


def test_zero_dimensions():
    """A 0-d torch tensor goes by its size, a 0-d numpy array is always inline; both keep shape and value."""
    for threshold in (0, 256):
        assert triple(torch.tensor(1.5, dtype=torch.bfloat16), threshold=threshold) == ("bfloat16", (), b"\xc0\x3f")
        assert triple(np.array(2.5), threshold=threshold) == ("<f8", (), np.float64(2.5).tobytes())
    assert len(Encoder(threshold=0).encode(torch.tensor(1.5))) == 2
    assert len(Encoder(threshold=0).encode(np.array(2.5))) == 1


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (0, 0, 7), (2, 0, 3)])
def test_empty_tensors_keep_their_shape_and_dtype(shape):
    for threshold, count in ((256, 1), (0, 2)):
        for value, name in ((torch.empty(shape, dtype=torch.int16), "int16"), (np.empty(shape, ">f4"), ">f4")):
            frames = Encoder(threshold=threshold).encode(value)
            assert len(frames) == count
            assert resolve(unpacked(frames), frames) == (name, shape, b"")
            assert threshold == 0 or bytes(frames[0]).endswith(b"\xc7\x00\x03")


def test_empty_tensors_share_no_frame():
    """They have no memory that could be the same."""
    frames = Encoder(threshold=0).encode([torch.empty(0), torch.empty(0, 3), np.empty(0)])
    assert [len(frame) for frame in frames[1:]] == [0, 0, 0]


# --- dedup ----------------------------------------------------------------------------------------------------------------


def test_the_same_memory_is_one_frame_whatever_its_shape():
    tensor = torch.arange(1000.0)
    leaves = [tensor, tensor, tensor.reshape(10, 100), tensor.view(5, 200), tensor.detach(), tensor.numpy()]
    frames = Encoder().encode(request(*leaves))
    assert len(frames) == 2
    for index, leaf in enumerate(leaves):
        assert sent(frames, index) == ("float32", tuple(leaf.shape), tensor.numpy().tobytes())
    assert len(Encoder(dedup=False).encode(request(*leaves))) == 1 + len(leaves)


def test_different_views_of_one_base_are_frames_of_their_own_bytes():
    base = torch.arange(4000.0).reshape(4, 1000)
    frames = Encoder().encode(request(*base, base, base[:, ::2], base[::2], base.t(), base[:2]))
    assert [len(frame) for frame in frames[1:]] == [4000] * 4 + [16000, 8000, 8000, 16000, 8000]
    for index, view in enumerate([*base, base, base[:, ::2], base[::2], base.t(), base[:2]]):
        assert sent(frames, index)[2] == bits(view)


def test_the_same_memory_under_another_dtype_may_share_a_frame_and_says_its_own_dtype():
    tensor = torch.arange(1000, dtype=torch.float32)
    views = [tensor, tensor.view(torch.int32), tensor.view(torch.uint8)]
    frames = Encoder().encode(views)
    assert [resolve(t, frames)[0] for t in unpacked(frames)] == ["float32", "int32", "uint8"]
    assert {resolve(t, frames)[2] for t in unpacked(frames)} == {tensor.numpy().tobytes()}


def test_the_same_strided_view_twice_is_copied_once():
    tensor = torch.arange(1000.0).reshape(10, 100).t()
    encoder = Encoder()
    frames = encoder.encode(request(tensor, tensor, tensor.t().t()))
    assert len(frames) == 2
    assert encoder.counters["nbytes_copied"] == 4000
    assert [sent(frames, i)[2] for i in range(3)] == [bits(tensor)] * 3


def test_strides_that_are_equal_numbers_of_unequal_units_are_two_layouts():
    """numpy counts bytes, DLPack counts elements."""
    base = np.arange(400, dtype=np.float32)
    views = [base[::2][:50], torch.from_numpy(base)[::8]]
    frames = Encoder(threshold=0).encode(views)
    assert [resolve(t, frames)[2] for t in unpacked(frames)] == [base[::2][:50].tobytes(), base[::8].tobytes()]
    made = request(base[::2][:50], torch.from_numpy(base)[::8])
    frames = Encoder(threshold=0, dtype="bfloat16").encode(made)
    assert [sent(frames, i)[2] for i in range(2)] == [
        bits(torch.as_tensor(base[::step][:50].copy()).to(torch.bfloat16)) for step in (2, 8)
    ]


def test_expanded_and_overlapping_views_are_written_out():
    one = torch.tensor([7], dtype=torch.int32)
    assert triple(one.expand(2**16)) == ("int32", (2**16,), one.numpy().tobytes() * 2**16)
    windows = torch.arange(100.0).unfold(0, 10, 1)
    assert triple(windows) == ("float32", (91, 10), bits(windows))
    diagonal = torch.arange(10_000.0).reshape(100, 100).diagonal()
    assert triple(diagonal) == ("float32", (100,), bits(diagonal))


def test_dedup_looks_at_tensors_of_one_message_only():
    tensor = torch.arange(1000.0)
    encoder = Encoder()
    first = encoder.encode(tensor)
    tensor += 1
    second = encoder.encode(tensor)
    assert len(first) == len(second) == 2
    assert first[1] is not second[1]


# --- order, counters, limits ----------------------------------------------------------------------------------------------


def test_aux_frames_come_in_the_order_of_the_walk():
    def of(number):
        return torch.full((100,), float(number))

    made = request([of(1), [of(2), of(3)], 5, 2.5, True], of(4), prompt_embeds=of(7))
    made.mm_features[1].mm_position = PlaceholderRange(0, 400, torch.ones(400, dtype=torch.bool))
    made.sampling_params = SamplingParams(prompt_logprob_token_ids=np.full((10, 10), 6, np.int64))
    frames = Encoder().encode(made)
    firsts = [np.frombuffer(frame, "f4" if len(frame) == 400 and i != 5 else "u1")[0] for i, frame in enumerate(frames) if i]
    assert firsts == [1, 2, 3, 4, 1, 6, 7]
    data = unpacked(frames)[2][0]["data"]["pixel_values"]["data"]
    assert [data[0][2], data[1][0][2], data[1][1][2]] == [1, 2, 3]
    assert data[2:] == [5, 2.5, True]


def test_nested_lists_tuples_and_sizes_are_lists():
    tensor = torch.ones(2, 3)
    tree = unpacked(
        PLAIN.encode(request([tensor, (tensor, 3, 2.5), tensor.shape, np.float64(1.5), np.int64(3), np.bool_(True)]))
    )
    data = tree[2][0]["data"]["pixel_values"]["data"]
    assert data[1][1:] == [3, 2.5]
    assert data[2:] == [[2, 3], 1.5, 3, True]
    assert [type(item) for item in data[3:]] == [float, int, bool]


def test_element_data_of_none_is_nil():
    assert unpacked(PLAIN.encode(request(None)))[2][0]["data"]["pixel_values"]["data"] is None


def test_counters_tell_what_was_viewed_and_copied():
    encoder = Encoder(threshold=256)
    dense, strided, small = torch.ones(1000), torch.ones(100, 100).t(), torch.ones(10)
    encoder.encode(request(dense, dense, strided, small))
    counters = encoder.counters
    assert (counters["messages"], counters["frames"]) == (1, 2)
    assert (counters["nbytes_viewed"], counters["nbytes_copied"], counters["nbytes_cast"]) == (4000, 40_040, 0)
    with pytest.raises(SchemaError):
        encoder.encode(request(dense, object()))
    assert encoder.counters == counters  # a message that failed was none
    encoder.encode_into([dense], bytearray())
    assert encoder.counters["messages"] == 2


def test_counters_tell_of_the_pool():
    encoder = Encoder()
    strided = torch.ones(100, 100).t()
    encoder.encode(strided)
    hits = encoder.counters["pool_hits"]
    encoder.encode(strided)
    assert encoder.counters["pool_hits"] > hits


def test_max_frames_counts_frames_not_tensors():
    tensors = [torch.full((100,), float(i)) for i in range(3)]
    assert len(Encoder(max_frames=3).encode(tensors)) == 4
    with pytest.raises(LimitError, match="at most 2 aux frames") as info:
        Encoder(max_frames=2).encode(tensors)
    assert info.value.path == "$[2]"
    assert len(Encoder(max_frames=0).encode([torch.ones(2), 1])) == 1
    with pytest.raises(LimitError):
        Encoder(max_frames=0).encode(tensors)
    same = [tensors[0]] * 5
    assert len(Encoder(max_frames=1).encode(same)) == 2
    with pytest.raises(LimitError):
        Encoder(max_frames=1, dedup=False).encode(same)


def test_max_payload_is_in_bytes_and_names_both_numbers():
    tensors = [torch.ones(100), torch.ones(50), np.ones(25)]
    Encoder(max_payload_nbytes=800).encode(tensors)
    with pytest.raises(LimitError, match="at most 799 bytes") as info:
        Encoder(max_payload_nbytes=799).encode(tensors)
    assert info.value.path == "$[2]"
    assert "600" in str(info.value)
    assert "200" in str(info.value)
    with pytest.raises(LimitError):
        Encoder(max_payload_nbytes=0).encode([torch.ones(1)])
    Encoder(max_payload_nbytes=0).encode([torch.ones(0)])


def test_max_payload_counts_bytes_after_the_cast():
    made = request(torch.ones(1000))
    Encoder(max_payload_nbytes=2000, dtype="bfloat16").encode(made)
    with pytest.raises(LimitError):
        Encoder(max_payload_nbytes=3999, dtype="float32").encode(request(torch.ones(1000, dtype=torch.float16)))


def test_sizes_are_checked_before_anything_is_copied():
    """An expanded tensor of 8 GiB: inline it is refused at once; nothing of the size is allocated."""
    huge = torch.zeros(1, dtype=torch.uint8).expand(2**33)
    with pytest.raises(EncodeError, match="4 GiB inline") as info:
        Encoder(threshold=2**62).encode({"a": huge})
    assert info.value.path == "$['a']"
    with pytest.raises(LimitError):
        Encoder(max_payload_nbytes=2**32).encode(huge)
    exactly = torch.zeros(1, dtype=torch.uint8).expand(2**32)
    with pytest.raises(EncodeError, match="4 GiB inline"):
        Encoder(threshold=2**62).encode(exactly)


def test_more_than_4_gib_travel_in_a_frame(tmp_path):
    """A sparse file of 2**32 + 1 bytes, mapped: the frame views it, nothing is read."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(2**32 + 1)
    mapped = np.memmap(path, np.uint8, mode="r")
    frames = PLAIN.encode(request(mapped, torch.from_numpy(np.memmap(path, np.uint8, mode="r+"))))
    assert [frame.nbytes for frame in frames[1:]] == [2**32 + 1] * 2
    assert frames[1].address == mapped.ctypes.data
    assert unpacked(frames)[2][0]["data"]["pixel_values"]["data"] == ["uint8", [2**32 + 1], 1]


@pytest.mark.parametrize("ndim", [1, 8, 15, 16, 17, 32, 64])
def test_many_dimensions(ndim):
    shape = (1,) * (ndim - 1) + (100,)
    assert triple(torch.arange(100.0).reshape(shape))[1] == shape
    assert triple(np.arange(100.0).reshape(shape))[1] == shape


def test_more_dimensions_than_there_may_be_are_refused():
    with pytest.raises(SchemaError, match="dimensions"):
        PLAIN.encode(torch.ones((1,) * 65))


# --- the main frame -------------------------------------------------------------------------------------------------------


def test_a_large_main_frame_is_a_view_of_its_buffer():
    encoder = Encoder(threshold=2**62)
    small, large = encoder.encode(torch.ones(10)), encoder.encode(torch.arange(300_000.0))
    assert type(small[0]) is bytes
    assert type(large[0]) is Frame
    kept = bytes(large[0])
    for _ in range(20):  # the buffer of a frame that is still held is nobody else's
        encoder.encode(torch.zeros(300_000))
    assert bytes(large[0]) == kept
    assert resolve(unpacked(large), large)[2] == torch.arange(300_000.0).numpy().tobytes()


@pytest.mark.parametrize("size", [100, 2_000, 20_000, 32_760, 32_768, 40_000, 500_000, 3_000_000])
def test_main_frames_of_any_size_one_after_the_other(size):
    encoder = Encoder()
    for count in (size, 10, size // 2, size, 1):
        text = "x" * count
        (main,) = encoder.encode([text, count])
        assert msgpack.unpackb(memoryview(main)) == [text, count]


def test_keep_the_frames_of_many_messages_at_once():
    encoder = Encoder(threshold=2**62)
    kept = [encoder.encode(torch.full((20_000,), float(i))) for i in range(40)]
    for i, frames in enumerate(kept):
        assert resolve(unpacked(frames), frames)[2] == np.full(20_000, i, "f4").tobytes()


def test_a_field_element_outside_a_feature_is_written_too():
    assert same_bytes(PLAIN.encode(MmFieldElem(data=torch.ones(3), field=MmBatchedField())))

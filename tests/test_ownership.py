"""Ownership is plain: what a cast in place changes, what it never touches, and what the tree holds afterwards."""

from __future__ import annotations

import copy
import mmap

import numpy as np
import pytest
from support.memory import in_fresh_process
from support.payloads import TORCH, assert_untouched, bits, through_float32, values
from support.requests import leaf, request, resolve, same_bytes, sent, unpacked

from fastmm import (
    Encoder,
    PlaceholderRange,
    SamplingParams,
    SchemaError,
    WireTensor,
    decode_request,
    encode_request,
)

torch = pytest.importorskip("torch")

TARGETS = ["bfloat16", "float16", "float32"]

# --- a coherent tree ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_a_torch_leaf_becomes_a_torch_leaf_of_the_new_dtype_over_the_same_memory(target):
    tensor = values().reshape(10, 100)
    expected, address = tensor.to(TORCH[target]), tensor.data_ptr()
    made = request(tensor)
    frames = encode_request(made, dtype=target)
    now = leaf(made)
    assert type(now) is torch.Tensor
    assert (now.dtype, now.shape, now.data_ptr()) == (TORCH[target], (10, 100), address)
    assert now.is_contiguous()
    assert bits(now) == bits(expected)
    assert sent(frames) == (target, (10, 100), bits(expected))


def test_a_numpy_leaf_becomes_a_numpy_leaf():
    array = values().numpy().reshape(10, 100)
    with np.errstate(over="ignore"):
        expected, address = array.astype(np.float16), array.ctypes.data
    made = request(array)
    encode_request(made, dtype=np.float16)
    now = leaf(made)
    assert type(now) is np.ndarray
    assert (now.dtype, now.shape, now.ctypes.data, now.flags.writeable) == (np.float16, (10, 100), address, True)
    assert now.tobytes() == expected.tobytes()


def test_a_numpy_leaf_cast_to_bfloat16_is_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(1000.0, dtype=np.float32)
    expected = array.astype(ml_dtypes.bfloat16)
    made = request(array)
    encode_request(made, dtype=ml_dtypes.bfloat16)
    assert leaf(made).dtype == ml_dtypes.bfloat16
    assert leaf(made).tobytes() == expected.tobytes()
    assert leaf(made).ctypes.data == array.ctypes.data


def test_a_numpy_leaf_cast_to_bfloat16_without_ml_dtypes_is_a_wire_tensor():
    in_fresh_process("""
import sys
sys.modules["ml_dtypes"] = None
import numpy, fastmm
from support.payloads import TORCH, assert_untouched, bits, through_float32, values
from support.requests import request, leaf, same_bytes
array = numpy.arange(1000, dtype=numpy.float32).reshape(10, 100)
made = request(array)
frames = fastmm.encode_request(made, dtype="bfloat16")
now = leaf(made)
assert type(now) is fastmm.WireTensor, type(now)
assert (now.dtype, tuple(now.shape)) == ("bfloat16", (10, 100))
assert memoryview(now.data).nbytes == 2000
assert numpy.frombuffer(now.data, numpy.uint16)[3] == 0x4040
assert same_bytes(fastmm.encode_request(made, dtype="bfloat16")) == same_bytes(frames)
""")


def test_a_wire_tensor_leaf_stays_one():
    data = bytearray(values().numpy().tobytes())
    made = request(WireTensor("float32", (10, 100), data))
    frames = encode_request(made, dtype="bfloat16")
    now = leaf(made)
    assert (type(now), now.dtype, tuple(now.shape)) == (WireTensor, "bfloat16", (10, 100))
    assert bytes(now.data) == bits(values().to(torch.bfloat16)) == bytes(frames[1])
    readonly = WireTensor("float32", (1000,), values().numpy().tobytes())
    made = request(readonly)
    encode_request(made, dtype="bfloat16")
    assert leaf(made) is readonly


@pytest.mark.parametrize("source", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("threshold", [0, 2**62])
def test_every_floating_payload_ends_in_the_target(source, target, threshold):
    plain = values().to(TORCH[source]).reshape(20, 50)
    expected = bits(plain if source == target else through_float32(plain, target))
    for inplace in (True, False):
        made = request(plain.clone(), prompt_embeds=plain.clone())
        frames = encode_request(made, dtype=target, inplace=inplace, threshold=threshold)
        assert sent(frames) == (target, (20, 50), expected)
        assert resolve(unpacked(frames)[9], frames) == (target, (20, 50), expected)


@pytest.mark.parametrize("target", TARGETS)
def test_numpy_payloads_of_either_byte_order(target):
    plain = values().numpy()
    for dtype in ("<f4", ">f4", "<f8", ">f8", "<f2", ">f2"):
        with np.errstate(over="ignore"):
            array = plain.astype(dtype)
            expected = bits(through_float32(torch.from_numpy(array.astype(array.dtype.newbyteorder("="))), target))
            if np.dtype(dtype).itemsize == 2 and target == "float16":
                expected = bits(torch.from_numpy(array.astype("=f2")))
        for inplace in (True, False):
            frames = encode_request(request(array.copy()), dtype=target, inplace=inplace)
            assert sent(frames) == (target, (1000,), expected), dtype


@pytest.mark.parametrize("number", [65504.0, 65519.0, 65520.0, 65536.0])
def test_overflow_to_infinity_is_where_it_should_be(number):
    frames = encode_request(request(torch.full((1000,), number)), dtype="float16")
    assert np.frombuffer(sent(frames)[2], np.float16)[0] == (65504 if number < 65520 else np.inf)


@pytest.mark.parametrize("inplace", [True, False])
def test_encoding_twice_gives_equal_bytes(inplace):
    for make in (
        lambda: request(values(), values(seed=1).reshape(4, 250), prompt_embeds=values(seed=2)),
        lambda: request(values().numpy(), [values(seed=1), (values(seed=2),)]),
        lambda: request(values()[:10], values().reshape(20, 50).t(), values().double()),
    ):
        made = make()
        encoder = Encoder(dtype="bfloat16", inplace=inplace)
        first = same_bytes(encoder.encode(made))
        assert same_bytes(encoder.encode(made)) == first
        assert same_bytes(encode_request(made, dtype=torch.bfloat16)) == first
    made = request(values(), prompt_embeds=values(seed=1))
    first = same_bytes(encode_request(made, dtype="bfloat16"))
    assert same_bytes(encode_request(made)) == first  # the tree says itself what it now is


@pytest.mark.parametrize("spelling", ["bfloat16", torch.bfloat16, "float16", torch.float16, np.float16, np.dtype("f2")])
def test_the_dtype_may_be_given_in_any_spelling(spelling):
    frames = encode_request(request(torch.ones(1000)), dtype=spelling)
    assert sent(frames)[0] == ("bfloat16" if "bfloat" in str(spelling) else "float16")


@pytest.mark.parametrize(
    "wrong", ["float64", "int8", "half", "nonsense", torch.int32, 5, object(), "", [], ">f2", "float8_e5m2"]
)
def test_another_dtype_is_refused_before_anything_is_looked_at(wrong):
    for make in (lambda: Encoder(dtype=wrong), lambda: encode_request(request(torch.ones(1000)), dtype=wrong)):
        with pytest.raises(SchemaError, match="dtype"):
            make()


def test_only_payloads_are_cast():
    """Integers, bools, complex numbers and what is no payload (masks, parameters' arrays) travel as they are."""
    made = request(
        torch.arange(1000),
        torch.ones(1000, dtype=torch.bool),
        torch.ones(100, dtype=torch.complex64),
        prompt_embeds=torch.ones(100),
    )
    made.mm_features[0].mm_position = PlaceholderRange(0, 300, torch.ones(300))
    made.sampling_params = SamplingParams(extra_args={"a": torch.ones(300)}, prompt_logprob_token_ids=np.ones((20, 20)))
    frames = encode_request(made, dtype="bfloat16")
    assert [sent(frames, i)[0] for i in range(3)] == ["int64", "bool", "complex64"]
    tree = unpacked(frames)
    assert tree[2][0]["mm_position"]["is_embed"][0] == "float32"
    assert tree[3]["extra_args"]["a"][0] == "float32"
    assert tree[3]["prompt_logprob_token_ids"][0] == "<f8"
    assert tree[9][0] == "bfloat16"
    assert made.sampling_params.extra_args["a"].dtype == torch.float32


def test_a_tensor_outside_a_request_is_no_payload():
    tensor = torch.ones(1000)
    encode_request([tensor, {"a": tensor}], dtype="bfloat16")
    assert_untouched(tensor, torch.ones(1000))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_a_payload_of_eight_bits_is_an_error_with_its_path(name):
    tensor = torch.ones(1000)
    made = request(tensor, torch.ones(1000).to(getattr(torch, name)))
    with pytest.raises(SchemaError, match=name) as info:
        encode_request(made, dtype="bfloat16")
    assert info.value.path == "$.mm_features[1].data['pixel_values'].data"
    assert leaf(made) is tensor
    assert_untouched(tensor, torch.ones(1000))
    assert sent(encode_request(made), 1)[0] == name  # as it is, it may travel


@pytest.mark.parametrize("wrap", [torch.nn.Parameter, lambda t: t.requires_grad_(), lambda t: t.requires_grad_() * 1])
def test_a_payload_with_a_gradient_is_cast_like_any_other(wrap):
    tensor = wrap(values())
    made = request(tensor)
    frames = encode_request(made, dtype="bfloat16")
    assert sent(frames)[2] == bits(values().to(torch.bfloat16)) == bits(leaf(made))
    assert leaf(made).dtype == torch.bfloat16


def test_empty_and_tiny_payloads():
    for threshold in (0, 256):
        made = request(torch.empty(0, 5), torch.tensor(1.5), torch.ones(1), np.empty((3, 0), np.float32), np.array(2.5))
        frames = encode_request(made, dtype="bfloat16", threshold=threshold)
        assert [sent(frames, i)[:2] for i in range(5)] == [
            *(("bfloat16", (0, 5)), ("bfloat16", ()), ("bfloat16", (1,)), ("bfloat16", (3, 0)), ("bfloat16", ()))
        ]
        assert [sent(frames, i)[2] for i in (1, 2, 4)] == [b"\xc0\x3f", b"\x80\x3f", b"\x20\x40"]
        again = encode_request(made, dtype="bfloat16", threshold=threshold)
        assert same_bytes(again) == same_bytes(frames)


# --- never written to -----------------------------------------------------------------------------------------------------


def readonly_array():
    array = values().numpy().copy()
    array.flags.writeable = False
    return array


def test_inplace_false_never_writes_and_leaves_the_tree_alone():
    leaves = [values(), values().numpy(), values().reshape(20, 50).t(), [values()], values().to(torch.float64)]
    before = [copy.deepcopy(x) for x in leaves]
    made = request(*leaves, prompt_embeds=values())
    encode_request(made, dtype="bfloat16", inplace=False)
    for index, (now, was) in enumerate(zip(leaves, before, strict=True)):
        assert leaf(made, index) is now
        now, was = (now[0], was[0]) if isinstance(now, list) else (now, was)
        assert_untouched(torch.as_tensor(now), torch.as_tensor(was))
    assert made.prompt_embeds.dtype == torch.float32


def test_a_readonly_array_is_never_written_to():
    array = readonly_array()
    made = request(array)
    frames = encode_request(made, dtype="bfloat16")
    assert leaf(made) is array
    assert array.tobytes() == values().numpy().tobytes()
    assert sent(frames)[2] == bits(values().to(torch.bfloat16))
    view = values().numpy()
    locked = view[:]
    locked.flags.writeable = False
    encode_request(request(locked), dtype="bfloat16")
    assert view.tobytes() == values().numpy().tobytes()
    from_bytes = np.frombuffer(values().numpy().tobytes(), np.float32)
    encode_request(request(from_bytes), dtype="bfloat16")
    assert from_bytes.tobytes() == values().numpy().tobytes()


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("wrap", ["memmap", "ndarray", "torch", "part"])
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_memory_mapped_file_is_never_written_to(tmp_path, mode, wrap):
    path = tmp_path / "pixels"
    content = values(100_000).numpy().tobytes()
    path.write_bytes(content)
    mapped = np.memmap(path, np.float32, mode=mode, shape=(100, 1000))
    value = {
        "memmap": lambda: mapped,
        "ndarray": lambda: np.asarray(mapped),
        "torch": lambda: torch.from_numpy(mapped),
        "part": lambda: torch.from_numpy(np.asarray(mapped)[10:50]),
    }[wrap]()
    expected = bits(torch.as_tensor(np.array(value)).to(torch.bfloat16))
    made = request(value)
    frames = encode_request(made, dtype="bfloat16")
    assert leaf(made) is value
    assert sent(frames)[2] == expected
    assert bytes(np.asarray(mapped)) == content
    if mode != "c":
        mapped.flush()
    assert path.read_bytes() == content


@pytest.mark.parametrize("shared", [True, False])
def test_a_tensor_over_a_file_is_never_written_to(tmp_path, shared):
    path = tmp_path / "pixels"
    content = values(100_000).numpy().tobytes()
    path.write_bytes(content)
    tensor = torch.from_file(str(path), shared=shared, size=100_000)
    made = request(tensor)
    frames = encode_request(made, dtype="bfloat16")
    assert leaf(made) is tensor
    assert bits(tensor) == content == path.read_bytes()
    assert sent(frames)[2] == bits(values(100_000).to(torch.bfloat16))


def test_memory_shared_with_another_process_is_never_written_to():
    tensor = values(100_000).clone()
    try:
        tensor.share_memory_()
    except RuntimeError as error:
        pytest.skip(f"no shared memory here: {error}")
    made = request(tensor)
    encode_request(made, dtype="bfloat16")
    assert leaf(made) is tensor
    assert_untouched(tensor, values(100_000))
    anonymous = mmap.mmap(-1, 400_000)
    anonymous[:] = values(100_000).numpy().tobytes()
    for value in (np.frombuffer(anonymous, np.float32), torch.frombuffer(anonymous, dtype=torch.float32), anonymous):
        encode_request(request(value), dtype="bfloat16")
        assert anonymous[:] == values(100_000).numpy().tobytes()


STRIDED = {
    "expanded": lambda base: base[:1].expand(1000),
    "expanded row": lambda base: base.reshape(20, 50)[:1].expand(20, 50),
    "overlapping windows": lambda base: base.unfold(0, 100, 50),
    "transposed": lambda base: base.reshape(20, 50).t(),
    "every second": lambda base: base[::2],
    "columns": lambda base: base.reshape(20, 50)[:, 10:20],
    "permuted": lambda base: base.reshape(5, 10, 20).permute(2, 0, 1),
    "as_strided": lambda base: base.as_strided((30, 30), (1, 1)),
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("threshold", [0, 2**62])
def test_a_tensor_that_is_not_dense_is_never_written_to(name, threshold):
    base = values()
    view = STRIDED[name](base)
    expected = bits(view.clone(memory_format=torch.contiguous_format).to(torch.bfloat16))
    made = request(view)
    frames = encode_request(made, dtype="bfloat16", threshold=threshold)
    assert leaf(made) is view
    assert sent(frames) == ("bfloat16", tuple(view.shape), expected)
    assert_untouched(base, values())


@pytest.mark.parametrize("slices", [np.s_[::-1], np.s_[::-2], np.s_[500::-1]])
def test_negative_strides(slices):
    array = values().numpy()
    view = array[slices]
    expected = bits(torch.from_numpy(view.copy()).to(torch.bfloat16))
    made = request(view, array[::-1].reshape(20, 50)[:, ::-1])
    frames = encode_request(made, dtype="bfloat16")
    assert sent(frames)[2] == expected
    assert leaf(made) is view
    assert array.tobytes() == values().numpy().tobytes()


@pytest.mark.parametrize("tensors", ["torch", "numpy", "wire"])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_what_was_decoded_over_received_frames_is_cast_in_place_only_where_they_may_be_written_to(kind, tensors):
    """A relay decodes, casts and sends on. Over `bytes` its leaves view memory that nobody may write to."""
    frames = [kind(memoryview(frame)) for frame in encode_request(request(values(), values(seed=1)), threshold=0)]
    kept = [bytes(memoryview(frame)) for frame in frames]
    for dtype in ("float16", "bfloat16"):
        relayed = decode_request(frames, tensors=tensors)
        again = encode_request(relayed, dtype=dtype)
        assert sent(again)[2] == bits(values().to(TORCH[dtype]))
        if kind is bytes:
            assert [bytes(memoryview(frame)) for frame in frames] == kept
        else:
            break
    batch = decode_request([bytes(bytearray(frame)) for frame in kept], tensors=tensors)
    part = leaf(batch)
    if tensors != "wire":
        before = np.asarray(part).tobytes()
        encode_request(request(part[100:200], part[300:]), dtype="bfloat16")
        assert np.asarray(part).tobytes() == before


def test_what_came_through_a_socket_in_this_process_is_still_the_senders():
    zmq = pytest.importorskip("zmq")
    tensor = values(100_000)
    with zmq.Context() as context:
        sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        receiver.bind("inproc://relay")
        sender.connect("inproc://relay")
        sender.send_multipart(encode_request(request(tensor)), copy=False)
        relayed = decode_request(receiver.recv_multipart(copy=False))
        encode_request(relayed, dtype="bfloat16")
        assert_untouched(tensor, values(100_000))
        sender.close(0)
        receiver.close(0)

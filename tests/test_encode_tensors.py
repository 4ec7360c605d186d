"""Same wire: tensors and arrays of every kind, inline and as frames, with the right names, shapes and bytes."""

from __future__ import annotations

import array
import ctypes
import math
import mmap

import numpy as np
import pytest
from support.payloads import bits
from support.requests import request, resolve, sent, triple, unpacked

from fastmm import (
    Encoder,
    Frame,
    PlaceholderRange,
    SamplingParams,
    SchemaError,
    WireTensor,
)

torch = pytest.importorskip("torch")

PLAIN = Encoder(threshold=256)


# --- names and layouts ----------------------------------------------------------------------------------------------------

TORCH_NAMES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
]
TORCH_NAMES += ["float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
TORCH_NAMES += ["complex32", "float8_e8m0fnu"]


def pattern(name, shape):
    dtype = getattr(torch, name)
    nbytes = math.prod(shape) * dtype.itemsize
    data = torch.arange(nbytes).to(torch.uint8)
    if name == "bool":
        data = data % 2
    return data.view(dtype).reshape(shape)


def layouts(base):
    """Views of one kind each, of a tensor or an array of shape (6, 8)."""
    yield "whole", base
    yield "rows", base[2:5]
    yield "row", base[3]
    yield "columns", base[:, 2:5]
    yield "column", base[:, 3]
    yield "steps", base[::2, ::3]
    yield "transposed", base.T
    yield "split", base.reshape(2, 3, 4, 2)
    yield "item", base[2, 3]
    yield "thin", base[:, ::2][:, :1]
    yield "flat", base.reshape(-1)[5:17]
    yield "one row", base[1:2, ::3]


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_a_torch_tensor_of_every_dtype_and_layout(name):
    for what, view in layouts(pattern(name, (6, 8))):
        if view.dim() and view.is_contiguous() and view.stride(-1) != 1:
            expected = bits(view.clone(memory_format=torch.contiguous_format).reshape(-1))
        else:
            expected = bits(view)
        for threshold in (0, 256, 2**62):
            assert triple(view, threshold=threshold) == (name, tuple(view.shape), expected), what


NUMPY_NAMES = ["|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8", "<c8", "<c16", ">u2", ">i4"]
NUMPY_NAMES += [">f2", ">f4", ">f8", ">c8", ">c16", ">i8", "<U2", ">U3", "|S3", "|S1", "<U1"]


@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_a_numpy_array_of_every_dtype_and_layout_with_its_bytes_unswapped(name):
    dtype = np.dtype(name)
    raw = np.arange(48 * dtype.itemsize, dtype=np.int64) % (2 if dtype.kind == "b" else 90)
    if dtype.kind == "U":
        base = np.array([chr(65 + i) for i in range(48)], dtype=dtype).reshape(6, 8)
    else:
        base = raw.astype(np.uint8).view(dtype).reshape(6, 8)
    for what, view in [
        *layouts(base),
        ("reversed", base[::-1]),
        ("mirrored", base[:, ::-1]),
        ("fortran", np.asfortranarray(base)),
    ]:
        if not isinstance(view, np.ndarray):  # an item is a scalar; the array of it is 0-d
            view = base[2:3, 3].reshape(())
        for threshold in (0, 256, 2**62):
            assert triple(view, threshold=threshold) == (dtype.str, view.shape, view.tobytes()), what


def test_native_and_unusual_numpy_dtypes():
    for dtype in ("=f4", "long", "ulong", "longlong", "intc", "uintp", "byte", "?", "half"):
        value = np.zeros(3, dtype)
        assert triple(value)[0] == value.dtype.str
    long_double = np.arange(3, dtype=np.longdouble)
    assert triple(long_double) == (long_double.dtype.str, (3,), long_double.tobytes())
    for kind in (np.matrix([[1, 2]]), np.ones(3).view(np.recarray)):
        assert triple(kind)[1:] == (kind.shape, kind.tobytes())


def test_ml_dtypes_arrays_are_named_as_torch_names_them():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"):
        value = np.arange(4).astype(getattr(ml_dtypes, name))
        assert triple(value) == (name, (4,), value.tobytes())


def test_where_the_engine_holds_a_torch_tensor_a_numpy_array_is_named_as_torch_names_it():
    for value, name in ((np.ones((2, 100), np.float32), "float32"), (np.ones(3, bool), "bool"), (np.array(2.5), "float64")):
        assert sent(PLAIN.encode(request(value)))[:2] == (name, value.shape)
    mask = np.array([True, False])
    made = request(torch.ones(3), prompt_embeds=np.ones((3, 3), np.float16))
    made.mm_features[0].mm_position = PlaceholderRange(offset=0, length=2, is_embed=mask)
    tree = unpacked(PLAIN.encode(made))
    assert tree[9][0] == "float16"
    assert tree[2][0]["mm_position"]["is_embed"][0] == "bool"
    params = SamplingParams(prompt_logprob_token_ids=np.ones((2, 3), np.int64))
    assert unpacked(PLAIN.encode(params))["prompt_logprob_token_ids"][0] == "<i8"  # there the engine holds numpy


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.zeros(2, dtype="i4,f4"),
        np.zeros(2, dtype="V4"),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.array([5], dtype="m8[s]"),
        np.array(object()),
        np.array([[]], dtype=object),
    ],
    ids=lambda v: str(v.dtype),
)
def test_arrays_that_have_no_form_on_the_wire_are_refused_by_dtype_and_path(value):
    for tree, path in (({"a": [value]}, "$['a'][0]"), (request(value), "$.mm_features[0].data['pixel_values'].data")):
        with pytest.raises(SchemaError, match="dtype") as info:
            PLAIN.encode(tree)
        assert info.value.path == path
        assert str(value.dtype) in str(info.value)


# --- other producers ------------------------------------------------------------------------------------------------------


class ByDLPack:
    def __init__(self, tensor, versioned=True):
        self.tensor, self.versioned = tensor, versioned

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        if not self.versioned and options:
            raise TypeError("no such option")
        return self.tensor.__dlpack__(**options)


@pytest.mark.parametrize("versioned", [True, False])
def test_anything_with_dlpack_is_a_tensor(versioned):
    for tensor in (
        torch.arange(600).reshape(20, 30),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.ones(3, dtype=torch.bfloat16),
    ):
        name = str(tensor.dtype).removeprefix("torch.")
        assert triple(ByDLPack(tensor, versioned)) == (name, tuple(tensor.shape), bits(tensor))


@pytest.mark.parametrize("answer", [5, None, "capsule", torch.ones(3).__dlpack__()], ids=["int", "none", "str", "used"])
def test_a_producer_that_hands_out_no_capsule_is_refused(answer):
    class Bad:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            return answer

    if not isinstance(answer, (int, str, type(None))):
        torch.utils.dlpack.from_dlpack(answer)
    with pytest.raises(SchemaError) as info:
        PLAIN.encode([Bad()])
    assert info.value.path == "$[0]"


def test_a_producer_that_raises_is_refused():
    class Bad:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            raise BufferError("not today")

    with pytest.raises(SchemaError, match="not today"):
        PLAIN.encode([Bad()])


def test_any_buffer_is_an_array():
    with mmap.mmap(-1, 4096) as anonymous:
        anonymous[:3] = b"abc"
        frames = PLAIN.encode(anonymous)
        assert resolve(unpacked(frames), frames) == ("|u1", (4096,), b"abc" + bytes(4093))
        with pytest.raises(BufferError):
            anonymous.close()  # the frame holds it
        del frames
    assert triple(array.array("d", [1.5, 2.5])) == ("<f8", (2,), np.array([1.5, 2.5]).tobytes())
    assert triple((ctypes.c_float * 3)(1, 2, 3)) == ("<f4", (3,), np.array([1, 2, 3], "f4").tobytes())
    assert triple(((ctypes.c_short * 3) * 2)()) == ("<i2", (2, 3), bytes(12))


def test_a_wire_tensor_says_itself_what_it_is():
    assert triple(WireTensor("bfloat16", (2, 3), bytes(range(12)))) == ("bfloat16", (2, 3), bytes(range(12)))
    assert triple(WireTensor(">f4", (3,), bytes(12))) == (">f4", (3,), bytes(12))
    frames = PLAIN.encode(WireTensor("uint8", (300,), memoryview(bytearray(300))))
    assert type(frames[1]) is Frame


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"dtype": 5},
            {"dtype": "nonsense"},
            {"dtype": "\ud800"},
            {"dtype": "O"},
            {"data": None},
            {"data": 5},
            {"data": bytes(7)},
        ),
        *({"data": memoryview(bytes(16))[::2]}, {"shape": 5}, {"shape": (-1,)}, {"shape": (3,)}, {"shape": (True, 2)}),
        *(
            {"shape": (2.0,)},
            {"shape": (2**62, 2**62)},
            {"shape": ("2",)},
            {"shape": None},
            {"shape": (1,) * 100},
            {"dtype": "<U0"},
        ),
    ],
    ids=str,
)
def test_a_wire_tensor_that_was_changed_for_the_worse_is_refused(change):
    tensor = WireTensor("float32", (2,), bytes(8))
    for name, value in change.items():
        object.__setattr__(tensor, name, value)
    with pytest.raises(SchemaError) as info:
        PLAIN.encode({"a": tensor})
    assert info.value.path == "$['a']"


# --- what torch can be ----------------------------------------------------------------------------------------------------


def test_gradients_parameters_and_subclasses_are_tensors():
    class Child(torch.Tensor):
        pass

    plain = torch.arange(100.0)
    for value in (
        *(
            torch.nn.Parameter(plain),
            plain.clone().requires_grad_(),
            plain.clone().requires_grad_() * 1,
            plain.as_subclass(Child),
        ),
        *(torch.nn.Buffer(plain), torch.inference_mode()(lambda: plain * 1)()),
    ):
        assert triple(value) == ("float32", (100,), plain.numpy().tobytes())


def refused_tensors():
    quantized = torch.quantize_per_tensor(torch.ones(100), 0.1, 0, torch.qint8)
    complex_ones = torch.full((100,), 1 + 2j)
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    return {
        "quantized": quantized,
        "quantized quint8": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "nested jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "sparse": torch.ones(3).to_sparse(),
        "sparse_csr": torch.ones(3, 3).to_sparse_csr(),
        "meta": torch.empty(300, device="meta"),
        "conjugated": complex_ones.conj(),
        "negative imaginary part": complex_ones.conj().imag,
        "negative": torch._neg_view(torch.ones(500)),
        "zero tensor without memory": torch._efficientzerotensor((1000,)),
        "storage that was freed": freed,
    }


REFUSED = [
    *("quantized", "quantized quint8", "nested", "nested jagged", "sparse", "sparse_csr", "meta", "conjugated"),
    *("negative imaginary part", "negative", "zero tensor without memory", "storage that was freed"),
]


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("options", [{}, {"threshold": 2**62}, {"dtype": "bfloat16"}, {"threshold": 0}], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_tensors_whose_memory_does_not_hold_their_values_are_refused(what, options):
    value = refused_tensors()[what]
    with pytest.raises(SchemaError) as info:
        Encoder(**options).encode(request(torch.ones(5), value))
    assert info.value.path == "$.mm_features[1].data['pixel_values'].data"
    assert len(str(info.value)) < 400


def test_complex_tensors_without_the_lazy_bits_are_written():
    value = torch.full((100,), 1 + 2j)
    assert triple(value)[2] == bits(value)
    assert triple(value.conj().resolve_conj())[2] == bits(value.conj().resolve_conj())
    assert triple(value.real)[2] == bits(value.real.clone())
    assert triple(value.imag)[2] == bits(value.imag.clone())

"""The schema classes: defaults, equality, and the tensor that needs no framework."""

import dataclasses
import math
import sys
import time
import typing
import warnings

import numpy as np
import pytest
from support.compare import assert_same
from support.families import NUMPY_DTYPES, TORCH_DTYPES, numpy_array, numpy_bytes, pattern, torch_tensor
from support.golden_cases import CASES

from fastmm import dtypes, schema
from fastmm.errors import CompatError, FastmmError, SchemaError, SchemaValueError

try:
    import torch
except ImportError:
    torch = None
try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")
RECORDS = [cls for cls in map(schema.__dict__.get, schema.__all__) if dataclasses.is_dataclass(cls)]


# --- the classes


def test_a_request_needs_an_id_and_token_ids_only():
    before = time.time()
    request = schema.EngineCoreRequest("r", [1, 2])
    assert before <= request.arrival_time <= time.time()
    others = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)[2:] if f.name != "arrival_time"}
    assert {name: value for name, value in others.items() if value is not None} == {
        "client_index": 0,
        "current_wave": 0,
        "priority": 0,
        "resumable": False,
        "abort_immediately": False,
    }


@pytest.mark.parametrize("cls", RECORDS)
def test_instances_have_slots_and_no_dict(cls):
    assert "__dict__" not in dir(cls)
    assert set(cls.__slots__) == {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("cls", RECORDS)
def test_a_class_says_how_it_is_written(cls):
    assert cls.__wire__ in ("array", "map", "map-omit-defaults")
    assert getattr(cls, "__wire_factory__", "batched") in ("batched", "flat", "shared")


@pytest.mark.parametrize("cls", RECORDS)
def test_annotations_resolve(cls):
    hints = typing.get_type_hints(cls)
    assert all(field.name in hints for field in dataclasses.fields(cls))


def test_importing_the_schema_imports_no_framework():
    import subprocess

    code = "import sys, fastmm.schema; assert not {'torch', 'ml_dtypes', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_torch
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_message_equals_one_built_alike(case):
    from support.families import fastmm_family

    first, second = (case.build(fastmm_family()) for _ in range(2))
    assert schema.same_value(first, second)
    assert_same(first, second)
    if dataclasses.is_dataclass(first):
        assert first == second


def _request_of(data):
    field = schema.MmFlatField(slices=[slice(0, 2)])
    feature = schema.MmFeatureSpec({"k": schema.MmFieldElem(data, field)}, "image", "i", schema.PlaceholderRange(0, 4))
    return schema.EngineCoreRequest("r", [1], [feature], arrival_time=1.0)


LEAVES = {
    "numpy": lambda: np.arange(6, dtype=np.float32).reshape(2, 3),
    "wire": lambda: schema.WireTensor("float32", (2, 3), np.arange(6, dtype=np.float32)),
    "nested": lambda: [np.arange(6, dtype=np.float32).reshape(2, 3), 1, [2.5]],
}
if torch is not None:
    LEAVES["torch"] = lambda: torch.arange(6, dtype=torch.float32).reshape(2, 3)
    LEAVES["bfloat16"] = lambda: torch.arange(6, dtype=torch.float32).reshape(2, 3).bfloat16()


@pytest.mark.parametrize("left", LEAVES)
@pytest.mark.parametrize("right", LEAVES)
def test_equality_of_leaves_is_of_kind_dtype_shape_and_bytes(left, right):
    assert (_request_of(LEAVES[left]()) == _request_of(LEAVES[right]())) is (left == right)


def test_equality_sees_every_member_of_a_field():
    request = _request_of(1)
    for name, value in {"slices": [slice(0, 3)], "dim": 1, "keep_on_cpu": True}.items():
        other = _request_of(1)
        setattr(other.mm_features[0].data["k"].field, name, value)
        assert request != other


def test_equality_of_nan_is_by_bits_in_tensors():
    quiet, other = np.array([math.nan], np.float32), np.array([0x7FC00001], np.uint32).view(np.float32)
    assert _request_of(quiet) == _request_of(quiet.copy())
    assert _request_of(quiet) != _request_of(other)


def test_a_record_is_not_equal_to_something_else_and_has_no_hash():
    request = schema.EngineCoreRequest("r", [1])
    assert request != "r"
    with pytest.raises(TypeError):
        hash(request)


# --- parameters


def test_sampling_is_normalised_as_the_engine_does():
    params = schema.SamplingParams(
        stop="end",
        stop_token_ids=[5, 3, 5],
        bad_words=["a", "a"],
        seed=-1,
        thinking_token_budget=-1,
        logprobs=True,
        temperature=1e-3,
    )
    assert params.stop == ["end"]
    assert params.stop_token_ids == [5, 3]
    assert params.bad_words == ["a"]
    assert params.output_text_buffer_length == 2
    assert params._all_stop_token_ids == {3, 5}
    assert (params.seed, params.thinking_token_budget, params.logprobs, params.temperature) == (None, None, 1, 0.01)
    assert params.skip_reading_prefix_cache is False
    assert schema.SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True


def test_greedy_resets_to_the_very_default_objects():
    params = schema.SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.5)
    defaults = {field.name: field.default for field in dataclasses.fields(params)}
    for name in ("top_p", "top_k", "min_p"):
        assert getattr(params, name) is defaults[name]


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 0), ("temperature", -1), ("temperature", math.nan), ("top_p", 0.0), ("top_k", -2), ("min_p", 2), ("max_tokens", 0),
     ("min_tokens", 99), ("logprobs", -2), ("stop", [""]), ("presence_penalty", 3), ("repetition_penalty", math.inf)],
)  # fmt: skip
def test_a_value_out_of_range_names_its_field(name, value):
    with pytest.raises(SchemaValueError, match=name) as caught:
        schema.SamplingParams(**{name: value})
    assert caught.value.path == f"SamplingParams.{name}"
    assert isinstance(caught.value, ValueError)


# --- WireTensor


@pytest.mark.parametrize("dtype", [*TORCH_DTYPES, *NUMPY_DTYPES])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)])
def test_numpy_gives_the_values_as_a_view(dtype, shape):
    data = (
        numpy_bytes(dtype, shape, 1)
        if dtype in NUMPY_DTYPES
        else pattern(math.prod(shape) * TORCH_DTYPES[dtype], 1, of_bool=dtype == "bool")
    )
    tensor = schema.WireTensor(dtype, shape, data)
    row = dtypes.DTYPES.get(dtype)
    if row is not None and row.numpy_name is None and not hasattr(ml_dtypes, dtype):
        with pytest.raises(CompatError, match=dtype):
            tensor.numpy()
        return
    array = tensor.numpy()
    assert array.shape == shape
    assert array.tobytes() == data
    assert array.dtype.str == dtype or array.dtype.name == dtype
    if data:
        assert not array.flags.writeable
        assert array.ctypes.data == np.frombuffer(data, np.uint8).ctypes.data


@needs_torch
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)])
def test_torch_gives_the_values_as_a_view_without_a_warning(dtype, shape):
    data = pattern(math.prod(shape) * TORCH_DTYPES[dtype], 1, of_bool=dtype == "bool")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "ComplexHalf")
        tensor = schema.WireTensor(dtype, shape, data).torch()
        assert_same(tensor, torch_tensor(dtype, shape, 1))
    if data:
        assert tensor.data_ptr() == np.frombuffer(data, np.uint8).ctypes.data


@needs_torch
@pytest.mark.parametrize("dtype", [name for name in NUMPY_DTYPES if "U" not in name and "S" not in name])
def test_torch_gives_the_values_of_a_numpy_dtype(dtype):
    array = numpy_array(dtype, (2, 3), 1)
    tensor = schema.WireTensor(dtype, (2, 3), array).torch()
    np.testing.assert_array_equal(tensor.numpy(), array)


@needs_torch
def test_the_view_keeps_the_memory_alive():
    data = bytearray(pattern(4096, 1))
    tensor = schema.WireTensor("uint8", (4096,), data).torch()
    with pytest.raises(BufferError):
        data.append(0)
    expected = bytes(data)
    del data
    assert tensor.numpy().tobytes() == expected


@needs_torch
@pytest.mark.parametrize("readonly", [False, True])
def test_a_misaligned_view_is_copied(readonly):
    raw = np.zeros(64, np.uint8)
    start = -raw.ctypes.data % 16 + 1
    part = memoryview(raw)[start : start + 16]
    part = part.toreadonly() if readonly else part
    tensor = schema.WireTensor("float32", (4,), part)
    for made in (tensor.numpy().ctypes.data, tensor.torch().data_ptr()):
        assert made % 4 == 0


def test_text_has_no_torch_form():
    if torch is None:
        pytest.skip("torch is not installed")
    with pytest.raises(CompatError, match="<U2"):
        schema.WireTensor("<U2", (1,), b"a\0\0\0b\0\0\0").torch()


BAD = {
    "unknown dtype": ("half", (1,), b"12"),
    "object dtype": ("|O8", (1,), b"12345678"),
    "dtype with the module": ("torch.float32", (1,), b"1234"),
    "date": ("<M8[s]", (1,), b"12345678"),
    "numpy dtype that is none": ("<f3", (1,), b"123"),
    "dtype no str": (np.dtype("f4"), (1,), b"1234"),
    "too few bytes": ("float16", (3,), b"12345"),
    "too many bytes": ("float16", (2,), b"12345"),
    "no bytes": ("uint8", (3,), b""),
    "negative extent": ("uint8", (-1,), b"1"),
    "negative extent beside zero": ("uint8", (0, -1), b""),
    "overflow": ("uint8", (2**62, 4), b""),
    "overflow beside zero": ("uint8", (0, 2**62, 4), b""),
    "float extent": ("uint8", (1.0,), b"1"),
    "bool extent": ("uint8", (True,), b"1"),
    "no shape": ("uint8", 3, b"123"),
    "no buffer": ("uint8", (1,), [1]),
    "strided buffer": ("uint8", (2,), memoryview(b"1234")[::2]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_tensor_is_one_clear_error(name):
    with pytest.raises(SchemaError) as caught:
        schema.WireTensor(*BAD[name])
    assert isinstance(caught.value, FastmmError)
    assert caught.value.path.startswith("WireTensor.")


def test_tensors_are_equal_by_dtype_shape_and_bytes():
    tensor = schema.WireTensor("float32", (2,), b"12345678")
    assert tensor == schema.WireTensor("float32", [2], np.frombuffer(b"12345678", "<u8"))
    assert tensor != schema.WireTensor("<f4", (2,), b"12345678")
    assert tensor != schema.WireTensor("float32", (2, 1), b"12345678")
    assert tensor != schema.WireTensor("float32", (2,), b"12345679")
    assert tensor != b"12345678"


def test_any_contiguous_buffer_is_viewed():
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    tensor = schema.WireTensor("int16", array.shape, array)
    array[0, 0] = 77
    assert tensor.numpy()[0, 0] == 77
    assert tensor.nbytes == 12


# --- the table of dtypes


@needs_torch
def test_the_table_is_torchs():
    for name, row in dtypes.DTYPES.items():
        element = getattr(torch, name)
        assert element.itemsize == row.item_nbytes == dtypes.item_nbytes(name)
        assert element.is_floating_point is (row.number_class == "float")
        assert element.is_complex is (row.number_class == "complex")


def test_the_table_is_the_headers():
    """The C table, row by row, in its order."""
    import re
    from pathlib import Path

    import fastmm

    header = (Path(fastmm.get_include()) / "fastmm" / "dtype.h").read_text()
    rows = re.findall(r'X\(\w+,\s*"(\w+)",\s*(\d+),\s*(\w+),\s*\d+,\s*\d+,\s*(\S+?)\)', header)
    assert [row[0] for row in rows] == list(dtypes.DTYPES)
    for name, nbytes, number_class, kind in rows:
        row = dtypes.DTYPES[name]
        assert (row.item_nbytes, row.number_class) == (int(nbytes), number_class.lower())
        assert (kind == "0") is (row.numpy_name is None)
        if row.numpy_name is not None:
            assert np.dtype(row.numpy_name).kind == kind.strip("'")


@pytest.mark.parametrize("name", ["<f4", ">i8", "|b1", "<U2", "|S3", "<c16"])
def test_a_numpy_name_is_known_by_its_spelling(name):
    assert dtypes.is_numpy_name(name)
    assert dtypes.numpy_dtype(name).str == name


@pytest.mark.parametrize("name", ["f4", "float32", "<O8", "|V3", "<M8", "", "<", "<f", "<f-4", "<f4,<f4", "O"])
def test_anything_else_is_not(name):
    assert not dtypes.is_numpy_name(name)

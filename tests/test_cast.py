"""`cast()`: any tensor, three places for the result, and what it refuses."""

import array
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from support import cast_rule

import fastmm._native.pool as pool
from fastmm._native.cast import available_isas, cast, selected_isa
from fastmm.errors import CompatError, EncodeError, FastmmError, SchemaError
from fastmm.schema import WireTensor

torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")

ISAS = available_isas()
TARGETS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def floats(*shape, seed=0):
    nelem = int(np.prod(shape, dtype=int))
    return np.random.default_rng(seed).standard_normal(nelem, np.float32).reshape(shape)


def bits_of(tensor):
    """The raw bytes of any tensor, in C order."""
    if isinstance(tensor, torch.Tensor):
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(tensor, WireTensor):
        return bytes(tensor.data)
    return tensor.tobytes()


def address_of(tensor):
    if isinstance(tensor, torch.Tensor):
        return tensor.data_ptr()
    return np.frombuffer(
        tensor.data if isinstance(tensor, WireTensor) else tensor.reshape(-1).view(np.uint8), np.uint8
    ).ctypes.data


def want_bits(values, target):
    source = values.dtype.name
    return cast_rule.expected(
        np.ascontiguousarray(values).reshape(-1).view(cast_rule.FORMATS[source][0]), source, target
    ).tobytes()


# --- the kind of the result ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (1,), (3, 5), (2, 3, 4, 5)])
def test_torch_stays_torch(target, shape):
    source = torch.from_numpy(floats(*shape))
    result = cast(source, target)
    assert type(result) is torch.Tensor
    assert result.dtype == TARGETS[target]
    assert result.shape == source.shape
    assert torch.equal(result, source.to(TARGETS[target]))


def test_numpy_stays_numpy():
    values = floats(7, 9)
    half = cast(values, "float16")
    assert type(half) is np.ndarray
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half, values.astype(np.float16))
    brain = cast(values, "bfloat16")
    assert brain.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(brain.view(np.uint16), values.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert half.flags.writeable


def test_a_wire_tensor_stays_one():
    values = floats(4, 6)
    for name in ("float32", "<f4"):
        result = cast(WireTensor(name, values.shape, values), "bfloat16")
        assert isinstance(result, WireTensor)
        assert (result.dtype, result.shape) == ("bfloat16", (4, 6))
        assert bytes(result.data) == want_bits(values, "bfloat16")


def test_buffers_and_foreign_dlpack_give_numpy():
    values = floats(33)

    class Foreign:
        def __dlpack__(self, **keywords):
            return values.__dlpack__(**keywords)

        def __dlpack_device__(self):
            return values.__dlpack_device__()

    for source in (array.array("f", values.tolist()), memoryview(values), Foreign()):
        np.testing.assert_array_equal(cast(source, "float16"), values.astype(np.float16))


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "torch.bfloat16", torch.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)],
)
def test_every_spelling_of_a_dtype(dtype):
    assert cast(torch.ones(3), dtype).dtype == torch.bfloat16
    for spelling in ("float16", torch.float16, np.float16, np.dtype("<f2")):
        assert cast(torch.ones(3), spelling).dtype == torch.float16


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16"])
def test_every_floating_source_ends_in_the_target(source, target):
    values = torch.from_numpy(floats(513, seed=3)).to(getattr(torch, source))
    result = cast(values, target)
    assert torch.equal(result, values.to(torch.float32).to(getattr(torch, target)))
    assert bits_of(values) == bits_of(torch.from_numpy(floats(513, seed=3)).to(getattr(torch, source)))


def test_strides_are_followed_in_logical_order():
    values = floats(6, 8, 10)
    for view in (values.T, values[::-1], values[:, ::2, 1:7:3], np.broadcast_to(values[:, :1], values.shape)):
        np.testing.assert_array_equal(cast(view, "float16"), view.astype(np.float16))
    tensor = torch.from_numpy(values)
    for view in (tensor.permute(2, 0, 1), tensor[:, 1:3], tensor[0, :1].expand(5, 10)):
        assert torch.equal(cast(view, "bfloat16"), view.bfloat16())


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8"])
def test_the_other_byte_order_gives_right_numbers(dtype):
    values = floats(5, 7).astype(dtype)
    for view in (values, values.T):
        np.testing.assert_array_equal(cast(view, "float32"), view.astype(np.float32))
        np.testing.assert_array_equal(cast(view, "float16"), view.astype(np.float32).astype(np.float16))
    np.testing.assert_array_equal(cast(values.copy(), "float16", inplace=not dtype.endswith("2")), values.astype(np.float16))


def test_misaligned_memory():
    room = bytearray(4 * 100 + 1)
    values = np.frombuffer(room, "<f4", 100, offset=1)
    values[:] = floats(100)
    want = values.astype(np.float16)
    np.testing.assert_array_equal(cast(values, "float16"), want)
    np.testing.assert_array_equal(cast(values, "float16", inplace=True), want)


# --- in place --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["torch", "numpy", "wire"])
@pytest.mark.parametrize("source", ["float32", "float64"])
def test_in_place_lies_over_the_same_memory(kind, target, isa, source):
    values = floats(123, 45).astype(source)
    want = want_bits(values, target)
    tensor = {"torch": torch.from_numpy, "numpy": np.asarray, "wire": lambda v: WireTensor(source, v.shape, v)}[kind](
        values.copy()
    )
    address = address_of(tensor)
    result = cast(tensor, target, inplace=True, isa=isa)
    assert address_of(result) == address
    assert tuple(result.shape) == (123, 45)
    assert bits_of(result) == want
    assert type(result) is type(tensor)


def test_in_place_allocates_nothing_of_payload_size():
    tensor = torch.from_numpy(floats(1 << 20))
    before = pool.pool_stats()
    result = cast(tensor, "bfloat16", inplace=True)
    after = pool.pool_stats()
    assert (after["hits"], after["misses"]) == (before["hits"], before["misses"])
    assert result.untyped_storage().nbytes() <= tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("kind", ["torch", "numpy", "wire"])
def test_the_result_keeps_the_memory(kind):
    values = floats(1000)
    want = want_bits(values, "float16")
    tensor = {"torch": torch.from_numpy, "numpy": np.asarray, "wire": lambda v: WireTensor("float32", v.shape, v)}[kind](values)
    result = cast(tensor, "float16", inplace=True)
    del tensor, values
    junk = [floats(1000) for _ in range(50)]
    assert bits_of(result) == want
    del junk


def test_a_16_bit_source_in_place():
    tensor = torch.from_numpy(floats(777)).bfloat16()
    want, address = tensor.float().half(), tensor.data_ptr()
    result = cast(tensor, "float16", inplace=True)
    assert result.data_ptr() == address
    assert torch.equal(result, want)


def refused_in_place():
    values = floats(16, 16)
    read_only = values.copy()
    read_only.setflags(write=False)
    tensor = torch.from_numpy(values.copy())
    yield "a read-only array", read_only, "float16", "read-only"
    yield "immutable bytes", WireTensor("float32", (4,), bytes(16)), "float16", "read-only"
    yield "a transposed tensor", tensor.t(), "bfloat16", "dense"
    yield "a strided array", values.copy()[:, ::2], "float16", "dense"
    yield "a reversed array", values.copy()[::-1], "float16", "dense"
    yield "an expanded tensor", torch.zeros(1).expand(1000), "bfloat16", "dense"
    yield "a broadcast array", np.broadcast_to(np.float32(1.5), (10,)), "float16", "dense"
    yield "elements that grow", tensor.half(), "float32", "do not grow"


@pytest.mark.parametrize(("source", "target", "message"), [pytest.param(*row[1:], id=row[0]) for row in refused_in_place()])
def test_in_place_is_refused_and_nothing_is_written(source, target, message):
    before = bits_of(source)
    with pytest.raises(EncodeError, match=message):
        cast(source, target, inplace=True)
    assert bits_of(source) == before
    assert bits_of(cast(source, target))  # and it can be had out of place
    assert bits_of(source) == before


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_a_mapped_file_is_never_written_to(tmp_path, mode):
    path = tmp_path / "values"
    values = floats(4096)
    values.tofile(path)
    mapped = np.memmap(path, np.float32, mode)
    for source in (mapped, mapped[:100]) + ((torch.from_numpy(mapped),) if mode != "r" else ()):
        with pytest.raises(EncodeError, match=r"read-only|mapped from a file"):
            cast(source, "bfloat16", inplace=True)
    mapped.flush()
    assert path.read_bytes() == values.tobytes()
    np.testing.assert_array_equal(cast(mapped, "float16"), values.astype(np.float16))


@pytest.mark.parametrize(
    "kind", ["load-mmap", "from-file", "from-file-shared", "share-memory", "shared-storage", "shared-mapping"]
)
def test_memory_that_is_not_this_processs_alone_is_never_written_to(tmp_path, kind):
    values, path = floats(4096), tmp_path / "file"
    if kind == "load-mmap":
        torch.save(torch.from_numpy(values), path)
        tensor = torch.load(path, mmap=True)
    elif kind.startswith("from-file"):
        values.tofile(path)
        tensor = torch.from_file(str(path), shared=kind.endswith("shared"), size=4096)
    elif kind == "share-memory":
        tensor = torch.from_numpy(values).clone().share_memory_()
    elif kind == "shared-storage":
        tensor = torch.from_numpy(values).clone()
        tensor.untyped_storage().share_memory_()
    else:
        tensor = np.frombuffer(mmap.mmap(-1, values.nbytes), np.float32)
        tensor[:] = values
    with pytest.raises(EncodeError, match="shared with another process"):
        cast(tensor[:4000], "bfloat16", inplace=True)
    assert bits_of(tensor) == values.tobytes()


# --- out= ------------------------------------------------------------------------------------------------------------------


def test_out_of_every_kind_receives_the_numbers():
    values = floats(9, 11)
    want = want_bits(values, "float16")
    for source in (values, torch.from_numpy(values), WireTensor("float32", values.shape, values)):
        for out in (
            np.zeros((9, 11), np.float16),
            torch.zeros(9, 11, dtype=torch.float16),
            WireTensor("float16", (9, 11), bytearray(198)),
        ):
            assert cast(source, "float16", out=out) is out
            assert bits_of(out) == want
    transposed = np.zeros((11, 9), np.float16)
    cast(values.T, "float16", out=transposed)
    np.testing.assert_array_equal(transposed, values.T.astype(np.float16))


def test_out_may_be_the_sources_own_memory():
    values = floats(64)
    want = values.astype(np.float16)
    out = values.view(np.float16)[:64]
    np.testing.assert_array_equal(cast(values, "float16", out=out), want)


def test_out_that_does_not_fit_is_refused_and_not_written():
    values = floats(4, 6)
    read_only = np.zeros((4, 6), np.float16)
    read_only.setflags(write=False)
    for out, message in [
        (np.zeros((4, 6), np.float32), "of dtype float16, got float32"),
        (np.zeros((4, 6), ">f2"), "other byte order"),
        (np.zeros((6, 4), np.float16), r"of shape \(4, 6\), got \(6, 4\)"),
        (np.zeros(24, np.float16), "of shape"),
        (np.zeros((6, 4), np.float16).T, "dense"),
        (np.zeros((4, 12), np.float16)[:, ::2], "dense"),
        (read_only, "read-only"),
        (values.view(np.float16).reshape(-1)[2:26].reshape(4, 6), "overlap"),
    ]:
        before = out.tobytes()
        with pytest.raises(EncodeError, match=message):
            cast(values, "float16", out=out)
        assert out.tobytes() == before
    with pytest.raises(EncodeError, match="got both"):
        cast(values, "float16", out=np.zeros((4, 6), np.float16), inplace=True)


def test_out_that_overlaps_a_strided_source_is_refused():
    room = floats(100)
    for source in (room[::-1], room[1::2], room[:90].reshape(9, 10).T):
        out = room.view(np.float16)[: source.size].reshape(source.shape)
        before = room.tobytes()
        with pytest.raises(EncodeError, match="overlap"):
            cast(source, "float16", out=out)
        assert room.tobytes() == before


# --- refusals ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(4),
        torch.ones(3, dtype=torch.bool),
        torch.ones(3, dtype=torch.complex64),
        np.arange(3),
        np.array(["a"]),
        np.array([object()]),
        np.array([1.5], np.longdouble),
        b"bytes",
        [1.0, 2.0],
        1.5,
        None,
        torch.ones(3).to_sparse(),
        torch.ones(3, device="meta"),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_what_is_no_floating_tensor_is_one_clear_error(source):
    with pytest.raises(SchemaError):
        cast(source, "bfloat16")


@pytest.mark.parametrize(
    "dtype", ["int32", "float64", "half", "", "float8_e5m2", torch.int8, np.float64, ">f2", 3.5, object(), None, "bf\0"]
)
def test_a_dtype_that_is_no_target_is_one_clear_error(dtype):
    with pytest.raises(SchemaError, match="expected a dtype"):
        cast(torch.ones(3), dtype)


@pytest.mark.parametrize("isa", ["sse9", "", "AVX2", "scalar\0", "\udc80"])
def test_an_instruction_set_that_is_not_there_names_those_that_are(isa):
    with pytest.raises(CompatError, match="scalar"):
        cast(torch.ones(3), "bfloat16", isa=isa)
    with pytest.raises(SchemaError, match="isa"):
        cast(torch.ones(3), "bfloat16", isa=1)


@pytest.mark.parametrize("kind", ["negated", "fake", "zero", "emptied"])
def test_a_tensor_whose_memory_does_not_hold_its_values_is_refused(kind):
    """DLPack hands out the memory of a lazily negated view, and no memory at all for the others, without a word."""
    if kind == "negated":
        source = torch.complex(torch.ones(2), torch.ones(2)).conj().imag
        assert source.is_neg()
    elif kind == "fake":
        with torch._subclasses.fake_tensor.FakeTensorMode():
            source = torch.ones(4)
    elif kind == "zero":
        source = torch._efficientzerotensor((4,))
    else:
        source = torch.ones(4)
        source.untyped_storage().resize_(0)
    for inplace in (False, True):
        with pytest.raises(SchemaError, match="memory"):
            cast(source, "bfloat16", inplace=inplace)


# --- modes and threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
def test_a_flushing_thread_still_keeps_subnormals(isa):
    """`torch.set_flush_denormal` sets the modes that vector instructions obey."""
    bits = cast_rule.samples("float64", 4096)
    small = np.full(4096, np.uint64(0x3690000000000001))  # a float32 subnormal after rounding
    singles = np.arange(1, 4097, dtype=np.uint32)
    halves = np.arange(1, 1024, dtype=np.uint16)
    if not torch.set_flush_denormal(True):
        pytest.skip("no such mode here")
    try:
        results = [
            (cast(bits.view(np.float64), "float32", isa=isa), cast_rule.expected(bits, "float64", "float32")),
            (cast(small.view(np.float64), "float32", isa=isa), cast_rule.expected(small, "float64", "float32")),
            (cast(singles.view(np.float32), "bfloat16", isa=isa), cast_rule.expected(singles, "float32", "bfloat16")),
            (cast(halves.view(np.float16), "float32", isa=isa), cast_rule.expected(halves, "float16", "float32")),
        ]
    finally:
        torch.set_flush_denormal(False)
    for got, want in results:
        np.testing.assert_array_equal(got.view(want.dtype), want)


def test_many_threads_cast_at_once():
    sources = [floats(100_000 + 7 * i, seed=i) for i in range(4)]
    wants = [source.astype(np.float16) for source in sources]
    failures = []

    def work(index):
        for _ in range(50):
            if not np.array_equal(cast(sources[index], "float16"), wants[index]):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_no_leak():
    """What a cast holds on to goes with its result: reference counts and pooled blocks come back."""
    source = floats(5000)
    cast(source, "float16")
    counts = sys.getrefcount(source)
    idle = pool.pool_stats()["idle_nbytes"]
    for _ in range(100):
        cast(source, "float16")
        cast(source[::2], "bfloat16")
        with pytest.raises(FastmmError):
            cast(source[::2], "float16", inplace=True)
        with pytest.raises(FastmmError):
            cast(source, "float16", out=source)
    assert sys.getrefcount(source) == counts
    assert pool.pool_stats()["idle_nbytes"] - idle < 100_000


# --- FASTMM_ISA ---------------------------------------------------------------------------------------------------------------


def python(code, **environment):
    source = str(Path(__file__).resolve().parents[1] / "src")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), source]))
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_forces_an_instruction_set(isa):
    done = python("from fastmm._native.cast import selected_isa; print(selected_isa())", FASTMM_ISA=isa)
    assert done.stdout.strip() == isa, done.stderr


def test_without_it_the_best_is_taken():
    done = python("from fastmm._native.cast import selected_isa; print(selected_isa())", FASTMM_ISA="")
    assert done.stdout.strip() == ISAS[0], done.stderr
    if not os.environ.get("FASTMM_ISA"):
        assert selected_isa() == ISAS[0]


def test_a_wrong_name_is_an_error_of_the_first_use_not_of_the_import():
    code = """
from fastmm._native.cast import available_isas, cast
from fastmm.errors import CompatError
import array
print(available_isas()[-1])
for _ in range(2):
    try:
        cast(array.array("f", [1.0]), "float16")
    except CompatError as error:
        print(error)
print(cast(array.array("f", [1.5]), "float16", isa="scalar"))
"""
    done = python(code, FASTMM_ISA="sse9")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == "scalar"
    assert "FASTMM_ISA" in lines[1]
    assert "sse9" in lines[1]
    assert lines[2] == lines[1]
    assert lines[3] == "[1.5]"

"""The casts: which kernels this process uses, and `cast()` over any tensor.

The numbers are crunched in C (cast.h holds the rule and the contract); this module chooses the table, checks the memory
and makes the tensors.
"""

from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer)
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, intptr_t, uint8_t, uint64_t
from libc.string cimport memcpy

import os

from fastmm.errors import CompatError, EncodeError, SchemaError

from .pool cimport Block, block_acquire
from .tensor cimport (
    FAMILY_BUFFER, MAX_NDIM, Producer, TensorView, memory_is_private, owner_is_private, producer_of, tensor_gather,
    tensor_owner, tensor_view, tensor_view_clear)
from .tensor_make cimport tensor_make

cdef extern from "fastmm/cpu.h" nogil:
    uint64_t fmm_cpu_features()

cdef extern from "fastmm/cast.h" nogil:
    const fmm_cast_table_t* const* fmm_cast_tables(size_t* count)
    const fmm_cast_table_t* fmm_cast_table_find(const char* name)
    const fmm_cast_table_t* fmm_cast_table_best(uint64_t features)
    bint fmm_cast_table_usable(const fmm_cast_table_t* table, uint64_t features)
    bint fmm_cast_supported(int src_dtype, int dst_dtype)
    bint fmm_cast_supported_inplace(int src_dtype, int dst_dtype)
    fmm_status_t fmm_cast_run(const fmm_cast_table_t* table, int src_dtype, int dst_dtype, const void* src, void* dst,
                              size_t nelem)
    fmm_status_t fmm_cast_run_swapped(const fmm_cast_table_t* table, int src_dtype, int dst_dtype, const void* src,
                                      void* dst, size_t nelem)

cdef extern from "fastmm/dtype.h" nogil:
    cdef enum:
        FMM_DTYPE_NONE
        FMM_FLOAT16
        FMM_BFLOAT16
        FMM_FLOAT32
    ctypedef struct fmm_dtype_info_t:
        const char* name
        uint8_t item_nbytes
    const fmm_dtype_info_t* fmm_dtype_info(int dtype)
    int fmm_dtype_from_name(const char* name, size_t name_nbytes)

# --- which instruction set --------------------------------------------------------------------------------------------

cdef uint64_t features = 0
cdef bint features_known = False  # asking costs tens of microseconds in a virtual machine
cdef const fmm_cast_table_t* selected = NULL


cdef uint64_t cpu_features() noexcept:
    global features, features_known
    if not features_known:
        features = fmm_cpu_features()
        features_known = True
    return features


cdef const fmm_cast_table_t* selected_table() except NULL:
    global selected
    if selected is NULL:
        forced = os.environ.get("FASTMM_ISA")
        if forced:
            selected = find_usable(forced, "the environment variable FASTMM_ISA")
        else:
            selected = fmm_cast_table_best(cpu_features())
    return selected


cdef const fmm_cast_table_t* table_named(object isa) except NULL:
    if isa is None:
        return selected_table()
    if not isinstance(isa, str):
        raise SchemaError(f"expected isa to be a str or None, got {type(isa).__name__}")
    return find_usable(isa, "isa")


cdef const fmm_cast_table_t* find_usable(str name, str asked_by) except NULL:
    cdef bytes key = name.encode("utf-8", "backslashreplace")
    cdef const fmm_cast_table_t* table = NULL
    if b"\0" not in key:
        table = fmm_cast_table_find(key)
    if table is NULL:
        raise CompatError(f"expected {asked_by} to be one of {', '.join(available_isas())}, got {name!r}, which this "
                          "build does not have")
    if not fmm_cast_table_usable(table, cpu_features()):
        raise CompatError(f"expected {asked_by} to be one of {', '.join(available_isas())}, got {name!r}, which this "
                          "machine cannot run")
    return table


def available_isas():
    """Instruction sets whose kernels can run here, best first.

    Returns
    -------
    tuple of str
        Out of ``"avx512"``, ``"avx2"``, ``"neon"`` and ``"scalar"``; the last one is always there.

    Notes
    -----
    A name is here when this build holds its kernels, the processor has the instructions and the operating system saves
    the registers. Whatever is chosen, the bits are the same.
    """
    cdef size_t count, index
    cdef const fmm_cast_table_t* const* tables = fmm_cast_tables(&count)
    names = []
    for index in range(count):
        if fmm_cast_table_usable(tables[index], cpu_features()):
            names.append((<bytes>tables[index].name).decode())
    return tuple(names)


def selected_isa():
    """The instruction set that this process uses where none is asked for.

    Returns
    -------
    str
        What the environment variable ``FASTMM_ISA`` names, else the first of `available_isas`. Decided on first use and
        kept for the life of the process.

    Raises
    ------
    CompatError
        ``FASTMM_ISA`` names what this build or this machine does not have.
    """
    return (<bytes>selected_table().name).decode()


# --- what other modules call ------------------------------------------------------------------------------------------


cdef fmm_status_t cast_run(const fmm_cast_table_t* table, int src_dtype, int dst_dtype, const void* src, void* dst,
                           size_t nelem, bint swapped) noexcept nogil:
    if swapped:
        return fmm_cast_run_swapped(table, src_dtype, dst_dtype, src, dst, nelem)
    return fmm_cast_run(table, src_dtype, dst_dtype, src, dst, nelem)


cdef bint cast_supported(int src_dtype, int dst_dtype) noexcept nogil:
    return fmm_cast_supported(src_dtype, dst_dtype)


cdef bint cast_supported_inplace(int src_dtype, int dst_dtype) noexcept nogil:
    return fmm_cast_supported_inplace(src_dtype, dst_dtype)


cdef int cast_target(object dtype) except -1:
    if isinstance(dtype, str):  # the usual case, and without a detour
        if dtype == "bfloat16":
            return FMM_BFLOAT16
        if dtype == "float16":
            return FMM_FLOAT16
    cdef str name = name_of_dtype(dtype)
    cdef bytes key = name.encode()
    cdef int code = fmm_dtype_from_name(key, len(key))
    if code != FMM_BFLOAT16 and code != FMM_FLOAT16 and code != FMM_FLOAT32:
        raise SchemaError(f"expected a dtype to cast to: bfloat16, float16 or float32, got {name!r}")
    return code


cdef str name_of_dtype(object dtype):
    """The wire's name of a dtype; torch is recognised by name, never imported."""
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    if type(dtype).__module__ == "torch":
        return str(dtype).removeprefix("torch.")
    import numpy
    try:
        found = numpy.dtype(dtype)
    except TypeError:
        raise SchemaError(f"expected a dtype's name, a torch dtype or a numpy dtype, got {type(dtype).__name__}") from None
    if not found.isnative:
        raise SchemaError(f"expected a dtype in this machine's byte order, got {found.str!r}")
    return found.name


cdef object error_of(fmm_status_t status, int src_dtype, int dst_dtype):
    """The exception for a status of the kernels."""
    pair = f"{dtype_name(src_dtype)} to {dtype_name(dst_dtype)}"
    if status == FMM_ERR_UNSUPPORTED:
        return SchemaError(f"expected a pair of floating types that can be cast, got {pair}")
    if status == FMM_ERR_OVERLAP:
        return EncodeError(f"expected source and destination of a cast from {pair} to be disjoint, or the same memory with "
                           "elements that do not grow, got memory that partly overlaps")
    return EncodeError(f"expected a tensor that fits the address space in a cast from {pair}, got more elements")


cdef str dtype_name(int dtype):
    cdef const fmm_dtype_info_t* info = fmm_dtype_info(dtype)
    return "an unknown type" if info is NULL else (<bytes>info.name).decode()


# --- cast() -----------------------------------------------------------------------------------------------------------

cdef struct Dense:
    # Dense memory in C order, with a shape of its own: a TensorView's is only lent.
    void* data
    int64_t nelem
    int dtype
    bint swapped
    int ndim
    int64_t shape[MAX_NDIM]


def cast(src, dtype, *, out=None, inplace=False, isa=None):
    """Round a floating tensor to another floating type.

    Parameters
    ----------
    src
        A torch tensor, numpy array, `WireTensor`, buffer, or anything with DLPack: float32, float64, float16 or bfloat16,
        any shape, any strides, either byte order.
    dtype
        ``"bfloat16"``, ``"float16"`` or ``"float32"``; a torch or numpy dtype of these.
    out
        A dense, writable tensor of the new dtype and of `src`'s shape to write into. It may start at `src`'s own address
        if the elements do not grow, and else must not share memory with it.
    inplace
        Cast over `src`'s own memory, which the caller hands over: whatever still sees the old elements sees rubbish
        afterwards.
    isa
        One of `available_isas`; by default `selected_isa`.

    Returns
    -------
    tensor
        `out` where given. Else a tensor of `src`'s kind: torch for torch; numpy for numpy, buffers and other DLPack
        producers, but a `WireTensor` for bfloat16 when ml_dtypes is not installed; `WireTensor` for `WireTensor`. In place
        it lies over the first bytes of `src`'s memory and keeps that memory alive; else over memory from fastmm's pool,
        or, when there is nothing to convert, still in a copy.

    Raises
    ------
    SchemaError
        `src` is no floating tensor that can be cast, or `dtype` no such target.
    EncodeError
        `out` does not fit; or in place is asked for memory that is read-only, not dense, too small for the elements, or
        not this process's alone (mapped from a file, shared).
        Nothing is written then.
    CompatError
        `isa` cannot be had.

    Notes
    -----
    Round to nearest even, subnormals kept, float16 overflow (65520 and above) to infinity, every NaN to a quiet NaN of
    the same sign, with the leading payload bits that fit; the bits are the same on every instruction set. float64, float16
    and bfloat16 reach another 16-bit type through float32. The GIL is let go from 256 KiB on.
    """
    cdef const fmm_cast_table_t* table = table_named(isa)
    cdef int target = cast_target(dtype)
    cdef Producer producer = producer_for(src)
    cdef TensorView view
    if out is not None and inplace:
        raise EncodeError("expected out= or inplace=True, got both")
    tensor_view(producer, <PyObject*>src, &view)
    try:
        if not fmm_cast_supported(view.dtype, target):
            raise SchemaError("expected a tensor of float32, float64, float16 or bfloat16 to cast, got "
                              + (dtype_name(view.dtype) if view.dtype != FMM_DTYPE_NONE else "a type that only numpy has"))
        # Held across the cast: another thread may give `src` other memory while the GIL is free.
        owner = tensor_owner(producer, <PyObject*>src, &view)
        if inplace:
            return cast_inplace(table, producer, &view, target, owner)
        if out is not None:
            return cast_into(table, &view, target, out)
        return cast_fresh(table, producer, &view, target)
    finally:
        tensor_view_clear(&view)


cdef dict producers = {}  # type -> Producer, of the types that were cast lately


cdef Producer producer_for(object src):
    cdef PyObject* known = PyDict_GetItem(producers, type(src))
    cdef Producer producer
    if known is not NULL:
        return <Producer>known
    producer = producer_of(type(src))
    if producer is None:
        if not PyObject_CheckBuffer(src):
            raise SchemaError(f"expected a tensor, got {type(src).__module__}.{type(src).__qualname__}")
        producer = Producer.__new__(Producer)
        producer.family = FAMILY_BUFFER
    if len(producers) >= 64:  # types come and go: do not keep them all
        producers.clear()
    producers[type(src)] = producer
    return producer


cdef void dense_from_view(const TensorView* view, void* data, Dense* dense) noexcept:
    dense.data = data
    dense.nelem = view.nelem
    dense.dtype = view.dtype
    dense.swapped = view.swapped
    dense.ndim = view.ndim
    memcpy(dense.shape, view.shape, view.ndim * sizeof(int64_t))


cdef int convert(const fmm_cast_table_t* table, const Dense* src, int target, void* dst) except -1:
    cdef fmm_status_t status
    if src.nelem * fmm_dtype_info(src.dtype).item_nbytes >= CAST_RELEASE_GIL_MIN_NBYTES:
        with nogil:
            status = cast_run(table, src.dtype, target, src.data, dst, src.nelem, src.swapped)
    else:
        status = cast_run(table, src.dtype, target, src.data, dst, src.nelem, src.swapped)
    if status != FMM_OK:
        raise error_of(status, src.dtype, target)
    return 0


cdef object cast_inplace(const fmm_cast_table_t* table, Producer producer, TensorView* view, int target, object owner):
    cdef Dense dense
    if not view.dense:
        raise EncodeError("expected a dense tensor to cast in place, got strides that skip, repeat or reorder elements")
    if not view.writable:
        raise EncodeError("expected writable host memory to cast in place, got read-only memory: use inplace=False")
    if not fmm_cast_supported_inplace(view.dtype, target):
        raise EncodeError(f"expected elements that do not grow to cast in place, got {dtype_name(view.dtype)} to "
                          f"{dtype_name(target)}")
    if view.nelem and not owner_is_private(owner) and not memory_is_private(view.data, view.nbytes):
        raise EncodeError("expected memory of this process alone to cast in place, got memory that is mapped from a file or "
                          "shared with another process: use inplace=False, or out= if it is yours to write")
    dense_from_view(view, view.data, &dense)
    convert(table, &dense, target, dense.data)
    return tensor_make(producer.family, dense.data, target, dense.ndim, dense.shape, owner, False)


cdef object cast_fresh(const fmm_cast_table_t* table, Producer producer, TensorView* view, int target):
    cdef Dense dense
    cdef Block block = block_acquire(view.nelem * fmm_dtype_info(target).item_nbytes)
    gather_if_strided(view, &dense, table, target, block.data)
    return tensor_make(producer.family, block.data, target, dense.ndim, dense.shape, block, False)


cdef int gather_if_strided(TensorView* view, Dense* dense, const fmm_cast_table_t* table, int target,
                           void* dst) except -1:
    """Converts into `dst`, by way of a pooled block when the source is not dense."""
    cdef Block scratch
    if view.dense:
        dense_from_view(view, view.data, dense)
        return convert(table, dense, target, dst)
    scratch = block_acquire(view.nbytes)
    tensor_gather(view, scratch.data)
    dense_from_view(view, scratch.data, dense)
    return convert(table, dense, target, dst)


cdef object cast_into(const fmm_cast_table_t* table, TensorView* view, int target, object out):
    cdef Producer producer = producer_for(out)
    cdef TensorView room
    cdef Dense dense
    tensor_view(producer, <PyObject*>out, &room)
    try:
        if room.dtype != target or room.swapped:
            raise EncodeError(f"expected out of dtype {dtype_name(target)}, got {dtype_name(room.dtype)}"
                              + (" in the other byte order" if room.swapped else ""))
        if room.ndim != view.ndim or [room.shape[i] for i in range(room.ndim)] != [view.shape[i] for i in range(view.ndim)]:
            raise EncodeError(f"expected out of shape {tuple([view.shape[i] for i in range(view.ndim)])}, got "
                              f"{tuple([room.shape[i] for i in range(room.ndim)])}")
        if not room.dense:
            raise EncodeError("expected out to be dense in C order, got a tensor with strides")
        if not room.writable:
            raise EncodeError("expected out in writable host memory, got read-only memory")
        if not view.dense and overlaps(view, &room):
            raise error_of(FMM_ERR_OVERLAP, view.dtype, target)
        _room_owner = tensor_owner(producer, <PyObject*>out, &room)  # held across the cast, as the source's is
        gather_if_strided(view, &dense, table, target, room.data)
    finally:
        tensor_view_clear(&room)
    return out


cdef bint overlaps(const TensorView* strided, const TensorView* dense) noexcept:
    """Whether the span that a strided view touches meets a dense one."""
    cdef intptr_t low = <intptr_t>strided.data
    cdef intptr_t high = low + strided.item_nbytes
    cdef intptr_t reach
    cdef int axis
    if strided.nelem == 0 or dense.nelem == 0:
        return False
    for axis in range(strided.ndim):
        reach = (strided.shape[axis] - 1) * strided.strides[axis] * strided.stride_unit_nbytes
        if reach > 0:
            high += reach
        else:
            low += reach
    return low < <intptr_t>dense.data + dense.nbytes and <intptr_t>dense.data < high


# --- the kernels by name, for tests and benchmarks --------------------------------------------------------------


def _cast_buffer(src, dst, str src_dtype, str dst_dtype, *, isa=None, bint swapped=False, int repeat=1):
    """Run one kernel over raw bytes: `src` and `dst` are buffers, the number of elements follows from `src`.  Nothing of
    the memory is checked but what cast.h checks, and that `dst` is long enough.  `repeat` times, for the benchmark."""
    cdef Py_buffer source, target
    cdef int source_code = fmm_dtype_from_name(src_dtype.encode(), len(src_dtype))
    cdef int target_code = fmm_dtype_from_name(dst_dtype.encode(), len(dst_dtype))
    cdef const fmm_cast_table_t* table = table_named(isa)
    cdef fmm_status_t status = FMM_OK
    cdef size_t nelem
    if source_code == FMM_DTYPE_NONE or target_code == FMM_DTYPE_NONE:
        raise SchemaError(f"unknown dtype in {src_dtype!r}, {dst_dtype!r}")
    PyObject_GetBuffer(src, &source, PyBUF_SIMPLE | PyBUF_ANY_CONTIGUOUS)
    try:
        PyObject_GetBuffer(dst, &target, PyBUF_SIMPLE | PyBUF_WRITABLE | PyBUF_ANY_CONTIGUOUS)
        try:
            nelem = source.len // fmm_dtype_info(source_code).item_nbytes
            if target.len < <Py_ssize_t>(nelem * fmm_dtype_info(target_code).item_nbytes):
                raise EncodeError(f"expected room for {nelem} elements, got {target.len} bytes")
            with nogil:
                for _ in range(repeat):
                    status = cast_run(table, source_code, target_code, source.buf, target.buf, nelem, swapped)
        finally:
            PyBuffer_Release(&target)
    finally:
        PyBuffer_Release(&source)
    if status != FMM_OK:
        raise error_of(status, source_code, target_code)

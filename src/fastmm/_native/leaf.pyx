"""Tensors, the leaves of the tree: `[dtype, shape, data]`, where data is inline, an aux index, or out of band."""

import msgpack

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, int8_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from fastmm.errors import EncodeError, FastmmError, LimitError, SchemaError

from .cast import cast as cast_tensor
from .message cimport PART_FIELD, PART_ITEM, Message, Part, append, at_path, fail, foreign, need
from .payload cimport (
    SLOT_ITEM, SLOT_KEY, SLOT_NONE, SLOT_OFFSET, Slot, payload_cast, payload_frame, payload_note,
)
from .plan cimport FMM_MODE_PAYLOAD, FMM_MODE_TENSOR, Plan
from .tensor cimport FAMILY_EXCHANGE, MAX_NDIM, TensorView, numpy_name, tensor_gather, tensor_view, tensor_view_clear

cdef extern from "fastmm/msgpack_write.h" nogil:
    cdef enum:
        FMM_WRITE_MAX_NBYTES
    uint8_t* fmm_write_uint(uint8_t* p, uint64_t value)
    uint8_t* fmm_write_str_header(uint8_t* p, uint32_t nbytes)
    uint8_t* fmm_write_array_header(uint8_t* p, uint32_t nelem)
    uint8_t* fmm_write_ext_header(uint8_t* p, int8_t code, uint32_t nbytes)

cdef extern from "fastmm/dtype.h" nogil:
    cdef enum:
        FMM_DTYPE_NONE
        FMM_INT8
        FMM_UINT8
        FMM_CLASS_INT
        FMM_CLASS_UINT
        FMM_CLASS_FLOAT
    ctypedef struct fmm_dtype_info_t:
        const char* name
        uint8_t name_nbytes
        uint8_t item_nbytes
        uint8_t number_class
    const fmm_dtype_info_t fmm_dtype_infos[1]

cdef extern from "c/pyscalar.h":
    void fmm_copy_short(uint8_t* to, const uint8_t* source, size_t nbytes)

cdef extern from "Python.h":
    object PyObject_GenericGetDict(object, void*)

cdef extern from "<stdint.h>" nogil:
    const uint64_t UINT32_MAX

cdef object known_bytes = None  # torch.uint8 or torch.int8, whichever came last

cdef enum:
    EXT_RAW_VIEW = 3  # vLLM's ext code of inline tensor data; 1 and 2 are its pickles


cdef int write_tensor(Message m, object obj, Plan plan, int mode) except -1:
    """`[dtype, shape, data]`; data is inline, an aux index, or what an out-of-band consumer says."""
    cdef TensorView view
    cdef object _held = obj  # torch lets go of the GIL now and then
    view.holder = NULL
    try:
        tensor_view(plan.producer, <PyObject*>obj, &view)
        write_view(m, obj, plan, &view, mode)
    except FastmmError as error:
        tensor_view_clear(&view)
        raise at_path(m, error)
    except BaseException:
        tensor_view_clear(&view)
        raise
    if view.holder is not NULL:
        tensor_view_clear(&view)
    return 0


cdef int write_view(Message m, object obj, Plan plan, TensorView* view, int mode) except -1:
    cdef bint numpy_named = view.numpy_style and (m.as_vllm or not (
        mode & FMM_MODE_TENSOR and view.dtype != FMM_DTYPE_NONE and not view.swapped))
    cdef bint to_cast = (
        mode & FMM_MODE_PAYLOAD and m.payload.target >= 0 and view.dtype != FMM_DTYPE_NONE
        and fmm_dtype_infos[view.dtype].number_class == FMM_CLASS_FLOAT
        and (view.dtype != m.payload.target or view.swapped))
    cdef int64_t nbytes = view.nelem * m.payload.target_nbytes if to_cast else view.nbytes
    cdef bint inline
    cdef int index
    numpy_named = numpy_named and not to_cast
    if (view.dtype == FMM_INT8 or view.dtype == FMM_UINT8) and plan.producer.family == FAMILY_EXCHANGE:
        check_bytes(m, obj)
    if mode & FMM_MODE_PAYLOAD and m.payload.target >= 0 and view.dtype == FMM_DTYPE_NONE and view.numpy_kind == c"f":
        fail(m, SchemaError, f"expected a payload that can be cast, got floating numbers of {view.item_nbytes} bytes each")
    count_payload(m, nbytes)
    write_head(m, view, m.payload.target if to_cast else view.dtype, numpy_named)
    inline = (nbytes < m.threshold or view.ndim == 0 and numpy_named) and not view.moved
    if inline:
        return write_inline(m, obj, plan, view, nbytes, to_cast)
    if m.oob_tensor_consumer is not None and plan.producer.family == FAMILY_EXCHANGE:
        if write_out_of_band(m, obj, plan, view, to_cast):
            return 0
    if to_cast:
        index = cast_leaf(m, obj, plan, view, -1)
    else:
        index = payload_frame(m.payload, plan.producer, <PyObject*>obj, view)
    if index > m.max_frames:
        fail(m, LimitError, f"expected at most {m.max_frames} aux frames (max_frames)")
    need(m, FMM_WRITE_MAX_NBYTES)
    m.size = fmm_write_uint(m.data + m.size, index) - m.data
    return 0


cdef int check_bytes(Message m, object obj) except -1:
    """DLPack calls torch's int4 and its like int8, too, for that is what lies in memory."""
    global known_bytes
    dtype = getattr(obj, "dtype", None)
    if dtype is known_bytes and dtype is not None:
        return 0
    name = str(dtype)
    if not name.startswith("torch."):  # another producer's, who says int8 and means it
        return 0
    if name not in ("torch.int8", "torch.uint8"):
        fail(m, SchemaError, f"expected a tensor of a type that the wire knows, got one of {dtype}")
    known_bytes = dtype
    return 0


cdef object ids_of(Message m, object obj, Plan plan):
    cdef TensorView view
    cdef object _held = obj
    cdef int ndim, number_class
    try:
        tensor_view(plan.producer, <PyObject*>obj, &view)
    except FastmmError as error:
        raise at_path(m, error)
    ndim = view.ndim
    number_class = fmm_dtype_infos[view.dtype].number_class if view.dtype != FMM_DTYPE_NONE else FMM_CLASS_FLOAT
    tensor_view_clear(&view)
    if ndim != 1 or number_class not in (FMM_CLASS_INT, FMM_CLASS_UINT):
        fail(m, SchemaError, f"expected token ids in one dimension of integers, got a {type(obj).__qualname__} of {ndim} "
                             f"dimensions and dtype {getattr(obj, 'dtype', 'unknown')}")
    try:
        return obj.tolist() if hasattr(obj, "tolist") else obj.numpy().tolist()
    except Exception as error:
        foreign(m, error, f"reading a {type(obj).__qualname__}")


cdef int count_payload(Message m, int64_t nbytes) except -1:
    if nbytes > m.max_payload_nbytes - m.payload_nbytes:
        fail(m, LimitError, f"expected at most {m.max_payload_nbytes} bytes of payload (max_payload_nbytes), got "
                            f"{m.payload_nbytes} before this tensor and {nbytes} in it")
    m.payload_nbytes += nbytes
    return 0


cdef int write_head(Message m, TensorView* view, int dtype, bint numpy_named) except -1:
    """The array's header, the name of the type, the shape."""
    cdef char name[24]
    cdef int name_nbytes, axis
    need(m, 64 + view.ndim * FMM_WRITE_MAX_NBYTES)
    m.size = fmm_write_array_header(m.data + m.size, 3) - m.data
    if numpy_named:
        name_nbytes = numpy_name(view, name)
        m.size = fmm_write_str_header(m.data + m.size, name_nbytes) - m.data
        fmm_copy_short(m.data + m.size, <const uint8_t*>name, name_nbytes)
    else:
        name_nbytes = fmm_dtype_infos[dtype].name_nbytes
        m.size = fmm_write_str_header(m.data + m.size, name_nbytes) - m.data
        fmm_copy_short(m.data + m.size, <const uint8_t*>fmm_dtype_infos[dtype].name, name_nbytes)
    m.size += name_nbytes
    m.size = fmm_write_array_header(m.data + m.size, view.ndim) - m.data
    for axis in range(view.ndim):
        m.size = fmm_write_uint(m.data + m.size, view.shape[axis]) - m.data
    return 0


cdef int write_inline(Message m, object obj, Plan plan, TensorView* view, int64_t nbytes, bint to_cast) except -1:
    if nbytes > <int64_t>UINT32_MAX:
        fail(m, EncodeError, f"expected less than 4 GiB inline, got {nbytes} bytes: lower the threshold")
    need(m, FMM_WRITE_MAX_NBYTES + nbytes)
    m.size = fmm_write_ext_header(m.data + m.size, EXT_RAW_VIEW, <uint32_t>nbytes) - m.data
    if to_cast:
        cast_leaf(m, obj, plan, view, m.size)
    else:
        tensor_gather(view, m.data + m.size)
        payload_note(m.payload, view)
        m.payload.nbytes_copied += nbytes
    m.size += nbytes
    return 0


cdef int cast_leaf(Message m, object obj, Plan plan, TensorView* view, Py_ssize_t offset) except -1:
    """Plans the cast of a leaf; says where in the tree it hangs, so that the new leaf can take its place."""
    cdef Part* part
    cdef Plan holder
    cdef object attributes, name
    cdef Slot slot
    slot.kind = SLOT_NONE
    slot.container = <PyObject*>None
    slot.key = NULL
    slot.index = 0
    if m.depth:
        part = &m.path[m.depth - 1]
        if part.kind == PART_FIELD:
            holder = <Plan>part.plan
            name = holder.names[part.index]
            slot.key = <PyObject*>name
            slot.index = holder.fields[part.index].offset
            if not holder.in_dict:
                slot.kind = SLOT_OFFSET
                slot.container = part.container
            elif name not in holder.properties:
                attributes = PyObject_GenericGetDict(<object>part.container, NULL)
                slot.kind = SLOT_KEY
                slot.container = <PyObject*>attributes
        elif part.kind == PART_ITEM:
            slot.kind = SLOT_ITEM
            slot.container = part.container
            slot.index = part.index
    return payload_cast(m.payload, plan.producer, <PyObject*>obj, view, &slot, offset)


cdef bint write_out_of_band(Message m, object obj, Plan plan, TensorView* view, bint to_cast) except -1:
    """Offers the tensor to the consumer; True when it took it.  The head is written: the tensor must stay as it is."""
    cdef int64_t shape[MAX_NDIM]
    cdef int ndim = view.ndim, dtype = view.dtype
    memcpy(shape, view.shape, ndim * sizeof(int64_t))
    offered = cast_tensor(obj, (<bytes>fmm_dtype_infos[m.payload.target].name).decode()) if to_cast else obj
    try:
        answer = m.oob_tensor_consumer(offered)
    except Exception as error:
        foreign(m, error, "the out-of-band consumer")
    tensor_view_clear(view)  # whatever the consumer did with it: look again
    tensor_view(plan.producer, <PyObject*>obj, view)
    if view.ndim != ndim or view.dtype != dtype or memcmp(view.shape, shape, ndim * sizeof(int64_t)):
        fail(m, EncodeError, "expected a tensor that stays as it is, got one that the out-of-band consumer changed")
    if answer is None:
        return False
    if type(answer) is not dict:
        fail(m, SchemaError, f"expected a dict or None from the out-of-band consumer, got a {type(answer).__qualname__}")
    try:
        append(m, msgpack.packb(answer))
    except (TypeError, ValueError, OverflowError) as error:
        fail(m, SchemaError, f"expected plain values in the dict of the out-of-band consumer ({error})")
    return True

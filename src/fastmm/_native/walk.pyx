"""The walk: a tree of objects becomes the main frame and a list of aux frames, in one pass.

``write_value`` looks at the type of an object and writes it; containers call it for what they hold.  What kind of object it
is, and where its fields lie, is asked once per type (plan.pyx).  Tensors go to payload.pyx, which decides about frames and
casts.  The path to the current object is kept in ``Message.path`` and read only when an error needs it.
"""

import operator
from collections import UserDict

import msgpack

from cpython.dict cimport PyDict_GetItem, PyDict_Next, PyDict_Size
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyTypeObject, Py_TYPE
from cpython.ref cimport PyObject
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport int64_t, int8_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memmove, memset

from fastmm.errors import EncodeError, FastmmError, LimitError, SchemaError

from .cast cimport selected_table
from .payload cimport (
    SLOT_ATTRIBUTE, SLOT_ITEM, SLOT_KEY, SLOT_NONE, SLOT_OFFSET, Payload, Slot,
    payload_cast, payload_clear, payload_finish, payload_frame, payload_note, payload_start,
)
from .plan cimport (
    DEFAULT_EMPTY, DEFAULT_IDENTICAL, KIND_BOOL, KIND_BYTES, KIND_CONVERT, KIND_DICT, KIND_EXT, KIND_FLOAT, KIND_INT,
    KIND_LIST, KIND_MAPPING, KIND_NONE, KIND_RAW, KIND_SET, KIND_SLICE, KIND_STR, KIND_STRUCT, KIND_TENSOR, KIND_TUPLE,
    Field, Plan, plan_of, unset_object,
)
from .pool cimport Block, block_acquire, block_grow
from .tensor cimport FAMILY_EXCHANGE, TensorView, numpy_name, tensor_gather, tensor_view, tensor_view_clear

cdef extern from "fastmm/msgpack_write.h" nogil:
    cdef enum:
        FMM_WRITE_MAX_NBYTES
    uint8_t* fmm_write_nil(uint8_t* p)
    uint8_t* fmm_write_bool(uint8_t* p, int value)
    uint8_t* fmm_write_int(uint8_t* p, int64_t value)
    uint8_t* fmm_write_uint(uint8_t* p, uint64_t value)
    uint8_t* fmm_write_float(uint8_t* p, double value)
    uint8_t* fmm_write_str_header(uint8_t* p, uint32_t nbytes)
    uint8_t* fmm_write_bin_header(uint8_t* p, uint32_t nbytes)
    uint8_t* fmm_write_array_header(uint8_t* p, uint32_t nelem)
    uint8_t* fmm_write_map_header(uint8_t* p, uint32_t nelem)
    uint8_t* fmm_write_ext_header(uint8_t* p, int8_t code, uint32_t nbytes)
    uint8_t* fmm_write_be16(uint8_t* p, unsigned short value)

cdef extern from "fastmm/pack_ids.h" nogil:
    cdef enum:
        FMM_PACK_ID_MAX_NBYTES
        FMM_PACK_IDS_SLACK_NBYTES
    ctypedef uint8_t* (*fmm_pack_ids_fn_t)(uint8_t* p, const uint32_t* ids, size_t nelem)
    fmm_pack_ids_fn_t fmm_pack_ids_best(const char* isa)

cdef extern from "c/pylong_ids.h":
    bint fmm_gather_ids(PyObject** items, Py_ssize_t nelem, uint32_t* ids)
    bint fmm_pylong_small(object item, int64_t* value)

cdef extern from "fastmm/dtype.h" nogil:
    cdef enum:
        FMM_DTYPE_NONE
        FMM_CLASS_FLOAT
    ctypedef struct fmm_dtype_info_t:
        const char* name
        uint8_t name_nbytes
        uint8_t item_nbytes
        uint8_t number_class
    const fmm_dtype_info_t fmm_dtype_infos[1]

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object, Py_ssize_t*)
    void PyErr_Clear()
    double PyFloat_AS_DOUBLE(object)
    long long PyLong_AsLongLongAndOverflow(object, int*) except? -1
    unsigned long long PyLong_AsUnsignedLongLong(object) except? <unsigned long long>-1
    object PyObject_GenericGetDict(object, void*)
    ctypedef struct PySliceObject:
        PyObject* start
        PyObject* stop
        PyObject* step
    ctypedef struct PyListObject:
        PyObject** ob_item

cdef enum:
    MODE_TENSOR = 1  # the engine holds a torch tensor here: numpy arrays are named as torch names them
    MODE_PAYLOAD = 2  # floating tensors are cast to the target dtype
    IDS_CHUNK = 128
    EXT_RAW_VIEW = 3  # vLLM's ext code of inline tensor data; 1 and 2 are its pickles
    UINT32_MAX_ = 0xffffffff

cdef fmm_pack_ids_fn_t pack_ids = NULL


cdef class Message:
    def __init__(self):
        raise TypeError("a Message belongs to an encoder")

    def __dealloc__(self):
        free(self.path)


cdef Message message_new(Payload payload, int64_t threshold, int max_depth, Py_ssize_t max_frames,
                         int64_t max_payload_nbytes, object hook, object oob_tensor_consumer):
    global pack_ids
    cdef Message m = Message.__new__(Message)
    if pack_ids is NULL:
        pack_ids = fmm_pack_ids_best(selected_table().name)
    m.payload = payload
    m.threshold = threshold
    m.max_depth = max_depth
    m.max_frames = max_frames
    m.max_payload_nbytes = max_payload_nbytes
    m.hook = hook
    m.oob_tensor_consumer = oob_tensor_consumer
    m.held = []
    m.path = <Part*>calloc(max_depth, sizeof(Part))
    if m.path is NULL:
        raise MemoryError()
    return m


cdef int message_write(Message m, object obj) except -1:
    if m.block is None:
        m.block = block_acquire(4096)
        m.data = m.block.data
        m.room = m.block.capacity
    m.frames = [None]
    m.size = 0
    m.depth = 0
    m.payload_nbytes = 0
    m.features_nbytes = 0
    m.from_hook = False
    if m.memo_used:
        memset(m.memo, 0, sizeof(m.memo))
        m.memo_used = False
    payload_start(m.payload, m.frames)
    write_value(m, obj, 0)
    try:
        payload_finish(m.payload, m.data)
    except FastmmError as error:
        m.depth = 0
        raise at_path(m, error)
    return 0


cdef int message_clear(Message m) except -1:
    m.frames = None
    if m.held:
        m.held.clear()
    return payload_clear(m.payload)


# --- errors and room ----------------------------------------------------------------------------------------------------


cdef str path_of(Message m):
    """`$.mm_features[3].data['pixel_values'].data[0]`, as far as the walk has come."""
    cdef Part* part
    cdef int i
    parts = ["$"]
    for i in range(m.depth):
        part = &m.path[i]
        if part.kind == PART_FIELD:
            parts.append("." + <str><object>(<Plan>part.plan).fields[part.index].name)
        elif part.kind == PART_ITEM or part.kind == PART_FIXED:
            parts.append(f"[{part.index}]")
        elif part.kind == PART_KEY:
            parts.append(f"[{repr(<object>part.key)[:64]}]")
    return "".join(parts)


cdef object at_path(Message m, object error):
    if error.path is None:
        error.path = path_of(m)
    return error


cdef int fail(Message m, object cls, str message) except -1:
    raise cls(message, path=path_of(m))


cdef inline int need(Message m, size_t nbytes) except -1:
    if m.room - m.size < nbytes:
        return make_room(m, nbytes)
    return 0


cdef int make_room(Message m, size_t nbytes) except -1:
    block_grow(m.block, m.size, max(m.size + nbytes, 2 * m.room))
    m.data = m.block.data
    m.room = m.block.capacity
    return 0


cdef inline Part* enter(Message m, PartKind kind, object container) except NULL:
    """Goes one level down.  Whoever enters leaves by `m.depth -= 1`; an error leaves the depth for the path."""
    cdef Part* part
    if m.depth == m.max_depth:
        fail(m, LimitError, f"expected at most {m.max_depth} levels of nesting (max_depth)")
    part = &m.path[m.depth]
    part.kind = kind
    part.container = <PyObject*>container
    part.index = 0
    part.key = NULL
    m.depth += 1
    return part


# --- values -------------------------------------------------------------------------------------------------------------


cdef int write_value(Message m, object obj, int mode) except -1:
    cdef PyTypeObject* cls = Py_TYPE(obj)
    need(m, FMM_WRITE_MAX_NBYTES)
    if obj is None:
        m.size = fmm_write_nil(m.data + m.size) - m.data
        return 0
    if cls is <PyTypeObject*>str:
        return write_str(m, obj)
    if cls is <PyTypeObject*>int:
        return write_int(m, obj)
    if cls is <PyTypeObject*>float:
        m.size = fmm_write_float(m.data + m.size, PyFloat_AS_DOUBLE(obj)) - m.data
        return 0
    if cls is <PyTypeObject*>bool:
        m.size = fmm_write_bool(m.data + m.size, obj is True) - m.data
        return 0
    if cls is <PyTypeObject*>list:
        return write_list(m, obj, mode)
    return write_planned(m, obj, <Plan>plan_of(cls), mode)


cdef int write_planned(Message m, object obj, Plan plan, int mode) except -1:
    if plan.kind == KIND_STRUCT:
        return write_struct(m, obj, plan)
    if plan.kind == KIND_TENSOR:
        return write_tensor(m, obj, plan, mode)
    if plan.kind == KIND_DICT:
        return write_dict(m, obj)
    if plan.kind == KIND_MAPPING:
        return write_dict(m, obj.data if isinstance(obj, UserDict) and type(obj.data) is dict else dict(obj))
    if plan.kind == KIND_LIST:
        return write_list(m, obj, mode)
    if plan.kind == KIND_TUPLE:
        return write_tuple(m, obj, mode)
    if plan.kind == KIND_SLICE:
        return write_slice(m, obj)
    if plan.kind == KIND_SET:
        return write_tuple(m, tuple(obj), mode)
    if plan.kind == KIND_CONVERT:
        return write_converted(m, obj, plan, mode)
    if plan.kind == KIND_BYTES:
        return write_bytes(m, obj)
    if plan.kind == KIND_EXT:
        return write_ext(m, obj)
    if plan.kind == KIND_RAW:
        return append(m, memoryview(obj))
    return write_hooked(m, obj, mode)


cdef int write_int(Message m, object obj) except -1:
    cdef int64_t value
    cdef int overflow = 0
    if not fmm_pylong_small(obj, &value):
        value = PyLong_AsLongLongAndOverflow(obj, &overflow)
        if overflow > 0:
            try:
                m.size = fmm_write_uint(m.data + m.size, PyLong_AsUnsignedLongLong(obj)) - m.data
                return 0
            except OverflowError:
                pass
        if overflow:
            fail(m, EncodeError, "expected an integer from -2**63 to 2**64 - 1, got one that does not fit")
    m.size = fmm_write_int(m.data + m.size, value) - m.data
    return 0


cdef int write_str(Message m, object obj) except -1:
    cdef Py_ssize_t nbytes = 0
    cdef const char* text = PyUnicode_AsUTF8AndSize(obj, &nbytes)
    if text is NULL:
        PyErr_Clear()
        fail(m, EncodeError, "expected a string of valid Unicode, got one with a lone surrogate")
    if nbytes > UINT32_MAX_:
        fail(m, EncodeError, f"expected a string of less than 4 GiB, got {nbytes} bytes")
    need(m, FMM_WRITE_MAX_NBYTES + nbytes)
    m.size = fmm_write_str_header(m.data + m.size, <uint32_t>nbytes) - m.data
    memcpy(m.data + m.size, text, nbytes)
    m.size += nbytes
    return 0


cdef int append(Message m, const uint8_t[::1] data) except -1:
    need(m, data.shape[0])
    if data.shape[0]:
        memcpy(m.data + m.size, &data[0], data.shape[0])
        m.size += data.shape[0]
    return 0


cdef int write_bytes(Message m, object obj) except -1:
    cdef object view = memoryview(obj)
    if not view.c_contiguous:
        fail(m, EncodeError, "expected a contiguous buffer, got a strided memoryview: take bytes() of it")
    if view.nbytes > UINT32_MAX_:
        fail(m, EncodeError, f"expected a buffer of less than 4 GiB, got {view.nbytes} bytes")
    need(m, FMM_WRITE_MAX_NBYTES)
    m.size = fmm_write_bin_header(m.data + m.size, view.nbytes) - m.data
    return append(m, view.cast("B")) if view.nbytes else 0


cdef int write_ext(Message m, object obj) except -1:
    cdef object data
    cdef int code
    if type(obj) is msgpack.Timestamp:
        code, data = -1, memoryview(obj.to_bytes())
    else:
        code, data = obj.code, memoryview(obj.data)
    if code in (1, 2) and not m.from_hook:
        fail(m, SchemaError, f"expected no pickles, got an extension of type {code}, which vLLM would unpickle")
    if data.nbytes > UINT32_MAX_:
        fail(m, EncodeError, f"expected an extension of less than 4 GiB, got {data.nbytes} bytes")
    need(m, FMM_WRITE_MAX_NBYTES)
    m.size = fmm_write_ext_header(m.data + m.size, code, data.nbytes) - m.data
    return append(m, data.cast("B")) if data.nbytes else 0


cdef int write_slice(Message m, object obj) except -1:
    """`[start, stop, step]`, each an int or nil."""
    cdef PySliceObject* bounds = <PySliceObject*><PyObject*>obj
    need(m, 1 + 3 * FMM_WRITE_MAX_NBYTES)
    m.size = fmm_write_array_header(m.data + m.size, 3) - m.data
    write_bound(m, <object>bounds.start)
    write_bound(m, <object>bounds.stop)
    write_bound(m, <object>bounds.step)
    return 0


cdef inline int write_bound(Message m, object bound) except -1:
    cdef int64_t value
    if bound is None:
        m.size = fmm_write_nil(m.data + m.size) - m.data
        return 0
    if type(bound) is int and fmm_pylong_small(bound, &value):
        m.size = fmm_write_int(m.data + m.size, value) - m.data
        return 0
    try:
        bound = int(operator.index(bound))  # numpy integers and tensors of one integer, as vLLM's flat_from_sizes leaves them
    except TypeError:
        fail(m, SchemaError, f"expected slice bounds that are integers or None, got a {type(bound).__qualname__}")
    return write_int(m, bound)


# --- containers ---------------------------------------------------------------------------------------------------------


cdef int write_list(Message m, object obj, int mode) except -1:
    cdef Py_ssize_t nelem = PyList_GET_SIZE(obj), i = 0, chunk, j
    cdef uint32_t ids[IDS_CHUNK]
    cdef Part* part
    if nelem > UINT32_MAX_:
        fail(m, EncodeError, f"expected a list of less than 2**32 items, got {nelem}")
    need(m, FMM_WRITE_MAX_NBYTES)
    m.size = fmm_write_array_header(m.data + m.size, <uint32_t>nelem) - m.data
    part = enter(m, PART_ITEM, obj)
    while i < nelem:
        chunk = min(nelem - i, IDS_CHUNK)
        # Token ids: plain small ints are read without a call each, and packed many at a time.
        if Py_TYPE(<object>PyList_GET_ITEM(obj, i)) is <PyTypeObject*>int and chunk > 3 and fmm_gather_ids(
                (<PyListObject*><PyObject*>obj).ob_item + i, chunk, ids):
            need(m, chunk * FMM_PACK_ID_MAX_NBYTES + FMM_PACK_IDS_SLACK_NBYTES)
            m.size = pack_ids(m.data + m.size, ids, chunk) - m.data
            i += chunk
            continue
        for j in range(i, i + chunk):
            if PyList_GET_SIZE(obj) != nelem:
                fail(m, EncodeError, "expected a list that stays as it is, got one that changed while it was encoded")
            part.index = j
            write_value(m, <object>PyList_GET_ITEM(obj, j), mode)
        i += chunk
    m.depth -= 1
    return 0


cdef int write_tuple(Message m, tuple obj, int mode) except -1:
    cdef Py_ssize_t nelem = PyTuple_GET_SIZE(obj), i
    cdef Part* part
    if nelem > UINT32_MAX_:
        fail(m, EncodeError, f"expected a sequence of less than 2**32 items, got {nelem}")
    need(m, FMM_WRITE_MAX_NBYTES)
    m.size = fmm_write_array_header(m.data + m.size, <uint32_t>nelem) - m.data
    part = enter(m, PART_FIXED, obj)
    for i in range(nelem):
        part.index = i
        write_value(m, <object>PyTuple_GET_ITEM(obj, i), mode)
    m.depth -= 1
    return 0


cdef int write_dict(Message m, object obj) except -1:
    cdef Py_ssize_t nelem = PyDict_Size(obj), position = 0, count = 0
    cdef PyObject* key_pointer = NULL
    cdef PyObject* value_pointer = NULL
    cdef object key, value
    cdef Part* part
    if nelem > UINT32_MAX_:
        fail(m, EncodeError, f"expected a mapping of less than 2**32 items, got {nelem}")
    need(m, FMM_WRITE_MAX_NBYTES)
    m.size = fmm_write_map_header(m.data + m.size, <uint32_t>nelem) - m.data
    part = enter(m, PART_KEY, obj)
    while PyDict_Next(obj, &position, &key_pointer, &value_pointer):
        key, value = <object>key_pointer, <object>value_pointer  # held: a value's own code may change the dict
        part.key = <PyObject*>key
        if isinstance(key, str):
            need(m, FMM_WRITE_MAX_NBYTES)
            write_str(m, key)
        else:
            write_value(m, key, 0)
        write_value(m, value, 0)
        count += 1
    if count != nelem or PyDict_Size(obj) != nelem:
        part.key = <PyObject*>None
        fail(m, EncodeError, "expected a mapping that stays as it is, got one that changed while it was encoded")
    m.depth -= 1
    return 0


cdef int write_converted(Message m, object obj, Plan plan, int mode) except -1:
    enter(m, PART_HOOK, obj)
    try:
        value = plan.convert(obj)
    except FastmmError as error:
        raise at_path(m, error)
    write_value(m, value, mode)
    m.depth -= 1
    return 0


cdef int write_hooked(Message m, object obj, int mode) except -1:
    cdef bint outer = m.from_hook
    cls = type(obj)
    if m.hook is None:
        fail(m, SchemaError, f"expected a value that the wire knows, got a {cls.__module__}.{cls.__qualname__}: convert it "
                             "before, or give a hook that does")
    enter(m, PART_HOOK, obj)
    try:
        value = m.hook(obj)
    except FastmmError as error:
        raise at_path(m, error)
    except Exception as error:
        raise EncodeError(f"the hook failed on a {cls.__module__}.{cls.__qualname__}: {type(error).__name__}",
                          path=path_of(m)) from error
    m.from_hook = True
    write_value(m, value, mode)
    m.from_hook = outer
    m.depth -= 1
    return 0


# --- structs ------------------------------------------------------------------------------------------------------------


cdef inline void put_key(Message m, const Field* field) noexcept:
    """Copies 16 bytes at a time: `keys` ends in padding, and the caller made room."""
    cdef uint8_t* p = m.data + m.size
    memcpy(p, field.key, 16)
    if field.key_nbytes > 16:
        memcpy(p + 16, field.key + 16, field.key_nbytes - 16)
    m.size += field.key_nbytes


cdef int write_struct(Message m, object obj, Plan plan) except -1:
    cdef Memo* memo = NULL
    cdef size_t start = m.size
    if plan.memo:
        memo = &m.memo[(<uintptr_t><PyObject*>obj >> 4) % MEMO_SIZE]
        if memo.obj is <PyObject*>obj:
            need(m, memo.nbytes)
            memcpy(m.data + m.size, m.data + memo.offset, memo.nbytes)
            m.size += memo.nbytes
            return 0
    if plan.as_array:
        write_array_fields(m, obj, plan)
    else:
        write_map_fields(m, obj, plan)
    if memo is not NULL:
        memo.obj = <PyObject*>obj
        memo.offset = start
        memo.nbytes = m.size - start
        m.memo_used = True
    return 0


cdef inline int mode_of(const Field* field) noexcept:
    return MODE_TENSOR * field.tensor | MODE_PAYLOAD * field.payload


cdef int write_array_fields(Message m, object obj, Plan plan) except -1:
    cdef Part* part = enter(m, PART_FIELD, obj)
    cdef const Field* field
    cdef PyObject* value
    cdef int i
    part.plan = <PyObject*>plan
    need(m, FMM_WRITE_MAX_NBYTES + len(plan.head) + plan.nfields)
    m.size = fmm_write_array_header(m.data + m.size, plan.nfields + plan.head_nelem) - m.data
    if plan.head_nelem:
        append(m, plan.head)
    for i in range(plan.nfields):
        field = &plan.fields[i]
        value = (<PyObject**>(<char*><PyObject*>obj + field.offset))[0]
        part.index = i
        if value is <PyObject*>None:
            need(m, 1)
            m.data[m.size] = 0xc0
            m.size += 1
        elif value is NULL:
            fail(m, SchemaError, "expected a value, got a field that is not set")
        elif field.features:
            write_features(m, <object>value)
        else:
            write_value(m, <object>value, mode_of(field))
    m.depth -= 1
    return 0


cdef int write_map_fields(Message m, object obj, Plan plan) except -1:
    cdef Part* part = enter(m, PART_FIELD, obj)
    cdef const Field* field
    cdef PyObject* value
    cdef object attributes = None
    cdef PyObject* name = NULL
    cdef Py_ssize_t position = 0, before
    cdef size_t header
    cdef int i, count = plan.head_nelem
    part.plan = <PyObject*>plan
    need(m, FMM_WRITE_MAX_NBYTES + len(plan.head))
    if plan.wrapped:
        append(m, plan.head)
    header = m.size
    m.size = fmm_write_map_header(m.data + header, plan.nfields + plan.head_nelem) - m.data
    if plan.head_nelem:
        append(m, plan.head)
    if plan.in_dict:
        attributes = PyObject_GenericGetDict(obj, NULL)
    for i in range(plan.nfields):
        field = &plan.fields[i]
        if not plan.in_dict:
            value = (<PyObject**>(<char*><PyObject*>obj + field.offset))[0]
        else:
            before = position  # attributes lie in the dict in the order of the fields, as a rule
            if not (PyDict_Next(attributes, &position, &name, &value) and name is field.name):
                position = before
                value = PyDict_GetItem(attributes, <object>field.name)
        part.index = i
        if value is NULL:
            value = missing_value(m, obj, plan, <object>field.name)
            if value is NULL:
                continue
        if plan.may_omit:
            if value is unset_object and unset_object is not NULL:
                continue
            if field.default == DEFAULT_IDENTICAL:
                if value is field.default_value:
                    continue
            elif field.default == DEFAULT_EMPTY:
                if <PyObject*>Py_TYPE(<object>value) is field.default_value and not <object>value:
                    continue
        count += 1
        need(m, field.key_nbytes + 32)
        put_key(m, field)
        if value is <PyObject*>None:
            m.data[m.size] = 0xc0
            m.size += 1
        elif field.features:
            write_features(m, <object>value)
        else:
            write_value(m, <object>value, mode_of(field))
    if plan.may_omit:
        put_count(m, plan, header, count)
    m.depth -= 1
    return 0


cdef PyObject* missing_value(Message m, object obj, Plan plan, object name) except? NULL:
    """A field without a value: left out of a dataclass's map, an error elsewhere; a property is asked."""
    if not plan.missing_ok:
        fail(m, SchemaError, "expected a value, got a field that is not set")
    if name in plan.properties:
        value = getattr(obj, name, m)
        if value is not m:
            m.held.append(value)  # nobody else may hold it
            return <PyObject*>value
    return NULL


cdef int put_count(Message m, Plan plan, size_t header, int count) except -1:
    """The number of fields really written, into a header that was made for all of them."""
    cdef int declared = plan.nfields + plan.head_nelem
    if declared < 16:
        m.data[header] = 0x80 | count
    elif count > 15 or plan.wide_header:
        fmm_write_be16(m.data + header + 1, count)
    else:
        memmove(m.data + header + 1, m.data + header + 3, m.size - header - 3)
        m.data[header] = 0x80 | count
        m.size -= 2
    return 0


cdef int write_features(Message m, object features) except -1:
    """The features of a request.  A sibling of the last request, with the very same list, copies what that one wrote."""
    cdef Py_ssize_t first = PyList_GET_SIZE(m.frames)
    if features is m.shared_features and first == 1:
        append(m, m.shared_bytes)
        m.frames.extend(m.shared_frames)
        return 0
    cdef size_t offset = m.size
    write_value(m, features, 0)
    m.features_offset = offset
    m.features_nbytes = m.size - offset
    m.features_first = first
    m.features_nframes = PyList_GET_SIZE(m.frames) - first
    return 0


# --- tensors ------------------------------------------------------------------------------------------------------------


cdef int write_tensor(Message m, object obj, Plan plan, int mode) except -1:
    """`[dtype, shape, data]`; data is inline, an aux index, or what an out-of-band consumer says."""
    cdef TensorView view
    cdef bint viewed = False
    try:
        tensor_view(plan.producer, <PyObject*>obj, &view)
        viewed = True
        write_view(m, obj, plan, &view, mode)
    except FastmmError as error:
        raise at_path(m, error)
    finally:
        if viewed:
            tensor_view_clear(&view)
    return 0


cdef int write_view(Message m, object obj, Plan plan, TensorView* view, int mode) except -1:
    cdef char name[24]
    cdef int name_nbytes, axis, index
    cdef int64_t nbytes = view.nbytes
    cdef int dtype = view.dtype
    cdef bint numpy_named = view.numpy_style and not (mode & MODE_TENSOR and dtype != FMM_DTYPE_NONE and not view.swapped)
    cdef bint cast = (
        mode & MODE_PAYLOAD and m.payload.target >= 0 and dtype != FMM_DTYPE_NONE
        and fmm_dtype_infos[dtype].number_class == FMM_CLASS_FLOAT and (dtype != m.payload.target or view.swapped))
    cdef bint inline
    if cast:
        dtype = m.payload.target
        nbytes = view.nelem * m.payload.target_nbytes
        numpy_named = False
    if nbytes > m.max_payload_nbytes - m.payload_nbytes:
        fail(m, LimitError, f"expected at most {m.max_payload_nbytes} bytes of payload (max_payload_nbytes), got "
                            f"{m.payload_nbytes} before this tensor and {nbytes} in it")
    m.payload_nbytes += nbytes
    need(m, 64 + view.ndim * FMM_WRITE_MAX_NBYTES)
    m.size = fmm_write_array_header(m.data + m.size, 3) - m.data
    if numpy_named:
        name_nbytes = numpy_name(<PyObject*>obj if view.holder is NULL else view.holder, view, name)
        m.size = fmm_write_str_header(m.data + m.size, name_nbytes) - m.data
        memcpy(m.data + m.size, name, name_nbytes)
    else:
        name_nbytes = fmm_dtype_infos[dtype].name_nbytes
        m.size = fmm_write_str_header(m.data + m.size, name_nbytes) - m.data
        memcpy(m.data + m.size, fmm_dtype_infos[dtype].name, name_nbytes)
    m.size += name_nbytes
    m.size = fmm_write_array_header(m.data + m.size, view.ndim) - m.data
    for axis in range(view.ndim):
        m.size = fmm_write_uint(m.data + m.size, view.shape[axis]) - m.data

    inline = (nbytes < m.threshold or view.ndim == 0 and numpy_named) and not view.moved
    if not inline and m.oob_tensor_consumer is not None and plan.producer.family == FAMILY_EXCHANGE:
        if write_out_of_band(m, obj, cast):
            return 0
        tensor_view_clear(view)  # the consumer ran: look again
        tensor_view(plan.producer, <PyObject*>obj, view)
    if inline:
        return write_inline(m, obj, plan, view, nbytes, cast)
    if PyList_GET_SIZE(m.frames) > m.max_frames:
        fail(m, LimitError, f"expected at most {m.max_frames} aux frames (max_frames)")
    if cast:
        index = cast_leaf(m, obj, plan, view, -1)
    else:
        index = payload_frame(m.payload, plan.producer, <PyObject*>obj, view)
    need(m, FMM_WRITE_MAX_NBYTES)
    m.size = fmm_write_uint(m.data + m.size, index) - m.data
    return 0


cdef int write_inline(Message m, object obj, Plan plan, TensorView* view, int64_t nbytes, bint cast) except -1:
    if nbytes > UINT32_MAX_:
        fail(m, EncodeError, f"expected less than 4 GiB inline, got {nbytes} bytes: lower the threshold")
    need(m, FMM_WRITE_MAX_NBYTES + nbytes)
    m.size = fmm_write_ext_header(m.data + m.size, EXT_RAW_VIEW, <uint32_t>nbytes) - m.data
    if cast:
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
    cdef const Field* field
    cdef Slot slot
    slot.kind = SLOT_NONE
    slot.container = <PyObject*>None
    slot.key = NULL
    slot.index = 0
    if m.depth:
        part = &m.path[m.depth - 1]
        if part.kind == PART_FIELD:
            field = &(<Plan>part.plan).fields[part.index]
            slot.container = part.container
            slot.key = field.name
            slot.index = field.offset
            slot.kind = SLOT_ATTRIBUTE if (<Plan>part.plan).in_dict else SLOT_OFFSET
        elif part.kind == PART_ITEM:
            slot.kind = SLOT_ITEM
            slot.container = part.container
            slot.index = part.index
        elif part.kind == PART_KEY:
            slot.kind = SLOT_KEY
            slot.container = part.container
            slot.key = part.key
    return payload_cast(m.payload, plan.producer, <PyObject*>obj, view, &slot, offset)


cdef bint write_out_of_band(Message m, object obj, bint cast) except -1:
    """Offers the tensor to the consumer; True when it took it."""
    if cast:
        from . import cast as cast_module
        obj = cast_module.cast(obj, (<bytes>fmm_dtype_infos[m.payload.target].name).decode())
    try:
        answer = m.oob_tensor_consumer(obj)
    except FastmmError:
        raise
    except Exception as error:
        raise EncodeError(f"the out-of-band consumer failed: {type(error).__name__}", path=path_of(m)) from error
    if answer is None:
        return False
    if type(answer) is not dict:
        fail(m, SchemaError, f"expected a dict or None from the out-of-band consumer, got a {type(answer).__qualname__}")
    write_dict(m, answer)
    return True

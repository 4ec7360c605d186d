"""The walk: a tree of objects becomes the main frame and a list of aux frames, in one pass.

``write_value`` looks at the type of an object and writes it; containers call it for what they hold.  What kind of object it
is, and where its fields lie, is asked once per type (plan.pyx).  Tensors are leaf.pyx's business; which of them become
frames, and where they are cast, is payload.pyx's.
"""

from cpython.dict cimport PyDict_Next, PyDict_Size
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyTypeObject, Py_TYPE
from cpython.ref cimport PyObject
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from msgpack import Timestamp

from fastmm.errors import EncodeError, FastmmError, SchemaError
from fastmm.schema.profile import PROFILES

from .binary cimport write_bytes, write_ext, write_raw
from .cast cimport cpu_features, selected_table
from .leaf cimport count_payload, ids_of, write_tensor
from .message cimport (
    MEMO_SIZE, PART_FIELD, PART_FIXED, PART_HOOK, PART_ITEM, PART_KEY, Memo, Message, Part,
    append, at_path, enter, fail, foreign, leave, need, path_of,
)
from .payload cimport payload_finish, payload_next, payload_repeat, payload_start
from .plan cimport (
    FMM_MODE_FEATURES, FMM_MODE_FIELD, FMM_MODE_IDS, FMM_MODE_PAYLOAD, KIND_BYTES, KIND_CONVERT, KIND_DICT, KIND_EXT, KIND_LIST,
    KIND_MAPPING, KIND_NUMBER, KIND_RAW, KIND_SET, KIND_SLICE, KIND_STRUCT, KIND_TENSOR, KIND_TUPLE, KIND_UNKNOWN,
    KIND_UNSET, Plan, PlanEntry, buffer_plan, fmm_field_t, plan_entry, plan_find, plan_for_profile, unset_object,
)
from .pool cimport block_acquire
from .scalar cimport write_int, write_slice, write_str
from .tensor cimport FAMILY_NUMPY

cdef extern from "fastmm/msgpack_write.h" nogil:
    cdef enum:
        FMM_WRITE_MAX_NBYTES
    uint8_t* fmm_write_int(uint8_t* p, int64_t value)
    uint8_t* fmm_write_array_header(uint8_t* p, uint32_t nelem)
    uint8_t* fmm_write_map_header(uint8_t* p, uint32_t nelem)
    uint8_t* fmm_write_be16(uint8_t* p, unsigned short value)

cdef extern from "fastmm/pack_ids.h" nogil:
    cdef enum:
        FMM_PACK_ID_MAX_NBYTES
        FMM_PACK_IDS_SLACK_NBYTES
    ctypedef uint8_t* (*fmm_pack_ids_fn_t)(uint8_t* p, const uint32_t* ids, size_t nelem)
    fmm_pack_ids_fn_t fmm_pack_ids_best(const char* isa, uint64_t features)

cdef extern from "c/pyscalar.h":
    cdef enum:
        FMM_PUT_SCALAR_MAX_NBYTES
    Py_ssize_t fmm_gather_ids(PyObject** items, Py_ssize_t nelem, uint32_t* ids)
    bint fmm_pylong_small(object item, int64_t* value)
    uint8_t* fmm_put_scalar(uint8_t* p, PyObject* obj)
    cdef enum:
        FMM_PUT_FIELD_MAX_NBYTES
        FMM_PUT_SLICES_MAX_NBYTES
    uint8_t* fmm_put_key(uint8_t* p, const char* keys, const fmm_field_t* field)
    uint8_t* fmm_put_array_run(uint8_t* p, object obj, const fmm_field_t* fields, int nfields, int* index)
    uint8_t* fmm_put_map_run(uint8_t* p, object obj, const char* keys, const fmm_field_t* fields, int nfields, int* index,
                             int* count, PyObject* unset)
    uint8_t* fmm_put_attributes_run(
        uint8_t* p, object attributes, PyObject** names, const char* keys, const fmm_field_t* fields, int nfields,
        Py_ssize_t* position, int* index, int* count, PyObject* unset, PyObject** value)
    uint8_t* fmm_put_slices(uint8_t* p, PyObject** items, Py_ssize_t nelem, Py_ssize_t* index)
    PyObject* fmm_slot_value(object obj, const fmm_field_t* field)
    Py_ssize_t fmm_same_run(PyObject** items, Py_ssize_t nelem)
    uint8_t* fmm_repeat(uint8_t* p, size_t nbytes, size_t times)

cdef extern from "<stdint.h>" nogil:
    const uint64_t UINT32_MAX

cdef extern from "Python.h":
    object PyObject_GenericGetDict(object, void*)
    ctypedef struct PyListObject:
        PyObject** ob_item

cdef enum:
    IDS_CHUNK = 240  # token ids at a time; a multiple of what the kernel packs in a step
    SLICES_CHUNK = 32
    BLOCK_MIN_NBYTES = 32 << 10

cdef fmm_pack_ids_fn_t pack_ids = NULL


cdef int message_start(Message m) except -1:
    global pack_ids
    if pack_ids is NULL:
        pack_ids = fmm_pack_ids_best(selected_table().name, cpu_features())
    if m.block is None:
        m.block = block_acquire(BLOCK_MIN_NBYTES)
        m.data = m.block.data
        m.room = m.block.capacity
    m.size = 0
    m.from_hook = False
    payload_start(m.payload)
    return 0


cdef list message_walk(Message m, object obj):
    cdef int i
    m.frames = [None]
    m.payload_nbytes = 0
    if m.memo_used:
        for i in range(MEMO_SIZE):
            m.memo[i].obj = NULL
        m.memo_used = False
    if m.oob_tensor_consumer is not None:
        try:
            m.oob_tensor_consumer.new_message()
        except Exception as error:
            foreign(m, error, "the out-of-band consumer's new_message")
    payload_next(m.payload, m.frames)
    write_value(m, obj, 0)
    return m.frames


cdef int message_finish(Message m) except -1:
    if m.payload.njobs:
        try:
            payload_finish(m.payload, m.data)
        except FastmmError as error:
            raise at_path(m, error)
    return 0


# --- values -------------------------------------------------------------------------------------------------------------


cdef int write_value(Message m, object obj, int mode) except -1:
    cdef PyTypeObject* cls = Py_TYPE(obj)
    cdef uint8_t* after
    need(m, FMM_PUT_SCALAR_MAX_NBYTES)
    if mode & FMM_MODE_PAYLOAD:
        return write_payload(m, obj, mode)
    after = fmm_put_scalar(m.data + m.size, <PyObject*>obj)
    if after is not NULL:
        m.size = after - m.data
        return 0
    if cls is <PyTypeObject*>list:
        return write_list(m, obj, mode)
    if cls is <PyTypeObject*>str:
        return write_str(m, obj)
    if cls is <PyTypeObject*>int:
        return write_int(m, obj)
    return write_planned(m, obj, mode)


cdef int write_payload(Message m, object obj, int mode) except -1:
    """The data of a field element: what the engine's decoder takes there, and nothing else."""
    cdef object held = obj
    cdef Plan plan = plan_for(m, held)
    if plan.kind == KIND_NUMBER:
        return write_value(m, held, 0)
    if plan.kind == KIND_BYTES and not m.as_vllm:
        return write_tensor(m, held, buffer_plan, mode)
    if plan.kind not in (KIND_TENSOR, KIND_LIST, KIND_TUPLE, KIND_CONVERT, KIND_UNKNOWN) or m.as_vllm and (
            plan.kind == KIND_CONVERT or plan.ours_only or plan.kind == KIND_TENSOR and plan.producer.family == FAMILY_NUMPY):
        fail(m, SchemaError, f"expected a tensor, a number, or a list of these, got a {type(held).__qualname__}")
    return write_planned(m, held, mode)


cdef inline Plan plan_for(Message m, object obj):
    """The plan of an object's type.  Making one may run code of its metaclass: whoever asks holds the object."""
    cdef PlanEntry* entry = plan_entry(Py_TYPE(obj))
    return <Plan>entry.plan if entry.cls == Py_TYPE(obj) else plan_missed(m, obj)


cdef Plan plan_missed(Message m, object obj):
    try:
        return <Plan>plan_find(Py_TYPE(obj))
    except Exception as error:
        foreign(m, error, f"looking at the class of a {type_name(obj)}")


cdef int write_planned(Message m, object obj, int mode) except -1:
    cdef object _held = obj  # from here on its own code may run, and empty whatever holds it
    cdef Plan plan = plan_for(m, obj)
    if m.as_vllm and left_to_hook(m, obj, plan):
        return write_hooked(m, obj, mode)
    if plan.kind == KIND_STRUCT:
        return write_struct(m, obj, plan)
    if plan.kind == KIND_TENSOR:
        return write_tensor(m, obj, plan, mode)
    if plan.kind == KIND_DICT:
        return write_dict(m, obj)
    if plan.kind == KIND_MAPPING:
        return write_mapping(m, obj, plan)
    if plan.kind == KIND_LIST:
        return write_list(m, obj, mode)
    if plan.kind == KIND_TUPLE:
        return write_tuple(m, obj, mode)
    if plan.kind == KIND_SLICE:
        return write_slice(m, obj)
    if plan.kind == KIND_SET:
        return write_set(m, obj, mode)
    if plan.kind == KIND_CONVERT:
        return write_converted(m, obj, plan, mode)
    if plan.kind == KIND_BYTES:
        return write_bytes(m, obj)
    if plan.kind == KIND_EXT:
        return write_ext(m, obj)
    if plan.kind == KIND_RAW:
        return write_raw(m, obj)
    return write_hooked(m, obj, mode)


cdef bint left_to_hook(Message m, object obj, Plan plan) except -1:
    """Whether vLLM's own encoder would ask its hook, in which it may pickle: arrays of objects are such, too."""
    if plan.kind == KIND_TENSOR and plan.producer.family == FAMILY_NUMPY:
        return obj.dtype.kind in "OV"
    if plan.kind == KIND_UNKNOWN and hasattr(type(obj), "__attrs_attrs__"):
        fail(m, SchemaError, "expected a value that the wire knows, got an object of attrs")  # msgspec knows how
    return plan.ours_only


# --- containers ---------------------------------------------------------------------------------------------------------


cdef int write_list(Message m, object obj, int mode) except -1:
    cdef Py_ssize_t nelem = PyList_GET_SIZE(obj), i = 0
    cdef Part* part = NULL
    if nelem > <Py_ssize_t>UINT32_MAX:
        fail(m, EncodeError, f"expected a list of less than 2**32 items, got {nelem}")
    need(m, FMM_WRITE_MAX_NBYTES)
    m.size = fmm_write_array_header(m.data + m.size, <uint32_t>nelem) - m.data
    while i < nelem:
        write_run(m, obj, mode, nelem, &i)
        if i == nelem:
            break
        if part is NULL:
            part = enter(m, PART_ITEM, obj)
        part.index = i
        write_value(m, <object>PyList_GET_ITEM(obj, i), mode)
        i += 1
        if PyList_GET_SIZE(obj) != nelem:
            fail(m, EncodeError, "expected a list that stays as it is, got one that changed while it was encoded")
    if part is not NULL:
        leave(m)
    return 0


cdef inline int write_run(Message m, object obj, int mode, Py_ssize_t nelem, Py_ssize_t* index) except -1:
    """Writes the token ids, or the slices, that a list goes on with, many at a time.  Runs no Python code."""
    cdef PyObject** items = (<PyListObject*><PyObject*>obj).ob_item
    cdef PyTypeObject* cls = Py_TYPE(<object>items[index[0]])
    cdef uint32_t ids[IDS_CHUNK]
    cdef Py_ssize_t i = index[0], chunk, plain
    cdef int64_t value
    cdef uint8_t* p
    if cls is <PyTypeObject*>int:
        while nelem - i > 3 and Py_TYPE(<object>items[i]) is <PyTypeObject*>int:
            chunk = min(nelem - i, IDS_CHUNK)
            if (items[i] is items[i + chunk - 1] and items[i] is items[i + chunk // 2]
                    and fmm_pylong_small(<object>items[i], &value)):
                chunk = fmm_same_run(items + i, nelem - i)
                need(m, (chunk + 1) * FMM_WRITE_MAX_NBYTES)
                p = m.data + m.size
                m.size = fmm_write_int(p, value) - m.data
                m.size = fmm_repeat(p, m.data + m.size - p, chunk) - m.data
                i += chunk
                continue
            plain = fmm_gather_ids(items + i, chunk, ids)
            need(m, chunk * FMM_PACK_ID_MAX_NBYTES + FMM_PACK_IDS_SLACK_NBYTES)
            m.size = pack_ids(m.data + m.size, ids, plain) - m.data
            i += plain
            index[0] = i
            if plain == 0:
                break  # not a token id: the general way writes it, and comes back
        index[0] = i
    elif (cls is <PyTypeObject*>slice or cls is <PyTypeObject*>tuple) and not mode:
        while i < nelem:
            chunk = min(nelem - i, SLICES_CHUNK)
            need(m, chunk * FMM_PUT_SLICES_MAX_NBYTES)
            index[0] = 0
            m.size = fmm_put_slices(m.data + m.size, items + i, chunk, index) - m.data
            i += index[0]
            if index[0] < chunk:
                break
        index[0] = i
    return 0


cdef int write_tuple(Message m, object obj, int mode) except -1:
    cdef Py_ssize_t nelem = PyTuple_GET_SIZE(obj), i
    cdef Part* part
    if nelem > <Py_ssize_t>UINT32_MAX:
        fail(m, EncodeError, f"expected a sequence of less than 2**32 items, got {nelem}")
    need(m, FMM_WRITE_MAX_NBYTES)
    m.size = fmm_write_array_header(m.data + m.size, <uint32_t>nelem) - m.data
    part = enter(m, PART_FIXED, obj)
    for i in range(nelem):
        part.index = i
        write_value(m, <object>PyTuple_GET_ITEM(obj, i), mode)
    leave(m)
    return 0


cdef int write_set(Message m, object obj, int mode) except -1:
    try:
        items = tuple(obj)
    except Exception as error:
        foreign(m, error, f"iterating a {type(obj).__qualname__}")
    m.payload.held.append(items)
    return write_tuple(m, items, mode)


cdef int write_dict(Message m, object obj) except -1:
    cdef Py_ssize_t nelem = PyDict_Size(obj), position = 0, count = 0
    cdef PyObject* key_pointer = NULL
    cdef PyObject* value_pointer = NULL
    cdef object key, value
    cdef Part* part
    if nelem > <Py_ssize_t>UINT32_MAX:
        fail(m, EncodeError, f"expected a mapping of less than 2**32 items, got {nelem}")
    need(m, FMM_WRITE_MAX_NBYTES)
    m.size = fmm_write_map_header(m.data + m.size, <uint32_t>nelem) - m.data
    part = enter(m, PART_KEY, obj)
    while PyDict_Next(obj, &position, &key_pointer, &value_pointer):
        key, value = <object>key_pointer, <object>value_pointer  # held: a value's own code may change the dict
        part.key = <PyObject*>key
        if isinstance(key, str):
            write_str(m, key)
        else:
            write_value(m, key, 0)
        write_value(m, value, 0)
        count += 1
    if count != nelem or PyDict_Size(obj) != nelem:
        part.key = <PyObject*>None
        fail(m, EncodeError, "expected a mapping that stays as it is, got one that changed while it was encoded")
    leave(m)
    return 0


cdef int write_mapping(Message m, object obj, Plan plan) except -1:
    """Any mapping that is not a dict.  What it makes up is held: addresses stand for objects until the message is done."""
    try:
        if plan.user_dict:
            items = obj.data
            if type(items) is dict:
                return write_dict(m, items)
        items = dict(obj)
    except Exception as error:
        foreign(m, error, f"reading a {type(obj).__qualname__}")
    m.payload.held.append(items)
    return write_dict(m, items)


cdef int write_converted(Message m, object obj, Plan plan, int mode) except -1:
    """Enums, numpy scalars, dates: what their plan's function makes of them."""
    return write_made(m, obj, plan.convert, "converting", mode)


cdef int write_hooked(Message m, object obj, int mode) except -1:
    cdef bint outer = m.from_hook
    if m.hook is None:
        fail(m, SchemaError, f"expected a value that the wire knows, got a {type_name(obj)}: convert it before, or give a hook "
                             "that does")
    m.from_hook = True
    write_made(m, obj, m.hook, "the hook, given", mode)
    m.from_hook = outer
    return 0


cdef int write_made(Message m, object obj, object make, str verb, int mode) except -1:
    """What a function makes of an object is written in its place."""
    enter(m, PART_HOOK, obj)
    try:
        value = make(obj)
    except Exception as error:
        foreign(m, error, f"{verb} a {type_name(obj)},")
    m.payload.held.append(value)
    if make is not m.hook and type(value) is Timestamp:
        write_ext(m, value)  # a date's; one that somebody made himself is a matter for vLLM's hook
    else:
        write_value(m, value, mode)
    leave(m)
    return 0


cdef str type_name(object obj):
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


# --- structs ------------------------------------------------------------------------------------------------------------


cdef int write_struct(Message m, object obj, Plan plan) except -1:
    cdef Memo* memo = NULL
    cdef size_t start = m.size
    if m.profile >= 0 and plan.profiled is not None:
        return write_profiled(m, obj, plan_for_profile(plan, type(obj), m.profile))
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
        m.payload.held.append(obj)  # its address stands for it until the message is done
    return 0


cdef int write_profiled(Message m, object obj, Plan plan) except -1:
    """As the receiver's release has it.  What it lacks must not be asked for: it would be lost without a word."""
    for name, default in plan.surplus:
        value = getattr(obj, name, default)
        if value is not default and not (type(value) is type(default) and value == default):
            raise EncodeError(f"vLLM {PROFILES[m.profile].name} has no {name}: leave it at its default for this engine",
                              path=f"{path_of(m)}.{name}")
    if plan.kind == KIND_CONVERT:
        return write_converted(m, obj, plan, 0)
    return write_array_fields(m, obj, plan) if plan.as_array else write_map_fields(m, obj, plan)


cdef int write_array_fields(Message m, object obj, Plan plan) except -1:
    cdef Part* part = enter(m, PART_FIELD, obj)
    cdef PyObject* value
    cdef int i = 0
    part.plan = <PyObject*>plan
    need(m, FMM_WRITE_MAX_NBYTES)
    m.size = fmm_write_array_header(m.data + m.size, plan.nfields + plan.head_nelem) - m.data
    if plan.head_nelem:
        append(m, plan.head)
    while True:
        need(m, plan.nfields * FMM_PUT_FIELD_MAX_NBYTES)
        m.size = fmm_put_array_run(m.data + m.size, obj, plan.fields, plan.nfields, &i) - m.data
        if i == plan.nfields:
            break
        part.index = i
        value = fmm_slot_value(obj, &plan.fields[i])
        if value is NULL:
            fail(m, SchemaError, "expected a value, got a field that is not set")
        held = <object>value
        write_field(m, &plan.fields[i], held)
        i += 1
    leave(m)
    return 0


cdef inline int write_field(Message m, const fmm_field_t* field, object value) except -1:
    if field.mode & FMM_MODE_FEATURES:
        return write_features(m, value)
    if field.mode & FMM_MODE_FIELD and not plan_for(m, value).wrapped:
        fail(m, SchemaError, f"expected a batched, flat or shared field, got a {type(value).__qualname__}")
    if field.mode & FMM_MODE_IDS and plan_for(m, value).kind == KIND_TENSOR:
        return write_value(m, ids_of(m, value, plan_for(m, value)), 0)
    return write_value(m, value, field.mode)


cdef int write_map_fields(Message m, object obj, Plan plan) except -1:
    cdef Part* part = enter(m, PART_FIELD, obj)
    cdef size_t header
    cdef int count = plan.head_nelem
    part.plan = <PyObject*>plan
    need(m, FMM_WRITE_MAX_NBYTES)
    if plan.wrapped:
        append(m, plan.head)
        need(m, FMM_WRITE_MAX_NBYTES)
    header = m.size
    m.size = fmm_write_map_header(m.data + header, plan.nfields + plan.head_nelem) - m.data
    if plan.head_nelem:
        append(m, plan.head)
    if plan.in_dict:
        write_attributes(m, obj, plan, part, &count)
    else:
        write_slots(m, obj, plan, part, &count)
    if plan.may_omit:
        put_count(m, plan, header, count)
    leave(m)
    return 0


cdef int write_slots(Message m, object obj, Plan plan, Part* part, int* count) except -1:
    cdef int i = 0
    while True:
        need(m, plan.nfields * FMM_PUT_FIELD_MAX_NBYTES)
        m.size = fmm_put_map_run(
            m.data + m.size, obj, plan.keys, plan.fields, plan.nfields, &i, count, unset_object) - m.data
        if i == plan.nfields:
            return 0
        part.index = i
        write_pair(m, obj, plan, i, fmm_slot_value(obj, &plan.fields[i]), count)
        i += 1


cdef int write_attributes(Message m, object obj, Plan plan, Part* part, int* count) except -1:
    """Fields that live in the instance's dict."""
    cdef object attributes = {} if plan.dictless else PyObject_GenericGetDict(obj, NULL)
    cdef PyObject** names = (<PyListObject*><PyObject*>plan.names).ob_item
    cdef PyObject* value = NULL
    cdef Py_ssize_t position = 0
    cdef int i = 0
    while True:
        need(m, plan.nfields * FMM_PUT_FIELD_MAX_NBYTES)
        m.size = fmm_put_attributes_run(
            m.data + m.size, attributes, names, plan.keys, plan.fields, plan.nfields, &position, &i, count, unset_object,
            &value) - m.data
        if i == plan.nfields:
            return 0
        part.index = i
        write_pair(m, obj, plan, i, value, count)
        i += 1


cdef int write_pair(Message m, object obj, Plan plan, int index, PyObject* value, int* count) except -1:
    """One field of a map, the general way: it may be missing, unset, or anything."""
    cdef const fmm_field_t* field = &plan.fields[index]
    if value is NULL:
        value = missing_value(m, obj, plan, plan.names[index])
    if value is NULL:
        return 0
    held = <object>value
    if plan_for(m, held).kind == KIND_UNSET:
        return 0
    count[0] += 1
    need(m, field.key_nbytes + 16)
    m.size = fmm_put_key(m.data + m.size, plan.keys, field) - m.data
    return write_field(m, field, held)


cdef PyObject* missing_value(Message m, object obj, Plan plan, object name) except? NULL:
    """A field without a value: left out of a dataclass's map, an error elsewhere; a property is asked."""
    if not plan.missing_ok:
        fail(m, SchemaError, "expected a value, got a field that is not set")
    if name in plan.properties:
        try:
            value = getattr(obj, name, m)
        except Exception as error:
            foreign(m, error, f"the property {name}")
        if value is not m:
            m.payload.held.append(value)
            return <PyObject*>value
    return NULL


cdef void put_count(Message m, Plan plan, size_t header, int count) noexcept:
    """The number of fields really written, into a header that was made for all of them, as msgspec does it."""
    if plan.nfields + plan.head_nelem < 16:
        m.data[header] = 0x80 | count
    else:
        fmm_write_be16(m.data + header + 1, count)


cdef int write_features(Message m, object features) except -1:
    """The features of a request.  A sibling of the last request, with the very same list, copies what that one wrote."""
    cdef object _held = features
    cdef size_t offset = m.size
    if features is m.features and PyList_GET_SIZE(m.frames) == 1:
        count_payload(m, m.features_payload_nbytes)
        need(m, m.features_nbytes)
        memcpy(m.data + offset, m.data + m.features_offset, m.features_nbytes)
        m.size += m.features_nbytes
        m.frames.extend(m.features_frames[1:1 + m.features_nframes])
        payload_repeat(m.payload, m.features_first_job, m.features_last_job, offset - m.features_offset)
        return 0
    cdef int first_job = m.payload.njobs
    cdef int64_t payload_nbytes = m.payload_nbytes
    cdef bint first = PyList_GET_SIZE(m.frames) == 1
    write_value(m, features, 0)
    m.features = features if first else None  # indices of aux frames are part of the bytes
    m.features_offset = offset
    m.features_nbytes = m.size - offset
    m.features_payload_nbytes = m.payload_nbytes - payload_nbytes
    m.features_frames = m.frames
    m.features_nframes = PyList_GET_SIZE(m.frames) - 1
    m.features_first_job = first_job
    m.features_last_job = m.payload.njobs
    return 0

"""The walk from bytes to objects: values, lists, maps, records, and the field metadata of multimodal items."""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.dict cimport PyDict_SetItem
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.ref cimport Py_INCREF, Py_XDECREF, PyObject
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport int8_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from .decode_check cimport check_placeholder, validate
from .decode_ids cimport read_ids, read_ids_array
from .decode_plan cimport (
    ARRAY_FACTORY,
    ARRAY_FIXED_TUPLE,
    ARRAY_FROZENSET,
    ARRAY_IDS,
    ARRAY_LIST,
    ARRAY_NESTED,
    ARRAY_RECORD,
    ARRAY_SLICES,
    ARRAY_TENSOR,
    ARRAY_TOKENS,
    ARRAY_TUPLE,
    CHECK_PLACEHOLDER,
    MAP_DICT,
    MAP_RECORD,
    DecodeField,
    DecodeLayout,
    DecodePlan,
    DecodeRecord,
    any_plan,
)
from .decode_state cimport (
    FIELD_MEMOS,
    FMM_KIND_ARRAY,
    FMM_KIND_BIN,
    FMM_KIND_BOOL,
    FMM_KIND_FLOAT,
    FMM_KIND_INT,
    FMM_KIND_MAP,
    FMM_KIND_NIL,
    FMM_KIND_STR,
    FMM_OK,
    STEP_FIELD,
    STEP_KEY,
    DecodeState,
    FieldMemo,
    c_bool,
    enter,
    fail,
    fail_status,
    fail_truncated,
    fmm_kind_of,
    fmm_kind_t,
    fmm_read_array,
    fmm_read_bin,
    fmm_read_ext,
    fmm_read_float,
    fmm_read_int,
    fmm_read_left,
    fmm_read_str,
    fmm_reader_t,
    fmm_status_t,
    kind_word,
    name_text,
    read_array,
    read_map,
    skip,
    step_index,
    step_name,
    text,
)
from .decode_tensor cimport read_tensor
from .record cimport record_new, record_replace

cdef extern from *:
    """
    static inline uint64_t fmm_head8(const uint8_t *p) { uint64_t head; memcpy(&head, p, 8); return head; }
    """
    uint64_t fmm_head8(const uint8_t* p) noexcept

cdef extern from "Python.h":
    object PyLong_FromLongLong(long long value)
    object PyLong_FromUnsignedLongLong(unsigned long long value)
    object PyFloat_FromDouble(double value)
    object PySlice_New(PyObject* start, PyObject* stop, PyObject* step)
    long long PyLong_AsLongLongAndOverflow(object value, int* overflow) except? -1
    int PyObject_GenericSetAttr(object, object, object) except -1


cdef object read_any(DecodeState* s):
    return read_value(s, any_plan)


cdef object read_value(DecodeState* s, const DecodePlan* plan):
    cdef uint8_t lead
    cdef fmm_kind_t kind
    if s.reader.cur == s.reader.end:
        fail_truncated(s)
    lead = s.reader.cur[0]
    kind = fmm_kind_of(lead)
    if not plan.accepts >> kind & 1:
        fail(s, NULL, f"expected {<object>plan.expected}, got {kind_word(s)}")
    if kind == FMM_KIND_NIL:
        s.reader.cur += 1
        return None
    if kind == FMM_KIND_INT:
        return read_int(s, plan)
    if kind == FMM_KIND_STR:
        return read_str(s, plan)
    if kind == FMM_KIND_ARRAY:
        return read_array_value(s, plan)
    if kind == FMM_KIND_MAP:
        if plan.map == MAP_RECORD:
            return read_map_record(s, plan.record)
        return read_dict(s, plan) if plan.map == MAP_DICT else read_user_dict(s, plan)
    if kind == FMM_KIND_BOOL:
        s.reader.cur += 1
        return lead == 0xc3
    if kind == FMM_KIND_FLOAT:
        return read_float(s)
    return read_bytes(s)


# --- scalars ----------------------------------------------------------------------------------------------------------


cdef object read_int(DecodeState* s, const DecodePlan* plan):
    cdef const uint8_t* at = s.reader.cur
    cdef int64_t value = 0
    cdef c_bool is_u64
    cdef fmm_status_t status = fmm_read_int(&s.reader, &value, &is_u64)
    if status:
        fail_status(s, status, "int")
    if plan.int_as_float:
        return PyFloat_FromDouble(<double><uint64_t>value if is_u64 else <double>value)
    number = PyLong_FromUnsignedLongLong(<uint64_t>value) if is_u64 else PyLong_FromLongLong(value)
    return number if plan.members is NULL else member(s, plan, number, at)


cdef object read_str(DecodeState* s, const DecodePlan* plan):
    cdef const uint8_t* at = s.reader.cur
    cdef const uint8_t* data = NULL
    cdef uint32_t nbytes = 0
    cdef fmm_status_t status = fmm_read_str(&s.reader, &data, &nbytes)
    if status:
        fail_status(s, status, "str")
    value = text(s, data, nbytes)
    return value if plan.members is NULL else member(s, plan, value, at)


cdef object member(DecodeState* s, const DecodePlan* plan, object value, const uint8_t* at):
    found = (<dict>plan.members).get(value)
    if found is None:
        fail(s, at, f"expected a value of {<object>plan.expected}, got one that is none of its members")
    return found


cdef object read_float(DecodeState* s):
    cdef double value = 0
    cdef fmm_status_t status = fmm_read_float(&s.reader, &value)
    if status:
        fail_status(s, status, "float")
    return PyFloat_FromDouble(value)


cdef object read_bytes(DecodeState* s):
    """bin, or the payload of an ext of code 3, as bytes."""
    cdef const uint8_t* at = s.reader.cur
    cdef const uint8_t* data = NULL
    cdef uint32_t nbytes = 0
    cdef int8_t code = 3
    cdef fmm_status_t status
    if fmm_kind_of(at[0]) == FMM_KIND_BIN:
        status = fmm_read_bin(&s.reader, &data, &nbytes)
    else:
        status = fmm_read_ext(&s.reader, &code, &data, &nbytes)
    if status:
        fail_status(s, status, "bin or ext")
    if code != 3:
        fail(s, at, f"expected ext of code 3, got code {code}" + (": pickles are never loaded" if code in (1, 2) else ""))
    return PyBytes_FromStringAndSize(<const char*>data, nbytes)


# --- arrays -----------------------------------------------------------------------------------------------------------


cdef object read_array_value(DecodeState* s, const DecodePlan* plan):
    if plan.array == ARRAY_TENSOR:
        return read_tensor(s, read_array(s))
    if plan.array == ARRAY_NESTED:
        return read_nested(s, plan)
    if plan.array == ARRAY_FACTORY:
        return read_field(s, plan)
    if plan.array == ARRAY_LIST:
        return read_list(s, plan)
    if plan.array == ARRAY_RECORD:
        return read_array_record(s, plan.record)
    if plan.array == ARRAY_IDS or plan.array == ARRAY_TOKENS and not s.ids_as_array:
        return read_ids(s)
    if plan.array == ARRAY_TOKENS:
        return read_ids_array(s)
    if plan.array == ARRAY_SLICES:
        return read_slices(s, 0)
    if plan.array == ARRAY_TUPLE or plan.array == ARRAY_FIXED_TUPLE:
        return read_tuple(s, plan)
    return read_set(s, plan)


cdef object read_list(DecodeState* s, const DecodePlan* plan):
    cdef uint32_t nelem = read_array(s)
    cdef list items = PyList_New(nelem)
    cdef uint32_t i
    enter(s)
    for i in range(nelem):
        step_index(s, i)
        item = read_value(s, plan.item)
        Py_INCREF(item)
        PyList_SET_ITEM(items, i, item)
    s.depth -= 1
    if plan.item == any_plan and nelem == 3 and s.nframes > 1:
        note_reference(s, items)
    return items


cdef int note_reference(DecodeState* s, list items) except -1:
    """A tensor tuple amid plain values stays a list, as in vLLM; the frame it names is not one that nothing points to."""
    cdef int64_t index
    cdef int overflow = 0
    if type(items[0]) is str and type(items[1]) is list and type(items[2]) is int:
        index = PyLong_AsLongLongAndOverflow(items[2], &overflow)
        if not overflow and 1 <= index < s.nframes:
            s.frames[index].used = True
    return 0


cdef object read_tuple(DecodeState* s, const DecodePlan* plan):
    cdef const uint8_t* at = s.reader.cur
    cdef uint32_t nelem = read_array(s)
    cdef bint fixed = plan.array == ARRAY_FIXED_TUPLE
    cdef tuple items
    cdef uint32_t i
    if fixed and nelem != <uint32_t>plan.nitems:
        fail(s, at, f"expected an array of {plan.nitems}, got one of {nelem}")
    items = PyTuple_New(nelem)
    enter(s)
    for i in range(nelem):
        step_index(s, i)
        item = read_value(s, plan.items[i] if fixed else plan.item)
        Py_INCREF(item)
        PyTuple_SET_ITEM(items, i, item)
    s.depth -= 1
    return items


cdef object read_set(DecodeState* s, const DecodePlan* plan):
    cdef uint32_t nelem = read_array(s)
    cdef set items = set()
    cdef uint32_t i
    enter(s)
    for i in range(nelem):
        step_index(s, i)
        items.add(read_value(s, plan.item))
    s.depth -= 1
    return frozenset(items) if plan.array == ARRAY_FROZENSET else items


# --- maps -------------------------------------------------------------------------------------------------------------


cdef object read_dict(DecodeState* s, const DecodePlan* plan):
    """A key that comes twice keeps its last value, as with msgspec."""
    cdef uint32_t npairs = read_map(s)
    cdef dict items = {}
    cdef uint32_t i
    enter(s)
    for i in range(npairs):
        step_index(s, -1)
        key = read_key(s, plan.key)
        step_name(s, STEP_KEY, <PyObject*>key)
        s.pair = i
        value = read_value(s, plan.item)
        PyDict_SetItem(items, key, value)
    s.depth -= 1
    return items


cdef object read_user_dict(DecodeState* s, const DecodePlan* plan):
    items = read_dict(s, plan)
    wrapped = record_new(plan.wrapper)
    PyObject_GenericSetAttr(wrapped, "data", items)
    return wrapped


cdef object read_key(DecodeState* s, const DecodePlan* plan):
    cdef const uint8_t* data = NULL
    cdef uint32_t nbytes = 0
    cdef fmm_status_t status
    cdef fmm_kind_t kind
    if s.reader.cur == s.reader.end:
        fail_truncated(s)
    kind = fmm_kind_of(s.reader.cur[0])
    if kind == FMM_KIND_STR and plan.accepts >> FMM_KIND_STR & 1 and plan.members is NULL:
        status = fmm_read_str(&s.reader, &data, &nbytes)
        if status:
            fail_status(s, status, "str")
        return name_text(s, data, nbytes)
    if kind == FMM_KIND_ARRAY or kind == FMM_KIND_MAP:
        fail(s, NULL, f"expected a map key that is a plain value, got {kind_word(s)}")
    return read_value(s, plan)


# --- records ----------------------------------------------------------------------------------------------------------


cdef inline int store(const DecodeRecord* record, object obj, const DecodeField* field, object value) except -1:
    if record.in_dict:
        return PyObject_GenericSetAttr(obj, <object>field.name, value)  # whatever a frozen class says of it
    record_replace(obj, field.offset, value)
    return 0


cdef int store_default(DecodeState* s, const DecodeRecord* record, object obj, const DecodeField* field) except -1:
    if field.default_value is not NULL:
        store(record, obj, field, <object>field.default_value)
    elif field.default_factory is not NULL:
        store(record, obj, field, (<object>field.default_factory)())
    else:
        fail(s, NULL, f"expected {(<object>record.cls).__name__} to have {<object>field.name}, which is missing")
    return 0


cdef object read_array_record(DecodeState* s, DecodeRecord* record):
    cdef const uint8_t* at = s.reader.cur
    cdef uint32_t nelem = read_array(s)
    cdef const DecodeLayout* layout
    cdef DecodeField* field
    cdef int i
    if nelem < <uint32_t>record.min_nelem:
        fail(s, at, f"expected {(<object>record.cls).__name__}, an array of at least {record.min_nelem}, got one of {nelem}")
    if record.moved is not NULL:
        layout = layout_of(s, record, nelem)
        if layout is not NULL:
            return read_moved_record(s, record, layout, nelem, at)
    obj = record_new(record.cls)
    enter(s)
    for i in range(record.nfields):
        field = &record.fields[i]
        if <uint32_t>i < nelem:
            step_name(s, STEP_FIELD, field.name)
            value = read_value(s, field.plan)
            record_replace(obj, field.offset, value)
        else:
            store_default(s, record, obj, field)
    for i in range(record.nfields, <int64_t>nelem):
        step_index(s, i)
        skip(s)  # a newer sender's fields
    s.depth -= 1
    if record.post_init is not NULL:
        validate(s, record, obj, at)
    return obj


cdef inline const DecodeLayout* layout_of(DecodeState* s, const DecodeRecord* record, uint32_t nelem) noexcept:
    """How the sender orders the fields; NULL for as they are here.  By the length where the sender is not known: vLLM writes
    all elements, and today's array is of another length than those whose fields lay elsewhere."""
    cdef int i
    if s.profile >= 0:
        return record.moved[s.profile]
    for i in range(record.nmoved):
        if record.moved[i] is NULL:
            return NULL  # and so are those of later releases
        if <uint32_t>record.moved[i].nelem == nelem:
            return record.moved[i]
    return NULL


cdef object read_moved_record(DecodeState* s, DecodeRecord* record, const DecodeLayout* layout, uint32_t nelem,
                              const uint8_t* at):
    cdef uint64_t missing = ~<uint64_t>0 >> (64 - record.nfields)
    cdef DecodeField* field
    cdef uint32_t i
    cdef int index
    obj = record_new(record.cls)
    enter(s)
    for i in range(nelem):
        index = layout.fields[i] if i < <uint32_t>layout.nelem else -1
        if index < 0:
            step_index(s, i)
            skip(s)
            continue
        field = &record.fields[index]
        step_name(s, STEP_FIELD, field.name)
        value = read_value(s, field.plan)
        record_replace(obj, field.offset, value)
        missing &= ~(<uint64_t>1 << index)
    s.depth -= 1
    for index in range(record.nfields):
        if missing >> index & 1:
            store_default(s, record, obj, &record.fields[index])
    if record.post_init is not NULL:
        validate(s, record, obj, at)
    return obj


cdef object read_map_record(DecodeState* s, DecodeRecord* record):
    cdef const uint8_t* at = s.reader.cur
    cdef uint32_t npairs = read_map(s)
    cdef uint64_t missing = ~<uint64_t>0 >> (64 - record.nfields) if record.nfields else 0
    cdef const DecodeField* field
    cdef const uint8_t* key_at
    cdef PyObject* first[3]  # the values of the first fields, which the object holds
    cdef int next_field = 0
    cdef int index
    cdef uint32_t _pair
    first[0] = first[1] = first[2] = NULL
    obj = record_new(record.cls)
    enter(s)
    for _pair in range(npairs):
        key_at = s.reader.cur
        index = read_field_key(s, record, next_field)
        if index < 0:
            if record.closed:
                fail(s, key_at, f"expected a field of {(<object>record.cls).__name__}, got a key that names none")
            skip(s)  # unknown here: a newer sender's
            continue
        next_field = index + 1
        field = &record.fields[index]
        step_name(s, STEP_FIELD, field.name)
        value = read_value(s, field.plan)
        store(record, obj, field, value)
        if index < 3:
            first[index] = <PyObject*>value
        missing &= ~(<uint64_t>1 << index)
    s.depth -= 1
    if missing:
        for index in range(record.nfields):
            if missing >> index & 1:
                store_default(s, record, obj, &record.fields[index])
    if record.check == CHECK_PLACEHOLDER:
        check_placeholder(s, first, at)
    if record.post_init is not NULL:
        validate(s, record, obj, at)
    return obj


cdef int read_field_key(DecodeState* s, const DecodeRecord* record, int next_field) except -2:
    """Which field the key at the cursor names, -1 for none.  Keys come in the order of the fields, mostly."""
    cdef const DecodeField* field
    cdef const uint8_t* at = s.reader.cur
    cdef const uint8_t* data = NULL
    cdef uint32_t nbytes = 0
    cdef fmm_status_t status
    cdef size_t left = fmm_read_left(&s.reader)
    cdef uint64_t head
    cdef int i, _turn, index
    if left >= 8:
        head = fmm_head8(at)
        index = next_field
        for _turn in range(record.nfields):
            if index >= record.nfields:
                index = 0
            field = &record.fields[index]
            if (head & field.key_head_mask) == field.key_head and field.key_nbytes <= left and (
                    field.key_nbytes <= 8 or memcmp(at, field.key, field.key_nbytes) == 0):
                s.reader.cur += field.key_nbytes
                return index
            index += 1
    # Near the end of the frame, an unknown key, or a known one with a longer header than it needs.
    step_index(s, -1)
    status = fmm_read_str(&s.reader, &data, &nbytes)
    if status:
        fail_status(s, status, "a map key, a str")
    for i in range(record.nfields):
        field = &record.fields[i]
        index = 1 if field.key_nbytes <= 32 else 2
        if nbytes == <uint32_t>(field.key_nbytes - index) and memcmp(data, field.key + index, nbytes) == 0:
            return i
    text(s, data, nbytes)  # an unknown key is text all the same
    return -1


# --- multimodal items -------------------------------------------------------------------------------------------------


cdef object read_nested(DecodeState* s, const DecodePlan* plan):
    """A tensor tuple, or a list: told apart by the first element, a str."""
    cdef uint32_t nelem = read_array(s)
    cdef list items
    cdef uint32_t i
    if nelem and fmm_kind_of(s.reader.cur[0]) == FMM_KIND_STR:
        return read_tensor(s, nelem)
    items = PyList_New(nelem)
    enter(s)
    for i in range(nelem):
        step_index(s, i)
        item = read_value(s, plan.item)
        Py_INCREF(item)
        PyList_SET_ITEM(items, i, item)
    s.depth -= 1
    return items


cdef object read_field(DecodeState* s, const DecodePlan* plan):
    """Field metadata.  The items of a batch repeat it byte for byte: equal bytes give the same object again."""
    cdef FieldMemo* memo = &s.memos[s.pair % FIELD_MEMOS]
    cdef const uint8_t* at = s.reader.cur
    cdef PyObject* old
    if memo.value is not NULL and <size_t>memo.nbytes <= fmm_read_left(&s.reader) and memcmp(at, memo.raw, memo.nbytes) == 0:
        s.reader.cur += memo.nbytes
        return <object>memo.value
    field = read_new_field(s, plan)
    old = memo.value
    Py_INCREF(field)
    memo.value = <PyObject*>field
    memo.raw = at
    memo.nbytes = s.reader.cur - at
    Py_XDECREF(old)
    return field


cdef object read_new_field(DecodeState* s, const DecodePlan* plan):
    cdef const uint8_t* at = s.reader.cur
    cdef const uint8_t* data = NULL
    cdef uint32_t nbytes = 0
    cdef uint32_t nelem = read_array(s)
    cdef DecodeRecord* record
    cdef fmm_status_t status
    cdef int i
    if nelem != 2:
        fail(s, at, f"expected a field [name, fields], got an array of {nelem}")
    enter(s)
    step_index(s, -1)
    status = fmm_read_str(&s.reader, &data, &nbytes)
    if status:
        fail_status(s, status, "the name of a field, a str")
    for i in range(plan.nitems):
        record = plan.factories[i]
        if nbytes == <uint32_t>record.factory_nbytes and memcmp(data, record.factory, nbytes) == 0:
            field = read_map_record(s, record)
            s.depth -= 1
            return field
    names = ", ".join([(<const char*>plan.factories[i].factory).decode() for i in range(plan.nitems)])
    fail(s, at, f"expected the name of a field, one of {names}")


cdef object read_slices(DecodeState* s, int level):
    """A list of slices, or of lists of slices; a slice is told by its first element, which is no array."""
    cdef uint32_t nelem = read_array(s)
    cdef list items = PyList_New(nelem)
    cdef uint32_t i
    enter(s)
    for i in range(nelem):
        step_index(s, i)
        item = read_slice_or_list(s, level)
        Py_INCREF(item)
        PyList_SET_ITEM(items, i, item)
    s.depth -= 1
    return items


cdef object read_slice_or_list(DecodeState* s, int level):
    cdef fmm_reader_t ahead = s.reader
    cdef const uint8_t* at = s.reader.cur
    cdef uint32_t nelem = 0
    # A look at the first element: whoever reads the array counts its elements.
    if fmm_read_array(&ahead, &nelem) == FMM_OK and (nelem == 0 or fmm_kind_of(ahead.cur[0]) == FMM_KIND_ARRAY):
        if level:
            fail(s, at, "expected a slice [start, stop, step], got a list of them, nested too deep")
        return read_slices(s, level + 1)
    nelem = read_array(s)
    if nelem != 3:
        fail(s, at, f"expected a slice [start, stop, step], got an array of {nelem}")
    enter(s)
    step_index(s, -1)
    start = read_bound(s)
    stop = read_bound(s)
    step = read_bound(s)
    s.depth -= 1
    return PySlice_New(<PyObject*>start, <PyObject*>stop, <PyObject*>step)


cdef object read_bound(DecodeState* s):
    cdef int64_t value = 0
    cdef c_bool is_u64
    cdef fmm_status_t status
    if s.reader.cur != s.reader.end and s.reader.cur[0] == 0xc0:
        s.reader.cur += 1
        return None
    status = fmm_read_int(&s.reader, &value, &is_u64)
    if status:
        fail_status(s, status, "a bound of a slice, int or nil")
    return PyLong_FromUnsignedLongLong(<uint64_t>value) if is_u64 else PyLong_FromLongLong(value)

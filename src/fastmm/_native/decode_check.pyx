"""What a class asks for beyond the types of its fields: its __post_init__, and the bounds of a placeholder."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.ref cimport Py_INCREF, Py_XDECREF, PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from fastmm.errors import FastmmError

from .decode_plan cimport VALIDATED, VALIDATED_MAX_NBYTES, DecodeRecord
from .decode_state cimport DecodeState, fail, fail_foreign
from .record cimport record_get

cdef extern from "fastmm/dtype.h" nogil:
    cdef enum:
        FMM_BOOL

cdef extern from "fastmm/msgpack_read.h" nogil:
    uint64_t fmm_load_be64(const uint8_t* p)

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int* overflow) except? -1


cdef int check_placeholder(DecodeState* s, PyObject** values, const uint8_t* at) except -1:
    cdef int overflow = 0
    cdef long long offset = PyLong_AsLongLongAndOverflow(<object>values[0], &overflow)
    cdef long long length = 0
    if overflow == 0:
        length = PyLong_AsLongLongAndOverflow(<object>values[1], &overflow)
    if overflow or offset < 0 or length < 0:
        fail(s, at, "expected offset and length of a placeholder >= 0 and below 2**63")
    # The mask is the one tensor of a placeholder, so the last that was read.
    if values[2] is not NULL and <object>values[2] is not None and (
            s.tensor_dtype != FMM_BOOL or s.tensor_ndim != 1 or s.tensor_extent != length):
        fail(s, at, f"expected is_embed to be a bool tensor of shape ({length},), got another type or shape")
    return 0


cdef int validate(DecodeState* s, DecodeRecord* record, object obj, const uint8_t* at) except -1:
    """Runs the class's __post_init__, but not on an encoding for which it is known to change nothing and to be content."""
    cdef Py_ssize_t nbytes = s.reader.cur - at
    cdef PyObject** entry
    cdef PyObject* known
    if nbytes > VALIDATED_MAX_NBYTES:
        return run_post_init(s, record, obj, at, NULL)
    entry = &record.validated[hash_encoding(at, nbytes) % VALIDATED]
    known = entry[0]
    if known is not NULL and PyBytes_GET_SIZE(<object>known) == nbytes and memcmp(
            PyBytes_AS_STRING(<object>known), at, nbytes) == 0:
        return 0
    return run_post_init(s, record, obj, at, entry)


cdef uint32_t hash_encoding(const uint8_t* data, Py_ssize_t nbytes) noexcept:
    cdef uint64_t mixed = nbytes
    while nbytes >= 8:
        mixed = (mixed ^ fmm_load_be64(data)) * <uint64_t>0x9e3779b97f4a7c15
        mixed ^= mixed >> 32
        data += 8
        nbytes -= 8
    while nbytes:
        mixed = (mixed ^ data[0]) * <uint64_t>0x9e3779b97f4a7c15
        data += 1
        nbytes -= 1
    return <uint32_t>(mixed >> 56)


cdef int run_post_init(DecodeState* s, DecodeRecord* record, object obj, const uint8_t* at, PyObject** entry) except -1:
    cdef bytes encoding = PyBytes_FromStringAndSize(<const char*>at, s.reader.cur - at) if entry is not NULL else None
    cdef PyObject* old
    before = [snapshot(<object>record_get(obj, record.fields[i].offset)) for i in range(record.nfields)]
    try:
        (<object>record.post_init)(obj)
    except FastmmError as error:
        fail_refused(s, error, at)
    except Exception as error:
        fail_foreign(s, f"{(<object>record.cls).__name__} refuses its values", error)
    if encoding is None or not unchanged(record, obj, before):
        return 0
    old = entry[0]
    Py_INCREF(encoding)
    entry[0] = <PyObject*>encoding
    Py_XDECREF(old)
    return 0


cdef object snapshot(object value):
    """A value as it is now: containers are copied, for they may be changed in place."""
    return value.copy() if type(value) in (list, dict, set) else value


cdef bint unchanged(DecodeRecord* record, object obj, list before) except -1:
    cdef int i
    for i in range(record.nfields):
        value = <object>record_get(obj, record.fields[i].offset)
        old = before[i]
        if value is old:
            continue
        if type(value) is not type(old) or type(value) not in (list, dict, set, str, int, float) or value != old:
            return False
    return True


cdef int fail_refused(DecodeState* s, object error, const uint8_t* at) except -1:
    """A schema class refuses a value.  Its message may quote the value: only numbers are passed on."""
    rule, separator, got = error.message.partition(", got ")
    if separator and got.replace(".", "", 1).replace("-", "", 1).isalnum() and len(got) < 32:
        rule = error.message
    where = (error.path or "").partition(".")[2]
    return fail(s, at, f"{where} {rule}" if where else rule)

"""What every part of the decoder shares: where it is, how it fails, how it reads text."""

from cpython.ref cimport Py_INCREF, Py_XDECREF, PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from fastmm.errors import DecodeError, FastmmError, LimitError, TruncatedError

cdef extern from "Python.h":
    PyObject* PyUnicode_DecodeUTF8(const char* data, Py_ssize_t nbytes, const char* errors)
    bint PyUnicode_IS_COMPACT_ASCII(PyObject*)
    Py_ssize_t PyUnicode_GET_LENGTH(PyObject*)
    void* PyUnicode_DATA(PyObject*)
    void PyErr_Clear()
    bint PyErr_ExceptionMatches(object)

cdef extern from "fastmm/msgpack_read.h" nogil:
    uint64_t fmm_load_be64(const uint8_t* p)

cdef enum:
    NAMES = 256  # a power of two
    NAME_MAX_NBYTES = 64

cdef PyObject* names[NAMES]  # counted; only ASCII

KIND_WORDS = ("no value (0xc1)", "nil", "bool", "int", "float", "str", "bin", "an array", "a map", "ext")


# --- errors ------------------------------------------------------------------------------------------------------------


cdef str path_text(DecodeState* s):
    cdef int i
    parts = ["$"]
    for i in range(1, s.depth + 1):
        if s.path[i].kind == STEP_INDEX:
            if s.path[i].index >= 0:
                parts.append(f"[{s.path[i].index}]")
        elif s.path[i].kind == STEP_FIELD:
            parts.append(f".{<object>s.path[i].name}")
        else:
            key = repr(<object>s.path[i].name)
            parts.append(f"[{key if len(key) <= 80 else key[:77] + '...'}]")
    return "".join(parts)


cdef int fail(DecodeState* s, const uint8_t* at, str message) except -1:
    check_depth(s)
    raise DecodeError(message, path=path_text(s), frame=0, offset=(at if at is not NULL else s.reader.cur) - s.start)


cdef int fail_truncated(DecodeState* s) except -1:
    raise TruncatedError(f"the frame of {s.reader.end - s.start} bytes ends amid this value, or a length is more than it holds",
                         path=path_text(s), frame=0, offset=s.reader.cur - s.start)


cdef int fail_status(DecodeState* s, fmm_status_t status, str expected) except -1:
    if status == FMM_ERR_TRUNCATED:
        return fail_truncated(s)
    return fail(s, NULL, f"expected {expected}, got {kind_word(s)}")


cdef int fail_frame(DecodeState* s, Py_ssize_t frame, str message) except -1:
    raise DecodeError(message, path=path_text(s), frame=frame)


cdef int fail_foreign(DecodeState* s, str what, object error) except -1:
    if isinstance(error, MemoryError):
        raise error
    reason = error.message if isinstance(error, FastmmError) else type(error).__name__
    raise DecodeError(f"{what}: {reason}", path=path_text(s), frame=0, offset=s.reader.cur - s.start) from error


cdef int fail_depth(DecodeState* s) except -1:
    raise LimitError(f"nested more than {s.max_depth} deep (max_depth)", path="$", frame=0, offset=s.reader.cur - s.start)


cdef int fail_elements(DecodeState* s) except -1:
    raise LimitError("more array elements and map entries than max_elements allows", path=path_text(s), frame=0,
                     offset=s.reader.cur - s.start)


cdef int fail_payload(DecodeState* s) except -1:
    raise LimitError("more bytes of tensors than max_payload_nbytes allows", path=path_text(s), frame=0,
                     offset=s.reader.cur - s.start)


cdef int check_depth(DecodeState* s) except -1:
    """An input nested too deep is that error first, whatever else is wrong with it.  Only on the way to an error."""
    cdef fmm_reader_t reader
    cdef uint64_t nelem = 0
    reader.cur = s.start
    reader.end = s.reader.end
    if fmm_read_skip(&reader, s.max_depth, &nelem) == FMM_ERR_LIMIT:
        raise LimitError(f"nested more than {s.max_depth} deep (max_depth)", path="$", frame=0, offset=reader.cur - s.start)
    return 0


cdef str kind_word(DecodeState* s):
    if s.reader.cur == s.reader.end:
        return "the end of the frame"
    return KIND_WORDS[<int>fmm_kind_of(s.reader.cur[0])]


cdef int skip(DecodeState* s) except -1:
    cdef uint64_t nelem = 0
    cdef fmm_status_t status = fmm_read_skip(&s.reader, s.max_depth - s.depth, &nelem)
    if status == FMM_ERR_TRUNCATED:
        fail_truncated(s)
    elif status == FMM_ERR_LIMIT:
        fail_depth(s)
    elif status:
        fail(s, NULL, "expected a value, got the byte 0xc1, which begins none")
    return count_elements(s, nelem)


# --- text --------------------------------------------------------------------------------------------------------------


cdef object text(DecodeState* s, const uint8_t* data, uint32_t nbytes):
    cdef PyObject* result = PyUnicode_DecodeUTF8(<const char*>data, nbytes, NULL)
    if result is NULL:
        if PyErr_ExceptionMatches(MemoryError):
            raise MemoryError()
        PyErr_Clear()  # Python's own error holds the bytes; ours must not lead to it
        fail(s, data, "expected text in UTF-8, got bytes that are not")
    return take(result)


cdef inline object take(PyObject* owned):
    """An object from a counted pointer."""
    obj = <object>owned
    Py_XDECREF(owned)
    return obj


cdef inline uint32_t hash_name(const uint8_t* data, uint32_t nbytes) noexcept:
    cdef uint64_t mixed = nbytes
    cdef uint32_t i
    if nbytes >= 8:
        mixed += fmm_load_be64(data) * <uint64_t>0x9e3779b97f4a7c15
        mixed ^= fmm_load_be64(data + nbytes - 8) * <uint64_t>0xc2b2ae3d27d4eb4f
    else:
        for i in range(nbytes):
            mixed = (mixed ^ data[i]) * <uint64_t>0x9e3779b97f4a7c15
    return <uint32_t>((mixed * <uint64_t>0x9e3779b97f4a7c15) >> 56) % NAMES


cdef object name_text(DecodeState* s, const uint8_t* data, uint32_t nbytes):
    cdef uint32_t slot
    cdef PyObject* known
    if nbytes > NAME_MAX_NBYTES:
        return text(s, data, nbytes)
    slot = hash_name(data, nbytes)
    known = names[slot]
    if known is not NULL and PyUnicode_GET_LENGTH(known) == nbytes and memcmp(PyUnicode_DATA(known), data, nbytes) == 0:
        return <object>known
    made = text(s, data, nbytes)
    if PyUnicode_IS_COMPACT_ASCII(<PyObject*>made):
        known = names[slot]
        Py_INCREF(made)
        names[slot] = <PyObject*>made
        Py_XDECREF(known)
    return made

"""Integers of any size, strings of any length, slices: what is not written in a run of small values (c/pyscalar.h)."""

import operator

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from fastmm.errors import EncodeError, SchemaError

from .message cimport Message, fail, foreign, need

cdef extern from "fastmm/msgpack_write.h" nogil:
    cdef enum:
        FMM_WRITE_MAX_NBYTES
    uint8_t* fmm_write_int(uint8_t* p, int64_t value)
    uint8_t* fmm_write_uint(uint8_t* p, uint64_t value)
    uint8_t* fmm_write_str_header(uint8_t* p, uint32_t nbytes)
    uint8_t* fmm_write_array_header(uint8_t* p, uint32_t nelem)

cdef extern from "c/pyscalar.h":
    bint fmm_pylong_small(object item, int64_t* value)
    uint8_t* fmm_put_bound(uint8_t* p, PyObject* bound)

cdef extern from "<stdint.h>" nogil:
    const uint64_t UINT32_MAX

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object, Py_ssize_t*)
    void PyErr_Clear()
    long long PyLong_AsLongLongAndOverflow(object, int*) except? -1
    unsigned long long PyLong_AsUnsignedLongLong(object) except? <unsigned long long>-1
    ctypedef struct PySliceObject:
        PyObject* start
        PyObject* stop
        PyObject* step


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
    if nbytes > <Py_ssize_t>UINT32_MAX:
        fail(m, EncodeError, f"expected a string of less than 4 GiB, got {nbytes} bytes")
    need(m, FMM_WRITE_MAX_NBYTES + nbytes)
    m.size = fmm_write_str_header(m.data + m.size, <uint32_t>nbytes) - m.data
    memcpy(m.data + m.size, text, nbytes)
    m.size += nbytes
    return 0


cdef int write_slice(Message m, object obj) except -1:
    """`[start, stop, step]`, each an int or nil."""
    cdef PySliceObject* bounds = <PySliceObject*><PyObject*>obj
    need(m, 1 + 3 * FMM_WRITE_MAX_NBYTES)
    m.size = fmm_write_array_header(m.data + m.size, 3) - m.data
    cdef object start = <object>bounds.start, stop = <object>bounds.stop, step = <object>bounds.step  # held
    write_bound(m, start)
    write_bound(m, stop)
    write_bound(m, step)
    return 0


cdef int write_bound(Message m, object bound) except -1:
    cdef uint8_t* after = fmm_put_bound(m.data + m.size, <PyObject*>bound)
    if after is not NULL:
        m.size = after - m.data
        return 0
    try:
        number = int(operator.index(bound))  # numpy integers and tensors of one integer, as vLLM's flat_from_sizes leaves them
    except TypeError:
        fail(m, SchemaError, f"expected slice bounds that are integers or None, got a {type(bound).__qualname__}")
    except Exception as error:
        foreign(m, error, "the slice bound's __index__")
    need(m, 3 * FMM_WRITE_MAX_NBYTES)
    return write_int(m, number)

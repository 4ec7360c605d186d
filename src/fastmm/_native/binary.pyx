"""Bytes of the user's: buffers, extensions, and messages that are msgpack already."""

import msgpack

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int8_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from fastmm.errors import EncodeError, SchemaError

from .message cimport Message, fail, need

cdef extern from "fastmm/msgpack_write.h" nogil:
    cdef enum:
        FMM_WRITE_MAX_NBYTES
    uint8_t* fmm_write_bin_header(uint8_t* p, uint32_t nbytes)
    uint8_t* fmm_write_ext_header(uint8_t* p, int8_t code, uint32_t nbytes)

cdef extern from "<stdint.h>" nogil:
    const uint64_t UINT32_MAX


cdef int write_bytes(Message m, object obj) except -1:
    cdef Py_buffer buffer
    get_buffer(m, obj, &buffer)
    try:
        need(m, FMM_WRITE_MAX_NBYTES + buffer.len)
        m.size = fmm_write_bin_header(m.data + m.size, <uint32_t>buffer.len) - m.data
        put_buffer(m, &buffer)
    finally:
        PyBuffer_Release(&buffer)
    return 0


cdef int write_ext(Message m, object obj) except -1:
    cdef Py_buffer buffer
    cdef int code
    if type(obj) is msgpack.Timestamp:
        code, data = -1, obj.to_bytes()
    else:
        number, data = obj.code, obj.data
        if type(number) is not int or not -128 <= number <= 127:
            fail(m, EncodeError, "expected an extension's code from -128 to 127")
        code = number
    if code in (1, 2) and not m.from_hook:
        fail(m, SchemaError, f"expected no pickles, got an extension of type {code}, which vLLM would unpickle")
    get_buffer(m, data, &buffer)
    try:
        need(m, FMM_WRITE_MAX_NBYTES + buffer.len)
        m.size = fmm_write_ext_header(m.data + m.size, code, <uint32_t>buffer.len) - m.data
        put_buffer(m, &buffer)
    finally:
        PyBuffer_Release(&buffer)
    return 0


cdef int write_raw(Message m, object obj) except -1:
    cdef Py_buffer buffer
    get_buffer(m, obj, &buffer)
    try:
        need(m, buffer.len)
        put_buffer(m, &buffer)
    finally:
        PyBuffer_Release(&buffer)
    return 0


cdef int get_buffer(Message m, object obj, Py_buffer* buffer) except -1:
    """The raw bytes of a contiguous buffer of any format; the caller releases them."""
    try:
        PyObject_GetBuffer(obj, buffer, PyBUF_SIMPLE)
    except (BufferError, TypeError, ValueError):
        fail(m, EncodeError, f"expected a contiguous buffer, got a {type(obj).__qualname__} that is none: take bytes() of it")
    if buffer.len > <Py_ssize_t>UINT32_MAX:
        nbytes = buffer.len
        PyBuffer_Release(buffer)
        fail(m, EncodeError, f"expected a buffer of less than 4 GiB, got {nbytes} bytes")
    return 0


cdef void put_buffer(Message m, Py_buffer* buffer) noexcept:
    if buffer.len:
        memcpy(m.data + m.size, buffer.buf, buffer.len)
        m.size += buffer.len

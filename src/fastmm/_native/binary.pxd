"""Reference of the writer of bytes."""

from .message cimport Message


cdef int write_bytes(Message m, object obj) except -1  # bytes, bytearray, memoryview of any format
cdef int write_ext(Message m, object obj) except -1  # msgpack.ExtType, msgpack.Timestamp, msgspec.msgpack.Ext
cdef int write_raw(Message m, object obj) except -1  # msgspec.Raw: verbatim

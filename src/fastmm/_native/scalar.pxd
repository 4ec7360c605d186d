"""Reference of the writers of scalars.  The caller made room for a header or a number."""

from .message cimport Message


cdef int write_int(Message m, object obj) except -1
cdef int write_str(Message m, object obj) except -1
cdef int write_slice(Message m, object obj) except -1  # `[start, stop, step]`, each an int or nil

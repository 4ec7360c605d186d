"""Reference of the walk."""

from .message cimport Message


# Writes the whole tree: afterwards `data[:size]` is the main frame and `frames[1:]` are the aux frames.  Needs the GIL,
# which is let go of only while large payloads are cast.
cdef int message_write(Message m, object obj) except -1

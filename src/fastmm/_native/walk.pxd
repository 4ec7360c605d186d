"""Reference of the walk.  Everything needs the GIL, which is let go of only while large payloads are cast."""

from .message cimport Message


# Several trees may be walked between a start and a finish: their main frames lie one behind the other in `data`.
cdef int message_start(Message m) except -1

# Writes a whole tree behind `size`; returns its frames, with None where the main frame and those still to be cast go.
cdef list message_walk(Message m, object obj)

# Casts, for all trees walked: fills in frames and inline bytes, and puts the new leaves into the trees.
cdef int message_finish(Message m) except -1

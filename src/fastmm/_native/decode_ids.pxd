"""Reference of the token ids' reader.  Needs the GIL."""

from .decode_state cimport DecodeState

# The cursor is at an array of integers: a list of int.
cdef object read_ids(DecodeState* s)

# The same as a one-dimensional numpy array of int64 that owns its memory.
cdef object read_ids_array(DecodeState* s)

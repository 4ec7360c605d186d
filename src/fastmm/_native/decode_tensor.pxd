"""Reference of the tensor reader.  Needs the GIL."""

from libc.stdint cimport uint32_t

from .decode_state cimport DecodeState

# The cursor is behind the header of an array of `nelem` elements that must be [dtype, shape, data].
cdef object read_tensor(DecodeState* s, uint32_t nelem)

# The tensor that `[dtype, shape, data]` stands for where somebody else has read it.
cdef object tensor_of(DecodeState* s, object triple)

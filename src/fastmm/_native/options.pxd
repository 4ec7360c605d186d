"""Reference of the checks of options, the same for encoder and decoder.  Need the GIL; raise SchemaError."""

from libc.stdint cimport int64_t

# A whole number from low to high: an int, or anything that is one by `__index__`, but no bool.
cdef int64_t whole(str name, object value, int64_t low, int64_t high) except? -1

# True or False, and no other truth value.
cdef bint switch(str name, object value) except -1

# One of the words that are the keys of `words`: what it stands for.
cdef object choice(str name, object value, dict words)

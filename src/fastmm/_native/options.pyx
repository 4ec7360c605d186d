"""Options of the encoder and the decoder, checked alike."""

import operator

from libc.stdint cimport int64_t

from fastmm.errors import SchemaError


cdef int64_t whole(str name, object value, int64_t low, int64_t high) except? -1:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise SchemaError(f"expected a whole number for {name}, got a {type(value).__qualname__}") from None
    if not low <= number <= high:
        raise SchemaError(f"expected {name} from {low} to {high}, got {number}")
    return number


cdef bint switch(str name, object value) except -1:
    if value is not True and value is not False:
        raise SchemaError(f"expected True or False for {name}, got a {type(value).__qualname__}")
    return value is True


cdef object choice(str name, object value, dict words):
    if not isinstance(value, str):
        raise SchemaError(f"expected {name} to be one of {', '.join(words)}, got a {type(value).__qualname__}")
    if value not in words:
        raise SchemaError(f"expected {name} to be one of {', '.join(words)}, got {value!r}")
    return words[value]

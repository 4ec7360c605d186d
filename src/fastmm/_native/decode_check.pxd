"""Reference of the checks of whole records.  Needs the GIL.  `at` is where the record began, for errors."""

from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t

from .decode_plan cimport DecodeRecord
from .decode_state cimport DecodeState

# Of an offset, a length and a mask, borrowed; NULL for one that was left out.
cdef int check_placeholder(DecodeState* s, PyObject** values, const uint8_t* at) except -1

# Runs the class's __post_init__; the cursor is behind the record.
cdef int validate(DecodeState* s, DecodeRecord* record, object obj, const uint8_t* at) except -1

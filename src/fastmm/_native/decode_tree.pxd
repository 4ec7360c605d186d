"""Reference of the walk from bytes to objects.  Needs the GIL."""

from .decode_plan cimport DecodePlan
from .decode_state cimport DecodeState

# The value at the cursor, as the plan has it.
cdef object read_value(DecodeState* s, const DecodePlan* plan)

# A plain value, whatever it is.
cdef object read_any(DecodeState* s)

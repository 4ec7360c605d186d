"""Reference of the writer of tensors."""

from .message cimport Message
from .plan cimport Plan


# Writes a tensor; `mode` is FMM_MODE_* of the field it lies in.
cdef int write_tensor(Message m, object obj, Plan plan, int mode) except -1

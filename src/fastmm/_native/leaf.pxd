"""Reference of the writer of tensors."""

from libc.stdint cimport int64_t

from .message cimport Message
from .plan cimport Plan


# Writes a tensor; `mode` is FMM_MODE_* of the field it lies in.
cdef int write_tensor(Message m, object obj, Plan plan, int mode) except -1

# The list of integers that a tensor of token ids stands for: an engine reads nothing else.
cdef object ids_of(Message m, object obj, Plan plan)

# Counts bytes of payload towards the message's limit.
cdef int count_payload(Message m, int64_t nbytes) except -1

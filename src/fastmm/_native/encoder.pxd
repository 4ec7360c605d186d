"""Reference of Encoder, for the kinds of encoder that stand on it."""

from libc.stdint cimport int64_t

from .message cimport Message


cdef class Encoder:
    cdef Message spare  # not in use, warm; one thread alone never needs another
    cdef list idle  # more of them
    cdef object target  # fmm_dtype_t or None
    cdef int target_nbytes
    cdef bint inplace
    cdef bint dedup
    cdef int64_t threshold_nbytes
    cdef int max_depth
    cdef Py_ssize_t max_frames
    cdef int64_t max_payload_nbytes
    cdef object hook
    cdef int profile_index  # -1: the newest
    cdef object consumer  # of tensors, out of band, or None
    cdef unsigned long long messages
    cdef unsigned long long frames
    cdef unsigned long long nbytes_viewed
    cdef unsigned long long nbytes_copied
    cdef unsigned long long nbytes_cast

    # A message to write, warm where there is one; whoever takes it gives it back.
    cdef Message take(self)
    cdef Message new_message(self)
    cdef int give_back(self, Message message) except -1
    cdef object main_frame(self, Message message)
    cdef int finish_into(self, Message message, object buffer) except -1
    cdef int count(self, Message message, list frames) except -1

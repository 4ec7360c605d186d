# cython: language_level=3, binding=True, auto_pickle=False
"""Somebody else's extension: reads a Frame's memory in C, makes Frames of its own, uses the headers."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from fastmm._native.frame cimport Frame, frame_new


cdef extern from "fastmm/size.h":
    bint fmm_shape_nelem(const int64_t* shape, int ndim, int64_t* out) nogil

cdef extern from "fastmm/status.h":
    ctypedef enum fmm_status_t:
        FMM_OK
        FMM_ERR_TRUNCATED


def sum_of_bytes(Frame frame not None) -> int:
    """Reads the memory by the field of the .pxd, without the buffer protocol and without the GIL."""
    cdef const uint8_t* data = <const uint8_t*>frame.data
    cdef Py_ssize_t nbytes = frame.size
    cdef Py_ssize_t i
    cdef uint64_t total = 0
    with nogil:
        for i in range(nbytes):
            total += data[i]
    return total


def frame_over(bytes owner not None) -> Frame:
    """A Frame over the memory of a bytes object, which it keeps alive."""
    return frame_new(<const char*>owner, len(owner), owner)


def nelem(tuple shape not None):
    """The number of elements, or None when it does not fit: fmm_shape_nelem of the header."""
    cdef int64_t extents[8]
    cdef int64_t out = 0
    for i, extent in enumerate(shape):
        extents[i] = extent
    return out if fmm_shape_nelem(extents, <int>len(shape), &out) else None


def statuses() -> tuple:
    return FMM_OK, FMM_ERR_TRUNCATED

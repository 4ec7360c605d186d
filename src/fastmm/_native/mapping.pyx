"""Mapping: the memory of a file, mapped for as long as anybody views it."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.errno cimport errno
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap

import os

from .options cimport switch, whole

cdef enum:
    MAX_INT64 = 0x7FFFFFFFFFFFFFFF


@cython.final
cdef class Mapping:
    """The first bytes of a file as a buffer: one-dimensional, of format ``"B"``, shared with whoever else maps the file.

    Unlike `mmap.mmap` it holds no descriptor: a process may hold more mappings than it may have files open. The memory is
    unmapped when the last buffer taken from it goes, by whichever thread drops it.

    Parameters
    ----------
    fd
        A descriptor that is open for reading, and for writing with `writable`. It may be closed afterwards.
    nbytes
        How much to map, at least 1. The file must be that long, and stay so: the kernel ends a process that reads past it.
    writable
        Whether buffers may be written to.

    Raises
    ------
    OSError
        The kernel's refusal.
    """

    cdef void* data  # this mapping's own; NULL when there is none
    cdef Py_ssize_t size  # in bytes
    cdef bint writable

    def __cinit__(self, fd, nbytes, *, writable=True):
        cdef int descriptor = <int>whole("fd", fd, 0, 0x7FFFFFFF)
        cdef size_t size = <size_t>whole("nbytes", nbytes, 1, MAX_INT64)
        cdef int protection = PROT_READ
        cdef void* data
        self.data = NULL
        self.writable = switch("writable", writable)
        if self.writable:
            protection |= PROT_WRITE
        with nogil:
            data = mmap(NULL, size, protection, MAP_SHARED, descriptor, 0)
        if data == MAP_FAILED:
            raise OSError(errno, os.strerror(errno))
        self.data = data
        self.size = <Py_ssize_t>size

    def __dealloc__(self):
        # No GIL while the kernel gives back what may be gigabytes.
        if self.data is not NULL:
            with nogil:
                munmap(self.data, <size_t>self.size)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return <size_t>self.data

    def __len__(self):
        return self.size

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.size, not self.writable, flags)

    def __repr__(self):
        return f"<fastmm mapping of {self.size} bytes at {<size_t>self.data:#x}>"

"""Reference of Frame, the one kind of buffer fastmm hands out."""

from cpython.ref cimport PyObject


cdef class Frame:
    """An immutable 1-D view of bytes that owns what it views.

    The owner is whatever keeps the memory: a torch storage, a numpy array, a DLPack capsule, a pooled block.  It is held
    by a counted reference and let go in `__dealloc__`, under the GIL, by whichever thread drops the last holder.
    """

    cdef const void* data  # valid as long as owner lives
    cdef Py_ssize_t size  # in bytes
    cdef PyObject* owner  # counted; a raw pointer keeps Frame out of the cycle collector


# Views, never copies; takes its own reference to `owner`.
cdef Frame frame_new(const void* data, Py_ssize_t nbytes, object owner)

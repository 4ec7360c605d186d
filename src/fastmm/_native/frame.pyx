"""Frame: an immutable buffer-protocol view that owns its memory."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject


@cython.final
@cython.freelist(256)
@cython.no_gc
cdef class Frame:
    """A read-only, one-dimensional view of bytes (format ``"B"``) that owns what it views.

    Frames come from `fastmm.encode_request` and go to ``socket.send_multipart(frames, copy=False)``.  The memory behind a
    frame stays as long as anybody holds the frame or a buffer taken from it (pyzmq, a memoryview).  What would move the memory
    itself is the owner's business: do not ``resize_()`` a tensor to a larger size while its frames are on their way.  Frames
    are not seen by the cycle collector: an object that is kept by a frame and keeps that frame is never freed.
    """

    def __cinit__(self):
        self.data = NULL
        self.size = 0
        self.owner = NULL

    def __init__(self):
        raise TypeError("a Frame comes from encode_request()")

    def __dealloc__(self):
        if self.owner:
            Py_DECREF(<object>self.owner)

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
        PyBuffer_FillInfo(buffer, self, <void*>self.data, self.size, 1, flags)

    def __repr__(self):
        return f"<fastmm.Frame of {self.size} bytes at {<size_t>self.data:#x}>"


cdef Frame frame_new(const void* data, Py_ssize_t nbytes, object owner):
    cdef Frame frame = Frame.__new__(Frame)
    frame.data = data
    frame.size = nbytes
    Py_INCREF(owner)
    frame.owner = <PyObject*>owner
    return frame

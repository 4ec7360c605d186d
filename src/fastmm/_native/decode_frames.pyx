"""The frames of a message that is decoded: where their memory is, and who keeps it."""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.ref cimport Py_INCREF, Py_XDECREF, PyObject
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from fastmm.errors import DecodeError

from .decode_state cimport FIELD_MEMOS, MAX_DEPTH, OWN_NOT, DecodeState, FrameView, Step
from .decode_tree cimport read_any
from .frame cimport Frame
from .tensor cimport FAMILY_EXCHANGE

cdef enum:
    MAX_INT64 = 0x7FFFFFFFFFFFFFFF


@cython.final
@cython.freelist(256)
@cython.no_gc
cdef class FrameHolder:
    """Keeps one frame's buffer exported for as long as any tensor lies over it."""

    cdef Py_buffer buffer
    cdef bint held

    def __init__(self):
        raise TypeError("a FrameHolder comes from a decoder")

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.buffer)


cdef FrameView* frames_room(FrameView* few, Py_ssize_t nframes) except NULL:
    cdef FrameView* views = few
    if nframes > FEW_FRAMES:
        views = <FrameView*>calloc(nframes, sizeof(FrameView))
        if views is NULL:
            raise MemoryError()
    else:
        memset(few, 0, nframes * sizeof(FrameView))
    return views


cdef int64_t frames_open(tuple parts, FrameView* views, Py_buffer* main, bint guarded) except -1:
    cdef FrameView* view
    cdef FrameHolder holder
    cdef Frame frame
    cdef Py_ssize_t i
    cdef int64_t total = 0
    memset(main, 0, sizeof(Py_buffer))
    open_main(parts[0], &views[0], main)
    for i in range(1, len(parts)):
        part = parts[i]
        view = &views[i]
        if PyBytes_CheckExact(part):
            view.data = <const uint8_t*>PyBytes_AS_STRING(part)
            view.nbytes = PyBytes_GET_SIZE(part)
            view.readonly = True
            owner = part
        elif type(part) is Frame:
            frame = <Frame>part
            view.data = <const uint8_t*>frame.data
            view.nbytes = frame.size
            view.readonly = True
            owner = part
        else:
            holder = FrameHolder.__new__(FrameHolder)
            export(part, i, &holder.buffer)
            holder.held = True
            view.data = <const uint8_t*>holder.buffer.buf
            view.nbytes = holder.buffer.len
            # A received frame may lie over the sender's own memory (inproc), or be read twice.
            view.readonly = holder.buffer.readonly or guarded and type(part).__module__.partition(".")[0] == "zmq"
            owner = holder
        Py_INCREF(owner)
        view.owner = <PyObject*>owner
        total += view.nbytes
    return total


cdef int open_main(object part, FrameView* view, Py_buffer* main) except -1:
    if PyBytes_CheckExact(part):
        view.data = <const uint8_t*>PyBytes_AS_STRING(part)
        view.nbytes = PyBytes_GET_SIZE(part)
        return 0
    export(part, 0, main)
    view.data = <const uint8_t*>main.buf
    view.nbytes = main.len
    return 0


cdef int export(object part, Py_ssize_t index, Py_buffer* buffer) except -1:
    try:
        PyObject_GetBuffer(part, buffer, PyBUF_SIMPLE)
    except Exception as error:
        memset(buffer, 0, sizeof(Py_buffer))
        raise DecodeError(f"expected a frame, contiguous bytes, got a {type(part).__name__}", frame=index) from error
    return 0


cdef void frames_close(FrameView* few, FrameView* views, Py_ssize_t nframes, Py_buffer* main) noexcept:
    cdef Py_ssize_t i
    PyBuffer_Release(main)
    for i in range(nframes):
        Py_XDECREF(views[i].owner)
        Py_XDECREF(views[i].copy)
    if views is not few:
        free(views)


cdef void state_start(DecodeState* s, FrameView* views, Py_ssize_t nframes, Step* path) noexcept:
    cdef int i
    s.start = views[0].data
    s.reader.cur = s.start
    s.reader.end = s.start + views[0].nbytes
    s.frames = views
    s.nframes = nframes
    s.path = path
    s.depth = 0
    s.max_depth = MAX_DEPTH
    s.elements_left = MAX_INT64
    s.read_any = read_any
    s.family = FAMILY_EXCHANGE
    s.copy = s.ids_as_array = s.torch_only = False
    s.own = OWN_NOT
    s.profile = -1
    s.provider = NULL
    s.payload_left = MAX_INT64
    s.nbytes_viewed = 0
    s.nbytes_copied = 0
    s.pair = 0
    s.tensor_dtype = s.tensor_ndim = 0
    s.tensor_extent = 0
    for i in range(FIELD_MEMOS):
        s.memos[i].value = NULL


cdef void state_end(DecodeState* s) noexcept:
    cdef int i
    for i in range(FIELD_MEMOS):
        Py_XDECREF(s.memos[i].value)

"""Reference of decode_frames: the frames of one message, open for as long as it is decoded.  Needs the GIL."""

from libc.stdint cimport int64_t

from .decode_state cimport DecodeState, FrameView, Step

cdef enum:
    FEW_FRAMES = 32  # these many need no allocation

# Room for the views of `nframes` frames, all empty: `few`, which has FEW_FRAMES of them, or more from the heap.
cdef FrameView* frames_room(FrameView* few, Py_ssize_t nframes) except NULL

# Finds each frame's memory and who keeps it; returns the bytes of the aux frames.  With `guarded`, a received frame is not
# to be written to, though it could be.  Nothing outlives the decoding that needs the main frame: `main` exports it meanwhile.
cdef int64_t frames_open(tuple parts, FrameView* views, Py_buffer* main, bint guarded) except -1

# Lets go of all of it, after an error of frames_open, too.
cdef void frames_close(FrameView* few, FrameView* views, Py_ssize_t nframes, Py_buffer* main) noexcept

# A state at the start of the main frame, without limits, for torch tensors that view the frames.
cdef void state_start(DecodeState* s, FrameView* views, Py_ssize_t nframes, Step* path) noexcept
cdef void state_end(DecodeState* s) noexcept

"""Reference of Message: one message being written, and the room, the path and the errors that all writers share."""

from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport int64_t, uint8_t

from .payload cimport Payload
from .pool cimport Block

ctypedef enum PartKind:
    PART_FIELD  # `plan` and `index` name a field of `container`
    PART_ITEM  # `index` in a list
    PART_FIXED  # `index` in a tuple or a set, where nothing can be put back
    PART_KEY  # `key` of a dict
    PART_HOOK  # what a hook, or a conversion, made of the object

cdef struct Part:  # one step of the path to what is being written
    PartKind kind
    PyObject* container  # counted: a hook, or another thread, may drop it from the tree meanwhile
    PyObject* plan  # borrowed from the container's type
    PyObject* key  # borrowed from whoever walks the dict
    Py_ssize_t index

cdef enum:
    MEMO_SIZE = 16

cdef struct Memo:  # where in the main frame a field object was written
    PyObject* obj  # held by payload.held
    size_t offset
    size_t nbytes

cdef class Message:
    """What one walk needs: a warm main frame, the payload, the path.  Used by one thread at a time, and then again."""

    cdef Block block  # the main frame
    cdef uint8_t* data  # block.data
    cdef size_t size  # bytes written
    cdef size_t room  # block.capacity
    cdef list frames  # [None, aux 1, ...]
    cdef Payload payload
    cdef int64_t payload_nbytes
    cdef Part* path  # owned, max_depth parts
    cdef int depth
    cdef Memo memo[MEMO_SIZE]  # direct-mapped, by the address of the object
    cdef bint memo_used
    cdef bint from_hook  # inside a hook's result, where pickles are the hook's own business
    # The mm_features written last: where they lie, so that a sibling request with the very same list can copy them.
    cdef object features  # the list, or None
    cdef size_t features_offset
    cdef size_t features_nbytes
    cdef int64_t features_payload_nbytes
    cdef list features_frames  # the message's frames, of which the features take [1, 1 + features_nframes)
    cdef Py_ssize_t features_nframes
    cdef int features_first_job
    cdef int features_last_job
    # Options
    cdef int64_t threshold
    cdef int max_depth
    cdef Py_ssize_t max_frames
    cdef int64_t max_payload_nbytes
    cdef object hook
    cdef object oob_tensor_consumer
    cdef int profile  # index of the receiver's wire profile, -1 when it is the newest
    cdef bint as_vllm  # what only we can write goes to the hook, and what others raise goes through as it is

cdef Message message_new(Payload payload, int64_t threshold, int max_depth, Py_ssize_t max_frames,
                         int64_t max_payload_nbytes, object hook, object oob_tensor_consumer)

# Drops what belongs to the last message; the buffers stay.
cdef int message_clear(Message message) except -1

# `$.mm_features[3].data['pixel_values'].data[0]`, as far as the walk has come; and an error of another module, put there.
cdef str path_of(Message message)
cdef object at_path(Message message, object error)
cdef int fail(Message message, object cls, str text) except -1

# Raises what code that is not ours raised as an error with a path; a MemoryError is nobody's input, and goes through.
cdef int foreign(Message message, object error, str whose) except -1

cdef int make_room(Message message, size_t nbytes) except -1
cdef int too_deep(Message message) except -1
cdef int append(Message message, bytes data) except -1

cdef inline int need(Message message, size_t nbytes) except -1:
    """Makes room for more bytes; `data` may move."""
    return make_room(message, nbytes) if message.room - message.size < nbytes else 0

cdef inline Part* enter(Message message, PartKind kind, object container) except NULL:
    """Goes one level down.  Whoever enters leaves; after an error message_clear does it for all that are left."""
    cdef Part* part
    if message.depth == message.max_depth:
        too_deep(message)
    part = &message.path[message.depth]
    part.kind = kind
    Py_INCREF(container)
    part.container = <PyObject*>container
    part.index = 0
    part.key = NULL
    message.depth += 1
    return part

cdef inline int leave(Message message) except -1:
    message.depth -= 1
    Py_DECREF(<object>message.path[message.depth].container)
    return 0

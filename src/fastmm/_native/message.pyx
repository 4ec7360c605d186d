"""One message being written: a warm main frame, the payload, and the path to what is being written.

The path is kept as a stack of parts, filled in by whoever goes a level down, and read only when an error needs it.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from fastmm.errors import EncodeError, FastmmError, LimitError

from .payload cimport Payload, payload_clear
from .plan cimport Plan
from .pool cimport block_grow


cdef class Message:
    def __init__(self):
        raise TypeError("a Message belongs to an encoder")

    def __dealloc__(self):
        free(self.path)


cdef Message message_new(Payload payload, int64_t threshold, int max_depth, Py_ssize_t max_frames,
                         int64_t max_payload_nbytes, object hook, object oob_tensor_consumer):
    cdef Message message = Message.__new__(Message)
    message.payload = payload
    message.threshold = threshold
    message.max_depth = max_depth
    message.max_frames = max_frames
    message.max_payload_nbytes = max_payload_nbytes
    message.hook = hook
    message.profile = -1
    message.oob_tensor_consumer = oob_tensor_consumer
    message.path = <Part*>calloc(max_depth, sizeof(Part))
    if message.path is NULL:
        raise MemoryError()
    return message


cdef int message_clear(Message message) except -1:
    while message.depth:
        leave(message)
    message.frames = None
    message.features = None
    message.features_frames = None
    return payload_clear(message.payload)


cdef str path_of(Message message):
    """`$.mm_features[3].data['pixel_values'].data[0]`, as far as the walk has come."""
    cdef Part* part
    cdef int i
    parts = ["$"]
    for i in range(message.depth):
        part = &message.path[i]
        if part.kind == PART_FIELD:
            parts.append("." + <str>(<Plan>part.plan).names[part.index])
        elif part.kind == PART_ITEM or part.kind == PART_FIXED:
            parts.append(f"[{part.index}]")
        elif part.kind == PART_KEY:
            parts.append(f"[{key_name(<object>part.key)}]")
    return "".join(parts)


cdef str key_name(object key):
    """A key as it may stand in a path: short, and without running code of its class."""
    if isinstance(key, str):
        return str.__repr__(key[:64])
    return repr(key)[:64] if type(key) in (int, float, bool, bytes, type(None)) else f"<{type(key).__qualname__}>"


cdef object at_path(Message message, object error):
    if error.path is None:
        error.path = path_of(message)
    return error


cdef int fail(Message message, object cls, str text) except -1:
    raise cls(text, path=path_of(message))


cdef int foreign(Message message, object error, str whose) except -1:
    if isinstance(error, FastmmError):
        raise at_path(message, error)
    if message.as_vllm or isinstance(error, MemoryError):
        raise error
    raise EncodeError(f"{whose} failed: {type(error).__name__}", path=path_of(message)) from error


cdef int make_room(Message message, size_t nbytes) except -1:
    block_grow(message.block, message.size, max(message.size + nbytes, 2 * message.room))
    message.data = message.block.data
    message.room = message.block.capacity
    return 0


cdef int too_deep(Message message) except -1:
    return fail(message, LimitError, f"expected at most {message.max_depth} levels of nesting (max_depth)")


cdef int append(Message message, bytes data) except -1:
    cdef Py_ssize_t nbytes = PyBytes_GET_SIZE(data)
    need(message, nbytes)
    memcpy(message.data + message.size, PyBytes_AS_STRING(data), nbytes)
    message.size += nbytes
    return 0

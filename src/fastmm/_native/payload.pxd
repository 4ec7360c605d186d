"""Reference of Payload: the tensors of one message.  Every function here needs the GIL."""

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t

from .tensor cimport Family, Producer, TensorView

ctypedef enum SlotKind:
    SLOT_NONE  # nothing can be put back: a tuple, a mapping that is not ours to change
    SLOT_OFFSET  # a slot of the object, `index` bytes in
    SLOT_ITEM  # a list's item
    SLOT_KEY  # a dict's value; the dict may be an object's own

cdef struct Slot:  # where in the tree a leaf hangs
    SlotKind kind
    PyObject* container  # borrowed
    PyObject* key  # borrowed
    Py_ssize_t index

cdef struct Leaf:  # memory that at least one tensor of the message lies in
    uintptr_t data  # the first element, by which a leaf is found
    uintptr_t start  # all elements lie in [start, end)
    uintptr_t end
    int64_t nbytes  # of the elements; less than end - start with gaps, more when expanded
    uint64_t layout  # 0 when dense, else a hash of shape and strides
    int dtype  # of the elements when they are to be cast, else -1
    int frame  # aux index in the message of `serial`, 0 without
    int serial
    int job  # the first job on this memory, -1 without
    bint shared_bytes  # partly overlaps another leaf

cdef struct Job:  # a leaf that is to be cast when the walk is over
    Slot slot  # container and key counted
    PyObject* tensor  # counted
    PyObject* owner  # counted
    Family family
    void* src
    int64_t nelem
    int src_dtype
    bint swapped
    bint may_write  # as far as the tensor itself says
    int leaf
    int leader  # the job that casts this memory, itself as a rule
    PyObject* frames  # the message's list, counted
    int frame  # aux index, 0 when inline
    Py_ssize_t offset  # inline: where in the main frame the bytes go
    int ndim
    Py_ssize_t dims  # where in Payload.dims its shape starts
    # Set when the message is finished:
    void* dst
    PyObject* replacement  # counted or NULL
    PyObject* block  # counted or NULL: a pooled destination
    PyObject* frame_object  # counted or NULL: the leader's, for all messages

cdef class Payload:
    cdef list frames  # the message that is being written: [main, aux 1, ...]
    cdef int serial  # of that message
    cdef list held  # objects whose addresses leaves and memos are known by, and that nobody else may hold
    cdef int target  # fmm_dtype_t that floating payloads end in, -1: as they are
    cdef int target_nbytes
    cdef bint inplace
    cdef bint dedup
    cdef Leaf* leaves
    cdef int nleaves
    cdef int leaves_room
    cdef uint32_t* table  # open addressing over leaves, index + 1; a power of two
    cdef uint32_t table_size
    cdef Job* jobs
    cdef int njobs
    cdef int jobs_room
    cdef int64_t* dims
    cdef Py_ssize_t ndims
    cdef Py_ssize_t dims_room
    cdef unsigned long long nbytes_viewed
    cdef unsigned long long nbytes_copied
    cdef unsigned long long nbytes_cast
    cdef Payload next_casting  # guards memory that is being cast without the GIL

cdef Payload payload_new(int target, int target_nbytes, bint inplace, bint dedup)

cdef inline int payload_start(Payload payload) except -1:
    payload.serial = 0
    payload.nbytes_viewed = 0
    payload.nbytes_copied = 0
    payload.nbytes_cast = 0
    return 0

cdef inline int payload_next(Payload payload, list frames) except -1:
    """Begins a message; leaves and jobs of the ones before stay, until payload_finish casts for all of them."""
    payload.frames = frames
    payload.serial += 1
    return 0

# Lets go of everything that belongs to a message; there may be nothing.
cdef int payload_clear_all(Payload payload) except -1
cdef inline int payload_clear(Payload payload) except -1:
    payload.frames = None
    return payload_clear_all(payload) if payload.nleaves or payload.njobs or payload.held else 0

# The aux index of a tensor that travels as it is.
cdef int payload_frame(Payload payload, Producer producer, PyObject* tensor, TensorView* view) except -1

# Notes the memory of a tensor that travels inline: a cast in place must not touch it.
cdef int payload_note(Payload payload, TensorView* view) except -1

# Plans a cast; returns the aux index, or 0 when `offset` >= 0 says where in the main frame the bytes go.
cdef int payload_cast(Payload payload, Producer producer, PyObject* tensor, TensorView* view, Slot* slot,
                      Py_ssize_t offset) except -1

# Repeats jobs [first, last) for the current message, whose main frame holds a copy of theirs, `shift` bytes further on.
cdef int payload_repeat(Payload payload, int first, int last, Py_ssize_t shift) except -1

# Runs the planned casts, all or nothing, fills in the frames and the inline bytes, puts the new leaves into the tree.
cdef int payload_finish(Payload payload, uint8_t* main) except -1

"""The tensors of one message: which become frames, which share one, which are cast, and where.

The walk only notes them.  Casting waits until the walk is over, for two reasons: a failure anywhere leaves the caller's
memory as it was, and only then is it known which memory two leaves share.  `payload_finish` first does all that can fail,
then casts, then puts the new leaves into the tree.
"""

import os

from cpython.dict cimport PyDict_GetItem, PyDict_SetItem
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF, PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, qsort, realloc
from libc.string cimport memcpy, memset

from fastmm.errors import EncodeError, SchemaError

from .cast cimport CAST_RELEASE_GIL_MIN_NBYTES, cast_run, cast_supported, cast_supported_inplace, selected_table, \
    fmm_cast_table_t
from .frame cimport Frame, frame_new
from .pool cimport Block, block_acquire
from .tensor cimport MAX_NDIM, memory_is_private, owner_is_private, tensor_gather, tensor_owner
from .tensor_make cimport is_exported_readonly, tensor_make

cdef extern from "fastmm/dtype.h" nogil:
    ctypedef struct fmm_dtype_info_t:
        const char* name
        unsigned char item_nbytes
    const fmm_dtype_info_t* fmm_dtype_info(int dtype)

cdef struct Span:
    uintptr_t start
    uintptr_t end
    int leaf

# Payloads whose memory is about to be cast, or is being cast without the GIL; a singly linked list, guarded by the GIL.
cdef Payload casting = None


cdef class Payload:
    def __init__(self):
        raise TypeError("a Payload belongs to an encoder")

    def __dealloc__(self):
        free(self.leaves)
        free(self.table)
        free(self.jobs)
        free(self.dims)


cdef Payload payload_new(int target, int target_nbytes, bint inplace, bint dedup):
    cdef Payload payload = Payload.__new__(Payload)
    payload.target = target
    payload.target_nbytes = target_nbytes
    payload.inplace = inplace
    payload.dedup = dedup
    payload.held = []
    return payload


cdef int payload_clear_all(Payload payload) except -1:
    """Lets go of everything that belongs to a message.  Dropping references may run code: the fields go first."""
    cdef int i, njobs = payload.njobs
    cdef Job* jobs = payload.jobs
    if payload.nleaves and payload.table_size:
        memset(payload.table, 0, payload.table_size * sizeof(uint32_t))
    payload.nleaves = 0
    payload.ndims = 0
    if njobs:
        payload.jobs = NULL
        payload.njobs = 0
        payload.jobs_room = 0
        for i in range(njobs):
            Py_XDECREF(jobs[i].slot.container)
            Py_XDECREF(jobs[i].slot.key)
            Py_XDECREF(jobs[i].tensor)
            Py_XDECREF(jobs[i].owner)
            Py_XDECREF(jobs[i].frames)
            Py_XDECREF(jobs[i].replacement)
            Py_XDECREF(jobs[i].block)
            Py_XDECREF(jobs[i].frame_object)
        free(jobs)
    if payload.held:
        payload.held.clear()
    return 0


# --- leaves -------------------------------------------------------------------------------------------------------------


cdef inline uint32_t hash_of(uintptr_t data) noexcept:
    return <uint32_t>((<uint64_t>data * <uint64_t>0x9e3779b97f4a7c15) >> 32)


cdef int leaf_find(Payload payload, uintptr_t data, int64_t nbytes, uint64_t layout, int dtype) noexcept:
    cdef uint32_t mask = payload.table_size - 1
    cdef uint32_t position
    cdef Leaf* leaf
    if payload.nleaves == 0:
        return -1
    position = hash_of(data) & mask
    while payload.table[position]:
        leaf = &payload.leaves[payload.table[position] - 1]
        if leaf.data == data and leaf.nbytes == nbytes and leaf.layout == layout and leaf.dtype == dtype:
            return <int>payload.table[position] - 1
        position = (position + 1) & mask
    return -1


cdef int leaf_add(Payload payload, TensorView* view, uint64_t layout, int dtype) except -1:
    cdef int index = payload.nleaves
    cdef Leaf* leaf
    if index == payload.leaves_room:
        leaves_grow(payload)
    leaf = &payload.leaves[index]
    leaf.data = <uintptr_t>view.data
    span_of(view, &leaf.start, &leaf.end)
    leaf.nbytes = view.nbytes
    leaf.layout = layout
    leaf.dtype = dtype
    leaf.frame = 0
    leaf.serial = 0
    leaf.job = -1
    leaf.shared_bytes = False
    table_put(payload, index)
    payload.nleaves += 1
    return index


cdef void table_put(Payload payload, int index) noexcept:
    cdef uint32_t mask = payload.table_size - 1
    cdef uint32_t position = hash_of(payload.leaves[index].data) & mask
    while payload.table[position]:
        position = (position + 1) & mask
    payload.table[position] = index + 1


cdef int leaves_grow(Payload payload) except -1:
    """Doubles the room; the table stays at most half full."""
    cdef int room = 2 * payload.leaves_room if payload.leaves_room else 32
    cdef Leaf* leaves = <Leaf*>realloc(payload.leaves, room * sizeof(Leaf))
    cdef uint32_t* table
    cdef int i
    if leaves is NULL:
        raise MemoryError()
    payload.leaves = leaves
    table = <uint32_t*>calloc(2 * room, sizeof(uint32_t))
    if table is NULL:
        raise MemoryError()
    free(payload.table)
    payload.table = table
    payload.table_size = 2 * room
    payload.leaves_room = room
    for i in range(payload.nleaves):
        table_put(payload, i)
    return 0


cdef uint64_t layout_of(TensorView* view) noexcept:
    """0 for dense memory, else a hash of shape and strides (never 0)."""
    cdef uint64_t value = <uint64_t>0xcbf29ce484222325
    cdef int axis
    if view.dense:
        return 0
    for axis in range(view.ndim):
        value = (value ^ <uint64_t>view.shape[axis]) * <uint64_t>0x100000001b3
        value = (value ^ <uint64_t>(view.strides[axis] * view.stride_unit_nbytes)) * <uint64_t>0x100000001b3
    return value | 1


cdef void span_of(TensorView* view, uintptr_t* start, uintptr_t* end) noexcept:
    """The bytes that the elements lie in; strides may be negative."""
    cdef int64_t low = 0, high = view.item_nbytes, reach
    cdef int axis
    if view.dense or view.nelem == 0:
        start[0] = <uintptr_t>view.data
        end[0] = <uintptr_t>view.data + view.nbytes
        return
    for axis in range(view.ndim):
        reach = (view.shape[axis] - 1) * view.strides[axis] * view.stride_unit_nbytes
        if reach < 0:
            low += reach
        else:
            high += reach
    start[0] = <uintptr_t>view.data + low
    end[0] = <uintptr_t>view.data + high


cdef int leaf_of(Payload payload, TensorView* view, int dtype, bint* found) except -1:
    """The leaf of this memory, an old one where two tensors of one kind lie over the very same elements."""
    cdef uint64_t layout = layout_of(view)
    cdef int index = leaf_find(payload, <uintptr_t>view.data, view.nbytes, layout, dtype)
    found[0] = index >= 0
    return index if index >= 0 else leaf_add(payload, view, layout, dtype)


# --- as they are --------------------------------------------------------------------------------------------------------


cdef int payload_frame(Payload payload, Producer producer, PyObject* tensor, TensorView* view) except -1:
    cdef bint found = False
    cdef Leaf* leaf
    cdef int index = <int>PyList_GET_SIZE(payload.frames)
    cdef Block block
    if view.nbytes and (payload.dedup or payload.target >= 0):
        leaf = &payload.leaves[leaf_of(payload, view, -1, &found)]
        if payload.dedup and frame_of(payload, leaf):
            return leaf.frame
        leaf.frame = index
        leaf.serial = payload.serial
    if view.dense:
        payload.frames.append(frame_new(view.data, view.nbytes, tensor_owner(producer, tensor, view)))
        payload.nbytes_viewed += view.nbytes
    else:
        block = block_acquire(view.nbytes)
        tensor_gather(view, block.data)
        payload.frames.append(frame_new(block.data, view.nbytes, block))
        payload.nbytes_copied += view.nbytes
        payload.held.append(<object>tensor)  # its address means this memory until the message is done
    return index


cdef inline int frame_of(Payload payload, Leaf* leaf) noexcept:
    """The leaf's frame in the message that is being written, 0 without."""
    return leaf.frame if leaf.serial == payload.serial else 0


cdef int payload_note(Payload payload, TensorView* view) except -1:
    cdef bint found
    if view.nbytes and payload.target >= 0:
        leaf_of(payload, view, -1, &found)
    return 0


# --- casts --------------------------------------------------------------------------------------------------------------


cdef int payload_cast(Payload payload, Producer producer, PyObject* tensor, TensorView* view, Slot* slot,
                      Py_ssize_t offset) except -1:
    cdef bint found
    cdef int leaf, axis
    cdef Job* job
    cdef Job* leader
    cdef Block block
    cdef object owner
    if not cast_supported(view.dtype, payload.target):
        raise SchemaError(f"expected a payload that can be cast to {(<bytes>fmm_dtype_info(payload.target).name).decode()}, "
                          f"got {(<bytes>fmm_dtype_info(view.dtype).name).decode()}: cast it before, or give dtype=None")
    leaf = leaf_of(payload, view, view.dtype + 64 * view.swapped, &found)  # `found`: cast by a job that is there already
    job = job_add(payload, view.ndim)
    for axis in range(view.ndim):
        payload.dims[job.dims + axis] = view.shape[axis]
    job.slot = slot[0]
    Py_INCREF(<object>slot.container)
    if slot.key is not NULL:
        Py_INCREF(<object>slot.key)
    Py_INCREF(<object>tensor)
    job.tensor = tensor
    owner = tensor_owner(producer, tensor, view)
    job.family = producer.family
    job.src = view.data
    job.nelem = view.nelem
    job.src_dtype = view.dtype
    job.swapped = view.swapped
    job.may_write = (payload.inplace and view.dense and view.writable and slot.kind != SLOT_NONE
                     and cast_supported_inplace(view.dtype, payload.target))
    job.leaf = leaf
    job.offset = offset
    if found:
        job.leader = payload.leaves[leaf].job
        leader = &payload.jobs[job.leader]
        leader.may_write = leader.may_write and job.may_write
    else:
        job.leader = payload.njobs - 1
        payload.leaves[leaf].job = job.leader
        if not view.dense:
            block = block_acquire(view.nbytes)  # gathered now, while the view is good; cast from there
            tensor_gather(view, block.data)
            payload.nbytes_copied += view.nbytes
            job.src = block.data
            owner = block
    Py_INCREF(owner)
    job.owner = <PyObject*>owner
    if offset >= 0:
        return 0
    Py_INCREF(payload.frames)
    job.frames = <PyObject*>payload.frames
    if payload.dedup and frame_of(payload, &payload.leaves[leaf]):
        job.frame = payload.leaves[leaf].frame
        return job.frame
    job.frame = <int>PyList_GET_SIZE(payload.frames)
    payload.frames.append(None)  # filled in when the message is finished
    payload.leaves[leaf].frame = job.frame
    payload.leaves[leaf].serial = payload.serial
    return job.frame


cdef int payload_repeat(Payload payload, int first, int last, Py_ssize_t shift) except -1:
    cdef Job* job
    cdef Job* source
    cdef int i
    for i in range(first, last):
        job = job_add(payload, 0)
        source = &payload.jobs[i]
        job.slot.kind = SLOT_NONE  # the tree is the first one's business
        job.leaf = source.leaf
        job.leader = source.leader
        job.nelem = source.nelem
        job.offset = source.offset + shift if source.offset >= 0 else -1
        job.frame = source.frame
        if job.frame:
            Py_INCREF(payload.frames)
            job.frames = <PyObject*>payload.frames
    return 0


cdef Job* job_add(Payload payload, int ndim) except NULL:
    cdef int room
    cdef Py_ssize_t dims_room
    cdef void* grown
    if payload.njobs == payload.jobs_room:
        room = 2 * payload.jobs_room if payload.jobs_room else 16
        grown = realloc(payload.jobs, room * sizeof(Job))
        if grown is NULL:
            raise MemoryError()
        payload.jobs = <Job*>grown
        payload.jobs_room = room
    if payload.ndims + ndim > payload.dims_room:
        dims_room = 2 * payload.dims_room + MAX_NDIM
        grown = realloc(payload.dims, dims_room * sizeof(int64_t))
        if grown is NULL:
            raise MemoryError()
        payload.dims = <int64_t*>grown
        payload.dims_room = dims_room
    memset(&payload.jobs[payload.njobs], 0, sizeof(Job))
    payload.jobs[payload.njobs].dims = payload.ndims
    payload.jobs[payload.njobs].ndim = ndim
    payload.njobs += 1
    payload.ndims += ndim
    return &payload.jobs[payload.njobs - 1]


cdef int payload_finish(Payload payload, uint8_t* main) except -1:
    cdef const fmm_cast_table_t* table
    if payload.njobs == 0:
        return 0
    table = selected_table()
    if payload.inplace:
        find_overlaps(payload)
    announce(payload)
    try:
        prepare(payload)
        cast_all(payload, table)
    finally:
        withdraw(payload)
    publish(payload, main)
    return 0


cdef int compare_spans(const void* a, const void* b) noexcept nogil:
    cdef uintptr_t left = (<const Span*>a).start
    cdef uintptr_t right = (<const Span*>b).start
    return (left > right) - (left < right)


cdef int find_overlaps(Payload payload) except -1:
    """Marks leaves that share bytes with another one.  Sorted by start, it is enough to look at the furthest end so far:
    any other earlier leaf that reaches into this one overlaps that furthest one too, and was marked with it."""
    cdef Span* spans
    cdef int i, count = 0, furthest = 0
    if payload.nleaves < 2:
        return 0
    spans = <Span*>malloc(payload.nleaves * sizeof(Span))
    if spans is NULL:
        raise MemoryError()
    for i in range(payload.nleaves):
        if payload.leaves[i].nbytes:  # what is empty shares nothing, wherever it lies
            spans[count].start = payload.leaves[i].start
            spans[count].end = payload.leaves[i].end
            spans[count].leaf = i
            count += 1
    qsort(spans, count, sizeof(Span), compare_spans)
    for i in range(1, count):
        if spans[i].start < spans[furthest].end:
            payload.leaves[spans[i].leaf].shared_bytes = True
            payload.leaves[spans[furthest].leaf].shared_bytes = True
        if spans[i].end > spans[furthest].end:
            furthest = i
    free(spans)
    return 0


cdef int prepare(Payload payload) except -1:
    """Everything that can fail: destinations, frames, new leaves.  Nothing of the caller's is changed yet."""
    cdef Job* job
    cdef Job* leader
    cdef Leaf* leaf
    cdef Block block
    cdef int64_t nbytes
    cdef int i
    cdef Frame frame
    cdef PyObject* asked_owner = NULL
    cdef bint private = False
    for i in range(payload.njobs):
        job = &payload.jobs[i]
        leader = &payload.jobs[job.leader]
        leaf = &payload.leaves[job.leaf]
        nbytes = job.nelem * payload.target_nbytes
        if job.leader == i:
            if job.may_write and not leaf.nbytes:
                pass  # nothing is written
            elif job.may_write and not leaf.shared_bytes:
                if job.owner != asked_owner:  # items of one batch lie in one storage: one question for all
                    private = owner_is_private(<object>job.owner) or (
                        memory_is_private(job.src, leaf.nbytes) and not is_exported_readonly(job.src, leaf.nbytes))
                    asked_owner = job.owner
                job.may_write = private and not being_cast(payload, leaf)
            else:
                job.may_write = False
            if job.may_write:
                job.dst = job.src
            else:
                block = block_acquire(nbytes)
                Py_INCREF(block)
                job.block = <PyObject*>block
                job.dst = block.data
        else:
            job.dst = leader.dst
        if job.frame and (<list>job.frames)[job.frame] is None:
            if leader.frame_object is NULL:
                frame = frame_new(job.dst, nbytes, <object>(leader.owner if leader.block is NULL else leader.block))
                Py_INCREF(frame)
                leader.frame_object = <PyObject*>frame
                if leader.block is NULL:
                    payload.nbytes_viewed += nbytes
            (<list>job.frames)[job.frame] = <object>leader.frame_object
        if leader.may_write and job.slot.kind != SLOT_NONE:
            replacement = tensor_make(
                job.family, job.dst, payload.target, job.ndim, payload.dims + job.dims, <object>job.owner, False)
            Py_INCREF(replacement)
            job.replacement = <PyObject*>replacement
    return 0


cdef int announce(Payload payload) except -1:
    """Other threads see from now on which memory is about to be cast."""
    global casting
    payload.next_casting = casting
    casting = payload
    return 0


cdef int withdraw(Payload payload) except -1:
    global casting
    cdef Payload before = casting
    if before is payload:
        casting = payload.next_casting
    else:
        while before is not None and before.next_casting is not payload:
            before = before.next_casting
        if before is not None:
            before.next_casting = payload.next_casting
    payload.next_casting = None
    return 0


def forget_casting():
    """In a forked child no other thread lives, and none will ever finish its casts."""
    global casting
    casting = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_casting)


cdef bint being_cast(Payload payload, Leaf* leaf) except -1:
    """A request is handed over to one encode at a time: memory that another thread is casting is an error."""
    cdef Payload other = casting
    cdef int i
    while other is not None:
        if other is not payload:
            for i in range(other.nleaves):
                if other.leaves[i].job >= 0 and other.leaves[i].start < leaf.end and leaf.start < other.leaves[i].end:
                    raise EncodeError("expected memory that nobody else writes, got a payload that another thread is casting "
                                      "in place right now: encode a request from one thread at a time, or with "
                                      "inplace=False")
        other = other.next_casting
    return False


cdef int cast_all(Payload payload, const fmm_cast_table_t* table) except -1:
    cdef int i
    cdef int64_t total = 0
    for i in range(payload.njobs):
        if payload.jobs[i].leader == i:
            total += payload.leaves[payload.jobs[i].leaf].nbytes
    payload.nbytes_cast += total
    if total < CAST_RELEASE_GIL_MIN_NBYTES:
        run_jobs(payload.jobs, payload.njobs, payload.target, table)
    else:
        with nogil:
            run_jobs(payload.jobs, payload.njobs, payload.target, table)
    return 0


cdef void run_jobs(Job* jobs, int njobs, int target, const fmm_cast_table_t* table) noexcept nogil:
    """Cannot fail: the pairs were checked, sources and destinations are equal or apart."""
    cdef int i
    for i in range(njobs):
        if jobs[i].leader == i and jobs[i].nelem:
            cast_run(table, jobs[i].src_dtype, target, jobs[i].src, jobs[i].dst, jobs[i].nelem, jobs[i].swapped)


cdef int publish(Payload payload, uint8_t* main) except -1:
    cdef Job* job
    cdef int i
    cdef int64_t nbytes
    for i in range(payload.njobs):
        job = &payload.jobs[i]
        if job.offset >= 0 and not job.frame:
            nbytes = job.nelem * payload.target_nbytes
            if nbytes:  # an empty tensor may have no memory at all
                memcpy(main + job.offset, job.dst, nbytes)
            payload.nbytes_copied += nbytes
        if job.replacement is not NULL:
            replace_leaf(&job.slot, job.tensor, <object>job.replacement)
    return 0


cdef int replace_leaf(Slot* slot, PyObject* tensor, object replacement) except -1:
    """Only where the tensor still hangs: what somebody else put there meanwhile stays."""
    cdef PyObject** place
    cdef object container = <object>slot.container
    if slot.kind == SLOT_OFFSET:
        place = <PyObject**>(<char*>slot.container + slot.index)
        if place[0] == tensor:
            Py_INCREF(replacement)
            place[0] = <PyObject*>replacement
            Py_DECREF(<object>tensor)
    elif slot.kind == SLOT_ITEM:
        if slot.index < PyList_GET_SIZE(container) and PyList_GET_ITEM(container, slot.index) == tensor:
            (<list>container)[slot.index] = replacement
    elif slot.kind == SLOT_KEY:
        if PyDict_GetItem(container, <object>slot.key) == tensor:
            PyDict_SetItem(container, <object>slot.key, replacement)
    return 0

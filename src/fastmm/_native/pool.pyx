"""Warm buffers, kept from one message to the next.

Fresh memory costs 6 to 30 times the cast that fills it, all of it page faults, so no message may pay for it twice.
Blocks are powers of two, sorted by size; what lies idle is bounded, and what is handed out is not the pool's business.
"""

from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy

from .pool cimport Block

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void** out, size_t alignment, size_t nbytes)


cdef enum:
    ALIGNMENT = 64  # a cache line, and an AVX-512 register
    MIN_SHIFT = 12  # 4 KiB
    CLASSES = 36
    SLOTS = 16  # idle blocks kept of one size

cdef struct SizeClass:
    int count
    uint8_t* idle[SLOTS]

cdef SizeClass size_classes[CLASSES]
cdef size_t idle_nbytes = 0
cdef size_t idle_limit_nbytes = 256 << 20
cdef unsigned long long hits = 0
cdef unsigned long long misses = 0


cdef int class_of(size_t nbytes) except -1:
    cdef int index = 0
    while (<size_t>1 << (MIN_SHIFT + index)) < nbytes:
        index += 1
        if index == CLASSES:
            raise MemoryError(f"a buffer of {nbytes} bytes is beyond what fastmm allocates")
    return index


cdef uint8_t* memory_acquire(int index) except NULL:
    global idle_nbytes, hits, misses
    cdef SizeClass* size_class = &size_classes[index]
    cdef void* fresh = NULL
    if size_class.count:
        size_class.count -= 1
        hits += 1
        idle_nbytes -= <size_t>1 << (MIN_SHIFT + index)
        return size_class.idle[size_class.count]
    misses += 1
    if posix_memalign(&fresh, ALIGNMENT, <size_t>1 << (MIN_SHIFT + index)):
        raise MemoryError(f"no memory for a buffer of {<size_t>1 << (MIN_SHIFT + index)} bytes")
    return <uint8_t*>fresh


cdef void memory_release(uint8_t* data, size_t capacity) noexcept:
    global idle_nbytes
    cdef int index = 0
    while (<size_t>1 << (MIN_SHIFT + index)) < capacity:
        index += 1
    cdef SizeClass* size_class = &size_classes[index]
    if size_class.count < SLOTS and idle_nbytes + capacity <= idle_limit_nbytes:
        size_class.idle[size_class.count] = data
        size_class.count += 1
        idle_nbytes += capacity
    else:
        free(data)


cdef class Block:
    def __cinit__(self):
        self.data = NULL
        self.capacity = 0

    def __init__(self):
        raise TypeError("a Block comes from the pool")

    def __dealloc__(self):
        if self.data:
            memory_release(self.data, self.capacity)

    @property
    def nbytes(self):
        """Capacity in bytes."""
        return self.capacity


cdef Block block_acquire(size_t nbytes):
    cdef int index = class_of(nbytes)
    cdef Block block = Block.__new__(Block)
    block.data = memory_acquire(index)
    block.capacity = <size_t>1 << (MIN_SHIFT + index)
    return block


cdef int block_grow(Block block, size_t used, size_t nbytes) except -1:
    cdef int index
    cdef uint8_t* data
    if nbytes <= block.capacity:
        return 0
    index = class_of(nbytes)
    data = memory_acquire(index)
    memcpy(data, block.data, used)
    memory_release(block.data, block.capacity)
    block.data = data
    block.capacity = <size_t>1 << (MIN_SHIFT + index)
    return 0


def pool_stats() -> dict[str, int]:
    """Counters of the pool: ``hits``, ``misses``, ``idle_nbytes`` and ``idle_limit_nbytes``."""
    return {"hits": hits, "misses": misses, "idle_nbytes": idle_nbytes, "idle_limit_nbytes": idle_limit_nbytes}


def pool_limit(nbytes: int) -> None:
    """Bound what the pool keeps idle, in bytes; 0 keeps nothing.  What is over the bound is freed at once."""
    global idle_limit_nbytes, idle_nbytes
    cdef int index
    if nbytes < 0:
        raise ValueError(f"pool_limit: expected a number of bytes >= 0, got {nbytes}")
    idle_limit_nbytes = nbytes
    for index in range(CLASSES - 1, -1, -1):  # largest first: the fewest blocks go
        while size_classes[index].count and idle_nbytes > idle_limit_nbytes:
            size_classes[index].count -= 1
            idle_nbytes -= <size_t>1 << (MIN_SHIFT + index)
            free(size_classes[index].idle[size_classes[index].count])

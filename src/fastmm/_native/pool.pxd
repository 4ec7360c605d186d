"""Reference of the buffer pool.  Every function here needs the GIL, which is also what guards the free lists."""

from libc.stdint cimport uint8_t


cdef class Block:
    """A warm piece of memory; goes back to the pool when its last holder lets go.  Never shared while in use."""

    cdef uint8_t* data  # 64-byte aligned, owned by this object
    cdef size_t capacity  # in bytes, a power of two


cdef Block block_acquire(size_t nbytes)

# Makes `block` hold at least `nbytes`, keeping its first `used` bytes.  `data` moves: no view of it may exist.
cdef int block_grow(Block block, size_t used, size_t nbytes) except -1

"""Reference of TensorView: any tensor, seen through one struct.  Every function here needs the GIL."""

from cpython.object cimport PyTypeObject
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "fastmm/dlpack.h" nogil:
    cdef enum:
        FMM_DLPACK_MAJOR
        FMM_DLPACK_MINOR
        FMM_DL_CPU
        FMM_DL_CUDA_HOST
        FMM_DL_ROCM_HOST
        FMM_DL_CUDA_MANAGED
    ctypedef struct fmm_dl_version_t:
        uint32_t major
        uint32_t minor
    ctypedef struct fmm_dl_device_t:
        int32_t device_type
        int32_t device_id
    ctypedef struct fmm_dl_dtype_t:
        uint8_t code
        uint8_t bits
        unsigned short lanes
    ctypedef struct fmm_dl_tensor_t:
        void* data
        fmm_dl_device_t device
        int32_t ndim
        fmm_dl_dtype_t dtype
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset
    ctypedef struct fmm_dl_managed_t:
        fmm_dl_version_t version
        void* manager_ctx
        void (*deleter)(fmm_dl_managed_t*) noexcept
        uint64_t flags
        fmm_dl_tensor_t tensor
    ctypedef struct fmm_dl_exchange_header_t:
        fmm_dl_version_t version
        fmm_dl_exchange_header_t* prev_api
    ctypedef struct fmm_dl_exchange_api_t:
        fmm_dl_exchange_header_t header
        int (*managed_tensor_from_py_object_no_sync)(void*, fmm_dl_managed_t**) noexcept
        int (*managed_tensor_to_py_object_no_sync)(fmm_dl_managed_t*, void**) except -1
        int (*dltensor_from_py_object_no_sync)(void*, fmm_dl_tensor_t*) noexcept

cdef extern from "Python.h":
    # A method descriptor's C function, called without the descriptor around it: `self` and NULL.
    ctypedef PyObject* (*NoArgsMethod "PyCFunction")(PyObject*, PyObject*) except NULL

cdef enum:
    MAX_NDIM = 64  # numpy's own bound, and far beyond torch's uses

ctypedef enum Family:
    FAMILY_EXCHANGE  # has the DLPack C exchange API on its type: torch.Tensor and its subclasses
    FAMILY_NUMPY
    FAMILY_DLPACK  # only `__dlpack__`
    FAMILY_WIRE  # fastmm.WireTensor
    FAMILY_BUFFER  # any other exporter of the buffer protocol

cdef class Producer:
    """How tensors of one Python type are read; made once per type."""

    cdef Family family
    cdef const fmm_dl_exchange_api_t* api  # FAMILY_EXCHANGE only
    cdef NoArgsMethod is_neg  # these two may be NULL: not torch's
    cdef NoArgsMethod untyped_storage
    cdef object keepalive  # the descriptors and the capsule behind the pointers above

cdef struct TensorView:
    void* data  # the first element
    const int64_t* shape  # borrowed, as is `strides`: good until control goes back to Python
    const int64_t* strides  # NULL when dense
    int64_t stride_unit_nbytes  # DLPack counts strides in elements, numpy in bytes
    int64_t nelem
    int64_t nbytes  # nelem * item_nbytes; both products are checked
    int ndim
    int dtype  # fmm_dtype_t, FMM_DTYPE_NONE for what only numpy has (strings, long double)
    int item_nbytes
    bint dense  # C order without gaps
    bint writable  # as far as the producer says
    bint moved  # brought to the host from another device
    bint swapped  # elements are in the other byte order
    char numpy_kind  # numpy's letter of the type, where the name is numpy's
    bint numpy_style  # the producer names types as numpy does ("<f4"), not as torch does ("float32")
    PyObject* holder  # counted or NULL: what was made to get at the memory

# The reader of a type's tensors, or None when the type is no tensor.
cdef Producer producer_of(object cls)

# Looks at `obj`; on success the view must be cleared, on failure it is.  Raises SchemaError, without a path, for what
# cannot travel.
cdef int tensor_view(Producer producer, PyObject* obj, TensorView* view) except -1
cdef void tensor_view_clear(TensorView* view) noexcept

# What keeps the viewed memory alive, whatever happens to the tensor object itself (`t.data = ...`, `t.set_(...)`).
cdef object tensor_owner(Producer producer, PyObject* obj, TensorView* view)

# Whether memory may be written without a file or another process noticing: `fmm_memory_is_private` of memory_kind.h.
cdef bint memory_is_private(const void* data, size_t nbytes) noexcept

# The same of what `tensor_owner` gave, where its type knows: memory that torch's or numpy's allocator gave them is.  False
# means "ask memory_is_private", which costs microseconds.
cdef bint owner_is_private(object owner) except -1

# numpy's name of the viewed type ("<f4", "|b1", "<U2") into `name`; returns its length.
cdef int numpy_name(TensorView* view, char* name) noexcept

# Gathers the elements in C order into `out`, which has room for view.nbytes.
cdef void tensor_gather(const TensorView* view, void* out) noexcept nogil

# The table of our major version behind a capsule, walking back from a newer one; NULL when there is none.
cdef const fmm_dl_exchange_api_t* exchange_api(object capsule) except? NULL

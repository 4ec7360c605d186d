"""Tensors over memory that is already there: torch by DLPack's exchange table, numpy by its C API, WireTensor."""

cimport numpy as cnp
from cpython.object cimport PyTypeObject
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport int64_t, uint8_t, uintptr_t
from libc.stdlib cimport free, malloc

from fastmm.errors import SchemaError
from fastmm.schema import WireTensor

from .frame cimport frame_new
from .tensor cimport (
    FAMILY_BUFFER, FAMILY_DLPACK, FAMILY_EXCHANGE, FAMILY_NUMPY, FMM_DL_CPU, FMM_DLPACK_MAJOR, Family, exchange_api,
    fmm_dl_exchange_api_t, fmm_dl_managed_t,
)

cnp.import_array()

cdef extern from "fastmm/dtype.h" nogil:
    ctypedef struct fmm_dtype_info_t:
        const char* name
        uint8_t item_nbytes
        uint8_t dlpack_code
        uint8_t dlpack_bits
        char numpy_kind
    const fmm_dtype_info_t fmm_dtype_infos[1]

cdef extern from "Python.h":
    bint Py_IsInitialized() nogil

cdef extern from "fastmm/size.h" nogil:
    bint fmm_shape_nelem(const int64_t* shape, int ndim, int64_t* out)

cdef object ml_dtypes_module = None  # False: looked for and not there
cdef PyObject* numpy_descrs[32]  # by fmm_dtype_t, counted; NULL: not asked for yet
cdef const fmm_dl_exchange_api_t* torch_exchange_api = NULL
cdef object torch_capsule = None


cdef const fmm_dl_exchange_api_t* torch_api() except NULL:
    global torch_exchange_api, torch_capsule
    if torch_exchange_api is NULL:
        try:
            import torch
        except ImportError:
            raise SchemaError("expected torch to be installed for tensors='torch': install fastmm[torch], or ask for "
                              "tensors='numpy' or 'wire'") from None
        capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
        if capsule is not None:
            torch_exchange_api = exchange_api(capsule)
        if torch_exchange_api is NULL:
            raise SchemaError(f"expected a torch with the DLPack C exchange API (2.10 or newer), got {torch.__version__}")
        torch_capsule = capsule
    return torch_exchange_api


cdef object tensor_make(Family family, void* data, int dtype, int ndim, const int64_t* shape, object owner, bint readonly):
    if family == FAMILY_EXCHANGE:
        return make_torch(data, dtype, ndim, shape, owner, readonly)
    if family == FAMILY_NUMPY or family == FAMILY_BUFFER or family == FAMILY_DLPACK:
        descr = numpy_descr(dtype)
        if descr is not None:
            return make_numpy(data, descr, ndim, shape, NULL, owner, readonly)
    cdef int64_t nelem = 0
    fmm_shape_nelem(shape, ndim, &nelem)
    frame = frame_new(data, nelem * fmm_dtype_infos[dtype].item_nbytes, owner)
    return WireTensor((<bytes>fmm_dtype_infos[dtype].name).decode(), tuple([shape[axis] for axis in range(ndim)]), frame)


cdef object numpy_descr(int dtype):
    if numpy_descrs[dtype] is NULL:
        descr = find_descr(dtype)
        if descr is None:
            return None
        Py_INCREF(descr)
        numpy_descrs[dtype] = <PyObject*>descr
    return <object>numpy_descrs[dtype]


cdef object find_descr(int dtype):
    global ml_dtypes_module
    cdef const fmm_dtype_info_t* info = &fmm_dtype_infos[dtype]
    if info.numpy_kind:
        return cnp.dtype(f"{chr(info.numpy_kind)}{info.item_nbytes}")
    if ml_dtypes_module is None:
        try:
            import ml_dtypes
            ml_dtypes_module = ml_dtypes
        except ImportError:
            ml_dtypes_module = False
    if ml_dtypes_module is False:
        return None
    found = getattr(ml_dtypes_module, (<bytes>info.name).decode(), None)
    return cnp.dtype(found) if found is not None else None


cdef extern from "numpy/arrayobject.h":
    object PyArray_NewFromDescr(PyTypeObject*, cnp.dtype, int, cnp.npy_intp*, cnp.npy_intp*, void*, int, object)
    PyTypeObject PyArray_Type


cdef object make_numpy(void* data, object descr, int ndim, const int64_t* shape, const int64_t* strides_nbytes, object owner,
                       bint readonly):
    cdef int flags = 0 if readonly or data is NULL else cnp.NPY_ARRAY_WRITEABLE  # numpy finds the others out
    Py_INCREF(descr)  # the next call steals it
    array = PyArray_NewFromDescr(
        &PyArray_Type, <cnp.dtype>descr, ndim, <cnp.npy_intp*>shape, <cnp.npy_intp*>strides_nbytes, data, flags, None)
    if data is not NULL:
        cnp.set_array_base(array, owner)
    return array


cdef struct Export:  # what stands behind a DLPack tensor of ours
    fmm_dl_managed_t managed
    PyObject* owner  # counted
    size_t nbytes
    Export* previous  # among the read-only ones
    Export* next
    int64_t dims[1]  # shape, then strides

# Tensors over read-only memory that are alive; a doubly linked list, guarded by the GIL.
cdef Export* readonly_exports = NULL


cdef bint is_exported_readonly(const void* data, size_t nbytes) noexcept:
    cdef Export* export = readonly_exports
    cdef uintptr_t start = <uintptr_t>data
    cdef uintptr_t other
    while export is not NULL:
        other = <uintptr_t>export.managed.tensor.data
        if start < other + export.nbytes and other < start + nbytes:
            return True
        export = export.next
    return False


cdef void release_export(fmm_dl_managed_t* managed) noexcept nogil:
    """The consumer's last holder let go, on any thread, with or without the GIL.  After the interpreter's end there is
    nobody left to give the memory back to."""
    if Py_IsInitialized():
        with gil:
            forget_export(<Export*>managed)


cdef void forget_export(Export* export) noexcept:
    global readonly_exports
    if export.previous is not NULL:
        export.previous.next = export.next
    elif readonly_exports is export:
        readonly_exports = export.next
    if export.next is not NULL:
        export.next.previous = export.previous
    Py_DECREF(<object>export.owner)
    free(export)


cdef object make_torch(void* data, int dtype, int ndim, const int64_t* shape, object owner, bint readonly):
    global readonly_exports
    cdef const fmm_dl_exchange_api_t* api = torch_api()
    cdef Export* export = <Export*>malloc(sizeof(Export) + 2 * ndim * sizeof(int64_t))
    cdef int64_t stride = 1
    cdef int axis
    cdef void* made = NULL
    if export is NULL:
        raise MemoryError()
    for axis in range(ndim - 1, -1, -1):
        export.dims[axis] = shape[axis]
        export.dims[ndim + axis] = stride
        stride *= shape[axis] if shape[axis] > 1 else 1
    export.managed.version.major = FMM_DLPACK_MAJOR
    export.managed.version.minor = 0
    export.managed.manager_ctx = export
    export.managed.deleter = release_export
    export.managed.flags = 0  # torch has no read-only tensors: what decodes over read-only memory is so by contract
    export.managed.tensor.data = data
    export.managed.tensor.device.device_type = FMM_DL_CPU
    export.managed.tensor.device.device_id = 0
    export.managed.tensor.ndim = ndim
    export.managed.tensor.dtype.code = fmm_dtype_infos[dtype].dlpack_code
    export.managed.tensor.dtype.bits = fmm_dtype_infos[dtype].dlpack_bits
    export.managed.tensor.dtype.lanes = 1
    export.managed.tensor.shape = export.dims
    export.managed.tensor.strides = export.dims + ndim
    export.managed.tensor.byte_offset = 0
    export.nbytes = stride * fmm_dtype_infos[dtype].item_nbytes
    export.previous = export.next = NULL
    Py_INCREF(owner)
    export.owner = <PyObject*>owner
    try:
        api.managed_tensor_to_py_object_no_sync(&export.managed, &made)
    except BaseException:
        release_export(&export.managed)
        raise
    if readonly and data is not NULL:
        export.next = readonly_exports
        if readonly_exports is not NULL:
            readonly_exports.previous = export
        readonly_exports = export
    tensor = <object><PyObject*>made
    Py_DECREF(tensor)
    return tensor

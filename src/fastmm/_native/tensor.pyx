"""Any tensor as a TensorView: numpy by its C API, torch and every other producer by DLPack.

torch is never linked and never imported at module scope: its tensors are read through the exchange table that DLPack puts
on the type.  Two things DLPack does not say are asked of torch itself: whether a tensor is lazily negated or conjugated
(DLPack hands out the raw data without a word), and which storage owns the memory.
"""

cimport numpy as cnp
from cpython.memoryview cimport PyMemoryView_FromObject, PyMemoryView_GET_BUFFER
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF, PyObject
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy

from fastmm.errors import SchemaError
from fastmm.schema import WireTensor

cnp.import_array()

cdef extern from "fastmm/dlpack.h" nogil:
    const uint64_t FMM_DL_FLAG_READ_ONLY

cdef extern from "fastmm/dtype.h" nogil:
    cdef enum:
        FMM_DTYPE_NONE
        FMM_CLASS_FLOAT
        FMM_CLASS_COMPLEX
    ctypedef struct fmm_dtype_info_t:
        const char* name
        uint8_t name_nbytes
        uint8_t item_nbytes
        uint8_t number_class
        char numpy_kind
    const fmm_dtype_info_t fmm_dtype_infos[1]
    int fmm_dtype_from_dlpack(uint8_t code, uint8_t bits, unsigned short lanes)
    int fmm_dtype_from_name(const char* name, size_t name_nbytes)
    int fmm_dtype_from_numpy(char kind, size_t item_nbytes)

cdef extern from "fastmm/size.h" nogil:
    bint fmm_mul_i64(int64_t a, int64_t b, int64_t* out)
    bint fmm_shape_nelem(const int64_t* shape, int ndim, int64_t* out)

cdef extern from "fastmm/memory_kind.h":
    bint fmm_memory_is_private(const void* data, size_t nbytes)

cdef extern from "fastmm/strided.h" nogil:
    bint fmm_strided_is_dense(int ndim, const int64_t* shape, const int64_t* strides, int64_t unit, int64_t item_nbytes)
    void fmm_strided_copy(uint8_t* dst, const uint8_t* src, int ndim, const int64_t* shape, const int64_t* strides,
                          int64_t unit, int64_t item_nbytes)

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object, Py_ssize_t*) except NULL
    PyObject* Py_True  # `<PyObject*>True` would be the number 1, cast to a pointer

cdef extern from *:
    """
    /* The C function behind a method descriptor without arguments, NULL when it is anything else. */
    static PyCFunction fmm_noargs_function(PyObject *descriptor)
    {
        if (!Py_IS_TYPE(descriptor, &PyMethodDescr_Type)) return NULL;
        PyMethodDef *method = ((PyMethodDescrObject *)descriptor)->d_method;
        return (method->ml_flags & METH_NOARGS) ? method->ml_meth : NULL;
    }
    """
    NoArgsMethod fmm_noargs_function(object descriptor)

cdef int numpy_dtypes[64]  # numpy's type_num of the built-in types -> fmm_dtype_t
cdef signed char dlpack_dtypes[32][256]  # DLPack's code and bits -> fmm_dtype_t
cdef dict extension_dtypes = {}  # dtype objects of ml_dtypes -> fmm_dtype_t


def _fill_numpy_dtypes():
    cdef int number
    cdef cnp.dtype descr
    for number in range(64):
        numpy_dtypes[number] = FMM_DTYPE_NONE
    for code in "?bBhHiIlLqQefdFD":
        descr = cnp.dtype(code)
        numpy_dtypes[descr.type_num] = fmm_dtype_from_numpy(descr.kind, descr.itemsize)


def _fill_dlpack_dtypes():
    cdef int code, bits
    for code in range(32):
        for bits in range(256):
            dlpack_dtypes[code][bits] = fmm_dtype_from_dlpack(code, bits, 1)


_fill_numpy_dtypes()
_fill_dlpack_dtypes()


cdef Producer producer_of(object cls):
    cdef Producer producer
    cdef const fmm_dl_exchange_api_t* api
    if cls is type(None) or issubclass(cls, type):
        return None
    if issubclass(cls, cnp.ndarray):
        return producer_new(FAMILY_NUMPY)
    if issubclass(cls, WireTensor):
        return producer_new(FAMILY_WIRE)
    capsule = getattr(cls, "__dlpack_c_exchange_api__", None)
    if capsule is not None and PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        api = exchange_api(capsule)
        if api is not NULL:
            producer = producer_new(FAMILY_EXCHANGE)
            producer.api = api
            descriptors = [getattr(cls, name, None) for name in ("is_neg", "untyped_storage")]
            producer.is_neg = fmm_noargs_function(descriptors[0])
            producer.untyped_storage = fmm_noargs_function(descriptors[1])
            producer.keepalive = (capsule, descriptors)
            return producer
    if hasattr(cls, "__dlpack__"):
        return producer_new(FAMILY_DLPACK)
    return None


cdef Producer producer_new(Family family):
    cdef Producer producer = Producer.__new__(Producer)
    producer.family = family
    return producer


cdef const fmm_dl_exchange_api_t* exchange_api(object capsule) except? NULL:
    cdef const fmm_dl_exchange_header_t* header = <const fmm_dl_exchange_header_t*>PyCapsule_GetPointer(
        capsule, "dlpack_exchange_api")
    while header is not NULL and header.version.major > FMM_DLPACK_MAJOR:
        header = header.prev_api
    if header is NULL or header.version.major != FMM_DLPACK_MAJOR:
        return NULL
    return <const fmm_dl_exchange_api_t*>header


cdef int tensor_view(Producer producer, PyObject* obj, TensorView* view) except -1:
    view.holder = NULL
    view.moved = False
    view.numpy_style = False
    view.swapped = False
    try:
        if producer.family == FAMILY_EXCHANGE:
            return view_exchange(producer, obj, view)
        if producer.family == FAMILY_NUMPY:
            return view_numpy(obj, view)
        return view_other(producer.family, <object>obj, view)
    except BaseException:
        tensor_view_clear(view)
        raise


cdef int view_other(Family family, object obj, TensorView* view) except -1:
    try:
        if family == FAMILY_WIRE:
            return view_wire(obj, view)
        if family == FAMILY_DLPACK:
            return view_dlpack(obj, view)
        return view_buffer(obj, view)
    except SchemaError:
        raise
    except Exception as error:  # a WireTensor's fields can be set to anything, and `__dlpack__` is anybody's code
        raise refusal(obj, error) from None


cdef void tensor_view_clear(TensorView* view) noexcept:
    Py_XDECREF(view.holder)
    view.holder = NULL


cdef int hold(TensorView* view, object holder) except -1:
    Py_INCREF(holder)
    view.holder = <PyObject*>holder
    return 0


# --- torch, and whoever else puts the exchange table on the type ------------------------------------------------------


cdef int view_exchange(Producer producer, PyObject* obj, TensorView* view) except -1:
    cdef fmm_dl_tensor_t tensor
    cdef fmm_dl_managed_t* managed = NULL
    cdef PyObject* answer
    if producer.api.dltensor_from_py_object_no_sync is not NULL:
        if producer.api.dltensor_from_py_object_no_sync(obj, &tensor) < 0:
            refuse(<object>obj)
        view.writable = True
    else:
        if producer.api.managed_tensor_from_py_object_no_sync(obj, &managed) < 0:
            refuse(<object>obj)
        hold(view, PyCapsule_New(managed, "fastmm.managed", release_managed))
        tensor = managed.tensor
        view.writable = not managed.flags & FMM_DL_FLAG_READ_ONLY
    view_from_dlpack(&tensor, view)
    if tensor.device.device_type != FMM_DL_CPU and not host_readable(tensor.device.device_type):
        return view_device(producer, <object>obj, view)
    if view.dtype == FMM_DTYPE_NONE:
        raise refusal(<object>obj, None)
    if view.data is NULL and view.nelem:
        raise SchemaError("expected a tensor with memory, got one without (a fake or zero tensor of torch's): materialise it")
    if producer.is_neg is not NULL and fmm_dtype_infos[view.dtype].number_class >= FMM_CLASS_FLOAT:
        answer = producer.is_neg(obj, NULL)
        Py_DECREF(<object>answer)
        if answer == Py_True or fmm_dtype_infos[view.dtype].number_class == FMM_CLASS_COMPLEX:
            refuse_lazy(<object>obj)
    return 0


cdef int refuse_lazy(object tensor) except -1:
    """A negated or conjugated view of complex numbers is lazy: its memory does not hold what it shows."""
    for question, word, advice in (("is_neg", "negated", "resolve_neg"), ("is_conj", "conjugated", "resolve_conj")):
        if getattr(tensor, question)():
            raise SchemaError(f"expected a tensor whose memory holds its values, got a lazily {word} one: "
                              f"call .{advice}() first")
    return 0


cdef extern from *:
    """
    static int fmm_pending(void) { return -1; }
    """
    int pending_exception "fmm_pending"() except -1


cdef int refuse(object tensor) except -1:
    """The producer set an exception: puts our own in its place."""
    try:
        pending_exception()
    except Exception as error:
        raise refusal(tensor, error) from None
    return 0


cdef bint host_readable(int device_type) noexcept:
    return device_type in (FMM_DL_CPU, FMM_DL_CUDA_HOST, FMM_DL_ROCM_HOST, FMM_DL_CUDA_MANAGED)


cdef int view_device(Producer producer, object tensor, TensorView* view) except -1:
    """A tensor on another device is brought to the host; the copy is the view's holder."""
    cdef object copy = tensor.detach().cpu()
    tensor_view_clear(view)
    tensor_view(producer_of(type(copy)), <PyObject*>copy, view)
    if view.holder is NULL:
        hold(view, copy)
    view.moved = True
    view.writable = False  # the caller's memory is on the device: a cast in place would not reach it
    return 0


cdef int view_from_dlpack(const fmm_dl_tensor_t* tensor, TensorView* view) except -1:
    cdef int dtype = FMM_DTYPE_NONE
    if tensor.dtype.lanes == 1 and tensor.dtype.code < 32:
        dtype = dlpack_dtypes[tensor.dtype.code][tensor.dtype.bits]
    view.dtype = dtype
    view.item_nbytes = fmm_dtype_infos[dtype].item_nbytes if dtype != FMM_DTYPE_NONE else 1
    view.data = <uint8_t*>tensor.data + tensor.byte_offset
    view.ndim = tensor.ndim
    view.shape = tensor.shape
    view.strides = tensor.strides
    view.stride_unit_nbytes = view.item_nbytes
    return measure(view)


cdef int measure(TensorView* view) except -1:
    """Sizes, checked, and whether the memory is dense.  A dense view forgets its strides."""
    if view.ndim < 0 or view.ndim > MAX_NDIM:
        raise SchemaError(f"expected at most {MAX_NDIM} dimensions, got {view.ndim}")
    if not fmm_shape_nelem(view.shape, view.ndim, &view.nelem) or not fmm_mul_i64(view.nelem, view.item_nbytes, &view.nbytes):
        raise SchemaError("expected a shape whose size in bytes fits 63 bits, got a larger one")
    if view.data is NULL and view.nbytes:
        raise SchemaError("expected a tensor with memory, got one whose storage is empty")
    view.dense = view.strides is NULL or view.nelem < 2 or fmm_strided_is_dense(
        view.ndim, view.shape, view.strides, view.stride_unit_nbytes, view.item_nbytes)
    if view.dense:
        view.strides = NULL
    return 0


cdef object refusal(object tensor, object error):
    """Why a tensor cannot be viewed, in one sentence.  ``error`` is the producer's own, often pages of C++ frames."""
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    expected = "expected a dense tensor in host memory"
    for attribute, word, advice in (
        ("is_quantized", "a quantized tensor", "send its integers and scales as tensors of their own"),
        ("is_nested", "a nested tensor", "send a list of tensors"),
        ("is_meta", "a meta tensor, which has no data", "materialise it"),
        ("is_sparse", "a sparse tensor", "call .to_dense() first"),
        ("is_sparse_csr", "a sparse tensor", "call .to_dense() first"),
    ):
        try:
            if getattr(tensor, attribute, False):
                return SchemaError(f"{expected}, got {word}: {advice}")
        except Exception:
            continue
    dtype = getattr(tensor, "dtype", "unknown")
    reason = str(error).partition("\n")[0][:200] if error is not None else "no such type on the wire"
    return SchemaError(f"{expected}, got a {kind} of dtype {dtype} ({reason})")


# --- numpy, buffers, WireTensor, slow DLPack ----------------------------------------------------------------------------


cdef int view_numpy(PyObject* obj, TensorView* view) except -1:
    cdef cnp.ndarray array = <cnp.ndarray>obj
    cdef cnp.dtype descr
    cdef int number = cnp.PyArray_TYPE(array)
    cdef int flags = cnp.PyArray_FLAGS(array)
    view.numpy_style = True
    if 0 <= number < 64 and numpy_dtypes[number] != FMM_DTYPE_NONE:
        view.dtype = numpy_dtypes[number]
        view.item_nbytes = fmm_dtype_infos[view.dtype].item_nbytes
        view.numpy_kind = fmm_dtype_infos[view.dtype].numpy_kind
    else:
        descr = <cnp.dtype><object><PyObject*>cnp.PyArray_DESCR(array)
        view.dtype = dtype_of_extension(descr)
        view.item_nbytes = <int>descr.itemsize
        view.numpy_kind = descr.kind
        if view.dtype != FMM_DTYPE_NONE:
            view.numpy_style = False  # bfloat16 and float8 have no name of numpy's
        elif chr(descr.kind) not in "SUfc":
            raise SchemaError(f"expected an array of numbers, bools or strings, got dtype {descr}")
        elif view.item_nbytes == 0:
            raise SchemaError(f"expected an array whose items have a size, got dtype {descr}")
    view.swapped = not cnp.PyArray_ISNOTSWAPPED(array)
    view.data = cnp.PyArray_DATA(array)
    view.ndim = cnp.PyArray_NDIM(array)
    view.shape = <const int64_t*>cnp.PyArray_DIMS(array)
    view.strides = NULL if flags & cnp.NPY_ARRAY_C_CONTIGUOUS else <int64_t*>cnp.PyArray_STRIDES(array)
    view.stride_unit_nbytes = 1
    view.writable = (flags & cnp.NPY_ARRAY_WRITEABLE) != 0
    return measure(view)


cdef int dtype_of_extension(cnp.dtype descr) except -2:
    """The row of a type that ml_dtypes adds to numpy, by its name; FMM_DTYPE_NONE for all others."""
    cdef Py_ssize_t nbytes
    cdef const char* name
    if descr.type_num < 256:  # NPY_USERDEF: below are numpy's own
        return FMM_DTYPE_NONE
    found = extension_dtypes.get(descr)
    if found is None:
        name = PyUnicode_AsUTF8AndSize(descr.name, &nbytes)
        found = fmm_dtype_from_name(name, nbytes)
        extension_dtypes[descr] = found
    return found


cdef int view_buffer(object obj, TensorView* view) except -1:
    cdef cnp.ndarray array
    try:
        array = cnp.PyArray_FROM_O(memoryview(obj))
    except Exception as error:
        raise SchemaError(f"expected a buffer of numbers, got a {type(obj).__qualname__} ({error})") from None
    view_numpy(<PyObject*>array, view)
    return hold(view, array)


cdef int view_wire(object tensor, TensorView* view) except -1:
    """A WireTensor checked its own sizes when it was made; they are checked again, for its fields can be set."""
    cdef Py_ssize_t name_nbytes
    cdef const char* name
    cdef object memory = PyMemoryView_FromObject(tensor.data)
    cdef Py_buffer* buffer = PyMemoryView_GET_BUFFER(memory)
    cdef int64_t* shape
    cdef cnp.dtype descr
    name = PyUnicode_AsUTF8AndSize(tensor.dtype, &name_nbytes)
    view.dtype = fmm_dtype_from_name(name, name_nbytes)
    if view.dtype == FMM_DTYPE_NONE:
        try:
            descr = cnp.dtype(tensor.dtype)
        except TypeError:
            raise SchemaError(f"expected a dtype name of torch or numpy, got {tensor.dtype!r}") from None
        if chr(descr.kind) not in "biufcSU" or descr.itemsize == 0:
            raise SchemaError(f"expected a tensor of numbers, bools or strings, got dtype {tensor.dtype!r}")
        view.dtype = fmm_dtype_from_numpy(descr.kind, descr.itemsize)
        view.item_nbytes = <int>descr.itemsize
        view.numpy_kind = descr.kind
        view.swapped = descr.byteorder == c">"
        view.numpy_style = True
    else:
        view.item_nbytes = fmm_dtype_infos[view.dtype].item_nbytes
    # The shape's integers need a home that lives as long as the view: a bytes object beside the memory.
    dims = tuple(tensor.shape)
    if len(dims) > MAX_NDIM:
        raise SchemaError(f"expected at most {MAX_NDIM} dimensions, got {len(dims)}")
    home = bytes(8 * len(dims) + 8)
    shape = <int64_t*><char*>home
    for axis, extent in enumerate(dims):
        if type(extent) is not int or not 0 <= extent < 1 << 63:
            raise SchemaError(f"expected extents >= 0 in the shape of a WireTensor, got {dims}")
        shape[axis] = extent
    view.data = buffer.buf
    view.ndim = len(dims)
    view.shape = shape
    view.strides = NULL
    view.stride_unit_nbytes = view.item_nbytes
    view.writable = not buffer.readonly
    measure(view)
    if not memory.c_contiguous:
        raise SchemaError("expected contiguous data in a WireTensor")
    if view.nbytes != buffer.len:
        raise SchemaError(f"expected {view.nbytes} bytes for {tensor.dtype} of shape {dims}, got {buffer.len}")
    return hold(view, (memory, home))


cdef int view_dlpack(object obj, TensorView* view) except -1:
    """The slow way, one capsule per tensor.  The capsule is kept unused, so that its own destructor frees it."""
    cdef fmm_dl_managed_t* managed
    cdef fmm_dl_tensor_t* tensor
    device_type = obj.__dlpack_device__()[0]
    if not host_readable(device_type):
        raise SchemaError(f"expected a tensor in host memory, got DLPack device type {device_type}")
    try:
        capsule = obj.__dlpack__(max_version=(FMM_DLPACK_MAJOR, FMM_DLPACK_MINOR))
    except TypeError:
        capsule = obj.__dlpack__()  # a producer from before DLPack 1.0
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        managed = <fmm_dl_managed_t*>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        if managed.version.major != FMM_DLPACK_MAJOR:
            raise SchemaError(f"expected DLPack {FMM_DLPACK_MAJOR}.x, got {managed.version.major}.{managed.version.minor}")
        tensor = &managed.tensor
        view.writable = not managed.flags & FMM_DL_FLAG_READ_ONLY
    else:
        tensor = <fmm_dl_tensor_t*>PyCapsule_GetPointer(capsule, "dltensor")  # the tensor comes first in this struct
        view.writable = False  # the old capsule cannot say
    view_from_dlpack(tensor, view)
    if view.dtype == FMM_DTYPE_NONE:
        raise refusal(obj, None)
    if fmm_dtype_infos[view.dtype].number_class >= FMM_CLASS_FLOAT and hasattr(obj, "is_neg"):
        refuse_lazy(obj)  # a torch from before the exchange table
    return hold(view, capsule)


cdef object tensor_owner(Producer producer, PyObject* obj, TensorView* view):
    cdef PyObject* storage
    if view.holder is not NULL:
        return <object>view.holder
    if producer.untyped_storage is not NULL:
        storage = producer.untyped_storage(obj, NULL)
        owner = <object>storage
        Py_DECREF(owner)  # `owner` holds it now
        return owner
    return <object>obj


cdef bint memory_is_private(const void* data, size_t nbytes) noexcept:
    return fmm_memory_is_private(data, nbytes)


cdef object torch_storage = None  # torch's class, once one was seen


cdef bint owner_is_private(object owner) except -1:
    global torch_storage
    cdef type cls = type(owner)
    if cls is cnp.ndarray:
        base = owner
        while type(base) is cnp.ndarray:
            if cnp.PyArray_FLAGS(<cnp.ndarray>base) & cnp.NPY_ARRAY_OWNDATA:
                return True
            base = <object>cnp.PyArray_BASE(<cnp.ndarray>base) if cnp.PyArray_BASE(<cnp.ndarray>base) is not NULL else None
        return False
    if torch_storage is None and cls.__name__ == "UntypedStorage" and cls.__module__ == "torch.storage":
        torch_storage = cls
    if cls is torch_storage:
        # Files and foreign memory cannot be resized; share_memory_ keeps the permission but is known as shared.
        return owner.resizable() and not owner.is_shared()
    return False


cdef int numpy_name(TensorView* view, char* name) noexcept:
    """As numpy's own `dtype.str`: byte order, kind, size (characters for "U")."""
    cdef char order = c">" if view.swapped else c"<"
    if view.numpy_kind == c"U":
        return write_name(name, order, view.numpy_kind, view.item_nbytes // 4)
    if view.item_nbytes == 1 or view.numpy_kind == c"S":
        order = c"|"
    return write_name(name, order, view.numpy_kind, view.item_nbytes)


cdef extern from *:
    """
    #include <stdio.h>
    /* Room for 24 bytes: two letters and the digits of an int. */
    static int fmm_write_name(char *name, char order, char kind, int size)
    {
        if (size < 10) {
            name[0] = order; name[1] = kind; name[2] = (char)('0' + size); name[3] = 0;
            return 3;
        }
        return snprintf(name, 24, "%c%c%d", order, kind, size);
    }
    """
    int write_name "fmm_write_name"(char* name, char order, char kind, int size)


cdef void tensor_gather(const TensorView* view, void* out) noexcept nogil:
    if view.nelem == 0:
        return
    if view.dense:
        memcpy(out, view.data, view.nbytes)
    else:
        fmm_strided_copy(<uint8_t*>out, <const uint8_t*>view.data, view.ndim, view.shape, view.strides,
                         view.stride_unit_nbytes, view.item_nbytes)


cdef void release_managed(object capsule) noexcept:
    cdef fmm_dl_managed_t* managed = <fmm_dl_managed_t*>PyCapsule_GetPointer(capsule, "fastmm.managed")
    if managed.deleter is not NULL:
        managed.deleter(managed)

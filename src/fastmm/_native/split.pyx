"""Batches into items: leaves that view the batch's memory, and the schema objects around them.

What is per batch (names, kinds, every check) is `features/`'s; here are the loops over items.  Nothing is copied: a leaf
lies in the batch's memory and holds what owns it.
"""

cimport cython
from cpython.dict cimport PyDict_SetItem
from cpython.list cimport PyList_GET_SIZE, PyList_New, PyList_SET_ITEM
from cpython.object cimport PyTypeObject, Py_TYPE
from cpython.ref cimport Py_INCREF, PyObject
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

import dataclasses
import sys

import numpy

from fastmm.dtypes import numpy_dtype
from fastmm.errors import LimitError, SchemaError
from fastmm.schema import MmFeatureSpec, MmFieldElem, MmFlatField, WireTensor

from .frame cimport frame_new
from .record cimport record_get, record_new, record_offset, record_set
from .tensor cimport (
    FAMILY_DLPACK, FAMILY_EXCHANGE, FAMILY_NUMPY, FAMILY_WIRE, MAX_NDIM, Producer, TensorView, producer_of, tensor_gather,
    tensor_owner, tensor_view, tensor_view_clear,
)
from .tensor_make cimport make_numpy, tensor_make

cdef extern from "fastmm/dtype.h" nogil:
    cdef enum:
        FMM_DTYPE_NONE
        FMM_CLASS_INT
        FMM_CLASS_UINT
        FMM_CLASS_FLOAT
        FMM_INT8
        FMM_UINT16
        FMM_INT16
        FMM_UINT32
        FMM_INT32
        FMM_UINT64
        FMM_INT64
    ctypedef struct fmm_dtype_info_t:
        const char* name
        uint8_t item_nbytes
        uint8_t number_class
    const fmm_dtype_info_t fmm_dtype_infos[1]

cdef extern from "Python.h":
    PyObject* PyList_GET_ITEM(object, Py_ssize_t) noexcept  # borrowed
    object PySlice_New(PyObject*, PyObject*, PyObject*)

cdef enum:
    PRODUCERS_MAX = 256  # remembered types; more is a program that makes types
    NESTED_MAX = 64  # lists in lists

ctypedef enum How:  # what makes a leaf
    HOW_TORCH  # torch's own split and unbind: as quick as anything, and right for strides, devices and subclasses
    HOW_ASK  # the own slicing of another producer that has the exchange table
    HOW_NUMPY  # a numpy array with the batch's strides, byte order and flags
    HOW_WIRE  # a WireTensor over a part of the batch's buffer
    HOW_MAKE  # numpy arrays, or WireTensors, over what a producer with only `__dlpack__` exports

cdef dict producers = {}
cdef Py_ssize_t wire_dtype = record_offset(WireTensor, "dtype")
cdef Py_ssize_t wire_shape = record_offset(WireTensor, "shape")
cdef Py_ssize_t wire_data = record_offset(WireTensor, "data")


cdef Producer producer_for(object cls):
    try:
        return producers[cls]
    except KeyError:
        if len(producers) >= PRODUCERS_MAX:
            producers.clear()
        producer = producer_of(cls)
        producers[cls] = producer
        return producer


cdef object torch_tensor_type():
    """torch's tensor class, or None while nobody imported torch."""
    torch = sys.modules.get("torch")
    return None if torch is None else getattr(torch, "Tensor", None)


cdef bint is_torch_tensor(object obj) except -1:
    cls = torch_tensor_type()
    return cls is not None and isinstance(obj, cls)


cdef object without_gradient(object tensor):
    return tensor.detach() if tensor.requires_grad else tensor


@cython.final
cdef class Batch:
    """A tensor that holds what several items need.

    Parameters
    ----------
    tensor
        A torch tensor, a numpy array, a WireTensor or another producer of DLPack.  It is looked at once, here, and must not
        be resized while the batch is used.

    Raises
    ------
    SchemaError
        It is no tensor, or one that cannot travel.  Without a path.
    """

    cdef object tensor
    cdef object owner  # keeps the memory
    cdef object descr  # HOW_NUMPY: numpy's dtype
    cdef How how
    cdef uint8_t* data
    cdef int dtype  # fmm_dtype_t
    cdef int item_nbytes
    cdef int ndim
    cdef bint writable
    cdef bint dense
    cdef readonly bint is_torch
    cdef readonly int64_t nbytes
    cdef int64_t dims[MAX_NDIM]
    cdef int64_t strides_nbytes[MAX_NDIM]

    def __init__(self, tensor):
        cdef Producer producer = producer_for(type(tensor))
        cdef TensorView view
        if producer is None:
            raise SchemaError(f"expected a tensor (torch, numpy, DLPack, WireTensor), got a {type(tensor).__qualname__}")
        self.tensor = tensor
        self.is_torch = producer.family in (FAMILY_EXCHANGE, FAMILY_DLPACK) and is_torch_tensor(tensor)
        if self.is_torch and not (producer.family == FAMILY_EXCHANGE and tensor.is_cpu):
            measure_torch(self)
            return
        tensor_view(producer, <PyObject*>tensor, &view)
        try:
            batch_of_view(self, producer, &view)
        finally:
            tensor_view_clear(&view)

    @property
    def shape(self) -> tuple:
        """Extents."""
        return tuple([self.dims[axis] for axis in range(self.ndim)])

    def rows(self) -> list:
        """One leaf for each index of the first axis, that axis removed."""
        cdef int64_t i
        cdef list leaves
        if self.how == HOW_TORCH:
            return list(without_gradient(self.tensor).unbind(0)) if self.dims[0] else []
        if self.how == HOW_ASK:
            return [self.tensor[i] for i in range(self.dims[0])]
        leaves = PyList_New(self.dims[0])
        for i in range(self.dims[0]):
            leaf = leaf_new(self, self.data + i * self.strides_nbytes[0], self.ndim - 1, self.dims + 1, self.strides_nbytes + 1)
            Py_INCREF(leaf)
            PyList_SET_ITEM(leaves, i, leaf)
        return leaves

    def pieces(self, bounds: list, dim: int) -> list:
        """One leaf for each two neighbours of ``bounds`` (increasing, from 0 to the extent), sliced along ``dim``."""
        cdef int axis = dim
        cdef Py_ssize_t i, n = PyList_GET_SIZE(bounds) - 1
        cdef int64_t start, stop, extent = self.dims[axis]
        cdef list leaves
        if self.how == HOW_TORCH:
            sizes = [bounds[i + 1] - bounds[i] for i in range(n)]
            return list(without_gradient(self.tensor).split_with_sizes(sizes, dim))
        if self.how == HOW_ASK:
            front = (slice(None),) * dim
            return [self.tensor[(*front, slice(bounds[i], bounds[i + 1]))] for i in range(n)]
        if dim and self.how in (HOW_WIRE, HOW_MAKE):
            leave_gaps(self)
        leaves = PyList_New(n)
        start = bounds[0]
        for i in range(n):
            stop = bounds[i + 1]
            self.dims[axis] = stop - start
            try:
                leaf = leaf_new(self, self.data + start * self.strides_nbytes[axis], self.ndim, self.dims, self.strides_nbytes)
            finally:
                self.dims[axis] = extent
            Py_INCREF(leaf)
            PyList_SET_ITEM(leaves, i, leaf)
            start = stop
        return leaves

    def frozen(self):
        """The same numbers over the same memory, read-only, so that nobody casts them in place.

        A numpy array or a `WireTensor`; the very tensor where it could not be cast in place anyway (strided, read-only, on a
        device, of integers).
        """
        if self.how == HOW_ASK or not (self.dense and self.writable and self.nbytes) or self.dtype == FMM_DTYPE_NONE:
            return self.tensor
        if fmm_dtype_infos[self.dtype].number_class != FMM_CLASS_FLOAT:
            return self.tensor
        if self.how == HOW_NUMPY:
            array = self.tensor.view()
            array.flags.writeable = False
            return array
        if self.how == HOW_WIRE:
            return WireTensor(self.tensor.dtype, self.tensor.shape, self.owner.toreadonly())
        owner = self.tensor.untyped_storage() if self.is_torch else self.owner
        name = (<bytes>fmm_dtype_infos[self.dtype].name).decode()
        return WireTensor(name, self.shape, frame_new(self.data, self.nbytes, owner))


cdef int measure_torch(Batch batch) except -1:
    """A tensor whose memory is not looked at here: on another device, or of a torch without the exchange table."""
    cdef int axis
    tensor = batch.tensor
    if tensor.is_meta or tensor.layout is not sys.modules["torch"].strided:
        raise SchemaError("expected a dense tensor with data, got one of torch's that has "
                          f"{'none' if tensor.is_meta else 'another layout'}")
    batch.how = HOW_TORCH
    batch.ndim = tensor.dim()
    if batch.ndim > MAX_NDIM:
        raise SchemaError(f"expected at most {MAX_NDIM} dimensions, got {batch.ndim}")
    for axis in range(batch.ndim):
        batch.dims[axis] = tensor.shape[axis]
    batch.nbytes = tensor.numel() * tensor.element_size()
    return 0


cdef int batch_of_view(Batch batch, Producer producer, TensorView* view) except -1:
    cdef int64_t stride = view.item_nbytes
    cdef int axis
    batch.data = <uint8_t*>view.data
    batch.dtype = view.dtype
    batch.item_nbytes = view.item_nbytes
    batch.ndim = view.ndim
    batch.nbytes = view.nbytes
    batch.writable = view.writable
    batch.dense = view.dense
    for axis in range(view.ndim - 1, -1, -1):
        batch.dims[axis] = view.shape[axis]
        if view.strides is NULL:
            batch.strides_nbytes[axis] = stride
            stride *= view.shape[axis]
        else:
            batch.strides_nbytes[axis] = view.strides[axis] * view.stride_unit_nbytes
    if producer.family == FAMILY_NUMPY:
        batch.how = HOW_NUMPY
        batch.owner = batch.tensor
        batch.descr = batch.tensor.dtype
    elif producer.family == FAMILY_WIRE:
        batch.how = HOW_WIRE
        batch.owner = (<tuple><object>view.holder)[0]  # the very buffer that was measured
        if batch.owner.format != "B" or batch.owner.ndim != 1:
            batch.owner = batch.owner.cast("B") if view.nbytes else memoryview(b"")
    elif batch.is_torch:
        batch.how = HOW_TORCH
    elif producer.family == FAMILY_EXCHANGE:
        batch.how = HOW_ASK
    else:
        batch.how = HOW_MAKE
        batch.owner = tensor_owner(producer, <PyObject*>batch.tensor, view)
        if not view.dense:
            leave_gaps(batch)
    return 0


cdef int leave_gaps(Batch batch) except -1:
    """Only numpy can make leaves with gaps; CompatError where it has no such dtype."""
    name = batch.tensor.dtype if batch.how == HOW_WIRE else (<bytes>fmm_dtype_infos[batch.dtype].name).decode()
    batch.descr = numpy_dtype(name)
    batch.how = HOW_NUMPY
    return 0


cdef object leaf_new(Batch batch, uint8_t* data, int ndim, int64_t* dims, int64_t* strides_nbytes):
    if batch.how == HOW_MAKE:
        return tensor_make(FAMILY_DLPACK, data, batch.dtype, ndim, dims, batch.owner, not batch.writable)
    if batch.how == HOW_WIRE:
        return wire_leaf(batch, data, ndim, dims)
    return make_numpy(data, batch.descr, ndim, dims, strides_nbytes, batch.owner, not batch.writable)


cdef object wire_leaf(Batch batch, uint8_t* data, int ndim, int64_t* dims):
    """Dense, along the first axis.  The batch's buffer was checked to have exactly its bytes."""
    cdef int64_t nbytes = batch.item_nbytes
    cdef int64_t start = data - batch.data
    cdef int axis
    cdef tuple shape = tuple([dims[axis] for axis in range(ndim)])
    for axis in range(ndim):
        nbytes *= dims[axis]
    leaf = record_new(<PyTypeObject*>WireTensor)
    record_set(leaf, wire_dtype, batch.tensor.dtype)
    record_set(leaf, wire_shape, shape)
    record_set(leaf, wire_data, batch.owner[start:start + nbytes])
    return leaf


# --- what is looked at before anything is made ------------------------------------------------------------------------


def nested_nbytes(value, kinds: set, depth: int = 0) -> int:
    """Bytes of all tensors of a list of lists.

    ``kinds`` gets ``"torch"`` when one of them is a torch tensor.  Numbers and bools weigh nothing.

    Raises
    ------
    SchemaError
        A leaf is neither a tensor nor a number.
    LimitError
        Lists lie in lists too deep.
    """
    cdef Batch batch
    cls = type(value)
    if cls is list or cls is tuple:
        if depth == NESTED_MAX:
            raise LimitError(f"expected lists that are nested at most {NESTED_MAX} deep, got deeper ones")
        total = 0
        for i, inner in enumerate(value):
            try:
                total += nested_nbytes(inner, kinds, depth + 1)
            except (SchemaError, LimitError) as error:
                error.path = f"[{i}]{error.path or ''}"
                raise
        return total
    if isinstance(value, (int, float, numpy.integer, numpy.floating, numpy.bool_)):
        return 0
    batch = Batch(value)
    if batch.is_torch:
        kinds.add("torch")
    return batch.nbytes


def read_ints(tensor) -> list:
    """The elements of a 1-D tensor of any integer type, as Python ints.

    Raises
    ------
    SchemaError
        It is no tensor, not 1-D, or not of integers (bools are none).
    """
    cdef Producer producer = producer_for(type(tensor))
    cdef TensorView view
    cdef int64_t i
    cdef void* home
    if producer is None:
        raise SchemaError(f"expected a 1-D tensor of integers, got a {type(tensor).__qualname__}")
    tensor_view(producer, <PyObject*>tensor, &view)
    try:
        if view.ndim != 1:
            raise SchemaError(f"expected a 1-D tensor of integers, got {view.ndim} dimensions")
        if view.dtype == FMM_DTYPE_NONE or fmm_dtype_infos[view.dtype].number_class not in (FMM_CLASS_INT, FMM_CLASS_UINT):
            name = "another type" if view.dtype == FMM_DTYPE_NONE else (<bytes>fmm_dtype_infos[view.dtype].name).decode()
            raise SchemaError(f"expected a 1-D tensor of integers, got {name}")
        if view.swapped:
            return numpy.asarray(tensor.numpy() if producer.family == FAMILY_WIRE else tensor).tolist()
        home = malloc(view.nbytes or 1)
        if home is NULL:
            raise MemoryError()
        try:
            tensor_gather(&view, home)
            if view.dtype == FMM_INT64:
                return [(<int64_t*>home)[i] for i in range(view.nelem)]
            if view.dtype == FMM_UINT64:
                return [(<uint64_t*>home)[i] for i in range(view.nelem)]
            if view.dtype == FMM_INT32:
                return [(<int*>home)[i] for i in range(view.nelem)]
            if view.dtype == FMM_UINT32:
                return [(<uint32_t*>home)[i] for i in range(view.nelem)]
            if view.dtype == FMM_INT16:
                return [(<short*>home)[i] for i in range(view.nelem)]
            if view.dtype == FMM_UINT16:
                return [(<uint16_t*>home)[i] for i in range(view.nelem)]
            if view.dtype == FMM_INT8:
                return [(<signed char*>home)[i] for i in range(view.nelem)]
            return [(<uint8_t*>home)[i] for i in range(view.nelem)]
        finally:
            free(home)
    finally:
        tensor_view_clear(&view)


# --- the objects around the leaves ------------------------------------------------------------------------------------

cdef Py_ssize_t elem_data = record_offset(MmFieldElem, "data")
cdef Py_ssize_t elem_field = record_offset(MmFieldElem, "field")
cdef Py_ssize_t flat_keep = record_offset(MmFlatField, "keep_on_cpu")
cdef Py_ssize_t flat_slices = record_offset(MmFlatField, "slices")
cdef Py_ssize_t flat_dim = record_offset(MmFlatField, "dim")
cdef Py_ssize_t spec_data = record_offset(MmFeatureSpec, "data")
cdef Py_ssize_t spec_modality = record_offset(MmFeatureSpec, "modality")
cdef Py_ssize_t spec_identifier = record_offset(MmFeatureSpec, "identifier")
cdef Py_ssize_t spec_position = record_offset(MmFeatureSpec, "mm_position")
cdef Py_ssize_t spec_hash = record_offset(MmFeatureSpec, "mm_hash")


def slices_of(bounds: list, dim: int) -> list:
    """``slice(bounds[i], bounds[i + 1])`` for each item; for ``dim > 0`` in a tuple, behind ``dim`` whole slices."""
    cdef Py_ssize_t i, n = PyList_GET_SIZE(bounds) - 1
    cdef list slices = PyList_New(n)
    front = (slice(None),) * dim
    for i in range(n):
        part = PySlice_New(PyList_GET_ITEM(bounds, i), PyList_GET_ITEM(bounds, i + 1), NULL)
        if dim:
            part = (*front, part)
        Py_INCREF(part)
        PyList_SET_ITEM(slices, i, part)
    return slices


def flat_fields(slices: list, dim: int, keep_on_cpu: bool) -> list:
    """An `MmFlatField` for each item, which names the item's own slice only."""
    cdef Py_ssize_t i, n = PyList_GET_SIZE(slices)
    cdef list fields = PyList_New(n)
    for i in range(n):
        field = record_new(<PyTypeObject*>MmFlatField)
        record_set(field, flat_keep, keep_on_cpu)
        record_set(field, flat_slices, [<object>PyList_GET_ITEM(slices, i)])
        record_set(field, flat_dim, dim)
        Py_INCREF(field)
        PyList_SET_ITEM(fields, i, field)
    return fields


def field_elems(leaves: list, fields) -> list:
    """An `MmFieldElem` for each leaf; ``fields`` is a list with one for each, or one field for all."""
    cdef Py_ssize_t i, n = PyList_GET_SIZE(leaves)
    cdef list elems = PyList_New(n)
    cdef list many = fields if type(fields) is list else None
    for i in range(n):
        elem = record_new(<PyTypeObject*>MmFieldElem)
        record_set(elem, elem_data, <object>PyList_GET_ITEM(leaves, i))
        record_set(elem, elem_field, fields if many is None else <object>PyList_GET_ITEM(many, i))
        Py_INCREF(elem)
        PyList_SET_ITEM(elems, i, elem)
    return elems


def feature_specs(columns: dict, modality: str, identifiers: list, positions: list, hashes: list, cached) -> list:
    """An `MmFeatureSpec` for each position.

    ``columns`` maps a key to the list of its elems, or to the one elem of all items.  Items whose index is in ``cached``
    carry no data.
    """
    cdef Py_ssize_t i, n = PyList_GET_SIZE(positions)
    cdef list specs = PyList_New(n)
    cdef list keys = list(columns)
    cdef list values = list(columns.values())
    cdef Py_ssize_t column, ncolumns = PyList_GET_SIZE(keys)
    cdef PyObject* elem
    for i in range(n):
        if cached and i in cached:
            data = None
        else:
            data = {}
            for column in range(ncolumns):
                elem = PyList_GET_ITEM(values, column)
                if Py_TYPE(<object>elem) is <PyTypeObject*>list:
                    elem = PyList_GET_ITEM(<object>elem, i)
                PyDict_SetItem(data, <object>PyList_GET_ITEM(keys, column), <object>elem)
        spec = record_new(<PyTypeObject*>MmFeatureSpec)
        record_set(spec, spec_data, data)
        record_set(spec, spec_modality, modality)
        record_set(spec, spec_identifier, <object>PyList_GET_ITEM(identifiers, i))
        record_set(spec, spec_position, <object>PyList_GET_ITEM(positions, i))
        record_set(spec, spec_hash, <object>PyList_GET_ITEM(hashes, i))
        Py_INCREF(spec)
        PyList_SET_ITEM(specs, i, spec)
    return specs


# --- copies -----------------------------------------------------------------------------------------------------------

cdef dict slots_of = {}  # class -> offsets of all its slots


def copy_record(record):
    """A shallow copy of one of the schema's objects."""
    cdef type cls = type(record)
    cdef Py_ssize_t offset
    cdef PyObject* value
    offsets = slots_of.get(cls)
    if offsets is None:
        offsets = tuple([record_offset(cls, field.name) for field in dataclasses.fields(cls)])
        slots_of[cls] = offsets
    copied = record_new(<PyTypeObject*>cls)
    for offset in offsets:
        value = record_get(record, offset)
        if value is not NULL:
            record_set(copied, offset, <object>value)
    return copied

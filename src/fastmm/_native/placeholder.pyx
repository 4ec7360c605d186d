"""Where the items of a prompt go: placeholders checked against the prompt, and the masks of their embeddings."""

import operator
import sys

import numpy

cimport cython
cimport numpy as cnp
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from cpython.list cimport PyList_GET_SIZE, PyList_New, PyList_SET_ITEM
from cpython.object cimport PyTypeObject
from cpython.ref cimport Py_INCREF, PyObject
from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free, malloc

from fastmm.errors import FastmmError, SchemaError, SchemaValueError
from fastmm.schema import PlaceholderRange

from .record cimport record_new, record_offset, record_set
from .tensor cimport (
    FAMILY_EXCHANGE, FAMILY_NUMPY, Producer, TensorView, producer_of, tensor_view, tensor_view_clear,
)
from .tensor_make cimport tensor_make

cnp.import_array()

cdef extern from "fastmm/dtype.h" nogil:
    cdef enum:
        FMM_BOOL

cdef extern from "Python.h":
    PyObject* PyList_GET_ITEM(object, Py_ssize_t) noexcept  # borrowed
    PyObject* PyTuple_GET_ITEM(object, Py_ssize_t) noexcept  # borrowed
    bint PyLong_CheckExact(PyObject*) noexcept
    long long PyLong_AsLongLongAndOverflow(PyObject*, int*) except? -1

cdef Py_ssize_t range_offset = record_offset(PlaceholderRange, "offset")
cdef Py_ssize_t range_length = record_offset(PlaceholderRange, "length")
cdef Py_ssize_t range_mask = record_offset(PlaceholderRange, "is_embed")


@cython.final
cdef class Prompt:
    """Token ids, however they came.

    Parameters
    ----------
    token_ids
        A list or tuple of ints, a 1-D tensor of integers, any other sequence of ints, or None: the prompt's length is then
        not known, nor can a mask be made.

    Raises
    ------
    SchemaError
        It is none of these.
    """

    cdef list items  # ids as objects, or
    cdef object array  # ids in a contiguous numpy array of int64, or neither
    cdef readonly object nelem  # number of ids, None when not known

    def __init__(self, token_ids):
        if type(token_ids) is list:
            self.items = token_ids
        elif token_ids is None:
            return
        elif isinstance(token_ids, (str, bytes, bytearray)):
            raise SchemaError(f"expected token ids, got a {type(token_ids).__qualname__}")
        elif producer_of(type(token_ids)) is not None:
            self.array = ids_of_tensor(token_ids)
            self.nelem = len(self.array)
            return
        else:
            try:
                self.items = list(token_ids)
            except TypeError:
                raise SchemaError("expected a list of token ids, a 1-D tensor of them or None, got a "
                                  f"{type(token_ids).__qualname__}") from None
        self.nelem = PyList_GET_SIZE(self.items)


cdef object ids_of_tensor(object tensor):
    cdef Producer producer = producer_of(type(tensor))
    cdef TensorView view
    cdef object array
    tensor_view(producer, <PyObject*>tensor, &view)
    tensor_view_clear(&view)  # only its checks were wanted
    if view.ndim != 1:
        raise SchemaError(f"expected a 1-D tensor of token ids, got {view.ndim} dimensions")
    if producer.family == FAMILY_NUMPY:
        array = tensor
    elif hasattr(tensor, "detach"):
        array = tensor.detach().cpu().numpy()
    else:
        array = tensor.numpy() if hasattr(tensor, "numpy") else numpy.from_dlpack(tensor)
    if array.dtype.kind not in "iu":
        raise SchemaError(f"expected a tensor of integers as token ids, got dtype {array.dtype}")
    return numpy.ascontiguousarray(array, dtype=numpy.int64)


def first_outside(list ids, long long end, Py_ssize_t begin=0) -> int:
    """Index of the first, from `begin` on, that is not an exact int from 0 to `end` - 1; -1 where there is none."""
    cdef Py_ssize_t i
    cdef long long number
    cdef int overflow
    cdef PyObject* one
    for i in range(begin, PyList_GET_SIZE(ids)):
        one = PyList_GET_ITEM(ids, i)
        if not PyLong_CheckExact(one):
            return i
        number = PyLong_AsLongLongAndOverflow(one, &overflow)
        if overflow or not 0 <= number < end:
            return i
    return -1


@cython.final
cdef class Marks:
    """The ids that stand for an embedding."""

    cdef int64_t* ids  # owned
    cdef Py_ssize_t nids

    def __cinit__(self, list ids):
        cdef Py_ssize_t i
        self.nids = len(ids)
        self.ids = <int64_t*>malloc((self.nids or 1) * sizeof(int64_t))
        if self.ids is NULL:
            raise MemoryError()
        for i in range(self.nids):
            self.ids[i] = ids[i]

    def __dealloc__(self):
        free(self.ids)


def place(list placeholders, Prompt prompt, embed_ids, as_torch: bool) -> tuple:
    """Checked positions, in the order given.

    Parameters
    ----------
    placeholders
        ``(offset, length)`` or an object with ``offset``, ``length`` and perhaps ``is_embed``, for each item.
    prompt
        What they must lie in.
    embed_ids
        A list of the ids that take an embedding, or None: all do, or what ``is_embed`` says.
    as_torch
        Whether the masks are torch tensors; numpy arrays otherwise.

    Returns
    -------
    positions : list of PlaceholderRange
        New objects.
    in_order : bool
        Whether each lies behind the one before.

    Raises
    ------
    SchemaError, SchemaValueError
        With the item in the path.
    """
    cdef Py_ssize_t i, n = PyList_GET_SIZE(placeholders)
    cdef list positions = PyList_New(n)
    cdef Marks marks = None if embed_ids is None else Marks(embed_ids)
    cdef int64_t limit = 0x7fffffffffffffff if prompt.nelem is None else <int64_t>prompt.nelem
    cdef int64_t offset = 0, length = 0, end = 0
    cdef bint ordered = True
    cdef object mask
    cdef object convert = None
    if as_torch and not hasattr(sys.modules["torch"].Tensor, "__dlpack_c_exchange_api__"):
        convert, as_torch = sys.modules["torch"].from_numpy, False  # before torch 2.10
    for i in range(n):
        mask = None
        try:
            placeholder = <object>PyList_GET_ITEM(placeholders, i)
            if type(placeholder) is tuple and len(<tuple>placeholder) == 2:
                whole(PyTuple_GET_ITEM(placeholder, 0), "offset", &offset)
                whole(PyTuple_GET_ITEM(placeholder, 1), "length", &length)
            else:
                mask = unusual(placeholder, &offset, &length)
            if offset < 0 or length <= 0:
                raise SchemaValueError(f"expected an offset >= 0 and a length > 0, got offset {offset} and length {length}")
            if offset > limit - length:
                raise SchemaValueError(f"expected a placeholder within the {limit} ids of the prompt, got offset {offset} "
                                       f"and length {length}")
            if offset < end:
                ordered = False
            end = offset + length
            if mask is not None:
                if marks is not None:
                    raise SchemaError("expected either embed_token_id or a placeholder with is_embed, got both")
                mask = checked_mask(mask, length)
            elif marks is not None:
                mask = mask_of(prompt, marks, offset, length, as_torch)
                if convert is not None and mask is not None:
                    mask = convert(mask)
        except FastmmError as error:
            error.path = f"placeholders[{i}]{error.path or ''}"
            raise
        position = record_new(<PyTypeObject*>PlaceholderRange)
        record_set(position, range_offset, offset)
        record_set(position, range_length, length)
        record_set(position, range_mask, mask)
        Py_INCREF(position)
        PyList_SET_ITEM(positions, i, position)
    if not ordered:
        refuse_overlaps(positions)
    return positions, ordered


cdef int whole(PyObject* value, str name, int64_t* out) except -1:
    """An int of Python or numpy that fits 64 bits."""
    cdef int overflow = 0
    cdef object number
    if PyLong_CheckExact(value):
        out[0] = PyLong_AsLongLongAndOverflow(value, &overflow)
    else:
        try:
            if isinstance(<object>value, bool):
                raise TypeError
            number = operator.index(<object>value)
        except TypeError:
            raise SchemaError(f"expected a whole number as {name}, got a {type(<object>value).__qualname__}") from None
        out[0] = PyLong_AsLongLongAndOverflow(<PyObject*>number, &overflow)
    if overflow:
        raise SchemaValueError(f"expected a {name} that fits 64 bits, got a larger number")
    return 0


cdef object unusual(object placeholder, int64_t* offset, int64_t* length):
    """A placeholder that is no pair; returns its mask or None."""
    if hasattr(placeholder, "offset") and hasattr(placeholder, "length"):
        first, second = placeholder.offset, placeholder.length
        mask = getattr(placeholder, "is_embed", None)
    else:
        try:
            if isinstance(placeholder, (str, bytes)):
                raise TypeError
            first, second = placeholder
            mask = None
        except (TypeError, ValueError):
            raise SchemaError("expected (offset, length) or a PlaceholderRange, got a "
                              f"{type(placeholder).__qualname__}") from None
    whole(<PyObject*>first, "offset", offset)
    whole(<PyObject*>second, "length", length)
    return mask


cdef int refuse_overlaps(list positions) except -1:
    order = sorted(range(len(positions)), key=lambda i: positions[i].offset)
    for before, after in zip(order, order[1:]):
        end = positions[before].offset + positions[before].length
        if positions[after].offset < end:
            raise SchemaValueError(
                f"expected placeholders that do not overlap, got one from {positions[after].offset} on, while "
                f"placeholders[{before}] ends at {end}", path=f"placeholders[{after}]")
    return 0


# --- masks ------------------------------------------------------------------------------------------------------------


cdef object checked_mask(object mask, int64_t length):
    """The caller's own mask; None when it is all true."""
    cdef Producer producer = producer_of(type(mask))
    cdef TensorView view
    cdef int64_t i, stride, ntrue = 0
    if producer is None:
        raise SchemaError(f"expected a bool tensor or None, got a {type(mask).__qualname__}", path=".is_embed")
    tensor_view(producer, <PyObject*>mask, &view)
    try:
        if view.dtype != FMM_BOOL or view.ndim != 1:
            raise SchemaError(f"expected a bool tensor of one dimension, got {view.ndim} dimensions"
                              f"{'' if view.dtype == FMM_BOOL else ' of another type'}", path=".is_embed")
        if view.nelem != length:
            raise SchemaValueError(f"expected a mask of {length} elements, got {view.nelem}", path=".is_embed")
        stride = 1 if view.strides is NULL else view.strides[0] * view.stride_unit_nbytes
        for i in range(length):
            ntrue += (<uint8_t*>view.data)[i * stride] != 0
    finally:
        tensor_view_clear(&view)
    if ntrue == 0:
        raise SchemaValueError(f"expected a mask that is true somewhere, got {length} times false", path=".is_embed")
    return None if ntrue == length else mask


cdef object mask_of(Prompt prompt, Marks marks, int64_t offset, int64_t length, bint as_torch):
    """Where the prompt holds one of the marks: a new bool tensor, or None when it does everywhere."""
    cdef object memory
    cdef int64_t nmatches
    cdef int64_t shape = length
    cdef uint8_t* found = <uint8_t*>malloc(length)
    if found is NULL:
        raise MemoryError()
    try:
        if prompt.items is not None:
            nmatches = match_items(prompt.items, marks, offset, length, found)
        else:
            nmatches = match_array(<const int64_t*>cnp.PyArray_DATA(prompt.array) + offset, marks, length, found)
        if nmatches == length:
            return None
        if nmatches == 0:
            raise SchemaValueError(f"expected embed_token_id among the {length} ids of the placeholder, got none")
        memory = PyByteArray_FromStringAndSize(<char*>found, length)
    finally:
        free(found)
    return tensor_make(
        FAMILY_EXCHANGE if as_torch else FAMILY_NUMPY, PyByteArray_AS_STRING(memory), FMM_BOOL, 1, &shape, memory, False)


cdef inline bint is_mark(Marks marks, int64_t token) noexcept:
    cdef Py_ssize_t i
    for i in range(marks.nids):
        if marks.ids[i] == token:
            return True
    return False


cdef int64_t match_items(list items, Marks marks, int64_t offset, int64_t length, uint8_t* found) except -1:
    cdef int64_t i, nmatches = 0, token = 0
    cdef int overflow = 0
    cdef PyObject* item
    cdef PyObject* last = NULL
    cdef bint hit = False
    for i in range(length):
        if PyList_GET_SIZE(items) <= offset + i:  # an `__index__` of the ids' own shortened it
            raise SchemaError("expected a prompt that nobody changes meanwhile")
        item = PyList_GET_ITEM(items, offset + i)
        if item is not last:  # placeholders made by repetition hold one object many times
            if PyLong_CheckExact(item):
                token = PyLong_AsLongLongAndOverflow(item, &overflow)
                hit = not overflow and is_mark(marks, token)
                last = item
            else:
                other = <object>item
                whole(<PyObject*>other, "token id", &token)
                hit = is_mark(marks, token)
                last = NULL
        found[i] = hit
        nmatches += hit
    return nmatches


cdef int64_t match_array(const int64_t* ids, Marks marks, int64_t length, uint8_t* found) noexcept:
    cdef int64_t i, nmatches = 0
    for i in range(length):
        found[i] = is_mark(marks, ids[i])
        nmatches += found[i]
    return nmatches

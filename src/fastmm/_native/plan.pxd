"""Reference of Plan: how an object of one Python type is walked."""

from cpython.object cimport PyTypeObject
from cpython.ref cimport PyObject

from .tensor cimport Producer

ctypedef enum Kind:
    KIND_NONE
    KIND_BOOL
    KIND_INT
    KIND_FLOAT
    KIND_STR
    KIND_BYTES  # bytes, bytearray, memoryview
    KIND_LIST
    KIND_TUPLE
    KIND_SET  # set, frozenset and their subclasses: whatever is iterated
    KIND_DICT
    KIND_STRUCT  # the fields of the plan, as an array or as a map
    KIND_MAPPING  # any other mapping, by its items
    KIND_TENSOR
    KIND_SLICE
    KIND_CONVERT  # enum, numpy scalar, date...: `convert` gives a plain value
    KIND_EXT  # msgpack.ExtType and Timestamp, msgspec.msgpack.Ext
    KIND_RAW  # msgspec.Raw: msgpack already
    KIND_UNKNOWN  # a user's hook may know

ctypedef enum Default:  # when a field is left out of a map
    DEFAULT_NEVER
    DEFAULT_IDENTICAL  # the value is the very default object
    DEFAULT_EMPTY  # the value is of exactly this type, and empty

cdef struct Field:
    Py_ssize_t offset  # of the slot in the object, 0: in the instance's dict
    PyObject* name  # attribute, interned, counted by the plan
    const char* key  # the encoded map key, inside the plan's `keys`
    int key_nbytes
    Default default
    PyObject* default_value  # the object or the type, counted by the plan
    bint tensor  # holds torch tensors in the engine: numpy arrays are named as torch names them
    bint payload  # is cast when a dtype is asked for
    bint features  # the list that requests of one prompt may share

cdef class Plan:
    cdef Kind kind
    cdef Producer producer  # KIND_TENSOR
    cdef object convert  # KIND_CONVERT
    # KIND_STRUCT
    cdef Field* fields  # owned
    cdef int nfields
    cdef bint as_array
    cdef bint wide_header  # a map whose header is chosen by the declared fields, as msgspec does with omit_defaults
    cdef bint in_dict  # attributes live in the instance's dict, where some may be missing
    cdef bint may_omit  # UNSET, a default or a missing attribute leaves a field out
    cdef bint missing_ok  # a field without a value is left out; else it is an error
    cdef frozenset properties  # fields that are read by getattr
    cdef bint memo  # small, immutable and shared by many: encoded once per message
    cdef bytes head  # written before a map (`["flat", `) or as the first element (a tag)
    cdef int head_nelem  # elements or pairs that `head` adds to the header's count
    cdef bint wrapped  # [factory, {fields}]: `head` holds the array's header and the name
    cdef bytes keys
    cdef list keepalive

# Borrowed: plans live as long as their type does.
cdef PyObject* plan_of(PyTypeObject* cls) except NULL

# The object that msgspec uses for "not there", borrowed; NULL while msgspec is not imported.
cdef PyObject* unset_object

"""Reference of Plan: how an object of one Python type is walked."""

from cpython.object cimport PyTypeObject
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint16_t, uintptr_t

from .tensor cimport Producer

ctypedef enum Kind:
    KIND_NONE
    KIND_NUMBER  # bool, int, float
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
    KIND_UNSET  # msgspec's "not there"
    KIND_UNKNOWN  # a user's hook may know

cdef extern from "c/plan_field.h":
    cdef enum:
        FMM_MODE_TENSOR
        FMM_MODE_PAYLOAD
        FMM_MODE_FIELD
        FMM_MODE_FEATURES
        FMM_MODE_IDS
        FMM_EMPTY_KEPT
        FMM_EMPTY_LIST
        FMM_EMPTY_DICT
        FMM_EMPTY_SET
    ctypedef struct fmm_field_t:
        PyObject* identical
        uint16_t offset
        uint16_t key
        uint16_t key_nbytes
        uint8_t mode
        uint8_t empty

cdef enum:
    PLAN_CACHE_SIZE = 512

cdef struct PlanEntry:
    PyTypeObject* cls
    PyObject* plan

cdef class Plan:
    cdef Kind kind
    cdef Producer producer  # KIND_TENSOR
    cdef object convert  # KIND_CONVERT
    cdef bint ours_only  # vLLM's encoder does not write it by itself, but asks its hook
    # KIND_STRUCT
    cdef fmm_field_t* fields  # owned
    cdef int nfields
    cdef bint as_array
    cdef bint in_dict  # attributes live in the instance's dict, where some may be missing
    cdef bint dictless  # ... or would, had they one: all that is not in a slot is a property
    cdef bint may_omit  # UNSET, a default or a missing attribute leaves a field out
    cdef bint missing_ok  # a field without a value is left out; else it is an error
    cdef frozenset properties  # fields that are read by getattr
    cdef bint memo  # small, immutable and shared by many: encoded once per message
    cdef bytes head  # written before a map (`["flat", `) or as the first element (a tag)
    cdef int head_nelem  # elements or pairs that `head` adds to the header's count
    cdef bint wrapped  # [factory, {fields}]: `head` holds the array's header and the name
    cdef const char* keys  # the encoded map keys, one behind the other, inside `keys_home`
    cdef bytes keys_home
    cdef list names  # of the attributes, interned
    cdef list defaults  # what the fields' `identical` point to
    cdef str profiled  # its name in the wire profiles, None for a class that is the same in all of them
    cdef list by_profile  # the plan for each of them, None until it is asked for
    cdef list surplus  # of such a plan: (name, default) of fields that the profile lacks
    cdef bint user_dict  # KIND_MAPPING: a UserDict, read by its `data`

# The plan of a class, whose own one is given, on the wire of another release: by the index of its profile.
cdef Plan plan_for_profile(Plan plan, object cls, int index)

# Borrowed: plans live as long as their type does.
cdef PyObject* plan_find(PyTypeObject* cls) except NULL

# The last plans asked for, direct-mapped by the address of the type.
cdef PlanEntry plan_cache[PLAN_CACHE_SIZE]

cdef inline PlanEntry* plan_entry(PyTypeObject* cls) noexcept:
    """Where the plan of a class lies, if it was the last one asked for at that place: `entry.cls` says so."""
    return &plan_cache[(<uintptr_t>cls >> 4) % PLAN_CACHE_SIZE]

# The object that msgspec uses for "not there", borrowed; NULL while no struct of msgspec was met.
cdef PyObject* unset_object

# For buffers where a tensor is wanted: bytes, bytearray, memoryview, which are plain bytes elsewhere.
cdef Plan buffer_plan

"""Reference of DecodePlan: what a value on the wire may be, and what it becomes.

Plans are made once per type and live as long as the process: plain C structs, so that the walk touches no reference counts.
"""

from cpython.object cimport PyTypeObject
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t

ctypedef enum ArrayRule:  # what an array becomes
    ARRAY_REFUSED
    ARRAY_LIST
    ARRAY_TUPLE
    ARRAY_FIXED_TUPLE  # one plan per element
    ARRAY_SET
    ARRAY_FROZENSET
    ARRAY_IDS  # list[int]
    ARRAY_TOKENS  # list[int], or a numpy array when the decoder was asked for one
    ARRAY_RECORD
    ARRAY_TENSOR  # [dtype, shape, data]
    ARRAY_NESTED  # a tensor, or a list of tensors and numbers nested as deep as need be
    ARRAY_FACTORY  # [name, {fields}]
    ARRAY_SLICES  # a list of slices, or of lists of slices

ctypedef enum MapRule:
    MAP_REFUSED
    MAP_DICT
    MAP_RECORD
    MAP_USER_DICT  # a UserDict of `wrapper`'s class

ctypedef enum RecordCheck:  # what a class asks for beyond the types of its fields
    CHECK_NOTHING
    CHECK_PLACEHOLDER

cdef struct DecodePlan:
    uint32_t accepts  # bit per fmm_kind_t
    bint int_as_float  # an int is taken where a float is meant
    ArrayRule array
    MapRule map
    DecodePlan* item  # of a list, tuple, set; the value of a dict
    DecodePlan* key  # of a dict
    DecodeRecord* record
    PyTypeObject* wrapper  # MAP_USER_DICT
    DecodePlan** items  # ARRAY_FIXED_TUPLE
    DecodeRecord** factories  # ARRAY_FACTORY
    int nitems  # of either
    PyObject* members  # dict of value -> enum member, or NULL
    PyObject* expected  # str, for errors

cdef struct DecodeField:
    DecodePlan* plan
    Py_ssize_t offset  # of the slot
    const uint8_t* key  # the encoded map key: header and name
    uint64_t key_head  # its first eight bytes, the unused ones zero
    uint64_t key_head_mask
    uint8_t key_nbytes
    PyObject* name  # interned str
    PyObject* default_value  # or NULL
    PyObject* default_factory  # or NULL; neither: the field must be there

cdef struct DecodeLayout:  # how another release of vLLM orders a record's fields
    int nelem
    int* fields  # index of the field at each position, -1 for one that is no longer there

cdef enum:
    MAX_FIELDS = 64  # which fields came is one 64-bit mask
    VALIDATED = 8  # remembered encodings, a power of two
    VALIDATED_MAX_NBYTES = 512

cdef struct DecodeRecord:
    PyTypeObject* cls
    DecodeField* fields
    int nfields
    int min_nelem  # fewer elements of an array are an error
    bint as_array
    bint in_dict  # fields are attributes, not slots
    bint closed  # a map with a key that names no field is an error
    RecordCheck check
    const uint8_t* factory  # the name before the map, NULL where there is none
    int factory_nbytes
    PyObject* post_init  # the function, or NULL
    # Encodings (bytes) for which post_init changed nothing, by a hash; counted.
    PyObject* validated[VALIDATED]
    # Of an array: by the index of a wire profile, NULL where the fields lie as they do here; or NULL as a whole.
    DecodeLayout** moved
    int nmoved

# The plan of a type or annotation; raises SchemaError for what cannot be decoded into.
cdef DecodePlan* decode_plan_of(object hint) except NULL

# Lets instances of another package's dataclass be made: a map on the wire, or `[factory, map]`. `rules` says by field what
# annotations do not: a type of ours, or "nested", "slices". A UserDict's one rule, "", is its values' type.
cdef int adopt(object cls, dict rules, str factory, bint closed) except -1

# Plain values only: None, bool, int, float, str, bytes, list, dict.
cdef DecodePlan* any_plan

"""Token ids: most of what a text request is made of.

Unpacking takes a nanosecond an id, a Python int ten.  So the ids are unpacked into a small buffer first, and an int is made
only for what was not seen just before: a run of placeholders is one object many times over.
"""

cimport numpy as cnp
from cpython.list cimport PyList_New
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from .cast cimport cpu_features, selected_table
from .decode_state cimport (
    FMM_ERR_OVERFLOW,
    DecodeState,
    c_bool,
    enter,
    fail,
    fail_status,
    fmm_read_int,
    fmm_reader_t,
    fmm_status_t,
    read_array,
    step_index,
)

cnp.import_array()

cdef extern from "unpack_ids.h" nogil:
    ctypedef size_t (*fmm_unpack_ids_fn_t)(fmm_reader_t* reader, int64_t* out, size_t nelem, fmm_status_t* status)
    fmm_unpack_ids_fn_t fmm_unpack_ids_best(const char* isa, uint64_t features)

cdef extern from "Python.h":
    PyObject* PyLong_FromLongLong(long long value) except NULL
    PyObject* PyLong_FromUnsignedLongLong(unsigned long long value) except NULL
    void set_item "PyList_SET_ITEM"(object, Py_ssize_t, PyObject*)
    void Py_INCREF_raw "Py_INCREF"(PyObject*)

cdef enum:
    CHUNK = 512  # ids unpacked at a time: 4 KiB of stack
    SEEN = 256  # a power of two
    SEEN_FROM = 64  # shorter lists are not worth clearing the table

cdef struct Seen:
    int64_t value
    PyObject* number  # borrowed from the list that is being filled

cdef fmm_unpack_ids_fn_t unpack = NULL


cdef int choose_unpack() except -1:
    """The kernel of the instruction set that the casts use, too: decided on first use and kept."""
    global unpack
    if unpack is NULL:
        unpack = fmm_unpack_ids_best(selected_table().name, cpu_features())
    return 0


cdef object read_ids(DecodeState* s):
    choose_unpack()
    cdef uint32_t nelem = read_array(s)
    cdef list ids = PyList_New(nelem)
    enter(s)
    fill_ids(s, ids, nelem)
    s.depth -= 1
    return ids


cdef int fill_ids(DecodeState* s, list ids, Py_ssize_t nelem) except -1:
    cdef int64_t chunk[CHUNK]
    cdef Seen seen[SEEN]
    cdef Seen* entry
    cdef bint table = nelem >= SEEN_FROM
    cdef fmm_status_t status
    cdef Py_ssize_t done = 0
    cdef Py_ssize_t count, i
    cdef int64_t value
    cdef int64_t last = 0
    cdef PyObject* number = NULL
    if table:
        memset(seen, 0, sizeof(seen))
    while done < nelem:
        count = unpack(&s.reader, chunk, min(nelem - done, CHUNK), &status)
        for i in range(count):
            value = chunk[i]
            if value == last and number is not NULL:
                Py_INCREF_raw(number)
            elif table:
                entry = &seen[<uint64_t>value % SEEN]
                if entry.value == value and entry.number is not NULL:
                    number = entry.number
                    Py_INCREF_raw(number)
                else:
                    number = PyLong_FromLongLong(value)
                    entry.value = value
                    entry.number = number
                last = value
            else:
                number = PyLong_FromLongLong(value)
                last = value
            set_item(ids, done + i, number)
        done += count
        if status == FMM_ERR_OVERFLOW:
            set_item(ids, done, read_u64(s))
            done += 1
        elif status:
            step_index(s, done)
            fail_status(s, status, "int")
    return 0


cdef PyObject* read_u64(DecodeState* s) except NULL:
    cdef int64_t bits = 0
    cdef c_bool is_u64
    fmm_read_int(&s.reader, &bits, &is_u64)
    return PyLong_FromUnsignedLongLong(<uint64_t>bits)


cdef object read_ids_array(DecodeState* s):
    choose_unpack()
    cdef uint32_t nelem = read_array(s)
    cdef cnp.npy_intp extent = nelem
    cdef cnp.ndarray ids = cnp.PyArray_EMPTY(1, &extent, cnp.NPY_INT64, 0)
    cdef fmm_status_t status
    cdef size_t count = unpack(&s.reader, <int64_t*>cnp.PyArray_DATA(ids), nelem, &status)
    if status:
        enter(s)
        step_index(s, count)
        if status == FMM_ERR_OVERFLOW:
            fail(s, NULL, "expected an id below 2**63 for token_ids='array', got a larger one")
        fail_status(s, status, "int")
    return ids

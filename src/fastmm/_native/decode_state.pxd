"""Reference of DecodeState: one decode in flight.  It lives on the stack of `Decoder.decode`; everything needs the GIL."""

from cpython.ref cimport PyObject
from libc.stdint cimport int8_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "<stdbool.h>" nogil:
    ctypedef bint c_bool "bool"

cdef extern from "fastmm/status.h" nogil:
    ctypedef enum fmm_status_t:
        FMM_OK
        FMM_ERR_TRUNCATED
        FMM_ERR_LIMIT
        FMM_ERR_OVERFLOW

cdef extern from "fastmm/msgpack_read.h" nogil:
    ctypedef enum fmm_kind_t:
        FMM_KIND_NIL
        FMM_KIND_BOOL
        FMM_KIND_INT
        FMM_KIND_FLOAT
        FMM_KIND_STR
        FMM_KIND_BIN
        FMM_KIND_ARRAY
        FMM_KIND_MAP
        FMM_KIND_EXT
    ctypedef struct fmm_reader_t:
        const uint8_t* cur
        const uint8_t* end
    fmm_kind_t fmm_kind_of(uint8_t lead)
    size_t fmm_read_left(const fmm_reader_t* reader)
    fmm_status_t fmm_read_int(fmm_reader_t* reader, int64_t* value, c_bool* is_u64)
    fmm_status_t fmm_read_float(fmm_reader_t* reader, double* value)
    fmm_status_t fmm_read_str(fmm_reader_t* reader, const uint8_t** data, uint32_t* nbytes)
    fmm_status_t fmm_read_bin(fmm_reader_t* reader, const uint8_t** data, uint32_t* nbytes)
    fmm_status_t fmm_read_ext(fmm_reader_t* reader, int8_t* code, const uint8_t** data, uint32_t* nbytes)
    fmm_status_t fmm_read_array(fmm_reader_t* reader, uint32_t* nelem)
    fmm_status_t fmm_read_map(fmm_reader_t* reader, uint32_t* npairs)
    fmm_status_t fmm_read_skip(fmm_reader_t* reader, int max_depth, uint64_t* nelem)

cdef struct FrameView:
    const uint8_t* data
    Py_ssize_t nbytes
    PyObject* owner  # counted: what keeps `data` alive and in place
    bint readonly
    bint used  # a tensor points to it
    PyObject* copy  # counted, or NULL: what keeps the one private copy, which all tensors of the frame share
    uint8_t* copy_data

ctypedef enum StepKind:
    STEP_FIELD
    STEP_INDEX
    STEP_KEY

cdef struct Step:  # one part of the path to the value at the cursor
    StepKind kind
    PyObject* name  # of a field or key, borrowed
    Py_ssize_t index  # -1: a place without a path of its own

cdef struct FieldMemo:  # the last field metadata seen at one position of an item
    const uint8_t* raw
    Py_ssize_t nbytes
    PyObject* value  # counted, or NULL

cdef enum:
    FIELD_MEMOS = 8
    MAX_DEPTH = 512  # FMM_READ_MAX_DEPTH: what the C stack surely takes, and the bound of the option

ctypedef enum OwnRule:  # what tensors of aux frames are in a decoder with vLLM's habits
    OWN_NOT  # as `copy` says
    OWN_TORCH  # torch's own memory
    OWN_PINNED  # and pinned

cdef struct DecodeState:
    fmm_reader_t reader  # over the main frame
    const uint8_t* start
    FrameView* frames
    Py_ssize_t nframes
    Step* path  # MAX_DEPTH + 1 of them; the steps up to `depth` lead to the cursor
    int depth
    int max_depth
    int64_t elements_left
    object (*read_any)(DecodeState* s)  # a plain value: the walk is above the tensors that need it
    # Options
    int family  # of tensor.pxd
    bint copy
    bint ids_as_array
    int profile  # index of the sender's wire profile, -1 when it is not known
    PyObject* provider  # borrowed, or NULL
    OwnRule own
    bint torch_only  # a numpy name is none for a tensor
    # The tensor decoded last, for checks of the record that holds it
    int tensor_dtype
    int tensor_ndim
    int64_t tensor_extent
    int64_t payload_left  # bytes of tensors that may still come
    int64_t nbytes_viewed
    int64_t nbytes_copied
    int pair  # position in the map of the item that is being read: which memo to ask
    FieldMemo memos[FIELD_MEMOS]

# Raise, with the path to the cursor and `at` as the offset.  `at` may be NULL: the cursor.
cdef int fail(DecodeState* s, const uint8_t* at, str message) except -1
cdef int fail_status(DecodeState* s, fmm_status_t status, str expected) except -1
cdef int fail_truncated(DecodeState* s) except -1
cdef int fail_frame(DecodeState* s, Py_ssize_t frame, str message) except -1
# For what a callback of the user or a foreign library raised: becomes a DecodeError with the path.
cdef int fail_foreign(DecodeState* s, str what, object error) except -1
cdef int fail_depth(DecodeState* s) except -1
cdef int fail_elements(DecodeState* s) except -1
cdef int fail_payload(DecodeState* s) except -1

# A value of what kind the cursor is at: "int", "an array"...
cdef str kind_word(DecodeState* s)

# Text from UTF-8.
cdef object text(DecodeState* s, const uint8_t* data, uint32_t nbytes)
# The same for names that come again and again: interned through a small table.
cdef object name_text(DecodeState* s, const uint8_t* data, uint32_t nbytes)

cdef int skip(DecodeState* s) except -1


cdef inline void step_index(DecodeState* s, Py_ssize_t index) noexcept:
    s.path[s.depth].kind = STEP_INDEX
    s.path[s.depth].index = index


cdef inline int enter(DecodeState* s) except -1:
    """One container deeper.  Leaving is `s.depth -= 1`; on an error the depth stays, and is the error's path."""
    if s.depth == s.max_depth:
        return fail_depth(s)
    s.depth += 1
    step_index(s, -1)
    return 0


cdef inline int count_elements(DecodeState* s, int64_t nelem) except -1:
    s.elements_left -= nelem
    if s.elements_left < 0:
        return fail_elements(s)
    return 0


cdef inline void step_name(DecodeState* s, StepKind kind, PyObject* name) noexcept:
    s.path[s.depth].kind = kind
    s.path[s.depth].name = name


cdef inline uint32_t read_array(DecodeState* s) except? 0:
    cdef uint32_t nelem = 0
    cdef fmm_status_t status = fmm_read_array(&s.reader, &nelem)
    if status:
        fail_status(s, status, "an array")
    count_elements(s, nelem)
    return nelem


cdef inline uint32_t read_map(DecodeState* s) except? 0:
    cdef uint32_t npairs = 0
    cdef fmm_status_t status = fmm_read_map(&s.reader, &npairs)
    if status:
        fail_status(s, status, "a map")
    count_elements(s, npairs)
    return npairs

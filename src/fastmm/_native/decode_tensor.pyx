"""Tensors: `[dtype, shape, data]` becomes a torch tensor, a numpy array or a WireTensor.

Every size is checked before anything is made of it.  The data of an aux frame is viewed where it lies; inline data is copied,
for it lies unaligned amid the main frame, and a view would keep all of that alive for a few bytes.
"""

cimport numpy as cnp
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.ref cimport Py_INCREF, Py_XDECREF, PyObject
from libc.stdint cimport int8_t, int64_t, uint8_t, uint32_t, uintptr_t
from libc.string cimport memcmp, memcpy

from fastmm.schema import WireTensor

from .decode_state cimport (
    FMM_KIND_EXT,
    FMM_KIND_INT,
    FMM_KIND_MAP,
    OWN_NOT,
    OWN_PINNED,
    DecodeState,
    FrameView,
    c_bool,
    enter,
    fail,
    fail_foreign,
    fail_frame,
    fail_payload,
    fail_status,
    fail_truncated,
    fmm_kind_of,
    fmm_kind_t,
    fmm_read_ext,
    fmm_read_int,
    fmm_read_str,
    fmm_status_t,
    kind_word,
    read_array,
)
from .frame cimport frame_new
from .pool cimport Block, block_acquire
from .tensor cimport FAMILY_EXCHANGE, FAMILY_NUMPY, FAMILY_WIRE, MAX_NDIM
from .tensor_make cimport make_numpy, numpy_descr, tensor_make

cnp.import_array()

cdef extern from "fastmm/dtype.h" nogil:
    cdef enum:
        FMM_DTYPE_NONE
        FMM_UINT8
    ctypedef struct fmm_dtype_info_t:
        const char* name
        uint8_t name_nbytes
        uint8_t item_nbytes
    const fmm_dtype_info_t fmm_dtype_infos[1]
    int fmm_dtype_from_name(const char* name, size_t name_nbytes)
    int fmm_dtype_from_numpy(char kind, size_t item_nbytes)

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object, Py_ssize_t*) except NULL
    long long PyLong_AsLongLongAndOverflow(object value, int* overflow) except? -1

cdef extern from "fastmm/size.h" nogil:
    c_bool fmm_mul_i64(int64_t a, int64_t b, int64_t* out)

cdef enum:
    MAX_INT64 = 0x7FFFFFFFFFFFFFFF
    POOLED_NBYTES = 65536  # copies from this size on go to a warm block of the pool
    NOGIL_NBYTES = 1 << 20  # copies from this size on let other threads run
    DESCRS = 64  # a power of two
    NAME_MAX_NBYTES = 24  # the longest name of a numpy type that is looked at

cdef struct Header:  # what a tensor says of itself
    int dtype  # fmm_dtype_t; FMM_DTYPE_NONE for what only numpy has
    PyObject* descr  # numpy's, held by read_tensor; NULL when the name is torch's
    PyObject* rare  # torch's, of a type that only torch has, held as well; or NULL
    const uint8_t* name
    uint32_t name_nbytes
    int64_t item_nbytes
    int64_t alignment
    int ndim
    int64_t nbytes
    int64_t shape[MAX_NDIM]

cdef struct KnownDescr:
    uint8_t name[NAME_MAX_NBYTES]
    uint32_t name_nbytes
    PyObject* descr  # counted

cdef KnownDescr known_descrs[DESCRS]
cdef PyObject* torch_dtypes[64]  # by fmm_dtype_t, counted; NULL: not asked for yet
cdef uint8_t nothing[64]  # what an empty tensor points to


cdef object read_tensor(DecodeState* s, uint32_t nelem):
    cdef Header header
    cdef const uint8_t* at = s.reader.cur
    cdef fmm_kind_t kind
    if nelem != 3:
        fail(s, at - 1, f"expected a tensor [dtype, shape, data], got an array of {nelem}")
    enter(s)  # the parts of a tensor have no path of their own
    cdef object _held = read_dtype(s, &header)
    read_shape(s, &header)
    if s.reader.cur == s.reader.end:
        fail_truncated(s)
    kind = fmm_kind_of(s.reader.cur[0])
    if kind == FMM_KIND_INT:
        tensor = read_aux(s, &header)
    elif kind == FMM_KIND_EXT:
        tensor = read_inline(s, &header)
    elif kind == FMM_KIND_MAP:
        tensor = read_out_of_band(s, &header)
    else:
        fail(s, NULL, f"expected the data of a tensor: the index of a frame, ext of code 3 or a map, got {kind_word(s)}")
    s.tensor_dtype = header.dtype
    s.tensor_ndim = header.ndim
    s.tensor_extent = header.shape[0] if header.ndim else 0
    s.depth -= 1
    return tensor


# --- dtype and shape --------------------------------------------------------------------------------------------------


cdef object read_dtype(DecodeState* s, Header* header):
    """Fills in the type; returns what the caller must hold meanwhile."""
    cdef const uint8_t* at = s.reader.cur
    cdef fmm_status_t status = fmm_read_str(&s.reader, &header.name, &header.name_nbytes)
    if status:
        fail_status(s, status, "the dtype of a tensor, a str")
    return named_dtype(s, header, at)


cdef object named_dtype(DecodeState* s, Header* header, const uint8_t* at):
    cdef cnp.dtype descr
    header.descr = header.rare = NULL
    header.dtype = fmm_dtype_from_name(<const char*>header.name, header.name_nbytes)
    if header.dtype != FMM_DTYPE_NONE:
        header.item_nbytes = fmm_dtype_infos[header.dtype].item_nbytes
        header.alignment = header.item_nbytes
        return None
    found = None if s.torch_only else spelt_descr(header.name, header.name_nbytes)
    if found is None and s.torch_only:
        return rare_dtype(s, header, at)
    if found is None:
        fail(s, at, f"expected a dtype such as 'bfloat16' or '<f4', got {shown(header)}")
    descr = found
    header.item_nbytes = descr.itemsize
    header.alignment = descr.alignment
    header.dtype = fmm_dtype_from_numpy(descr.kind, descr.itemsize)
    header.descr = <PyObject*>descr
    return descr


cdef object rare_dtype(DecodeState* s, Header* header, const uint8_t* at):
    """One of torch's types that nobody else has (float4_e2m1fn_x2, bits8); what vLLM's decoder takes, but no alias."""
    import torch
    name = shown(header)[1:-1]
    found = vars(torch).get(name)  # no getattr: torch imports modules for some names
    if not isinstance(found, torch.dtype) or str(found) != f"torch.{name}":
        fail(s, at, f"expected a dtype such as 'bfloat16', got {shown(header)}")
    header.item_nbytes = found.itemsize
    header.alignment = 1
    header.rare = <PyObject*>found
    return found


cdef str shown(Header* header):
    return repr((<const char*>header.name)[:min(header.name_nbytes, <uint32_t>NAME_MAX_NBYTES)].decode("ascii", "replace"))


cdef object spelt_descr(const uint8_t* name, uint32_t nbytes):
    """The type numpy spells so, None when it is none that may travel."""
    cdef KnownDescr* known
    cdef PyObject* old
    cdef bytes spelling
    cdef uint32_t i
    if nbytes < 3 or nbytes > NAME_MAX_NBYTES or name[0] not in b"<>|" or name[1] not in b"biufcSU":
        return None
    for i in range(2, nbytes):
        if not c"0" <= name[i] <= c"9":
            return None
    known = &known_descrs[(name[0] * 5 + name[1] * 3 + name[2] * 7 + nbytes) % DESCRS]
    if known.descr is not NULL and known.name_nbytes == nbytes and memcmp(known.name, name, nbytes) == 0:
        return <object>known.descr
    spelling = (<const char*>name)[:nbytes]
    spelt = spelling.decode("ascii")
    try:
        descr = cnp.dtype(spelt)
    except Exception:
        return None
    # Only the very name that numpy gives: no "=f4", no "|f4", no "<b1".
    if descr.str != spelt or descr.itemsize == 0 or descr.hasobject:
        return None
    old = known.descr
    Py_INCREF(descr)
    known.descr = <PyObject*>descr
    known.name_nbytes = nbytes
    memcpy(known.name, PyBytes_AS_STRING(spelling), nbytes)
    Py_XDECREF(old)
    return descr


cdef int read_shape(DecodeState* s, Header* header) except -1:
    cdef const uint8_t* at = s.reader.cur
    cdef uint32_t ndim = read_array(s)
    cdef fmm_status_t status
    cdef c_bool is_u64
    cdef int axis
    shape_start(s, header, ndim, at)
    for axis in range(header.ndim):
        status = fmm_read_int(&s.reader, &header.shape[axis], &is_u64)
        if status:
            fail_status(s, status, "an extent, an int")
        if is_u64:
            fail(s, at, "expected extents >= 0 that fit 63 bits, got one that is too large")
    return shape_check(s, header, at)


cdef int shape_start(DecodeState* s, Header* header, int64_t ndim, const uint8_t* at) except -1:
    if ndim > MAX_NDIM:
        fail(s, at, f"expected at most {MAX_NDIM} dimensions, got {ndim}")
    header.ndim = <int>ndim
    return 0


cdef int shape_check(DecodeState* s, Header* header, const uint8_t* at) except -1:
    cdef int64_t spread = header.item_nbytes  # with extents of zero taken as one: strides are made of it
    cdef bint empty = False
    cdef int axis
    for axis in range(header.ndim):
        if header.shape[axis] < 0:
            fail(s, at, "expected extents >= 0 that fit 63 bits, got one that is negative")
        if header.shape[axis] == 0:
            empty = True
        elif not fmm_mul_i64(spread, header.shape[axis], &spread):
            fail(s, at, "expected a shape whose size in bytes fits 63 bits, got a larger one")
    header.nbytes = 0 if empty else spread
    return 0


cdef str sized(Header* header):
    return f"{header.nbytes} bytes for {shown(header)} of shape {extents(header)}"


cdef tuple extents(Header* header):
    return tuple([header.shape[axis] for axis in range(header.ndim)])


# --- data -------------------------------------------------------------------------------------------------------------


cdef object read_aux(DecodeState* s, Header* header):
    cdef const uint8_t* at = s.reader.cur
    cdef int64_t index = 0
    cdef c_bool is_u64
    cdef fmm_status_t status = fmm_read_int(&s.reader, &index, &is_u64)
    if status:
        fail_status(s, status, "the index of a frame")
    if is_u64:
        index = MAX_INT64
    return aux_tensor(s, header, index, at)


cdef object aux_tensor(DecodeState* s, Header* header, int64_t index, const uint8_t* at):
    cdef FrameView* frame
    if index < 1 or index >= s.nframes:
        fail(s, at, f"expected the index of an aux frame, 1 to {s.nframes - 1}, got "
                    f"{'a larger number' if index == MAX_INT64 else index}" if s.nframes > 1 else
                    "expected no index, for there are no aux frames")
    frame = &s.frames[index]
    if frame.nbytes != header.nbytes:
        fail_frame(s, index, f"expected {sized(header)}, got a frame of {frame.nbytes} bytes")
    frame.used = True
    if s.own != OWN_NOT and header.nbytes:
        return own_tensor(s, header, frame)
    if s.copy or <uintptr_t>frame.data % header.alignment:
        if frame.copy is NULL:
            copy_frame(s, frame)
        return make(s, header, frame.copy_data, <object>frame.copy, False)
    s.nbytes_viewed += header.nbytes
    return make(s, header, <void*>frame.data, <object>frame.owner, frame.readonly)


cdef object read_inline(DecodeState* s, Header* header):
    cdef const uint8_t* at = s.reader.cur
    cdef const uint8_t* data = NULL
    cdef uint32_t nbytes = 0
    cdef int8_t code = 0
    cdef fmm_status_t status = fmm_read_ext(&s.reader, &code, &data, &nbytes)
    if status:
        fail_status(s, status, "ext")
    if code != 3:
        fail(s, at, f"expected ext of code 3, got code {code}" + (": pickles are never loaded" if code in (1, 2) else ""))
    return inline_tensor(s, header, data, nbytes, at)


cdef object inline_tensor(DecodeState* s, Header* header, const uint8_t* data, int64_t nbytes, const uint8_t* at):
    if nbytes != header.nbytes:
        fail(s, at, f"expected {sized(header)}, got {nbytes}")
    s.payload_left -= nbytes
    if s.payload_left < 0:
        fail_payload(s)
    return make_inline(s, header, data)


cdef object make_inline(DecodeState* s, Header* header, const uint8_t* data):
    """A tensor over a private, aligned copy of inline data."""
    cdef uint8_t* target
    s.nbytes_copied += header.nbytes
    if header.nbytes == 0:
        return make(s, header, nothing, None, False)
    if header.nbytes < POOLED_NBYTES and (s.family == FAMILY_NUMPY or header.descr is not NULL and s.family != FAMILY_WIRE):
        descr = header_descr(header)
        if descr is not None:  # numpy's own memory: one object less
            array = make_numpy(NULL, descr, header.ndim, header.shape, NULL, None, False)
            memcpy(cnp.PyArray_DATA(array), data, header.nbytes)
            return array
    owner = private_copy(data, header.nbytes, &target)
    return make(s, header, target, owner, False)


cdef int copy_frame(DecodeState* s, FrameView* frame) except -1:
    """The private copy of a frame.  One is enough: its tensors share memory as they share the frame, and a small message
    that names a large frame a thousand times costs no more."""
    cdef uint8_t* target
    owner = private_copy(frame.data, frame.nbytes, &target)
    s.nbytes_copied += frame.nbytes
    Py_INCREF(owner)
    frame.copy = <PyObject*>owner
    frame.copy_data = target
    return 0


cdef object private_copy(const uint8_t* data, Py_ssize_t nbytes, uint8_t** target):
    """A copy aligned for every type; returns what owns it.  Lets other threads run while it copies much."""
    cdef uint8_t* room
    if nbytes >= POOLED_NBYTES:
        block = block_acquire(nbytes)
        owner = block
        room = (<Block>block).data
    else:
        owner = PyBytes_FromStringAndSize(NULL, nbytes)  # nobody else sees these bytes, so they may be written to
        room = <uint8_t*>PyBytes_AS_STRING(owner)
    if nbytes >= NOGIL_NBYTES:
        with nogil:
            memcpy(room, data, nbytes)
    else:
        memcpy(room, data, nbytes)
    target[0] = room
    return owner


cdef object make(DecodeState* s, Header* header, void* data, object owner, bint readonly):
    """A tensor over memory that `owner` keeps; it has the right size and alignment."""
    if header.nbytes == 0:
        data = nothing  # an empty frame may point anywhere
    try:
        if s.family == FAMILY_WIRE:
            frame = frame_new(data, header.nbytes, owner)
            name = (<const char*>header.name)[:header.name_nbytes].decode("ascii")
            return WireTensor(name, extents(header), frame)
        if header.rare is not NULL:
            seen = tensor_make(FAMILY_EXCHANGE, data, FMM_UINT8, 1, &header.nbytes, owner, readonly)
            return seen.view(<object>header.rare).view(extents(header))
        if header.descr is NULL and s.family == FAMILY_EXCHANGE:
            return tensor_make(FAMILY_EXCHANGE, data, header.dtype, header.ndim, header.shape, owner, readonly)
        descr = header_descr(header)
        if descr is None:
            return tensor_make(FAMILY_WIRE, data, header.dtype, header.ndim, header.shape, owner, readonly)
        return make_numpy(data, descr, header.ndim, header.shape, NULL, owner, readonly)
    except Exception as error:
        fail_foreign(s, f"no tensor can be made of {shown(header)} of shape {extents(header)}", error)


cdef object header_descr(Header* header):
    """numpy's type of the header, None when there is none: bfloat16 and float8 without ml_dtypes."""
    return <object>header.descr if header.descr is not NULL else numpy_descr(header.dtype)


# --- vLLM's habits ----------------------------------------------------------------------------------------------------


cdef object own_tensor(DecodeState* s, Header* header, FrameView* frame):
    """A tensor, or array, whose memory is its library's own.  Tensors of one frame share one copy."""
    if header.descr is not NULL or s.family != FAMILY_EXCHANGE:
        s.nbytes_copied += header.nbytes
        return make(s, header, <void*>frame.data, <object>frame.owner, frame.readonly).copy()
    if frame.copy is NULL:
        seen = tensor_make(FAMILY_EXCHANGE, <void*>frame.data, FMM_UINT8, 1, <int64_t*>&frame.nbytes, <object>frame.owner, True)
        own = seen.pin_memory() if s.own == OWN_PINNED else seen.clone()
        s.nbytes_copied += frame.nbytes
        Py_INCREF(own)
        frame.copy = <PyObject*>own
    return (<object>frame.copy).view(torch_dtype(header)).view(extents(header))


cdef object torch_dtype(Header* header):
    cdef int dtype = header.dtype
    if header.rare is not NULL:
        return <object>header.rare
    if torch_dtypes[dtype] is NULL:
        import torch
        found = getattr(torch, (<bytes>fmm_dtype_infos[dtype].name).decode())
        Py_INCREF(found)
        torch_dtypes[dtype] = <PyObject*>found
    return <object>torch_dtypes[dtype]


cdef object tensor_of(DecodeState* s, object triple):
    """The tensor that `[dtype, shape, data]` stands for where somebody else has read it: data is an index, what came as ext
    (a memoryview), or a dict."""
    cdef Header header
    cdef Py_buffer buffer
    cdef Py_ssize_t nbytes = 0
    cdef int64_t index
    cdef int overflow = 0
    cdef int axis
    if type(triple) not in (list, tuple) or len(triple) != 3 or type(triple[0]) is not str or type(triple[1]) not in (
            list, tuple):
        fail(s, NULL, f"expected a tensor [dtype, shape, data], got a {type(triple).__name__}")
    name, shape, data = triple
    header.name = <const uint8_t*>PyUnicode_AsUTF8AndSize(name, &nbytes)
    header.name_nbytes = <uint32_t>min(nbytes, 0xffff)
    cdef object _held = named_dtype(s, &header, NULL)
    shape_start(s, &header, len(shape), NULL)
    for axis in range(header.ndim):
        if type(shape[axis]) is not int:
            fail(s, NULL, f"expected an extent, an int, got a {type(shape[axis]).__name__}")
        header.shape[axis] = PyLong_AsLongLongAndOverflow(shape[axis], &overflow)
        if overflow:
            fail(s, NULL, "expected extents >= 0 that fit 63 bits, got one that does not")
    shape_check(s, &header, NULL)
    if type(data) is int:
        index = PyLong_AsLongLongAndOverflow(data, &overflow)
        return aux_tensor(s, &header, MAX_INT64 if overflow else index, NULL)
    if type(data) is memoryview:
        PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE)
        try:
            return inline_tensor(s, &header, <const uint8_t*>buffer.buf, buffer.len, NULL)
        finally:
            PyBuffer_Release(&buffer)
    if type(data) is dict:
        return provided_tensor(s, &header, data, NULL)
    fail(s, NULL, "expected the data of a tensor: the index of a frame, ext of code 3 or a map, got "
                  f"a {type(data).__name__}")


# --- out of band ------------------------------------------------------------------------------------------------------


cdef object read_out_of_band(DecodeState* s, Header* header):
    cdef const uint8_t* at = s.reader.cur
    return provided_tensor(s, header, s.read_any(s), at)


cdef object provided_tensor(DecodeState* s, Header* header, object meta, const uint8_t* at):
    if s.provider is NULL:
        fail(s, at, "the tensor is out of band: the decoder needs an oob_tensor_provider")
    name = (<const char*>header.name)[:header.name_nbytes].decode("ascii")
    shape = extents(header)
    try:
        tensor = (<object>s.provider)(name, shape, meta)
    except Exception as error:
        fail_foreign(s, "oob_tensor_provider failed", error)
    try:
        dtype = tensor.dtype
        got = (dtype.str if header.descr is not NULL and hasattr(dtype, "str") else
               str(getattr(dtype, "name", dtype)).removeprefix("torch."))
        got_shape = tuple(tensor.shape)
    except Exception:
        fail(s, at, f"expected a tensor from oob_tensor_provider, got a {type(tensor).__name__}")
    if got != name or got_shape != shape:
        fail(s, at, f"expected {name!r} of shape {shape} from oob_tensor_provider, got {got!r} of shape {got_shape}")
    return tensor

"""VllmDecoder: the decoder with the habits of vLLM's own ``MsgpackDecoder``, which the drop-in puts beside it as a base.

msgspec reads vLLM's structs, as in vLLM.  What takes its time is cut out of the main frame and read here: ``mm_features``, all
of whose field metadata msgspec would first turn into lists, and token ids.  msgspec reads what is left, with nil in their
place, and asks the hooks for the tensors in it.
"""

import typing

from cpython.buffer cimport PyObject_CheckBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyTypeObject
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from fastmm.errors import DecodeError, SchemaError

from .decode_frames cimport FEW_FRAMES, frames_close, frames_open, frames_room, state_end, state_start
from .decode_ids cimport read_ids
from .decode_plan cimport DecodePlan, adopt, any_plan, decode_plan_of
from .decode_state cimport (
    FMM_KIND_ARRAY,
    FMM_OK,
    MAX_DEPTH,
    OWN_NOT,
    OWN_PINNED,
    OWN_TORCH,
    STEP_FIELD,
    DecodeState,
    FrameView,
    Step,
    enter,
    fail,
    fmm_kind_of,
    fmm_read_array,
    fmm_read_skip,
    fmm_reader_t,
    step_name,
)
from .decode_tensor cimport tensor_of
from .decode_tree cimport read_value
from .record cimport class_attribute, record_get, record_replace, slot_offset
from .tensor cimport FAMILY_EXCHANGE, FAMILY_NUMPY

cdef extern from "Python.h":
    bint PyObject_GC_IsTracked(object)
    void PyObject_GC_Track(object)

cdef enum:
    RAW_VIEW = 3  # ext code of tensor data
    IDS_MIN = 20  # fewer ids are not worth a cut
    SMALL_NBYTES = 256  # of a main frame without features: msgspec alone is quicker
    FEATURES_AHEAD = 16  # messages without features after one with them, until the next are thought to have none
    NIL = 0xc0


def adopt_classes(feature, placeholder, item, elem, dict factories, tensor):
    """Makes vLLM's classes known to the decoder: ``list[feature]`` and ``item`` can be decoded into then.

    Raises SchemaError where a class is not what it was when this was written.
    """
    for name, cls in factories.items():
        adopt(cls, {"slices": "slices"}, name, True)
    adopt(elem, {"data": "nested", "field": typing.Union[tuple(factories.values())]}, None, True)
    adopt(item, {"": elem}, None, False)
    adopt(placeholder, {"is_embed": typing.Optional[tensor]}, None, False)
    adopt(feature, {"data": typing.Optional[item], "mm_position": placeholder}, None, False)
    decode_plan_of(list[feature])
    decode_plan_of(item)


cdef DecodeState no_message  # what `state` points to while msgspec alone reads a message


cdef Py_ssize_t slot_of(object cls, str name) except 0:
    cdef Py_ssize_t offset = slot_offset(<PyTypeObject*>cls, class_attribute(cls, name))
    if offset == 0:
        raise SchemaError(f"expected {cls.__qualname__} to have a slot {name}")
    return offset


cdef struct Cut:  # an element of the main frame's array that is read here
    const uint8_t* start
    const uint8_t* end


cdef class VllmDecoder:
    """Decodes into vLLM's own objects; a base of a class that has vLLM's decoder as its second base.

    Parameters
    ----------
    read
        ``decode`` of msgspec's decoder: reads what is not read here, and calls `dec_hook` and `ext_hook`.
    of_type
        The class of messages, or None.
    whole
        The type of messages that are read here altogether, or None.
    ids, features
        The positions of the token ids and of the features in the message's array with the names of their attributes, such as
        ``(1, "prompt_token_ids")``, or None.
    feature
        The class of a feature, known by `adopt_classes`.
    tensor_class, array_class
        What torch's tensors and numpy's arrays are.

    Attributes
    ----------
    share_mem, pin_tensors
        Tensors of aux frames view them; or own their memory, which is pinned if so asked.
    oob_tensor_provider
        As for `Decoder`.
    """

    cdef object read
    cdef const DecodePlan* whole
    cdef const DecodePlan* features
    cdef int ids_index  # -1: none
    cdef int features_index
    cdef Py_ssize_t ids_offset  # of their slots
    cdef Py_ssize_t features_offset
    cdef int features_ahead  # small messages are looked at for features: some had them lately
    cdef bint tracked  # by the collector: messages are
    cdef object ids_name
    cdef object features_name
    cdef public bint share_mem
    cdef public bint pin_tensors
    cdef public object oob_tensor_provider
    cdef DecodeState* state  # of the message that is open, or NULL
    cdef tuple parts  # its frames, or what somebody put there
    cdef object tensor_class
    cdef object array_class

    def __init__(self, read, of_type, *, whole=None, ids=None, features=None, feature=None,
                 tensor_class=None, array_class=None):
        self.read = read
        self.whole = NULL if whole is None else decode_plan_of(whole)
        self.ids_index, self.ids_name = (-1, None) if ids is None else ids
        self.features_index, self.features_name = (-1, None) if features is None else features
        self.tracked = hasattr(of_type, "__struct_config__") and of_type.__struct_config__.gc
        if ids is not None:
            self.ids_offset = slot_of(of_type, self.ids_name)
        self.features = NULL
        if features is not None:
            self.features = decode_plan_of(list[feature])
            self.features_offset = slot_of(of_type, self.features_name)
        self.parts = ()
        self.tensor_class = tensor_class
        self.array_class = array_class

    @property
    def aux_buffers(self):
        """The frames of the message that is being decoded, else ``()``."""
        return self.parts

    @aux_buffers.setter
    def aux_buffers(self, frames):
        self.parts = tuple(frames)

    def decode(self, bufs):
        """Decode one message: its frames, or its main frame alone."""
        cdef object main = None
        cdef PyObject* features
        if type(bufs) is list:
            if PyList_GET_SIZE(bufs) == 1:
                main = <object>PyList_GET_ITEM(bufs, 0)
        elif PyBytes_CheckExact(bufs):
            main = bufs
        try:
            if main is not None and self.state is NULL and self.whole is NULL and (
                    self.features is NULL or
                    self.oob_tensor_provider is None and not self.features_ahead and len(main) < SMALL_NBYTES):
                # Nothing to cut: msgspec reads it all, without the cost of opening frames. If there is, it is read again,
                # which a provider must not see: it gives each tensor once.
                self.state = &no_message
                try:
                    message = self.read(main)
                finally:
                    self.state = NULL
                if not self.features_offset:
                    return message
                features = record_get(message, self.features_offset)
                if features is <PyObject*>None or features is NULL:
                    return message
            return self.decode_frames(bufs)
        except Exception as error:
            return self.after_error(error, bufs)

    def pickles_allowed(self):
        """Whether the operator allows pickles: what holds one is left to vLLM's hooks."""
        return False

    cdef bint must_not_try(self):
        """Whether what turns out to hold a pickle cannot be read again: a provider gives each tensor once."""
        return self.oob_tensor_provider is not None and self.pickles_allowed()

    def after_error(self, error, bufs):
        """What comes of a message that could not be decoded: here, the error, or what is to be raised in its place."""
        refusal = self.refusal(error)
        if refusal is None:
            raise error
        raise refusal from error

    cdef object decode_frames(self, object bufs):
        cdef FrameView few[FEW_FRAMES]
        cdef FrameView* views
        cdef Py_buffer main
        cdef tuple parts
        cdef Py_ssize_t nframes
        if self.state is not NULL:
            return self.another().decode(bufs)  # a hook, or another thread, while a message is open
        if type(bufs) is list or type(bufs) is tuple:
            parts = tuple(bufs)
        else:
            parts = (bufs,) if PyObject_CheckBuffer(bufs) else tuple(bufs)
        nframes = len(parts)
        if nframes == 0:
            raise DecodeError("expected a main frame, got no frames")
        views = frames_room(few, nframes)
        try:
            frames_open(parts, views, &main, False)
            self.parts = parts
            return self.decode_views(parts, views, nframes)
        finally:
            self.parts = ()
            frames_close(few, views, nframes, &main)

    def dec_hook(self, t, obj):
        """What ``obj``, plain values, is as a ``t``."""
        if t is self.tensor_class:
            return self.tensor(obj)
        if t is self.array_class:
            return self.array(obj)
        return super().dec_hook(t, obj)

    def ext_hook(self, code, data):
        """What an extension is: tensor data stays as it is, all else is vLLM's to say."""
        if code == RAW_VIEW:
            return data
        return super().ext_hook(code, data)

    def _decode_tensor(self, arr):
        return self.tensor(arr)

    def _decode_ndarray(self, arr):
        return self.array(arr)

    cdef object tensor(self, object triple):
        return self.read_triple(triple, FAMILY_EXCHANGE)

    cdef object array(self, object triple):
        array = self.read_triple(triple, FAMILY_NUMPY)
        if not isinstance(array, self.array_class):
            raise DecodeError(f"expected the dtype of an array, got {triple[0][:32]!r}")
        return array

    cdef object read_triple(self, object triple, int family):
        cdef DecodeState alone
        cdef FrameView nothing
        cdef Step path[2]
        cdef DecodeState* s = self.state
        if s is NULL or s is &no_message:  # there are no aux frames
            nothing.data = NULL
            nothing.nbytes = 0
            state_start(&alone, &nothing, 1, path)
            provider = self.oob_tensor_provider
            alone.provider = <PyObject*>provider if provider is not None else NULL
            s = &alone
        s.family = family
        s.torch_only = family == FAMILY_EXCHANGE
        try:
            return tensor_of(s, triple)
        finally:
            s.family = FAMILY_EXCHANGE
            s.torch_only = True

    cdef object decode_views(self, tuple parts, FrameView* views, Py_ssize_t nframes):
        cdef Step path[MAX_DEPTH + 2]
        cdef DecodeState s
        cdef Py_ssize_t i
        provider = self.oob_tensor_provider
        state_start(&s, views, nframes, path)
        s.torch_only = True
        s.own = OWN_NOT if self.share_mem else OWN_PINNED if self.pin_tensors else OWN_TORCH
        s.provider = <PyObject*>provider if provider is not None else NULL
        self.state = &s
        try:
            if self.whole is not NULL:
                message = self.read_whole(&s, parts[0])
            else:
                message = self.read_cut(&s, parts[0])
            for i in range(1, nframes):
                if not views[i].used:
                    self.find_plain(&s)
                    break
        finally:
            self.state = NULL
            state_end(&s)
        return message

    cdef object read_whole(self, DecodeState* s, object main):
        if self.must_not_try():
            return self.read_rest(s, main)
        try:
            message = read_value(s, self.whole)
        except DecodeError:
            if not self.pickles_allowed():
                raise
            return self.read_rest(s, main)
        if s.reader.cur != s.reader.end:
            fail(s, NULL, f"expected the end of the frame, got {s.reader.end - s.reader.cur} more bytes")
        return message

    cdef object read_cut(self, DecodeState* s, object main):
        """Reads here what is cut out, has msgspec read the rest, and puts it all together."""
        cdef const uint8_t* at
        cdef Cut cuts[2]
        cdef uint32_t nelem = 0
        cdef uint64_t skipped = 0
        cdef int last = max(self.ids_index, self.features_index)
        cdef int ncuts = 0, index
        cdef object ids = None, features = None
        if last < 0 or fmm_read_array(&s.reader, &nelem) != FMM_OK or <int64_t>nelem <= last:
            return self.read_rest(s, main)
        for index in range(last + 1):
            at = s.reader.cur
            if index == self.ids_index and at != s.reader.end and fmm_kind_of(at[0]) == FMM_KIND_ARRAY:
                if skip_few_ids(&s.reader):
                    continue
                ids = self.ids_of(s)
                if ids is None:
                    return self.read_rest(s, main)  # msgspec says what is wrong
            elif (index == self.features_index and at != s.reader.end and fmm_kind_of(at[0]) == FMM_KIND_ARRAY
                    and not self.must_not_try()):
                self.features_ahead = FEATURES_AHEAD
                features = self.features_of(s)
                if features is None:
                    continue
            elif fmm_read_skip(&s.reader, MAX_DEPTH, &skipped) == FMM_OK:
                continue
            else:
                return self.read_rest(s, main)
            cuts[ncuts].start = at
            cuts[ncuts].end = s.reader.cur
            ncuts += 1
        message = self.read_rest(s, main if ncuts == 0 else without(s, cuts, ncuts))
        if ids is not None:
            put(message, self.ids_offset, ids, self.tracked)
        if features is not None:
            put(message, self.features_offset, features, self.tracked)
        elif self.features_ahead:
            self.features_ahead -= 1
        return message

    cdef object features_of(self, DecodeState* s):
        """The features at the cursor; None, and the cursor is behind them, for what only vLLM's hooks can read."""
        cdef const uint8_t* at = s.reader.cur
        cdef uint64_t skipped = 0
        enter(s)
        step_name(s, STEP_FIELD, <PyObject*>self.features_name)
        try:
            features = read_value(s, self.features)
        except DecodeError:
            if not self.pickles_allowed():
                raise
            features = None
            s.depth = 1
            s.reader.cur = at
            fmm_read_skip(&s.reader, MAX_DEPTH, &skipped)
        s.depth -= 1
        return features

    cdef object ids_of(self, DecodeState* s):
        """The token ids at the cursor, None where they are not all ints."""
        enter(s)
        step_name(s, STEP_FIELD, <PyObject*>self.ids_name)
        try:
            ids = read_ids(s)
        except DecodeError:
            return None
        s.depth -= 1
        return ids

    cdef object read_rest(self, DecodeState* s, object main):
        s.depth = 0
        s.reader.cur = s.start
        return self.read(main)

    cdef int find_plain(self, DecodeState* s) except -1:
        """No tensor pointed to some aux frame. Where vLLM's types say nothing a tensor stays the plain `[dtype, shape, index]`,
        as in vLLM; a frame that no such list names either is one too many."""
        cdef Py_ssize_t i
        s.depth = 0
        s.reader.cur = s.start
        try:
            read_value(s, any_plan)
        except DecodeError:
            return 0  # a pickle in it, which the operator allowed: whatever else is wrong msgspec would have refused
        for i in range(1, s.nframes):
            if not s.frames[i].used:
                raise DecodeError("expected a tensor to point to this aux frame, none does", frame=i)
        return 0


cdef int put(object message, Py_ssize_t offset, object value, bint tracked) except -1:
    record_replace(message, offset, value)
    if tracked and not PyObject_GC_IsTracked(message):  # msgspec leaves a struct without containers to itself
        PyObject_GC_Track(message)
    return 0


cdef inline bint skip_few_ids(fmm_reader_t* reader) noexcept:
    """Goes past a list of ids too short to be worth a cut; False, and the cursor stays, for any other."""
    cdef fmm_reader_t ahead = reader[0]
    cdef uint32_t nelem = 0, _i
    cdef uint8_t lead
    cdef size_t nbytes
    if fmm_read_array(&ahead, &nelem) != FMM_OK or nelem >= IDS_MIN:
        return False
    for _i in range(nelem):
        if ahead.cur == ahead.end:
            return False
        lead = ahead.cur[0]
        nbytes = 1 if lead < 0x80 else 3 if lead == 0xcd else 5 if lead == 0xce else 2 if lead == 0xcc else 0
        if nbytes == 0 or <size_t>(ahead.end - ahead.cur) < nbytes:
            return False
        ahead.cur += nbytes
    reader[0] = ahead
    return True


cdef bytes without(DecodeState* s, const Cut* cuts, int ncuts):
    """The main frame with nil in the place of what was cut out."""
    cdef Py_ssize_t nbytes = s.frames[0].nbytes + ncuts
    cdef const uint8_t* rest = s.start
    cdef uint8_t* out
    cdef bytes main
    cdef int i
    for i in range(ncuts):
        nbytes -= cuts[i].end - cuts[i].start
    main = PyBytes_FromStringAndSize(NULL, nbytes)
    out = <uint8_t*>PyBytes_AS_STRING(main)
    for i in range(ncuts):
        memcpy(out, rest, cuts[i].start - rest)
        out += cuts[i].start - rest
        out[0] = NIL
        out += 1
        rest = cuts[i].end
    memcpy(out, rest, s.frames[0].data + s.frames[0].nbytes - rest)
    return main

"""Decoder: frames in, objects out, every limit checked."""

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t

from fastmm.errors import DecodeError, LimitError, SchemaError
from fastmm.schema import EngineCoreRequest
from fastmm.schema.profile import as_profile

from .decode_frames cimport FEW_FRAMES, frames_close, frames_open, frames_room, state_end, state_start
from .decode_plan cimport DecodePlan, any_plan, decode_plan_of
from .decode_state cimport MAX_DEPTH, DecodeState, FrameView, Step, fail
from .decode_tree cimport read_value
from .options cimport choice, switch, whole
from .tensor cimport FAMILY_EXCHANGE, FAMILY_NUMPY, FAMILY_WIRE

cdef enum:
    MAX_INT64 = 0x7FFFFFFFFFFFFFFF

cdef dict FAMILIES = {"torch": FAMILY_EXCHANGE, "numpy": FAMILY_NUMPY, "wire": FAMILY_WIRE}
cdef dict TOKEN_IDS = {"list": False, "array": True}


@cython.final
cdef class Decoder:
    """Decodes frames into objects of one type.  One decoder may be used from many threads at once.

    Parameters
    ----------
    type
        What a message is: a schema class (`EngineCoreRequest`, `EngineCoreOutputs`...), a type such as ``list[str]``, or
        None for plain values, in which tensors stay lists of dtype, shape and index or bytes.
    tensors
        What a tensor of a torch dtype name becomes: ``"torch"``, ``"numpy"`` or ``"wire"`` (`WireTensor`). numpy has no
        bfloat16 or float8: these become ml_dtypes' types, or `WireTensor` where ml_dtypes is not installed. A tensor of a
        numpy dtype name becomes a numpy array (`WireTensor` for ``"wire"``), its byte order kept.
    token_ids
        What ``prompt_token_ids`` becomes: ``"list"`` of int, or ``"array"``, a numpy array of int64 that owns its memory.
    copy
        Copy tensors out of the frames instead of viewing them.
    profile
        The sender's release of vLLM, as a `WireProfile`, its name (``"0.28"``) or a version; None where it is not known. The
        layouts of 0.22 to 0.33 are then told apart by their lengths, which is enough for all that vLLM itself writes.
    oob_tensor_provider
        Called as ``provider(dtype: str, shape: tuple, meta: dict)`` for a tensor that travels outside the message. What it
        returns must have that dtype and shape.
    max_depth
        Nesting of arrays and maps, at most 512.
    max_elements
        Array elements and map entries in one message.
    max_frames
        Aux frames in one message.
    max_payload_nbytes
        Bytes of tensors in one message: those of the aux frames and of inline data. None for no limit.

    Notes
    -----
    Tensors of aux frames are views: they keep their frame alive, and nothing is copied unless the data is not aligned for its
    type. Over a frame that is read-only (bytes, a `Frame`) numpy arrays are read-only; torch has no such thing, so torch
    tensors over it must not be written to. Ask for ``copy=True`` to write. Inline data is always copied.

    Tensors that point to one frame share its memory, or its one copy.

    Field metadata that is equal in several items of a message is one object in all of them.
    """

    cdef const DecodePlan* plan
    cdef int family
    cdef bint ids_as_array
    cdef int profile_index
    cdef bint copy_data
    cdef object provider
    cdef int max_depth
    cdef int64_t max_elements
    cdef int64_t max_frames
    cdef int64_t max_payload_nbytes  # -1: none
    # Counters: the GIL makes an addition whole.
    cdef unsigned long long messages
    cdef unsigned long long frames
    cdef unsigned long long nbytes_viewed
    cdef unsigned long long nbytes_copied

    # Not __init__: an object without options must not exist, and those of one at work must not change.
    def __cinit__(self, type=EngineCoreRequest, *, tensors="torch", token_ids="list", copy=False, profile=None,
                  oob_tensor_provider=None, max_depth=64, max_elements=1 << 24, max_frames=65536, max_payload_nbytes=None):
        self.family = choice("tensors", tensors, FAMILIES)
        self.ids_as_array = choice("token_ids", token_ids, TOKEN_IDS)
        self.copy_data = switch("copy", copy)
        wire = as_profile(profile)
        self.profile_index = -1 if wire is None else wire.index
        if oob_tensor_provider is not None and not callable(oob_tensor_provider):
            raise SchemaError("expected oob_tensor_provider to be callable")
        self.provider = oob_tensor_provider
        self.max_depth = <int>whole("max_depth", max_depth, 1, MAX_DEPTH)
        self.max_elements = whole("max_elements", max_elements, 0, MAX_INT64)
        self.max_frames = whole("max_frames", max_frames, 0, MAX_INT64)
        self.max_payload_nbytes = (
            -1 if max_payload_nbytes is None else whole("max_payload_nbytes", max_payload_nbytes, 0, MAX_INT64))
        self.plan = any_plan if type is None else decode_plan_of(type)

    @property
    def counters(self):
        """Of all messages decoded: ``messages``, ``frames`` (aux), ``nbytes_viewed`` and ``nbytes_copied`` of tensors."""
        return {
            "messages": self.messages,
            "frames": self.frames,
            "nbytes_viewed": self.nbytes_viewed,
            "nbytes_copied": self.nbytes_copied,
        }

    def decode(self, frames):
        """Decode one message.

        Parameters
        ----------
        frames
            A list or tuple of frames, ``[main, aux 1, ...]``, or the main frame alone: bytes, bytearray, memoryview, zmq.Frame,
            `Frame`, anything with the buffer protocol.

        Returns
        -------
        object
            Of the decoder's type.

        Raises
        ------
        DecodeError
            The frames are not what an encoder of this wire writes. `TruncatedError` where one ends too early, `LimitError`
            where a limit is passed.
        """
        cdef FrameView few[FEW_FRAMES]
        cdef FrameView* views
        cdef Py_buffer main
        cdef Py_ssize_t nframes
        cdef int64_t nbytes = 0
        cdef tuple parts
        if isinstance(frames, list) or isinstance(frames, tuple):
            parts = tuple(frames)  # ours: another thread may change the list
        else:
            parts = (frames,)
        nframes = len(parts)
        if nframes == 0:
            raise DecodeError("expected a main frame, got no frames")
        if nframes - 1 > self.max_frames:
            raise LimitError(f"{nframes - 1} aux frames are more than max_frames, {self.max_frames}")
        views = frames_room(few, nframes)
        try:
            nbytes = frames_open(parts, views, &main, True)
            return decode_views(self, views, nframes, nbytes)
        finally:
            frames_close(few, views, nframes, &main)


cdef object decode_views(Decoder decoder, FrameView* views, Py_ssize_t nframes, int64_t aux_nbytes):
    cdef Step path[MAX_DEPTH + 2]
    cdef DecodeState s
    cdef Py_ssize_t i
    state_start(&s, views, nframes, path)
    s.max_depth = decoder.max_depth
    s.elements_left = decoder.max_elements
    s.family = decoder.family
    s.copy = decoder.copy_data
    s.ids_as_array = decoder.ids_as_array
    s.profile = decoder.profile_index
    s.provider = <PyObject*>decoder.provider if decoder.provider is not None else NULL
    if decoder.max_payload_nbytes >= 0:
        if aux_nbytes > decoder.max_payload_nbytes:
            raise LimitError(f"aux frames of {aux_nbytes} bytes are more than max_payload_nbytes, {decoder.max_payload_nbytes}")
        s.payload_left = decoder.max_payload_nbytes - aux_nbytes
    try:
        message = read_value(&s, decoder.plan)
        if s.reader.cur != s.reader.end:
            fail(&s, NULL, f"expected the end of the frame, got {s.reader.end - s.reader.cur} more bytes")
    finally:
        state_end(&s)
    for i in range(1, nframes):
        if not views[i].used:
            raise DecodeError("expected a tensor to point to this aux frame, none does", frame=i)
    decoder.messages += 1
    decoder.frames += nframes - 1
    decoder.nbytes_viewed += s.nbytes_viewed
    decoder.nbytes_copied += s.nbytes_copied
    return message

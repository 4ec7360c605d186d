"""The encoder: options, the reuse of buffers from message to message, counters."""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.ref cimport PyObject
from libc.stdlib cimport getenv
from libc.string cimport memcpy

from fastmm.errors import EncodeError, SchemaError
from fastmm.schema.profile import as_profile

from .cast cimport cast_target
from .frame cimport Frame, frame_new
from .message cimport Message, message_clear, message_new
from .options cimport switch, whole
from .payload cimport payload_new
from .pool import pool_stats
from .walk cimport message_finish, message_start, message_walk

cdef extern from "fastmm/dtype.h" nogil:
    ctypedef struct fmm_dtype_info_t:
        const char* name
        unsigned char item_nbytes
    const fmm_dtype_info_t fmm_dtype_infos[1]

cdef extern from "Python.h":
    ctypedef struct PyByteArrayObject:
        Py_ssize_t ob_exports

cdef enum:
    # A main frame of this size is handed out as a view of its buffer; below, copying it is cheaper than a new buffer.
    VIEW_MIN_NBYTES = 32 << 10
    KEEP_MAX_NBYTES = 1 << 20  # a larger buffer goes back to the pool, which bounds what lies idle
    MAX_MAX_DEPTH = 1000  # each level takes some 250 bytes of C stack: a thread of 512 KiB can go that deep

THRESHOLD_VARIABLE = "VLLM_MSGPACK_ZERO_COPY_THRESHOLD"
DEFAULT_THRESHOLD = 256


def default_threshold() -> int:
    """Bytes from which a tensor travels in a frame of its own: vLLM's variable, read when an encoder is made."""
    cdef const char* found = getenv("VLLM_MSGPACK_ZERO_COPY_THRESHOLD")  # os.environ writes through to it
    if found is NULL:
        return DEFAULT_THRESHOLD
    text = found.decode("utf-8", "replace")
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1 << 63:
        raise SchemaError(f"expected a number of bytes >= 0 in {THRESHOLD_VARIABLE}, got {text[:32]!r}")
    return value


cdef tuple all_of(object requests):
    """As they are now: a generator may not change one of them while another is written."""
    try:
        return tuple(requests)
    except TypeError:
        raise SchemaError(f"expected several requests, got a {type(requests).__qualname__}") from None


cdef class Encoder:
    """Writes requests, and any tree that vLLM's own encoder can write, as ``[main, aux 1, ...]``.

    One encoder may be used from many threads at once; it keeps warm buffers from one message to the next.

    Parameters
    ----------
    dtype
        ``"bfloat16"``, ``"float16"``, ``"float32"`` or the torch or numpy dtype: what every floating payload under
        ``mm_features`` and ``prompt_embeds`` ends in. None: as it is.
    inplace
        With a ``dtype``: payloads are handed over, cast where they lie, and the tree holds tensors of the new dtype over
        the same memory afterwards. Read-only, strided, overlapping, file-mapped and shared memory is never written to;
        such payloads are cast into pooled buffers, as all are with ``inplace=False``.
    threshold
        Tensors of fewer bytes are written into the main frame. None: ``VLLM_MSGPACK_ZERO_COPY_THRESHOLD``, or 256.
    dedup
        Tensors over the very same memory become one frame.
    hook
        Called with an object of a type the wire does not know; what it returns is written instead.
    profile
        The receiver's release of vLLM, as a `WireProfile`, its name (``"0.28"``) or a version. What `EngineCoreRequest`,
        `SamplingParams`, `PoolingParams`, `LoRARequest` and the outputs hold is then written in that release's layout, whether
        they are of fastmm or of another release of vLLM: fields it lacks are left off, and are an `EncodeError` unless they
        have their defaults. None: what each class has, which for fastmm's own is the newest.
    oob_tensor_consumer
        Called with each tensor that would get a frame (never numpy arrays); a dict it returns is written in place of the
        data, None means "send it as usual". ``new_message()`` is called at the start of each message.
    max_depth, max_frames, max_payload_nbytes
        Limits of nesting, of aux frames and of tensor bytes in one message.

    Raises
    ------
    SchemaError
        An option, or an object in the tree, is of a kind that cannot be written.
    EncodeError
        A value cannot be written.
    LimitError
        A limit is passed.
    """

    def __init__(self, *, dtype=None, inplace=True, threshold=None, dedup=True, hook=None, profile=None,
                 oob_tensor_consumer=None, max_depth=64, max_frames=65536, max_payload_nbytes=None):
        self.idle = []
        self.target = None if dtype is None else cast_target(dtype)
        self.target_nbytes = 0 if dtype is None else fmm_dtype_infos[<int>self.target].item_nbytes
        self.inplace = switch("inplace", inplace)
        self.dedup = switch("dedup", dedup)
        self.threshold_nbytes = whole("threshold", default_threshold() if threshold is None else threshold, 0, 2**63 - 1)
        self.max_depth = <int>whole("max_depth", max_depth, 1, MAX_MAX_DEPTH)
        self.max_frames = whole("max_frames", max_frames, 0, 2**31 - 2)
        self.max_payload_nbytes = whole(
            "max_payload_nbytes", 2**63 - 1 if max_payload_nbytes is None else max_payload_nbytes, 0, 2**63 - 1)
        for name, function in (("hook", hook), ("oob_tensor_consumer", oob_tensor_consumer)):
            if function is not None and not callable(function):
                raise SchemaError(f"expected a callable for {name}, got a {type(function).__qualname__}")
        self.hook = hook
        wire = as_profile(profile)
        self.profile_index = -1 if wire is None else wire.index
        self.consumer = oob_tensor_consumer

    @property
    def threshold(self) -> int:
        """Tensors of fewer bytes are written into the main frame."""
        return self.threshold_nbytes

    @property
    def counters(self) -> dict:
        """What this encoder did: ``messages``, ``frames`` (aux), ``nbytes_viewed``, ``nbytes_copied``, ``nbytes_cast``.

        ``pool_hits`` and ``pool_misses`` are those of the whole process: buffers that were warm, and that were not.
        """
        return {
            "messages": self.messages,
            "frames": self.frames,
            "nbytes_viewed": self.nbytes_viewed,
            "nbytes_copied": self.nbytes_copied,
            "nbytes_cast": self.nbytes_cast,
            "pool_hits": pool_stats()["hits"],
            "pool_misses": pool_stats()["misses"],
        }

    def encode(self, obj) -> list:
        """Write ``obj``: ``[main, aux 1, ...]``.

        The main frame is ``bytes``, or a `Frame` from 32 KiB on; aux frames are Frames that view, and keep, the tensors'
        own memory. Must not be called again for a request while another thread still encodes it with a cast in place.
        """
        cdef Message message = self.take()
        try:
            message_start(message)
            frames = message_walk(message, obj)
            message_finish(message)
            frames[0] = self.main_frame(message)
            self.count(message, frames)
            return frames
        finally:
            self.give_back(message)

    def encode_into(self, obj, buffer) -> list:
        """Write ``obj`` with the main frame in ``buffer``, which is resized to it: ``[buffer, aux 1, ...]``.

        The buffer is unchanged when this fails; it fails when a view of the buffer is still held (a message in flight).
        """
        cdef Message message
        if type(buffer) is not bytearray:
            raise SchemaError(f"expected a bytearray for the main frame, got a {type(buffer).__qualname__}")
        message = self.take()
        try:
            message_start(message)
            frames = message_walk(message, obj)
            if (<PyByteArrayObject*><PyObject*>buffer).ob_exports:  # asked before the casts: all or nothing
                raise EncodeError("expected a bytearray that nobody else uses, got one that is still exported: wait until "
                                  "the last message in it is sent")
            self.finish_into(message, buffer)
            frames[0] = buffer
            self.count(message, frames)
            return frames
        finally:
            self.give_back(message)

    cdef int finish_into(self, Message message, object buffer) except -1:
        """Casts, and fills the buffer.  It is exported meanwhile: no other thread can resize it while the GIL is away."""
        cdef Py_ssize_t before = PyByteArray_GET_SIZE(buffer), after = PyByteArray_GET_SIZE(buffer)
        cdef Py_buffer export
        PyByteArray_Resize(buffer, max(before, <Py_ssize_t>message.size))
        PyObject_GetBuffer(buffer, &export, PyBUF_WRITABLE)
        try:
            message_finish(message)
            memcpy(export.buf, message.data, message.size)
            after = message.size
        finally:
            PyBuffer_Release(&export)
            PyByteArray_Resize(buffer, after)
        return 0

    def encode_many(self, requests) -> list:
        """Write several requests, all or none; those with the very same ``mm_features`` list share its walk and frames.

        Memory that several of them hold is cast once.
        """
        cdef Message message = self.take()
        cdef list written = []
        cdef size_t start, end
        try:
            message_start(message)
            ends = []
            for request in all_of(requests):
                if self.consumer is not None:
                    message.features = None  # what the consumer says is said to one message
                written.append(message_walk(message, request))
                ends.append(message.size)
            message_finish(message)
            start = 0
            for frames, stop in zip(written, ends):
                end = stop
                frames[0] = PyBytes_FromStringAndSize(<char*>message.data + start, end - start)
                self.count(message, frames)
                start = end
            return written
        finally:
            self.give_back(message)

    cdef Message take(self):
        cdef Message message
        if self.spare is not None:
            message = self.spare
            self.spare = None
        elif self.idle:
            message = self.idle.pop()
        else:
            message = self.new_message()
        return message

    cdef Message new_message(self):
        cdef Message message = message_new(
            payload_new(-1 if self.target is None else self.target, self.target_nbytes, self.inplace, self.dedup),
            self.threshold_nbytes, self.max_depth, self.max_frames, self.max_payload_nbytes, self.hook, self.consumer)
        message.profile = self.profile_index
        return message

    cdef int give_back(self, Message message) except -1:
        message_clear(message)
        if message.room > KEEP_MAX_NBYTES:
            message.block = None
        if self.spare is None:
            self.spare = message
        else:
            self.idle.append(message)
        return 0

    cdef object main_frame(self, Message message):
        """A copy when small, else the buffer itself, which the message then lacks."""
        cdef Frame frame
        if message.size >= VIEW_MIN_NBYTES and message.size >= message.room // 4:
            frame = frame_new(message.data, message.size, message.block)
            message.block = None
            return frame
        return PyBytes_FromStringAndSize(<char*>message.data, message.size)

    cdef int count(self, Message message, list frames) except -1:
        """Once for each message; what the payload counted for several of them goes to the first."""
        self.messages += 1
        self.frames += len(frames) - 1
        self.nbytes_viewed += message.payload.nbytes_viewed
        self.nbytes_copied += message.payload.nbytes_copied
        self.nbytes_cast += message.payload.nbytes_cast
        message.payload.nbytes_viewed = message.payload.nbytes_copied = message.payload.nbytes_cast = 0
        return 0

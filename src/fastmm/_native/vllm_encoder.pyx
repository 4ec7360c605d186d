"""VllmEncoder: the encoder with the habits of vLLM's own ``MsgpackEncoder``, which the drop-in puts beside it as a base."""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t

from fastmm.errors import FastmmError

from .encoder cimport Encoder
from .message cimport Message
from .walk cimport message_start, message_walk

cdef enum:
    MAX_DEPTH = 1000  # about where msgspec gives up, too


cdef int64_t limited(object nbytes) except -1:
    """A threshold of any size, as vLLM takes it."""
    return max(0, min(nbytes, 2**63 - 1))


cdef class VllmEncoder(Encoder):
    """Writes, byte for byte, what vLLM's encoder writes; a base of a class that has vLLM's encoder as its second base.

    The main frame is always ``bytes``. What vLLM's encoder leaves to its ``enc_hook`` (all that it would pickle, when the
    operator allows that) goes to the same hook, and what the hook raises comes out as it is. What this encoder refuses it
    leaves to the second base: vLLM's own method writes it, or refuses it in its own words.

    Parameters
    ----------
    size_threshold
        Tensors of fewer bytes are written into the main frame.
    oob_tensor_consumer
        As for `Encoder`.
    passive
        Leave every message to the second base, whose hook somebody has replaced.
    """

    cdef unsigned long long messages_left
    cdef bint passive

    def __init__(self, size_threshold, oob_tensor_consumer=None, *, passive=False):
        Encoder.__init__(
            self, threshold=limited(size_threshold), dedup=False, hook=self.enc_hook,
            oob_tensor_consumer=oob_tensor_consumer, max_depth=MAX_DEPTH, max_frames=2**31 - 2)
        self.passive = passive

    @property
    def size_threshold(self) -> int:
        """Tensors of fewer bytes are written into the main frame."""
        return self.threshold_nbytes

    @size_threshold.setter
    def size_threshold(self, nbytes):
        self.threshold_nbytes = limited(nbytes)
        self.forget()

    @property
    def oob_tensor_consumer(self):
        """Called with each tensor that would get a frame; None where tensors always get one."""
        return self.consumer

    @oob_tensor_consumer.setter
    def oob_tensor_consumer(self, consumer):
        self.consumer = consumer
        self.forget()

    @property
    def counters(self) -> dict:
        """As of `Encoder`; ``messages_left`` is how many were left to vLLM's own encoder."""
        return super().counters | {"messages_left": self.messages_left}

    def encode(self, obj) -> list:
        """Write ``obj``: ``[bytes, aux 1, ...]``."""
        if not self.passive:
            try:
                return self.write(obj)
            except FastmmError:
                pass
            except Exception as error:
                return self.after_fault(error, obj)
        self.messages_left += 1
        return super(Encoder, self).encode(obj)

    def encode_into(self, obj, buf) -> list:
        """Write ``obj`` with the main frame in ``buf``, which is resized to it: ``[buf, aux 1, ...]``."""
        if not self.passive:
            try:
                return Encoder.encode_into(self, obj, buf)
            except FastmmError:
                pass
            except Exception as error:
                return self.after_fault(error, obj, buf)
        self.messages_left += 1
        return super(Encoder, self).encode_into(obj, buf)

    def after_fault(self, error, obj, buf=None) -> list:
        """What comes of a message that failed for no reason of this encoder's own: here, the error."""
        raise error

    cdef list write(self, object obj):
        cdef Message message = self.spare
        if message is None:
            message = self.take()
        else:
            self.spare = None
        try:
            message_start(message)
            frames = message_walk(message, obj)
            frames[0] = PyBytes_FromStringAndSize(<char*>message.data, message.size)
            if message.payload_nbytes:
                self.count(message, frames)
            else:
                self.messages += 1
            return frames
        finally:
            self.give_back(message)

    cdef Message new_message(self):
        cdef Message message = Encoder.new_message(self)
        message.as_vllm = True
        return message

    cdef int forget(self) except -1:
        """Messages know the options of the time when they were made."""
        self.spare = None
        self.idle = []
        return 0

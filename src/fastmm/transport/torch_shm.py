"""vLLM's ``torch_shm``: tensors travel in shared memory, over a ``torch.multiprocessing`` queue beside the message.

In the message stands ``{sender_id, message_id, tensor_id}``; on the queue, an object with these three and the tensor. torch's
queue hands over the descriptor of the tensor's shared memory and pickles what is around it, as it does for vLLM: such a queue
is for processes of one program, parent and child, that trust each other. fastmm itself adds nothing that would be loaded.
"""

from __future__ import annotations

import queue as queues
import threading
import time
import types
import uuid
from typing import Any, Protocol

from ..errors import DecodeError, SchemaError, TransportTimeout

# After a sender's memory could not be had: for how long the tensor asked for may still be one of another, living sender.
_GRACE_S = 0.25
_SENDERS_MAX = 1024


class TensorQueue(Protocol):
    """What is needed of a ``torch.multiprocessing`` queue."""

    def put(self, obj: Any, block: bool = ..., timeout: float | None = ...) -> None: ...
    def get(self, block: bool = ..., timeout: float | None = ...) -> Any: ...


class _Ready:
    """Bytes that are pickled already, so that the queue's own thread, which nobody hears when it fails, has nothing to do."""

    __slots__ = ("loads", "payload")

    def __init__(self, loads: Any, payload: bytes) -> None:
        self.loads = loads
        self.payload = payload

    def __reduce__(self) -> tuple[Any, ...]:
        return (self.loads, (self.payload,))


class TorchShmConsumer:
    """The sending side: give it to an `Encoder` as ``oob_tensor_consumer``.

    A tensor is copied once, into shared memory of its own size; one that fills its shared memory already is not copied at
    all. The caller's tensor stays where it is: a view never drags its base along. What goes wrong (no room, no descriptors, a
    full queue) goes wrong in the call, and the tensor travels in a frame as if there were no queue; nothing is waited for.

    Many threads may encode at once. Each is a sender of its own, since a receiver takes the messages of one sender in order:
    what one thread encodes must be sent in that order.

    Parameters
    ----------
    queue
        A ``torch.multiprocessing`` queue, the one that the engine's process reads.
    """

    def __init__(self, queue: TensorQueue) -> None:
        self._queue = queue
        self._threads = threading.local()
        self._lock = threading.Lock()
        self._counters = {"tensors": 0, "nbytes": 0, "nbytes_copied": 0, "failed": 0}
        self._last_error: Exception | None = None

    @property
    def counters(self) -> dict[str, int]:
        """``tensors`` and ``nbytes`` sent, ``nbytes_copied`` into shared memory, ``failed``: left to travel in frames."""
        return dict(self._counters)

    @property
    def last_error(self) -> Exception | None:
        """Why the last tensor that failed did."""
        return self._last_error

    def new_message(self) -> None:
        """Called by the encoder at the start of each message."""
        thread = self._threads
        if not hasattr(thread, "sender_id"):
            thread.sender_id = uuid.uuid4().hex[:16]
            thread.message_id = 0
        thread.message_id += 1
        thread.tensor_id = 0

    def __call__(self, tensor: Any) -> dict[str, Any] | None:
        """Put a tensor on the queue.

        Returns
        -------
        dict or None
            What stands for the tensor in the message; None when it is to travel in a frame.
        """
        thread = self._threads
        if not hasattr(thread, "sender_id"):
            self.new_message()
        place = {"sender_id": thread.sender_id, "message_id": thread.message_id, "tensor_id": thread.tensor_id}
        try:
            shared, copied_nbytes = _in_shared_memory(tensor)
            # Any class that both processes have would do: the receiver, vLLM's too, asks for these four attributes.
            self._queue.put(_pickled(types.SimpleNamespace(**place, tensor=shared)), block=False)
        except Exception as error:  # torch and the system have many; the frame is always there
            with self._lock:
                self._counters["failed"] += 1
                self._last_error = error.with_traceback(None)
            return None
        thread.tensor_id += 1
        with self._lock:
            self._counters["tensors"] += 1
            self._counters["nbytes"] += shared.nbytes
            self._counters["nbytes_copied"] += copied_nbytes
        return place


def _in_shared_memory(tensor: Any) -> tuple[Any, int]:
    """A tensor that fills its shared memory: the one given, or a copy; and how many bytes were copied."""
    import torch

    tensor = tensor.detach()
    if not tensor.is_cpu:
        return tensor, 0  # a device has its own way between processes, which torch knows
    if tensor.is_shared() and tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor, 0
    if tensor.nbytes == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype), 0
    storage = torch.UntypedStorage._new_shared(tensor.nbytes, device="cpu")
    shared = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape)
    shared.copy_(tensor)
    return shared, tensor.nbytes


def _pickled(item: types.SimpleNamespace) -> _Ready:
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing  # noqa: F401  # says how tensors are handed over; without it they would go by value

    return _Ready(ForkingPickler.loads, bytes(ForkingPickler.dumps(item)))


class _Sender:
    """What has come of one sender, and is not asked for yet: by message, by tensor."""

    __slots__ = ("last", "message_id", "taken", "waiting")

    def __init__(self) -> None:
        self.message_id = -1  # the message that tensors are taken for
        self.taken: set[int] = set()  # of that message
        self.last = (-1, -1)  # the last that came; one sender's come in order
        self.waiting: dict[tuple[int, int], Any] = {}

    def has_passed(self, place: tuple[int, int]) -> bool:
        """Whether that tensor was taken, or a later message's."""
        return place[0] < self.message_id or (place[0] == self.message_id and place[1] in self.taken)


class TorchShmProvider:
    """The receiving side: give it to a `Decoder` as ``oob_tensor_provider``.

    Tensors of several senders may come in any mixture. Those of a message that was never decoded go when the sender's next
    one is. A tensor that cannot come any more (a later one of that sender has come, it was taken already, its sender is gone)
    is an error at once, or, where the queue cannot say whose memory was lost, after a quarter of a second.

    Parameters
    ----------
    queue
        A ``torch.multiprocessing`` queue, the one that the senders write.
    timeout
        Seconds to wait for a tensor whose message was faster than the queue.
    max_waiting_nbytes
        Bytes of tensors that came and were not asked for; beyond them the oldest are let go of.
    """

    def __init__(self, queue: TensorQueue, *, timeout: float = 2.0, max_waiting_nbytes: int = 1 << 30) -> None:
        if not timeout >= 0:
            raise SchemaError(f"expected a timeout of at least 0 seconds, got {timeout!r}")
        self._queue = queue
        self._timeout = timeout
        self._max_waiting_nbytes = max_waiting_nbytes
        self._lock = threading.Lock()
        self._senders: dict[str, _Sender] = {}
        self._waiting: dict[tuple[str, tuple[int, int]], int] = {}  # size in bytes, in the order in which they came
        self._waiting_nbytes = 0
        self._counters = {"tensors": 0, "nbytes": 0, "dropped": 0, "failed": 0}

    @property
    def counters(self) -> dict[str, int]:
        """``tensors`` and ``nbytes`` given; ``dropped`` unasked; ``failed`` to be rebuilt; ``waiting``, ``waiting_nbytes``."""
        return self._counters | {"waiting": len(self._waiting), "waiting_nbytes": self._waiting_nbytes}

    def forget(self, sender_id: str) -> None:
        """Let go of what a sender that is gone has left."""
        with self._lock:
            sender = self._senders.pop(sender_id, None)
            if sender is not None:
                for place in list(sender.waiting):
                    self._drop(sender_id, place, sender)

    def __call__(self, dtype: str, shape: tuple[int, ...], meta: dict[str, Any]) -> Any:
        """The tensor that a message means.

        Raises
        ------
        DecodeError
            `meta` is not what a sender writes, or the tensor was taken already, or is lost.
        TransportTimeout
            The tensor did not come in time.
        """
        sender_id, wanted = _place(meta)
        deadline = time.monotonic() + self._timeout
        with self._lock:
            while True:
                sender = self._sender(sender_id)
                if wanted in sender.waiting:
                    return self._take(sender_id, sender, wanted)
                if sender.has_passed(wanted):
                    raise DecodeError(f"tensor {wanted[1]} of message {wanted[0]} was taken already, or is of a message past")
                if sender.last > wanted:
                    raise DecodeError(f"tensor {wanted[1]} of message {wanted[0]} never came, and later ones have")
                deadline = self._receive(deadline)

    def _sender(self, sender_id: str) -> _Sender:
        sender = self._senders.get(sender_id)
        if sender is None:
            if len(self._senders) >= _SENDERS_MAX:  # processes come and go
                for other in [name for name, one in self._senders.items() if not one.waiting][: _SENDERS_MAX // 2]:
                    del self._senders[other]
            sender = self._senders[sender_id] = _Sender()
        return sender

    def _receive(self, deadline: float) -> float:
        """Take one thing off the queue; returns until when to go on."""
        left = deadline - time.monotonic()
        try:
            item = self._queue.get(timeout=left) if left > 0 else self._queue.get(block=False)
        except queues.Empty:
            raise TransportTimeout(f"no tensor came on the queue in time (timeout={self._timeout:g} s)") from None
        except Exception:
            # A sender ended before its memory was handed over. Perhaps not the one asked for: its tensor is here soon, then.
            self._counters["failed"] += 1
            return min(deadline, time.monotonic() + _GRACE_S)
        try:
            sender_id, place = _place(vars(item))
            nbytes = item.tensor.nbytes
        except Exception:  # somebody else's object
            self._counters["failed"] += 1
            return deadline
        sender = self._sender(sender_id)
        sender.last = max(sender.last, place)
        if place in sender.waiting or sender.has_passed(place):
            self._counters["dropped"] += 1
            return deadline
        sender.waiting[place] = item.tensor
        self._waiting[sender_id, place] = nbytes
        self._waiting_nbytes += nbytes
        while self._waiting_nbytes > self._max_waiting_nbytes and len(self._waiting) > 1:
            oldest = next(iter(self._waiting))
            self._drop(*oldest, self._senders[oldest[0]])
        return deadline

    def _take(self, sender_id: str, sender: _Sender, place: tuple[int, int]) -> Any:
        message_id, tensor_id = place
        if message_id > sender.message_id:
            for stale in [other for other in sender.waiting if other[0] < message_id]:
                self._drop(sender_id, stale, sender)
            sender.message_id = message_id
            sender.taken = set()
        sender.taken.add(tensor_id)
        nbytes = self._waiting.pop((sender_id, place))
        self._waiting_nbytes -= nbytes
        self._counters["tensors"] += 1
        self._counters["nbytes"] += nbytes
        return sender.waiting.pop(place)

    def _drop(self, sender_id: str, place: tuple[int, int], sender: _Sender) -> None:
        self._waiting_nbytes -= self._waiting.pop((sender_id, place))
        self._counters["dropped"] += 1
        del sender.waiting[place]


def _place(meta: dict[str, Any]) -> tuple[str, tuple[int, int]]:
    sender_id, message_id, tensor_id = (meta.get(name) for name in ("sender_id", "message_id", "tensor_id"))
    if type(sender_id) is not str or type(message_id) is not int or type(tensor_id) is not int:
        raise DecodeError("expected {sender_id: str, message_id: int, tensor_id: int} in place of a tensor's data")
    return sender_id, (message_id, tensor_id)

"""The exceptions of fastmm.

Everything that bad input can cause derives from `FastmmError`, so one `except` clause is enough at a boundary. Each class
also derives from the built-in exception a reader would expect (`TypeError`, `ValueError`, `TimeoutError`...).
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "CompatError",
    "DecodeError",
    "DuplicateRequest",
    "EncodeError",
    "EngineDead",
    "ExtensionError",
    "FastmmError",
    "LimitError",
    "Overloaded",
    "PeerClosed",
    "ProcessorDied",
    "ProcessorError",
    "ProcessorOverloaded",
    "ProcessorTimeout",
    "SchemaError",
    "SchemaValueError",
    "SharedMemoryError",
    "SharedMemoryFull",
    "TransportError",
    "TransportTimeout",
    "TruncatedError",
    "UtilityFailed",
]


class FastmmError(Exception):
    """Base class of every error of fastmm.

    Parameters
    ----------
    message
        What was expected, what came and what to do. Never holds payload data.
    path
        Where in the tree, for example ``$.mm_features[3].data['pixel_values'].data[0]``.
    frame
        Index of the frame, 0 being the main frame.
    offset
        Byte offset in that frame.

    Attributes
    ----------
    message, path, frame, offset
        As given. They survive `pickle` and `copy`, so an error can cross a process border.
    """

    message: str
    path: str | None
    frame: int | None
    offset: int | None

    def __init__(
        self, message: str = "", *, path: str | None = None, frame: int | None = None, offset: int | None = None
    ) -> None:
        # `args` holds the message alone: the default reduction then calls `cls(message)` and restores the attributes
        # from the instance's dict, in every subclass and with notes that were added later.
        super().__init__(message)
        self.message = message
        self.path = path
        self.frame = frame
        self.offset = offset

    def __str__(self) -> str:
        where = []
        if self.path is not None:
            where.append(self.path)
        if self.frame is not None:
            where.append(f"frame {self.frame}")
        if self.offset is not None:
            where.append(f"offset {self.offset}")
        return f"{', '.join(where)}: {self.message}" if where else self.message


class SchemaError(FastmmError, TypeError):
    """An object is not of the shape that the wire knows: a wrong type, an unknown dtype, a missing field."""


class SchemaValueError(SchemaError, ValueError):
    """A field has the right type and a value that the engine would refuse."""


class EncodeError(FastmmError, ValueError):
    """A value cannot be written."""


class DecodeError(FastmmError, ValueError):
    """Frames are not what an encoder of this wire writes."""


class TruncatedError(DecodeError):
    """A frame ends before its value does."""


class LimitError(EncodeError, DecodeError):
    """A configured limit (depth, elements, frames, payload bytes) is passed, on encode or on decode."""


class TransportError(FastmmError):
    """Sending, receiving or the handshake failed."""


class TransportTimeout(TransportError, TimeoutError):
    """The peer did not answer in time."""


class PeerClosed(TransportError, ConnectionError):
    """The peer said that it is gone, or went without a word."""


class EngineDead(PeerClosed):
    """The engine that had the request, or was to have it, is gone. What it had begun is lost; nothing says how far it came."""


class UtilityFailed(TransportError):
    """The engine was asked to call a method and could not. The message is the engine's own."""


class Overloaded(TransportError):
    """There is no room for more bytes on their way, and the caller did not want to wait."""


class ProcessorError(FastmmError):
    """A processor failed on an item."""


class ProcessorTimeout(ProcessorError, TimeoutError):
    """A processor did not come back in time. Its worker was replaced."""


class ProcessorDied(ProcessorError):
    """The process that worked on a request is gone; the request with it."""


class ProcessorOverloaded(ProcessorError, Overloaded):
    """The queue of a pool or the room of a store is full. Later it may not be: HTTP's 503."""


class DuplicateRequest(ProcessorError):
    """A request of this id is at work, or its result is parked."""


class SharedMemoryError(FastmmError, OSError):
    """A segment of shared memory cannot be made, or is not there."""


class SharedMemoryFull(SharedMemoryError):
    """There is no room for a segment. Nothing was made."""


class ExtensionError(FastmmError, ValueError):
    """The ``multimodal_*`` fields of a request cannot be used. A client's fault: `http_status` is 400.

    Attributes
    ----------
    field
        The name of the field, or None where no single one is at fault.
    """

    http_status: ClassVar[int] = 400
    field: str | None

    def __init__(
        self,
        message: str = "",
        *,
        field: str | None = None,
        path: str | None = None,
        frame: int | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message, path=path, frame=frame, offset=offset)
        self.field = field


class CompatError(FastmmError):
    """Another program or package cannot be worked with: an engine's version, a missing optional package."""

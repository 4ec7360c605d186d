"""How work and results cross to another process: by shared memory, so that no executor pickles a payload.

A tree of the contract's objects is written with fastmm's own encoder: plain values into a main frame, each large tensor as a
frame of its own. The frames go into one segment. The other side maps it and reads them with the decoder, so that tensors are
views of the mapping, which lives as long as any of them. What an executor itself sends is a `Parcel`: the segment's name and
the sizes of the frames. Small trees, those for another machine, and those for which shared memory has no room left, travel as
bytes in the parcel.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .. import shm
from .._native.decoder import Decoder
from .._native.encoder import Encoder
from ..dtypes import DTYPES, numpy_dtype
from ..errors import FastmmError, ProcessorError, SharedMemoryError, SharedMemoryFull
from ..schema import PlaceholderRange, Record, TensorLike, WireTensor
from .contract import Field, Media, Processed, ProcessedItem, Work

__all__ = ["CLASSES", "INLINE_NBYTES", "Carrier", "Parcel"]

# Below this the trip through a pipe is cheaper than a segment's system calls.
INLINE_NBYTES = 64 << 10
# A byte string of at least this crosses as a frame, and is a memoryview on the other side.
_VIEW_NBYTES = 4096
_FIRST_FOREIGN = 256  # numpy numbers the types that others register from here on
_MAX_DEPTH = 150  # half of the interpreter's own limit on calls within calls
_WIRE_DEPTH = 2 * _MAX_DEPTH + 8
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1

# What may cross, besides plain values and tensors. Nothing else is made on the other side, whatever a parcel says.
CLASSES: tuple[type, ...] = (Work, Media, Processed, ProcessedItem, Field, PlaceholderRange)

# Those whose pixels are all there is to them: a palette would get lost.
_PIL_MODES = frozenset(("1", "L", "LA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "I;16"))

_PLAIN = (bool, int, float, str)


class Parcel(NamedTuple):
    """What an executor sends in place of an object: small, and made of plain values."""

    sizes: tuple[int, ...]  # of the frames
    name: str | None  # of the segment they lie in, or
    frames: tuple[bytes, ...]  # the frames themselves

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


@dataclass(slots=True, eq=False)
class _Tree(Record):
    """The message. A node is a plain value, or a list that begins with a letter; see `_Writer.node`."""

    __wire__: ClassVar[str] = "array"

    root: Any
    ids: list[list[int]]
    tensors: list[TensorLike]


def _offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where each frame begins, and where the last one ends."""
    offsets, end = [], 0
    for size in sizes:
        begin = -(-end // shm.ALIGNMENT) * shm.ALIGNMENT
        offsets.append(begin)
        end = begin + size
    return offsets, end


class Carrier:
    """Packs trees into parcels and unpacks them. Any thread may use one.

    Parameters
    ----------
    directory
        Where segments lie. None: where shared memory is.
    inline_nbytes
        Trees of fewer bytes travel in the parcel.
    classes
        Further dataclasses that may cross, the same on both sides: model packages that put their own into results.
    """

    def __init__(
        self, *, directory: str | None = None, inline_nbytes: int = INLINE_NBYTES, classes: Iterable[type] = ()
    ) -> None:
        self.directory = directory or shm.default_directory()
        self.inline_nbytes = inline_nbytes
        self.classes = (*CLASSES, *classes)
        for cls in self.classes:
            if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
                raise ProcessorError(f"expected a dataclass, got {cls!r}", path="Carrier.classes")
        self._numbers = {cls: i for i, cls in enumerate(self.classes)}
        self._fields = [tuple(field.name for field in dataclasses.fields(cls) if field.init) for cls in self.classes]
        self._encoder = Encoder(max_depth=_WIRE_DEPTH)
        self._decoder = Decoder(_Tree, tensors="torch", max_depth=_WIRE_DEPTH)  # which imports torch when one comes

    def __reduce__(self) -> tuple[Callable[..., Carrier], tuple[Any, ...]]:
        return _carrier, (self.directory, self.inline_nbytes, self.classes[len(CLASSES) :])

    def pack(self, value: Any, *, name: str | None = None, shared: bool = True) -> Parcel:
        """Write a tree.

        Parameters
        ----------
        value
            Contract objects, mappings, lists and tuples of plain values, tensors, byte strings and PIL images (their pixels:
        what else they know, such as EXIF data, stays here).
        name
            Of the segment, as `shm.new_name` made it on the side that will remove it if need be. None: a new one.
        shared
            False: the reader is on another machine.

        Raises
        ------
        ProcessorError
            A value of a type that cannot cross, with its path.
        EncodeError
            A tensor that has no place on the wire.
        """
        writer = _Writer(self._numbers, self._fields)
        try:
            root = writer.node(value, 0)
        except RecursionError:  # the caller was deep in calls already
            raise writer.refusal("nested too deep") from None
        frames = self._encoder.encode(_Tree(root, writer.ids, writer.tensors))
        sizes = tuple(map(len, frames))
        if shared and sum(sizes) >= self.inline_nbytes:
            offsets, nbytes = _offsets(sizes)
            payload: list[Any] = []
            end = 0
            for offset, frame in zip(offsets, frames):
                if offset > end:
                    payload.append(bytes(offset - end))
                payload.append(frame)
                end = offset + len(frame)
            try:
                segment = shm.Segment.create(nbytes, name=name, directory=self.directory, payload=payload)
                return Parcel(sizes, segment.name, ())
            except SharedMemoryFull:
                pass  # slower, and it works
        return Parcel(sizes, None, tuple(map(bytes, frames)))

    def unpack(self, parcel: Parcel) -> Any:
        """Read a tree. The tensors are views of the parcel's memory, writable, and keep it.

        Raises
        ------
        SharedMemoryError
            The segment is gone.
        DecodeError, ProcessorError
            It is not what `pack` writes.
        """
        frames: list[Any]
        if parcel.name is None:
            frames = list(parcel.frames)
        else:
            segment = shm.Segment.attach(parcel.name, directory=self.directory)
            view = segment.buffer
            offsets, nbytes = _offsets(parcel.sizes)
            if nbytes != segment.nbytes:
                raise SharedMemoryError(f"segment {parcel.name} has {segment.nbytes} bytes, its frames {nbytes}")
            frames = [view[offset : offset + size] for offset, size in zip(offsets, parcel.sizes)]
        tree: _Tree = self._decoder.decode(frames)
        return _Reader(tree, self.classes, self._fields).value(tree.root)

    def discard(self, parcel: Parcel | None) -> None:
        """Let go of a parcel that nobody will unpack. Harmless when it was."""
        if parcel is not None and parcel.name is not None:
            shm.unlink(parcel.name, directory=self.directory)


def _carrier(directory: str, inline_nbytes: int, classes: tuple[type, ...]) -> Carrier:
    return Carrier(directory=directory, inline_nbytes=inline_nbytes, classes=classes)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON may hold
        return False
    return True


def _are_small(ids: list[int]) -> bool:
    return min(ids) >= -(2**63) and max(ids) < 2**63


class _Writer:
    """One tree on its way out. Ids and tensors are in lists of their own, for which encoder and decoder have quick ways."""

    __slots__ = ("_fields", "_numbers", "ids", "image", "path", "tensors", "torch")

    def __init__(self, numbers: Mapping[type, int], fields: list[tuple[str, ...]]) -> None:
        self._numbers = numbers
        self._fields = fields
        self.ids: list[list[int]] = []
        self.tensors: list[Any] = []
        self.path: list[str] = []
        torch = sys.modules.get("torch")  # a tensor can only exist where torch was imported
        self.torch = None if torch is None else torch.Tensor
        pil = sys.modules.get("PIL.Image")
        self.image = None if pil is None else pil.Image

    def node(self, value: Any, depth: int) -> Any:
        """``l`` list, ``t`` tuple, ``d`` mapping, ``c`` one of the classes, ``i`` ids, ``T`` a tensor, ``G`` a numpy scalar;
        ``I`` an integer and ``U`` a text that msgpack has no place for; over raw bytes ``B`` a byte string, ``W`` a
        WireTensor, ``M`` an array of a type that numpy itself lacks, ``P`` a PIL image."""
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return value
        if kind is str:
            return value if value.isascii() or _is_unicode(value) else ["U", value.encode("utf-8", "surrogatepass")]
        if kind is int:
            return value if _INT_MIN <= value <= _INT_MAX else ["I", hex(value)]
        if depth == _MAX_DEPTH:
            raise self.refusal(f"nested more than {_MAX_DEPTH} deep")
        number = self._numbers.get(kind)
        if number is not None:
            names = self._fields[number]
            return ["c", number, *[self.child(f".{name}", getattr(value, name), depth) for name in names]]
        if kind is list or kind is tuple:
            if kind is list and len(value) > 8 and set(map(type, value)) == {int} and _are_small(value):
                self.ids.append(value)
                return ["i", len(self.ids) - 1]
            letter = "l" if kind is list else "t"
            return [letter, *[self.child(f"[{i}]", item, depth) for i, item in enumerate(value)]]
        if isinstance(value, Mapping):
            pairs = [(self.node(k, depth + 1), self.child(f"[{k!a:.80}]", item, depth)) for k, item in value.items()]
            return ["d", *[part for pair in pairs for part in pair]]
        if isinstance(value, np.ndarray):
            if value.dtype.num >= _FIRST_FOREIGN and value.dtype.name in DTYPES:
                raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
                return [*self.tensor("M", raw), value.dtype.name, list(value.shape)]
            return self.tensor("T", value)
        if self.torch is not None and isinstance(value, self.torch):
            return self.tensor("T", value)
        if kind is WireTensor:
            return [*self.tensor("W", np.frombuffer(value.data, np.uint8)), value.dtype, list(value.shape)]
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self.buffer(value)
        if isinstance(value, enum.Enum) and isinstance(value, _PLAIN):
            return self.node(value.value, depth)
        if isinstance(value, np.generic):
            return self.tensor("G", np.asarray(value))
        for plain in (str, int, float):  # a class of somebody's own: the value is what crosses
            if isinstance(value, plain):
                return self.node(plain(value), depth)
        if isinstance(value, (list, tuple)):  # torch.Size, a named tuple: what it is made of
            return ["t", *[self.child(f"[{i}]", item, depth) for i, item in enumerate(value)]]
        if hasattr(value, "__dlpack__"):
            return self.tensor("T", value)
        if self.image is not None and isinstance(value, self.image):
            if value.mode not in _PIL_MODES:
                raise self.refusal(f"a PIL image of mode {value.mode!r} cannot cross to another process: convert it before")
            return [*self.tensor("P", np.frombuffer(value.tobytes(), np.uint8)), value.mode, list(value.size)]
        raise self.refusal(
            f"a {kind.__module__}.{kind.__qualname__} cannot cross to another process: "
            "expected plain values, tensors, bytes, lists, mappings, or a class that the Carrier was given"
        )

    def child(self, step: str, value: Any, depth: int) -> Any:
        self.path.append(step)
        node = self.node(value, depth + 1)
        self.path.pop()
        return node

    def tensor(self, letter: str, value: Any) -> list[Any]:
        self.tensors.append(value)
        return [letter, len(self.tensors) - 1]

    def buffer(self, value: Any) -> Any:
        view = memoryview(value)
        if view.nbytes < _VIEW_NBYTES or not view.c_contiguous:
            return view.tobytes()
        return self.tensor("B", np.frombuffer(view.cast("B"), np.uint8))

    def refusal(self, message: str) -> ProcessorError:
        return ProcessorError(message, path="$" + "".join(self.path))


class _Reader:
    """One tree on its way in."""

    __slots__ = ("_classes", "_fields", "_tree")

    def __init__(self, tree: _Tree, classes: tuple[type, ...], fields: list[tuple[str, ...]]) -> None:
        self._tree = tree
        self._classes = classes
        self._fields = fields

    def value(self, node: Any) -> Any:
        if type(node) is not list:
            return node
        try:
            return self._list(node)
        except FastmmError:
            raise
        except (IndexError, TypeError, ValueError, KeyError) as error:
            raise ProcessorError(f"a parcel is not what a Carrier writes: {error}") from None

    def _list(self, node: list[Any]) -> Any:
        letter = node[0]
        if letter == "c":
            names = self._fields[node[1]]
            if len(node) != len(names) + 2:
                raise ProcessorError(f"a parcel's {self._classes[node[1]].__name__} has {len(node) - 2} fields")
            return self._classes[node[1]](**{name: self.value(item) for name, item in zip(names, node[2:])})
        if letter == "l":
            return [self.value(item) for item in node[1:]]
        if letter == "t":
            return tuple([self.value(item) for item in node[1:]])
        if letter == "d":
            return {self.value(node[i]): self.value(node[i + 1]) for i in range(1, len(node), 2)}
        if letter == "I":
            return int(node[1], 16)
        if letter == "U":
            return str(node[1], "utf-8", "surrogatepass")
        if letter == "i":
            return self._tree.ids[node[1]]
        tensor: Any = self._tree.tensors[node[1]]
        if letter == "T":
            return tensor
        if letter == "G":
            return tensor[()]
        if letter == "B":
            return memoryview(tensor).toreadonly()
        if letter == "P":
            from PIL import Image

            return Image.frombuffer(node[2], tuple(node[3]), memoryview(tensor).toreadonly(), "raw", node[2], 0, 1)
        if letter == "W":
            return WireTensor(node[2], node[3], tensor)
        if letter == "M":
            return tensor.view(numpy_dtype(node[2])).reshape(node[3])
        raise ProcessorError(f"a parcel is not what a Carrier writes: {letter!r}")

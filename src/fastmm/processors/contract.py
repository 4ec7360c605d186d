"""The contract between a serving front end and a model package's processor: what goes in, what comes out.

A processor sees one `Work` and gives one `Processed`. It runs in many threads at once, or in other processes, and keeps
nothing of the request: neither the objects nor the memory of a `Work` may be referred to once `process` has returned,
except where the result itself views them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar, runtime_checkable

from ..errors import ProcessorError, SchemaError
from ..schema import PlaceholderRange
from .words import is_text

__all__ = [
    "Budgets",
    "Field",
    "Layout",
    "Media",
    "MediaKind",
    "Processed",
    "ProcessedItem",
    "Processor",
    "Tokenizer",
    "Work",
]


_Record = TypeVar("_Record", "Work", "Media")


class MediaKind(str, enum.Enum):
    """What a media item is; the order is that of budgets, hashes and items."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class Media:
    """One image, video or audio of a request.

    Attributes
    ----------
    kind
        ``"image"``, ``"video"`` or ``"audio"``.
    source
        Where it comes from: a ``data:`` URL or base64 text, which the worker decodes; an ``http:``, ``https:`` or ``file:``
        URL or an absolute path, whose bytes the front end has fetched (`Work.prefetched`); the encoded bytes themselves
        (any buffer of bytes); or an object that is decoded already, such as a PIL image or an array.
    data
        The encoded bytes, a read-only view. `resolve_media` sets it on the worker: a processor finds it set, unless
        `source` is decoded already. Prefetched bytes keep their address.
    """

    kind: MediaKind
    source: Any
    data: memoryview | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "kind", MediaKind(self.kind))
        except ValueError:
            raise SchemaError(f"expected 'image', 'video' or 'audio', got {self.kind!r}", path="Media.kind") from None
        if self.source is None:
            raise SchemaError("expected a URL, a path, base64, bytes or a decoded object, got None", path="Media.source")


def _media(values: Any, kind: MediaKind, where: str) -> tuple[Media, ...]:
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
        raise SchemaError(f"expected a list of media, got {type(values).__name__}", path=f"Work.{where}")
    found = []
    for i, value in enumerate(values):
        item = value if isinstance(value, Media) else Media(kind, value)
        if item.kind is not kind:
            raise SchemaError(f"expected media of kind {kind.value!r}, got {item.kind.value!r}", path=f"Work.{where}[{i}]")
        found.append(item)
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a processor works on: one request's prompt, media and extensions.

    Attributes
    ----------
    request_id
        Not empty.
    text, prompt_token_ids
        The prompt as text, as ids before expansion, or both.
    images, videos, audios
        In the order of the request. What is not a `Media` becomes the source of one.
    prefetched
        The bytes of those media that come from a URL or a path, in the order of images, videos, audios. Empty once the
        media are resolved.
    extensions
        Before decoding a mapping of ``multimodal_*`` names to values, as `split_extensions` makes it. A processor sees an
        instance of its schema, or None where it declares no schema.
    hashes
        The caller's own content hashes, one for each of images, videos, audios. A processor never sees them.
    """

    request_id: str
    text: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    images: Sequence[Any] = ()
    videos: Sequence[Any] = ()
    audios: Sequence[Any] = ()
    prefetched: Sequence[Any] = ()
    extensions: Any = None
    hashes: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if not is_text(self.request_id):
            raise SchemaError("expected a str that is not empty, and UTF-8", path="Work.request_id")
        if self.text is not None and not isinstance(self.text, str):
            raise SchemaError(f"expected a str or None, got {type(self.text).__name__}", path="Work.text")
        for kind, where in ((MediaKind.IMAGE, "images"), (MediaKind.VIDEO, "videos"), (MediaKind.AUDIO, "audios")):
            object.__setattr__(self, where, _media(getattr(self, where), kind, where))

    @property
    def media(self) -> tuple[Media, ...]:
        """All media: images, then videos, then audios. Items and hashes are in this order."""
        return (*self.images, *self.videos, *self.audios)


def changed(record: _Record, **values: Any) -> _Record:
    """A copy of a `Work` or a `Media` with other values, which were checked before: nothing is checked here."""
    cls = type(record)
    new: _Record = cls.__new__(cls)
    for name in _FIELDS[Work if isinstance(record, Work) else Media]:
        object.__setattr__(new, name, values[name] if name in values else getattr(record, name))
    return new


_FIELDS = {cls: tuple(field.name for field in fields(cls)) for cls in (Work, Media)}


class Layout(str, enum.Enum):
    """How the engine joins one key's values of several items."""

    BATCHED = "batched"  # stacked along a new first axis
    FLAT = "flat"  # concatenated along `Field.dim`
    SHARED = "shared"  # the same for all items


@dataclass(frozen=True, slots=True)
class Field:
    """How one key is joined with those of other items.

    Attributes
    ----------
    layout
        ``"batched"``, ``"flat"`` or ``"shared"``.
    dim
        The axis along which a flat key is concatenated.
    keep_on_cpu
        The engine leaves the key in host memory.
    """

    layout: Layout = Layout.BATCHED
    dim: int = 0
    keep_on_cpu: bool = False

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "layout", Layout(self.layout))
        except ValueError:
            raise SchemaError(f"expected 'batched', 'flat' or 'shared', got {self.layout!r}", path="Field.layout") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedItem:
    """What a processor made of one media item.

    Attributes
    ----------
    modality
        ``"image"``, ``"video"``, ``"audio"``, or another name that the model knows for what it made of extensions.
    features
        Keyword argument of the model to a tensor: torch, numpy, `WireTensor`, another producer of DLPack, or a list of
        these. A view of a batch is best: nothing is copied. Raw 16-bit words that are bfloat16 must be marked as such:
        ``WireTensor("bfloat16", shape, words)``.
    spans
        Where its embeddings go in the expanded prompt: pairs ``(first, last)``, both inclusive. Give these or `placeholder`.
    placeholder
        The same as an ``(offset, length)`` pair or a `PlaceholderRange`.
    hash
        Key of its content in the engine's caches.
    fields
        Key to `Field`. A key that is not named is batched.
    model_data
        Further keyword arguments of the model for this item that are no features: int, float, bool, tensors, or lists of
        these. They are batched and stay in host memory.
    """

    modality: str
    features: Mapping[str, Any]
    hash: str
    spans: Sequence[tuple[int, int]] | None = None
    placeholder: tuple[int, int] | PlaceholderRange | None = None
    fields: Mapping[str, Field] = field(default_factory=dict)
    model_data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processed:
    """What a processor made of one request.

    Attributes
    ----------
    prompt_token_ids
        The prompt's ids, each placeholder expanded to as many tokens as its item takes.
    items
        One for each of the images, videos and audios of the `Work`, in that order; then what was made of extensions.
    """

    prompt_token_ids: Sequence[int]
    items: Sequence[ProcessedItem] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """How much one request may ask for. What is exactly at a budget passes. None: no bound.

    Attributes
    ----------
    max_media_nbytes
        Encoded bytes of images, videos and audios together, counted in that order.
    max_pixels
        Pixels (width times height, times frames) of all images and videos once decoded; read from the headers, before
        anything is decoded.
    max_output_nbytes
        Bytes of all tensors that a processor returns.
    """

    max_media_nbytes: int | None = 256 << 20
    max_pixels: int | None = 256 << 20
    max_output_nbytes: int | None = 1 << 30

    def __post_init__(self) -> None:
        for name in ("max_media_nbytes", "max_pixels", "max_output_nbytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ProcessorError(f"expected an int of at least 0, or None, got {value!r}", path=f"Budgets.{name}")


class Tokenizer(Protocol):
    """The part of a tokenizer that processors use; those of HuggingFace have it."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids."""
        ...


@runtime_checkable
class Processor(Protocol):
    """What a model package brings."""

    @property
    def schema(self) -> type | None:
        """A dataclass, a msgspec struct or a pydantic model of the request's extensions, as a class attribute.

        None: the processor has none, and requests that carry some are refused.
        """
        ...

    def process(self, work: Work, tokenizer: Tokenizer | None) -> Processed:
        """Turn a request's prompt and media into expanded ids and features.

        Called from many threads at once. It must not keep the request's objects, nor write to prefetched bytes.
        """
        ...

"""The multimodal part of a request: features, placeholders, field elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ._record import Record, TensorLike


@dataclass(slots=True, eq=False)
class PlaceholderRange(Record):
    """Where in the prompt the embeddings of one item go.

    Attributes
    ----------
    offset, length
        Position of the first placeholder token, and their number.
    is_embed
        A bool tensor of shape ``(length,)``: which of them take an embedding. None: all.
    """

    __wire__: ClassVar[str] = "map"

    offset: int
    length: int
    is_embed: TensorLike | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class MmBatchedField(Record):
    """The field is stacked: one tensor per item, without a batch dimension."""

    __wire__: ClassVar[str] = "map"
    __wire_factory__: ClassVar[str] = "batched"

    keep_on_cpu: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class MmFlatField(Record):
    """The field is concatenated along `dim`; `slices` says where each item lies in the batch.

    A slice per item, or a tuple of slices per item where `dim` is not 0.
    """

    __wire__: ClassVar[str] = "map"
    __wire_factory__: ClassVar[str] = "flat"

    keep_on_cpu: bool = False
    slices: Sequence[slice] | Sequence[Sequence[slice]]
    dim: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class MmSharedField(Record):
    """All `batch_size` items of the batch use the same data."""

    __wire__: ClassVar[str] = "map"
    __wire_factory__: ClassVar[str] = "shared"

    keep_on_cpu: bool = False
    batch_size: int


@dataclass(slots=True, eq=False)
class MmFieldElem(Record):
    """The value of one keyword argument of the model for one item, and how it is joined with those of other items.

    `data` is a tensor, a number, a list of these nested as deep as need be, or None when the engine has it cached.
    """

    __wire__: ClassVar[str] = "map"

    data: Any
    field: MmBatchedField | MmFlatField | MmSharedField


@dataclass(slots=True, eq=False)
class MmFeatureSpec(Record):
    """One item (an image, a clip of audio) of a request.

    Attributes
    ----------
    data
        Keyword argument name to `MmFieldElem`, or None when the engine has the whole item cached.
    modality
        ``"image"``, ``"audio"``, ``"video"``...
    identifier
        Key of the engine's cache of encoder outputs.
    mm_position
        Where the item's embeddings go.
    mm_hash
        Key of the cache of processor outputs.
    """

    __wire__: ClassVar[str] = "map"

    data: dict[str, MmFieldElem] | None
    modality: str
    identifier: str
    mm_position: PlaceholderRange
    mm_hash: str | None = None

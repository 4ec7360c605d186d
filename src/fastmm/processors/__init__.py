"""Model packages bring their own multimodal processors; the front end keeps its shape."""

from .contract import (
    Budgets,
    Field,
    Layout,
    Media,
    MediaKind,
    Processed,
    ProcessedItem,
    Processor,
    Tokenizer,
    Work,
)
from .extensions import check_schema, decode_extensions, is_multimodal, is_present, split_extensions

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
    "check_schema",
    "decode_extensions",
    "is_multimodal",
    "is_present",
    "split_extensions",
]

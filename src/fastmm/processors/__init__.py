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

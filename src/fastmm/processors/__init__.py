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
from .hashes import apply_caller_hashes, caller_hash
from .hf import HfProcessor
from .media import measure_pixels, open_image, resolve_media
from .pool import ProcessorPool
from .registry import available_processors, load_processor
from .request import to_features, to_request
from .run import process_work
from .store import ResultStore
from .validate import validate_processed

__all__ = [
    "Budgets",
    "Field",
    "HfProcessor",
    "Layout",
    "Media",
    "MediaKind",
    "Processed",
    "ProcessedItem",
    "Processor",
    "ProcessorPool",
    "ResultStore",
    "Tokenizer",
    "Work",
    "apply_caller_hashes",
    "available_processors",
    "caller_hash",
    "check_schema",
    "decode_extensions",
    "is_multimodal",
    "is_present",
    "load_processor",
    "measure_pixels",
    "open_image",
    "process_work",
    "resolve_media",
    "split_extensions",
    "to_features",
    "to_request",
    "validate_processed",
]

"""What a worker does with one request, in this order: extensions, media, process, validate, the caller's hashes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import FastmmError, ProcessorError
from .contract import Budgets, Processed, Processor, Tokenizer, Work, changed
from .extensions import decode_extensions
from .hashes import apply_caller_hashes
from .media import resolve_media
from .validate import validate_processed
from .words import error_text

__all__ = ["process_work", "processor_name"]


def processor_name(processor: Any) -> str:
    """What errors and logs call a processor: its own ``name``, or its class's."""
    name = getattr(processor, "name", None)
    return name if isinstance(name, str) and name else type(processor).__name__


def process_work(
    processor: Processor,
    work: Work,
    tokenizer: Tokenizer | None = None,
    *,
    budgets: Budgets | None = None,
    finite: bool = False,
    resolve: Callable[[Work, Budgets], Work] = resolve_media,
    validate: Callable[..., None] = validate_processed,
) -> Processed:
    """Run one request through a processor, from its raw extensions and media to a checked result.

    Parameters
    ----------
    processor
        It sees neither the caller's hashes nor what was prefetched: media hold their bytes, extensions are an instance of
        its schema.
    work
        As the front end made it.
    tokenizer
        Handed through.
    budgets
        None: the defaults of `Budgets`.
    finite
        Refuse features that hold an infinity or a NaN.
    resolve, validate
        Other ways to load media and to check results.

    Raises
    ------
    ExtensionError
        The extensions do not fit the processor's schema.
    ProcessorError
        Media cannot be resolved, the processor failed (its exception is the cause) or returned what does not hold.
    LimitError
        A budget is exceeded.
    """
    budgets = Budgets() if budgets is None else budgets
    name = processor_name(processor)
    try:
        schema = processor.schema
    except AttributeError:
        raise ProcessorError(f"expected a processor, got {name}, which has no schema") from None
    extensions = work.extensions
    if extensions is None or type(extensions) is dict or isinstance(extensions, Mapping):
        extensions = decode_extensions(schema, extensions, processor=name)
    elif schema is None or not isinstance(extensions, schema):
        raise ProcessorError(f"expected extensions as a mapping, got {type(extensions).__name__}", path="extensions")
    resolved = resolve(work, budgets)
    try:
        processed = processor.process(changed(resolved, extensions=extensions, hashes=None), tokenizer)
    except FastmmError:
        raise
    except Exception as error:
        raise ProcessorError(f"{name} failed: {error_text(error)}") from error
    validate(work, processed, budgets, finite=finite)
    return apply_caller_hashes(work, processed)

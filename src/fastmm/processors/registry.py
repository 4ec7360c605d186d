"""Processors by name: packages declare them as entry points of the group ``fastmm.processors``."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..errors import FastmmError, ProcessorError
from .contract import Processor
from .extensions import check_schema
from .words import error_text

__all__ = ["GROUP", "available_processors", "load_processor"]

GROUP = "fastmm.processors"


def available_processors() -> dict[str, str]:
    """The names of installed processors, each with where it lies (``module:attribute``). Nothing is imported."""
    return {entry.name: entry.value for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}


def load_processor(name: str, **options: Any) -> Processor:
    """Load a processor.

    Parameters
    ----------
    name
        An entry point of the group ``fastmm.processors``, or ``module:attribute``. It is a class or a function that makes a
        processor, or a processor.
    **options
        For the class or the function.

    Raises
    ------
    ProcessorError
        There is no such processor, two packages declare one of that name, it cannot be imported or made (the exception is
        the cause), or it is none.
    SchemaError
        Its schema is none.
    """
    try:
        found = importlib.import_module(name.partition(":")[0]) if ":" in name else None
        target: Any = _attribute(found, name.partition(":")[2]) if ":" in name else _entry(name).load()
    except FastmmError:
        raise
    except Exception as error:  # a module may do anything as it is imported
        raise ProcessorError(f"processor {name!r} cannot be imported: {error_text(error)}") from error
    if isinstance(target, type) or not hasattr(target, "process"):
        if not callable(target):
            raise ProcessorError(f"expected {name!r} to be a processor or to make one, got a {type(target).__name__}")
        try:
            target = target(**options)
        except Exception as error:
            raise ProcessorError(f"processor {name!r} cannot be made: {error_text(error)}") from error
    elif options:
        raise ProcessorError(f"processor {name!r} is made already and takes no options, got {', '.join(options)}")
    if not callable(getattr(target, "process", None)) or not hasattr(target, "schema"):
        raise ProcessorError(f"expected {name!r} to have process() and schema, as {type(target).__name__} has not")
    check_schema(target.schema)
    made: Processor = target
    return made


def _attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def _entry(name: str) -> EntryPoint:
    found = list({(entry.value, entry.name): entry for entry in entry_points(group=GROUP, name=name)}.values())
    if not found:
        known = ", ".join(map(repr, available_processors())) or "none"
        raise ProcessorError(f"no processor is called {name!r}: installed are {known}; or name one as module:attribute")
    if len(found) > 1:
        raise ProcessorError(f"several packages declare a processor {name!r}: {', '.join(entry.value for entry in found)}")
    return found[0]

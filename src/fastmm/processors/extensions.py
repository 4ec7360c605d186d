"""The ``multimodal_*`` fields of a request: found, split over a batch, decoded by the processor's own schema.

A body may be anything a client can send: nothing here recurses, and no error repeats more of it than a name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from ..errors import CompatError, ExtensionError, ProcessorError, SchemaError, SchemaValueError
from .words import error_text

__all__ = ["PREFIX", "check_schema", "decode_extensions", "is_multimodal", "is_present", "split_extensions"]

PREFIX = "multimodal_"
MAX_BATCH = 4096
# Where msgspec repeats what the client sent.
_VALUE = re.compile(r"(Invalid (?:enum )?value) .*?(?= - at `\$|\Z)", re.DOTALL)
_SHOWN_CHARS = 80
_MESSAGE_CHARS = 500
_SCALARS = (str, int, float, bool, bytes)


def _short(name: str) -> str:
    """A name as an error shows it; it may be a megabyte long, and not printable."""
    shown = name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}..."
    return shown if shown.isprintable() else ascii(shown)


def _extensions(body: Any) -> list[tuple[str, Any]]:
    """Names and values in name order."""
    if not isinstance(body, Mapping):
        raise ExtensionError(f"expected a request body with named fields, got {type(body).__name__}")
    return sorted(
        ((name, value) for name, value in body.items() if _is_name(name) and value is not None), key=lambda pair: pair[0]
    )


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.startswith(PREFIX)


def split_extensions(
    body: Mapping[str, Any], n: int, is_batch: bool, *, schema: type | None = None, max_batch: int | None = MAX_BATCH
) -> list[dict[str, Any]]:
    """Take the extensions out of a request body, and give each request of a batch its own.

    Parameters
    ----------
    body
        The request's top-level fields. Extensions are those whose name starts with ``multimodal_`` and whose value is not
        null; the rest is not looked at.
    n
        How many requests the body holds: as many as there are prompts.
    is_batch
        Whether the prompt is a list, be it of one.
    schema
        The processor's. Where its ``__broadcast__`` is a set of field names, or True for all, a single string, number or
        bool given for a batch goes to every request.
    max_batch
        The largest batch that is taken; None: any.

    Returns
    -------
    list of dict
        `n` of them, names in order. The values of a single request are the body's own; so is each cell of a list.

    Raises
    ------
    ExtensionError
        In name order, the first field that does not fit: it is named, and `http_status` is 400.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 0 or (not is_batch and n != 1):
        raise SchemaValueError(f"expected {'0 or more requests' if is_batch else '1 request'}, got {n!r}", path="n")
    if max_batch is not None and n > max_batch:
        raise ExtensionError(f"batch size {n} is more than {max_batch}")
    found = _extensions(body)
    if not is_batch:
        return [dict(found)]
    requests: list[dict[str, Any]] = [{} for _ in range(n)]
    broadcast = _broadcast(schema)
    for name, value in found:
        if not isinstance(value, (list, tuple)):
            if isinstance(value, _SCALARS) and (broadcast is True or name in broadcast):
                for request in requests:
                    request[name] = value
                continue
            raise ExtensionError(f"{_short(name)} must be a list for batch processing", field=name)
        if not value:
            for request in requests:
                request[name] = []
            continue
        if len(value) != n:
            raise ExtensionError(f"{_short(name)} list length {len(value)} does not match batch size {n}", field=name)
        for request, cell in zip(requests, value):
            request[name] = cell
    return requests


def is_present(value: Any) -> bool:
    """Whether an extension's value says anything: null, and lists of nothing else however nested, do not; a map does."""
    pending = [value]
    seen: set[int] = set()  # a list that holds itself, or one list many times, is looked at once
    while pending:
        one = pending.pop()
        if isinstance(one, (list, tuple)):
            if id(one) not in seen:
                seen.add(id(one))
                pending.extend(one)
        elif one is not None:
            return True
    return False


def is_multimodal(body: Mapping[str, Any]) -> bool:
    """Whether a request is multimodal by its extensions, media aside.

    Parameters
    ----------
    body
        The request's top-level fields, or one of the dicts that `split_extensions` made of them.

    Raises
    ------
    ExtensionError
        `body` is no mapping.
    """
    return any(is_present(value) for _, value in _extensions(body))


# --- schemas ----------------------------------------------------------------------------------------------------------


def _kind(schema: Any) -> str:
    if isinstance(schema, type):
        if hasattr(schema, "__pydantic_validator__"):
            return "pydantic"
        if hasattr(schema, "__struct_encode_fields__"):
            return "msgspec"
        if dataclasses.is_dataclass(schema):
            return "dataclass"
    shown = schema.__qualname__ if isinstance(schema, type) else f"a {type(schema).__name__}"
    raise SchemaError(f"expected a dataclass, a msgspec struct, a pydantic model or None, got {shown}", path="schema")


def _broadcast(schema: Any) -> Any:
    """The names of which a single value is for a whole batch; True for all of them."""
    names = getattr(schema, "__broadcast__", ())
    if names is True or names is False:
        return names or ()
    if isinstance(names, (set, frozenset, list, tuple)) and all(isinstance(name, str) for name in names):
        return names
    raise SchemaError(f"expected a set of field names or a bool, got {type(names).__name__}", path="schema.__broadcast__")


def _msgspec() -> Any:
    try:
        import msgspec
    except ImportError:
        raise CompatError("dataclasses as schemas are decoded by msgspec: install fastmm[processors]") from None
    return msgspec


def check_schema(schema: type | None) -> None:
    """Whether requests can be decoded into a schema at all, before the first comes.

    Raises
    ------
    SchemaError
        It is none of the three kinds; a field's name or annotation, or ``__broadcast__``, is of no use.
    CompatError
        A dataclass needs msgspec, which is not installed.
    """
    if schema is None:
        return
    kind = _kind(schema)
    _broadcast(schema)
    names = _pydantic_names(schema) if kind == "pydantic" else _names(schema, kind)
    if names and not any(map(_is_name, names)):
        raise SchemaError(f"expected fields named {PREFIX}..., got {', '.join(sorted(names)[:8])}", path="schema")
    if kind != "pydantic":
        for name in sorted(names or ()):
            if not _is_name(name):
                raise SchemaError(f"expected fields named {PREFIX}..., got {name}: no request can give it", path="schema")
    try:
        _decode_pydantic(schema, {}) if kind == "pydantic" else _decode_msgspec(schema, {})
    except ExtensionError:
        pass  # a field that must be given
    except CompatError:
        raise
    except (NameError, TypeError) as error:  # an annotation that is not there, or that no decoder knows
        raise SchemaError(f"expected annotations that can be decoded: {error_text(error)}", path="schema") from error
    except Exception as error:
        if "Pydantic" in type(error).__name__:  # a model that is not complete
            raise SchemaError(f"expected a model that can be decoded: {error_text(error)}", path="schema") from error


def decode_extensions(schema: type | None, extensions: Mapping[str, Any] | None, *, processor: str = "this processor") -> Any:
    """Decode one request's extensions into an instance of the processor's schema.

    Decoding is strict: no bool for an int, no number for a string, no name that the schema does not have (unless a pydantic
    model says by its ``extra`` that it wants those).

    Parameters
    ----------
    schema
        A dataclass, a msgspec struct or a pydantic model whose fields are named ``multimodal_...``; or None.
    extensions
        One of the dicts of `split_extensions`; None is none.
    processor
        What errors call the processor.

    Returns
    -------
    object or None
        An instance; None where there is no schema.

    Raises
    ------
    ExtensionError
        ``invalid processor extensions: ...``, with the path of what does not fit.
    ProcessorError
        The schema's own code failed with another exception than a ValueError or a TypeError.
    """
    values = dict(extensions) if extensions else {}
    if schema is None:
        carried = sorted(name for name, value in values.items() if value is not None)
        if carried:
            names = ", ".join(map(_short, carried[:8])) + (", ..." if len(carried) > 8 else "")
            raise _invalid(f"{processor} takes none, got {names}", carried[0])
        return None
    kind = _kind(schema)
    known = _pydantic_names(schema) if kind == "pydantic" else _names(schema, kind)
    if known is not None:
        for name in sorted(values):
            if name not in known:
                raise _invalid(f"{processor} has no such field - at `$.{_short(name)}`", name)
    try:
        return _decode_pydantic(schema, values) if kind == "pydantic" else _decode_msgspec(schema, values)
    except RecursionError:
        raise _invalid("nested too deep", None) from None
    except ExtensionError:
        raise
    except (CompatError, SchemaError):
        raise
    except (ValueError, OverflowError):  # of the decoder itself, for a number of thousands of digits
        raise _invalid("a number that is too long", None) from None
    except Exception as error:  # of the schema's own code: a validator that raises what none should
        raise ProcessorError(f"the schema of {processor} failed: {error_text(error)}") from error


def _invalid(message: str, field: str | None) -> ExtensionError:
    shown = message if len(message) <= _MESSAGE_CHARS else f"{message[:_MESSAGE_CHARS]}..."
    shown = shown.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair could be written to no log
    return ExtensionError(f"invalid processor extensions: {shown}", field=field)


def _names(schema: Any, kind: str) -> set[str]:
    if kind == "msgspec":
        names = set(schema.__struct_encode_fields__)
        tag = schema.__struct_config__.tag_field
        return names if tag is None else {*names, tag}
    return {field.name for field in dataclasses.fields(schema) if field.init}


def _decode_msgspec(schema: Any, values: dict[str, Any]) -> Any:
    msgspec = _msgspec()
    try:
        return msgspec.convert(values, schema, strict=True)
    except msgspec.ValidationError as error:
        message = _VALUE.sub(r"\1", str(error))
        _, marked, path = message.rpartition(" - at `$.")
        name = path.rstrip("`").split(".")[0].split("[")[0] if marked else None
        raise _invalid(message if " - at `" in message else f"{message} - at `$`", name) from None


def _pydantic_names(schema: Any) -> set[str] | None:
    """The names a pydantic model reads; None where it wants others too, or says so in a way only it understands."""
    config = getattr(schema, "model_config", None) or getattr(schema, "__pydantic_config__", None) or {}
    if "extra" in config:
        return None
    names = set()
    for name, info in schema.__pydantic_fields__.items():
        alias = info.validation_alias if info.validation_alias is not None else info.alias
        if alias is not None and not isinstance(alias, str):
            return None
        names.update({name, alias} if alias else {name})
    return names


def _decode_pydantic(schema: Any, values: dict[str, Any]) -> Any:
    # As JSON: there strictness is about what JSON can say, so that a list is a tuple and a str a date where the model has it.
    import pydantic
    import pydantic_core

    try:
        text = pydantic_core.to_json(values, bytes_mode="base64", inf_nan_mode="constants")
    except (ValueError, TypeError):  # nested too deep, or holding itself; or of no JSON type
        raise _invalid("not plain JSON values, or nested too deep", None) from None
    try:
        if hasattr(schema, "model_validate_json"):
            return schema.model_validate_json(text, strict=True)
        return pydantic.TypeAdapter(schema).validate_json(text, strict=True)  # pydantic's own dataclasses
    except pydantic.ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        path = "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{_short(part)}" for part in first["loc"])
        name = first["loc"][0] if first["loc"] and isinstance(first["loc"][0], str) else None
        raise _invalid(f"{first['msg']} - at `{path}`", name) from None

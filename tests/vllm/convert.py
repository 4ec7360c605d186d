"""vLLM's objects as fastmm's own, with the same content."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import msgspec
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.serial_utils import UtilityResult

from fastmm import schema


def _class_of(value: Any) -> type:
    return getattr(schema, type(value).__name__.replace("MultiModal", "Mm"))


def to_fastmm(value: Any) -> Any:
    """The same tree in fastmm's classes; leaves and plain values are shared, not copied."""
    if isinstance(value, msgspec.Struct):
        cls = _class_of(value)
        config = type(value).__struct_config__
        fields = {}
        for field in msgspec.structs.fields(value):
            content = getattr(value, field.name)
            # A default object of vLLM is not fastmm's default object: leave such a field out of the call.
            if config.omit_defaults and not config.array_like and content is field.default:
                continue
            fields[field.name] = to_fastmm(content)
        return cls(**fields)
    if isinstance(value, UtilityResult):
        return schema.UtilityResult(to_fastmm(value.result))
    if isinstance(value, enum.Enum):
        return _class_of(value)(value.value) if hasattr(schema, type(value).__name__) else value
    if dataclasses.is_dataclass(value):
        cls = _class_of(value)
        made = cls(**{f.name: to_fastmm(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init})
        for f in dataclasses.fields(value):
            if not f.init:
                setattr(made, f.name, to_fastmm(getattr(value, f.name)))
        return made
    if isinstance(value, MultiModalKwargsItem):
        return {key: to_fastmm(elem) for key, elem in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _class_of(value)(*map(to_fastmm, value))
    if type(value) in (list, tuple):
        return type(value)(map(to_fastmm, value))
    if type(value) is dict:
        return {key: to_fastmm(item) for key, item in value.items()}
    return value

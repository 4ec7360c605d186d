"""vLLM's codec and ours, for tests that run the same code on both; and a comparison that lets no type differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_same
from vllm.v1 import serial_utils

from fastmm.integrations import vllm as drop_in

CODECS = {
    "vllm": SimpleNamespace(Encoder=serial_utils.MsgpackEncoder, Decoder=serial_utils.MsgpackDecoder),
    "fastmm": SimpleNamespace(Encoder=drop_in.MsgpackEncoder, Decoder=drop_in.MsgpackDecoder),
}
both = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
crossed = pytest.mark.parametrize(
    ("sender", "receiver"),
    [(a, b) for a in CODECS.values() for b in CODECS.values()],
    ids=[f"{a} to {b}" for a in CODECS for b in CODECS],
)


def assert_identical(a: Any, b: Any) -> None:
    """The same content in objects of the very same types with the very same attributes."""
    assert_same(a, b)
    assert_same_types(a, b, "$")


def assert_same_types(a: Any, b: Any, path: str) -> None:
    assert type(a) is type(b), f"{path}: {type(a)} against {type(b)}"
    if isinstance(a, (torch.Tensor, np.ndarray, str, bytes)) or a is None:
        if isinstance(a, torch.Tensor):
            assert (a.device, a.layout, a.requires_grad, a.stride()) == (b.device, b.layout, b.requires_grad, b.stride()), path
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.strides) == (b.dtype, b.strides), path
        return
    if isinstance(a, slice):
        for bound in ("start", "stop", "step"):
            assert_same_types(getattr(a, bound), getattr(b, bound), f"{path}.{bound}")
    elif isinstance(a, Mapping):
        for (key, x), (other, y) in zip(a.items(), b.items(), strict=True):
            assert_same_types(key, other, f"{path} key")
            assert_same_types(x, y, f"{path}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_types(x, y, f"{path}[{index}]")
    if hasattr(a, "__struct_fields__"):
        for name in a.__struct_fields__:
            assert_same_types(getattr(a, name), getattr(b, name), f"{path}.{name}")
    attributes, others = getattr(a, "__dict__", {}), getattr(b, "__dict__", {})
    if dataclasses.is_dataclass(a):  # a field that was left out may have its default in the class
        names = {field.name for field in dataclasses.fields(a)}
        assert set(attributes) - names == set(others) - names, path
        attributes, others = ({name: getattr(x, name) for name in names} for x in (a, b))
    assert list(attributes) == list(others), f"{path}: attributes {list(attributes)} against {list(others)}"
    for name in attributes:
        if type(a).__module__.startswith("vllm"):
            assert_same_types(attributes[name], others[name], f"{path}.{name}")

"""Payloads of float32 with every kind of number in them, and their bits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

TORCH = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}


def values(count=1000, seed=0):
    """Finite numbers of every size, and the special ones."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(count, generator=generator) * torch.logspace(-30, 30, count)
    made[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 65519.0, 65520.0])
    return made


def bits(tensor):
    """The bytes of a tensor in C order."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()


def through_float32(tensor, target):
    """What a cast to the named dtype gives: through float32, as the contract says."""
    return tensor.to(torch.float32).to(TORCH[target])


def assert_untouched(tensor, before):
    assert bits(tensor) == bits(before)

"""Batches of items in every kind of tensor, and the arguments of build_features around them."""

from __future__ import annotations

from typing import Any

import numpy as np

import fastmm

EMBED, OTHER = 151655, 7
KINDS = ("numpy", "wire", "torch")


def torch_or_skip() -> Any:
    import pytest

    return pytest.importorskip("torch")


def tensor(kind: str, array: np.ndarray) -> Any:
    """The array as a tensor of a kind; its memory is shared except for a WireTensor's."""
    if kind == "numpy":
        return array
    if kind == "wire":
        return fastmm.WireTensor(array.dtype.name, array.shape, bytearray(array.tobytes()))
    return torch_or_skip().from_numpy(array)


def array_of(leaf: Any) -> np.ndarray:
    """A leaf of any kind as numpy; its memory, where that can be."""
    if isinstance(leaf, fastmm.WireTensor):
        return leaf.numpy()
    return leaf if isinstance(leaf, np.ndarray) else leaf.detach().numpy()


def address_of(leaf: Any) -> int:
    return array_of(leaf).ctypes.data


def prompt_of(lengths: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids with a placeholder of each length, two other tokens apart, and where they lie."""
    ids: list[int] = [OTHER]
    places = []
    for length in lengths:
        ids += [OTHER, OTHER]
        places.append((len(ids), length))
        ids += [EMBED] * length
    return [*ids, OTHER], places


def arguments(n: int = 3, **changes: Any) -> dict[str, Any]:
    """Arguments for n items that are correct, with some of them changed."""
    ids, places = prompt_of([4] * n)
    given: dict[str, Any] = {
        "tensors": {},
        "placeholders": places,
        "hashes": [f"hash-{i}" for i in range(n)],
        "prompt_token_ids": ids,
    }
    given.update(changes)
    return given


def qwen(kind: str, sizes: list[int], width: int = 6, **changes: Any) -> dict[str, Any]:
    """Flat patches, a batched grid, and the sizes, which are shared."""
    n = len(sizes)
    patches = np.arange(sum(sizes) * width, dtype=np.float32).reshape(sum(sizes), width)
    grid = np.array([[1, 1, size] for size in sizes], np.int64).reshape(n, 3)
    return arguments(
        n,
        **{
            "tensors": {
                "pixel_values": tensor(kind, patches),
                "image_grid_thw": tensor(kind, grid),
                "patches_per_image": tensor(kind, np.array(sizes, np.int64)),
            },
            "flat": {"pixel_values": "patches_per_image"},
            "batched": {"image_grid_thw"},
            **changes,
        },
    )

"""What callers say about a batch, checked: lists with an entry per item, keys, sizes by which a tensor is cut."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SchemaError, SchemaValueError


@dataclass(frozen=True, slots=True)
class FlatSizes:
    """How a flat tensor is cut: an extent along `dim` for each item.

    Attributes
    ----------
    sizes
        The key of a sizes tensor among the tensors, or the sizes themselves: a 1-D tensor of any integer dtype, or a
        sequence of ints.
    dim
        The axis that is cut. A negative one counts from the last.
    """

    sizes: Any
    dim: int = 0


def kind_of(value: Any) -> str:
    """What came, without its content."""
    if value is None:
        return "None"
    return "an empty str" if isinstance(value, str) and not value else f"a {type(value).__qualname__}"


def whole(value: Any) -> int | None:
    """An int of Python or numpy; None for anything else, a bool too."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def shown(number: int) -> str:
    """A number in an error; Python refuses to write out a very long one."""
    return str(number) if abs(number) < 1 << 128 else "a number of more than 128 bits"


def listed(values: Any, what: str, where: str) -> list[Any]:
    """What an iterable holds; the very list where it is one. Strings and mappings are no lists."""
    if type(values) is list:
        return values
    if not isinstance(values, (str, bytes, Mapping)):
        try:
            return list(values)
        except TypeError:
            pass
    raise SchemaError(f"expected {what}, got {kind_of(values)}", path=where)


def strings(values: Any, where: str, n: int) -> list[str]:
    """A string for each of n items."""
    found = listed(values, "a list with a str for each item", where)
    if len(found) != n:
        raise SchemaValueError(f"expected {n}, as many as there are placeholders, got {len(found)}", path=where)
    if set(map(type, found)) == {str} and "" not in found:
        return found
    for i, value in enumerate(found):
        if not isinstance(value, str) or not value:
            raise SchemaError(f"expected a str that is not empty, got {kind_of(value)}", path=f"{where}[{i}]")
    return found


def indices(values: Any, n: int) -> set[int]:
    """Which of n items are cached."""
    found = set()
    for value in listed(values, "indices of items", "cached"):
        index = whole(value)
        if index is None:
            raise SchemaError(f"expected indices of items, got {kind_of(value)}", path="cached")
        if not 0 <= index < n:
            raise SchemaValueError(f"expected indices of {n} items, from 0 on, got {shown(index)}", path="cached")
        found.add(index)
    return found


def token_ids(value: Any) -> list[int]:
    """A token id, or several."""
    ids = []
    for one in [value] if whole(value) is not None else listed(value, "a token id or a set of them", "embed_token_id"):
        token = whole(one)
        if token is None:
            raise SchemaError(f"expected a token id or a set of them, got {kind_of(one)}", path="embed_token_id")
        if not 0 <= token < 1 << 63:
            raise SchemaValueError("expected token ids from 0 to 2^63 - 1, got one beyond", path="embed_token_id")
        ids.append(token)
    if not ids:
        raise SchemaValueError("expected at least one token id, got none", path="embed_token_id")
    return ids


def payload_limit(value: Any) -> int | None:
    """A number of bytes, None for no limit."""
    if value is None:
        return None
    limit = whole(value)
    if limit is None or limit < 0:
        came = kind_of(value) if limit is None else shown(limit)
        raise SchemaError(f"expected a number of bytes >= 0 or None, got {came}", path="max_payload_nbytes")
    return limit


# --- keys -------------------------------------------------------------------------------------------------------------


def renamed(given: Any, names: Mapping[str, str] | None, where: str) -> dict[str, Any]:
    """A mapping of keys under their new names."""
    if not isinstance(given, Mapping):
        raise SchemaError(f"expected a mapping of keys, got {kind_of(given)}", path=where)
    found: dict[str, Any] = {}
    before: dict[str, str] = {}
    for key, value in given.items():
        name = new_name(key, names, where)
        if name in found:
            raise SchemaValueError(
                f"expected each key once, got {before[name]!r} and {key!r}, which both are {name!r} after renaming", path=where
            )
        before[name] = key
        found[name] = value
    return found


def new_name(key: Any, names: Mapping[str, str] | None, where: str) -> str:
    """What a key is called in the features."""
    if not isinstance(key, str):
        raise SchemaError(f"expected str keys, got {kind_of(key)}", path=where)
    if names is None:
        return key
    name = names.get(key, key)
    if not isinstance(name, str):
        raise SchemaError(f"expected a str, got {kind_of(name)}", path=f"rename[{key!r}]")
    return name


def known_names(keys: Any, names: Mapping[str, str] | None, found: dict[str, Any], where: str) -> set[str]:
    """Keys under their new names, each of which has a tensor."""
    return {known_name(key, names, found, where) for key in listed(keys, "a set of keys", where)}


def known_name(key: Any, names: Mapping[str, str] | None, found: dict[str, Any], where: str) -> str:
    """A key under its new name, which has a tensor."""
    name = new_name(key, names, where)
    if name not in found:
        there = ", ".join(map(repr, found)) or "none"
        raise SchemaValueError(f"expected keys of the tensors ({there}), got {key!r}", path=where)
    return name


def flat_cuts(flat: Any, names: Mapping[str, str] | None, found: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The sizes and the axis of each flat key; sizes are a key of the tensors or the sizes themselves."""
    cuts = {}
    for key, value in renamed(flat, names, "flat").items():
        known_name(key, None, found, "flat")
        sizes, dim = (value.sizes, value.dim) if isinstance(value, FlatSizes) else (value, 0)
        cuts[key] = (known_name(sizes, names, found, f"flat[{key!r}]") if isinstance(sizes, str) else sizes, dim)
    return cuts

"""Checks of what a user asks of a client, made before engines load for minutes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SchemaError
from .handshake import Addresses, ClientHandshake

__all__ = ["check_callable", "check_group", "check_heartbeat", "check_seconds"]


def check_seconds(name: str, value: Any, *, zero: bool = True) -> None:
    """A finite number of seconds; more than nothing where `zero` is False."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SchemaError(f"expected seconds for {name}, got a {type(value).__qualname__}")
    if not math.isfinite(value) or value < 0 or (not value and not zero):
        raise SchemaError(f"expected {name} of {'0' if zero else 'more than 0'} seconds, got {value!r}")


def check_callable(name: str, value: Any) -> None:
    """Something to call, or None."""
    if value is not None and not callable(value):
        raise SchemaError(f"expected a callable or None for {name}, got a {type(value).__qualname__}")


def check_heartbeat(value: Any) -> None:
    """``(every, lost_after)``, False or None."""
    if value is None or value is False:
        return
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise SchemaError(f"expected heartbeat to be (every, lost_after) in seconds, False or None, got {value!r:.40}")
    for seconds in value:
        check_seconds("heartbeat", seconds, zero=False)


def check_group(engines: Any, parallel_config: Any, coordinator: Any) -> None:
    """The engines that are waited for, and what they are told."""
    ranks = [engines] if isinstance(engines, int) else engines
    whole = isinstance(ranks, (Sequence, range)) and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks)
    if not whole or isinstance(ranks, (str, bytes)):
        raise SchemaError(f"expected engines to be how many there are, or their ranks, got {engines!r:.40}")
    if len(set(ranks)) != len(ranks):
        raise SchemaError(f"expected engines of different ranks, got {engines!r:.40}")
    for name, value in (("parallel_config", parallel_config), ("coordinator", coordinator)):
        if value is not None and not isinstance(value, Mapping):
            raise SchemaError(f"expected a mapping for {name}, got a {type(value).__qualname__}")
    known = ("coordinator_input", "coordinator_output", "frontend_stats_publish_address")
    for name, address in (coordinator or {}).items():
        if name not in known or not (address is None or isinstance(address, str)):
            raise SchemaError(f"expected addresses for {', '.join(known)} in coordinator, got {name!r:.40}: {address!r:.40}")
    try:
        ClientHandshake(Addresses(("",), ("",)), engines, parallel_config)
    except (TypeError, ValueError, OverflowError) as error:
        raise SchemaError(f"expected plain values in parallel_config: {error}") from None

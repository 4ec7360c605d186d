"""What is asked of a client is checked when it is made, not when its engines have loaded for minutes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fastmm import FastmmError
from fastmm.transport import AsyncEngineClient, EngineClient

WRONG: list[dict[str, Any]] = [
    {"engines": 0},
    {"engines": -1},
    {"engines": "2"},
    {"engines": []},
    {"engines": [1, 1]},
    {"engines": 1.0},
    {"engines": None},
    {"engines": [70000]},
    {"handshake": 5},
    {"handshake": "127.0.0.1:5570"},
    {"startup_timeout": None},
    {"startup_timeout": -1},
    {"startup_timeout": math.nan},
    {"max_inflight_nbytes": 0},
    {"max_inflight_nbytes": "1"},
    {"progress": 3},
    {"on_outputs": 3},
    {"dtype": "int8"},
    {"dtype": 3},
    {"inplace": 3},
    {"threshold": -1},
    {"dedup": "x"},
    {"hook": 3},
    {"profile": "0.21"},
    {"tensors": "jax"},
    {"heartbeat": 5},
    {"heartbeat": True},
    {"heartbeat": (1,)},
    {"heartbeat": (1, 0)},
    {"heartbeat": "12"},
    {"silence_timeout": 0},
    {"silence_timeout": -1},
    {"linger": -1},
    {"linger": None},
    {"parallel_config": 3},
    {"parallel_config": {"x": object()}},
    {"coordinator": {"x": "y"}},
    {"coordinator": {"coordinator_input": 3}},
    {"coordinator": 3},
]


@pytest.mark.parametrize("client", [EngineClient, AsyncEngineClient])
@pytest.mark.parametrize("options", WRONG, ids=repr)
def test_an_option_that_is_wrong_is_refused_at_once_and_named(client: Any, options: dict[str, Any]) -> None:
    with pytest.raises(FastmmError) as caught:
        client(**options)
    (name,) = options
    assert name.removesuffix("s") in str(caught.value) or str(options[name]) in str(caught.value)


def test_the_async_clients_own_option_is_checked_too() -> None:
    for inline_nbytes in (-1, "1", None, True):
        with pytest.raises(FastmmError, match="inline_nbytes"):
            AsyncEngineClient(inline_nbytes=inline_nbytes)  # type: ignore[arg-type]


def test_what_is_right_is_taken() -> None:
    EngineClient(engines=[3, 1], heartbeat=(1, 2.5), startup_timeout=0, linger=0, silence_timeout=0.1, dtype="float16")
    EngineClient(
        engines=range(2), heartbeat=False, dtype=None, coordinator={"coordinator_input": None}, parallel_config={"a": 1}
    )

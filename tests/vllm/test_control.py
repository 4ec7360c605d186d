"""The small messages are those of the real vLLM, byte for byte, and read there as meant."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from peers import vllm_decode
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.serial_utils import MsgpackEncoder

import fastmm
from fastmm.transport import control


def test_types_and_the_word_of_a_dead_engine_are_those_of_vllm() -> None:
    # Importing vllm.v1.engine.core takes packages that this environment need not have: the constant is read off its source.
    source = importlib.util.find_spec("vllm.v1.engine.core").origin
    assert f"ENGINE_CORE_DEAD = {control.ENGINE_CORE_DEAD!r}".replace("'", '"') in Path(source).read_text(encoding="utf-8")
    for name in ("ADD", "ABORT", "START_DP_WAVE", "UTILITY"):
        assert getattr(control, name) == EngineCoreRequestType[name].value


@pytest.mark.parametrize("ids", [[], ["r"], ["r1", "r2"], [f"request-{i}" for i in range(70_000)], ["ü" * 40]])
def test_aborts_are_byte_equal(ids: list[str]) -> None:
    assert [control.abort_message(ids)] == MsgpackEncoder().encode(ids)


@pytest.mark.parametrize("wave", [0, 1, 127, 128, 2**32])
@pytest.mark.parametrize("exclude", [None, 0, 3])
def test_waves_are_byte_equal(wave: int, exclude: int | None) -> None:
    assert control.start_dp_wave_message(wave, exclude) == msgspec.msgpack.encode((wave, exclude))


CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("get_supported_tasks", ()),
    ("sleep", (1, "abort")),
    ("wake_up", (["weights", "kv_cache"],)),
    ("wake_up", (None,)),
    ("collective_rpc", ("method", 1.5, (), {"key": [1, None, True]})),
    ("add_lora", (LoRARequest("a", 1, "/a"),)),
    ("update", (torch.arange(1000, dtype=torch.bfloat16), np.arange(5), torch.zeros(2, 3))),
]


@pytest.mark.parametrize(("method", "args"), CALLS)
def test_utility_calls_are_byte_equal_and_read_alike(method: str, args: tuple[Any, ...]) -> None:
    ours = control.utility_message(0, 2**64 - 1, method, args)
    theirs = MsgpackEncoder().encode((0, 2**64 - 1, method, args))
    assert [bytes(f) for f in ours] == [bytes(f) for f in theirs]
    call = control.read_utility(theirs)
    client_index, call_id, name, plain = vllm_decode(ours, None)
    assert (call.client_index, call.call_id, call.method) == (client_index, call_id, name)
    assert repr(call.args) == repr([[*a[:2], bytes(a[2])] if is_inline(a) else a for a in plain])


def is_inline(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and isinstance(value[2], memoryview)


def test_our_lora_request_is_the_one_of_vllm_there() -> None:
    ours = control.utility_message(0, 1, "add_lora", [fastmm.LoRARequest("a", 1, "/a")])
    theirs = control.utility_message(0, 1, "add_lora", [LoRARequest("a", 1, "/a")])
    assert ours == theirs

"""Putting fastmm's encoder and decoder where vLLM looks for its own, in this process.

vLLM calls this in each of its processes, at different times: the API server before its client exists, the engine core before
its threads make their codecs, workers at their start. Some modules have taken the names by then, and some will only take them
later, so the names are replaced where they came from and wherever they already are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from . import gate
from .log import logger

SWITCH = "FASTMM_VLLM"
ON = frozenset({"1", "true", "on", "yes"})
OFF = frozenset({"", "0", "false", "off", "no"})
# Modules of vLLM that take the names for themselves when they are imported, and instances that one makes.
HOLDERS = (
    gate.SERIAL_UTILS,
    "vllm.v1.engine.core_client",
    "vllm.v1.engine.core",
    "vllm.v1.engine.coordinator",
    "vllm.entrypoints.scale_out.token_in_token_out.mm_serde",
)
NAMES = ("MsgpackEncoder", "MsgpackDecoder")
INSTANCES = ("_encoder", "_decoder")


@dataclass
class State:
    """What was done in this process, and how to undo it."""

    mode: str = "off"
    replaced: list[tuple[Any, str, Any]] = field(default_factory=list)  # module, name, what it was
    vllm: str = "unknown"  # its version, in words
    announced_in: int = 0  # the id of the process that said so; a forked one says it again

    def said(self) -> tuple[str, int, str]:
        return self.mode, os.getpid(), self.vllm


state = State()


def mode_asked() -> str:
    """``on``, ``off`` or ``shadow``, as the environment says; another word is off, with a warning."""
    asked = os.environ.get(SWITCH, "").strip().lower()
    if asked in ON:
        return "on"
    if asked == "shadow":
        return "shadow"
    if asked not in OFF:
        logger.warning("fastmm: %s=%s is not one of 0, 1, shadow; vLLM keeps its own encoder and decoder", SWITCH, asked)
    return "off"


def register() -> None:
    """Do what ``FASTMM_VLLM`` asks for, once in this process. Called by vLLM's plugin loader."""
    if state.mode != "off" or (mode := mode_asked()) == "off":
        return
    verdict = gate.examine()
    if not verdict.fits:
        logger.warning(
            "fastmm: vLLM %s is not as fastmm needs it (%s); vLLM keeps its own encoder and decoder",
            verdict.version,
            "; ".join(verdict.misfits),
        )
        return
    state.vllm = f"{verdict.version}{'' if verdict.tested else ' (which it was not tested with)'}"
    switch_on(mode)


def announce() -> None:
    """Say that fastmm is at work, once in each process, when vLLM makes its first encoder or decoder there.

    Not when the plugin is loaded: the API server loads plugins before it has set up its log, and a forked engine core does not
    load them at all.
    """
    if state.announced_in == os.getpid():
        return
    state.announced_in = os.getpid()
    from fastmm import __version__

    logger.info("fastmm %s: %s in process %d, in place of the encoder and decoder of vLLM %s", __version__, *state.said())


def switch_on(mode: str) -> None:
    """Replace the names in the modules of vLLM that are imported now. The gate is the caller's business."""
    from .drop_in import classes

    state.mode = mode
    state.announced_in = os.getpid()  # the instances made here are not the ones to announce
    try:
        for module, name, current, new in list(places(classes(mode, announce))):
            setattr(module, name, new)
            state.replaced.append((module, name, current))
    except BaseException:
        switch_off()
        raise
    finally:
        state.announced_in = 0


def switch_off() -> None:
    """Give vLLM its names back. What was made of fastmm's classes meanwhile goes on to work."""
    while state.replaced:
        module, name, original = state.replaced.pop()
        setattr(module, name, original)
    state.mode = "off"


def places(replacements: dict[str, Any]) -> Iterator[tuple[Any, str, Any, Any]]:
    """Every module of vLLM that holds one of the classes, or an instance: module, name, what it holds, what it gets."""
    from .originals import VllmDecoder, VllmEncoder

    originals = {"MsgpackEncoder": VllmEncoder, "MsgpackDecoder": VllmDecoder}
    for module_name, module in list(sys.modules.items()):
        if module is None or not module_name.startswith("vllm."):
            continue
        held = vars(module)
        for name in NAMES:
            if held.get(name) is originals[name]:
                yield module, name, originals[name], replacements[name]
        for name in INSTANCES:
            current: Any = held.get(name)
            if type(current) is VllmEncoder:
                yield module, name, current, replacements["MsgpackEncoder"](current.size_threshold, current.oob_tensor_consumer)
            elif type(current) is VllmDecoder:
                arguments = (current.decoder.type, current.share_mem, current.oob_tensor_provider)
                yield module, name, current, replacements["MsgpackDecoder"](*arguments)

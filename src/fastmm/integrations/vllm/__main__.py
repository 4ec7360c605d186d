"""``python -m fastmm.integrations.vllm``: what fastmm would do to the vLLM of this environment, and whether it would fit.

Exit status: 0, it fits (and is on if ``FASTMM_VLLM`` says so); 1, it does not, vLLM would keep its own encoder and decoder; 2,
there is no vLLM here.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module, metadata, util

from fastmm import __version__

from . import gate, plugin, tolerant

FITS, MISFIT, NO_VLLM = 0, 1, 2


def main() -> int:
    """Print the findings and the verdict; return the exit status."""
    print(f"fastmm        {__version__}")
    print(f"Python        {sys.version.split()[0]}")
    if util.find_spec("vllm") is None:
        print("vLLM          not installed")
        print("verdict       there is no vLLM in this environment: nothing to do")
        return NO_VLLM
    verdict = gate.examine()
    print(f"vLLM          {verdict.version} ({'tested' if verdict.tested else 'not tested, tried just now'})")
    asked = os.environ.get(plugin.SWITCH)
    mode = plugin.mode_asked()
    print(f"{plugin.SWITCH:<13} {'not set' if asked is None else asked}: {mode}")
    entry = plugin_fault()
    print(f"entry point   {entry or 'found, vLLM will load it'}")
    for holder in plugin.HOLDERS:
        print(f"patches       {holder}: {held_by(holder)}")
    print(f"engine core   {engine_fault() or 'outlives malformed messages'}")
    for misfit in verdict.misfits:
        print(f"misfit        {misfit}")
    if not verdict.fits:
        print("verdict       does not fit: vLLM would keep its own encoder and decoder")
        return MISFIT
    if mode == "off":
        print(f"verdict       fits, and is off: set {plugin.SWITCH}=1 (or shadow) to switch it on")
        return FITS
    if entry:
        print("verdict       fits, but vLLM would not load it")
        return MISFIT
    print(f"verdict       fits: {mode} in every process of vLLM that loads plugins")
    return FITS


def plugin_fault() -> str | None:
    """Why vLLM's plugin loader would pass the plugin over; None when it would not."""
    names = [entry.name for entry in metadata.entry_points(group="vllm.general_plugins") if entry.value.startswith("fastmm")]
    if not names:
        return "not found: fastmm is importable but not installed here (pip install fastmm)"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and not set(names) & set(allowed.split(",")):
        return f"found, but VLLM_PLUGINS={allowed} keeps it out: add {names[0]}"
    return None


def engine_fault() -> str | None:
    """Why an engine core would not outlive a malformed message; None when it would."""
    try:
        lacks = tolerant.core_misfits(import_module(tolerant.CORE))
    except Exception as error:
        lacks = [f"not here ({type(error).__name__})"]
    return "; ".join(lacks) or None


def held_by(holder: str) -> str:
    """What a module of vLLM holds that would be replaced."""
    try:
        module = import_module(holder)
    except Exception as error:
        return f"not here ({type(error).__name__})"
    held = [name for name in (*plugin.NAMES, *plugin.INSTANCES) if name in vars(module)]
    return ", ".join(held) or "holds none of the names"


if __name__ == "__main__":
    raise SystemExit(main())

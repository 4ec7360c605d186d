"""fastmm in vLLM's own processes: an encoder and a decoder in the place of vLLM's, and the plugin that puts them there.

``FASTMM_VLLM=1`` switches it on in every process of vLLM (docs/vllm.md); ``python -m fastmm.integrations.vllm`` says what it
would do here. Nothing of vLLM is imported before one of the names below is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .codec import MsgpackDecoder, MsgpackEncoder

__all__ = ["MsgpackDecoder", "MsgpackEncoder"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(".codec", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

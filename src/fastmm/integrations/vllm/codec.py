"""vLLM's ``MsgpackEncoder`` and ``MsgpackDecoder``, quicker and stricter, under their own names.

Both classes have vLLM's class as their second base: whatever this module does not replace is vLLM's own code, and an
``isinstance`` that asks for vLLM's class is content.
"""

from __future__ import annotations

from typing import Any

from vllm.v1 import serial_utils

from fastmm._native.vllm_encoder import VllmEncoder

__all__ = ["MsgpackDecoder", "MsgpackEncoder"]

# Whatever name the plugin puts in their place later, these stay vLLM's.
_TheirEncoder: Any = serial_utils.MsgpackEncoder
_TheirDecoder: Any = serial_utils.MsgpackDecoder


class MsgpackEncoder(VllmEncoder, _TheirEncoder):  # type: ignore[misc]
    """vLLM's encoder: the same frames, byte for byte.

    Parameters
    ----------
    size_threshold
        Tensors of fewer bytes are written into the main frame. None: ``VLLM_MSGPACK_ZERO_COPY_THRESHOLD``, or 256.
    oob_tensor_consumer
        Called with each tensor that would get a frame, or None.
    """

    def __init__(self, size_threshold: int | None = None, oob_tensor_consumer: Any = None) -> None:
        _TheirEncoder.__init__(self, size_threshold, oob_tensor_consumer)
        VllmEncoder.__init__(self, self.size_threshold, oob_tensor_consumer)


class MsgpackDecoder(_TheirDecoder):  # type: ignore[misc]
    """vLLM's decoder."""

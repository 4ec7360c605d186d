"""vLLM's ``MsgpackEncoder`` and ``MsgpackDecoder``, quicker and stricter, under their own names.

Both classes have vLLM's class as their second base: whatever this module does not replace is vLLM's own code, and an
``isinstance`` that asks for vLLM's class is content.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from vllm import envs
from vllm.multimodal import inputs
from vllm.v1 import serial_utils

from fastmm._native.vllm_decoder import VllmDecoder, adopt_classes
from fastmm._native.vllm_encoder import VllmEncoder
from fastmm.errors import DecodeError, FastmmError

__all__ = ["MalformedMessageError", "MsgpackDecoder", "MsgpackEncoder"]

logger = logging.getLogger(__name__)

# Whatever name the plugin puts in their place later, these stay vLLM's.
_TheirEncoder: Any = serial_utils.MsgpackEncoder
_TheirDecoder: Any = serial_utils.MsgpackDecoder


class MalformedMessageError(DecodeError, msgspec.ValidationError):
    """A message is not what an encoder of this wire writes; what msgspec's callers expect for that is what it is."""


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
        replaced = _replaced(type(self), MsgpackEncoder, _TheirEncoder)
        VllmEncoder.__init__(self, self.size_threshold, oob_tensor_consumer, passive=bool(replaced))


class MsgpackDecoder(VllmDecoder, _TheirDecoder):  # type: ignore[misc]
    """vLLM's decoder: the same objects, from frames that are checked.

    Parameters
    ----------
    t
        What a message is; None for plain values.
    share_mem
        Tensors of aux frames view them; else they own their memory, which is pinned where vLLM pins it.
    oob_tensor_provider
        Called as ``provider(dtype, shape, meta)`` for a tensor that travels outside the message, or None.

    Raises
    ------
    MalformedMessageError
        A ``msgspec.ValidationError``; so is whatever msgspec itself refuses.
    """

    def __init__(self, t: Any = None, share_mem: bool = True, oob_tensor_provider: Any = None) -> None:
        _TheirDecoder.__init__(self, t, share_mem, oob_tensor_provider)
        self._options = (t, share_mem, oob_tensor_provider)
        replaced = _replaced(type(self), MsgpackDecoder, _TheirDecoder)
        if replaced and "dec_hook" not in replaced:  # vLLM's hook asks for the methods that somebody replaced
            hook = partial(_TheirDecoder.dec_hook, self)
            self.decoder = msgspec.msgpack.Decoder(Any if t is None else t, dec_hook=hook, ext_hook=self.ext_hook)
        VllmDecoder.__init__(
            self,
            self.decoder.decode,
            t,
            **({} if replaced else _cuts(t)),
            tensor_class=torch.Tensor,
            array_class=np.ndarray,
        )

    def another(self) -> MsgpackDecoder:
        """A decoder with the same options, for a message that comes while one is open."""
        twin = type(self).__new__(type(self))
        MsgpackDecoder.__init__(twin, *self._options)
        twin.share_mem, twin.pin_tensors = self.share_mem, self.pin_tensors
        twin.oob_tensor_provider = self.oob_tensor_provider
        return twin

    def pickles_allowed(self) -> bool:
        """Whether the operator allows pickles: what holds one is left to vLLM's hooks."""
        return bool(envs.VLLM_ALLOW_INSECURE_SERIALIZATION)

    def refusal(self, error: Exception) -> Exception | None:
        """What is raised in place of an error; None for the error itself."""
        if isinstance(error, (msgspec.DecodeError, MemoryError, OSError)):
            return None
        if isinstance(error, RuntimeError) and not isinstance(error, (RecursionError, NotImplementedError)):
            return None  # no room for pinned memory, and the like: nothing is wrong with the message
        if isinstance(error, FastmmError):
            return MalformedMessageError(
                error.message, path=error.path, frame=getattr(error, "frame", None), offset=getattr(error, "offset", None)
            )
        return MalformedMessageError(f"{type(error).__name__}: {error}")


def _replaced(cls: Any, ours: Any, theirs: Any) -> set[str]:
    """The hooks and helpers of vLLM's class that a subclass of ours has of its own: they are to be asked, as in vLLM."""
    names = [name for name in vars(theirs) if name.endswith("_hook") or name.startswith(("_encode_", "_decode_"))]
    return {name for name in names if getattr(cls, name) is not getattr(ours, name)}


_FIELDS: dict[str, Any] = {
    "batched": inputs.MultiModalBatchedField,
    "flat": inputs.MultiModalFlatField,
    "shared": inputs.MultiModalSharedField,
}


def _adopt() -> bool:
    """Whether the features of this vLLM can be read natively."""
    try:
        adopt_classes(
            inputs.MultiModalFeatureSpec,
            inputs.PlaceholderRange,
            inputs.MultiModalKwargsItem,
            inputs.MultiModalFieldElem,
            _FIELDS,
            torch.Tensor,
        )
    except Exception:
        logger.warning("this vLLM's multimodal classes are not those fastmm knows: msgspec decodes them", exc_info=True)
        return False
    return True


_adopted = _adopt()


def _cuts(t: Any) -> dict[str, Any]:
    """What of a message of type `t` is read natively: the keywords of VllmDecoder."""
    if t is torch.Tensor or (t is inputs.MultiModalKwargsItem and _adopted):
        return {"whole": t}
    config = getattr(t, "__struct_config__", None)
    if config is None or not config.array_like or config.frozen or config.tag is not None or hasattr(t, "__post_init__"):
        return {}
    cuts: dict[str, Any] = {}
    for position, field in enumerate(msgspec.structs.fields(t)):
        if field.name == "prompt_token_ids" and field.type == (list[int] | None):
            cuts["ids"] = (position, field.name)
        if field.name == "mm_features" and field.type == (list[inputs.MultiModalFeatureSpec] | None) and _adopted:
            cuts |= {"features": (position, field.name), "feature": inputs.MultiModalFeatureSpec}
    return cuts

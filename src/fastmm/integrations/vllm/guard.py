"""fastmm's encoder and decoder with vLLM's own behind them: an internal fault costs one message its speed, nothing else.

Both come here only when something went wrong; a message that goes well pays nothing. What vLLM's own code would raise for the
same message is what the caller sees; when it succeeds where fastmm raised, its result is used and the fault is logged, without
payload.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fastmm.errors import FastmmError

from . import codec, counters
from .log import describe, warn, where
from .originals import VllmDecoder, VllmEncoder

# An error of these kinds is said on purpose: the message is refused. Any other class is taken for a fault.
REFUSALS = (msgspec.MsgspecError, FastmmError)


class GuardedEncoder(codec.MsgpackEncoder):
    """fastmm's encoder; a message that it fails on is encoded by vLLM's."""

    def __init__(self, size_threshold: int | None = None, oob_tensor_consumer: Any = None) -> None:
        try:
            super().__init__(size_threshold, oob_tensor_consumer)
        except Exception as error:
            instead = VllmEncoder(size_threshold, oob_tensor_consumer)  # what it raises, the caller sees
            VllmEncoder.__init__(self, size_threshold, oob_tensor_consumer)
            self.__dict__.update(encode=instead.encode, encode_into=instead.encode_into)
            report_fault("MsgpackEncoder()", error)

    def after_fault(self, error: Exception, obj: Any, buf: bytearray | None = None) -> Any:
        # A new one each time: faults are rare, and vLLM's encoder has state that two threads must not share.
        fallback = VllmEncoder(self.size_threshold, self.oob_tensor_consumer)
        try:
            result = fallback.encode(obj) if buf is None else fallback.encode_into(obj, buf)
        except Exception as theirs:
            raise theirs from None
        report_fault(f"{'encode' if buf is None else 'encode_into'} of {type(obj).__qualname__}", error)
        return result


class GuardedDecoder(codec.MsgpackDecoder):
    """fastmm's decoder; a message that it fails on, for no fault of the message, is decoded by vLLM's."""

    def __init__(self, t: Any | None = None, share_mem: bool = True, oob_tensor_provider: Any = None) -> None:
        try:
            super().__init__(t, share_mem, oob_tensor_provider)
        except Exception as error:
            instead = VllmDecoder(t, share_mem, oob_tensor_provider)
            VllmDecoder.__init__(self, t, share_mem, oob_tensor_provider)
            self.__dict__.update(decode=instead.decode)
            report_fault(f"MsgpackDecoder({getattr(t, '__qualname__', '')})", error)

    def after_error(self, error: Exception, bufs: Any) -> Any:
        # A provider gives each tensor once: what it may have given already, vLLM's decoder would wait for in vain.
        if self.oob_tensor_provider is None and not isinstance(error, REFUSALS):
            t, share_mem, _ = self._options
            try:
                result = VllmDecoder(t, share_mem).decode(bufs)
            except Exception:
                pass  # the message it is, then
            else:
                report_fault(f"decode to {getattr(t, '__qualname__', 'no type')}", error)
                return result
        counters.add(counters.refused)
        return super().after_error(error, bufs)


def report_fault(what: str, error: Exception) -> None:
    """Say that fastmm failed where vLLM did not. For the logs, and for a report to fastmm's authors."""
    counters.add(counters.faults)
    text = "fastmm: %s failed (%s), vLLM's own code did it instead. Please report this:\n%s"
    warn("fault", text, what, describe(error), where(error))

"""fastmm's encoder and decoder with vLLM's own behind them: an internal fault costs one message its speed, nothing else.

What vLLM's own code would raise for the same message is what the caller sees; when it succeeds where fastmm raised, its result
is used and the fault is logged, without payload.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fastmm.errors import FastmmError

from . import codec, counters
from .log import describe, warn, where
from .originals import VllmDecoder, VllmEncoder

# An error of these kinds is said on purpose: the input is refused. Any other class is taken for a fault.
REFUSALS = (msgspec.MsgspecError, FastmmError)

_encode = codec.MsgpackEncoder.encode
_encode_into = codec.MsgpackEncoder.encode_into
_decode = codec.MsgpackDecoder.decode


class GuardedEncoder(codec.MsgpackEncoder):
    """fastmm's encoder; a message that it fails on is encoded by vLLM's."""

    _instead: Any = None  # vLLM's, where ours could not even be made

    def __init__(self, size_threshold: int | None = None, oob_tensor_consumer: Any = None) -> None:
        try:
            super().__init__(size_threshold, oob_tensor_consumer)
        except Exception as error:
            self._instead = VllmEncoder(size_threshold, oob_tensor_consumer)
            VllmEncoder.__init__(self, size_threshold, oob_tensor_consumer)
            report_fault("MsgpackEncoder()", error)

    def encode(self, obj: Any) -> Any:
        if self._instead is not None:
            return self._instead.encode(obj)
        try:
            return _encode(self, obj)
        except Exception as error:
            return self._by_vllm("encode", error, obj)

    def encode_into(self, obj: Any, buf: bytearray) -> Any:
        if self._instead is not None:
            return self._instead.encode_into(obj, buf)
        try:
            return _encode_into(self, obj, buf)
        except Exception as error:
            return self._by_vllm("encode_into", error, obj, buf)

    def _by_vllm(self, method: str, error: Exception, obj: Any, *buffer: bytearray) -> Any:
        # A new one each time: faults are rare, and vLLM's encoder has state that two threads must not share.
        fallback = VllmEncoder(self.size_threshold, self.oob_tensor_consumer)
        try:
            result = getattr(fallback, method)(obj, *buffer)
        except Exception as theirs:
            raise theirs from None
        report_fault(f"{method} of {type(obj).__qualname__}", error)
        return result


class GuardedDecoder(codec.MsgpackDecoder):
    """fastmm's decoder; a message that it fails on, for no fault of the message, is decoded by vLLM's."""

    _instead: Any = None

    def __init__(self, t: Any | None = None, share_mem: bool = True, oob_tensor_provider: Any = None) -> None:
        self._provided = provided = None if oob_tensor_provider is None else CallCounter(oob_tensor_provider)
        self._type = t
        try:
            super().__init__(t, share_mem, provided)
        except Exception as error:
            self._instead = VllmDecoder(t, share_mem, provided)  # what it raises, the caller sees
            VllmDecoder.__init__(self, t, share_mem, provided)
            report_fault(f"MsgpackDecoder({getattr(t, '__qualname__', '')})", error)

    def decode(self, bufs: Any) -> Any:
        if self._instead is not None:
            return self._instead.decode(bufs)
        provided = self._provided
        before = 0 if provided is None else provided.calls
        try:
            return _decode(self, bufs)
        except REFUSALS:
            counters.add(counters.refused)
            raise
        except Exception as error:
            if provided is not None and provided.calls != before:
                raise  # it was given tensors that will not be given a second time
            return self._by_vllm(error, bufs)

    def _by_vllm(self, error: Exception, bufs: Any) -> Any:
        arguments = (self.share_mem, self.oob_tensor_provider)
        fallback = VllmDecoder(self._type, *arguments)
        try:
            result = fallback.decode(bufs)
        except Exception as theirs:
            raise theirs from None
        report_fault(f"decode to {getattr(self._type, '__qualname__', 'no type')}", error)
        return result


class CallCounter:
    """A provider or consumer of tensors, and how often it was called."""

    __slots__ = ("called", "calls")

    def __init__(self, called: Any) -> None:
        self.called = called
        self.calls = 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self.called(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.called, name)


def report_fault(what: str, error: Exception) -> None:
    """Say that fastmm failed where vLLM did not. For the logs, and for a report to fastmm's authors."""
    counters.add(counters.faults)
    warn(
        "fault",
        "fastmm: %s failed (%s), vLLM's own code did it instead. Please report this:\n%s",
        what,
        describe(error),
        where(error),
    )

"""``FASTMM_VLLM=shadow``: vLLM's own encoder and decoder do the work, fastmm's do it again, and the results are compared.

vLLM's result is always the one used. A difference is logged by its place, never by its content, and counted. Both cost their
time, so this is for trying fastmm out, not for speed.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from . import codec, counters
from .compare import difference, frames_difference
from .log import describe, warn, where
from .originals import VllmDecoder, VllmEncoder


class ShadowEncoder(VllmEncoder):  # type: ignore[misc]
    """vLLM's encoder, watched."""

    def __init__(self, size_threshold: int | None = None, oob_tensor_consumer: Any = None) -> None:
        recorded = None if oob_tensor_consumer is None else RecordedConsumer(oob_tensor_consumer)
        super().__init__(size_threshold, recorded)
        again = None if recorded is None else Again(recorded.results)
        self._ours = _try("MsgpackEncoder", codec.MsgpackEncoder, self.size_threshold, again)

    def encode(self, obj: Any) -> Any:
        frames = super().encode(obj)
        if self._ours is not None:
            watch(f"encode of {type(obj).__qualname__}", lambda: frames_difference(frames, self._ours.encode(obj)))
        return frames

    def encode_into(self, obj: Any, buf: bytearray) -> Any:
        frames = super().encode_into(obj, buf)
        if self._ours is not None:
            watch(
                f"encode_into of {type(obj).__qualname__}",
                lambda: frames_difference(frames, self._ours.encode_into(obj, bytearray())),
            )
        return frames


class ShadowDecoder(VllmDecoder):  # type: ignore[misc]
    """vLLM's decoder, watched."""

    def __init__(self, t: Any | None = None, share_mem: bool = True, oob_tensor_provider: Any = None) -> None:
        recorded = None if oob_tensor_provider is None else RecordedProvider(oob_tensor_provider)
        super().__init__(t, share_mem, recorded)
        again = None if recorded is None else recorded.again
        self._what = f"decode to {getattr(t, '__qualname__', 'no type')}"
        self._ours = _try("MsgpackDecoder", codec.MsgpackDecoder, t, share_mem, again)
        self._recorded = recorded

    def decode(self, bufs: Any) -> Any:
        if self._recorded is not None:
            self._recorded.results.clear()
        result = super().decode(bufs)
        if self._ours is not None:
            watch(self._what, lambda: difference(result, self._ours.decode(bufs)))
        return result


def watch(what: str, compared: Any) -> None:
    """Run fastmm's half and the comparison; whatever comes of it, the caller goes on."""
    try:
        found = compared()
    except Exception as error:
        found = f"fastmm raised {describe(error)}\n{where(error)}"
    if found:
        counters.add(counters.differences)
        warn("shadow", "fastmm shadow: %s: %s (vLLM's result is used)", what, found)


def _try(what: str, make: Any, *arguments: Any) -> Any:
    try:
        return make(*arguments)
    except Exception as error:
        counters.add(counters.differences)
        warn("shadow", "fastmm shadow: %s cannot be made: %s (vLLM's is used)", what, describe(error))
        return None


class RecordedConsumer:
    """A consumer of tensors that takes each tensor once, and says the same a second time to fastmm."""

    def __init__(self, consumer: Any) -> None:
        self.consumer = consumer
        self.results: deque[Any] = deque()

    def new_message(self) -> None:
        self.results.clear()
        self.consumer.new_message()

    def __call__(self, tensor: Any) -> Any:
        result = self.consumer(tensor)
        self.results.append(result)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.consumer, name)


class Again:
    """The consumer that fastmm is given: it has nothing to send, and says what was said before."""

    def __init__(self, results: deque[Any]) -> None:
        self.results = results

    def new_message(self) -> None:
        pass

    def __call__(self, tensor: Any) -> Any:
        return self.results.popleft()


class RecordedProvider:
    """A provider of tensors that is asked once for each, and gives the same a second time to fastmm."""

    def __init__(self, provider: Any) -> None:
        self.provider = provider
        self.results: deque[Any] = deque()

    def __call__(self, *arguments: Any) -> Any:
        result = self.provider(*arguments)
        self.results.append(result)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.provider, name)

    def again(self, *arguments: Any) -> Any:
        return self.results.popleft()

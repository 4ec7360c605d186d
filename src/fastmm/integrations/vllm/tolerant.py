"""An engine core that outlives a message it cannot decode.

vLLM decodes in the thread that reads its sockets, and an error there ends the thread: the engine is then alive and deaf. With
this, a request that cannot be decoded is answered as failed when its id can still be read, and every other message that cannot
be decoded is logged and dropped. It works through vLLM's own road for requests whose preprocessing fails.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from fastmm.errors import DecodeError
from fastmm.transport.salvage import salvage_call, salvage_request

from . import counters
from .log import describe, logger, warn

CORE = "vllm.v1.engine.core"
_SEEN = "_fastmm_tolerant"


class Broken:
    """What a decoder gives for a request that it could not decode: preprocessing it fails, with the reason."""

    def __init__(self, error: Exception, request_id: str | None, client_index: int | None) -> None:
        self.error = error
        self.request_id = request_id
        self.client_index = client_index

    def __getattr__(self, name: str) -> Any:
        # Whatever preprocessing looks at first. `error` is set, so this cannot recurse.
        raise self.error


class BrokenCall(tuple[int, int, str, tuple[()]]):
    """What a decoder gives for a message that begins as a utility call and could not be decoded.

    Four values, as vLLM takes a call apart before it puts it on its queue, and all of them hashable: should the message have
    been sent as an abort, they are ids that no request has.
    """


# What a decoder gives for any other message that it could not decode. vLLM takes a utility call apart into four before it puts
# it on its queue, and reads an abort as a list of ids before this is looked at there: four ids that no request has.
DROPPED = tuple(f"fastmm: a message that could not be decoded ({n})" for n in range(4))


def is_core(frame_globals: dict[str, Any]) -> bool:
    """Is it the engine core's module that makes a decoder?"""
    return frame_globals.get("__name__") == CORE


def tolerant(decoder: Any) -> Any:
    """Derive the decoder of an engine core's input thread from any other."""

    class TolerantDecoder(decoder):  # type: ignore[misc]
        _tolerates = False  # until it is made

        def __init__(self, t: Any | None = None, share_mem: bool = True, oob_tensor_provider: Any = None) -> None:
            super().__init__(t, share_mem, oob_tensor_provider)
            self._requests = getattr(t, "__name__", "") == "EngineCoreRequest"
            self._tolerates = (t is None or self._requests) and prepare_core()
            fields = getattr(t, "__struct_fields__", ())
            self._client_index_position = fields.index("client_index") if self._requests else 0
            if self._tolerates and not self._requests:
                decode = self.decode
                self.__dict__["decode"] = lambda bufs: self._decode_as_asked(decode, bufs)

        def _decode_as_asked(self, decode: Any, bufs: Any) -> Any:
            message = decode(bufs)
            if type(message) is BrokenCall or message is DROPPED or not (wanted := misfit(message)):
                return message
            return self._tolerate(DecodeError(f"expected {wanted}"), bufs)

        def _tolerate(self, error: Exception, bufs: Any) -> Any:
            if not self._tolerates:
                raise error
            if self._requests:
                return Broken(error, *self._salvage(bufs))
            if (call := self._salvage_call(bufs)) is not None:
                return BrokenCall((*call, describe(error), ()))
            counters.add(counters.dropped)
            warn("dropped", "fastmm: a message that is no request could not be decoded and is dropped: %s", describe(error))
            return DROPPED

        if hasattr(decoder, "after_error"):  # fastmm's own: only a message that failed comes here

            def after_error(self, error: Exception, bufs: Any) -> Any:
                try:
                    return super().after_error(error, bufs)
                except Exception as final:
                    return self._tolerate(final, bufs)

        else:

            def decode(self, bufs: Any) -> Any:
                try:
                    return super().decode(bufs)
                except Exception as error:
                    return self._tolerate(error, bufs)

        def _salvage(self, bufs: Any) -> tuple[str | None, int | None]:
            main = main_frame(bufs)
            return (None, None) if main is None else salvage_request(main, self._client_index_position)

        def _salvage_call(self, bufs: Any) -> tuple[int, int] | None:
            main = main_frame(bufs)
            return None if main is None else salvage_call(main)

    TolerantDecoder.__name__ = TolerantDecoder.__qualname__ = "MsgpackDecoder"
    return TolerantDecoder


def main_frame(bufs: Any) -> memoryview | None:
    """The memory of a message's main frame; None where there is none."""
    try:
        return memoryview(bufs[0] if isinstance(bufs, (list, tuple)) else bufs)
    except Exception:  # no frame at all, or none that is memory
        return None


def misfit(message: Any) -> str | None:
    """What was expected, when a message that can be decoded is not of the kind that its type promises; else None.

    vLLM takes such a message apart in its input thread, or in its main loop, and either ends with it.
    """
    kind = type_being_read()
    if kind == "UTILITY":
        fits = type(message) is list and [type(part) for part in message] == [int, int, str, list]
        fits = fits and (message[2] != getattr(sys.modules[CORE], "FT_UTILITY_METHOD", None) or _is_repair(message[3]))
        return None if fits else "a utility call: client index, call id, method, arguments"
    if kind == "ABORT":
        fits = type(message) is list and all(type(part) is str for part in message)
        return None if fits else "an abort: a list of ids"
    if kind == "START_DP_WAVE":
        kinds = [type(part) for part in message] if type(message) is list else []
        return None if kinds in ([int, int], [int, type(None)]) else "a wave: its number and an engine's index"
    return "anything but this type, which is for the engine's own queue" if kind == "EXECUTOR_FAILED" else None


def _is_repair(arguments: list[Any]) -> bool:
    """Arguments of the one call that the input thread itself answers."""
    try:
        import_module("vllm.v1.fault_tolerance.engine_core_sentinel").FaultToleranceRequest(**arguments[0])
    except Exception:
        return False
    return True


def type_being_read() -> str:
    """The type of the message that vLLM's input thread is reading: it is in a variable there and nowhere else."""
    frame = sys._getframe(1)
    while frame.f_code.co_name != "process_input_sockets":
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return getattr(frame.f_locals.get("request_type"), "name", "")


def core_misfits(core: Any) -> list[str]:
    """What the engine core's module lacks of what this relies on."""
    names = ("_handle_request_preproc_error", "_handle_client_request", "_send_error_outputs_to_client")
    engine = getattr(core, "EngineCoreProc", None)
    if engine is None:
        return ["EngineCoreProc is missing"]
    lacks = [f"EngineCoreProc.{name} is missing" for name in names if not hasattr(engine, name)]
    if not hasattr(getattr(core, "EngineCoreRequestType", None), "WAKEUP"):
        lacks.append("EngineCoreRequestType.WAKEUP is missing")
    return lacks


def prepare_core() -> bool:
    """Teach the classes of the engine core what the two values above mean; False if they are not as expected."""
    core = sys.modules[CORE]
    if lacks := core_misfits(core):
        warn("core", "fastmm: a malformed message ends this engine's input thread, as in vLLM: %s", "; ".join(lacks))
        return False
    core.EngineCoreRequestType._missing_ = classmethod(_unknown_type)
    for engine in [value for value in vars(core).values() if isinstance(value, type) and value.__module__ == CORE]:
        for name, wrap in (("_handle_request_preproc_error", _answering), ("_handle_client_request", _dropping)):
            method = vars(engine).get(name)
            if method is not None and not hasattr(method, _SEEN):
                setattr(engine, name, wrap(method))
    return True


def _unknown_type(cls: Any, value: Any) -> Any:
    """A message of a type that does not exist is taken for one that says nothing."""
    counters.add(counters.dropped)
    warn("dropped", "fastmm: a message of an unknown type is dropped")
    return cls.WAKEUP


def _answering(method: Any) -> Any:
    def _handle_request_preproc_error(self: Any, request: Any) -> None:
        if type(request) is Broken:
            answer(self, request)
        elif not is_nobodys(self, sys.modules[CORE].EngineCoreRequestType.ADD, (request,)):
            method(self, request)

    setattr(_handle_request_preproc_error, _SEEN, True)
    return _handle_request_preproc_error


def _dropping(method: Any) -> Any:
    def _handle_client_request(self: Any, request_type: Any, request: Any) -> None:
        if type(request) is BrokenCall:
            fail_call(self, request_type, request)
        elif request is not DROPPED and not is_nobodys(self, request_type, request):
            method(self, request_type, request)

    setattr(_handle_client_request, _SEEN, True)
    return _handle_client_request


def is_nobodys(engine: Any, request_type: Any, request: Any) -> bool:
    """Whether a request or call is of a client that does not exist: what is sent to it ends vLLM's output thread."""
    try:
        known = len(engine.addresses.outputs)
        if request_type.name == "UTILITY":
            client_index = request[0]
        elif request_type.name == "ADD":
            client_index = request[0].client_index
        else:
            return False
        if 0 <= client_index < known:
            return False
    except (AttributeError, TypeError, IndexError):  # an engine without clients, or of another make
        return False
    counters.add(counters.dropped)
    warn("dropped", "fastmm: a message of client %d is dropped: there are %d", client_index, known)
    return True


def answer(engine: Any, broken: Broken) -> None:
    """Tell the client of a broken request that it has failed; where that cannot be done, only the log."""
    reason = describe(broken.error)
    if broken.request_id is None:
        counters.add(counters.dropped)
        warn("dropped", "fastmm: a request that could not be decoded is dropped, its id cannot be read: %s", reason)
        return
    counters.add(counters.answered)
    warn("answered", "fastmm: request %.200r could not be decoded and is answered as failed: %s", broken.request_id, reason)
    for client_index in _clients(engine, broken.client_index):
        engine._send_error_outputs_to_client([broken.request_id], client_index)


def fail_call(engine: Any, request_type: Any, call: BrokenCall) -> None:
    """Tell the caller of a broken utility call that it has failed; it waits for an answer."""
    from vllm.v1.engine import EngineCoreOutputs, UtilityOutput

    client_index, call_id, reason, _ = call
    if request_type.name != "UTILITY" or client_index >= len(engine.addresses.outputs):
        counters.add(counters.dropped)
        warn("dropped", "fastmm: a message that is no request could not be decoded and is dropped: %s", reason)
        return
    counters.add(counters.answered)
    warn("answered", "fastmm: a utility call could not be decoded and is answered as failed: %s", reason)
    failure = UtilityOutput(call_id, failure_message=f"the call could not be decoded: {reason}")
    engine.output_queue.put_nowait((client_index, EngineCoreOutputs(utility_output=failure)))


def _clients(engine: Any, client_index: int | None) -> range | tuple[int]:
    """Whom to tell: the client named in the message, or all: the others do not know the id, and pass it over."""
    try:
        known = len(engine.addresses.outputs)
    except AttributeError:
        known = 1
    if client_index is not None and client_index < known:
        return (client_index,)
    if client_index is not None:
        logger.debug("fastmm: client %d of a broken request does not exist", client_index)
    return range(known)

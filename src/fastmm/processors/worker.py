"""What runs on a worker: a processor made ready once, and one request after the other through it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import traceback
import types
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from .. import errors, shm
from ..errors import FastmmError, ProcessorError
from .carry import Carrier, Parcel
from .casting import cast_result
from .contract import Budgets, Work
from .words import error_text

__all__ = ["Again", "Failure", "Spec", "load_both", "mark_of", "serve"]

_FACTORIES = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_log = logging.getLogger("fastmm")
_KEPT_MAX = 8  # processors of one process: those of pools that are gone make room


def load_both(processor: Any, tokenizer: Any) -> tuple[Any, Any]:
    """The default of ``load=``: what a pool was given becomes a processor and a tokenizer, once per process.

    A processor may be given as such, as the name of an entry point of ``fastmm.processors``, or as a class or function
    without arguments that makes one where it will run; a tokenizer as such, or as a class or function.
    """
    if isinstance(processor, str):
        from .registry import load_processor

        processor = load_processor(processor)
    elif isinstance(processor, _FACTORIES):
        processor = processor()
    if isinstance(tokenizer, _FACTORIES):
        tokenizer = tokenizer()
    if not callable(getattr(processor, "process", None)) or not hasattr(processor, "schema"):
        raise ProcessorError(f"expected a processor with a schema and process(), got {type(processor).__name__}")
    return processor, tokenizer


@dataclass(frozen=True)
class Spec:
    """What a worker must know once. It crosses by the executor's own means, so what is in it must be importable there."""

    key: str  # of the pool
    processor: Any
    tokenizer: Any
    budgets: Budgets | None
    dtype: str | None
    load: Callable[[Any, Any], tuple[Any, Any]]
    run: Callable[..., Any]
    carrier: Carrier
    host: str  # of the pool: a worker with the same one shares its memory


@dataclass(frozen=True)
class Failure:
    """An exception as plain data: exceptions themselves may not survive the way to another process, or break it."""

    name: str  # of the class in fastmm.errors
    message: str
    state: dict[str, Any]
    traceback: str

    def error(self) -> FastmmError:
        cls = getattr(errors, self.name, ProcessorError)
        found: FastmmError = cls(self.message)
        found.__dict__.update(self.state)
        found.__cause__ = WorkerTraceback(self.traceback)
        return found


class WorkerTraceback(Exception):
    """The text of a traceback in another process, shown as the cause of the error that came from there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Again:
    """The worker lacks something: send the request once more, with the pool's ``"spec"`` or with the ``"work"`` inline."""

    lacks: str


@dataclass(frozen=True)
class Raw:
    """The executor runs in the pool's own process: the result itself."""

    result: Any


class _Loaded:
    """A pool's processor in this process. Requests that come while it is being made wait for it."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.same_host = spec.host == shm.host_key(spec.carrier.directory)
        self._lock = threading.Lock()
        self._both: tuple[Any, Any] | None = None

    def both(self) -> tuple[Any, Any]:
        with self._lock:
            if self._both is None:
                self._both = self.spec.load(self.spec.processor, self.spec.tokenizer)
            return self._both


_loaded: OrderedDict[str, _Loaded] = OrderedDict()
_lock = threading.Lock()


def _known(key: str, spec: Spec | None) -> _Loaded | None:
    with _lock:
        found = _loaded.get(key)
        if found is None and spec is not None:
            found = _loaded[key] = _Loaded(spec)
            while len(_loaded) > _KEPT_MAX:
                _loaded.popitem(last=False)
        elif found is not None:
            _loaded.move_to_end(key)
        return found


def as_failure(error: BaseException) -> Failure:
    """Plain data of an exception; what is not one of fastmm's becomes a `ProcessorError` that names it."""
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-8000:]
        text = text.encode("utf-8", "backslashreplace").decode()
    except BaseException:  # it calls code of the exception, which may do anything
        text = "(its traceback cannot be written)"
    if isinstance(error, FastmmError) and isinstance(error.message, str):
        name = next((cls.__name__ for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls), "FastmmError")
        state = {k: v for k, v in vars(error).items() if v is None or type(v) in (str, int, float, bool)}
        return Failure(name, error.message, state, text)
    return Failure("ProcessorError", error_text(error), {}, text)


def mark_of(reply: str) -> str:
    """How a worker says that it has begun: a symbolic link to the name of its process, made and read in one call each."""
    return f"{reply}.run"


def serve(key: str, spec: Spec | None, parcel: Parcel | Work, reply: str, pool: str) -> Parcel | Failure | Again | Raw:
    """One request. Raises nothing: whatever goes wrong is the answer.

    Parameters
    ----------
    key, spec
        Of the pool; the second only where the worker has not seen it.
    parcel
        The work.
    reply
        The name of the segment that the result goes into. The pool made it, knows it, and removes it if need be.
    pool
        The pool's process: there, nothing needs to be packed.
    """
    known = _known(key, spec)
    if known is None:
        return Again("spec")
    spec = known.spec
    if isinstance(parcel, Parcel) and parcel.name is not None and not known.same_host:
        return Again("work")
    mark = os.path.join(spec.carrier.directory, mark_of(reply)) if known.same_host else None
    try:
        processor, tokenizer = known.both()
        if mark is not None:  # from here on it is the request's time, and its fault
            with contextlib.suppress(OSError):
                os.symlink(shm.process_key(), mark)
        work = spec.carrier.unpack(parcel) if isinstance(parcel, Parcel) else parcel
        result = spec.run(processor, work, tokenizer, budgets=spec.budgets)
        if spec.dtype is not None:
            result = cast_result(result, spec.dtype)
        if pool == shm.process_key():
            return Raw(result)
        return spec.carrier.pack(result, name=reply, shared=known.same_host)
    except BaseException as error:
        return as_failure(error)
    finally:
        if mark is not None:
            with contextlib.suppress(OSError):
                os.unlink(mark)


# --- processes that a pool started ------------------------------------------------------------------------------------


def pin(cpus: Collection[int] | None) -> None:
    """Bind the calling thread, and what it starts, to some CPUs; where the system refuses that, the worker works without."""
    if cpus is None or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cpus)
    except Exception:
        _log.exception("a worker cannot be bound to its CPUs; it works without")


def begin_process(spec: Spec, cpus: Collection[int] | None) -> None:
    """The initializer of a process: it must not outlive its parent, which an executor alone does not see to."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), name="fastmm-parent", daemon=True).start()
    pin(cpus)
    _known(spec.key, spec)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def ready(key: str) -> int | Failure:
    """Make the processor; the pid where that worked. The pool waits for it, so that no request's time is spent on it."""
    try:
        known = _known(key, None)
        assert known is not None
        known.both()
    except BaseException as error:
        return as_failure(error)
    return os.getpid()

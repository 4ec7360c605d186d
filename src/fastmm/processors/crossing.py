"""One request's trip to a worker in another process and back, and what is known of it when that process is gone."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any

from .. import shm
from ..errors import ExtensionError, ProcessorDied, ProcessorError
from . import executors, worker
from .carry import Carrier, Parcel
from .contract import Budgets, Work, changed

__all__ = ["Crossing", "Resend", "Trip"]

_TRIES = 5  # sends of one request whose worker never began, before the executor is at fault


class Resend(Exception):
    """The request must be sent once more; its trip knows with what."""


class Trip:
    """What one request has out in the world."""

    __slots__ = ("lacks", "parcel", "reply", "tries")

    def __init__(self) -> None:
        self.tries = 0
        self.lacks: set[str] = set()  # what its worker asked for
        self.parcel: Parcel | None = None
        self.reply = ""  # the name that its result's segment will have

    @property
    def exhausted(self) -> bool:
        return self.tries >= _TRIES


def _with_text_hashes(work: Work) -> Work:
    """The caller's hashes are never a reason to refuse: what is no text is malformed, and need not cross to be found so."""
    if work.hashes is None:
        return work
    listed = isinstance(work.hashes, (list, tuple))
    return changed(work, hashes=[value if type(value) is str else "" for value in work.hashes] if listed else "")


class Crossing:
    """Sends work through an executor whose workers are elsewhere. Any thread may use it."""

    def __init__(
        self,
        processor: Any,
        tokenizer: Any,
        budgets: Budgets | None,
        dtype: str | None,
        load: Callable[[Any, Any], tuple[Any, Any]],
        run: Callable[..., Any],
        carrier: Carrier,
    ) -> None:
        self.carrier = carrier
        self.directory = carrier.directory
        key, host = secrets.token_hex(8), shm.host_key(self.directory)
        self.spec = worker.Spec(key, processor, tokenizer, budgets, dtype, load, run, carrier, host)
        self._shared = True  # until a worker says that it is on another machine
        with contextlib.suppress(OSError):
            shm.sweep(self.directory)

    def send(self, trip: Trip, work: Work, executor: Executor) -> Future[Any]:
        """Pack a request and hand it over. Raises what the executor or the carrier does; `discard` then."""
        trip.tries += 1
        trip.reply = shm.new_name()
        try:
            trip.parcel = self.carrier.pack(_with_text_hashes(work), shared=self._shared and "work" not in trip.lacks)
        except ProcessorError as error:
            if not (error.path or "").startswith("$.extensions"):
                raise
            raise ExtensionError(f"invalid processor extensions: {error.message}", path=error.path) from None
        spec = self.spec if "spec" in trip.lacks else None
        return executor.submit(worker.serve, self.spec.key, spec, trip.parcel, trip.reply, shm.process_key())

    def result(self, trip: Trip, reply: Any) -> Any:
        """What a worker's reply holds.

        Raises
        ------
        Resend
            It lacks something.
        FastmmError
            The request failed there, or its result cannot be read.
        """
        if isinstance(reply, Parcel):
            return self.carrier.unpack(reply)
        if isinstance(reply, worker.Raw):
            return reply.result
        if isinstance(reply, worker.Again) and not trip.exhausted:
            if reply.lacks == "work":
                self._shared = False
            trip.lacks.add(reply.lacks)
            raise Resend
        if isinstance(reply, worker.Failure):
            raise reply.error()
        raise ProcessorDied(f"the executor's workers forget what they are sent: {reply!r}")

    def discard(self, trip: Trip) -> None:
        """Remove whatever a request has in shared memory that nobody will read. Harmless at any time."""
        self.carrier.discard(trip.parcel)
        trip.parcel = None
        if trip.reply:
            shm.unlink(trip.reply, directory=self.directory)
            shm.unlink(worker.mark_of(trip.reply), directory=self.directory)

    def was_lost(self, trip: Trip, alone: bool) -> bool:
        """Whether a request was at work in a process that is gone; `alone`: the executor has no other.

        Asked as soon as an executor says that it broke, which is before it ends its other processes.
        """
        process = self._process(trip)
        # Not begun, or done and the result not read: either way nothing is lost by doing it again.
        return process is not None and (alone or executors.pid_of(process) is None)

    def elapsed(self, trip: Trip, executor: Executor) -> float | None:
        """Seconds since a worker began with a request; None: none has, as when its executor is only starting its processes.
        Infinite where nobody can know."""
        try:
            begun = os.lstat(os.path.join(self.directory, worker.mark_of(trip.reply))).st_mtime
        except OSError:
            return None if isinstance(executor, ProcessPoolExecutor) else math.inf
        return time.time() - begun

    def pid(self, trip: Trip) -> int | None:
        """The process that a request is at work in, where it can be named from here and is not this one."""
        process = self._process(trip)
        pid = None if process is None else executors.pid_of(process)
        return None if pid == os.getpid() else pid

    def _process(self, trip: Trip) -> str | None:
        try:
            return os.readlink(os.path.join(self.directory, worker.mark_of(trip.reply)))
        except OSError:
            return None

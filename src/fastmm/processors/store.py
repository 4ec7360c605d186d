"""Where results wait for whoever sends them to the engine: parked once, taken once."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import DuplicateRequest, ProcessorError, ProcessorOverloaded
from .contract import Processed

__all__ = ["ResultStore", "result_nbytes"]

_MAX_DEPTH = 32


def result_nbytes(result: Any) -> int:
    """Bytes of all tensors and byte strings in a result, found in dataclasses, mappings and sequences.

    What has an ``nbytes`` is asked for it. Ids and text are not counted: they are small beside what a bound is for.
    """
    if type(result) is Processed:  # the usual one, without a look at what holds no bytes
        nbytes = 0
        for item in result.items:
            if item.placeholder is not None:
                nbytes += _nbytes(item.placeholder, 1)
            for mapping in (item.features, item.model_data):
                for value in mapping.values():
                    found = getattr(value, "nbytes", None)
                    nbytes += found if type(found) is int else _nbytes(value, 1)
        return nbytes
    return _nbytes(result, 0)


def _nbytes(value: Any, depth: int) -> int:
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if value is None or isinstance(value, (bool, int, float, str)):
        return 0
    if isinstance(value, (bytes, bytearray)):
        return len(value)
    if depth == _MAX_DEPTH:
        return 0
    if isinstance(value, Mapping):
        return sum(_nbytes(item, depth + 1) for item in value.values())
    if isinstance(value, (list, tuple)):
        # The ids of a prompt are ints from end to end: asking the first and the last is enough.
        if value and type(value[0]) is int and type(value[-1]) is int:
            return 0
        return sum(_nbytes(item, depth + 1) for item in value)
    fields = getattr(value, "__dataclass_fields__", ())
    return sum(_nbytes(getattr(value, name), depth + 1) for name in fields)


class _Entry(NamedTuple):
    result: Any
    nbytes: int
    expires: float


class ResultStore:
    """Results by request id, bounded in number, bytes and time. Any thread may call any method.

    Parameters
    ----------
    max_entries
        As many results at once.
    max_nbytes
        As many bytes of tensors at once; None for no bound.
    ttl
        Seconds after which a result that nobody took is let go; None: never. No thread watches: whatever is called next
        lets go of what is too old, and `expire` does only that.
    size
        ``size(result) -> int``, the bytes a result counts for.
    clock
        Monotonic seconds.

    Attributes
    ----------
    counters
        ``entries`` and ``nbytes`` now, ``peak_nbytes``; so far: ``parked``, ``taken``, ``purged``, ``expired``, ``drained``,
        ``duplicates`` and ``overflows`` (both refused).
    """

    def __init__(
        self,
        max_entries: int = 65536,
        max_nbytes: int | None = 8 << 30,
        ttl: float | None = 300.0,
        *,
        size: Callable[[Any], int] = result_nbytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("max_entries", max_entries), ("max_nbytes", max_nbytes)):
            if value is None and name == "max_nbytes":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ProcessorError(f"expected an int of at least 0, got {value!r}", path=f"ResultStore.{name}")
        if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not ttl > 0):
            raise ProcessorError(f"expected seconds above 0 or None, got {ttl!r}", path="ResultStore.ttl")
        self.max_entries = max_entries
        self.max_nbytes = max_nbytes
        self.ttl = ttl
        self._size = size
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the oldest, which expires first, comes first
        self._nbytes = 0
        self._counts = dict.fromkeys(
            ("peak_nbytes", "parked", "taken", "purged", "expired", "drained", "duplicates", "overflows"), 0
        )

    def park(self, rid: str, result: Any) -> None:
        """Keep a result until it is taken.

        Raises
        ------
        DuplicateRequest
            A result of this id is parked; that one stays.
        ProcessorOverloaded
            There is no room. Nothing was parked.
        """
        if result is None:
            raise ProcessorError("expected a result, got None, which is what take() gives where there is none")
        nbytes = self._size(result)
        with self._lock:
            gone = self._expired()
            counts = self._counts
            if rid in self._entries:
                counts["duplicates"] += 1
                refusal: ProcessorError = DuplicateRequest(f"a result of request {rid!r} is parked")
            elif len(self._entries) >= self.max_entries:
                counts["overflows"] += 1
                refusal = ProcessorOverloaded(f"the store is full: {self.max_entries} results wait to be taken")
            elif self.max_nbytes is not None and self._nbytes + nbytes > self.max_nbytes:
                counts["overflows"] += 1
                refusal = ProcessorOverloaded(
                    f"the store is full: {nbytes} bytes more than {self._nbytes} would pass {self.max_nbytes}"
                )
            else:
                expires = float("inf") if self.ttl is None else self._clock() + self.ttl
                self._entries[rid] = _Entry(result, nbytes, expires)
                self._nbytes += nbytes
                counts["parked"] += 1
                counts["peak_nbytes"] = max(counts["peak_nbytes"], self._nbytes)
                return
        del gone  # outside the lock: what lets go of memory may run for long, or come back here
        raise refusal

    def take(self, rid: str) -> Any | None:
        """The result of this id, which is the caller's from now on; None where there is none (any more)."""
        return self._remove(rid, "taken")

    def purge(self, rid: str) -> bool:
        """Let go of a result that nobody will take. Whether there was one."""
        return self._remove(rid, "purged") is not None

    def _remove(self, rid: str, how: str) -> Any | None:
        with self._lock:
            gone = self._expired()
            entry = self._entries.pop(rid, None)
            if entry is not None:
                self._nbytes -= entry.nbytes
                self._counts[how] += 1
        del gone
        return None if entry is None else entry.result

    def expire(self) -> int:
        """Let go of what is older than `ttl`; how many that were."""
        with self._lock:
            gone = self._expired()
        return len(gone)

    def drain(self) -> dict[str, Any]:
        """All results by id, oldest first, taken at once. The store is empty then, and goes on."""
        with self._lock:
            gone = self._expired()
            entries, self._entries = self._entries, OrderedDict()
            self._nbytes = 0
            self._counts["drained"] += len(entries)
        del gone
        return {rid: entry.result for rid, entry in entries.items()}

    def _expired(self) -> list[_Entry]:
        """Takes out what is too old, under the lock; the caller drops it when it has let go of that."""
        gone: list[_Entry] = []
        if self.ttl is None or not self._entries:
            return gone
        now = self._clock()
        while self._entries:
            rid, entry = next(iter(self._entries.items()))
            if entry.expires > now:
                break
            del self._entries[rid]
            self._nbytes -= entry.nbytes
            gone.append(entry)
        self._counts["expired"] += len(gone)
        return gone

    @property
    def counters(self) -> dict[str, int]:
        with self._lock:
            return {"entries": len(self._entries), "nbytes": self._nbytes, **self._counts}

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def __contains__(self, rid: object) -> bool:
        with self._lock:
            entry = self._entries.get(rid)  # type: ignore[call-overload]
            return entry is not None and (self.ttl is None or entry.expires > self._clock())

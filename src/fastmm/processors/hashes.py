"""The caller's own content hashes, put in the place of those a processor computed."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

from .contract import Processed, Work

__all__ = ["apply_caller_hashes", "caller_hash"]

log = logging.getLogger("fastmm.processors")

_HEX = re.compile(r"(?:0[xX])?([0-9a-fA-F]+)")
_DIGITS = 16  # 64 bits


def caller_hash(value: Any) -> str | None:
    """The low 64 bits of a hash in hex, of any width and with or without ``0x``, as 16 digits; None where it is malformed."""
    match = _HEX.fullmatch(value) if isinstance(value, str) else None
    return match[1][-_DIGITS:].lower().zfill(_DIGITS) if match else None


def apply_caller_hashes(work: Work, processed: Processed) -> Processed:
    """Give the items of `processed` the hashes that came with `work`.

    A caller's hash is advice: what cannot be used is warned of in the log ``fastmm.processors``, and never refused. A wrong
    number of hashes changes nothing, and a malformed one leaves the computed one in its place.

    Parameters
    ----------
    work
        As the caller gave it: its hashes are for its images, videos and audios, in this order.
    processed
        Validated: its first items are those of the media. It is not written to.

    Returns
    -------
    Processed
        The very same object where nothing changes.
    """
    hashes = work.hashes
    if hashes is None:
        return processed
    if not isinstance(hashes, (list, tuple)):
        log.warning("request %r: hashes are a %s and no list: the computed ones stay", work.request_id, type(hashes).__name__)
        return processed
    if not hashes:
        return processed
    n = len(work.media)
    if len(hashes) != n:
        log.warning("request %r: %d hashes for %d media items: the computed ones stay", work.request_id, len(hashes), n)
        return processed
    items = list(processed.items)
    for i, given in enumerate(hashes):
        found = caller_hash(given)
        if found is None:
            log.warning("request %r: the hash of item %d is not hexadecimal: the computed one stays", work.request_id, i)
        else:
            items[i] = replace(items[i], hash=found)
    return replace(processed, items=tuple(items))

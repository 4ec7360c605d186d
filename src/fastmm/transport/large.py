"""Which requests may hold up an event loop."""

from __future__ import annotations

from typing import Any

__all__ = ["INLINE_NBYTES", "is_large"]

# Requests with more payload than this are encoded, and cast, in a thread.
INLINE_NBYTES = 1 << 20
# A request with more items than this counts as large without a look at each.
_INLINE_ITEMS = 128
# Prompt ids count as so many bytes: a list of them takes as long to encode as that much payload or more.
_TOKEN_NBYTES = 4


def is_large(request: Any, inline_nbytes: int = INLINE_NBYTES) -> bool:
    """Whether encoding a request may take long enough to hold up an event loop: more than so much payload."""
    try:
        nbytes = 0 if request.prompt_embeds is None else _nbytes(request.prompt_embeds)
        if nbytes <= inline_nbytes:
            prompt = request.prompt_token_ids
            if prompt is not None and len(prompt) * _TOKEN_NBYTES > inline_nbytes:
                return True
        features = request.mm_features
        if features:
            if len(features) > _INLINE_ITEMS:
                return True
            for feature in features:
                if feature.data:
                    for elem in feature.data.values():
                        nbytes += _nbytes(elem.data)
                    if nbytes > inline_nbytes:
                        return True
        return nbytes > inline_nbytes
    except (AttributeError, TypeError):  # not what it should be: the encoder says how
        return False


def _nbytes(payload: Any) -> int:
    if type(payload) in (list, tuple):
        return sum(map(_nbytes, payload))
    nbytes = getattr(payload, "nbytes", 8)
    return nbytes if isinstance(nbytes, int) else 8

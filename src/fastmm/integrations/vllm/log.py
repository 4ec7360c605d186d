"""One logger for the integration, and messages that cannot fill a disk or leak a payload."""

from __future__ import annotations

import logging
import traceback

# Below vLLM's own logger, so that it goes where vLLM's lines go and looks like them.
logger = logging.getLogger("vllm.fastmm")

FIRST = 20  # a message of one kind is logged so often in full, then at each power of ten
_times: dict[str, int] = {}


def warn(kind: str, text: str, *arguments: object) -> None:
    """Log a warning of one kind: the first few, then the thousandth, the ten thousandth and so on."""
    times = _times[kind] = _times.get(kind, 0) + 1
    if times <= FIRST:
        logger.warning(text, *arguments)
    elif str(times).rstrip("0") == "1":
        logger.warning(text + " (%d times so far)", *arguments, times)


def describe(error: BaseException) -> str:
    """An error in words that carry no payload: its text only where its maker promises that."""
    import msgspec

    from fastmm.errors import FastmmError

    name = type(error).__name__
    if isinstance(error, (FastmmError, msgspec.MsgspecError)):
        return f"{name}: {str(error)[:300]}"
    return name


def where(error: BaseException) -> str:
    """The innermost lines that an error came through: source, no values."""
    return "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-4:])).rstrip()

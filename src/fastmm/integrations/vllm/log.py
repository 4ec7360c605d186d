"""One logger for the integration, and messages that cannot fill a disk or leak a payload."""

from __future__ import annotations

import logging
import re
import traceback

# Below vLLM's own logger, so that it goes where vLLM's lines go and looks like them.
logger = logging.getLogger("vllm.fastmm")

FIRST = 20  # a message of one kind is logged so often in full, then at each power of ten
_times: dict[str, int] = {}
_QUOTED = re.compile(r"""'((?:[^'\\]|\\.)*)'?|"(?:[^"\\]|\\.)*"?""", re.DOTALL)
_QUOTED_AS_IS = re.compile(r"'.*'|'.*$", re.DOTALL)  # by msgspec, which leaves quotes in a value as they are
_HIDDEN = "'...'"
_NAME = re.compile(r"[\w.<>|=\\-]{0,40}")


def warn(kind: str, text: str, *arguments: object) -> None:
    """Log a warning of one kind: the first few, then the thousandth, the ten thousandth and so on."""
    times = _times[kind] = _times.get(kind, 0) + 1
    if times <= FIRST:
        logger.warning(text, *arguments)
    elif str(times).rstrip("0") == "1":
        logger.warning(text + " (%d times so far)", *arguments, times)


def describe(error: BaseException) -> str:
    """An error in words that carry no payload: its text only where its maker promises that.

    A name that a message brought (of a dtype, of a field) may stand in it when it looks like one; a value may not, which is
    what msgspec puts between quotes.
    """
    import msgspec

    from fastmm.errors import FastmmError

    name = type(error).__name__
    promised = (FastmmError, msgspec.MsgspecError)
    if isinstance(error, FastmmError):
        if error.__cause__ is not None and not isinstance(error.__cause__, promised):  # whose text may be in this one's
            return f"{name} for a {type(error.__cause__).__name__}"
        return f"{name}: {_QUOTED.sub(_only_names, str(error)[:300])}"
    if isinstance(error, promised):
        return f"{name}: {_QUOTED_AS_IS.sub(_HIDDEN, str(error))[:300]}"
    return name


def _only_names(quoted: re.Match[str]) -> str:
    return quoted[0] if quoted[1] is not None and _NAME.fullmatch(quoted[1]) else _HIDDEN


def where(error: BaseException) -> str:
    """The innermost lines that an error came through: source, no values."""
    return "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-4:])).rstrip()

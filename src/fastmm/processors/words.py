"""What errors say of values and of other errors, whatever these are."""

from __future__ import annotations

from typing import Any

__all__ = ["error_text", "is_text", "kind_of"]

_MESSAGE_CHARS = 500


def error_text(error: BaseException) -> str:
    """The class and the message of an exception that is not ours: cut, printable, and never an exception itself."""
    name = type(error).__name__
    try:
        message = str(error)
        shown = message if len(message) <= _MESSAGE_CHARS else f"{message[:_MESSAGE_CHARS]}..."
        return f"{name}: {shown.encode('utf-8', 'backslashreplace').decode()}"
    except BaseException:  # a message is made by code of the exception, which may do anything
        return f"{name} (its message cannot be read)"


def kind_of(value: Any) -> str:
    """What came, without its content."""
    if value is None:
        return "None"
    return "an empty str" if isinstance(value, str) and not value else f"a {type(value).__name__}"


def is_text(value: Any) -> bool:
    """Whether a value is a str that is not empty and that the wire can carry: half a surrogate pair it cannot."""
    if not isinstance(value, str) or not value:
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True

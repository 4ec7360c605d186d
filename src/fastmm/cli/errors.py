"""How a command says that it cannot go on."""

from __future__ import annotations


class CommandError(Exception):
    """One line for the user: what is wrong and what to do.

    Parameters
    ----------
    message
        The line, without the program's name.
    exit_code
        2 where the command was given something it cannot use, 1 where it was not and failed all the same.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code

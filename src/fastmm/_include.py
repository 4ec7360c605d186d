"""Where fastmm's C headers are, for extensions that compile against them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["get_include"]


def get_include() -> str:
    """Directory to give a C compiler so that ``#include <fastmm/status.h>`` is found.

    Returns
    -------
    str
        ``fastmm/include`` of an installed wheel, or ``include`` of the checkout for an editable install.

    Raises
    ------
    FileNotFoundError
        When the headers are in neither place: the package was copied by hand and is not whole.
    """
    package = Path(__file__).resolve().parent
    for candidate in (package / "include", package.parent.parent / "include"):
        if (candidate / "fastmm").is_dir():
            return str(candidate)
    raise FileNotFoundError(f"fastmm's C headers are not beside {package}; install fastmm again")

"""The command ``fastmm``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

import fastmm

from . import demo, doctor, inspect
from .errors import CommandError

__all__ = ["main"]

COMMANDS = {
    "demo": (demo, "send a photograph to a second process and paint it back there"),
    "doctor": (doctor, "say what this machine has, and try a small request"),
    "inspect": (inspect, "show the structure of stored frames"),
}


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog="fastmm", description="Multimodal requests into an LLM engine's process, on vLLM's own wire, without copies."
    )
    whole.add_argument("--version", action="version", version=f"fastmm {fastmm.__version__}")
    commands = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, line) in COMMANDS.items():
        command = commands.add_parser(name, help=line)
        module.add_arguments(command)
        command.set_defaults(run=module.run, name=name)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns
    -------
    int
        The exit code: 0 when all is well, 1 when the work failed, 2 when the command was given what it cannot use.
    """
    arguments = parser().parse_args(argv)
    logging.getLogger("fastmm").addHandler(logging.NullHandler())  # what goes wrong ends in one line, below
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except CommandError as error:
        print(f"fastmm {arguments.name}: {error}", file=sys.stderr)
        return error.exit_code
    except fastmm.FastmmError as error:
        print(f"fastmm {arguments.name}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output (head, a pager) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130

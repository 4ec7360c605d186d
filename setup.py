"""Builds fastmm's compiled core.  Everything declarative lives in pyproject.toml.

Three things need code:

* every ``src/fastmm/_native/<name>.pyx`` is one extension module, ``fastmm._native.<name>``;
* every ``src/fastmm/_native/c/*.c`` is linked into exactly one of them (see ``OWNERS``), so that no table of kernels and no
  static state exists twice in a process;
* ``include/fastmm`` is copied into the wheel as ``fastmm/include/fastmm``.  Mapping it through ``package_dir`` would break
  editable installs.

``FASTMM_SANITIZE=address,undefined`` builds with those sanitizers (``make asan``).  ``FASTMM_ONLY=cast,tensor`` builds just
those (``none``: not one), for a developer whose other modules do not compile at the moment.  ``FASTMM_WERROR=1`` makes
warnings errors.  There is no ``-march=native``: the kernels choose their instruction set with target attributes, and the
CPU is asked at run time.
"""

from __future__ import annotations

import os
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

# Relative to the root: setuptools wants it so, an sdist made of absolute paths can be built on one machine only.
NATIVE = Path("src/fastmm/_native")
HEADERS = Path("include/fastmm")

# Which extension links a C file: the first pattern that matches its name wins.  A file named ``<extension>_<something>.c``
# needs no row of its own.
OWNERS = (
    ("cpu*.c", "cast"),
    ("registry*.c", "cast"),
    ("cast_*.c", "cast"),
    ("pack_ids*.c", "walk"),
    ("memory_kind*.c", "tensor"),
    ("unpack_ids*.c", "decode_ids"),
)


def owner_of(c_file: Path, extensions: set[str]) -> str:
    """The extension that links ``c_file``; a file nobody links is a mistake, so it is an error."""
    for pattern, extension in OWNERS:
        if fnmatchcase(c_file.name, pattern):
            return extension
    prefix = max((name for name in extensions if c_file.name.startswith(name + "_")), key=len, default=None)
    if prefix is None:
        raise SystemExit(f"setup.py: no extension links {c_file}; name it <extension>_*.c or give it a row in OWNERS")
    return prefix


def flags() -> tuple[list[str], list[str]]:
    compile_args = [
        "-std=gnu11",
        "-O3",
        "-g1",
        "-fvisibility=hidden",
        "-ffp-contract=off",  # a fused multiply-add would round once where the casts' contract rounds twice
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-Wno-missing-field-initializers",
        "-Wno-cast-function-type",  # Cython casts every METH_FASTCALL function
    ]
    link_args: list[str] = []
    sanitizers = os.environ.get("FASTMM_SANITIZE")
    if sanitizers:
        compile_args += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g"]
        link_args += [f"-fsanitize={sanitizers}"]
    if os.environ.get("FASTMM_WERROR"):
        compile_args.append("-Werror")
    return compile_args, link_args


def extensions() -> list[Extension]:
    modules = {pyx.stem: pyx for pyx in sorted(NATIVE.glob("*.pyx"))}
    linked: dict[str, list[str]] = {name: [] for name in modules}
    for c_file in sorted((NATIVE / "c").glob("*.c")):
        linked.setdefault(owner_of(c_file, set(modules)), []).append(str(c_file))
    # A changed header or .pxd rebuilds every extension: cheap, and never wrong.
    depends = sorted(str(p) for pattern in ("*.h", "*.pxd", "c/*.h") for p in NATIVE.glob(pattern))
    depends += sorted(map(str, HEADERS.glob("*.h")))
    compile_args, link_args = flags()
    only = os.environ.get("FASTMM_ONLY")
    wanted = set(only.split(",")) - {"none"} if only else set(modules)
    if not wanted <= set(modules):
        raise SystemExit(f"setup.py: FASTMM_ONLY={only}, but there is no such module; there are {sorted(modules)}")
    return [
        Extension(
            f"fastmm._native.{name}",
            [str(pyx), *linked[name]],
            include_dirs=["include", str(NATIVE / "c"), numpy.get_include()],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
            extra_compile_args=compile_args,
            extra_link_args=link_args,
            depends=depends,
        )
        for name, pyx in modules.items()
        if name in wanted
    ]


class BuildPyWithHeaders(build_py):
    """Puts the C headers beside the package in a wheel.  An editable install reads them from the checkout."""

    def _headers(self) -> dict[str, str]:
        if getattr(self, "editable_mode", False):
            return {}
        target = Path(self.build_lib, "fastmm", "include", "fastmm")
        return {str(target / header.name): str(header) for header in sorted(HEADERS.glob("*.h"))}

    def run(self) -> None:
        super().run()
        for target, source in self._headers().items():
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._headers()]

    def get_output_mapping(self) -> dict[str, str]:
        return {**super().get_output_mapping(), **self._headers()}


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent)
    setup(
        ext_modules=cythonize(
            extensions(),
            build_dir=os.environ.get("FASTMM_CYTHON_DIR", "build/cython"),
            include_path=["src"],
            compiler_directives={"language_level": "3", "binding": True, "auto_pickle": False},
        ),
        cmdclass={"build_py": BuildPyWithHeaders},
    )

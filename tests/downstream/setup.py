"""Builds an extension that stands on fastmm's headers and .pxd files, as somebody else's package would."""

from Cython.Build import cythonize
from setuptools import Extension, setup

import fastmm

setup(
    name="downstream",
    ext_modules=cythonize(
        [
            Extension(
                "downstream", ["downstream.pyx"], include_dirs=[fastmm.get_include()], extra_compile_args=["-Werror=implicit"]
            )
        ]
    ),
)

"""Builds the native CPU kernel, a plain shared library beside ``ahop_layers/ops/cpu.py``, where there is a C compiler.

``AHOP_CFLAGS`` adds compiler and linker flags. Everything else about the package stands in pyproject.toml.
"""

import os
import shlex
import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = [
    *("-std=gnu11", "-O3", "-g0", "-funroll-loops", "-pthread"),
    "-fno-schedule-insns",  # reordered before registers are assigned, a network needs more of them than there are
    *shlex.split(os.environ.get("AHOP_CFLAGS", "")),
]


class BuildKernel(build_ext):
    """An extension without a Python module in it; that it cannot be built is no reason not to install."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            self.warn(f"the native CPU kernel was not built, plain PyTorch will serve instead: {error}")
            self.extensions.clear()


class PlatformWheel(bdist_wheel):
    """One wheel for every Python version of a platform: ctypes loads the library."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


kernel = Extension(
    "ahop_layers.ops._footprint",
    ["ahop_layers/ops/footprint.c"],
    depends=["ahop_layers/ops/footprint_impl.h"],
    extra_compile_args=FLAGS,
    extra_link_args=FLAGS,
)
setup(
    ext_modules=[] if sys.platform == "win32" else [kernel],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": PlatformWheel},
)

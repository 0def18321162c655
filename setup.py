"""Builds the native CPU kernel, a shared library beside ``ahop_layers/ops/cpu.py``, if there is a C compiler.

``AHOP_CFLAGS`` adds compiler and linker flags. Everything else about the package is in pyproject.toml.
"""

import hashlib
import json
import os
import shlex
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = [
    *("-std=gnu11", "-O3", "-g0", "-funroll-loops", "-pthread"),
    "-fno-schedule-insns",  # scheduling before register allocation makes the networks spill registers
]


class BuildKernel(build_ext):
    """Builds a library that holds no Python module. The package installs without it if the build fails."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def run(self) -> None:
        try:
            for extension in self.extensions:
                extension.extra_compile_args = extension.extra_link_args = FLAGS + user_flags()
            super().run()
            for extension in self.extensions:
                write_record(Path(self.get_ext_fullpath(extension.name)))
        except Exception as error:
            self.warn(f"the native CPU kernel was not built, plain PyTorch is used instead: {error}")
            self.extensions.clear()


def user_flags() -> list[str]:
    flags = os.environ.get("AHOP_CFLAGS", "")
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise ValueError(f"AHOP_CFLAGS must be a list of shell words, got {flags!r}: {error}") from error


def write_record(library: Path) -> None:
    """Writes the size and hash of a library beside it. cpu.py loads only a library that matches them."""
    content = library.read_bytes()
    record = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    library.with_suffix(".json").write_text(json.dumps(record) + "\n")


class PlatformWheel(bdist_wheel):
    """One wheel per platform serves every Python version: ctypes loads the library."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


kernel = Extension(
    "ahop_layers.ops._footprint",
    ["ahop_layers/ops/footprint.c"],
    depends=["ahop_layers/ops/footprint_impl.h"],
)
setup(
    ext_modules=[] if sys.platform == "win32" else [kernel],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": PlatformWheel},
)

"""Builds the native CPU kernel, a shared library beside ``ahop_layers/ops/cpu.py``, if there is a C compiler.

``AHOP_CFLAGS`` adds compiler and linker flags. Everything else about the package is in pyproject.toml.
"""

import hashlib
import json
import os
import platform
import shlex
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = [Path("ahop_layers/ops") / name for name in ("footprint.c", "footprint_impl.h")]
LIBRARY = Path("ahop_layers/ops/_footprint.so")
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

    def build_extension(self, ext: Extension) -> None:
        """Copies the library of the checkout if it was built from the same sources: compiling it takes a minute."""
        if recorded().get("source") == source_hash() and not self.force:
            os.makedirs(os.path.dirname(self.get_ext_fullpath(ext.name)), exist_ok=True)
            shutil.copyfile(LIBRARY, self.get_ext_fullpath(ext.name))
        else:
            super().build_extension(ext)


def user_flags() -> list[str]:
    flags = os.environ.get("AHOP_CFLAGS", "")
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise ValueError(f"AHOP_CFLAGS must be a list of shell words, got {flags!r}: {error}") from error


def write_record(library: Path) -> None:
    """Writes the size and hash of a library beside it. cpu.py loads only a library that matches them."""
    content = library.read_bytes()
    record = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), "source": source_hash()}
    library.with_suffix(".json").write_text(json.dumps(record) + "\n")


def source_hash() -> str:
    """Returns a hash of everything that determines the library: sources, flags, compiler and processor."""
    compiler = [*FLAGS, *user_flags(), os.environ.get("CC", ""), sys.platform, platform.machine()]
    parts = [path.read_bytes() for path in SOURCES] + [json.dumps(compiler).encode()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def recorded() -> dict[str, object]:
    """Returns the record of the library in the checkout, empty if there is none or if the library differs from it."""
    try:
        record = json.loads(LIBRARY.with_suffix(".json").read_text())
        intact = record["sha256"] == hashlib.sha256(LIBRARY.read_bytes()).hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return record if intact else {}


class PlatformWheel(bdist_wheel):
    """One wheel per platform serves every Python version: ctypes loads the library."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


kernel = Extension(
    "ahop_layers.ops._footprint",
    [str(SOURCES[0])],
    depends=[str(path) for path in SOURCES[1:]],
)
setup(
    ext_modules=[] if sys.platform == "win32" else [kernel],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": PlatformWheel},
)

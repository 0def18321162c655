"""Builds the native CPU kernel, a shared library beside ``ahop_layers/ops/cpu.py``, if there is a C compiler.

``AHOP_CFLAGS`` adds compiler and linker flags. Everything else about the package is in pyproject.toml.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = [Path("ahop_layers/ops/footprint.c"), Path("ahop_layers/ops/footprint_impl.h")]
LIBRARY = Path("ahop_layers/ops/_footprint.so")
FAST, SMALL = ["-O3", "-funroll-loops"], ["-O2"]
# The parts of footprint.c; those that take longest start first. None: what they share.
PARTS = {0: FAST, 2: FAST, 1: SMALL, 3: SMALL, 4: SMALL, 5: SMALL, None: SMALL}
FLAGS = [
    *("-std=gnu11", "-g0", "-pthread", "-fvisibility=hidden"),
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
        except Exception as error:
            self.warn(f"the native CPU kernel was not built, plain PyTorch is used instead: {error}")
            self.extensions.clear()

    def build_extension(self, ext: Extension) -> None:
        """Copies the library of the checkout if it is newer than its sources, else compiles its parts side by side."""
        if is_built() and not (self.force or user_flags()):
            os.makedirs(os.path.dirname(self.get_ext_fullpath(ext.name)), exist_ok=True)
            shutil.copyfile(LIBRARY, self.get_ext_fullpath(ext.name))
        else:
            self.compiler.compile = partial(compile_parts, self.compiler.compile)
            super().build_extension(ext)


def compile_parts(compile: Callable[..., list[str]], sources: list[str], output_dir: str, **options: Any) -> list[str]:
    """Compiles each part of footprint.c to an object, side by side."""
    cores = os.cpu_count() or 1
    print(f"compiling {LIBRARY}: up to {max(25, 70 // cores)} seconds on {cores} cores", flush=True)

    def compile_part(part: int | None) -> list[str]:
        own = {
            "output_dir": os.path.join(output_dir, f"part{part}"),
            "macros": [] if part is None else [("PART", str(part))],
            "extra_postargs": PARTS[part] + options["extra_postargs"],
        }
        return compile(sources, **options | own)

    with ThreadPoolExecutor(cores) as pool:
        return [name for names in pool.map(compile_part, PARTS) for name in names]


def user_flags() -> list[str]:
    flags = os.environ.get("AHOP_CFLAGS", "")
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise ValueError(f"AHOP_CFLAGS must be a list of shell words, got {flags!r}: {error}") from error


def is_built() -> bool:
    """Returns whether the checkout has a library that is newer than its sources and this file."""
    files = (*SOURCES, Path(__file__))
    return LIBRARY.is_file() and LIBRARY.stat().st_mtime > max(path.stat().st_mtime for path in files)


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

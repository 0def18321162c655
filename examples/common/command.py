"""The command line of the examples: argparse with ``--seed``, ``--out`` and ``--overwrite``, and errors as one line.

A mistake of the user ends with the usage, one line that says what was expected and what was given, and exit status 2.
``@FILE`` on the command line reads arguments from a file, one in each line.
"""

import argparse
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ahop_layers import AHopError

RECORD = "options.txt"  # in the folder of --out, the arguments of a run


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """Returns the ``type`` of an option: a finite number in a closed range."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high):
            expected = "an integer " if kind is int else "a number "
            expected += f">= {low}" if high == math.inf else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return convert


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the docstring of an example as it is written."""


class Parser(argparse.ArgumentParser):
    """Argument parser of an example with a name, a docstring, and files that it writes into the folder of ``--out``.

    A run refuses a folder that holds one of these files, and removes them with ``--overwrite``.
    """

    def __init__(self, name: str, doc: str | None, writes: Sequence[str] = ()) -> None:
        super().__init__(name, None, doc, formatter_class=_Help, fromfile_prefix_chars="@", allow_abbrev=False)
        self.writes = (RECORD, *writes)
        seeds = number(int, 0, 2**32 - 1)  # the range of NumPy's seeds
        self.add_argument("--seed", type=seeds, metavar="N", default=0, help="seed of all random number generators")
        self.add_argument("--out", type=Path, metavar="DIR", default=f"out/{name}", help="folder for all output files")
        self.add_argument("--overwrite", action="store_true", help="replace an earlier run in the folder of --out")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:
        """Parses the command line, and refuses a folder that holds an earlier run."""
        options = super().parse_args(args, namespace)
        found = [name for name in self.writes if os.path.lexists(options.out / name)]
        if found and _is_main_process() and not (options.overwrite or getattr(options, "resume", False)):
            ways = "--overwrite to replace it" + " or --resume to continue it" * hasattr(options, "resume")
            expected = f"expected a folder without an earlier run, got {options.out} with {', '.join(found)}"
            self.error(f"argument --out: {expected} (use {ways})")
        return options

    def start(self, options: argparse.Namespace) -> None:
        """Creates the folder of ``--out``, without the files of an earlier run, and records the arguments there."""
        if not _is_main_process() or getattr(options, "resume", False):
            return
        options.out.mkdir(parents=True, exist_ok=True)
        for name in self.writes if options.overwrite else ():
            path = options.out / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        lines = []
        for name, value in vars(options).items():
            if name not in ("out", "overwrite", "resume") and value not in (None, False):
                values = [] if value is True else value if isinstance(value, list) else [value]
                lines += [f"--{name.replace('_', '-')}", *map(str, values)]
        with (options.out / RECORD).open("x") as file:  # fails if another run started here in the meantime
            file.write("\n".join(lines) + "\n")

    @contextmanager
    def one_line_errors(self) -> Iterator[None]:
        """Reports invalid data, a checkpoint that does not fit, or a failed write like an invalid option."""
        try:
            yield
        except (AHopError, OSError) as error:
            self.error(" ".join(str(error).split()))


def _is_main_process() -> bool:
    """False in the other processes of a distributed run, which share the folder of the first one."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK"))

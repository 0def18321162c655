"""The command line of every example: shared options, defaults from a file, and errors as one line.

Every example builds one :class:`Parser`, so an option has the same spelling, type and help text everywhere. A mistake
of the user ends with ``usage: ...``, one line such as ``vit: error: argument --epochs: expected a positive integer,
got '0'``, and exit status 2.
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ahop_layers import AHopError

RECORD = "options.json"
"""File in the folder of ``--out`` with the options of a run; ``--config`` accepts it."""


def _number(kind: type, expected: str, fits: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Returns the ``type`` of an option: a finite number that fits."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and fits(value)):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return convert


def integer_between(low: int, high: int) -> Callable[[str], int]:
    """Returns the ``type`` of an option: an integer in a closed range."""
    return _number(int, f"an integer from {low} to {high}", lambda value: low <= value <= high)


positive_int = _number(int, "a positive integer", lambda value: value > 0)
non_negative_int = _number(int, "a non-negative integer", lambda value: value >= 0)
positive_float = _number(float, "a positive number", lambda value: value > 0)
non_negative_float = _number(float, "a non-negative number", lambda value: value >= 0)
fraction = _number(float, "a number from 0 to 1", lambda value: 0 <= value <= 1)
seed = integer_between(0, 2**32 - 1)  # the range of NumPy's seeds


def output_folder(text: str) -> Path:
    """The ``type`` of ``--out``: a folder that can be written to or created. It is not created yet."""
    path = Path(text)
    existing = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.lexists(each))
    reason = None if existing.is_dir() else "is not a folder"
    try:
        if reason is None:  # permission bits alone do not tell: root may not write to /proc, nor anyone to a full disk
            tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        reason = f"is not writable ({error.strerror})"
    if reason is not None:
        raise argparse.ArgumentTypeError(f"expected a folder to write to, got {path}: {existing} {reason}")
    return path


LAST = Path("last.ckpt")
SHARED: dict[str, dict[str, Any]] = {
    "epochs": {"type": positive_int, "metavar": "N", "help": "number of epochs"},
    "batch_size": {"type": positive_int, "metavar": "N", "help": "samples per optimizer step, over all devices"},
    "lr": {"type": positive_float, "help": "learning rate"},
    "similarity_lr": {
        "type": non_negative_float,
        "metavar": "FACTOR",
        "help": "learning-rate multiplier of the similarity parameters",
    },
    "patience": {
        "type": positive_int,
        "metavar": "N",
        "help": "stop after this many epochs without improvement on the validation data",
    },
    "data_dir": {
        "type": Path,
        "metavar": "DIR",
        "help": "folder of the data sets; the environment variable AHOP_DATA_DIR changes the default",
    },
    "accelerator": {"help": "hardware to train on: auto, cpu, gpu, or another name that Lightning knows"},
    "logger": {"choices": ("csv", "tensorboard"), "help": "format of the training log"},
    "fast_dev_run": {"action": "store_true", "help": "run one batch of training, validation and test"},
    "resume": {
        "nargs": "?",
        "type": Path,
        "const": LAST,
        "metavar": "CHECKPOINT",
        "help": "continue an interrupted run from a checkpoint; without a value, from last.ckpt in the folder of --out",
    },
    "seed": {"type": seed, "metavar": "N", "help": "seed of all random number generators"},
    "out": {"type": output_folder, "metavar": "DIR", "help": "folder for all output files"},
    "overwrite": {"action": "store_true", "help": "replace the output files of an earlier run in the folder of --out"},
    "config": {"type": Path, "metavar": "FILE", "help": "YAML or JSON file with defaults for these options"},
}


class Parser(argparse.ArgumentParser):
    """Argument parser of an example. Every example has ``--seed``, ``--out``, ``--overwrite`` and ``--config``.

    Args:
        name: name of the example, for usage and errors.
        description: docstring of the example.
        out: default of ``--out``.
        writes: files and folders that the example writes into the folder of ``--out``. A run refuses a folder that
            holds one of them, and removes them with ``--overwrite``.
        shared: other options of ``SHARED`` to add, with the defaults of this example.
    """

    def __init__(self, name: str, description: str | None, out: str, writes: Sequence[str] = (), **shared: Any) -> None:
        super().__init__(prog=name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.writes = (RECORD, *writes)
        for option, default in {**shared, "seed": 0, "out": out, "overwrite": False, "config": None}.items():
            self.option(f"--{option.replace('_', '-')}", default=default, **SHARED[option])

    def option(self, *flags: str, help: str, default: Any = None, **keywords: Any) -> None:
        """Adds an option whose help text ends with its default, if it has one."""
        if default is not None and default is not False:
            help, keywords = f"{help} (default: %(default)s)", {**keywords, "default": default}
        self.add_argument(*flags, help=help, **keywords)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:
        """Parses the command line, over the defaults of ``--config``, and checks the folder of ``--out``."""
        args = sys.argv[1:] if args is None else list(args)
        options = super().parse_args(args, namespace)
        if options.config is not None:
            options = super().parse_args([*self._read_config(options.config), *args], namespace)
        if getattr(options, "resume", None) is LAST:
            options.resume = options.out / LAST
        self._check_folder(options)
        return options

    def _read_config(self, path: Path) -> list[str]:
        """Returns the options of a file as command-line arguments, which are then checked like the others."""
        import yaml  # comes with lightning

        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            self.error(f"argument --config: expected a YAML or JSON file, got {path}: {_one_line(error)}")
        if not isinstance(found, dict):
            self.error(f"argument --config: expected a mapping of options to values, got {path}")
        flags = {flag.lstrip("-"): flag for action in self._actions for flag in action.option_strings}
        arguments = []
        for name, value in found.items():
            flag = None if name in ("h", "help", "config") else flags.get(str(name).replace("_", "-"))
            if flag is None or value is None or isinstance(value, dict):
                self.error(f"argument --config: {path}: expected options of {self.prog}, got {name}: {value}")
            if isinstance(value, list):
                arguments += [flag, *map(str, value)]
            elif value is not False:
                arguments.append(flag if value is True else f"{flag}={value}")
        return arguments

    def _check_folder(self, options: argparse.Namespace) -> None:
        """Refuses a folder that holds an earlier run, unless that run is resumed or to be replaced."""
        if options.overwrite or self._resumes(options) or not _is_main_process():
            return
        found = [name for name in self.writes if os.path.lexists(options.out / name)]
        if found:
            ways = "--overwrite to replace it" + " or --resume to continue it" * hasattr(options, "resume")
            self.error(
                f"argument --out: expected a folder without an earlier run, got {options.out} with {', '.join(found)}"
                f" (use {ways})"
            )

    @staticmethod
    def _resumes(options: argparse.Namespace) -> bool:
        resume = getattr(options, "resume", None)
        return resume is not None and resume.parent.resolve() == options.out.resolve()

    def start(self, options: argparse.Namespace) -> None:
        """Creates the folder of ``--out``, without the files of an earlier run, and records the options there."""
        if not _is_main_process():
            return
        options.out.mkdir(parents=True, exist_ok=True)
        if self._resumes(options):
            return
        for name in self.writes if options.overwrite else ():
            path = options.out / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        left = ("out", "overwrite", "config", "resume")
        held = {name: value for name, value in vars(options).items() if value is not None and name not in left}
        with (options.out / RECORD).open("x") as file:  # fails if another run started here in the meantime
            json.dump(held, file, indent=1, default=str)

    @contextmanager
    def one_line_errors(self) -> Iterator[None]:
        """Reports invalid data, a checkpoint that does not fit, or a failed write like an invalid option."""
        try:
            yield
        except (AHopError, OSError) as error:
            self.error(_one_line(error))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _is_main_process() -> bool:
    """False in the other processes of a distributed run, which share the folder of the first one."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK"))


def default_data_dir() -> str:
    """The default of ``--data-dir``."""
    return os.environ.get("AHOP_DATA_DIR", "data")

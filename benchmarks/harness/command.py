"""Command lines of the benchmarks: the parser, the data folder, and errors about missing data."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ahop_layers import AHopError


def make_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns the parser of ``python -m benchmarks.<module>``, whose help starts with the docstring ``doc``."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def default_data_dir() -> Path:
    """Returns the folder named by the environment variable AHOP_DATA_DIR, or ``data``."""
    return Path(os.environ.get("AHOP_DATA_DIR", "data"))


def add_data_dir(parser: argparse.ArgumentParser, content: str) -> None:
    """Adds the option ``--data-dir``, a folder with the named content."""
    text = f"folder with {content} (default: AHOP_DATA_DIR, else data)"
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(), help=text)


def choose_device(name: str) -> torch.device:
    """Returns the device of an option: "auto" means a GPU if there is one."""
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else name.replace("auto", "cpu"))


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--device``, a :class:`torch.device`."""
    text = "cpu, cuda, or auto: cuda if available (default: auto)"
    parser.add_argument("--device", type=choose_device, default="auto", help=text)


@contextmanager
def explain_missing_data() -> Iterator[None]:
    """Exits with the name of the missing file and a reference to docs/data.md instead of a traceback."""
    try:
        yield
    except (FileNotFoundError, AHopError) as error:
        raise SystemExit(f"{error}\ndocs/data.md lists the files of each data set and their sources") from None

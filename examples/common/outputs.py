"""The folder that an example writes to, looked at before anything long begins."""

import argparse
import os
from pathlib import Path


def output_folder(text: str) -> Path:
    """The type of ``--out``: a folder that can be written to, or can be made. Nothing is made yet."""
    path = Path(text)
    whole = path.absolute()
    there = next(each for each in (whole, *whole.parents) if os.path.lexists(each))
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        reason = f"{there} cannot be written to" if there.is_dir() else f"{there} is no folder"
        raise argparse.ArgumentTypeError(f"expected a folder to write to, got {path}: {reason}")
    return path

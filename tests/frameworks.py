"""Imports timm, torchvision and transformers for tests, with any build of torch."""

import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch


@cache
def make_torchvision_importable() -> None:
    """Declares the two operators that torchvision needs at import, if its library was built for another torch.

    Vision transformers do not use them.
    """
    own_folder = Path(sys.prefix) / "vit"  # where the Makefile installs it
    if own_folder.is_dir():
        sys.path.append(str(own_folder))
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    for library in Path(spec.origin).parent.glob("_C*.so"):
        with suppress(OSError):
            torch.ops.load_library(str(library))
    if not hasattr(torch.ops.torchvision, "nms"):
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def framework(name: str) -> ModuleType:
    """Imports a module, or skips the test if it is not installed."""
    make_torchvision_importable()  # timm and transformers import it too
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[vit]'", exc_type=ImportError)

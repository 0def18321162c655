"""Project: one use of Hopfield layers, and the three sets of layers it is trained with."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partialmethod
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Generator, Tensor, nn

import ahop_layers as ah

NAMES = ("Hopfield", "HopfieldLayer", "HopfieldPooling")


@dataclass(frozen=True)
class Project:
    """How a project uses Hopfield layers.

    Attributes:
        usage: the layer and what is particular about its use, for the table.
        build: builds the model from a namespace with the classes of hflayers.
        batch: draws a batch.
        loss: the training loss of a batch.
        blocks: number of blocks to measure.
        lr: learning rate of AdamW.
    """

    usage: str
    build: Callable[[Any], nn.Module]
    batch: Callable[[Generator], Any]
    loss: Callable[[Any, Any], Tensor]
    blocks: int = 4
    lr: float = 1e-3


def supervised(criterion: Callable[[Tensor, Tensor], Tensor]) -> Callable[[nn.Module, Sequence[Tensor]], Tensor]:
    """Returns the loss of a batch that consists of the arguments of the model, and last the target."""
    return lambda model, batch: criterion(model(*batch[:-1]), batch[-1])


def import_original(checkout: Path) -> ModuleType:
    """Imports hflayers from a checkout of hopfield-layers, or exits."""
    sys.path.insert(0, str(checkout))
    try:
        return import_module("hflayers")
    except ImportError:
        raise SystemExit(f"--original: expected a checkout of hopfield-layers, got {checkout}") from None
    finally:
        sys.path.pop(0)


def plain_layers() -> SimpleNamespace:
    """Returns the layers of hflayers if it is installed, else our own plain layers."""
    module = import_module("hflayers" if find_spec("hflayers") else "ahop_layers.hopfield")
    return SimpleNamespace(**{name: getattr(module, name) for name in NAMES})


def adaptive_layers(blocks: int | None) -> SimpleNamespace:
    """Returns adaptive layers with a number of blocks, None for full footprints, under the names of hflayers."""

    def with_blocks(name: str) -> type:
        kind = getattr(ah, f"Adaptive{name}")
        return type(name, (kind,), {"__init__": partialmethod(kind.__init__, blocks=blocks)})

    return SimpleNamespace(**{name: with_blocks(name) for name in NAMES})


STATIC = {f"{name}_as_static": True for name in ("stored_pattern", "state_pattern", "pattern_projection")}
NO_NORMS = {
    f"normalize_{name}{affine}": False
    for name in ("stored_pattern", "state_pattern", "pattern_projection")
    for affine in ("", "_affine")
}

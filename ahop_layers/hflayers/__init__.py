"""The names of hopfield-layers: ``import ahop_layers.hflayers as hflayers`` makes a project adaptive.

:func:`install_as_hflayers` does the same for a project that is not edited: later imports of ``hflayers`` and its
submodules find this package.
"""

import sys
from importlib import import_module
from math import sqrt
from typing import Optional, Tuple, Union  # noqa: UP035 - names of hflayers

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter

from ahop_layers.hflayers import activation, functional
from ahop_layers.hflayers.activation import HopfieldCore
from ahop_layers.hopfield import AdaptiveHopfield as Hopfield
from ahop_layers.hopfield import AdaptiveHopfieldLayer as HopfieldLayer
from ahop_layers.hopfield import AdaptiveHopfieldPooling as HopfieldPooling

# What ``from hflayers import *`` imports from the original.
__all__ = [
    "Hopfield", "HopfieldCore", "HopfieldLayer", "HopfieldPooling", "Module", "Optional", "Parameter", "Tensor",
    "Tuple", "Union", "activation", "functional", "nn", "sqrt", "torch",
]  # fmt: skip

_SUBMODULES = ("", ".activation", ".auxiliary", ".auxiliary.data", ".functional", ".transformer")


def install_as_hflayers() -> None:
    """Makes ``import hflayers`` find the adaptive layers, also if the original is installed or already imported.

    Call it before the imports of the project. A module that imported a class of hflayers earlier keeps that class.

    >>> import ahop_layers as ah
    >>> from unittest.mock import patch
    >>> with patch.dict("sys.modules"):  # undoes it, for this example
    ...     ah.install_as_hflayers()
    ...     from hflayers import Hopfield
    ...     from hflayers.transformer import HopfieldEncoderLayer
    >>> Hopfield is ah.AdaptiveHopfield
    True
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == "hflayers"]:
        del sys.modules[name]
    for name in _SUBMODULES:
        sys.modules[f"hflayers{name}"] = import_module(f"ahop_layers.hflayers{name}")

"""The names of hopfield-layers: ``import ahop_layers.hflayers as hflayers`` makes a project adaptive.

:func:`install_as_hflayers` does the same for a project that is not edited: later imports of ``hflayers`` and its
submodules find this package.
"""

import sys
import warnings
from copy import deepcopy
from importlib import import_module
from inspect import signature
from math import sqrt
from types import ModuleType
from typing import Any, Optional, Tuple, Union  # noqa: UP035 - names of hflayers

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter

from ahop_layers.errors import check_choice
from ahop_layers.hflayers import activation, functional
from ahop_layers.hflayers.activation import HopfieldCore
from ahop_layers.hopfield import AdaptiveHopfield as Hopfield
from ahop_layers.hopfield import AdaptiveHopfieldLayer as HopfieldLayer
from ahop_layers.hopfield import AdaptiveHopfieldPooling as HopfieldPooling
from ahop_layers.hopfield.adaptive import AdaptiveLayer

# What ``from hflayers import *`` imports from the original.
__all__ = [
    "Hopfield", "HopfieldCore", "HopfieldLayer", "HopfieldPooling", "Module", "Optional", "Parameter", "Tensor",
    "Tuple", "Union", "activation", "functional", "nn", "sqrt", "torch",
]  # fmt: skip

_SUBMODULES = ("", ".activation", ".auxiliary", ".auxiliary.data", ".functional", ".transformer")


def install_as_hflayers(**defaults: Any) -> None:
    """Makes ``import hflayers`` find the adaptive layers, also if the original is installed or already imported.

    Call it before the imports of the project. A module that imported names of the original earlier keeps them: a
    warning names it.

    Args:
        defaults: keywords that :class:`~ahop_layers.AdaptiveHopfield` adds to the original ones, such as ``blocks``.
            Layers that are built through the name ``hflayers`` have them unless they are given others.

    >>> import ahop_layers as ah
    >>> from unittest.mock import patch
    >>> with patch.dict("sys.modules"):  # undoes it, for this example
    ...     ah.install_as_hflayers(blocks=4)
    ...     from hflayers import Hopfield
    ...     from hflayers.transformer import HopfieldEncoderLayer
    >>> issubclass(Hopfield, ah.AdaptiveHopfield), Hopfield(16).association_core.similarity.w.shape[-1]
    (True, 4)
    """
    arguments = signature(AdaptiveLayer.__init__).parameters.values()
    for name in defaults:
        check_choice("keywords", name, [each.name for each in arguments if each.kind == each.KEYWORD_ONLY])
    before = [sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "hflayers"]
    _warn_about_holders([module for module in before if module.__name__.partition(".")[0] == "hflayers"])
    for name in _SUBMODULES:
        sys.modules[f"hflayers{name}"] = import_module(f"{__name__}{name}")
    if defaults:
        sys.modules["hflayers"] = module = ModuleType("hflayers")
        vars(module).update(vars(sys.modules[__name__]))
        for kind in (Hopfield, HopfieldLayer, HopfieldPooling):
            name = kind.__name__.removeprefix("Adaptive")
            setattr(module, name, _with_defaults(name, kind, defaults))


def _with_defaults(name: str, kind: Any, defaults: dict[str, Any]) -> type:
    """Returns a subclass of a layer with other defaults, which is pickled by its ``name`` in ``hflayers``."""

    def __init__(self: Any, *args: Any, **keywords: Any) -> None:
        kind.__init__(self, *args, **deepcopy(defaults) | keywords)

    __init__.__signature__ = signature(kind.__init__)  # type: ignore[attr-defined]
    return type(name, (kind,), {"__init__": __init__, "__doc__": kind.__doc__, "__module__": "hflayers"})


def _warn_about_holders(originals: list[ModuleType]) -> None:
    """Warns about modules that hold the modules of hflayers, or what these define."""
    held = {id(module) for module in originals}
    for module in originals:
        held |= {id(each) for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__}
    holders = [
        name
        for name, module in list(sys.modules.items())
        if held.intersection(map(id, list(getattr(module, "__dict__", {}).values())))
    ]
    if holders:
        names = ", ".join(sorted(holders))
        rule = "the classes of hflayers stay in modules that have imported them"
        warnings.warn(f"{rule}: {names}; call install_as_hflayers first", stacklevel=3)

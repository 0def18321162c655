"""Swaps the class of a module in place, and swaps it back.

The module remains the same object with its parameters, hooks and attributes. It gets a similarity and a separation, and
a class whose ``forward`` uses them and that inherits from the original class. Optimizers, references to the module,
state dicts and ``isinstance`` keep working, and swapping back restores the original exactly.
"""

from functools import cache
from typing import Any, NamedTuple

from torch import nn


class Former(NamedTuple):
    """The original class of a module, and the original values of the attributes that the conversion sets."""

    source: type[nn.Module]
    names: tuple[str, ...]
    values: dict[str, Any]


@cache
def _combined(adaptive: Any, source: Any) -> Any:
    """Returns a class that inherits from both, with ``forward`` of the first."""

    def __reduce_ex__(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        return _blank, (adaptive, source), vars(self)

    members = {"__doc__": adaptive.__doc__, "__reduce_ex__": __reduce_ex__}
    return type(f"Adaptive{source.__name__}", (adaptive, source), members)


def _blank(adaptive: Any, source: Any) -> nn.Module:
    """Returns an empty module for ``pickle`` and ``copy``, which cannot import a class that is created at run time."""
    kind = _combined(adaptive, source)
    module: nn.Module = kind.__new__(kind)
    return module


def _adaptive_class(into: Any, source: Any) -> Any:
    return into if issubclass(into, source) else _combined(into, source)


def viewed_as(module: nn.Module, into: Any) -> Any:
    """Returns a module of the class that :func:`turn_into` would set; it shares the attributes of ``module``."""
    kind = _adaptive_class(into, type(module))
    view = kind.__new__(kind)
    object.__setattr__(view, "__dict__", vars(module))
    return view


def turn_into(module: nn.Module, into: Any, *names: str) -> None:
    """Swaps the class of a module, and records the values of the named attributes for :func:`turn_back`."""
    source: Any = type(module)
    values = {name: getattr(module, name) for name in names if hasattr(module, name)}
    module.__dict__["_former"] = Former(source, names, values)
    module.__class__ = _adaptive_class(into, source)


def turn_back(module: nn.Module) -> None:
    """Restores the class and the recorded attributes of a module; its parameters keep their current values."""
    former: Former = module.__dict__.pop("_former")
    for name in former.names:
        if hasattr(module, name):
            delattr(module, name)
    module.__class__ = former.source
    for name, value in former.values.items():
        setattr(module, name, value)

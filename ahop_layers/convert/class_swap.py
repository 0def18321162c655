"""Change the class of a module in place, and back.

A module is not replaced: it stays the object it was, with its parameters, hooks and attributes, gets a similarity and a
separation besides, and its class becomes one whose ``forward`` uses them. So optimizers, references and checkpoints
keep working, ``isinstance`` still holds, and the way back is exact.
"""

from functools import cache
from typing import Any, NamedTuple

from torch import nn


class Former(NamedTuple):
    """What a module was: its class, and its attributes of those names that conversion gives it."""

    source: type[nn.Module]
    names: tuple[str, ...]
    values: dict[str, Any]


@cache
def _combined(adaptive: Any, source: Any) -> Any:
    """The class that is both, with ``forward`` from the first."""

    def __reduce_ex__(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        return _blank, (adaptive, source), vars(self)

    members = {"__doc__": adaptive.__doc__, "__reduce_ex__": __reduce_ex__}
    return type(f"Adaptive{source.__name__}", (adaptive, source), members)


def _blank(adaptive: Any, source: Any) -> nn.Module:
    """A module without content for ``pickle`` and ``copy`` to fill, which cannot find a class that was made here."""
    kind = _combined(adaptive, source)
    module: nn.Module = kind.__new__(kind)
    return module


def turn_into(module: nn.Module, into: Any, *names: str) -> None:
    """Change the class of a module, and remember for the way back what it had under these names."""
    source: Any = type(module)
    values = {name: getattr(module, name) for name in names if hasattr(module, name)}
    module.__dict__["_former"] = Former(source, names, values)
    module.__class__ = into if issubclass(into, source) else _combined(into, source)


def turn_back(module: nn.Module) -> None:
    """Make a module what it was before :func:`turn_into`, with the parameters it has now."""
    former: Former = module.__dict__.pop("_former")
    for name in former.names:
        if hasattr(module, name):
            delattr(module, name)
    module.__class__ = former.source
    for name, value in former.values.items():
        setattr(module, name, value)

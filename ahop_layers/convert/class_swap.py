"""Swaps the class of a module in place, and swaps it back.

The module remains the same object with its parameters, hooks and attributes. It gets a similarity and a separation, and
a class whose ``forward`` uses them and that inherits from the original class. Optimizers, references to the module,
state dicts and ``isinstance`` keep working, and swapping back restores the original exactly.
"""

from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torch import nn


class OriginalClass(NamedTuple):
    """The original class of a module, and the original values of the attributes that the conversion sets."""

    source: type[nn.Module]
    names: tuple[str, ...]
    values: dict[str, Any]
    swapped: str  # name of the class that replaced it


# Weak values, so that a class that is adapted can be freed. A combined class keeps its two bases, and thus their ids.
_COMBINED: WeakValueDictionary[tuple[int, int], Any] = WeakValueDictionary()


def _combined(adaptive: Any, source: Any) -> Any:
    """Returns a class that inherits from both, with ``forward`` of the first."""
    if issubclass(adaptive, source):
        return adaptive

    def __reduce_ex__(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        return _blank, (adaptive, source), vars(self)

    key, kind = (id(adaptive), id(source)), _COMBINED.get((id(adaptive), id(source)))
    if kind is None:
        members = {"__doc__": adaptive.__doc__, "__reduce_ex__": __reduce_ex__}
        kind = _COMBINED.setdefault(key, type(f"Adaptive{source.__name__}", (adaptive, source), members))
    return kind


def _blank(adaptive: Any, source: Any) -> Any:
    """Returns an empty module for ``pickle`` and ``copy``, which cannot import a class that is created at run time."""
    kind = _combined(adaptive, source)
    return kind.__new__(kind)


def viewed_as(module: nn.Module, adaptive: Any) -> Any:
    """Returns a module of the class that :func:`swap_class_` would set; it shares the attributes of ``module``."""
    view = _blank(adaptive, type(module))
    object.__setattr__(view, "__dict__", vars(module))
    return view


def swap_class_(module: nn.Module, adaptive: Any, *names: str) -> None:
    """Swaps the class of a module, and records the values of the named attributes for :func:`restore_class_`."""
    source: Any = type(module)
    values = {name: getattr(module, name) for name in names if hasattr(module, name)}
    kind = _combined(adaptive, source)
    vars(module)["_ahop_original"] = OriginalClass(source, names, values, kind.__name__)
    module.__class__ = kind


def original_class(module: nn.Module) -> OriginalClass | None:
    """Returns the original class of a module whose class was swapped, or None."""
    return vars(module).get("_ahop_original")


def restore_class_(module: nn.Module) -> None:
    """Restores the class and the recorded attributes of a module; its parameters keep their current values."""
    original: OriginalClass = vars(module).pop("_ahop_original")
    for name in original.names:
        if hasattr(module, name):
            delattr(module, name)
    module.__class__ = original.source
    for name, value in original.values.items():
        setattr(module, name, value)

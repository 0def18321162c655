"""Settings of the estimators with an MLP: their defaults, and checks of their values."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from ahop_layers.blocks import Blocks
from ahop_layers.errors import AHopError, check_choice, check_numbers
from ahop_layers.ops.reference import check_bases

MLP: dict[str, Any] = {
    "similarity": "adaptive",
    "bases": ("dis",),
    "blocks": None,
    "knots": 24,
    "embedding_dim": 8,
    "hidden": (64,),
    "dropout": 0.2,
    "loss": "auto",
    "learning_rate": 4e-3,
    "weight_decay": 1e-3,
    "batch_size": None,
    "max_epochs": 30,
    "patience": 10,
    "validation_fraction": 0.1,
}
"""The values that ``"auto"`` stands for. Only networks with an MLP have these settings."""


def is_auto(value: object) -> bool:
    """Whether ``value`` is the string ``"auto"``."""
    return isinstance(value, str) and value == "auto"


def given_settings(estimator: Any) -> list[str]:
    """Names of the settings of the MLP that are not ``"auto"``."""
    return [name for name in MLP if not is_auto(getattr(estimator, name))]


def resolve(estimator: Any, losses: Iterable[str]) -> SimpleNamespace:
    """Check all parameters of an estimator, and return the settings of the MLP without ``"auto"``.

    Raises:
        AHopError: a parameter has an invalid value.
    """
    values = {name: getattr(estimator, name) for name in MLP}
    values = {name: MLP[name] if is_auto(value) else value for name, value in values.items()}
    settings = SimpleNamespace(**values)
    check_choice("readout", estimator.readout, ("auto", "projection", "mlp"))
    check_choice("loss", settings.loss, tuple(losses))
    check_choice("init", estimator.init, ("rows", "kmeans"))
    check_choice("similarity", settings.similarity, ("adaptive", "dot", "kernel"))
    if settings.similarity == "adaptive":
        check_bases(settings.bases)
    _check_blocks(settings)
    if not is_auto(estimator.n_cases):
        _check_integer("n_cases", estimator.n_cases)
    for name in ("max_epochs", "batch_size", "patience", "embedding_dim", "knots"):
        _check_integer(name, values[name], 2 if name == "knots" else 1, optional=name != "max_epochs")
    widths = settings.hidden if isinstance(settings.hidden, Sequence | np.ndarray) else [0]
    if not all(is_integer(width) and width >= 1 for width in widths):
        raise AHopError(f"hidden must be a sequence of integers of at least 1, got {settings.hidden!r}")
    check_numbers("a positive number", learning_rate=settings.learning_rate)
    check_numbers("a number of at least 0", weight_decay=settings.weight_decay)
    fractions = {name: values[name] for name in ("validation_fraction", "dropout")}
    check_numbers("a number of at least 0 and below 1", **fractions, damage=estimator.damage)
    return settings


def _check_integer(name: str, value: object, least: int = 1, optional: bool = False) -> None:
    if not (optional and value is None) and not (is_integer(value) and value >= least):  # type: ignore[operator]
        none = " or None" if optional else ""
        raise AHopError(f"{name} must be an integer of at least {least}{none}, got {value!r}")


def _check_blocks(settings: SimpleNamespace) -> None:
    entries = settings.blocks if isinstance(settings.blocks, list | tuple) else [settings.blocks]
    if not entries:
        raise AHopError("blocks must have at least one entry, got none")
    of_features = False
    for entry in entries:
        if isinstance(entry, str):
            check_choice("blocks", entry, ("feature",))
        of_features |= isinstance(entry, str) or isinstance(Blocks(entry).assignment, Tensor)
    if settings.blocks is not None and settings.similarity != "adaptive":
        raise AHopError(f"blocks needs similarity='adaptive', got similarity={settings.similarity!r}")
    if of_features and settings.embedding_dim is not None:
        raise AHopError(
            f"blocks of features need embedding_dim=None, because an embedding combines features,"
            f" got embedding_dim={settings.embedding_dim!r}"
        )


def is_integer(value: object) -> bool:
    """Whether ``value`` is an integer of Python or NumPy, and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)

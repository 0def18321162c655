"""Scikit-learn estimators for tables that predict from the similarities of a row to rows of the training set."""

try:
    import sklearn  # type: ignore[import-untyped]  # noqa: F401
except ImportError as error:
    message = "ahop_layers.tabular needs scikit-learn, got no installation: pip install ahop-layers[tabular]"
    raise ImportError(message) from error

from ahop_layers.tabular.memory import AdaptiveMemoryClassifier, AdaptiveMemoryRegressor
from ahop_layers.tabular.neighbors import AdaptiveNeighborsClassifier, AdaptiveNeighborsRegressor

__all__ = [
    "AdaptiveMemoryClassifier", "AdaptiveMemoryRegressor", "AdaptiveNeighborsClassifier", "AdaptiveNeighborsRegressor",
]  # fmt: skip

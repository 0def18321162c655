"""The models of the tabular benchmark and their parameter spaces."""

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.ensemble import (
    AdaBoostClassifier,
    ExtraTreesClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.model_selection import ParameterSampler
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.tree import DecisionTreeClassifier

from benchmarks.paper.tabular.estimator import PaperMemoryClassifier

if TYPE_CHECKING:
    import pandas as pd

Parameters = dict[str, Any]


class Context(NamedTuple):
    """Arguments of a model other than its parameters."""

    seed: int
    device: str
    categories: np.ndarray


class Model(NamedTuple):
    """A constructor, the parameter values to sample from, and fixed values of a quick trial."""

    build: Callable[[Parameters, Context], ClassifierMixin]
    space: dict[str, list[Any]]
    quick: Parameters

    def draw(self, trial: int) -> Parameters:
        """Samples the parameters of a trial."""
        return dict(next(iter(ParameterSampler(self.space, 1, random_state=trial))))


MEMORY_SPACE = {
    "n_cases": [64, 256],
    "init": ["rows", "kmeans"],
    "knots": [12, 24, 48],
    "embedding_dim": [8, 16],
    "hidden": [(64,), (128,)],
    "dropout": [0.1, 0.3, 0.5],
    "loss": ["log", "squared"],
    "learning_rate": [1e-3, 2e-3, 4e-3],
    "weight_decay": [1e-3, 0.1, 1.0],
    "max_epochs": [15, 30],
}
FOREST_SPACE = {
    "n_estimators": [300],
    "max_depth": [10, 20, None],
    "min_samples_leaf": [1, 2, 5, 10],
    "max_features": ["sqrt", 0.3, 0.6],
}
BOOST_SPACE = {"learning_rate": [0.02, 0.05, 0.1, 0.2]}
CODES = 256  # more than a category of these tables has
XGBOOST_SPACE = {
    **BOOST_SPACE,
    "n_estimators": [100, 200, 400],
    "max_depth": [3, 4, 6, 8],
    "subsample": [0.7, 1.0],
    "colsample_bytree": [0.5, 0.8, 1.0],
    "min_child_weight": [1, 5],
}


def _memory(similarity: str, **fixed: Any) -> Model:
    """A memory with an MLP; ``fixed`` parameters are not drawn."""

    def build(parameters: Parameters, context: Context) -> ClassifierMixin:
        return PaperMemoryClassifier(
            similarity, **{**parameters, **fixed}, random_state=context.seed, device=context.device
        )

    return Model(build, MEMORY_SPACE, {"n_cases": 16, "max_epochs": 2})


def mark_categories(X: np.ndarray, categories: np.ndarray) -> "pd.DataFrame":
    """Returns a data frame in which the columns of a mask are categories, with equal codes in all parts of a table."""
    import pandas as pd

    columns = np.flatnonzero(categories)
    frame = pd.DataFrame(X).astype(dict.fromkeys(columns, int))
    return frame.astype(dict.fromkeys(columns, pd.CategoricalDtype(range(CODES))))


def _forest(kind: type[ClassifierMixin]) -> Model:
    def build(parameters: Parameters, context: Context) -> ClassifierMixin:
        return kind(**parameters, random_state=context.seed)

    return Model(build, FOREST_SPACE, {"n_estimators": 10})


def _ada_boost(parameters: Parameters, context: Context) -> ClassifierMixin:
    depth = {"max_depth": parameters["max_depth"]}
    rest = {name: value for name, value in parameters.items() if name not in depth}
    return AdaBoostClassifier(DecisionTreeClassifier(**depth), **rest, random_state=context.seed)


def _histogram_boosting(parameters: Parameters, context: Context) -> ClassifierMixin:
    return HistGradientBoostingClassifier(
        **parameters, categorical_features=context.categories, random_state=context.seed
    )


def _xgboost(parameters: Parameters, context: Context) -> ClassifierMixin:
    xgboost = importlib.import_module("xgboost")
    return xgboost.XGBClassifier(**parameters, random_state=context.seed, n_jobs=1, tree_method="hist")


def _xgboost_categories(parameters: Parameters, context: Context) -> ClassifierMixin:
    marked = FunctionTransformer(mark_categories, kw_args={"categories": context.categories})
    return make_pipeline(marked, _xgboost({**parameters, "enable_categorical": True}, context))


MODELS = {
    "M-Hop": _memory("dot"),
    "K2-Hop": _memory("kernel"),
    "A-Hop": _memory("adaptive"),
    "A-Hop, both bases": _memory("adaptive", bases=("dis", "dot")),
    "A-Hop, feature blocks": _memory("adaptive", bases=("dis", "dot"), embedding_dim=None, blocks="feature"),
    "Extra Trees": _forest(ExtraTreesClassifier),
    "Random Forest": _forest(RandomForestClassifier),
    "AdaBoost": Model(
        _ada_boost,
        {"n_estimators": [100, 200, 400], "learning_rate": [0.1, 0.3, 1.0], "max_depth": [1, 2, 3]},
        {"n_estimators": 10},
    ),
    "XGBoost": Model(_xgboost, XGBOOST_SPACE, {"n_estimators": 10}),
    "XGBoost, categories": Model(_xgboost_categories, XGBOOST_SPACE, {"n_estimators": 10}),
    "HistGradientBoosting": Model(
        _histogram_boosting,
        {
            **BOOST_SPACE,
            "max_iter": [100, 200, 400],
            "max_leaf_nodes": [8, 15, 31, 63],
            "min_samples_leaf": [10, 20, 50],
            "l2_regularization": [0.0, 1.0, 10.0],
        },
        {"max_iter": 10},
    ),
}


def available(names: Iterable[str]) -> list[str]:
    """Returns the models whose packages are installed, and prints the others."""
    missing = [name for name in names if name.startswith("XGBoost") and not importlib.util.find_spec("xgboost")]
    if missing:
        print(f"not installed, skipped: {', '.join(missing)}")
    return [name for name in names if name not in missing]

"""The models of the small tables, with default parameters and with spaces to tune them."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from sklearn.base import BaseEstimator
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from ahop_layers.tabular import AdaptiveMemoryClassifier, AdaptiveMemoryRegressor

Space = dict[str, list[Any]]


class Rival(NamedTuple):
    """Constructors of a classifier and a regressor from a seed and parameters, and the spaces of the parameters."""

    classifier: Callable[..., BaseEstimator]
    regressor: Callable[..., BaseEstimator]
    classifier_space: Space
    regressor_space: Space


def encoded(model: BaseEstimator, scale: bool) -> BaseEstimator:
    """A pipeline that imputes missing values with indicators, encodes categories as one-hot, and scales numbers."""
    numbers = [SimpleImputer(add_indicator=True), *([StandardScaler()] if scale else [])]
    texts = [
        SimpleImputer(strategy="constant", fill_value="missing"),
        OneHotEncoder(handle_unknown="ignore", sparse_output=False),
    ]
    columns = make_column_transformer(
        (make_pipeline(*texts), make_column_selector(dtype_include="category")),
        (make_pipeline(*numbers), make_column_selector(dtype_exclude="category")),
    )
    return make_pipeline(columns, model)


def _memory(**fixed: Any) -> tuple[Callable[..., BaseEstimator], Callable[..., BaseEstimator]]:
    def build(kind: type[BaseEstimator]) -> Callable[..., BaseEstimator]:
        return lambda seed, **parameters: kind(**fixed, **parameters, random_state=seed, device="cpu")

    return build(AdaptiveMemoryClassifier), build(AdaptiveMemoryRegressor)


def _encoded(
    kind: type[BaseEstimator], scale: bool, seeded: bool = False, **fixed: Any
) -> Callable[..., BaseEstimator]:
    def build(seed: int, **parameters: Any) -> BaseEstimator:
        return encoded(kind(**fixed, **parameters, **({"random_state": seed} if seeded else {})), scale)

    return build


def _histogram(kind: type[BaseEstimator]) -> Callable[..., BaseEstimator]:
    return lambda seed, **parameters: kind(**parameters, categorical_features="from_dtype", random_state=seed)


def _xgboost(name: str) -> Callable[..., BaseEstimator]:
    def build(seed: int, **parameters: Any) -> BaseEstimator:
        kind = getattr(importlib.import_module("xgboost"), name)
        return kind(**parameters, enable_categorical=True, random_state=seed, n_jobs=1)

    return build


STRENGTHS = [10.0**power for power in range(-3, 4)]
NEIGHBORS: Space = {"n_neighbors": [1, 3, 5, 10, 20, 40], "weights": ["uniform", "distance"], "p": [1, 2]}
FOREST: Space = {"n_estimators": [100, 300], "min_samples_leaf": [1, 2, 5, 10], "max_features": ["sqrt", 0.3, 0.6, 1.0]}
HISTOGRAM: Space = {
    "learning_rate": [0.02, 0.05, 0.1, 0.2], "max_iter": [50, 100, 200], "max_leaf_nodes": [4, 8, 15, 31],
    "min_samples_leaf": [5, 10, 20], "l2_regularization": [0.0, 1.0, 10.0],
}  # fmt: skip
XGBOOST: Space = {
    "learning_rate": [0.02, 0.05, 0.1, 0.3], "n_estimators": [50, 100, 200], "max_depth": [2, 3, 4, 6],
    "subsample": [0.7, 1.0], "colsample_bytree": [0.5, 0.8, 1.0], "min_child_weight": [1, 5],
}  # fmt: skip
MEMORY: Space = {"linear": [True, False], "damage": [0.0, 0.0, 0.05, 0.1], "n_cases": [None, 128]}
MEMORY_NAME, ALONE = "adaptive memory", "adaptive memory, no linear part"
FOREST_NAME, LINEAR_NAME = "random forest", "linear model"

RIVALS = {
    MEMORY_NAME: Rival(*_memory(), MEMORY, MEMORY),
    ALONE: Rival(*_memory(linear=False), {}, {}),
    LINEAR_NAME: Rival(
        _encoded(LogisticRegression, True, max_iter=1000), _encoded(Ridge, True), {"C": STRENGTHS}, {"alpha": STRENGTHS}
    ),
    "nearest neighbors": Rival(
        _encoded(KNeighborsClassifier, True), _encoded(KNeighborsRegressor, True), NEIGHBORS, NEIGHBORS
    ),
    FOREST_NAME: Rival(
        _encoded(RandomForestClassifier, False, True), _encoded(RandomForestRegressor, False, True), FOREST, FOREST
    ),
    "HistGradientBoosting": Rival(
        _histogram(HistGradientBoostingClassifier), _histogram(HistGradientBoostingRegressor), HISTOGRAM, HISTOGRAM
    ),
    "XGBoost": Rival(_xgboost("XGBClassifier"), _xgboost("XGBRegressor"), XGBOOST, XGBOOST),
}

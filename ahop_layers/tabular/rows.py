"""Preparation of the training set: merging equal rows, holding rows out, and choosing the cases."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.cluster import MiniBatchKMeans  # type: ignore[import-untyped]
from sklearn.metrics import pairwise_distances_argmin  # type: ignore[import-untyped]
from sklearn.utils import check_array, check_consistent_length  # type: ignore[import-untyped]
from torch import Tensor, nn

from ahop_layers.errors import AHopError
from ahop_layers.tabular.network import apply_in_chunks

Array = NDArray[Any]

# The mean loss of fewer held-out rows is too noisy to choose an epoch by.
MIN_HELD_OUT = 10


class TrainingSet(NamedTuple):
    """Distinct rows ``(n, features)``, their targets, weights of mean 1, and indices in the set passed to ``fit``."""

    X: Array
    target: Array
    weight: Array
    indices: Array


def merge_rows(X: Array, target: Array, sample_weight: ArrayLike | None) -> TrainingSet:
    """Merge equal rows into one with the sum of their weights, in an order independent of the input order.

    A row of weight 2 is therefore equivalent to two equal rows, and no row is both trained on and held out.

    Raises:
        ValueError: ``sample_weight`` is not one finite number per row, has a negative one, or is all zero (an
            AHopError).
    """
    weight: Array = np.ones(len(X))
    if sample_weight is not None:
        weight = check_array(sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight")
        check_consistent_length(X, weight)
        with np.errstate(over="ignore"):
            total = weight.sum()
        if weight.ndim != 1 or weight.min() < 0 or not 0 < total < np.inf:
            raise AHopError(
                "sample_weight must be one number per row, none negative, not all zero, and with a finite sum,"
                f" got shape {weight.shape}, from {weight.min():g} to {weight.max():g}"
            )
    kept = np.flatnonzero(weight)
    both = np.column_stack([target[kept], X[kept]])
    both = np.where(np.isnan(both), np.inf, both)  # NaN is not equal to itself, and no value is infinite
    merged, first, group = np.unique(both, axis=0, return_index=True, return_inverse=True)
    merged[np.isinf(merged)] = np.nan
    weight = np.bincount(group.reshape(-1), weight[kept])
    return TrainingSet(merged[:, 1:], merged[:, 0], weight / weight.mean(), kept[first])


def hold_out(target: Array, fraction: float, random: np.random.RandomState) -> Array:
    """Indices of a random fraction of the rows, stratified by class or by the rank of the target."""
    count = int(len(target) * fraction)
    if count < MIN_HELD_OUT:
        return np.array([], dtype=np.int64)
    order = random.permutation(len(target))
    order = order[np.argsort(target[order], kind="stable")]
    held_out: Array = order[((np.arange(count) + 0.5) / fraction).astype(np.int64)]
    return held_out


def choose_cases(
    encoding: nn.Module, rows: TrainingSet, learned: Array, count: int, init: str, random: np.random.RandomState
) -> tuple[Tensor, Array]:
    """Choose ``count`` cases among the rows that are trained on, whose indices are ``learned``.

    Args:
        encoding: from features to columns.
        rows: the training set.
        learned: indices of the rows that are trained on.
        count: number of cases.
        init: ``"rows"`` for random rows, ``"kmeans"`` for cluster centers.
        random: source of random numbers.

    Returns:
        The cases ``(count, columns)``, and for each the index of its row, for a cluster center of the nearest row.
    """
    if init == "rows":
        chosen = random.choice(learned, count, replace=False)
        return encoding(torch.from_numpy(rows.X[chosen])), chosen
    columns = apply_in_chunks(encoding, torch.from_numpy(rows.X[learned])).numpy()
    means = MiniBatchKMeans(count, n_init=1, batch_size=max(1024, 4 * count), random_state=random)
    means.fit(columns, sample_weight=rows.weight[learned])
    nearest = pairwise_distances_argmin(means.cluster_centers_, columns)
    return torch.from_numpy(means.cluster_centers_), learned[nearest]

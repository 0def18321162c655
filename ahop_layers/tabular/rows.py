"""What the tabular estimators do with the rows of a training set before any network sees them."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.cluster import MiniBatchKMeans  # type: ignore[import-untyped]
from sklearn.metrics import pairwise_distances_argmin  # type: ignore[import-untyped]
from sklearn.utils import check_array, check_consistent_length  # type: ignore[import-untyped]
from torch import Tensor

from ahop_layers.errors import AHopError, check_choice
from ahop_layers.tabular.network import Encoding, apply_in_chunks

Array = NDArray[Any]

# Fewer held-out rows would judge an epoch by chance.
FEWEST_HELD_OUT = 10


class Rows(NamedTuple):
    """Distinct rows: features ``(n, features)``, targets, weights of mean 1, and places in the set they come from."""

    X: Array
    target: Array
    weight: Array
    place: Array


def merge_rows(X: Array, target: Array, sample_weight: ArrayLike | None) -> Rows:
    """Equal rows become one with the sum of their weights, in an order that does not depend on the given one.

    So a row of weight 2 is the same as the row twice, and no row is both learned from and held out.

    Raises:
        ValueError: weights that are no numbers, too few or negative, or all zero (an AHopError).
    """
    weight: Array = np.ones(len(X))
    if sample_weight is not None:
        weight = check_array(sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight")
        check_consistent_length(X, weight)
        if weight.ndim != 1 or weight.min() < 0 or not weight.any():
            raise AHopError(
                "sample_weight must be one number for each row, none negative and not all zero,"
                f" got shape {weight.shape}, from {weight.min():g} to {weight.max():g}"
            )
    kept = np.flatnonzero(weight)
    both = np.column_stack([target[kept], X[kept]])
    merged, first, group = np.unique(both, axis=0, return_index=True, return_inverse=True)
    weight = np.bincount(group.reshape(-1), weight[kept])
    return Rows(merged[:, 1:], merged[:, 0], weight / weight.mean(), kept[first])


def hold_out(target: Array, fraction: float, random: np.random.RandomState) -> Array:
    """Places of a share of the rows, evenly spread over the classes or the range of the targets."""
    count = int(len(target) * fraction)
    if count < FEWEST_HELD_OUT:
        return np.array([], dtype=np.int64)
    order = random.permutation(len(target))
    order = order[np.argsort(target[order], kind="stable")]
    held_out: Array = order[((np.arange(count) + 0.5) / fraction).astype(np.int64)]
    return held_out


def choose_cases(
    encoding: Encoding, rows: Rows, learned: Array, count: int, init: str, random: np.random.RandomState
) -> tuple[Tensor, Array]:
    """Choose ``count`` cases from the rows that are learned from.

    Returns:
        The cases ``(count, columns)``, and the place of the row that each of them is, or is nearest to.

    Raises:
        AHopError: an unknown ``init``.
    """
    check_choice("init", init, ("rows", "kmeans"))
    if init == "rows":
        chosen = random.choice(learned, count, replace=False)
        return encoding(torch.from_numpy(rows.X[chosen])), chosen
    columns = apply_in_chunks(encoding, torch.from_numpy(rows.X[learned])).numpy()
    means = MiniBatchKMeans(count, n_init=1, batch_size=max(1024, 4 * count), random_state=random)
    means.fit(columns, sample_weight=rows.weight[learned])
    nearest = pairwise_distances_argmin(means.cluster_centers_, columns)
    return torch.from_numpy(means.cluster_centers_), learned[nearest]

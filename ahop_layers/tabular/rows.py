"""Rows of the training set: merging equal rows, choosing the cases, and processing rows in chunks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.cluster import MiniBatchKMeans  # type: ignore[import-untyped]
from sklearn.metrics import pairwise_distances_argmin  # type: ignore[import-untyped]
from sklearn.utils import check_array, check_consistent_length  # type: ignore[import-untyped]
from torch import Tensor

from ahop_layers.errors import AHopError

Array = NDArray[Any]

CHUNK = 4096  # rows processed at once without gradients: about 10 MB for each matrix of scores or columns


class Examples(NamedTuple):
    """Distinct rows of a training set. A row with a large weight may be several equal rows."""

    rows: Tensor  # (n, features) of float64, with codes for categories and NaN for missing values
    target: Tensor  # class or number of each row (n,), or the outputs to learn (n, outputs)
    weight: Tensor  # (n,) with mean 1
    unit: Tensor  # the part of each weight that a leave-one-out error leaves out (n,)
    place: Tensor  # index of each row in the set passed to fit (n,)

    def take(self, chosen: Any) -> "Examples":
        """Returns the examples of an index or slice."""
        return Examples(*(part[chosen] for part in self))

    def to(self, device: torch.device) -> "Examples":
        """Moves all of them to a device."""
        return Examples(*(part.to(device) for part in self))


def merge_rows(X: Array, target: Array, sample_weight: ArrayLike | None) -> Examples:
    """Merges equal rows into one with the sum of their weights, in an order independent of the input order.

    A row of weight 2 is therefore equivalent to two equal rows. Raises a ValueError for invalid weights.
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
    weight = weight / weight.mean()
    return Examples(*map(torch.from_numpy, (merged[:, 1:].copy(), merged[:, 0].copy(), weight, weight, kept[first])))


def choose_cases(
    encoding: Callable[[Tensor], Tensor], examples: Examples, count: int, init: str, random: np.random.RandomState
) -> tuple[Tensor, Array]:
    """Chooses random rows or, if ``init`` is ``"kmeans"``, cluster centers as cases.

    Returns the encoded cases ``(count, columns)``, and the index of the example of each, for a center the nearest one.
    """
    if init == "rows":
        chosen: Array = random.choice(len(examples.rows), count, replace=False)
        return encoding(examples.rows[chosen]), chosen
    columns = apply_in_chunks(encoding, examples.rows).numpy()
    means = MiniBatchKMeans(count, n_init=1, batch_size=max(1024, 4 * count), random_state=random)
    means.fit(columns, sample_weight=examples.weight.numpy())
    return torch.from_numpy(means.cluster_centers_), pairwise_distances_argmin(means.cluster_centers_, columns)


def apply_in_chunks(function: Callable[[Tensor], Tensor], rows: Tensor, size: int = CHUNK) -> Tensor:
    """Applies ``function`` to chunks of the rows to bound memory, and concatenates the results."""
    return torch.cat([function(part) for part in torch.split(rows, size)])

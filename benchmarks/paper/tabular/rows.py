"""Rows of the training set: merging equal rows, choosing the cases, and processing rows in chunks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.cluster import MiniBatchKMeans
from torch import Tensor

CHUNK = 4096  # rows processed at once without gradients: about 10 MB for each matrix of scores or columns


class Examples(NamedTuple):
    """Distinct rows of a training set. A row with a large weight may be several equal rows."""

    rows: Tensor  # (n, features) of float64
    target: Tensor  # class of each row (n,)
    weight: Tensor  # (n,) with mean 1

    def take(self, chosen: Any) -> "Examples":
        """Returns the examples of an index or slice."""
        return Examples(*(part[chosen] for part in self))

    def to(self, device: str) -> "Examples":
        """Moves all of them to a device."""
        return Examples(*(part.to(device) for part in self))


def merge_rows(X: np.ndarray, target: np.ndarray) -> Examples:
    """Merges equal rows of a class into one with the sum of their weights, in an order independent of the input's."""
    merged, count = np.unique(np.column_stack([target, X]), axis=0, return_counts=True)
    parts = merged[:, 1:].copy(), merged[:, 0].astype(np.int64), count / count.mean()
    return Examples(*map(torch.from_numpy, parts))


def choose_cases(
    encoding: Callable[[Tensor], Tensor], examples: Examples, count: int, init: str, random: np.random.RandomState
) -> Tensor:
    """Chooses random rows or, if ``init`` is ``"kmeans"``, cluster centers as encoded cases ``(count, columns)``."""
    if init == "rows":
        return encoding(examples.rows[random.choice(len(examples.rows), count, replace=False)])
    columns = apply_in_chunks(encoding, examples.rows).numpy()
    means = MiniBatchKMeans(count, n_init=1, batch_size=max(1024, 4 * count), random_state=random)
    return torch.from_numpy(means.fit(columns, sample_weight=examples.weight.numpy()).cluster_centers_)


def apply_in_chunks(function: Callable[[Tensor], Tensor], rows: Tensor, size: int = CHUNK) -> Tensor:
    """Applies ``function`` to chunks of the rows to bound memory, and concatenates the results."""
    return torch.cat([function(part) for part in torch.split(rows, size)])

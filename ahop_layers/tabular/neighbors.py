"""A nearest-neighbor classifier with a learned similarity."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_random_state  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]
from torch import Tensor

from ahop_layers.errors import AHopError, check_numbers
from ahop_layers.memory.memory import AssociativeMemory
from ahop_layers.ops.reference import check_bases
from ahop_layers.tabular.base import Array, ClassPredictions, TabularEstimator
from ahop_layers.tabular.network import Encoding
from ahop_layers.tabular.settings import is_integer
from ahop_layers.variants import Mixed, Variant


class AdaptiveNeighborsClassifier(ClassPredictions, TabularEstimator):
    """Classifier that stores all training rows and weights them by a learned similarity.

    The probability of a class is the sum of the softmax weights of its rows, where the softmax is over the adaptive
    similarities of a row to all stored rows. Training maximizes the likelihood of the class of a stored row, which is
    scored without itself unless it is the only one of its class.

    Args:
        bases: base similarities of the adaptive similarity, which is initialized to the first.
        blocks: similarities are summed over blocks of features before they are sorted; see
            :class:`~ahop_layers.AdaptiveSimilarity`. ``None`` makes every feature a block.
        variant: a variant of :mod:`ahop_layers.variants` that corrupts rows during training, for queries with errors or
            missing values. It receives features of mean 0 and variance 1 if ``standardize`` is True. ``None`` trains on
            the rows as they are.
        standardize: whether to shift each feature to mean 0 and scale it to variance 1. If False, rows are compared in
            their own units.
        epochs: number of training steps; each draws ``batch_size`` rows at random.
        batch_size: rows per step. A step scores each of them against all stored rows.
        learning_rate: maximum learning rate of Adam. It rises for a tenth of the steps, then falls to zero.
        random_state: seed of the batches and of the variant.
        device: training device, ``"auto"`` (a GPU if available) or a PyTorch device. Prediction runs on the CPU.
        verbose: show a progress bar if tqdm is installed.

    Attributes:
        classes_: class labels.
        memory_: the :class:`~ahop_layers.AssociativeMemory` of the stored rows, in the order of the training set.
        history_: training loss of each step.
        n_features_in_, feature_names_in_: as in scikit-learn.

    Raises:
        ValueError: invalid input according to scikit-learn, or an invalid parameter (an AHopError).

    >>> from sklearn.datasets import load_iris
    >>> from ahop_layers.tabular import AdaptiveNeighborsClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = AdaptiveNeighborsClassifier(epochs=20, random_state=0).fit(X[::2], y[::2])
    >>> bool(model.score(X[1::2], y[1::2]) > 0.9)
    True
    """

    _fitted = "memory_"

    def __init__(
        self,
        *,
        bases: Sequence[str] = ("l1",),
        blocks: Any = None,
        variant: Variant | None = None,
        standardize: bool = True,
        epochs: int = 100,
        batch_size: int = 256,
        learning_rate: float = 0.05,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        verbose: bool = False,
    ) -> None:
        self.bases = bases
        self.blocks = blocks
        self.variant = variant
        self.standardize = standardize
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: ArrayLike, y: ArrayLike) -> "AdaptiveNeighborsClassifier":
        """Fit to rows ``X (n, features)`` and labels ``y (n,)``."""
        features, labels = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(labels)
        classes, target = self._classes_of(labels)
        self._check_parameters()
        device = self._check_device()
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        rows = torch.tensor(features)
        encoding = self._make_encoding(rows)
        memory = AssociativeMemory.preset(
            "A-Hop",
            encoding(rows).contiguous().to(device),
            labels=target,
            bases=self.bases,
            init=check_bases(self.bases)[0],
            blocks=self.blocks,
        )
        history = memory.fit(
            Mixed() if self.variant is None else self.variant,  # Mixed() leaves rows unchanged
            epochs=int(self.epochs),
            lr=self.learning_rate,
            batch=int(self.batch_size),
            progress=bool(self.verbose),
            seed=seed,
            by="label",
        )
        # Float64 on the CPU: predictions do not depend on the batch or on the training device, and the estimator can be
        # unpickled on a machine without that device.
        memory, encoding = memory.cpu().double(), encoding.double()
        memory.patterns = encoding(rows).contiguous()  # not rounded to float32, so that equal rows have distance 0
        self.memory_, self._encoding, self.history_, self.classes_ = memory, encoding, history.tolist(), classes
        return self

    def kneighbors(
        self, X: ArrayLike | None = None, n_neighbors: int = 5, return_distance: bool = True
    ) -> tuple[Array, Array] | Array:
        """Find the stored rows that are most similar to each row.

        The distance is the negative score of the learned similarity. It orders rows as the softmax weights do, but it
        is not a metric: it can be negative, and the distance of a row to itself is 0 only for ``dis`` and ``l1``.

        Args:
            X: ``(n, features)``, or None for the stored rows, each without itself.
            n_neighbors: number of rows to find.
            return_distance: whether to return distances.

        Returns:
            The distances ``(n, n_neighbors)`` in ascending order, unless ``return_distance`` is False, and the indices
            ``(n, n_neighbors)`` of the rows in the training set. Equal distances are ordered by index.

        Raises:
            AHopError: ``n_neighbors`` is not an integer between 1 and the number of rows that can be found.

        >>> from ahop_layers.tabular import AdaptiveNeighborsClassifier
        >>> X, y = np.arange(8.0)[:, None], np.arange(8) > 3
        >>> model = AdaptiveNeighborsClassifier(epochs=5, random_state=0).fit(X, y)
        >>> model.kneighbors([[2.1], [7.0]], n_neighbors=2, return_distance=False)
        array([[2, 3],
               [7, 6]])
        >>> model.kneighbors(n_neighbors=1, return_distance=False)[-1]
        array([6])
        """
        if X is None:
            check_is_fitted(self, self._fitted)
            queries = self.memory_.patterns.numpy()
        else:
            queries = self._apply(self._encoding, self._check_rows(X))
        count = len(self.memory_.patterns) - (X is None)
        if not (is_integer(n_neighbors) and 1 <= n_neighbors <= count):
            known = f"{count} stored rows" if X is not None else f"{count} other stored rows"
            raise AHopError(f"n_neighbors must be an integer between 1 and the {known}, got {n_neighbors!r}")
        wanted = int(n_neighbors) + (X is None)

        def nearest(part: Tensor) -> Tensor:
            scores, indices = self.memory_.search(part, wanted)
            return torch.stack([-scores, indices.to(scores.dtype)], 1)

        distances, found = self._apply(nearest, queries).swapaxes(0, 1)
        neighbors = found.astype(np.int64)
        if X is None:
            distances, neighbors = _without_self(distances, neighbors)
        return (distances, neighbors) if return_distance else neighbors

    def _outputs(self, X: ArrayLike) -> Array:
        rows = self._check_rows(X)
        return self._apply(lambda part: self.memory_.class_scores(self._encoding(part)), rows)

    def _make_encoding(self, rows: Tensor) -> Encoding:
        if self.standardize:
            return Encoding.standard(rows, rows.new_ones(len(rows)))
        dim = rows.shape[1]
        return Encoding(torch.arange(dim), rows.new_zeros(dim), rows.new_ones(dim), (-math.inf, math.inf))

    def _check_parameters(self) -> None:
        check_bases(self.bases)
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if not (is_integer(value) and value >= 1):
                raise AHopError(f"{name} must be an integer of at least 1, got {value!r}")
        check_numbers("a positive number", learning_rate=self.learning_rate)
        if not isinstance(self.variant, Variant | None):
            raise AHopError(f"variant must be a variant or None, got {self.variant!r}")


def _without_self(distances: Array, neighbors: Array) -> tuple[Array, Array]:
    """Remove row i from its own neighbors ``(n, k + 1)``, or the last neighbor if row i is not among them."""
    others = neighbors != np.arange(len(neighbors))[:, None]
    others[others.all(1), -1] = False
    shape = (len(neighbors), -1)
    return distances[others].reshape(shape), neighbors[others].reshape(shape)

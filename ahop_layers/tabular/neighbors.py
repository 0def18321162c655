"""A nearest-neighbor classifier with a learned similarity."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_random_state  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]
from torch import Tensor

from ahop_layers.errors import AHopError, check_numbers, check_sizes
from ahop_layers.memory.memory import AssociativeMemory
from ahop_layers.ops.reference import check_bases
from ahop_layers.tabular.base import ClassPredictions, TabularEstimator, check_count
from ahop_layers.tabular.columns import standardization
from ahop_layers.tabular.rows import Array
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

    >>> from sklearn.datasets import load_iris
    >>> from ahop_layers.tabular import AdaptiveNeighborsClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = AdaptiveNeighborsClassifier(epochs=20, random_state=0).fit(X[::2], y[::2])
    >>> bool(model.score(X[1::2], y[1::2]) > 0.9)
    True
    """

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
        self.bases, self.blocks, self.variant, self.standardize = bases, blocks, variant, standardize
        self.epochs, self.batch_size, self.learning_rate = epochs, batch_size, learning_rate
        self.random_state, self.device, self.verbose = random_state, device, verbose

    def fit(self, X: ArrayLike, y: ArrayLike) -> "AdaptiveNeighborsClassifier":
        """Fits to rows ``X (n, features)`` and labels ``y (n,)``."""
        features, labels = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(labels)
        classes, target = self._classes_of(labels)
        bases = check_bases(self.bases)
        check_sizes(epochs=self.epochs, batch_size=self.batch_size)
        check_numbers("a positive number", learning_rate=self.learning_rate)
        self._check_flags("standardize", "verbose")
        if not isinstance(self.variant, Variant | None):
            raise AHopError(f"variant must be a variant or None, got {self.variant!r}")
        device = self._check_device()
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        center, rate = self._scales(features)
        patterns = torch.from_numpy((features - center) * rate)
        form = {"bases": bases, "init": bases[0], "blocks": self.blocks}
        memory = AssociativeMemory.preset("A-Hop", patterns.float().to(device), labels=target, **form)
        history: Any = memory.fit(
            Mixed() if self.variant is None else self.variant,  # Mixed() leaves rows unchanged
            epochs=int(self.epochs),
            lr=self.learning_rate,
            batch=int(self.batch_size),
            progress=self.verbose,
            seed=seed,
            by="label",
        )
        # Float64 on the CPU: predictions do not depend on the batch or on the training device, and the estimator can be
        # unpickled on a machine without that device.
        memory = memory.cpu().double()
        memory.patterns = patterns  # not rounded to float32, so that equal rows have distance 0
        self.memory_, self.history_, self.classes_ = memory, history.tolist(), classes
        self._center, self._rate = center, rate
        return self

    def kneighbors(
        self, X: ArrayLike | None = None, n_neighbors: int = 5, return_distance: bool = True
    ) -> tuple[Array, Array] | Array:
        """Finds the stored rows that are most similar to each row of ``X (n, features)``.

        None means the stored rows, each without itself. Returns the distances ``(n, n_neighbors)`` in ascending order,
        unless ``return_distance`` is False, and the indices of the rows in the training set. Equal distances are
        ordered by index.

        The distance is the negative score of the learned similarity. It orders rows as the softmax weights do, but it
        is not a metric: it can be negative, and the distance of a row to itself is 0 only for ``dis`` and ``l1``.

        >>> from ahop_layers.tabular import AdaptiveNeighborsClassifier
        >>> X, y = np.arange(8.0)[:, None], np.arange(8) > 3
        >>> model = AdaptiveNeighborsClassifier(epochs=5, random_state=0).fit(X, y)
        >>> model.kneighbors([[2.1], [7.0]], n_neighbors=2, return_distance=False)
        array([[2, 3],
               [7, 6]])
        >>> model.kneighbors(n_neighbors=1, return_distance=False)[-1]
        array([6])
        """
        check_is_fitted(self, "memory_")
        queries = self.memory_.patterns.numpy() if X is None else self._columns(X)
        things = "stored rows" if X is not None else "other stored rows"
        count = check_count("n_neighbors", n_neighbors, len(self.memory_.patterns) - (X is None), things)

        def nearest(part: Tensor) -> Tensor:
            scores, indices = self.memory_.search(part, count + (X is None))
            return torch.stack([-scores, indices.to(scores.dtype)], 1)

        distances, found = self._apply(nearest, queries).swapaxes(0, 1)
        neighbors = found.astype(np.int64)
        if X is None:
            distances, neighbors = _without_self(distances, neighbors)
        return (distances, neighbors) if return_distance else neighbors

    def _outputs(self, X: ArrayLike) -> Array:
        columns = self._columns(X)  # raises if the estimator is not fitted
        return self._apply(self.memory_.class_scores, columns)

    def _columns(self, X: ArrayLike) -> Array:
        """Returns the checked rows as they are compared."""
        check_is_fitted(self, "memory_")
        rows = validate_data(self, X, dtype=np.float64, reset=False)
        return (rows - self._center) * self._rate

    def _scales(self, rows: Array) -> Array:
        """Returns the shift and the factor of each feature ``(2, features)``."""
        if not self.standardize:
            return np.repeat([[0.0], [1.0]], rows.shape[1], axis=1)
        weight = torch.ones(len(rows), dtype=torch.float64)
        return np.transpose([standardization(index, torch.tensor(each), weight) for index, each in enumerate(rows.T)])


def _without_self(distances: Array, neighbors: Array) -> tuple[Array, Array]:
    """Removes row i from its own neighbors ``(n, k + 1)``, or the last neighbor if row i is not among them."""
    others = neighbors != np.arange(len(neighbors))[:, None]
    others[others.all(1), -1] = False
    shape = (len(neighbors), -1)
    return distances[others].reshape(shape), neighbors[others].reshape(shape)

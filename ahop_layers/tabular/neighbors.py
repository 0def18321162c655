"""Nearest-neighbor estimators with a learned similarity."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import MultiOutputMixin, RegressorMixin  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted  # type: ignore[import-untyped]
from torch import Tensor

from ahop_layers.errors import AHopError, check_choice, check_numbers, check_sizes
from ahop_layers.memory.memory import AssociativeMemory
from ahop_layers.memory.variants import Mixed, Variant
from ahop_layers.ops.reference import check_bases
from ahop_layers.tabular.base import ClassPredictions, TabularEstimator, check_count
from ahop_layers.tabular.columns import standardization
from ahop_layers.tabular.distances import LEARNED, PLAIN, RowSimilarity, choose
from ahop_layers.tabular.rows import Array

SHORTLIST, SHORTLIST_ELEMENTS, FIRST_SCORES = 64, 2**22, 2**24
"""Rows to which weights of ranks are applied for each query, and elements and first scores that are held at once."""

LEVELS = 64
"""The lowest value of one scale is this fraction of the range above zero, which is the value of what is unknown."""


class _Neighbors(TabularEstimator):
    """What both estimators share: stored rows, their preparation, and the search for neighbors."""

    n_neighbors: int = 5
    memory_: AssociativeMemory
    _frame: str = "standardized"
    _center: Array | float
    _rate: Array | float

    def kneighbors(
        self, X: ArrayLike | None = None, n_neighbors: int | None = None, return_distance: bool = True
    ) -> tuple[Array, Array] | Array:
        """Finds the stored rows that are most similar to each row of ``X (n, features)``.

        Without ``X``, these are the stored rows, each without itself. Without ``n_neighbors``, it is that of the
        estimator, 5 for a classifier. Returns the distances ``(n, n_neighbors)`` in ascending order,
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
        wanted = self.n_neighbors if n_neighbors is None else n_neighbors
        count = check_count("n_neighbors", wanted, len(self.memory_.patterns) - (X is None), things)
        found = self._apply(partial(self._search, count=count + (X is None)), queries)
        distances, neighbors = -found[:, 0], found[:, 1].astype(np.int64)
        if X is None:
            others = neighbors != np.arange(len(neighbors))[:, None]
            others[others.all(1), -1] = False  # rows equal to row i came before it
            distances, neighbors = (each[others].reshape(len(each), -1) for each in (distances, neighbors))
        return (distances, neighbors) if return_distance else neighbors

    def _columns(self, X: ArrayLike) -> Array:
        """Returns the checked rows as they are compared."""
        check_is_fitted(self, "memory_")
        return _in_frame(self._frame, self._validated(X, reset=False), self._center, self._rate)

    def _search(self, rows: Tensor, count: int) -> Tensor:
        """Returns the scores and indices ``(n, 2, count)`` of the most similar stored rows.

        Weights of ranks are applied to the best rows of a first search without them.
        """
        similarity, stored = self.memory_.similarity, self.memory_.patterns
        size = max(SHORTLIST, 4 * count)
        ranked = isinstance(similarity, RowSimilarity) and any(term.ranked for term in similarity.terms)
        if not ranked or size >= len(stored):
            scores, indices = self.memory_.search(rows, count)
            return torch.stack([scores, indices.to(scores.dtype)], 1)
        missing = bool(rows.isnan().any() or stored.isnan().any())
        found = []
        for part in torch.split(rows, max(1, FIRST_SCORES // len(stored))):
            places = similarity(part, stored, missing, ranked=False).topk(size).indices.sort().values
            step = max(1, SHORTLIST_ELEMENTS // (size * rows.shape[1]))
            for some, near in zip(torch.split(part, step), torch.split(places, step), strict=True):
                exact = similarity(some[:, None], stored[near], missing).squeeze(1)
                scores, order = exact.sort(descending=True, stable=True)  # equal scores are ordered by index
                found.append(torch.stack([scores, near.gather(1, order).to(scores.dtype)], 1)[..., :count])
        return torch.cat(found)


def _standard_scales(rows: Array) -> Array:
    """Returns the shift and the factor of each feature ``(2, features)`` that give it mean 0 and variance 1."""
    known = (torch.tensor(column[~np.isnan(column)]) for column in rows.T)
    scales = [
        standardization(index, values, torch.ones_like(values)) if len(values) else (0.0, 0.0)
        for index, values in enumerate(known)
    ]
    return np.transpose(scales)


class AdaptiveNeighborsClassifier(ClassPredictions, _Neighbors):
    """Classifier that stores all training rows and weights them by a learned similarity.

    The probability of a class is the sum of the softmax weights of its rows, where the softmax is over the adaptive
    similarities of a row to all stored rows. Training maximizes the likelihood of the class of a stored row, which is
    scored without itself unless it is the only one of its class. NaN is an unknown value, which takes no part.

    Args:
        bases: base similarities of the adaptive similarity, which is initialized to the first.
        blocks: similarities are summed over blocks of features before they are sorted; see
            :class:`~ahop_layers.AdaptiveSimilarity`. ``None`` makes every feature a block.
        variant: a variant of :mod:`ahop_layers.memory.variants` that damages rows during training, for queries with errors or
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
        features, labels = self._validated(X, y=y)
        check_classification_targets(labels)
        classes, target = self._classes_of(labels)
        bases = check_bases(self.bases)
        check_sizes(epochs=self.epochs, batch_size=self.batch_size)
        check_numbers("a positive number", learning_rate=self.learning_rate)
        self._check_flags("standardize", "verbose")
        if not isinstance(self.variant, Variant | None):
            raise AHopError(f"variant must be a variant or None, got {self.variant!r}")
        device = self._check_device()
        seed = self._seed()
        center, rate = _standard_scales(features) if self.standardize else (0.0, 1.0)
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

    def _outputs(self, X: ArrayLike) -> Array:
        columns = self._columns(X)  # raises if the estimator is not fitted
        return self._apply(self.memory_.class_scores, columns)


class AdaptiveNeighborsRegressor(MultiOutputMixin, RegressorMixin, _Neighbors):  # type: ignore[misc]
    """Regressor that averages the outputs of the most similar training rows, by a distance that is chosen and learned.

    A prediction is the mean of the outputs of ``n_neighbors`` rows. ``fit`` compares distances by the errors of stored
    rows that are predicted from the others: L1, Euclid, cosine and Sorensen of values on one scale, or of powers of
    them; L1 and Euclid of standardized features; and learned sums of these, with and without weights of ranks. It takes
    the learned one, unless another has a smaller error by more than a standard error. Errors are Euclidean distances:
    several outputs should have the same unit.

    NaN is an unknown value. Where features are standardized it takes no part. On one scale it is a value below all
    others: a sensor that received nothing. The errors of held-out rows decide which of both it is.

    Rows with several outputs that are all equal were measured at one place, and do not predict each other in ``fit``.

    Args:
        n_neighbors: number of rows whose outputs are averaged.
        similarity: ``"auto"`` chooses the distance; a name of ``errors_`` takes that one.
        random_state: seed of the choice of held-out rows.

    Attributes:
        errors_: mean error of held-out rows by the name of a distance; empty if ``similarity`` names a plain one.
        similarity_: name of the distance in use.
        memory_: the :class:`~ahop_layers.AssociativeMemory` of the stored rows, in the order of the training set.
        n_features_in_, feature_names_in_: as in scikit-learn.

    >>> from ahop_layers.tabular import AdaptiveNeighborsRegressor
    >>> position = np.random.default_rng(0).uniform(0, 10, (300, 2))
    >>> stations = np.random.default_rng(1).uniform(0, 10, (12, 2))
    >>> distance = np.linalg.norm(position[:, None] - stations, axis=-1)
    >>> signal = np.where(distance < 6, -40 - 5 * distance, np.nan)  # a station far away is not heard
    >>> model = AdaptiveNeighborsRegressor(n_neighbors=3, random_state=0).fit(signal[::2], position[::2])
    >>> error = np.linalg.norm(model.predict(signal[1::2]) - position[1::2], axis=-1)
    >>> bool(error.mean() < 0.6)
    True
    """

    def __init__(
        self, n_neighbors: int = 5, *, similarity: str = "auto", random_state: int | np.random.RandomState | None = None
    ) -> None:
        self.n_neighbors, self.similarity, self.random_state = n_neighbors, similarity, random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> "AdaptiveNeighborsRegressor":
        """Fits to rows ``X (n, features)`` and outputs ``y (n,)`` or ``(n, outputs)``."""
        rows, outputs = self._validated(X, y=y, multi_output=True, y_numeric=True)
        check_sizes(n_neighbors=self.n_neighbors)
        check_choice("similarity", self.similarity, ("auto", *PLAIN, *LEARNED))
        seed = self._seed()
        scales: dict[str, Any] = {"standardized": _standard_scales(rows), "one scale": _one_scale(rows)}
        frames = {name: torch.from_numpy(_in_frame(name, rows, *each)) for name, each in scales.items()}
        targets = torch.from_numpy(outputs.reshape(len(outputs), -1).astype(np.float64))
        targets = targets - targets.mean(0)  # coordinates far from the origin lose their digits in float32
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            name, frame, similarity, errors = choose(frames, targets, int(self.n_neighbors), self.similarity, generator)
        self.memory_ = AssociativeMemory(frames[frame], similarity.double())
        self.similarity_, self.errors_, self._frame = name, errors, frame
        self._center, self._rate = scales[frame]
        self._outputs = outputs.astype(np.float64)
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Returns the outputs ``(n,)`` or ``(n, outputs)`` of rows ``X (n, features)``."""
        neighbors: Any = self.kneighbors(X, return_distance=False)
        mean: Array = self._outputs[neighbors].mean(1)
        return mean


def _one_scale(rows: Array) -> tuple[float, float]:
    """Returns the shift and the factor that map all values to (0, 1]."""
    low, high = (np.nanmin(rows), np.nanmax(rows)) if not np.isnan(rows).all() else (0.0, 0.0)
    step = (high - low or 1.0) / LEVELS
    return low - step, 1 / (high - low + step)


def _in_frame(frame: str, rows: Array, center: Array | float, rate: Array | float) -> Array:
    """Returns rows as they are compared; on one scale, unknown values are 0."""
    moved: Array = (rows - center) * rate
    return moved if frame == "standardized" else np.maximum(np.nan_to_num(moved, nan=0.0), 0.0)

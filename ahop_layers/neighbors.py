"""Scikit-learn estimators that predict from the most similar training rows, by the learned score of a memory."""

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ahop_layers.errors import AHopError, check_sizes
from ahop_layers.memory import AssociativeMemory
from ahop_layers.similarity.adaptive import AdaptiveSimilarity

try:
    from scipy.stats import rankdata  # type: ignore[import-untyped]
    from sklearn import base, cluster, preprocessing, utils  # type: ignore[import-untyped]
    from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
    from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]
except ImportError as error:
    message = "ahop_layers.neighbors needs scikit-learn, got no installation: pip install ahop-layers[sklearn]"
    raise ImportError(message) from error

Array = NDArray[Any]
OUTPUT_CLASSES = 8  # groups of similar outputs that a regressor learns to distinguish


class _Neighbors(base.BaseEstimator):  # type: ignore[misc]
    """The memory of the training rows, and the search for neighbors."""

    memory_: AssociativeMemory

    def __init__(
        self, n_neighbors: int = 30, *, damage: Any = None, similarity: Any = None,
        random_state: int | np.random.RandomState | None = None, device: str | torch.device | None = None,
        shortlist: int | str | None = None,
    ) -> None:  # fmt: skip
        self.n_neighbors, self.damage, self.similarity = n_neighbors, damage, similarity
        self.random_state, self.device, self.shortlist = random_state, device, shortlist

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def kneighbors(
        self, X: ArrayLike | None = None, n_neighbors: int | None = None, return_distance: bool = True
    ) -> tuple[Array, Array] | Array:
        """Returns distances ``(n, n_neighbors)``, in ascending order, and indices of the most similar training rows.

        The distance is the negative score, which is not a metric. Equal distances are ordered by index.

        Args:
            X: rows ``(n, features)``. None means the training rows, each without itself.
            n_neighbors: number of neighbors of each row; None means the one of the estimator.
            return_distance: whether to return distances too; False returns the indices alone.

        >>> X, y = np.arange(8.0)[:, None], np.arange(8) > 3
        >>> model = AdaptiveNeighborsClassifier(random_state=0).fit(X, y)
        >>> model.kneighbors([[2.1], [7.0]], n_neighbors=2, return_distance=False)
        array([[2, 3],
               [7, 6]])
        >>> model.kneighbors(n_neighbors=1, return_distance=False)[-1]
        array([6])
        """
        check_is_fitted(self, "memory_")
        stored, own = self.memory_.patterns, X is None
        most = len(stored) - own
        count = min(self.n_neighbors, most) if n_neighbors is None else n_neighbors
        check_sizes(n_neighbors=count)
        if count > most:
            raise AHopError(f"n_neighbors must be at most the number of other training rows, {most}, got {count}")
        rows = stored if own else self._scaled(self._validated(X, reset=False)).to(stored)
        hits = self.memory_.search(rows, int(count) + own, self.shortlist)
        distances, neighbors = (each.cpu().numpy() for each in (-hits.scores, hits.indices))
        if own:
            others = neighbors != np.arange(len(neighbors))[:, None]
            others[others.all(1), -1] = False  # as many equal rows come before this row
            distances, neighbors = (each[others].reshape(len(each), -1) for each in (distances, neighbors))
        return (distances, neighbors) if return_distance else neighbors

    def _learn(self, rows: Array, labels: Array) -> None:
        """Stores ``rows (n, features)`` and learns to find a row of the class ``labels (n,)`` by a damaged row."""
        check_sizes(n_neighbors=self.n_neighbors)
        with np.errstate(invalid="ignore"):  # a column without a known value stays unknown
            self._scaler = preprocessing.StandardScaler().fit(rows)
        default = AdaptiveSimilarity(rows.shape[1], bases=("l1",), init="l1").to(self.device)
        similarity = default if self.similarity is None else deepcopy(self.similarity)
        memory = AssociativeMemory(self._scaled(rows).to(self.device), similarity, labels=labels)
        if self.shortlist == "auto" and memory.patterns.device.type == "cpu":  # on a GPU, searches are exact
            memory.build_codes()
        memory.fit(self.damage, seed=utils.check_random_state(self.random_state).randint(2**31))
        on_cpu = memory.patterns.device.type == "cpu"
        self.memory_ = memory.double() if on_cpu else memory  # rounding would depend on the number of rows

    def _validated(self, X: Any, **options: Any) -> Any:
        """Returns rows of finite numbers and NaN, which is what a masked array masks, and targets if given."""
        given = {"X": X, **options}
        given |= {name: each.astype(float).filled(np.nan) for name, each in given.items() if np.ma.is_masked(each)}
        return validate_data(self, **given, dtype=np.float64, ensure_all_finite="allow-nan")

    def _scaled(self, rows: Array) -> torch.Tensor:
        """Standardizes columns and compresses their tails. A row without a known value becomes the mean row."""
        scaled = np.arcsinh(self._scaler.transform(rows))
        scaled[np.isnan(scaled).all(1)] = 0.0
        return torch.from_numpy(scaled.astype(np.float32))

    def _weighted(self, X: ArrayLike) -> tuple[Array, Array]:
        """Returns the weights of the neighbors of each row and their indices ``(n, n_neighbors)``."""
        distances, neighbors = self.kneighbors(X)
        logits = -self.memory_.beta.item() * torch.from_numpy(distances).double()
        return logits.softmax(-1).numpy(), neighbors


class AdaptiveNeighborsClassifier(base.ClassifierMixin, _Neighbors):  # type: ignore[misc]
    """Classifier by the most similar training rows, for rows with wrong and unknown values.

    The training rows are the patterns of an :class:`~ahop_layers.AssociativeMemory`. Its ``fit`` learns from damaged
    training rows to find other rows of their class. The probability of a class is the sum of the softmax weights of its
    rows among the neighbors. Columns are standardized and their tails compressed by ``arcsinh``, so units do not
    matter. NaN is an unknown value, in training rows and in new ones: it takes no part in a comparison.

    Args:
        n_neighbors: number of neighbors; fewer if there are fewer rows. Neighbors with small scores hardly count.
        damage: what happens to new rows, as for :meth:`~ahop_layers.AssociativeMemory.fit`, applied to the scaled
            columns. None assumes that any share of the values may be replaced or missing.
        similarity: as for the memory. None is the Manhattan distance with a learned weight of each rank: how much the
            smallest difference of two rows counts, how much the second smallest, and so on.
        random_state: seed of the damage.
        device: PyTorch device of the memory; None is the CPU.
        shortlist: as for :meth:`~ahop_layers.AssociativeMemory.search`, at least the number of neighbors.

    Attributes:
        classes_: class labels.
        memory_: the memory of the scaled training rows, in their order.
        n_features_in_, feature_names_in_: as in scikit-learn.

    >>> from sklearn.datasets import load_iris
    >>> from ahop_layers.neighbors import AdaptiveNeighborsClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = AdaptiveNeighborsClassifier(random_state=0).fit(X[::2], y[::2])
    >>> rows = X[1::2]
    >>> rows[:, 0] = np.nan
    >>> bool(model.score(rows, y[1::2]) > 0.9)
    True
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> "AdaptiveNeighborsClassifier":
        """Fits to rows ``X (n, features)`` and labels ``y (n,)``."""
        rows, labels = self._validated(X, y=y)
        check_classification_targets(labels)
        self.classes_, self._classes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise AHopError(f"y must have at least 2 classes, got 1 class: {self.classes_[0]!r}")
        self._learn(rows, self._classes)
        return self

    def predict_proba(self, X: ArrayLike) -> Array:
        """Returns the class probabilities ``(n, classes)`` of rows ``X (n, features)``."""
        weights, neighbors = self._weighted(X)
        found: Array = np.zeros((len(weights), len(self.classes_)))
        np.add.at(found, (np.arange(len(weights))[:, None], self._classes[neighbors]), weights)
        return found

    def predict(self, X: ArrayLike) -> Array:
        """Returns the most probable class label ``(n,)`` of rows ``X (n, features)``."""
        best = self.predict_proba(X).argmax(1)  # raises if the estimator is not fitted
        return self.classes_[best]


class AdaptiveNeighborsRegressor(base.MultiOutputMixin, base.RegressorMixin, _Neighbors):  # type: ignore[misc]
    """Regressor by the most similar training rows, for rows with wrong and unknown values.

    A prediction is the mean of the outputs of the neighbors, weighted by the softmax of their scores. The memory learns
    to find rows with similar outputs, in one of eight groups. See :class:`AdaptiveNeighborsClassifier` for arguments,
    attributes and columns.

    >>> from ahop_layers.neighbors import AdaptiveNeighborsRegressor
    >>> random = np.random.default_rng(0)
    >>> position, stations = random.uniform(0, 10, (300, 2)), random.uniform(0, 10, (12, 2))
    >>> signal = -40 - 5 * np.linalg.norm(position[:, None] - stations, axis=-1)
    >>> model = AdaptiveNeighborsRegressor(random_state=0).fit(signal[::2], position[::2])
    >>> damaged = np.where(random.random(signal.shape) < 0.3, np.nan, signal)
    >>> error = np.linalg.norm(model.predict(damaged[1::2]) - position[1::2], axis=-1)
    >>> bool(error.mean() < 0.6)
    True
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> "AdaptiveNeighborsRegressor":
        """Fits to rows ``X (n, features)`` and outputs ``y (n,)`` or ``(n, outputs)``."""
        rows, outputs = self._validated(X, y=y, multi_output=True, y_numeric=True, ensure_min_samples=2)
        ranks = rankdata(outputs.reshape(len(rows), -1), axis=0)
        count = min(OUTPUT_CLASSES, len(np.unique(ranks, axis=0)))
        self._learn(rows, cluster.KMeans(count, n_init=1, random_state=self.random_state).fit_predict(ranks))
        self._outputs = outputs.astype(np.float64)
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Returns the outputs ``(n,)`` or ``(n, outputs)`` of rows ``X (n, features)``."""
        weights, neighbors = self._weighted(X)
        return np.asarray(np.einsum("nk,nk...->n...", weights, self._outputs[neighbors]))

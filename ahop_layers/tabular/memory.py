"""Estimators that predict from the similarities of a row to cases, which are rows of the training set."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin  # type: ignore[import-untyped]
from sklearn.utils import check_random_state  # type: ignore[import-untyped]
from sklearn.utils.class_weight import compute_sample_weight  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional

from ahop_layers.errors import AHopError, check_choice, check_given_sizes, check_numbers
from ahop_layers.tabular import projection
from ahop_layers.tabular.base import ClassPredictions, TabularEstimator, check_count
from ahop_layers.tabular.columns import Categories, RowEncoding, moments
from ahop_layers.tabular.projection import ProjectionNetwork, fit_projection
from ahop_layers.tabular.rows import Array, Examples, choose_cases, merge_rows

SMALL_ROWS = 5000  # with more rows, the projection learns an increasing function of each numeric feature
SMALL_CASES, LARGE_CASES = 1024, 2048
KNOTS = 32  # of the increasing functions


class AdaptiveMemory(TabularEstimator):
    """Base class of the estimators that predict from the scores of cases."""

    network_: ProjectionNetwork

    def __init__(
        self,
        n_cases: int | None = None,
        *,
        init: str = "rows",
        linear: bool = True,
        damage: float = 0.0,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        verbose: bool = False,
    ) -> None:
        self.n_cases, self.init, self.linear, self.damage = n_cases, init, linear, damage
        self.random_state, self.device, self.verbose = random_state, device, verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        return tags

    def nearest_cases(self, X: ArrayLike, n_nearest: int = 5) -> tuple[Array, Array]:
        """Explains the predictions for rows ``X (n, features)`` by the most similar cases.

        Returns indices ``(n, n_nearest)`` into ``cases_``, ``case_targets_`` and ``case_indices_``, and the weights
        ``(n, n_nearest)`` in descending order: retrieval probabilities, the softmax of the similarities.

        >>> from ahop_layers.tabular import AdaptiveMemoryRegressor
        >>> X = np.linspace(0, 1, 40)[:, None]
        >>> model = AdaptiveMemoryRegressor(random_state=0).fit(X, X[:, 0])
        >>> cases, weights = model.nearest_cases(X[:2], n_nearest=3)
        >>> cases.shape, bool((weights > 0).all())
        ((2, 3), True)
        """
        check_is_fitted(self, "network_")
        count = check_count("n_nearest", n_nearest, len(self.cases_), "cases")

        def heaviest(part: Tensor) -> Tensor:
            weights, cases = self.network_.scores(self.network_.encoding(part)).softmax(-1).topk(count)
            return torch.stack([weights, cases.to(weights.dtype)], 1)

        weights, cases = self._compute(heaviest, X).swapaxes(0, 1)
        return cases.astype(np.int64), weights

    def _outputs(self, X: ArrayLike) -> Array:
        check_is_fitted(self, "network_")
        return self._compute(self.network_, X)

    def _compute(self, function: Callable[[Tensor], Tensor], X: ArrayLike) -> Array:
        """Applies a function to rows, at once to so many that a matrix of scores has 8 MB."""
        if self._categories.codes and np.ndim(X) == 2:
            # Checks names and number of the features before their categories are looked up.
            validate_data(self, X, skip_check_array=True, reset=False)
        rows = self._validated(self._categories.encode(X), reset=False)
        return self._apply(function, rows, max(1, 2**20 // len(self.cases_)))

    def _train(self, examples: Examples, categories: Categories) -> None:
        """Chooses the cases and fits the network. Sets no attribute before that has succeeded."""
        check_given_sizes(n_cases=self.n_cases)
        check_choice("init", self.init, ("rows", "kmeans"))
        check_numbers("a number of at least 0 and below 1", damage=self.damage)
        self._check_flags("linear", "verbose")
        device, random = self._check_device(), check_random_state(self.random_state)
        large = len(examples.rows) > SMALL_ROWS and not self.damage
        encoding = RowEncoding(examples.rows, examples.weight, sorted(categories.codes), KNOTS if large else 0)
        count = self.n_cases or min(LARGE_CASES if large else SMALL_CASES, len(examples.rows))
        if count > len(examples.rows):
            message = f"n_cases={count} exceeds the {len(examples.rows)} rows to choose from: all of them are cases"
            warnings.warn(message, stacklevel=3)
        cases, chosen = choose_cases(encoding, examples, min(count, len(examples.rows)), self.init, random)
        network = ProjectionNetwork(encoding, cases, ranked=self.damage > 0)
        generator = torch.Generator().manual_seed(random.randint(np.iinfo(np.int32).max))
        options = projection.LARGE if large else projection.SMALL
        options = options._replace(damage=self.damage, linear=self.linear, verbose=self.verbose)
        history = fit_projection(network.to(device), examples.to(device), options, generator)
        self.cases_, self.case_indices_ = examples.rows[chosen].numpy(), examples.place[chosen].numpy()
        # On the CPU, so that the estimator can be unpickled on a machine without the training device.
        self.network_, self._categories, self.history_ = network.cpu(), categories, history
        self.feature_weights_: Array = network.feature_weight.numpy()


class AdaptiveMemoryClassifier(ClassPredictions, AdaptiveMemory):
    """Classifier that predicts from the similarities of a row to cases, which are rows of the training set.

    The output is ``exp(similarity(cases, row)) @ readout`` plus a linear function of the row, and the readout is the
    regularized pseudo-inverse of the memory. The similarity is an adaptive one of absolute differences with a learned
    weight for each feature. With more than 5,000 rows, each category has a weight too, and numbers are compared after a
    learned increasing function. All weights, the regularization and the probabilities are chosen by leave-one-out
    errors, which have a closed form, so that no row is held out.

    Features are numbers or categories: strings, or columns of a data frame with the dtype ``category``. NaN or None is
    a missing value. A category that is not in the training set is treated as missing. The units of features do not
    matter. Equal rows are merged.

    Args:
        n_cases: number of stored cases. ``None`` stores all rows, but at most 1,024, or 2,048 if there are more than
            5,000 rows. The time to fit is proportional to the square of this number.
        init: cases are random ``"rows"`` of the training set, or the centers of ``"kmeans"`` clusters.
        linear: whether there is a linear part.
        damage: for rows with wrong cells: the fraction of the features of a row that are replaced by those of another
            row while the similarity is learned, which then also has a weight for each rank of the sorted differences.
        class_weight: ``"balanced"``, or the weight of each class, by which ``sample_weight`` is multiplied.
        random_state: seed of the cases and of the rows on which the similarity is learned.
        device: training device, ``"auto"`` (a GPU if available) or a PyTorch device. Predictions run on the CPU.
        verbose: print the error of each step.

    Attributes:
        classes_: class labels.
        cases_, case_targets_, case_indices_: the cases ``(S, features)``, with codes for categories, their labels, and
            their indices in the training set. A cluster center is represented by its nearest row.
        feature_weights_: the learned weight ``(features,)`` of the differences of each standardized feature.
        history_: leave-one-out error of each step.
        n_features_in_, feature_names_in_: as in scikit-learn.

    >>> from sklearn.datasets import load_iris
    >>> from ahop_layers.tabular import AdaptiveMemoryClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = AdaptiveMemoryClassifier(random_state=0).fit(X[::2], y[::2])
    >>> bool(model.score(X[1::2], y[1::2]) > 0.9)
    True
    """

    def __init__(
        self,
        n_cases: int | None = None,
        *,
        init: str = "rows",
        linear: bool = True,
        damage: float = 0.0,
        class_weight: dict[Any, float] | str | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        verbose: bool = False,
    ) -> None:
        super().__init__(
            n_cases, init=init, linear=linear, damage=damage, random_state=random_state, device=device, verbose=verbose
        )
        self.class_weight = class_weight

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> "AdaptiveMemoryClassifier":
        """Fits to rows ``X (n, features)``, labels ``y (n,)`` and ``sample_weight (n,)``."""
        categories = Categories(X)
        features, labels = self._validated(categories.encode(X), y=y)
        check_classification_targets(labels)
        examples = merge_rows(features, np.unique(labels, return_inverse=True)[1], sample_weight)
        # Rows of weight zero are dropped by now, so that a label that only they have is not a class.
        classes, target = self._classes_of(labels[examples.place.numpy()])
        if self.class_weight is not None:
            examples = examples._replace(weight=self._weigh_classes(examples.weight.numpy(), classes, target))
        self._train(examples._replace(target=functional.one_hot(torch.from_numpy(target)).double()), categories)
        self.classes_, self.case_targets_ = classes, labels[self.case_indices_]
        return self

    def _weigh_classes(self, weight: Array, classes: Array, target: Array) -> Tensor:
        """Returns the weights of the rows, multiplied by the weights of their classes."""
        if isinstance(self.class_weight, str):
            check_choice("class_weight", self.class_weight, ("balanced",))
            weight = weight / np.bincount(target, weight)[target]
        else:
            weight = weight * compute_sample_weight(self.class_weight, classes[target])
        if not (weight.min() >= 0 and weight.sum() > 0):
            raise AHopError(f"class_weight must have no negative number and not only zeros, got {self.class_weight!r}")
        # A weight of zero would be an infinite regularization of its row.
        weight = np.maximum(weight / weight.mean(), 1e-12)
        return torch.from_numpy(weight / weight.mean())


class AdaptiveMemoryRegressor(RegressorMixin, AdaptiveMemory):  # type: ignore[misc]
    """Regressor that predicts from the similarities of a row to cases, which are rows of the training set.

    Parameters and attributes are those of :class:`AdaptiveMemoryClassifier`, without ``class_weight`` and
    ``classes_``.

    >>> import numpy as np
    >>> from ahop_layers.tabular import AdaptiveMemoryRegressor
    >>> X = np.random.default_rng(0).uniform(-2, 2, (400, 2))
    >>> y = np.abs(X).sum(1)
    >>> model = AdaptiveMemoryRegressor(random_state=0).fit(X[:200], y[:200])
    >>> bool(model.score(X[200:], y[200:]) > 0.95)
    True
    """

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> "AdaptiveMemoryRegressor":
        """Fits to rows ``X (n, features)``, targets ``y (n,)`` and ``sample_weight (n,)``."""
        categories = Categories(X)
        features, target = self._validated(categories.encode(X), y=y, y_numeric=True)
        examples = merge_rows(features, target, sample_weight)
        low, high = examples.target.aminmax()
        mean, scale = moments(examples.target, examples.weight) if low < high else (low.item(), 1.0)
        if not np.finfo(np.float64).tiny <= scale**2 < np.inf:  # standardized targets would be NaN or zero
            raise AHopError(f"y must have a variance within the range of float64, got targets from {low:g} to {high:g}")
        self._train(examples._replace(target=((examples.target - mean) / scale)[:, None]), categories)
        self._mean, self._scale, self.case_targets_ = mean, scale, target[self.case_indices_]
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Returns the predicted target ``(n,)`` of rows ``X (n, features)``."""
        outputs = self._outputs(X)[:, 0]  # raises if the estimator is not fitted
        return self._mean + self._scale * outputs

"""Scikit-learn estimators for tables that predict from the similarities of a row to cases of the training set."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin  # type: ignore[import-untyped]
from sklearn.utils.class_weight import compute_sample_weight  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]

from ahop_layers.errors import AHopError, check_choice
from ahop_layers.tabular.base import AdaptiveMemory, Array, ClassPredictions
from ahop_layers.tabular.neighbors import AdaptiveNeighborsClassifier
from ahop_layers.tabular.rows import TrainingSet, merge_rows
from ahop_layers.tabular.training import Loss, absolute_error, log_loss, squared_error, squared_loss

__all__ = ["AdaptiveMemoryClassifier", "AdaptiveMemoryRegressor", "AdaptiveNeighborsClassifier"]


class AdaptiveMemoryClassifier(ClassPredictions, AdaptiveMemory):
    """Classifier that predicts from the similarities of a row to cases, which are rows of the training set.

    By default (``"projection"``) the output is ``exp(similarity(cases, row)) @ readout`` plus a linear function of the
    row, and the readout is the regularized pseudo-inverse of the memory. The similarity is an adaptive one of absolute
    differences with a learned weight for each feature. With more than 5,000 rows, each category has a weight too, and
    numbers are compared after a learned increasing function. All weights, the regularization and the probabilities are
    chosen by leave-one-out errors, which have a closed form, so that no row is held out. The other readout,
    ``MLP(LayerNorm(similarity(cases, row)))`` as in the paper (``"mlp"``), is trained on the training rows; held-out
    rows are used for early stopping only.

    Features are numbers or categories: strings, or columns of a data frame with the dtype ``category``. NaN or None is
    a missing value. A category that is not in the training set is treated as missing. The units of features do not
    matter. Equal rows are merged.

    Args:
        n_cases: number of stored cases. ``"auto"`` stores all rows, but at most 1,024, or 2,048 if there are more than
            5,000 rows, or 256 with an MLP. The time to fit a projection is proportional to the square of this number.
        readout: ``"projection"``, ``"mlp"``, or ``"auto"``: the MLP for more than 100,000 rows, or if a setting of the
            MLP is given. The settings of the MLP are ``similarity`` to ``validation_fraction``.
        init: cases are random ``"rows"`` of the training set, or the centers of ``"kmeans"`` clusters.
        class_weight: ``"balanced"``, or the weight of each class, by which ``sample_weight`` is multiplied.
        linear: whether the projection has a linear part.
        damage: for rows with wrong cells: the fraction of the features of a row that are replaced by those of another
            row while the similarity is learned, which then also has a weight for each rank of the sorted differences.
            Needs the projection.
        similarity: ``"adaptive"`` (``"auto"``), ``"dot"``, or ``"kernel"``, a dot product with a learned kernel.
        bases: base similarities of the adaptive similarity, which is initialized to the first. ``"auto"`` is
            ``("dis",)``.
        blocks: similarities are summed over blocks before they are sorted; see
            :class:`~ahop_layers.AdaptiveSimilarity`. ``"feature"`` makes all columns of an encoded feature a block. An
            integer array ``(features,)`` names the block of each feature, for example one block for the columns of a
            one-hot encoded category. Both need ``embedding_dim=None``. An integer is the number of consecutive blocks
            of equal width of the embedding, or of the columns. ``None`` (``"auto"``) makes every dimension a block. A
            list adds the scores of several resolutions.
        knots: maximum number of knots of the piecewise linear encoding of a feature, 24 for ``"auto"``. A feature with
            at most 128 distinct values has a knot at each. ``None`` standardizes the features instead.
        embedding_dim: dimension of the learned linear embedding in which rows and cases are compared, 8 for ``"auto"``.
            ``None`` together with ``knots=None`` is the model of the paper.
        hidden: widths of the hidden layers of the MLP, ``(64,)`` for ``"auto"``.
        dropout: dropout probability of similarities and hidden units, 0.2 for ``"auto"``.
        loss: ``"log"`` (the default, ``"auto"``) or ``"squared"`` as in the paper, both of the class probabilities.
        learning_rate, weight_decay: of AdamW, 4e-3 and 1e-3 for ``"auto"``. The learning rate rises for a tenth of the
            steps, then falls to zero.
        batch_size: rows per step. ``None`` (``"auto"``) uses a sixteenth of the training rows, between 8 and 512.
        max_epochs: maximum number of epochs, 30 for ``"auto"``.
        patience: stop after this many epochs without a smaller held-out loss, 10 for ``"auto"``. ``None`` disables
            early stopping.
        validation_fraction: fraction of the distinct rows to hold out, stratified by class, 0.1 for ``"auto"``. The
            epoch with the smallest held-out loss is kept. If the fraction is fewer than 10 rows, no row is held out
            and all epochs run.
        random_state: seed of the cases, of the rows on which the similarity is learned, and of the training of the MLP.
        device: training device, ``"auto"`` (a GPU if available) or a PyTorch device. Predictions run on the CPU.
        verbose: print the losses of each step or epoch.

    Attributes:
        classes_: class labels.
        cases_, case_targets_, case_indices_: the cases ``(S, features)``, with codes for categories, their labels, and
            their indices in the training set. A cluster center is represented by its nearest row.
        readout_: ``"projection"`` or ``"mlp"``.
        feature_weights_: with the projection, the learned weight of each feature.
        history_: leave-one-out error of each step of the projection, or held-out loss after each epoch of the MLP.
        n_features_in_, feature_names_in_: as in scikit-learn.

    Raises:
        ValueError: invalid input according to scikit-learn, or an invalid parameter (an AHopError).

    >>> from sklearn.datasets import load_iris
    >>> from ahop_layers.tabular import AdaptiveMemoryClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = AdaptiveMemoryClassifier(random_state=0).fit(X[::2], y[::2])
    >>> bool(model.score(X[1::2], y[1::2]) > 0.9)
    True
    >>> cases, weights = model.nearest_cases(X[:2], n_nearest=3)
    >>> cases.shape, model.cases_[cases].shape
    ((2, 3), (2, 3, 4))
    """

    _losses: ClassVar[dict[str, Loss]] = {"auto": log_loss, "log": log_loss, "squared": squared_loss}

    def __init__(
        self,
        n_cases: int | str = "auto",
        *,
        readout: str = "auto",
        init: str = "rows",
        class_weight: dict[Any, float] | str | None = None,
        linear: bool = True,
        damage: float = 0.0,
        similarity: str = "auto",
        bases: Sequence[str] = "auto",
        blocks: str | int | ArrayLike | None = "auto",
        knots: int | str | None = "auto",
        embedding_dim: int | str | None = "auto",
        hidden: Sequence[int] | str = "auto",
        dropout: float | str = "auto",
        loss: str = "auto",
        learning_rate: float | str = "auto",
        weight_decay: float | str = "auto",
        batch_size: int | str | None = "auto",
        max_epochs: int | str = "auto",
        patience: int | str | None = "auto",
        validation_fraction: float | str = "auto",
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        verbose: bool = False,
    ) -> None:
        super().__init__(
            n_cases,
            readout=readout,
            init=init,
            linear=linear,
            damage=damage,
            similarity=similarity,
            bases=bases,
            blocks=blocks,
            knots=knots,
            embedding_dim=embedding_dim,
            hidden=hidden,
            dropout=dropout,
            loss=loss,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            batch_size=batch_size,
            max_epochs=max_epochs,
            patience=patience,
            validation_fraction=validation_fraction,
            random_state=random_state,
            device=device,
            verbose=verbose,
        )
        self.class_weight = class_weight

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> "AdaptiveMemoryClassifier":
        """Fit to rows ``X (n, features)``, labels ``y (n,)`` and ``sample_weight (n,)``."""
        categories, features, labels = self._read(X, y)
        check_classification_targets(labels)
        rows = merge_rows(features, np.unique(labels, return_inverse=True)[1], sample_weight)
        if self.class_weight is not None:
            rows = rows._replace(weight=self._weigh_classes(rows, labels[rows.indices]))
        # Rows of weight zero are dropped by now, so that a label that only they have is not a class.
        classes, target = self._classes_of(labels[rows.indices])
        self._train(rows._replace(target=target), len(classes), categories)
        self.classes_, self.case_targets_ = classes, labels[self.case_indices_]
        return self

    def _weigh_classes(self, rows: TrainingSet, labels: Array) -> Array:
        """Return the weights of the rows, multiplied by the weights of their classes."""
        if isinstance(self.class_weight, str):
            check_choice("class_weight", self.class_weight, ("balanced",))
            totals = {label: rows.weight[labels == label].sum() for label in np.unique(labels)}
            factor = np.array([1 / totals[label] for label in labels])
        else:
            factor = compute_sample_weight(self.class_weight, labels)
        weight: Array = rows.weight * factor
        if not (weight.min() >= 0 and weight.sum() > 0):
            raise AHopError(f"class_weight must have no negative number and not only zeros, got {self.class_weight!r}")
        # A weight of zero would be an infinite regularization of its row.
        weight = np.maximum(weight / weight.mean(), 1e-12)
        weight /= weight.mean()
        return weight


class AdaptiveMemoryRegressor(RegressorMixin, AdaptiveMemory):  # type: ignore[misc]
    """Regressor that predicts from the similarities of a row to cases, which are rows of the training set.

    Parameters and attributes are those of :class:`AdaptiveMemoryClassifier` without ``class_weight`` and ``classes_``.
    ``loss`` is ``"squared"`` (the default, ``"auto"``) or ``"absolute"``. Held-out rows are stratified by the rank of
    the target.

    Raises:
        ValueError: invalid input according to scikit-learn, or an invalid parameter (an AHopError).

    >>> import numpy as np
    >>> from ahop_layers.tabular import AdaptiveMemoryRegressor
    >>> X = np.random.default_rng(0).uniform(-2, 2, (400, 2))
    >>> y = np.abs(X).sum(1)
    >>> model = AdaptiveMemoryRegressor(random_state=0).fit(X[:200], y[:200])
    >>> bool(model.score(X[200:], y[200:]) > 0.95)
    True
    """

    _losses: ClassVar[dict[str, Loss]] = {"auto": squared_error, "squared": squared_error, "absolute": absolute_error}

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> "AdaptiveMemoryRegressor":
        """Fit to rows ``X (n, features)``, targets ``y (n,)`` and ``sample_weight (n,)``."""
        categories, features, target = self._read(X, y, y_numeric=True)
        rows = merge_rows(features, target, sample_weight)
        mean, scale = _mean_and_deviation(rows.target, rows.weight)
        self._train(rows._replace(target=((rows.target - mean) / scale).astype(np.float32)), 1, categories)
        self._mean, self._scale, self.case_targets_ = mean, scale, target[self.case_indices_]
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Return the predicted target ``(n,)`` of rows ``X (n, features)``."""
        outputs = self._outputs(X)[:, 0]
        targets: Array = self._mean + self._scale * outputs
        return targets


def _mean_and_deviation(target: Array, weight: Array) -> tuple[float, float]:
    """Mean and standard deviation of the targets; 1 in place of the deviation of a constant target.

    Raises:
        AHopError: the variance is not a normal float64, so that standardized targets would be NaN or zero.
    """
    low, high = target.min(), target.max()
    if low == high:
        return float(low), 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.average(target, weights=weight)
        variance = np.average((target - mean) ** 2, weights=weight)
    if not np.finfo(np.float64).tiny <= variance < np.inf:
        raise AHopError(f"y must have a variance within the range of float64, got targets from {low:g} to {high:g}")
    return float(mean), float(np.sqrt(variance))

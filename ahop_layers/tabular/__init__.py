"""Memories for tables, as scikit-learn estimators: rows are judged by their similarity to cases of the training set."""

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin, RegressorMixin  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import validate_data  # type: ignore[import-untyped]

from ahop_layers.tabular.base import AdaptiveMemory, Array
from ahop_layers.tabular.rows import merge_rows
from ahop_layers.tabular.training import Loss, absolute_error, log_loss, squared_error, squared_loss

__all__ = ["AdaptiveMemoryClassifier", "AdaptiveMemoryRegressor"]


class AdaptiveMemoryClassifier(ClassifierMixin, AdaptiveMemory):  # type: ignore[misc]
    """Classify rows by their similarities to cases of the training set: ``MLP(LayerNorm(similarity(cases, row)))``.

    Features are numbers; categories come as codes, such as those of ``OrdinalEncoder``. Cases, knots, embedding,
    similarity and judgement are chosen by the rows that are learned from; the others tell when to stop.

    Args:
        n_cases: how many cases to store, at most the number of rows.
        init: cases are ``"rows"`` of the training set, or the centres of ``"kmeans"`` clusters.
        similarity: ``"adaptive"``, ``"dot"``, or ``"kernel"``, a dot product with a learned kernel.
        bases: the base similarities of the adaptive one, which starts as the first of them.
        knots: features become piecewise linear functions with at most so many knots, or, where they have no more than
            128 values, with a knot at each; ``None`` only standardises them.
        embedding_dim: rows and cases are compared after a learned linear map to so many dimensions; ``None``, together
            with ``knots=None``, is the form of the paper.
        hidden: widths of the hidden layers of the MLP.
        dropout: share of similarities and hidden units dropped in training.
        loss: ``"log"`` (``"auto"``), or ``"squared"`` as in the paper; both of the class probabilities.
        learning_rate, weight_decay: of AdamW; the rate rises for a tenth of the steps, then falls to zero.
        batch_size: rows in a step; ``None``: a sixteenth of them, within 8 and 512.
        max_epochs: passes over the rows.
        patience: stop after so many epochs without a better held-out loss; ``None`` never stops early.
        validation_fraction: share of distinct rows held out, in proportion to the classes. The best epoch is kept.
            Fewer than 10 held-out rows would say nothing: then all rows are learned from, in all epochs.
        random_state: decides everything that is drawn.
        device: where to train: ``"auto"`` (a GPU if there is one) or a device of PyTorch. Predictions use the CPU.
        verbose: print a line each epoch.

    Attributes:
        classes_: the class labels.
        cases_, case_targets_, case_indices_: the cases ``(S, features)``, their labels, and their places in the
            training set; for a centre, those of the row nearest to it.
        history_: the held-out loss after each epoch.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.

    Raises:
        ValueError: input that scikit-learn refuses, or a parameter that does not fit (an AHopError).

    >>> from sklearn.datasets import load_iris
    >>> from ahop_layers.tabular import AdaptiveMemoryClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = AdaptiveMemoryClassifier(n_cases=16, batch_size=32, random_state=0).fit(X, y)
    >>> bool(model.score(X, y) > 0.9)
    True
    >>> cases, weights = model.nearest_cases(X[:2], n_nearest=3)
    >>> cases.shape, model.cases_[cases].shape
    ((2, 3), (2, 3, 4))
    """

    _losses: ClassVar[dict[str, Loss]] = {"auto": log_loss, "log": log_loss, "squared": squared_loss}

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> "AdaptiveMemoryClassifier":
        """Fit to rows ``X (n, features)``, labels ``y (n,)`` and weights ``(n,)``."""
        features, labels = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(labels)
        rows = merge_rows(features, np.unique(labels, return_inverse=True)[1], sample_weight)
        # Labels of rows without a weight are no classes.
        self.classes_, target = np.unique(labels[rows.place], return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"{type(self).__name__} needs at least 2 classes, got only one class: {self.classes_[0]}")
        self._train(rows._replace(target=target), len(self.classes_))
        self.case_targets_ = labels[self.case_indices_]
        return self

    def predict_proba(self, X: ArrayLike) -> Array:
        """Class probabilities ``(n, classes)`` of rows ``X (n, features)``."""
        probabilities: Array = torch.from_numpy(self._outputs(X)).softmax(-1).numpy()
        return probabilities

    def decision_function(self, X: ArrayLike) -> Array:
        """Log odds ``(n,)`` of the second of two classes, or log probabilities ``(n, classes)`` up to a constant."""
        outputs = self._outputs(X)
        return outputs[:, 1] - outputs[:, 0] if len(self.classes_) == 2 else outputs

    def predict(self, X: ArrayLike) -> Array:
        """The most probable class label ``(n,)`` of rows ``X (n, features)``."""
        best = self._outputs(X).argmax(1)
        labels: Array = self.classes_[best]
        return labels


class AdaptiveMemoryRegressor(RegressorMixin, AdaptiveMemory):  # type: ignore[misc]
    """Predict a number by the similarities of a row to cases of the training set.

    Arguments, attributes and errors are those of :class:`AdaptiveMemoryClassifier`, but there are no classes, and
    ``loss`` is ``"squared"`` (``"auto"``) or ``"absolute"``.

    Raises:
        ValueError: input that scikit-learn refuses, or a parameter that does not fit (an AHopError).

    >>> import numpy as np
    >>> from ahop_layers.tabular import AdaptiveMemoryRegressor
    >>> X = np.random.default_rng(0).uniform(-2, 2, (400, 2))
    >>> y = np.abs(X).sum(1)
    >>> model = AdaptiveMemoryRegressor(n_cases=32, batch_size=32, random_state=0).fit(X, y)
    >>> bool(model.score(X, y) > 0.9)
    True
    """

    _losses: ClassVar[dict[str, Loss]] = {"auto": squared_error, "squared": squared_error, "absolute": absolute_error}

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> "AdaptiveMemoryRegressor":
        """Fit to rows ``X (n, features)``, targets ``y (n,)`` and weights ``(n,)``."""
        features, target = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        rows = merge_rows(features, target, sample_weight)
        self._mean = np.average(rows.target, weights=rows.weight)
        self._scale = np.sqrt(np.average((rows.target - self._mean) ** 2, weights=rows.weight)) or 1.0
        self._train(rows._replace(target=((rows.target - self._mean) / self._scale).astype(np.float32)), 1)
        self.case_targets_ = target[self.case_indices_]
        return self

    def predict(self, X: ArrayLike) -> Array:
        """The expected target ``(n,)`` of rows ``X (n, features)``."""
        outputs = self._outputs(X)[:, 0]
        targets: Array = self._mean + self._scale * outputs
        return targets

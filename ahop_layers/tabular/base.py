"""What all estimators share: checks of parameters, prediction in chunks, and the predictions of classes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin  # type: ignore[import-untyped]
from sklearn.utils import check_random_state  # type: ignore[import-untyped]
from sklearn.utils.validation import validate_data  # type: ignore[import-untyped]
from torch import Tensor

from ahop_layers.errors import AHopError
from ahop_layers.tabular.rows import CHUNK, Array, apply_in_chunks


class TabularEstimator(BaseEstimator):  # type: ignore[misc]
    """Base class of all estimators: checks of parameters, and prediction in chunks."""

    device: str
    random_state: int | np.random.RandomState | None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _validated(self, X: Any, **options: Any) -> Any:
        """Returns rows of finite numbers and NaN, and targets if given; raises if they are not valid."""
        return validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan", **options)

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    def _apply(self, function: Callable[[Tensor], Tensor], rows: Array, size: int = CHUNK) -> Array:
        with torch.inference_mode():
            # Copies read-only rows, which from_numpy does not support.
            tensor = torch.from_numpy(np.require(rows, requirements=["C", "W"]))
            return apply_in_chunks(function, tensor, size).numpy()

    def _check_device(self) -> torch.device:
        name = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        try:
            scalar = torch.zeros((), device=name)
            scalar.item()  # fails on the meta device
        except Exception as error:  # of several types, by device
            raise AHopError(f"device must be 'auto' or an available PyTorch device, got {self.device!r}") from error
        return scalar.device

    def _check_flags(self, *names: str) -> None:
        for name in names:
            if not isinstance(value := getattr(self, name), bool | np.bool_):
                raise AHopError(f"{name} must be True or False, got {value!r}")


class ClassPredictions(ClassifierMixin):  # type: ignore[misc]
    """Predictions of a classifier from its logits ``_outputs(X)``, one column for each of ``classes_``."""

    classes_: Array
    _outputs: Callable[[ArrayLike], Array]

    def predict_proba(self, X: ArrayLike) -> Array:
        """Returns the class probabilities ``(n, classes)`` of rows ``X (n, features)``."""
        return torch.from_numpy(self._outputs(X)).softmax(-1).numpy()

    def decision_function(self, X: ArrayLike) -> Array:
        """Returns the logits ``(n, classes)``, or for two classes the log odds ``(n,)`` of the second."""
        outputs = self._outputs(X)
        return outputs[:, 1] - outputs[:, 0] if len(self.classes_) == 2 else outputs

    def predict(self, X: ArrayLike) -> Array:
        """Returns the most probable class label ``(n,)`` of rows ``X (n, features)``."""
        best = self._outputs(X).argmax(1)  # raises if the estimator is not fitted
        return self.classes_[best]

    def _classes_of(self, labels: Array) -> tuple[Array, Array]:
        """Returns the classes, and the class of each row ``(n,)``. Raises if there is only one class."""
        classes, target = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"{type(self).__name__} needs at least 2 classes, got only one class: {classes[0]}")
        return classes, target


def check_count(name: str, value: Any, most: int, things: str) -> int:
    """Returns ``value``, an integer between 1 and ``most``, or raises an AHopError that names the ``things``."""
    if not (isinstance(value, int | np.integer) and not isinstance(value, bool) and 1 <= value <= most):
        raise AHopError(f"{name} must be an integer between 1 and the {most} {things}, got {value!r}")
    return int(value)

"""Base classes of the tabular estimators: parameters, training, and the explanation of predictions."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin  # type: ignore[import-untyped]
from sklearn.utils import check_random_state  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]
from torch import Tensor

from ahop_layers.blocks import Blocks
from ahop_layers.errors import AHopError, check_choice, check_numbers
from ahop_layers.ops.reference import check_bases
from ahop_layers.tabular.network import CaseNetwork, Encoding, apply_in_chunks
from ahop_layers.tabular.rows import TrainingSet, choose_cases, hold_out
from ahop_layers.tabular.training import Examples, Loss, Schedule, train
from ahop_layers.training import folded_weights

Array = NDArray[Any]


class TabularEstimator(BaseEstimator):  # type: ignore[misc]
    """Base class of all estimators: checks of rows and device, and prediction in chunks."""

    _fitted: ClassVar[str]  # name of an attribute that a successful fit sets
    device: str

    @property
    def partial_fit(self) -> NoReturn:
        """Not supported: the encoding of rows is computed from all of them at once."""
        raise AttributeError(f"{type(self).__name__} has no partial_fit, because it needs all rows at once: use fit")

    def _check_rows(self, X: ArrayLike) -> Array:
        check_is_fitted(self, self._fitted)
        rows: Array = validate_data(self, X, dtype=np.float64, reset=False)
        return rows

    def _apply(self, function: Callable[[Tensor], Tensor], rows: Array) -> Array:
        with torch.inference_mode():
            # Copies read-only rows, which from_numpy does not support.
            tensor = torch.from_numpy(np.require(rows, requirements=["C", "W"]))
            result: Array = apply_in_chunks(function, tensor).numpy()
        return result

    def _check_device(self) -> torch.device:
        name = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        try:
            scalar = torch.zeros((), device=name)
            scalar.item()  # fails on the meta device
        except Exception as error:  # of several types, by device
            raise AHopError(f"device must be 'auto' or an available PyTorch device, got {self.device!r}") from error
        return scalar.device


class ClassPredictions(ClassifierMixin):  # type: ignore[misc]
    """Predictions of a classifier from its logits ``_outputs(X)``, one column for each of ``classes_``."""

    classes_: Array
    _outputs: Callable[[ArrayLike], Array]

    def predict_proba(self, X: ArrayLike) -> Array:
        """Return the class probabilities ``(n, classes)`` of rows ``X (n, features)``."""
        probabilities: Array = torch.from_numpy(self._outputs(X)).softmax(-1).numpy()
        return probabilities

    def decision_function(self, X: ArrayLike) -> Array:
        """Return the logits ``(n, classes)``, or for two classes the log odds ``(n,)`` of the second."""
        outputs = self._outputs(X)
        return outputs[:, 1] - outputs[:, 0] if len(self.classes_) == 2 else outputs

    def predict(self, X: ArrayLike) -> Array:
        """Return the most probable class label ``(n,)`` of rows ``X (n, features)``."""
        best = self._outputs(X).argmax(1)
        labels: Array = self.classes_[best]
        return labels

    def _classes_of(self, labels: Array) -> tuple[Array, Array]:
        """Return the classes, and the class of each row ``(n,)``. Raises if there is only one class."""
        classes, target = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"{type(self).__name__} needs at least 2 classes, got only one class: {classes[0]}")
        return classes, target


class AdaptiveMemory(TabularEstimator):
    """Base class of the estimators that apply an MLP to the scores of cases."""

    _fitted = "network_"
    _losses: ClassVar[dict[str, Loss]]  # by the values of the parameter ``loss``

    def __init__(
        self,
        n_cases: int = 256,
        *,
        init: str = "rows",
        similarity: str = "adaptive",
        bases: Sequence[str] = ("dis",),
        blocks: str | int | ArrayLike | None = None,
        knots: int | None = 24,
        embedding_dim: int | None = 8,
        hidden: Sequence[int] = (64,),
        dropout: float = 0.2,
        loss: str = "auto",
        learning_rate: float = 4e-3,
        weight_decay: float = 1e-3,
        batch_size: int | None = None,
        max_epochs: int = 30,
        patience: int | None = 10,
        validation_fraction: float = 0.1,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        verbose: bool = False,
    ) -> None:
        self.n_cases = n_cases
        self.init = init
        self.similarity = similarity
        self.bases = bases
        self.blocks = blocks
        self.knots = knots
        self.embedding_dim = embedding_dim
        self.hidden = hidden
        self.dropout = dropout
        self.loss = loss
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def nearest_cases(self, X: ArrayLike, n_nearest: int = 5) -> tuple[Array, Array]:
        """Explain predictions by the most similar cases.

        The weight of a case is its retrieval probability, the softmax of the similarities.

        Args:
            X: ``(n, features)``.
            n_nearest: number of cases to return for each row.

        Returns:
            Indices ``(n, n_nearest)`` into ``cases_``, ``case_targets_`` and ``case_indices_``, and the weights
            ``(n, n_nearest)`` in descending order.

        Raises:
            AHopError: ``n_nearest`` is not an integer between 1 and the number of cases.

        >>> from ahop_layers.tabular import AdaptiveMemoryRegressor
        >>> X = np.linspace(0, 1, 40)[:, None]
        >>> model = AdaptiveMemoryRegressor(n_cases=8, max_epochs=1, random_state=0).fit(X, X[:, 0])
        >>> cases, weights = model.nearest_cases(X[:2], n_nearest=3)
        >>> cases.shape, bool((weights > 0).all())
        ((2, 3), True)
        """
        rows = self._check_rows(X)
        if not (is_integer(n_nearest) and 1 <= n_nearest <= len(self.cases_)):
            raise AHopError(
                f"n_nearest must be an integer between 1 and the {len(self.cases_)} cases, got {n_nearest!r}"
            )

        def heaviest(part: Tensor) -> Tensor:
            weights, cases = self.network_.scores(part).softmax(-1).topk(int(n_nearest))
            return torch.stack([weights, cases.to(weights.dtype)], 1)

        weights, cases = self._apply(heaviest, rows).swapaxes(0, 1)
        return cases.astype(np.int64), weights

    def _outputs(self, X: ArrayLike) -> Array:
        rows = self._check_rows(X)
        return self._apply(self.network_, rows)

    def _train(self, rows: TrainingSet, outputs: int) -> None:
        """Choose the cases and train the network. Sets no attribute before the training has succeeded."""
        self._check_parameters()
        device = self._check_device()
        random = check_random_state(self.random_state)
        X, target, weight = map(torch.from_numpy, (rows.X, rows.target, rows.weight))
        encoding = Encoding.standard(X, weight) if self.knots is None else Encoding.ramps(X, weight, self.knots)
        held_out = hold_out(rows.target, self.validation_fraction, random)
        learned = np.setdiff1d(np.arange(len(X)), held_out)
        cases, chosen = choose_cases(encoding, rows, learned, min(self.n_cases, len(learned)), self.init, random)

        # Generators of its own: fits in several threads do not share state, and the global generators are not used.
        initial, draws = (
            torch.Generator(place).manual_seed(random.randint(np.iinfo(np.int32).max)) for place in ("cpu", device)
        )
        network = CaseNetwork(
            encoding,
            cases,
            outputs,
            similarity=self.similarity,
            bases=self.bases,
            blocks=self._column_blocks(encoding, rows.X.shape[1]),
            embedding_dim=None if self.embedding_dim is None else int(self.embedding_dim),
            hidden=[int(width) for width in self.hidden],
            dropout=self.dropout,
            generator=initial,
        ).to(device)
        parts = [
            Examples(X[part].to(device), target[part].to(device), weight[part].float().to(device))
            for part in (learned, held_out)
        ]
        batch_size = int(self.batch_size or np.clip(len(learned) // 16, 8, 512))
        schedule = Schedule(self.learning_rate, self.weight_decay, batch_size, self.max_epochs, self.patience)
        validation = parts[1] if len(held_out) else None
        with folded_weights(network):
            history = train(network, parts[0], validation, self._losses[self.loss], schedule, draws, self._print_epoch)
        self.cases_, self.case_indices_, self.history_ = rows.X[chosen], rows.indices[chosen], history
        # Float64 on the CPU: predictions do not depend on the batch or on the training device, and the estimator can be
        # unpickled on a machine without that device.
        self.network_ = network.cpu().double()

    def _column_blocks(self, encoding: Encoding, features: int) -> int | Tensor | None:
        """Return the blocks of the similarity. Blocks of features become blocks of their columns."""
        blocks = torch.arange(features) if isinstance(self.blocks, str) else Blocks(self.blocks).blocks
        if isinstance(blocks, Tensor):
            if len(blocks) != features:
                raise AHopError(f"blocks must name the block of each of the {features} features, got {len(blocks)}")
            return blocks[encoding.column]
        count: int | None = blocks
        return count

    def _print_epoch(self, epoch: int, learned: float, judged: float | None) -> None:
        if self.verbose:
            held_out = "" if judged is None else f", held out {judged:.4f}"
            print(f"epoch {epoch}/{self.max_epochs}: loss {learned:.4f}{held_out}", flush=True)

    def _check_parameters(self) -> None:
        check_choice("loss", self.loss, tuple(self._losses))
        check_choice("init", self.init, ("rows", "kmeans"))
        check_choice("similarity", self.similarity, ("adaptive", "dot", "kernel"))
        if self.similarity == "adaptive":
            check_bases(self.bases)
        self._check_blocks()
        for name in ("n_cases", "max_epochs", "batch_size", "patience", "embedding_dim", "knots"):
            value, least = getattr(self, name), 2 if name == "knots" else 1
            optional = name not in ("n_cases", "max_epochs")
            if not (optional and value is None) and not (is_integer(value) and value >= least):
                none = " or None" if optional else ""
                raise AHopError(f"{name} must be an integer of at least {least}{none}, got {value!r}")
        widths = self.hidden if isinstance(self.hidden, Sequence | np.ndarray) else [0]
        if not all(is_integer(width) and width >= 1 for width in widths):
            raise AHopError(f"hidden must be a sequence of integers of at least 1, got {self.hidden!r}")
        check_numbers("a positive number", learning_rate=self.learning_rate)
        check_numbers("a number of at least 0", weight_decay=self.weight_decay)
        check_numbers(
            "a number of at least 0 and below 1", validation_fraction=self.validation_fraction, dropout=self.dropout
        )

    def _check_blocks(self) -> None:
        if isinstance(self.blocks, str):
            check_choice("blocks", self.blocks, ("feature",))
            of_features = True
        else:
            of_features = isinstance(Blocks(self.blocks).blocks, Tensor)
        if self.blocks is not None and self.similarity != "adaptive":
            raise AHopError(f"blocks needs similarity='adaptive', got similarity={self.similarity!r}")
        if of_features and self.embedding_dim is not None:
            raise AHopError(
                f"blocks of features need embedding_dim=None, because an embedding combines features,"
                f" got embedding_dim={self.embedding_dim!r}"
            )


def is_integer(value: object) -> bool:
    """Whether ``value`` is an integer of Python or NumPy, and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)

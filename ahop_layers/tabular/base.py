"""Base classes of the tabular estimators: parameters, training, and the explanation of predictions."""

import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin  # type: ignore[import-untyped]
from sklearn.utils import check_random_state  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional

from ahop_layers.blocks import Blocks
from ahop_layers.errors import AHopError
from ahop_layers.tabular import projection
from ahop_layers.tabular.columns import Categories, Gaps, RowEncoding
from ahop_layers.tabular.network import CHUNK, CaseNetwork, Encoding, apply_in_chunks
from ahop_layers.tabular.projection import ProjectionNetwork, calibrate, fit_projection
from ahop_layers.tabular.rows import TrainingSet, choose_cases, hold_out
from ahop_layers.tabular.settings import given_settings, is_integer, resolve
from ahop_layers.tabular.training import Examples, Loss, Schedule, train
from ahop_layers.training import folded_weights

Array = NDArray[Any]

PROJECTION_ROWS = 100_000  # tables with more rows have a network with an MLP by default
SMALL_ROWS = 5000  # with more rows, the projection learns an increasing function of each numeric feature
SMALL_CASES, LARGE_CASES = 1024, 2048
KNOTS = 32  # of the increasing functions


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

    def _apply(self, function: Callable[[Tensor], Tensor], rows: Array, size: int = CHUNK) -> Array:
        with torch.inference_mode():
            # Copies read-only rows, which from_numpy does not support.
            tensor = torch.from_numpy(np.require(rows, requirements=["C", "W"]))
            result: Array = apply_in_chunks(function, tensor, size).numpy()
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
    """Base class of the estimators that predict from the scores of cases."""

    _fitted = "network_"
    network_: CaseNetwork | ProjectionNetwork
    _losses: ClassVar[dict[str, Loss]]  # by the values of the parameter ``loss``

    def __init__(
        self,
        n_cases: int | str = "auto",
        *,
        readout: str = "auto",
        init: str = "rows",
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
        self.n_cases = n_cases
        self.readout = readout
        self.init = init
        self.linear = linear
        self.damage = damage
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

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        return tags

    @property
    def feature_weights_(self) -> Array:
        """Learned weights ``(features,)`` of the differences of standardized features; only of the projection."""
        network = getattr(self, "network_", None)
        if not isinstance(network, ProjectionNetwork):
            raise AttributeError(f"{type(self).__name__} has feature_weights_ only after a fit with the projection")
        weights: Array = network.feature_weight.numpy()
        return weights

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
        >>> model = AdaptiveMemoryRegressor(random_state=0).fit(X, X[:, 0])
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

        weights, cases = self._apply(heaviest, rows, self._rows_at_once()).swapaxes(0, 1)
        return cases.astype(np.int64), weights

    def _outputs(self, X: ArrayLike) -> Array:
        rows = self._check_rows(X)
        return self._apply(self.network_, rows, self._rows_at_once())

    def _rows_at_once(self) -> int:
        """The number of rows for which a matrix of scores has 8 MB."""
        return max(1, 2**20 // len(self.cases_))

    def _check_rows(self, X: ArrayLike) -> Array:
        check_is_fitted(self, self._fitted)
        if self._categories.codes and np.ndim(X) == 2:
            # Checks names and number of the features before their categories are looked up.
            validate_data(self, X, skip_check_array=True, reset=False)
        rows: Array = validate_data(
            self, self._categories.encode(X), dtype=np.float64, ensure_all_finite="allow-nan", reset=False
        )
        return rows

    def _read(self, X: ArrayLike, y: ArrayLike, **options: bool) -> tuple[Categories, Array, Array]:
        """Return the categories of a training set, its rows ``(n, features)`` with codes for them, and its targets."""
        categories = Categories().fit(X)
        rows, target = validate_data(
            self, categories.encode(X), y, dtype=np.float64, ensure_all_finite="allow-nan", **options
        )
        return categories, rows, target

    def _train(self, rows: TrainingSet, outputs: int, categories: Categories) -> None:
        """Choose the cases and fit the network. Sets no attribute before that has succeeded."""
        settings = resolve(self, self._losses)
        readout = self._choose_readout(len(rows.X))
        device = self._check_device()
        random = check_random_state(self.random_state)
        fit = self._fit_projection if readout == "projection" else self._fit_mlp
        network, chosen, history = fit(rows, outputs, sorted(categories.codes), settings, random, device)
        self.cases_, self.case_indices_, self.history_ = rows.X[chosen], rows.indices[chosen], history
        # Float64 on the CPU: predictions do not depend on the batch or on the training device, and the estimator can be
        # unpickled on a machine without that device.
        self.network_, self._categories, self.readout_ = network.cpu().double(), categories, readout

    def _choose_readout(self, rows: int) -> str:
        given = given_settings(self)
        readout = self.readout
        if readout == "auto":
            readout = "mlp" if given or (rows > PROJECTION_ROWS and not self.damage) else "projection"
        if readout == "projection" and given:
            raise AHopError(f"readout='projection' has no setting {given[0]}, got {getattr(self, given[0])!r}")
        if readout == "mlp" and self.damage:
            raise AHopError(f"damage needs readout='projection', got damage={self.damage!r} with an MLP")
        return readout

    def _count_cases(self, available: int, default: int) -> int:
        if isinstance(self.n_cases, str):
            return min(default, available)
        count = int(self.n_cases)
        if count > available:
            message = f"n_cases={count} exceeds the {available} rows to choose from: all of them are cases"
            warnings.warn(message, stacklevel=5)
        return min(count, available)

    def _fit_projection(
        self,
        rows: TrainingSet,
        outputs: int,
        categorical: list[int],
        settings: SimpleNamespace,
        random: np.random.RandomState,
        device: torch.device,
    ) -> tuple[CaseNetwork | ProjectionNetwork, Array, list[float]]:
        """Fit a memory whose readout has a closed form."""
        X, target, weight = map(torch.from_numpy, (rows.X, rows.target, rows.weight))
        large = len(X) > SMALL_ROWS and not self.damage
        encoding = RowEncoding(X, weight, categorical, KNOTS if large else 0)
        count = self._count_cases(len(X), LARGE_CASES if large else SMALL_CASES)
        cases, chosen = choose_cases(encoding, rows, np.arange(len(X)), count, self.init, random)
        network = ProjectionNetwork(encoding, cases, X.shape[1])
        values = functional.one_hot(target.long(), outputs).double() if outputs > 1 else target.double()[:, None]
        mean = (weight[:, None] * values).mean(0)
        # The typical weight of the rows of a class, or of all rows.
        groups = rows.target if outputs > 1 else np.zeros(len(X))
        typical = {group: np.median(rows.weight[groups == group]) for group in np.unique(groups)}
        unit = torch.from_numpy(np.minimum(rows.weight, [typical[group] for group in groups]))
        examples = projection.Examples(X, values - mean, weight, unit)
        generator = torch.Generator().manual_seed(random.randint(np.iinfo(np.int32).max))
        effort = projection.LARGE if large else projection.SMALL

        def on_step(step: int, error: float) -> None:
            if self.verbose:
                print(f"step {step}/{effort.steps}: leave-one-out error {error:.4f}", flush=True)

        history, judged, left_out = fit_projection(
            network.to(device), examples.to(device), self.damage, bool(self.linear), generator, effort, on_step
        )
        network.cpu().intercept = mean
        if outputs > 1:
            judged = judged.cpu()
            calibrate(network, left_out.cpu(), target[judged].long(), weight[judged])
        return network, chosen, history

    def _fit_mlp(
        self,
        rows: TrainingSet,
        outputs: int,
        categorical: list[int],
        settings: SimpleNamespace,
        random: np.random.RandomState,
        device: torch.device,
    ) -> tuple[CaseNetwork | ProjectionNetwork, Array, list[float]]:
        """Train a network whose readout is an MLP, on the device."""
        X, target, weight = map(torch.from_numpy, (rows.X, rows.target, rows.weight))
        gaps = Gaps(X, weight, categorical)
        full = gaps(X)
        knots = settings.knots
        encoding = Encoding.standard(full, weight) if knots is None else Encoding.ramps(full, weight, knots)
        encoding.gaps = gaps
        held_out = hold_out(rows.target, settings.validation_fraction, random)
        learned = np.setdiff1d(np.arange(len(X)), held_out)
        count = self._count_cases(len(learned), 256)
        cases, chosen = choose_cases(encoding, rows, learned, count, self.init, random)

        # Generators of its own: fits in several threads do not share state, and the global generators are not used.
        initial, draws = (
            torch.Generator(place).manual_seed(random.randint(np.iinfo(np.int32).max)) for place in ("cpu", device)
        )
        network = CaseNetwork(
            encoding,
            cases,
            outputs,
            similarity=settings.similarity,
            bases=settings.bases,
            blocks=_column_blocks(settings.blocks, encoding, X.shape[1]),
            embedding_dim=None if settings.embedding_dim is None else int(settings.embedding_dim),
            hidden=[int(width) for width in settings.hidden],
            dropout=settings.dropout,
            generator=initial,
        ).to(device)
        parts = [
            Examples(X[part].to(device), target[part].to(device), weight[part].float().to(device))
            for part in (learned, held_out)
        ]
        batch_size = int(settings.batch_size or np.clip(len(learned) // 16, 8, 512))
        epochs = settings.max_epochs
        schedule = Schedule(settings.learning_rate, settings.weight_decay, batch_size, epochs, settings.patience)
        validation = parts[1] if len(held_out) else None

        def on_epoch(epoch: int, learned: float, judged: float | None) -> None:
            self._print_epoch(f"epoch {epoch}/{epochs}", learned, judged)

        with folded_weights(network):
            history = train(network, parts[0], validation, self._losses[settings.loss], schedule, draws, on_epoch)
        return network, chosen, history

    def _print_epoch(self, epoch: str, learned: float, judged: float | None) -> None:
        if self.verbose:
            held_out = "" if judged is None else f", held out {judged:.4f}"
            print(f"{epoch}: loss {learned:.4f}{held_out}", flush=True)


def _column_blocks(blocks: Any, encoding: Encoding, features: int) -> Any:
    """Return the blocks of the similarity, or a list of resolutions. Blocks of features become those of columns."""
    if isinstance(blocks, list | tuple):
        return [_column_blocks(entry, encoding, features) for entry in blocks]
    named = torch.arange(features) if isinstance(blocks, str) else Blocks(blocks).assignment
    if isinstance(named, Tensor):
        if len(named) != features:
            raise AHopError(f"blocks must name the block of each of the {features} features, got {len(named)}")
        features_of = torch.arange(features) if encoding.gaps is None else encoding.gaps.feature
        return named[features_of[encoding.column]]
    return named

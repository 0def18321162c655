"""What the tabular estimators share: parameters, fitting of the network, and the explanation of predictions."""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator  # type: ignore[import-untyped]
from sklearn.utils import check_random_state  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]
from torch import Tensor

from ahop_layers.errors import AHopError, check_choice
from ahop_layers.tabular.network import CaseNetwork, Encoding, apply_in_chunks
from ahop_layers.tabular.rows import Rows, choose_cases, hold_out
from ahop_layers.tabular.training import Examples, Loss, Schedule, train
from ahop_layers.training import folded_weights

Array = NDArray[Any]


class _WithoutOneDNN:
    """Where oneDNN multiplies matrices its set-up takes ten times as long as the small products of a step.

    The switch is one for the whole process, so fits in several threads share it: the first turns it off, the last turns
    it back.
    """

    def __init__(self) -> None:
        self.lock, self.inside, self.before = Lock(), 0, True

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.before = bool(torch.backends.mkldnn.enabled)
                torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                torch.backends.mkldnn.enabled = self.before  # type: ignore[assignment]


_without_onednn = _WithoutOneDNN()


class AdaptiveMemory(BaseEstimator):  # type: ignore[misc]
    """What the classifier and the regressor share."""

    _losses: ClassVar[dict[str, Loss]]  # by the names that the parameter ``loss`` may have

    def __init__(
        self,
        n_cases: int = 256,
        *,
        init: str = "rows",
        similarity: str = "adaptive",
        bases: Sequence[str] = ("dis",),
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

    @property
    def partial_fit(self) -> NoReturn:
        """Refused, and so absent: cases and knots are chosen from all rows at once."""
        raise AttributeError(
            f"{type(self).__name__} cannot be fitted in parts, because its cases are chosen from all rows: use fit"
        )

    def nearest_cases(self, X: ArrayLike, n_nearest: int = 5) -> tuple[Array, Array]:
        """Explain predictions: the cases that answered, and how much each weighed.

        The weight of a case is its retrieval probability, the softmax of the similarities.

        Args:
            X: ``(n, features)``.
            n_nearest: how many cases to name for each row, the heaviest first.

        Returns:
            Numbers of cases ``(n, n_nearest)``, for ``cases_``, ``case_targets_`` and ``case_indices_``, and their
            weights ``(n, n_nearest)``.

        Raises:
            AHopError: ``n_nearest`` is not between 1 and the number of cases.

        >>> from ahop_layers.tabular import AdaptiveMemoryRegressor
        >>> X = np.linspace(0, 1, 40)[:, None]
        >>> model = AdaptiveMemoryRegressor(n_cases=8, max_epochs=1, random_state=0).fit(X, X[:, 0])
        >>> cases, weights = model.nearest_cases(X[:2], n_nearest=3)
        >>> cases.shape, bool((weights > 0).all())
        ((2, 3), True)
        """
        rows = self._check_rows(X)
        if not 1 <= n_nearest <= len(self.cases_):
            raise AHopError(f"n_nearest must be between 1 and the {len(self.cases_)} cases, got {n_nearest!r}")

        def heaviest(part: Tensor) -> Tensor:
            weights, cases = self.network_.scores(part).softmax(-1).topk(n_nearest)
            return torch.stack([weights, cases.to(weights.dtype)])

        weights, cases = self._apply(lambda part: heaviest(part).movedim(0, 1), rows).swapaxes(0, 1)
        return cases.astype(np.int64), weights

    def _check_rows(self, X: ArrayLike) -> Array:
        check_is_fitted(self)
        rows: Array = validate_data(self, X, dtype=np.float64, reset=False)
        return rows

    def _outputs(self, X: ArrayLike) -> Array:
        rows = self._check_rows(X)
        return self._apply(self.network_, rows)

    def _apply(self, function: Callable[[Tensor], Tensor], rows: Array) -> Array:
        with torch.inference_mode():
            # A copy where the rows are read-only, which tensors cannot be.
            result: Array = apply_in_chunks(
                function, torch.from_numpy(np.require(rows, requirements=["C", "W"]))
            ).numpy()
        return result

    def _train(self, rows: Rows, outputs: int) -> None:
        """Choose the cases and fit the network."""
        self._check_parameters()
        random = check_random_state(self.random_state)
        X, target, weight = map(torch.from_numpy, (rows.X, rows.target, rows.weight))
        encoding = Encoding.standard(X, weight) if self.knots is None else Encoding.ramps(X, weight, self.knots)
        held_out = hold_out(rows.target, self.validation_fraction, random)
        learned = np.setdiff1d(np.arange(len(X)), held_out)
        cases, chosen = choose_cases(encoding, rows, learned, min(self.n_cases, len(learned)), self.init, random)
        self.cases_, self.case_indices_ = rows.X[chosen], rows.place[chosen]

        device = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        batch_size = int(self.batch_size or np.clip(len(learned) // 16, 8, 512))
        schedule = Schedule(self.learning_rate, self.weight_decay, batch_size, self.max_epochs, self.patience)
        with _without_onednn, torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(random.randint(np.iinfo(np.int32).max))
            network = CaseNetwork(
                encoding,
                cases,
                outputs,
                similarity=self.similarity,
                bases=self.bases,
                embedding_dim=self.embedding_dim,
                hidden=self.hidden,
                dropout=self.dropout,
            ).to(device)
            parts = [
                Examples(X[part].to(device), target[part].to(device), weight[part].float().to(device))
                for part in (learned, held_out)
            ]
            judge = parts[1] if len(held_out) else None
            with folded_weights(network):
                self.history_ = train(network, parts[0], judge, self._losses[self.loss], schedule, self._report)
        # Double precision on the CPU: a prediction depends neither on the rows beside it nor on the device that the
        # network was trained on, and can be unpickled where there is no such device.
        self.network_ = network.cpu().double()

    def _report(self, epoch: int, learned: float, judged: float | None) -> None:
        if self.verbose:
            held_out = "" if judged is None else f", held out {judged:.4f}"
            print(f"epoch {epoch}/{self.max_epochs}: loss {learned:.4f}{held_out}", flush=True)

    def _check_parameters(self) -> None:
        check_choice("loss", self.loss, tuple(self._losses))
        for name in ("n_cases", "max_epochs", "batch_size", "patience", "embedding_dim", "knots"):
            value, least = getattr(self, name), 2 if name == "knots" else 1
            optional = value is None and name not in ("n_cases", "max_epochs")
            if not optional and not (isinstance(value, int | np.integer) and value >= least):
                raise AHopError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if not self.learning_rate > 0:
            raise AHopError(f"learning_rate must be positive, got {self.learning_rate!r}")
        for name in ("validation_fraction", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise AHopError(f"{name} must be at least 0 and below 1, got {getattr(self, name)!r}")

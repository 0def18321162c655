"""The memories of the paper as classifiers of scikit-learn: ``MLP(LayerNorm(similarity(cases, row)))``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from benchmarks.paper.tabular.network import CaseNetwork, Encoding
from benchmarks.paper.tabular.rows import apply_in_chunks, choose_cases, merge_rows
from benchmarks.paper.tabular.training import LOSSES, Schedule, hold_out, train
from benchmarks.paper.training import folded_weights


class PaperMemoryClassifier(ClassifierMixin, BaseEstimator):
    """Classifier with the MLP of the paper, trained with early stopping on held-out rows.

    Args:
        similarity: ``"adaptive"`` (A-Hop), ``"dot"`` (M-Hop) or ``"kernel"`` (K2-Hop).
        n_cases: number of cases, at most the number of training rows.
        init: whether cases are random ``"rows"`` or cluster centers (``"kmeans"``).
        bases: base similarities of the adaptive similarity, which is initialized to the first.
        blocks: blocks of the adaptive similarity; ``"feature"`` makes the columns of a feature a block, and needs
            ``embedding_dim=None``.
        knots: maximum number of knots of the piecewise linear encoding of a feature. ``None`` standardizes features.
        embedding_dim: dimension of the learned linear embedding in which rows and cases are compared. ``None`` together
            with ``knots=None`` is the model of the paper.
        hidden: widths of the hidden layers of the MLP.
        dropout: dropout probability of similarities and hidden units.
        loss: ``"log"``, or ``"squared"`` as in the paper, both of the class probabilities.
        learning_rate, weight_decay: of AdamW. The learning rate rises for a tenth of the steps, then falls to zero.
        batch_size: rows per step. ``None`` uses a sixteenth of the training rows, between 8 and 512.
        max_epochs, patience: training stops after ``patience`` epochs without a smaller held-out loss.
        validation_fraction: fraction of the rows to hold out, stratified by class. The epoch with the smallest held-out
            loss is kept. If the fraction is fewer than 10 rows, no row is held out and all epochs run.
        random_state: seed of cases, held-out rows, weights, batches and dropout.
        device: training device.
    """

    def __init__(
        self,
        similarity: str = "adaptive",
        *,
        n_cases: int = 256,
        init: str = "rows",
        bases: Sequence[str] = ("dis",),
        blocks: Any = None,
        knots: int | None = 24,
        embedding_dim: int | None = 8,
        hidden: Sequence[int] = (64,),
        dropout: float = 0.2,
        loss: str = "log",
        learning_rate: float = 4e-3,
        weight_decay: float = 1e-3,
        batch_size: int | None = None,
        max_epochs: int = 30,
        patience: int = 10,
        validation_fraction: float = 0.1,
        random_state: int | None = None,
        device: str = "cpu",
    ) -> None:
        self.similarity = similarity
        self.n_cases = n_cases
        self.init = init
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

    def fit(self, X: ArrayLike, y: ArrayLike) -> "PaperMemoryClassifier":
        """Fits to rows ``X (n, features)`` and labels ``y (n,)``."""
        features, labels = validate_data(self, X, y, dtype=np.float64)
        self.classes_, target = np.unique(labels, return_inverse=True)
        examples = merge_rows(features, target)
        rows, weight = examples.rows, examples.weight
        random = check_random_state(self.random_state)
        standard = self.knots is None
        encoding = Encoding.standard(rows, weight) if standard else Encoding.ramps(rows, weight, self.knots)
        held_out = hold_out(examples.target.numpy(), self.validation_fraction, random)
        learned = np.setdiff1d(np.arange(len(rows)), held_out)
        count = min(self.n_cases, len(learned))
        cases = choose_cases(encoding, examples.take(learned), count, self.init, random)
        # Generators of its own, so that the global ones are neither read nor changed.
        initial, draws = (
            torch.Generator(place).manual_seed(random.randint(np.iinfo(np.int32).max)) for place in ("cpu", self.device)
        )
        self.network_ = CaseNetwork(
            encoding,
            cases,
            len(self.classes_),
            similarity=self.similarity,
            bases=self.bases,
            blocks=encoding.column if isinstance(self.blocks, str) else self.blocks,
            embedding_dim=self.embedding_dim,
            hidden=self.hidden,
            dropout=self.dropout,
            generator=initial,
        ).to(self.device)
        batch_size = self.batch_size or int(np.clip(len(learned) // 16, 8, 512))
        schedule = Schedule(self.learning_rate, self.weight_decay, batch_size, self.max_epochs, self.patience)
        parts = [
            part._replace(weight=part.weight.float()).to(self.device)
            for part in (examples.take(learned), examples.take(held_out))
        ]
        validation = parts[1] if len(held_out) else None
        with folded_weights(self.network_):
            self.history_ = train(self.network_, parts[0], validation, LOSSES[self.loss], schedule, draws)
        self.network_.cpu().double()
        return self

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Returns the class probabilities ``(n, classes)`` of rows ``X (n, features)``."""
        check_is_fitted(self, "history_")
        rows = torch.tensor(validate_data(self, X, dtype=np.float64, reset=False))
        with torch.inference_mode():
            return apply_in_chunks(self.network_, rows).softmax(-1).numpy()

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Returns the most probable class label ``(n,)`` of rows ``X (n, features)``."""
        return self.classes_[self.predict_proba(X).argmax(1)]

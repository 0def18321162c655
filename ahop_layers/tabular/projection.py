"""A memory of cases with a closed-form readout, the regularized pseudo-inverse, for tables with few rows."""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional

from ahop_layers.similarity import AdaptiveSimilarity
from ahop_layers.tabular.columns import RowEncoding
from ahop_layers.tabular.network import apply_in_chunks
from ahop_layers.training import rise_and_fall

# Rows on which the similarity is learned, without and with damage: a step inverts a matrix of this size.
LEARNED_ROWS, DAMAGED_ROWS = 384, 160
LEARNED_DISTANCES = 2**24  # limit of the distances (rows, rows, features): tables with many features use fewer rows
STEPS = 40
LEARNING_RATE = 0.15
# Penalties on the squared logarithms of the weights, divided by the number of rows.
FEATURE_PENALTY, RANK_PENALTY = 3.0, 3.0
REGULARIZATION = torch.logspace(-1.5, 1.5, 13, dtype=torch.float64)  # factors of the learned regularization to try


class Examples(NamedTuple):
    """Encoded rows ``(n, columns)``, targets ``(n, outputs)`` with mean 0, weights ``(n,)``, and units ``(n,)``.

    The unit of a row is the part of its weight that is left out: a row with a large weight may be several equal rows.
    """

    columns: Tensor
    target: Tensor
    weight: Tensor
    unit: Tensor


class ProjectionNetwork(nn.Module):
    """Computes ``exp(similarity(row, cases)) @ readout + columns(row) @ linear + intercept``.

    The similarity is an :class:`~ahop_layers.AdaptiveSimilarity` of negative absolute differences. It sums them over
    the columns of a feature, multiplies them by the weight of that feature, sorts them, and weights them by rank.

    Args:
        encoding: from features to columns.
        cases: encoded cases ``(S, columns)``.
        features: number of features.
    """

    used: Tensor
    blocks: Tensor
    cases: Tensor
    feature_weight: Tensor
    readout: Tensor
    linear: Tensor
    intercept: Tensor

    def __init__(self, encoding: RowEncoding, cases: Tensor, features: int) -> None:
        super().__init__()
        self.encoding = encoding
        used, blocks = torch.unique(encoding.feature, return_inverse=True)
        # Constant features have columns too, so that every feature is a block unless all of its values are missing.
        self.similarity = AdaptiveSimilarity(
            len(blocks), bases=("l1",), init="l1", blocks=blocks, dtype=torch.float64
        ).requires_grad_(False)
        self.register_buffer("used", used)
        self.register_buffer("blocks", blocks)
        self.register_buffer("cases", cases)
        self.register_buffer("feature_weight", torch.ones(features, dtype=torch.float64))
        for name in ("readout", "linear", "intercept"):
            self.register_buffer(name, torch.empty(0, dtype=torch.float64))

    def scores(self, rows: Tensor) -> Tensor:
        """Score ``rows (n, features)`` against the cases: ``(n, S)``."""
        return self.score_columns(self.encoding(rows))

    def score_columns(self, columns: Tensor) -> Tensor:
        """Score encoded rows ``(n, columns)`` against the cases: ``(n, S)``."""
        scale = self.feature_weight[self.encoding.feature]
        query, key = columns * scale, self.cases * scale
        *others, last = self.similarity.w[0]
        if not any(others):  # equal rank weights: no need to sort
            plain: Tensor = -last * torch.cdist(query, key, p=1)
            return plain
        scores: Tensor = self.similarity(query, key)
        return scores

    def forward(self, rows: Tensor) -> Tensor:
        """Compute ``rows (n, features) -> (n, outputs)``."""
        columns = self.encoding(rows)
        outputs = self.score_columns(columns).exp() @ self.readout + columns @ self.linear + self.intercept
        return functional.logsigmoid(outputs) if outputs.shape[1] > 1 else outputs


class Settings(NamedTuple):
    """Parameters that are learned by gradient descent, as logarithms: ``features`` and ``ranks`` are vectors."""

    features: Tensor
    ranks: Tensor
    temperature: Tensor
    linear: Tensor
    regularization: Tensor

    def rank_weight(self) -> Tensor:
        """The weights ``(1, features)`` of the footprint entries."""
        folded = (self.ranks - self.temperature).exp()
        return torch.cat([folded[:-1] - folded[1:], folded[-1:]])[None]


class Adam:
    """The optimizer Adam. That of PyTorch imports its compiler at the first step, which takes longer than a fit."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters, self.steps = parameters, 0
        self.moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in parameters]

    def step(self, loss: Tensor, rate: float) -> None:
        """Take a step along the gradient of ``loss``."""
        self.steps += 1
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            for parameter, gradient, (mean, square) in zip(self.parameters, gradients, self.moments, strict=True):
                mean.lerp_(gradient, 0.1)
                square.lerp_(gradient.square(), 0.001)
                size = (square / (1 - 0.999**self.steps)).sqrt() + 1e-8
                parameter -= rate / (1 - 0.9**self.steps) * mean / size


def fit_projection(
    network: ProjectionNetwork, examples: Examples, damage: float, linear: bool, generator: torch.Generator
) -> tuple[list[float], Tensor]:
    """Learn the similarity on some rows, then solve for the readout on all of them.

    Both minimize the squared leave-one-out error, which has a closed form. With ``damage``, the row that is left out is
    damaged: some of its features have the values of another row.

    Args:
        network: its similarity, readout and linear part are set.
        examples: training rows.
        damage: fraction of the features of a row that are replaced. Without damage, the rank weights stay equal.
        linear: whether there is a linear part.
        generator: draws the rows on which the similarity is learned and the damage.

    Returns:
        The leave-one-out error after each step, and the leave-one-out outputs ``(n, outputs)``.
    """
    history, settings = _learn(network, examples, damage, linear, generator)
    network.feature_weight[network.used] = settings.features.exp()
    network.similarity.w.copy_(settings.rank_weight())
    return history, _solve(network, examples, damage, settings, generator)


def _learn(
    network: ProjectionNetwork, examples: Examples, damage: float, linear: bool, generator: torch.Generator
) -> tuple[list[float], Settings]:
    """Minimize the leave-one-out error of a sample of the rows, which are its own cases, with Adam."""
    most = min(DAMAGED_ROWS if damage else LEARNED_ROWS, math.isqrt(LEARNED_DISTANCES // len(network.used)))
    chosen = torch.randperm(len(examples.columns), generator=generator)[: max(most, 16)]
    columns, target, weight, unit = (part[chosen] for part in examples)
    rows, count = len(chosen), len(network.used)
    # Distances of each feature (n, n, features): those of a damaged feature are those of the row it comes from.
    parts = [columns[:, network.blocks == block] for block in range(count)]
    distances = torch.stack([torch.cdist(part, part, p=1) for part in parts], -1)
    typical = distances.sum(-1).flatten()
    typical = typical[typical > 0].median() if (typical > 0).any() else torch.ones(())
    # Starts with the median distance as temperature, and with a memory and a linear part of comparable size.
    size = torch.tensor(-1.0 if linear else -math.inf)
    start = [torch.zeros(count), torch.zeros(count), typical.log(), size, torch.tensor(-1.0)]
    settings = Settings(*(value.double().requires_grad_() for value in start))
    fixed = [] if damage else [settings.ranks]
    fixed += [] if linear else [settings.linear]
    learned = [value for value in settings if all(value is not other for other in fixed)]
    adam = Adam(learned)

    def kernel(distances: Tensor, dots: Tensor) -> Tensor:
        factors = settings.features.exp()
        total = (distances * factors).sort(-1).values @ settings.ranks.exp() if damage else distances @ factors
        return (-total / settings.temperature.exp()).exp() + settings.linear.exp() * dots

    history = []
    for step in range(STEPS):
        own = asked = kernel(distances, columns @ columns.T / columns.shape[1])
        if damage:
            hit, other = _draw_damage(rows, count, damage, generator)
            queries = torch.where(hit[:, network.blocks], columns[other], columns)
            asked = kernel(
                torch.where(hit[:, None], distances[other], distances), queries @ columns.T / columns.shape[1]
            )
        outputs = _leave_one_out(own, asked, target, weight, unit, settings.regularization.exp())
        error = (weight[:, None] * (outputs - target).square()).sum() / weight.sum()
        penalty = FEATURE_PENALTY * settings.features.square().sum() + RANK_PENALTY * settings.ranks.square().sum()
        history.append(error.item())
        adam.step(error + penalty / rows, LEARNING_RATE * rise_and_fall(step, STEPS))
    return history, Settings(*(value.detach() for value in settings))


def _leave_one_out(
    own: Tensor, asked: Tensor, target: Tensor, weight: Tensor, unit: Tensor, strength: Tensor
) -> Tensor:
    """Outputs for queries, each from a readout of all cases but its own.

    Args:
        own: kernel of the cases ``(n, n)``.
        asked: kernel of the queries and the cases ``(n, n)``; query i is case i, damaged or not.
        target: ``(n, outputs)``.
        weight: ``(n,)``.
        unit: ``(n,)``, the part of a weight that is left out.
        strength: regularization.
    """
    inverse = torch.linalg.inv(own + torch.diag(strength / weight))
    readout = inverse @ target
    # Leaving a part of a weight out is an update of rank one of the matrix.
    change = readout / (weight * (weight - unit) / (strength * unit) + inverse.diagonal())[:, None]
    outputs: Tensor = asked @ readout - (asked * inverse.T).sum(1, keepdim=True) * change
    return outputs


def _solve(
    network: ProjectionNetwork, examples: Examples, damage: float, settings: Settings, generator: torch.Generator
) -> Tensor:
    """Set the readout and the linear part; return the leave-one-out outputs."""
    columns, target, weight, unit = examples
    factor = settings.linear.exp() / columns.shape[1]

    def kernel(rows: Tensor) -> Tensor:
        return network.score_columns(rows).exp() + factor * rows @ network.cases.T

    # Features whose inner products are the kernel of the cases, without the directions of negative eigenvalues.
    values, vectors = torch.linalg.eigh(kernel(network.cases))
    kept = values > values.max() * len(values) * torch.finfo(values.dtype).eps
    basis = vectors[:, kept] / values[kept].sqrt()
    own = apply_in_chunks(kernel, columns) @ basis
    values, vectors = torch.linalg.eigh((own * weight[:, None]).T @ own)
    basis, own = basis @ vectors, own @ vectors
    asked = own
    if damage:
        hit, other = _draw_damage(len(columns), len(network.used), damage, generator)
        asked = apply_in_chunks(kernel, torch.where(hit[:, network.blocks], columns[other], columns)) @ basis
    moments = own.T @ (weight[:, None] * target)
    candidates: list[tuple[float, int, Tensor, Tensor]] = []
    for strength in settings.regularization.exp() * REGULARIZATION:
        inverse = 1 / (values.clamp(min=0) + strength)
        readout = inverse[:, None] * moments
        leverage = unit * (own.square() @ inverse)
        change = (unit / (1 - leverage).clamp(min=1e-9))[:, None] * (target - own @ readout)
        outputs = asked @ readout - ((asked * own) @ inverse)[:, None] * change
        error = (weight[:, None] * (outputs - target).square()).sum().item()
        candidates.append((error, len(candidates), readout, outputs))
    _, _, readout, left_out = min(candidates)
    network.readout = basis @ readout
    network.linear = factor * network.cases.T @ network.readout
    return left_out


def _draw_damage(rows: int, features: int, fraction: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw which features ``(rows, features)`` are replaced, and by those of which row ``(rows,)``."""
    hit = torch.rand(rows, features, generator=generator) < fraction
    return hit, torch.randint(rows, (rows,), generator=generator)


def calibrate(network: ProjectionNetwork, outputs: Tensor, target: Tensor, weight: Tensor) -> None:
    """Turn outputs into logits, by one factor and one shift per class that minimize the leave-one-out log loss.

    Args:
        network: its readout, linear part and intercept are scaled.
        outputs: leave-one-out outputs ``(n, classes)``.
        target: classes ``(n,)``.
        weight: ``(n,)`` with mean 1.
    """

    def loss(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        given = torch.from_numpy(values).requires_grad_()
        logits = functional.logsigmoid(given[0].exp() * outputs + given[1:])
        losses = weight * functional.cross_entropy(logits, target, reduction="none")
        # The penalty, a tenth of that of a row, bounds the factor if the classes are separable.
        mean = losses.mean() + (given[0].square() + given[1:].square().mean()) / (10 * len(outputs))
        return mean.item(), torch.autograd.grad(mean, given)[0].numpy()

    start = np.append(1.0, np.zeros(outputs.shape[1]))
    found = torch.from_numpy(minimize(loss, start, jac=True, method="L-BFGS-B").x)
    network.readout, network.linear = found[0].exp() * network.readout, found[0].exp() * network.linear
    network.intercept = found[1:]

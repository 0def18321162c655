"""A memory of cases with a closed-form readout, the regularized pseudo-inverse."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ahop_layers.similarity import AdaptiveSimilarity
from ahop_layers.tabular.columns import CATEGORY, RowEncoding
from ahop_layers.tabular.network import CHUNK, apply_in_chunks
from ahop_layers.training import warmup_cosine

OnStep = Callable[[int, float], None]

LEARNING_RATE = 0.15
# Penalties on the squared logarithms of the weights, divided by the number of rows.
FEATURE_PENALTY, SHAPE_PENALTY, RANK_PENALTY = 3.0, 10.0, 3.0
REGULARIZATION = torch.logspace(-1.5, 1.5, 13, dtype=torch.float64)  # factors of the learned regularization to try
JUDGED_ROWS = 8192  # rows whose leave-one-out errors choose the regularization and calibrate the probabilities


class Effort(NamedTuple):
    """How the similarity is learned.

    Attributes:
        steps: number of steps.
        rows: rows of each step.
        differences: limit of the differences ``(rows, rows, features)``: tables with many features use fewer rows.
        dtype: dtype of the rows.
        shapes: whether the columns of a feature have different weights.
    """

    steps: int
    rows: int
    differences: int
    dtype: torch.dtype
    shapes: bool


SMALL = Effort(40, 384, 2**24, torch.float64, shapes=False)
LARGE = Effort(80, 1024, 2**27, torch.float32, shapes=True)


class Examples(NamedTuple):
    """Rows ``(n, features)``, targets ``(n, outputs)`` with mean 0, weights ``(n,)``, and units ``(n,)``.

    The unit of a row is the part of its weight that is left out: a row with a large weight may be several equal rows.
    """

    rows: Tensor
    target: Tensor
    weight: Tensor
    unit: Tensor

    def to(self, device: torch.device) -> "Examples":
        """Move all of them to a device."""
        return Examples(*(part.to(device) for part in self))


class ProjectionNetwork(nn.Module):
    """Computes ``exp(similarity(row, cases)) @ readout + columns(row) @ linear + intercept``.

    Columns have learned weights. Ramps of a feature are added, which makes them a learned increasing function of that
    feature. The similarity is an :class:`~ahop_layers.AdaptiveSimilarity` of negative absolute differences. It sums
    them over the columns of a feature, sorts them, and weights them by rank.

    Args:
        encoding: from features to columns.
        cases: encoded cases ``(S, columns)``.
        features: number of features.
    """

    used: Tensor
    blocks: Tensor
    binary: Tensor
    cases: Tensor
    feature_weight: Tensor
    column_weight: Tensor
    readout: Tensor
    linear: Tensor
    intercept: Tensor

    def __init__(self, encoding: RowEncoding, cases: Tensor, features: int) -> None:
        super().__init__()
        self.encoding = encoding
        used, blocks = torch.unique(encoding.feature, return_inverse=True)
        # Constant features have columns too, so that every feature is a block unless all of its values are missing.
        self.similarity = AdaptiveSimilarity(
            len(encoding.axes), bases=("l1",), init="l1", blocks=blocks[encoding.axes], dtype=torch.float64
        ).requires_grad_(False)
        self.register_buffer("used", used)
        self.register_buffer("blocks", blocks)
        # Indicators are 0 or 1, but those of cluster centers are not.
        binary = (encoding.kind >= CATEGORY) & ((cases == 0) | (cases == 1)).all(0)
        self.register_buffer("binary", binary[encoding.axes])
        self.register_buffer("cases", cases)
        self.register_buffer("feature_weight", torch.ones(features, dtype=torch.float64))
        self.register_buffer("column_weight", torch.ones(len(blocks), dtype=torch.float64))
        for name in ("readout", "linear", "intercept"):
            self.register_buffer(name, torch.empty(0, dtype=torch.float64))

    def scores(self, rows: Tensor) -> Tensor:
        """Score ``rows (n, features)`` against the cases: ``(n, S)``."""
        return self.score_columns(self.encoding(rows))

    def score_columns(self, columns: Tensor) -> Tensor:
        """Score encoded rows ``(n, columns)`` against the cases: ``(n, S)``."""
        rank_weight = self.similarity.w
        return self.compare(columns, self.cases, self.column_weight, rank_weight, bool(rank_weight[0, :-1].any()))

    def compare(
        self, queries: Tensor, keys: Tensor, column_weight: Tensor, rank_weight: Tensor, ranked: bool
    ) -> Tensor:
        """Score encoded rows ``(n, columns)`` against others ``(m, columns)``: ``(n, m)``.

        Args:
            queries: ``(n, columns)``.
            keys: ``(m, columns)``.
            column_weight: ``(columns,)``.
            rank_weight: weights ``(1, features)`` of the footprint entries.
            ranked: whether the differences of features are sorted. Only the last rank weight counts if not.
        """
        column_weight, rank_weight = column_weight.to(queries), rank_weight.to(queries)
        queries, keys = (self.encoding.add_ramps(column_weight * columns) for columns in (queries, keys))
        if ranked:
            scores: Tensor = functional_call(self.similarity, {"w": rank_weight}, (queries, keys))
            return scores
        distances = torch.cdist(queries[:, ~self.binary], keys[:, ~self.binary], p=1)
        # |a - b| = a + b - 2ab/w if a is 0 or w and b is between them.
        weight, query, key = (
            column_weight[self.encoding.axes][self.binary],
            queries[:, self.binary],
            keys[:, self.binary],
        )
        distances = distances + query.sum(1)[:, None] + key.sum(1) - 2 * (query / weight) @ key.T
        return -rank_weight[0, -1] * distances

    def forward(self, rows: Tensor) -> Tensor:
        """Compute ``rows (n, features) -> (n, outputs)``."""
        columns = self.encoding(rows)
        outputs = self.score_columns(columns).exp() @ self.readout + columns @ self.linear + self.intercept
        return functional.logsigmoid(outputs) if outputs.shape[1] > 1 else outputs


class Settings(NamedTuple):
    """Parameters that are learned by gradient descent, as logarithms; vectors over features, columns and ranks."""

    features: Tensor
    shapes: Tensor
    ranks: Tensor
    temperature: Tensor
    linear: Tensor
    regularization: Tensor

    def column_weight(self, blocks: Tensor, spread: Tensor) -> Tensor:
        """The weights of the columns ``(columns,)``. Shapes do not change the mean absolute deviation of a feature.

        Args:
            blocks: feature of each column.
            spread: mean absolute deviation of each column.
        """
        shapes = self.shapes.exp()
        parts = (spread, spread * shapes)
        before, after = (torch.zeros_like(self.features).index_add(0, blocks, part) for part in parts)
        return shapes * (self.features.exp() * before / after)[blocks]

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
    network: ProjectionNetwork,
    examples: Examples,
    damage: float,
    linear: bool,
    generator: torch.Generator,
    effort: Effort = SMALL,
    on_step: OnStep = lambda step, error: None,
) -> tuple[list[float], Tensor, Tensor]:
    """Learn the similarity on samples of the rows, then solve for the readout on all of them.

    Both minimize the squared leave-one-out error, which has a closed form. With ``damage``, the row that is left out is
    damaged: some of its features have the values of another row.

    Args:
        network: its similarity, readout and linear part are set.
        examples: training rows.
        damage: fraction of the features of a row that are replaced. Without damage, the rank weights stay equal.
        linear: whether there is a linear part.
        generator: draws samples and damage, on the CPU.
        effort: how the similarity is learned.
        on_step: called after each step with its number and its leave-one-out error.

    Returns:
        The leave-one-out error of each step, the indices of up to ``JUDGED_ROWS`` rows, and their leave-one-out outputs
        ``(rows, outputs)``.
    """
    # Rows are sorted by target, so that every k-th one is a fair sample.
    sample = network.encoding(examples.rows[:: math.ceil(len(examples.rows) / JUDGED_ROWS)])
    spread = (sample - sample.mean(0)).abs().mean(0).cpu() + torch.finfo(torch.float64).eps
    history, settings = _learn(network, examples, spread, damage, linear, generator, effort, on_step)
    network.feature_weight[network.used] = settings.features.exp().to(network.feature_weight)
    network.column_weight.copy_(settings.column_weight(network.blocks.cpu(), spread))
    network.similarity.w.copy_(settings.rank_weight())
    return (history, *_solve(network, examples, damage, settings, generator))


def _learn(
    network: ProjectionNetwork,
    examples: Examples,
    spread: Tensor,
    damage: float,
    linear: bool,
    generator: torch.Generator,
    effort: Effort,
    on_step: OnStep,
) -> tuple[list[float], Settings]:
    """Minimize the leave-one-out error of samples, whose rows are their own cases, with Adam."""
    place, count, blocks = examples.rows.device, len(examples.rows), network.blocks.cpu()
    settings = _start(network, examples, linear, generator)
    free = (True, effort.shapes, damage > 0, True, linear, True)
    adam = Adam([value for value, learned in zip(settings, free, strict=True) if learned])

    def kernel(queries: Tensor, keys: Tensor) -> Tensor:
        weights = (settings.column_weight(blocks, spread), settings.rank_weight())
        scores = network.compare(queries, keys, *weights, ranked=damage > 0)
        return scores.exp() + (settings.linear.exp() / keys.shape[1]).to(keys.dtype) * queries @ keys.T

    most = min(effort.rows, math.isqrt(effort.differences // len(network.used)))
    history = []
    for step in range(effort.steps):
        chosen = _draw(count, max(most, 16), generator).to(place)
        rows, *parts = (part[chosen] for part in examples)
        columns, target, weight, unit = (part.to(effort.dtype) for part in (network.encoding(rows), *parts))
        own = asked = kernel(columns, columns)
        if damage:
            asked = kernel(_damaged(network, columns, damage, generator), columns)
        outputs = _leave_one_out(own, asked, target, weight, unit, settings.regularization.exp())
        error = (weight[:, None] * (outputs - target).square()).sum() / weight.sum()
        penalties = zip((FEATURE_PENALTY, SHAPE_PENALTY, RANK_PENALTY), settings, strict=False)
        penalty = sum(strength * values.square().sum() for strength, values in penalties)
        history.append(error.item())
        adam.step(error.cpu() + penalty / count, LEARNING_RATE * warmup_cosine(step, effort.steps))
        on_step(step + 1, history[-1])
    return history, Settings(*(value.detach() for value in settings))


def _start(network: ProjectionNetwork, examples: Examples, linear: bool, generator: torch.Generator) -> Settings:
    """Start with the median distance as temperature, and with a memory and a linear part of comparable size.

    Settings are on the CPU: sums over the columns of a feature are not reproducible on a GPU.
    """
    chosen = _draw(len(examples.rows), SMALL.rows, generator).to(examples.rows.device)
    sample = network.encoding.add_ramps(network.encoding(examples.rows[chosen]))
    distances = torch.cdist(sample, sample, p=1)
    distances = distances[distances > 0]
    typical = distances.median() if len(distances) else torch.ones(())
    features = torch.zeros(len(network.used))
    size = torch.tensor(-1.0 if linear else -math.inf)
    start = [features, torch.zeros(len(network.blocks)), features, typical.log(), size, torch.tensor(-1.0)]
    return Settings(*(value.to("cpu", torch.float64, copy=True).requires_grad_() for value in start))


def _draw(count: int, most: int, generator: torch.Generator) -> Tensor:
    """Draw the indices of up to ``most`` of ``count`` rows."""
    return torch.randperm(count, generator=generator)[:most]


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
) -> tuple[Tensor, Tensor]:
    """Set the readout and the linear part; return some rows and their leave-one-out outputs."""
    factor = settings.linear.exp() / network.cases.shape[1]

    def kernel(columns: Tensor) -> Tensor:
        return network.score_columns(columns).exp() + factor * columns @ network.cases.T

    # Features whose inner products are the kernel of the cases, without the directions of negative eigenvalues.
    values, vectors = torch.linalg.eigh(kernel(network.cases))
    kept = values > values.max() * len(values) * torch.finfo(values.dtype).eps
    basis = vectors[:, kept] / values[kept].sqrt()
    gram, moments = torch.zeros((), dtype=basis.dtype), torch.zeros((), dtype=basis.dtype)
    for rows, target, weight, _ in zip(*(torch.split(part, CHUNK) for part in examples), strict=True):
        own = kernel(network.encoding(rows)) @ basis
        weighted = (own * weight[:, None]).T
        gram, moments = gram + weighted @ own, moments + weighted @ target
    values, vectors = torch.linalg.eigh(gram)
    basis, moments = basis @ vectors, vectors.T @ moments
    judged = _draw(len(examples.rows), JUDGED_ROWS, generator).to(basis.device)
    rows, target, weight, unit = (part[judged] for part in examples)
    columns = network.encoding(rows)
    own = asked = apply_in_chunks(kernel, columns) @ basis
    if damage:
        asked = apply_in_chunks(kernel, _damaged(network, columns, damage, generator)) @ basis
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
    return judged, left_out


def _damaged(network: ProjectionNetwork, columns: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Return encoded rows ``(n, columns)`` in each of which some features are those of another row."""
    hit = torch.rand(len(columns), len(network.used), generator=generator) < fraction
    other = torch.randint(len(columns), (len(columns),), generator=generator)
    hit, other = hit.to(columns.device), other.to(columns.device)
    return torch.where(hit[:, network.blocks], columns[other], columns)


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

"""A memory of cases with a closed-form readout, the regularized pseudo-inverse."""

import math
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ahop_layers.ops.reference import unfold
from ahop_layers.similarity.adaptive import AdaptiveSimilarity
from ahop_layers.tabular.columns import CATEGORY, RowEncoding
from ahop_layers.tabular.rows import CHUNK, Examples, apply_in_chunks
from ahop_layers.training import warmup_cosine

LEARNING_RATE = 0.15
# Penalties on the squared logarithms of the weights, divided by the number of rows.
FEATURE_PENALTY, SHAPE_PENALTY, RANK_PENALTY = 3.0, 10.0, 3.0
REGULARIZATION = torch.logspace(-1.5, 1.5, 13, dtype=torch.float64)  # factors of the learned regularization to try
_SOLVERS = Lock()
JUDGED_ROWS = 8192  # rows whose leave-one-out errors choose the regularization and calibrate the probabilities


class FitOptions(NamedTuple):
    """How a memory is fitted."""

    steps: int  # in which the similarity is learned
    rows: int  # of each step
    differences: int  # limit of the differences (rows, rows, features): tables with many features use fewer rows
    dtype: torch.dtype  # of the rows of a step
    shapes: bool  # whether the columns of a feature have different weights
    damage: float = 0.0  # fraction of the features of a row that are replaced; without, the rank weights stay equal
    linear: bool = True  # whether there is a linear part
    verbose: bool = False  # whether to print the error of each step


SMALL = FitOptions(40, 384, 2**24, torch.float64, shapes=False)
LARGE = FitOptions(80, 1024, 2**27, torch.float32, shapes=True)


class ProjectionNetwork(nn.Module):
    """Computes ``exp(similarity(row, cases)) @ readout + columns(row) @ linear + intercept``.

    Columns have learned weights. Ramps of a feature are added, which makes them a learned increasing function of that
    feature. The similarity is an :class:`~ahop_layers.AdaptiveSimilarity` of negative absolute differences. It sums
    them over the columns of a feature, sorts them, and weights them by rank.

    Args:
        encoding: from features to columns.
        cases: encoded cases ``(S, columns)``.
        ranked: whether the differences of features are sorted. If not, only the last rank weight counts.
    """

    binary: Tensor
    cases: Tensor
    feature_weight: Tensor
    column_weight: Tensor
    readout: Tensor
    linear: Tensor
    intercept: Tensor

    def __init__(self, encoding: RowEncoding, cases: Tensor, ranked: bool = False) -> None:
        super().__init__()
        self.encoding, self.ranked = encoding, ranked
        # Every feature has a column, also a constant one and one without known values, and is a block.
        self.similarity = AdaptiveSimilarity(
            len(encoding.axes), bases=("l1",), init="l1", blocks=encoding.feature[encoding.axes], dtype=torch.float64
        ).requires_grad_(False)
        # Indicators are 0 or 1, but those of cluster centers are not.
        binary = (encoding.kind >= CATEGORY) & ((cases == 0) | (cases == 1)).all(0)
        self.register_buffer("binary", binary[encoding.axes])
        self.register_buffer("cases", cases)
        self.register_buffer("feature_weight", torch.ones(encoding.features, dtype=torch.float64))
        self.register_buffer("column_weight", torch.ones(len(encoding.feature), dtype=torch.float64))
        for name in ("readout", "linear", "intercept"):
            self.register_buffer(name, torch.empty(0, dtype=torch.float64))

    def scores(self, columns: Tensor) -> Tensor:
        """Scores encoded rows ``(n, columns)`` against the cases: ``(n, S)``."""
        return self.compare(columns, self.cases, self.column_weight, self.similarity.w)

    def compare(self, queries: Tensor, keys: Tensor, column_weight: Tensor, rank_weight: Tensor) -> Tensor:
        """Scores encoded rows ``(n, columns)`` against others ``(m, columns)``: ``(n, m)``.

        ``column_weight`` is ``(columns,)``, and ``rank_weight (1, features)`` are weights of the footprint entries.
        """
        column_weight, rank_weight = column_weight.to(queries), rank_weight.to(queries)
        queries, keys = (self.encoding.add_ramps(column_weight * columns) for columns in (queries, keys))
        if self.ranked:
            return functional_call(self.similarity, {"w": rank_weight}, (queries, keys))
        distances = torch.cdist(queries[:, ~self.binary], keys[:, ~self.binary], p=1)
        # |a - b| = a + b - 2ab/w if a is 0 or w and b is between them.
        parts = (column_weight[self.encoding.axes], queries, keys)
        weight, query, key = (part[..., self.binary] for part in parts)
        distances = distances + query.sum(1)[:, None] + key.sum(1) - 2 * (query / weight) @ key.T
        return -rank_weight[0, -1] * distances

    def forward(self, rows: Tensor) -> Tensor:
        """Computes ``rows (n, features) -> (n, outputs)``."""
        columns = self.encoding(rows)
        outputs = self.scores(columns).exp() @ self.readout + columns @ self.linear + self.intercept
        return functional.logsigmoid(outputs) if outputs.shape[1] > 1 else outputs


class Settings(NamedTuple):
    """Parameters that are learned by gradient descent, as logarithms; vectors over features, columns and ranks."""

    features: Tensor
    shapes: Tensor
    ranks: Tensor
    temperature: Tensor
    linear: Tensor
    regularization: Tensor

    def column_weight(self, feature: Tensor, spread: Tensor) -> Tensor:
        """Returns the weights ``(columns,)``; shapes keep ``spread``, the mean absolute deviation, of a feature."""
        shapes = self.shapes.exp()
        parts = (spread, spread * shapes)
        before, after = (torch.zeros_like(self.features).index_add(0, feature, part) for part in parts)
        return shapes * (self.features.exp() * before / after)[feature]

    def rank_weight(self) -> Tensor:
        """Returns the weights ``(1, features)`` of the footprint entries."""
        return unfold((self.ranks - self.temperature).exp())[None]


def fit_projection(
    network: ProjectionNetwork, examples: Examples, options: FitOptions, generator: torch.Generator
) -> list[float]:
    """Learns the similarity on samples of the rows, solves for the readout on all of them, and calibrates classes.

    The first two minimize the squared leave-one-out error, which has a closed form. With damage, the row that is left
    out is damaged: some of its features have the values of another row. Examples are sorted by target, which is
    ``(n, 1)``, or ``(n, classes)`` in one-hot encoding. The generator, which draws samples and damage, is on the CPU.
    Returns the leave-one-out error of each step.
    """
    if examples.weight.is_cuda:  # PyTorch loads its solvers at the first call and fails if two threads do (issue 90613)
        with _SOLVERS:
            torch.linalg.inv(examples.weight.new_ones(1, 1))
    weight, group = examples.weight.cpu().numpy(), examples.target.argmax(1).cpu().numpy()
    typical = np.array([np.median(weight[group == number]) for number in range(examples.target.shape[1])])
    unit = torch.from_numpy(np.minimum(weight, typical[group]))  # at most the median of a class, or of all rows
    mean = (examples.weight[:, None] * examples.target).mean(0)
    centered = examples._replace(target=examples.target - mean, unit=unit.to(mean.device))
    # Rows are sorted by target, so that every k-th one is a fair sample.
    sample = network.encoding(examples.rows[:: math.ceil(len(examples.rows) / JUDGED_ROWS)])
    spread = (sample - sample.mean(0)).abs().mean(0).cpu() + torch.finfo(torch.float64).eps
    history, settings = _learn(network, centered, spread, options, generator)
    network.feature_weight.copy_(settings.features.exp())
    network.column_weight.copy_(settings.column_weight(network.encoding.feature.cpu(), spread))
    network.similarity.w.copy_(settings.rank_weight())
    judged, left_out = _solve(network, centered, settings, options.damage, generator)
    network.intercept = mean
    if len(mean) > 1:
        _calibrate(network, left_out, examples.take(judged))
    return history


def _learn(
    network: ProjectionNetwork, examples: Examples, spread: Tensor, options: FitOptions, generator: torch.Generator
) -> tuple[list[float], Settings]:
    """Minimizes the leave-one-out error of samples, whose rows are their own cases, with Adam."""
    feature, damage, count = network.encoding.feature.cpu(), options.damage, len(examples.rows)
    settings = _start(network, examples, options.linear, generator)
    free = (True, options.shapes, damage > 0, True, options.linear, True)
    learned = [value.requires_grad_() for value, is_free in zip(settings, free, strict=True) if is_free]
    adam = torch.optim.Adam(learned, lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: warmup_cosine(step, options.steps))

    def kernel(queries: Tensor, keys: Tensor) -> Tensor:
        scores = network.compare(queries, keys, settings.column_weight(feature, spread), settings.rank_weight())
        return scores.exp() + (settings.linear.exp() / keys.shape[1]).to(keys.dtype) * queries @ keys.T

    most = min(options.rows, math.isqrt(options.differences // network.encoding.features))
    history = []
    for step in range(options.steps):
        rows, *parts, _ = examples.take(torch.randperm(count, generator=generator)[: max(most, 16)])
        columns, target, weight, unit = (part.to(options.dtype) for part in (network.encoding(rows), *parts))
        own = asked = kernel(columns, columns)
        if damage:
            asked = kernel(_damaged(network, columns, damage, generator), columns)
        strength = settings.regularization.exp()
        inverse = torch.linalg.inv(own + torch.diag(strength / weight))
        readout = inverse @ target
        # Leaving a part of the weight of a row out is an update of rank one of the matrix.
        change = readout / (weight * (weight - unit) / (strength * unit) + inverse.diagonal())[:, None]
        outputs = asked @ readout - (asked * inverse.T).sum(1, keepdim=True) * change
        error = (weight[:, None] * (outputs - target).square()).sum() / weight.sum()
        penalties = zip((FEATURE_PENALTY, SHAPE_PENALTY, RANK_PENALTY), settings, strict=False)
        penalty = sum(strength * values.square().sum() for strength, values in penalties)
        adam.zero_grad()
        torch.autograd.backward(error.cpu() + penalty / count)
        adam.step()
        schedule.step()
        history.append(error.item())
        if options.verbose:
            print(f"step {step + 1}/{options.steps}: leave-one-out error {history[-1]:.4f}", flush=True)
    return history, Settings(*(value.detach() for value in settings))


def _start(network: ProjectionNetwork, examples: Examples, linear: bool, generator: torch.Generator) -> Settings:
    """Starts with the median distance as temperature, and with a memory and a linear part of comparable size."""
    chosen = torch.randperm(len(examples.rows), generator=generator)[: SMALL.rows]
    sample = network.encoding.add_ramps(network.encoding(examples.rows[chosen]))
    distances = torch.cdist(sample, sample, p=1)
    distances = distances[distances > 0]
    typical = distances.median() if len(distances) else torch.ones(())
    features, shapes = torch.zeros_like(network.feature_weight), torch.zeros_like(network.column_weight)
    size = torch.tensor(-1.0 if linear else -math.inf)
    start = [features, shapes, features, typical.log(), size, torch.tensor(-1.0)]
    # On the CPU: sums over the columns of a feature are not reproducible on a GPU.
    return Settings(*(value.to("cpu", torch.float64, copy=True) for value in start))


def _solve(
    network: ProjectionNetwork, examples: Examples, settings: Settings, damage: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Sets the readout and the linear part; returns some rows and their leave-one-out outputs."""
    factor = settings.linear.exp() / network.cases.shape[1]

    def kernel(columns: Tensor) -> Tensor:
        return network.scores(columns).exp() + factor * columns @ network.cases.T

    # Features whose inner products are the kernel of the cases, without the directions of negative eigenvalues.
    values, vectors = torch.linalg.eigh(kernel(network.cases))
    kept = values > values.max() * len(values) * torch.finfo(values.dtype).eps
    basis = vectors[:, kept] / values[kept].sqrt()
    gram = moments = torch.zeros((), dtype=basis.dtype)
    for start in range(0, len(examples.rows), CHUNK):
        rows, target, weight, *_ = examples.take(slice(start, start + CHUNK))
        own = kernel(network.encoding(rows)) @ basis
        weighted = (own * weight[:, None]).T
        gram, moments = gram + weighted @ own, moments + weighted @ target
    values, vectors = torch.linalg.eigh(gram)
    basis, moments = basis @ vectors, vectors.T @ moments
    judged = torch.randperm(len(examples.rows), generator=generator)[:JUDGED_ROWS]
    rows, target, weight, unit, _ = examples.take(judged)
    columns = network.encoding(rows)
    own = asked = apply_in_chunks(kernel, columns) @ basis
    if damage:
        asked = apply_in_chunks(kernel, _damaged(network, columns, damage, generator)) @ basis
    candidates: list[tuple[float, Tensor, Tensor]] = []
    for strength in settings.regularization.exp() * REGULARIZATION:
        inverse = 1 / (values.clamp(min=0) + strength)
        readout = inverse[:, None] * moments
        leverage = unit * (own.square() @ inverse)
        change = (unit / (1 - leverage).clamp(min=1e-9))[:, None] * (target - own @ readout)
        outputs = asked @ readout - ((asked * own) @ inverse)[:, None] * change
        error = (weight[:, None] * (outputs - target).square()).sum().item()
        candidates.append((error, readout, outputs))
    _, readout, left_out = min(candidates, key=lambda candidate: candidate[0])
    network.readout = basis @ readout
    network.linear = factor * network.cases.T @ network.readout
    return judged, left_out


def _damaged(network: ProjectionNetwork, columns: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Returns encoded rows ``(n, columns)`` in each of which some features are those of another row."""
    hit = torch.rand(len(columns), network.encoding.features, generator=generator) < fraction
    other = torch.randint(len(columns), (len(columns),), generator=generator)
    hit, other = hit.to(columns.device), other.to(columns.device)
    return torch.where(hit[:, network.encoding.feature], columns[other], columns)


def _calibrate(network: ProjectionNetwork, left_out: Tensor, examples: Examples) -> None:
    """Turns outputs into logits, by one factor and one shift per class that minimize the leave-one-out log loss."""
    outputs, target, weight = left_out.cpu(), examples.target.argmax(1).cpu(), examples.weight.cpu()

    def loss(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        given = torch.from_numpy(values).requires_grad_()
        logits = functional.logsigmoid(given[0].exp() * outputs + given[1:])
        losses = weight * functional.cross_entropy(logits, target, reduction="none")
        # The penalty, a tenth of that of a row, bounds the factor if the classes are separable.
        mean = losses.mean() + (given[0].square() + given[1:].square().mean()) / (10 * len(outputs))
        return mean.item(), torch.autograd.grad(mean, given)[0].numpy()

    start = np.append(1.0, np.zeros(outputs.shape[1]))
    found = torch.from_numpy(minimize(loss, start, jac=True, method="L-BFGS-B").x).to(left_out.device)
    network.readout, network.linear = found[0].exp() * network.readout, found[0].exp() * network.linear
    network.intercept = found[1:]

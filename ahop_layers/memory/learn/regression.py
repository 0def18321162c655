"""Softmax regression: the weights of linear scores with which right candidates beat wrong ones, found by L-BFGS."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ahop_layers.memory.learn.threads import in_threads

STEPS = 80  # number of steps of L-BFGS
HISTORY = 20  # number of steps that it remembers
HALVINGS = 20  # number of trials of a step
RENEWED = 10  # number of steps after which the second derivatives are estimated again
CURVED = 256  # number of queries of these estimates
RIDGE = 1e-4  # is added to the diagonal of the second derivatives, relative to their mean
TOLERANCE = 1e-4  # relative change of the loss at which it stops
PENALTY = 1e-3  # of the weights of rank bins
MEAN_PENALTY = 1e-6  # of the weights of the means over all ranks
ENOUGH_QUERIES = 512  # number of queries for which penalties need not be larger
LEAST_START = 0.01  # smallest start of a weight that must not be negative, relative to the largest
FLOOR = 0.05  # is added to the probability of right candidates in a bounded loss: hopeless queries count little


class Problem(NamedTuple):
    """Candidates of queries: features ``(L, C, f)``, log weights ``(L, C)``; the first ``right`` candidates are right.

    A log weight is -inf for a candidate that takes no part, and the log of the number of patterns that a random one
    represents. ``sizes`` are the numbers of features of each base: its mean over all ranks, then its bins of ranks.
    """

    features: Tensor
    offset: Tensor
    right: int
    sizes: list[int]

    def rows(self, rows: slice) -> "Problem":
        """Returns some of the queries."""
        return self._replace(features=self.features[rows].contiguous(), offset=self.offset[rows])

    def scaled_(self) -> tuple["Problem", Tensor]:
        """Centers the features and scales them to about unit deviation, in place; returns their deviations ``(f,)``.

        The result is in float32, which is enough then. A deviation is at least a hundredth of the largest one of its
        base: weights of nearly constant features would be so large that a score loses its precision.
        """
        mean = self.features.mean(1, keepdim=True)
        features = self.features.sub_(mean)
        deviation = torch.linalg.vector_norm(features, dim=(0, 1)) / math.sqrt(self.offset.numel())
        floor = torch.cat([0.01 * each.amax().expand(len(each)) for each in torch.split(deviation, self.sizes)])
        varies = deviation > 1e-6 * mean.abs().amax((0, 1))
        deviation = torch.where(varies, torch.maximum(deviation, floor), torch.inf)
        features = features.div_(deviation).float()
        return self._replace(features=features, offset=self.offset.to(features)), deviation

    def means(self) -> Tensor:
        """Returns a vector ``(f,)`` that is 1 for the mean of each base, and 0 for its bins."""
        means = torch.zeros_like(self.features[0, 0])
        means[[sum(self.sizes[:base]) for base in range(len(self.sizes))]] = 1.0
        return means

    def penalty(self) -> Tensor:
        """Returns the penalty of the weight of each feature ``(f,)``: the fewer queries, the larger."""
        means = self.means()
        return max(1.0, ENOUGH_QUERIES / len(self.offset)) * (MEAN_PENALTY * means + PENALTY * (1 - means))

    def objective(self, weight: Tensor, bounded: bool) -> tuple[Tensor, Tensor]:
        """Returns the mean loss and its gradient: the negative log-likelihood, or one ``bounded`` by FLOOR."""
        flat = self.features.flatten(0, 1)
        score = (flat @ weight).view(self.offset.shape) + self.offset
        total, right = score.logsumexp(1, keepdim=True), score[:, : self.right].logsumexp(1, keepdim=True)
        slope = (score - total).exp_()
        slope[:, : self.right] -= (score[:, : self.right] - right).exp_()
        loss = total - right
        if bounded:
            p = (right - total).exp()
            slope *= p / (p + FLOOR)
            loss = -((p + FLOOR) / (1 + FLOOR)).log()
        return loss.mean(), slope.flatten() @ flat / len(score)

    def curvature(self, weight: Tensor, bounded: bool) -> Tensor:
        """Returns about the second derivatives of the objective ``(f, f)``: covariances of features of candidates."""
        share = (self.features @ weight + self.offset).softmax(1)
        mean = share[:, None] @ self.features
        if bounded:
            p = share[:, : self.right].sum(1, keepdim=True)
            share = share * (p / (p + FLOOR))
        apart = ((self.features - mean) * share.sqrt()[..., None]).flatten(0, 1)
        return apart.mT @ apart / len(mean)

    def scores(self, weight: Tensor) -> Tensor:
        """Returns the scores of the candidates ``(L, C, ...)`` with weights of features ``(f, ...)``."""
        return self.features @ weight.to(self.features)

    def losses(self, score: Tensor) -> Tensor:
        """Returns the negative log-likelihood of the right candidates of each query ``(L,)``."""
        logits = score + self.offset
        return logits.logsumexp(1) - logits[:, : self.right].logsumexp(1)

    def correct(self, weights: Sequence[Tensor]) -> Tensor:
        """Returns whether the best candidate of each query is right, for each of several weights: ``(weights, L)``."""
        scores = self.scores(torch.stack([weight.flatten() for weight in weights], -1))  # reads the features once
        return torch.stack([self.is_right(score) for score in scores.unbind(-1)])

    def is_right(self, score: Tensor) -> Tensor:
        """Returns whether a right candidate has a larger ``score (L, C)`` than all wrong ones: bool ``(L,)``."""
        score = score.masked_fill(self.offset == -torch.inf, -torch.inf)
        wrong = pad(score[:, self.right :], (0, 1), value=-torch.inf)
        return score[:, : self.right].amax(1) > wrong.amax(1)

    def temperature(self, score: Tensor) -> tuple[float, float]:
        """Returns the number to divide ``score (L, C)`` by for the smallest log-likelihood loss, and this loss.

        It is relative to the deviation of the scores, so that the result does not depend on their scale.
        """
        deviation = score.std(1, correction=0).mean()
        unit = deviation if deviation > 0 else torch.ones_like(deviation)
        losses = {}
        for factor in (2 ** (k / 2) for k in range(-4, 15)):
            losses[factor] = self.losses(factor / unit * score).mean().item()
        best = min(losses, key=losses.__getitem__)
        return unit.item() / best, losses[best]


def solve(problem: Problem, start: Tensor, bounded: bool, penalty: Tensor, signed: bool = True) -> Tensor:
    """Minimizes the objective plus ``penalty . weight**2`` from ``start (f,)``, on scaled features.

    Weights that are not ``signed`` are squares, so that no value lowers a score by agreeing better.
    """

    def loss(root: Tensor) -> tuple[float, Tensor]:
        weight = root if signed else root.square()
        value, gradient = problem.objective(weight, bounded)
        gradient = gradient + 2 * penalty * weight
        return (value + penalty @ weight.square()).item(), gradient if signed else 2 * root * gradient

    some = problem.rows(slice(None, None, max(1, len(problem.offset) // CURVED)))

    def curvature(root: Tensor) -> Tensor:
        """Returns second derivatives; the part of squares that may be negative is taken as positive."""
        weight = root if signed else root.square()
        second = some.curvature(weight, bounded) + 2 * penalty.diag()
        if not signed:
            gradient = problem.objective(weight, bounded)[1] + 2 * penalty * weight
            second = 4 * root * root[:, None] * second + 2 * gradient.abs().diag()
        return second + second.diagonal().mean() * RIDGE * torch.eye(len(root)).to(second)

    if signed:
        return minimize(loss, start, curvature)
    least = LEAST_START * start.max()  # the square of 0 has no slope
    return minimize(loss, start.clamp(min=least).sqrt(), curvature).square()


def minimize(
    loss: Callable[[Tensor], tuple[float, Tensor]], start: Tensor, curvature: Callable[[Tensor], Tensor]
) -> Tensor:
    """Minimizes a loss by L-BFGS from ``start (f,)``; ``loss`` returns its value and its gradient.

    ``curvature`` returns a positive estimate of its second derivatives ``(f, f)``, which L-BFGS corrects: without it,
    four times as many steps are needed. Steps are halved until the loss falls. The optimizer of PyTorch has no such
    estimate, and imports its compiler, which takes longer than a fit.
    """
    weight, (value, gradient) = start, loss(start)
    changes: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=HISTORY)
    for number in range(STEPS):
        if number % RENEWED == 0:
            factor, _ = torch.linalg.cholesky_ex(curvature(weight))
            changes.clear()
        direction = _newton_direction(gradient, changes, factor)
        slope = (gradient @ direction).item()
        if not slope < 0:  # at the minimum, or lost to rounding
            break
        size = 1.0
        for _ in range(HALVINGS):
            moved = weight + size * direction
            lower, turned = loss(moved)
            if lower <= value + 1e-4 * size * slope:
                break
            size /= 2
        else:
            break
        step, turn = moved - weight, turned - gradient
        product = (step @ turn).item()
        if product > 1e-10 * turn.square().sum().item():
            changes.append((step, turn, product))
        done = value - lower <= TOLERANCE * abs(value)
        weight, value, gradient = moved, lower, turned
        if done:
            break
    return weight


def _newton_direction(gradient: Tensor, changes: Sequence[tuple[Tensor, Tensor, float]], factor: Tensor) -> Tensor:
    """Returns the direction of L-BFGS from the last changes of weight and gradient, and the products of both."""
    direction, shares = -gradient, []
    for step, turn, product in reversed(changes):
        shares.append((step @ direction) / product)
        direction = direction - shares[-1] * turn
    direction = torch.cholesky_solve(direction[:, None], factor)[:, 0]
    for (step, turn, product), share in zip(changes, reversed(shares), strict=True):
        direction = direction + (share - (turn @ direction) / product) * step
    return direction


def solutions(
    problem: Problem, deviation: Tensor, starts: Sequence[Tensor], penalty: Tensor | None = None
) -> list[Tensor]:
    """Solves a scaled problem from the best of several starts ``(f,)``: for the bounded likelihood, and for the other.

    The bounded likelihood is solved for weights of any sign, and for weights that are not negative. What is in the
    middle of these two is returned first, then each of the three. ``penalty (f,)`` is by default that of the problem.
    """
    scaled = [problem.means(), *(rescaled(start, deviation) for start in starts)]
    some = problem.rows(slice(None, None, 4))
    scores = some.scores(torch.stack(scaled, -1)).movedim(-1, 0).contiguous()
    found = [(*some.temperature(score), weight) for score, weight in zip(scores, scaled, strict=True)]
    temperature, _, first = min(found, key=lambda each: each[1])
    penalty = problem.penalty() if penalty is None else penalty
    likely = solve(problem, solve(some, first / temperature, False, penalty), False, penalty)  # most steps with a part
    bounded = solve(problem, likely, True, penalty)
    positive = solve(problem, bounded.clamp(min=0.0), True, penalty, signed=False)
    return [weight.to(deviation) / deviation for weight in ((bounded + positive) / 2, bounded, likely, positive)]


def rescaled(weight: Tensor, deviation: Tensor) -> Tensor:
    """Returns the ``weight (f,)`` of features for scaled ones, up to a factor, in float32."""
    weight = weight.to(deviation) * deviation.masked_fill(deviation.isinf(), 0.0)
    return (weight / weight.abs().max().clamp(min=torch.finfo(weight.dtype).tiny)).float()


def trial_losses(problem: Problem) -> Tensor:
    """Returns the expected error of each query ``(L,)`` of a scaled problem after a solution for the other half.

    It says whether features suit. Unlike the log-likelihood, it is not dominated by the few queries that are hopeless.
    """
    halves = [problem.rows(slice(start, None, 2)) for start in range(2)]

    def loss(part: tuple[Problem, Problem]) -> Tensor:
        fitted, held = part
        weight = problem.means() / fitted.temperature(fitted.scores(problem.means()))[0]
        return -held.losses(held.scores(solve(fitted, weight, False, fitted.penalty()))).neg().expm1()

    return torch.cat(in_threads(loss, [(halves[1], halves[0]), (halves[0], halves[1])], problem.offset.device))

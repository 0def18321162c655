"""The choice of a distance for nearest-neighbor regression, by the errors of stored rows without their own place."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ahop_layers.learning.ranks import bin_edges
from ahop_layers.learning.regression import Problem, minimize
from ahop_layers.tabular.distances import POWERS, RowSimilarity, Term

QUERIES, STORED, TRIAL_QUERIES, TRIAL_STORED = 1024, 4096, 128, 1024
"""Most queries of a fit, and rows that they are compared with; the same for the choice between frames."""

CANDIDATES, BINS, LOST, NEAR = 128, 6, 0.3, 11
"""Candidates of a query, bins of ranks from each end, the largest share of values that a query loses, and the number of
the nearest candidates whose mean distance is the unit of distances."""

PENALTY, RANK_PENALTY = 1e-3, 1e-2
"""Penalties of the factors of terms and of the weights of rank bins."""

PLAIN: dict[str, tuple[str, Term]] = {
    **{kind: ("one scale", Term(kind)) for kind in ("L1", "Euclid", "cosine", "Sorensen")},
    **{f"powed {kind}": ("one scale", Term(kind, POWERS[-1])) for kind in ("L1", "Euclid", "cosine", "Sorensen")},
    **{f"standardized {kind}": ("standardized", Term(kind)) for kind in ("L1", "Euclid")},
}
"""Name of a distance without parameters -> the frame of rows that it needs, and its term.

In one frame all features are on one scale from 0 to 1, and unknown values are 0. In the other, each feature has mean 0
and deviation 1, and unknown values take no part.
"""

TERMS: dict[str, tuple[list[Term], list[Term]]] = {
    "one scale": (
        [Term(kind, power) for kind in ("Sorensen", "cosine") for power in POWERS],
        [Term("Sorensen", power, ranked=True) for power in (POWERS[0], POWERS[-1])],
    ),
    "standardized": ([Term("L1"), Term("Euclid")], [Term("L1", ranked=True)]),
}
"""Frame -> the terms of a learned distance, without and with weights of ranks."""

LEARNED = ("not sorted", "trimmed", "learned")
"""Distances with parameters: factors of terms, the share of the best ranks, and weights of ranks."""


class Chosen(NamedTuple):
    """A distance: its name and frame, the similarity, and the mean held-out error of each distance by its name."""

    name: str
    frame: str
    similarity: RowSimilarity
    errors: dict[str, float]


class Questions(NamedTuple):
    """Queries ``(L, d)`` out of rows ``(N, d)``, and their targets ``(L, outputs)`` and ``(N, outputs)``.

    ``blocked (L, N)`` says which rows must not answer a query: itself, and others of the same place.
    """

    query: Tensor
    rows: Tensor
    target: Tensor
    targets: Tensor
    blocked: Tensor
    missing: bool

    def scores(self, term: Term) -> Tensor:
        """Returns the scores ``(L, N)`` of a term; those of rows that must not answer are -inf."""
        score = term.scores(self.query, self.rows, missing=self.missing)
        return score.masked_fill(self.blocked, -torch.inf)

    def errors(self, neighbors: Tensor) -> Tensor:
        """Returns the distance of each target from the mean of those of its ``neighbors (L, k)``: ``(L,)``."""
        return (self.targets[neighbors].mean(1) - self.target).norm(dim=1)


def choose(frames: dict[str, Tensor], targets: Tensor, count: int, name: str, generator: torch.Generator) -> Chosen:
    """Chooses the distance with the smallest held-out error, or takes the one with the given name.

    Args:
        frames: rows ``(N, d)`` in each frame.
        targets: ``(N, outputs)``. Errors are Euclidean. Rows whose outputs, if there are several, all are equal are of
            one place: they do not answer each other.
        count: number of neighbors whose targets are averaged.
        name: ``"auto"``, or the name of a distance.
        generator: draws the queries.
    """
    if name not in PLAIN:
        plain = _plain_errors(frames, targets, count)
        frame = PLAIN[min(plain, key=plain.__getitem__)][0] if plain else "standardized"
        asked = ask(frames[frame], targets, count, QUERIES, STORED, generator)
        if len(asked.query):
            return _Regression(asked, frame, count).choose(name)
        name = f"standardized {TERMS['standardized'][0][0].kind}"  # too few rows
    frame, term = PLAIN[name]
    similarity = RowSimilarity([term], [torch.ones(1, dtype=torch.float64)], [frames[frame].shape[1]])
    return Chosen(name, frame, similarity, {})


def ask(
    rows: Tensor, targets: Tensor, count: int, queries: int, stored: int, generator: torch.Generator | None = None
) -> Questions:
    """Draws queries out of the rows, except those with fewer than ``count`` rows of other places.

    If rows have unknown values, every second query loses some of its values.
    """
    generator = generator or torch.Generator().manual_seed(0)
    order = torch.randperm(len(rows), generator=generator)[:stored]
    rows, targets = rows[order].float(), targets[order].float()
    query, target = rows[:queries].clone(), targets[:queries]
    place = torch.arange(len(rows))
    blocked = place == place[: len(query), None]
    if targets.shape[1] > 1:
        blocked |= (targets == target[:, None]).all(-1)
    share = LOST * torch.rand(len(query), 1, generator=generator)
    share[::2] = 0.0
    lost = torch.rand(query.shape, generator=generator) < share
    missing = bool(rows.isnan().any())
    if missing:
        query[lost & (~lost & ~query.isnan()).any(1, keepdim=True)] = torch.nan  # one value stays
    elif (rows == 0).any():
        query[lost] = 0.0
    usable = (~blocked).sum(1) >= count
    return Questions(query[usable], rows, target[usable], targets, blocked[usable], missing)


def _plain_errors(frames: dict[str, Tensor], targets: Tensor, count: int) -> dict[str, float]:
    """Returns the mean error of a few queries for each plain distance, none if there are no queries."""
    asked = {frame: ask(rows, targets, count, TRIAL_QUERIES, TRIAL_STORED) for frame, rows in frames.items()}
    return {
        name: asked[frame].errors(asked[frame].scores(term).topk(count).indices).mean().item()
        for name, (frame, term) in PLAIN.items()
        if len(asked[frame].query)
    }


class _Regression:
    """Scores of the terms of one frame for the candidates of each query, and what is learned from them."""

    def __init__(self, asked: Questions, frame: str, count: int) -> None:
        self.asked, self.frame, self.count = asked, frame, count
        self.plain = {name: term for name, (own, term) in PLAIN.items() if own == frame}
        self.even, self.ranked = TERMS[frame]
        scores = {term: asked.scores(term) for term in dict.fromkeys((*self.plain.values(), *self.even))}
        size = min(max(CANDIDATES, count * len(scores)), int((~asked.blocked).sum(1).min()))
        # The nearest rows of every term: the candidate of the best rank is the first.
        rank = torch.stack([score.argsort(1, descending=True).argsort(1) for score in scores.values()]).amin(0)
        self.candidates = rank.masked_fill(asked.blocked, len(asked.rows)).topk(size, largest=False).indices
        self.distance = (asked.targets[self.candidates] - asked.target[:, None]).norm(dim=-1)
        self.edges = bin_edges(asked.rows.shape[1], BINS, both_ends=True)
        self.features = {term: _finite(score.gather(1, self.candidates))[..., None] for term, score in scores.items()}
        for term in self.ranked:
            self.features[term] = term.bins(asked.query, asked.rows, self.candidates, self.edges)

    def errors(self, score: Tensor) -> Tensor:
        """Returns the error of each query by the scores of its candidates ``(L, C)``: ``(L,)``."""
        return self.asked.errors(self.candidates.gather(1, score.topk(self.count).indices))

    def choose(self, name: str) -> Chosen:
        """Returns the distance with this name, or for ``"auto"`` the learned one.

        If another distance has a smaller error by more than a standard error, ``"auto"`` is that one.
        """
        found = {each: self._fixed(term, torch.ones(1)) for each, term in self.plain.items()}
        widths = torch.tensor([0, *self.edges]).diff() / self.edges[-1]
        kept = [pad(widths[:count], (0, len(widths) - count)) for count in range(1, len(widths) + 1)]
        if name in ("auto", "trimmed"):
            found["trimmed"] = min((self._fixed(term, each) for term in self.ranked for each in kept), key=_mean)
        if name in ("auto", "not sorted"):
            found["not sorted"] = self._solved(self.even)
        if name in ("auto", "learned"):
            groups = [*([term] for term in self.ranked), [*self.ranked, *self.even]]
            found["learned"] = min(map(self._solved, groups), key=_mean)
        if name == "auto":
            name, gain = "learned", 0.0
            for each, other in found.items():
                less = found["learned"].errors - other.errors
                margin = less.mean().item() - less.std(correction=0).item() / math.sqrt(len(less))
                name, gain = (each, margin) if margin > gain else (name, gain)
        _, terms, weight = found[name]
        weight = self._solve(terms) if weight is None else weight
        weights = torch.split(weight.double(), [self.features[term].shape[-1] for term in terms])
        errors = {each: _mean(result) for each, result in found.items()}
        return Chosen(name, self.frame, RowSimilarity(terms, weights, self.edges), errors)

    def _fixed(self, term: Term, weight: Tensor) -> "_Result":
        """Returns the result of a term with given weights."""
        return _Result(self.errors(self.features[term] @ weight), [term], weight)

    def _solved(self, terms: list[Term]) -> "_Result":
        """Returns the result of terms whose weights are learned; each half of the queries is held out once."""
        errors, fold = torch.zeros(len(self.distance)), torch.arange(len(self.distance)) // 2 % 2
        values = torch.cat([self.features[term] for term in terms], -1)
        for held in (fold == 0, fold == 1):
            weight = self._solve(terms, ~held if len(errors) > 2 else held)
            errors[held] = self.errors(values @ weight)[held]
        return _Result(errors, terms, None)

    def _solve(self, terms: list[Term], rows: Tensor | slice = slice(None)) -> Tensor:
        """Returns weights of the features of terms that are learned from some queries, or from all."""
        parts = [self.features[term][rows] for term in terms]
        sizes = [part.shape[-1] for part in parts]
        penalty = torch.tensor([RANK_PENALTY if term.ranked else PENALTY for term in terms])
        penalty = penalty.repeat_interleave(torch.tensor(sizes))
        return solve_distance(torch.cat(parts, -1), sizes, self.distance[rows], penalty)


class _Result(NamedTuple):
    """The error of each query ``(L,)``, the terms of a score, and the weights of their features if not to be solved."""

    errors: Tensor
    terms: list[Term]
    weight: Tensor | None


def _mean(result: _Result) -> float:
    return result.errors.mean().item()


def solve_distance(values: Tensor, sizes: list[int], distance: Tensor, penalty: Tensor) -> Tensor:
    """Returns the weights of features ``(f,)`` with which softmax picks candidates that are near the target.

    The expected ``distance (L, C)`` is minimized, from the weights whose probabilities fall exponentially with it.

    Args:
        values: features ``(L, C, f)``, of ``sizes`` for each term.
        penalty: factor of the square of each weight ``(f,)``.
    """
    problem, deviation = Problem(values, torch.zeros_like(distance), 1, sizes).scaled()
    flat = problem.features.flatten(0, 1)
    unit = distance.topk(min(NEAR, distance.shape[1]), largest=False).values.mean().clamp(min=1e-30)
    distance = distance / unit
    wanted = (-distance).softmax(1)

    def cross_entropy(weight: Tensor) -> tuple[float, Tensor]:
        log = (flat @ weight).view(distance.shape).log_softmax(1)
        return loss_of(-(wanted * log).sum(1), log.exp() - wanted, weight)

    def expectation(weight: Tensor) -> tuple[float, Tensor]:
        p = (flat @ weight).view(distance.shape).softmax(1)
        mean = (p * distance).sum(1, keepdim=True)
        return loss_of(mean, p * (distance - mean), weight)

    def loss_of(losses: Tensor, slope: Tensor, weight: Tensor) -> tuple[float, Tensor]:
        value = losses.mean() + penalty @ weight.square()
        return value.item(), slope.flatten() @ flat / len(distance) + 2 * penalty * weight

    return minimize(expectation, minimize(cross_entropy, torch.zeros_like(penalty))) / deviation


def _finite(score: Tensor) -> Tensor:
    """Replaces -inf, the score of rows without a common known feature, by the lowest finite score of all."""
    known = score > -torch.inf
    return score.where(known, score[known].min() if known.any() else torch.zeros(()))

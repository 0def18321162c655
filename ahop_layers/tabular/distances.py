"""Distances of rows of numbers, plain and learned, and the choice of one by the errors of stored rows."""

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from ahop_layers.memory.learn.ranks import bin_edges, features, pools
from ahop_layers.memory.learn.regression import Problem, minimize
from ahop_layers.ops import adaptive_similarity
from ahop_layers.ops.reference import unfold
from ahop_layers.similarity.fixed import FIXED

BASES = {"L1": "l1", "Euclid": "dis", "Sorensen": "l1"}
"""Kind of a term -> the base similarity that it sums. Cosine is a product."""

POWERS = (1.0, math.sqrt(math.e), math.e)
"""Exponents of values between 0 and 1. Fingerprints of radio signals are often raised to the last."""


class Term(NamedTuple):
    """A similarity of two rows: the negative of a distance, or cosine similarity.

    Attributes:
        kind: ``"L1"``, ``"Euclid"`` (squared), ``"cosine"``, or ``"Sorensen"``: L1 divided by the sum of both rows.
        power: exponent of the values, which must not be negative unless it is 1.
        ranked: whether the differences are sorted and have a weight for each rank.
    """

    kind: str
    power: float = 1.0
    ranked: bool = False

    def scores(self, query: Tensor, key: Tensor, weight: Tensor | None = None, missing: bool = False) -> Tensor:
        """Compares ``(..., L, d)`` with ``(..., S, d)``: the mean over ranks, or their sum by ``weight (d,)``."""
        query, key = query**self.power, key**self.power
        if self.kind == "cosine":
            return normalize(query, dim=-1) @ normalize(key, dim=-1).mT
        base = BASES[self.kind]
        if missing or weight is not None:
            ranks = query.new_full(query.shape[-1:], 1 / query.shape[-1]) if weight is None else weight.to(query)
            score = adaptive_similarity(query, key, unfold(ranks)[None], (base,), missing=missing)
        elif base == "l1" and _is_sparse(query) and _is_sparse(key):
            score = -sparse_manhattan(query, key) / query.shape[-1]
        else:
            score = FIXED[base](query, key) / query.shape[-1]
        return score / self._mass(query, key) if self.kind == "Sorensen" else score

    def bins(self, query: Tensor, patterns: Tensor, candidates: Tensor, edges: list[int]) -> Tensor:
        """Means over bins of ranks, of queries and their candidates: ``(L, d), (N, d), (L, C) -> (L, C, bins)``."""
        query, patterns = query**self.power, patterns**self.power
        found = features(query, patterns, candidates, (BASES[self.kind],), (1.0,), edges)[..., 1:]
        if self.kind != "Sorensen":
            return found
        return found / self._mass(query, patterns).gather(1, candidates)[..., None]

    @staticmethod
    def _mass(query: Tensor, key: Tensor) -> Tensor:
        """Returns the mean value of both rows ``(..., L, S)``, at least a tiny number."""
        mass = query.mean(-1)[..., :, None] + key.mean(-1)[..., None, :]
        return mass.clamp(min=torch.finfo(mass.dtype).tiny)


def sparse_manhattan(query: Tensor, key: Tensor) -> Tensor:
    """Sums the absolute differences of rows without negative values, fast if most are 0: ``(L, d), (S, d) -> (L, S)``.

    They are the sum of both rows without twice the smaller values, of which only those count where a query is not 0.

    >>> sparse_manhattan(torch.tensor([[0.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.5, 0.0], [0.0, 3.0, 0.0]]))
    tensor([[2.5000, 1.0000]])
    """
    columns, common = key.mT.contiguous(), []
    for row in query:
        heard = row.nonzero()[:, 0]
        common.append(torch.minimum(columns[heard], row[heard, None]).sum(0))
    return (query.sum(-1)[:, None] + key.sum(-1) - 2 * torch.stack(common)).clamp(min=0.0)


def _is_sparse(rows: Tensor) -> bool:
    """Returns whether no value of a matrix is negative, and at least half of them are 0."""
    return rows.ndim == 2 and len(rows) > 0 and bool((rows >= 0).all() and (rows == 0).double().mean() >= 0.5)


class RowSimilarity(nn.Module):
    """The sum of terms, each with a factor, or with a weight for each bin of ranks.

    Args:
        terms: the terms.
        weights: the factor of each term ``(1,)``, or the weights of its bins ``(bins,)``.
        edges: the last rank of each bin, up to the number of features.

    >>> similarity = RowSimilarity([Term("L1")], [torch.ones(1)], [2])
    >>> similarity(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 3.0], [0.0, 0.0]]))
    tensor([[-1., -1.]])
    """

    allows_missing = True

    def __init__(self, terms: Sequence[Term], weights: Sequence[Tensor], edges: list[int]) -> None:
        super().__init__()
        pool = pools(edges)
        merged: dict[Term, Tensor] = {}
        for term, weight in zip(terms, weights, strict=True):
            twin = term._replace(ranked=True)
            if twin in terms:  # a factor is an equal weight of all ranks
                ranks = weight @ (pool[1:] if term.ranked else pool[:1]).to(weight)
                term, weight = twin, merged[twin] + ranks if twin in merged else ranks
            merged[term] = weight
        self.terms = tuple(merged)
        for index, weight in enumerate(merged.values()):
            self.register_buffer(f"weight_{index}", weight)

    def forward(self, query: Tensor, key: Tensor, missing: bool = False, ranked: bool = True) -> Tensor:
        """Scores ``query (..., L, d)`` against ``key (..., S, d)``; NaN is unknown if ``missing``.

        If not ``ranked``, all ranks of a term have its mean weight, which is much faster.
        """
        scores = []
        for index, term in enumerate(self.terms):
            weight = self.get_buffer(f"weight_{index}")
            if term.ranked and ranked:
                scores.append(term.scores(query, key, weight, missing))
            else:
                scores.append(weight.sum().to(query) * term.scores(query, key, None, missing))
        return reduce(torch.add, scores)

    def extra_repr(self) -> str:
        """The terms, for ``repr``."""
        return ", ".join(f"{kind}{'' if power == 1 else f' of powers {power:.3g}'}" for kind, power, _ in self.terms)


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


Chosen = tuple[str, str, RowSimilarity, dict[str, float]]
"""Name and frame of a distance, its similarity, and the mean held-out error of each distance by its name."""


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
        trials = {frame: ask(rows, targets, count, TRIAL_QUERIES, TRIAL_STORED) for frame, rows in frames.items()}

        def trial_error(plain: tuple[str, Term]) -> float:
            asked = trials[plain[0]]
            return asked.errors(asked.scores(plain[1]).topk(count).indices).mean().item()

        enough = all(len(asked.query) for asked in trials.values())
        frame = min(PLAIN.values(), key=trial_error)[0] if enough else "standardized"
        asked = ask(frames[frame], targets, count, QUERIES, STORED, generator)
        if len(asked.query):
            return _Regression(asked, frame, count).choose(name)
        name = "standardized L1"  # too few rows
    frame, term = PLAIN[name]
    similarity = RowSimilarity([term], [torch.ones(1, dtype=torch.float64)], [frames[frame].shape[1]])
    return name, frame, similarity, {}


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
        found = {each: self._result([term], torch.ones(1)) for each, term in self.plain.items()}
        if name in ("auto", "trimmed"):
            widths = torch.tensor([0, *self.edges]).diff() / self.edges[-1]
            kept = [pad(widths[:count], (0, len(widths) - count)) for count in range(1, len(widths) + 1)]
            found["trimmed"] = min((self._result([term], each) for term in self.ranked for each in kept), key=_mean)
        if name in ("auto", "not sorted"):
            found["not sorted"] = self._result(self.even)
        if name in ("auto", "learned"):
            groups = [*([term] for term in self.ranked), [*self.ranked, *self.even]]
            found["learned"] = min(map(self._result, groups), key=_mean)
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
        return name, self.frame, RowSimilarity(terms, weights, self.edges), errors

    def _result(self, terms: list[Term], weight: Tensor | None = None) -> "_Result":
        """Returns the result of terms with given weights, or with learned ones: each half is held out once."""
        values = torch.cat([self.features[term] for term in terms], -1)
        if weight is not None:
            return _Result(self.errors(values @ weight), terms, weight)
        errors, fold = torch.zeros(len(self.distance)), torch.arange(len(self.distance)) // 2 % 2
        for held in (fold == 0, fold == 1):
            learned = self._solve(terms, ~held if len(errors) > 2 else held)
            errors[held] = self.errors(values @ learned)[held]
        return _Result(errors, terms, None)

    def _solve(self, terms: list[Term], rows: Tensor | slice = slice(None)) -> Tensor:
        """Returns weights of the features of terms ``(f,)`` with which softmax picks candidates near the target.

        The expected distance of some queries, or of all, is minimized, from the weights whose probabilities fall
        exponentially with it.
        """
        parts, distance = [self.features[term][rows] for term in terms], self.distance[rows]
        sizes = [part.shape[-1] for part in parts]
        penalty = torch.tensor([RANK_PENALTY if term.ranked else PENALTY for term in terms])
        penalty = penalty.repeat_interleave(torch.tensor(sizes))
        problem, deviation = Problem(torch.cat(parts, -1), torch.zeros_like(distance), 1, sizes).scaled()
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


class _Result(NamedTuple):
    """The error of each query ``(L,)``, the terms of a score, and the weights of their features if not to be solved."""

    errors: Tensor
    terms: list[Term]
    weight: Tensor | None


def _mean(result: _Result) -> float:
    return result.errors.mean().item()


def _finite(score: Tensor) -> Tensor:
    """Replaces -inf, the score of rows without a common known feature, by the lowest finite score of all."""
    known = score > -torch.inf
    return score.where(known, score[known].min() if known.any() else torch.zeros(()))

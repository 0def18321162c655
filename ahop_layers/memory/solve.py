"""Learning a robust similarity by solving a small regression, without a learning rate, epochs or batches.

The absolute differences of a query and a pattern are sorted. Every base that is monotone in the difference is evaluated
on the sorted values, so all bases share one sort, and its values are averaged over bins of ranks whose widths grow
geometrically. A score is linear in these features: its weights are found by softmax regression on damaged copies of the
stored patterns with L-BFGS, by the log-likelihood first and then by the expected accuracy. The features of a base are
its mean over all ranks and its bins; the weights of the bins are penalized, so that a score depends on ranks only where
this pays. The weights of the bins are expanded to ranks afterwards.

A dimension that is NaN in the query or in the pattern takes no part: the sorted similarities of the m known dimensions,
as a step function, are stretched to d ranks.
"""

import importlib.util
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot, pad

from ahop_layers.ops import adaptive_similarity
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.similarity import BaseArgument
from ahop_layers.widths import differences, quantiles, units

Base = str | tuple[str, float]
"""A base of a similarity, or ``("clip", q)`` for the differences of clipped L1, a baseline."""

BASES: tuple[BaseArgument, ...] = ("l1", *(("near", q) for q in (0.02, 0.05, 0.1, 0.2, 0.5)))
OPTIONAL: tuple[BaseArgument, ...] = ("dot",)
"""Bases that are added if they pay: they need a sort of their own."""

BINS = 14
QUERIES, MOST_QUERIES, QUERY_ELEMENTS = 512, 1024, 2**16
"""Number of queries of a fit, more for few dimensions; as many are held out, half for the choice, half reported."""

CANDIDATES = 256
"""Number of patterns that a query is compared with: some right ones, the hardest wrong ones, and random ones."""

RIGHT, RANDOM = 8, 4
"""At most one in so many candidates is right, and one in so many of the others is random."""

MINED, MOST_MINED = 2**21, 2**12
"""Numbers of elements, and of patterns, out of which candidates are taken, to bound the time for large memories."""

HARD = (0.05, 0.2, 0.5)
"""Quantiles of saturating bases whose sums, beside L1 and the dot product, find the hardest wrong patterns."""

STEPS, HISTORY, HALVINGS, TOLERANCE = 80, 20, 20, 1e-6
"""Number of steps of L-BFGS, of those it remembers, and of trials of a step; relative change at which it stops."""

PENALTY, MEAN_PENALTY = 1e-3, 1e-6
"""Penalties of the weights of rank bins and of the means over all ranks."""

CLIPS = (0.05, 0.2, 0.5)
"""Quantiles at which the differences of clipped L1 are clipped."""

TRIAL, TRIAL_CANDIDATES, GAIN = 256, 96, 0.95
"""Units of each dimension, and optional bases, must lower the loss of so many queries to this fraction."""

AVAILABLE = ("L1", "trimmed L1", "Euclid", "dot product", "near")
"""Baselines that may be the result. The others are only reported: no kernel computes them."""

BLOCK = {"cpu": 2**19}
"""Number of differences that are held at once: on a CPU they stay in the cache. GPUs take 2**26."""

_NUMPY = importlib.util.find_spec("numpy") is not None


class Report(NamedTuple):
    """Accuracy on held-out queries of simple scores and of the learned one.

    A query is compared with the candidates of the fit, so that the accuracy among all patterns can be lower.

    Attributes:
        rows: names of scores and their accuracies. A score with a parameter has the best one of the whole range.
        chosen: the score that :meth:`~ahop_layers.AssociativeMemory.fit` chose.
        queries: number of held-out queries.
        seconds: duration of the fit.

    >>> print(Report((("L1", 0.5), ("learned", 0.9)), "learned", 256, 1.25))
    accuracy on 256 held-out queries
    L1           0.500
    learned      0.900
    fitted in 1.2 s
    """

    rows: tuple[tuple[str, float], ...]
    chosen: str
    queries: int
    seconds: float

    def __str__(self) -> str:
        lines = [f"{name:<12} {accuracy:.3f}" for name, accuracy in self.rows]
        if self.chosen != "learned":
            lines.append(f"learning does not pay here: {self.chosen} is as good and was chosen")
        return "\n".join([f"accuracy on {self.queries} held-out queries", *lines, f"fitted in {self.seconds:.1f} s"])


class Learned(NamedTuple):
    """A score ``sum over bases of weights[base] . sort(base(query / units, pattern / units))``, best dimension first.

    Attributes:
        bases: the bases.
        widths: the width of each base, 1 for a base without one.
        units: the unit of each dimension ``(d,)``, or None if all are 1.
        weights: the weight of each rank of the sorted, not cumulated, similarities ``(n_bases, d)``.
        temperature: the scores divided by it are logits.
        report: held-out accuracy.
    """

    bases: tuple[Base, ...]
    widths: tuple[float, ...]
    units: Tensor | None
    weights: Tensor
    temperature: float
    report: Report


class Questions(NamedTuple):
    """What a similarity is learned from: queries and what belongs to them.

    Attributes:
        query: ``(n, d)``; NaN is unknown.
        origin: the pattern that each query was made of ``(n,)``, or -1.
        label: the class that each query belongs to ``(n,)``; None if the pattern itself is to be found.
        fitted: the number of queries of the fit, the first ones. The others are held out.
    """

    query: Tensor
    origin: Tensor
    label: Tensor | None
    fitted: int

    def part(self, rows: slice) -> "Questions":
        """Returns some of the queries."""
        return Questions(self.query[rows], self.origin[rows], None if self.label is None else self.label[rows], 0)


class Problem(NamedTuple):
    """Candidates of queries: features ``(L, C, f)``, log weights ``(L, C)``; the first ``right`` candidates are right.

    A log weight is -inf for a candidate that takes no part, and the log of the number of patterns that a random one
    represents.
    """

    features: Tensor
    offset: Tensor
    right: int

    def scaled(self, bases: int) -> tuple["Problem", Tensor]:
        """Returns the problem with centered features of about unit deviation, and their deviations ``(f,)``.

        A deviation is at least a hundredth of the largest one of its base: weights of nearly constant features would
        be so large that a score loses its precision.
        """
        size = self.features.abs().amax((0, 1))
        features = self.features - self.features.mean(1, keepdim=True)
        deviation = features.square().mean((0, 1)).sqrt()
        floor = 0.01 * deviation.view(-1, bases).amax(0).repeat(len(deviation) // bases)
        deviation = torch.where(deviation > 1e-6 * size, torch.maximum(deviation, floor), torch.inf)  # or constant
        return self._replace(features=features / deviation), deviation

    def objective(self, weight: Tensor, smooth: bool) -> tuple[Tensor, Tensor]:
        """Returns the mean loss and its gradient: the negative log-likelihood, or the expected error if ``smooth``."""
        flat = self.features.flatten(0, 1)
        score = (flat @ weight).view(self.offset.shape) + self.offset
        total, right = score.logsumexp(1, keepdim=True), score[:, : self.right].logsumexp(1, keepdim=True)
        slope = (score - total).exp_()
        slope[:, : self.right] -= (score[:, : self.right] - right).exp_()
        log_p = right - total
        if smooth:
            slope *= log_p.exp()
            log_p = log_p.expm1()
        return -log_p.mean(), slope.flatten() @ flat / len(score)

    def correct(self, weight: Tensor) -> Tensor:
        """Returns whether the best candidate of each query is right: bool ``(L,)``."""
        return correct(self.features @ weight.to(self.features).flatten(), self)


def correct(score: Tensor, problem: Problem) -> Tensor:
    """Returns whether a right candidate has a larger ``score (L, C)`` than all wrong ones: bool ``(L,)``."""
    score = score.masked_fill(problem.offset == -torch.inf, -torch.inf)
    wrong = pad(score[:, problem.right :], (0, 1), value=-torch.inf)
    return score[:, : problem.right].amax(1) > wrong.amax(1)


def bin_edges(d: int, bins: int = BINS) -> list[int]:
    """Returns the last rank of each bin, up to ``d``; one bin means that ranks do not matter.

    >>> bin_edges(64, 5)
    [1, 3, 8, 23, 64]
    """
    return sorted({round(d ** (i / (bins - 1))) for i in range(bins)}) if bins > 1 else [d]


def sorted_similarities(
    query: Tensor, key: Tensor, bases: Sequence[Base], widths: Sequence[float]
) -> tuple[Iterator[Tensor], Tensor | None]:
    """Similarities of each base in descending order, and the number of known dimensions, None if all are known.

    Unknown values come last and are NaN. All bases except ``dot`` share one sort.
    """
    difference = (query - key).abs_()
    missing = difference.isnan()
    known = difference.shape[-1] - missing.sum(-1) if missing.any() else None

    def values() -> Iterator[Tensor]:
        ascending = _sort_(difference)
        for base, unit in zip(bases, widths, strict=True):
            if base == "dot":
                yield -_sort_(-query * key)
            elif base == "l1":
                yield -ascending
            elif base == "dis":
                yield -ascending.square()
            else:
                yield (ascending / -unit).exp_() if base[0] == "near" else -ascending.clamp(max=unit)

    return values(), known


def _sort_(values: Tensor) -> Tensor:
    """Sorts in ascending order, NaN last; overwrites ``values`` on a CPU."""
    if not (_NUMPY and values.device.type == "cpu"):
        return values.sort(-1).values
    parts = torch.tensor_split(values.flatten(0, -2), torch.get_num_threads())
    with ThreadPoolExecutor(len(parts)) as pool:  # NumPy is about 15 times faster than PyTorch
        list(pool.map(lambda part: part.numpy().sort(axis=-1), parts))
    return values


def stretch(values: Tensor, known: Tensor, edges: Tensor) -> Tensor:
    """Averages values over bins of ranks, after the first ``known (...)`` of d were stretched to d ranks.

    Args:
        values: ``(..., d)``; those after the first ``known`` are ignored.
        known: number of values, ``(...)``.
        edges: last rank of each bin ``(b,)``.

    Returns:
        ``(..., b)``, 0 if no value is known.
    """
    d = values.shape[-1]
    total = pad(values.nan_to_num(0.0).cumsum(-1), (1, 0))
    place = edges.to(values.dtype) * (known[..., None] / d)
    low = place.floor().long().clamp(max=d - 1)
    start = total.gather(-1, low)
    reached = start + (place - low) * (total.gather(-1, low + 1) - start)
    widths = edges.diff(prepend=edges.new_zeros(1))
    return reached.diff(prepend=torch.zeros_like(reached[..., :1])) * (d / known.clamp(min=1)[..., None]) / widths


def features(query: Tensor, key: Tensor, bases: Sequence[Base], widths: Sequence[float], edges: list[int]) -> Tensor:
    """Mean similarity over all ranks, then in each bin of ranks: ``(L, d), (L, C, d) -> (L, C, n_bases, 1 + bins)``."""
    ends = torch.tensor(edges, device=query.device)
    rank = torch.arange(1, query.shape[-1] + 1, device=query.device)
    pool = one_hot(torch.searchsorted(ends, rank)).to(query.dtype)
    pool /= pool.sum(0)
    share = (ends.diff(prepend=ends.new_zeros(1)) / ends[-1]).to(query.dtype)
    rows = []
    step = _step(query, key[0].numel())
    for part, keys in zip(torch.split(query, step), torch.split(key, step), strict=True):
        values, known = sorted_similarities(part[:, None], keys, bases, widths)
        rows.append(torch.stack([x @ pool if known is None else stretch(x, known, ends) for x in values], -2))
    binned = torch.cat(rows)
    return torch.cat([(binned @ share)[..., None], binned], -1)


def _step(query: Tensor, elements: int) -> int:
    return max(1, BLOCK.get(query.device.type, 2**26) // elements)


class Queries(NamedTuple):
    """Queries ``(L, d)``, their candidates ``(L, C)``, log weights and right ones, see Problem.

    ``usable`` says which of all queries have a right candidate: the others are left out.
    """

    query: Tensor
    candidates: Tensor
    offset: Tensor
    right: int
    usable: Tensor

    def problem(self, patterns: Tensor, bases: Sequence[Base], widths: Sequence[float], edges: list[int]) -> Problem:
        """Computes the features of the candidates."""
        values = features(self.query, patterns[self.candidates], bases, widths, edges)
        return Problem(values.transpose(-1, -2).flatten(-2), self.offset, self.right)  # means of all bases first

    def part(self, rows: slice) -> "Queries":
        """Returns some of the queries."""
        return self._replace(query=self.query[rows], candidates=self.candidates[rows], offset=self.offset[rows])


def find_candidates(
    asked: Questions,
    patterns: Tensor,
    labels: Tensor | None,
    clips: Sequence[float],
    generator: torch.Generator,
    count: int,
) -> Queries:
    """Takes ``count`` candidates for each query out of ``patterns (N, d)`` of the classes ``labels (N,)``.

    The hardest wrong patterns have the smallest distance by one of several measures, for which unknown values are
    those of the mean pattern. With labels, all patterns of the class are right except the one that the query was made
    of, unless it is the only one.
    """
    rows = []
    largest = 1
    if labels is not None:
        largest = min(count // RIGHT, int(torch.unique(labels, return_counts=True)[1].max()))
    wrong = max(0, min(count, len(patterns)) - largest)
    random = wrong // RANDOM
    place, step = torch.arange(len(patterns), device=patterns.device), _step(patterns, 4 * len(patterns))
    center = patterns.nanmean(0).nan_to_num(0.0)
    complete = torch.where(patterns.isnan(), center, patterns)
    gaps = patterns.isnan().any()
    for start in range(0, len(asked.query), step):
        part = asked.part(slice(start, start + step))
        own = place == part.origin[:, None]
        same = own if labels is None or part.label is None else labels == part.label[:, None]
        right = torch.where((same & ~own).any(1, keepdim=True), same & ~own, same)
        near = _closeness(torch.where(part.query.isnan(), center, part.query), complete, clips)
        unknown = part.query.isnan()
        if gaps or unknown.all(-1).any():  # pairs without a common dimension
            common = (~unknown).to(near) @ (~patterns.isnan()).to(near).mT
            near = near.masked_fill(common == 0, -torch.inf)
        first = near.masked_fill(~right, -torch.inf).topk(largest)
        near = near.masked_fill(same, -torch.inf)
        hard = near.topk(wrong - random)
        keys = torch.rand(near.shape, generator=generator, device=near.device).masked_fill(near == -torch.inf, -1.0)
        others = keys.scatter(1, hard.indices, -1.0).topk(random)
        represented = ((~same).sum(1, keepdim=True) - hard.indices.shape[1]).clamp(min=1) / max(1, random)
        offset = [torch.where(found.values == -torch.inf, -torch.inf, 0.0) for found in (first, hard)]
        offset.append(torch.where(others.values < 0, -torch.inf, represented.log()))
        rows.append((torch.cat([first.indices, hard.indices, others.indices], 1), torch.cat(offset, 1)))
    candidates, weights = (torch.cat(each) for each in zip(*rows, strict=True))
    usable = (weights[:, :largest] > -torch.inf).any(1)  # a query without a known value has no right candidate
    return Queries(asked.query[usable], candidates[usable], weights[usable], largest, usable)


def _closeness(query: Tensor, patterns: Tensor, clips: Sequence[float]) -> Tensor:
    """Returns the largest of several standardized similarities, without missing values: ``(L, N)``."""
    ones = query.new_zeros(1, query.shape[1])
    ones[0, -1] = 1.0
    scores = [query @ patterns.mT]
    scores += [
        adaptive_similarity(query, patterns, ones, (name,), widths=ones.new_tensor([clip]))
        for name, clip in (("l1", 1.0), *(("near", clip) for clip in clips))
    ]
    best: Tensor | None = None
    for score in scores:
        deviation = score.std(-1, correction=0, keepdim=True).clamp(min=1e-30)
        score = (score - score.mean(-1, keepdim=True)) / deviation
        best = score if best is None else torch.maximum(best, score)
    return query.new_zeros(len(query), len(patterns)) if best is None else best


def solve(problem: Problem, start: Tensor, smooth: bool, penalty: Tensor) -> Tensor:
    """Minimizes the objective plus ``penalty . weight**2`` by L-BFGS from ``start (f,)``, on scaled features.

    Steps are halved until the loss falls. The optimizer of PyTorch would do as well, but imports its compiler, which
    takes longer than a fit.
    """

    def loss(weight: Tensor) -> tuple[float, Tensor]:
        value, gradient = problem.objective(weight, smooth)
        return (value + penalty @ weight.square()).item(), gradient + 2 * penalty * weight

    weight, (value, gradient) = start, loss(start)
    changes: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=HISTORY)
    for _ in range(STEPS):
        direction = _newton_direction(gradient, changes)
        slope = (gradient @ direction).item()
        if not slope < 0:  # at the minimum, or lost to rounding
            break
        size = 1.0 if changes else min(1.0, 1 / gradient.norm().item())
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


def _newton_direction(gradient: Tensor, changes: Sequence[tuple[Tensor, Tensor, float]]) -> Tensor:
    """Returns the direction of L-BFGS from the last changes of weight and gradient, and the products of both."""
    direction, shares = -gradient, []
    for step, turn, product in reversed(changes):
        shares.append((step @ direction) / product)
        direction = direction - shares[-1] * turn
    if changes:
        _, turn, product = changes[-1]
        direction = direction * (product / turn.square().sum())
    for (step, turn, product), share in zip(changes, reversed(shares), strict=True):
        direction = direction + (share - (turn @ direction) / product) * step
    return direction


def with_temperature(problem: Problem, weight: Tensor) -> tuple[Tensor, float]:
    """Returns ``weight`` times the factor with the smallest log-likelihood loss, and this loss.

    Factors are relative to the deviation of the scores, so that the result does not depend on their scale.
    """
    score = problem.features @ weight
    deviation = score.std(1, correction=0).mean()
    unit = 1 / deviation if deviation > 0 else torch.ones_like(deviation)
    losses = {}
    for factor in (2 ** (k / 2) for k in range(-4, 15)):
        logits = factor * unit * score + problem.offset
        losses[factor] = (logits.logsumexp(1) - logits[:, : problem.right].logsumexp(1)).mean().item()
    best = min(losses, key=losses.__getitem__)
    return best * unit * weight, losses[best]


def fixed_weights(bases: Sequence[Base], edges: list[int]) -> dict[str, list[Tensor]]:
    """Returns the weights ``(1 + bins, n_bases)`` of fixed scores: each base alone, and L1 trimmed at each edge."""
    names = {"l1": "L1", "dis": "Euclid", "dot": "dot product", "near": "near", "clip": "clipped L1"}
    fixed: dict[str, list[Tensor]] = {}
    for j, base in enumerate(bases):
        alone = torch.zeros(1 + len(edges), len(bases))
        alone[0, j] = 1.0
        fixed.setdefault(names[_kind(base)], []).append(alone)
        if base == "l1":
            widths = torch.tensor(edges).diff(prepend=torch.zeros(1, dtype=torch.long))
            for kept in range(1, len(edges) + 1):
                trimmed = torch.zeros_like(alone)
                trimmed[1 : 1 + kept, j] = widths[:kept].float()
                fixed.setdefault("trimmed L1", []).append(trimmed)
    return fixed


def _kind(base: Base) -> str:
    return base if isinstance(base, str) else base[0]


def expand(weight: Tensor, edges: list[int]) -> Tensor:
    """Expands weights of features ``(1 + bins, n_bases)`` to weights of ranks ``(n_bases, d)``.

    >>> expand(torch.tensor([[4.0], [1.0], [6.0]]), [1, 4])
    tensor([[2., 3., 3., 3.]])
    """
    ends = torch.tensor(edges, device=weight.device)
    widths = ends.diff(prepend=ends.new_zeros(1))
    return (weight[0] / ends[-1] + (weight[1:] / widths[:, None]).repeat_interleave(widths, 0)).mT.contiguous()


class _Setting(NamedTuple):
    """Patterns and queries in ``units``, and bases: first the ``learned`` ones, then those of baselines."""

    units: Tensor | None
    patterns: Tensor
    bases: list[Base]
    widths: list[float]
    learned: int
    queries: Queries

    def problem(self, rows: slice, edges: list[int], learned: bool = True) -> Problem:
        """Computes the features of some queries, of the learned bases alone or of all."""
        count = self.learned if learned else len(self.bases)
        return self.queries.part(rows).problem(self.patterns, self.bases[:count], self.widths[:count], edges)


def _prepare(
    unit: Tensor | None,
    patterns: Tensor,
    labels: Tensor | None,
    asked: Questions,
    bases: Sequence[BaseArgument],
    generator: torch.Generator,
    candidates: int,
) -> _Setting:
    if unit is not None:
        patterns, asked = patterns / unit, asked._replace(query=asked.query / unit)
    named = [*bases, "dis", *(("clip", q) for q in CLIPS), *(("hard", q) for q in HARD)]
    given = [(row, base[1]) for row, base in enumerate(named) if not isinstance(base, str)]
    widths = dict.fromkeys(range(len(named)), 1.0)
    found = quantiles(differences(patterns), [q for _, q in given])
    widths.update(zip((row for row, _ in given), found, strict=True))
    distinct: dict[tuple[str, float], int] = {}
    for row in range(len(bases)):  # discrete values may give several quantiles the same width
        distinct.setdefault((_kind(named[row]), widths[row]), row)
    rows = [*distinct.values(), *range(len(bases), len(named) - len(HARD))]
    queries = find_candidates(asked, patterns, labels, found[-len(HARD) :], generator, candidates)
    return _Setting(unit, patterns, [named[row] for row in rows], [widths[row] for row in rows], len(distinct), queries)


def _trial_loss(setting: _Setting, edges: list[int]) -> float:
    """Returns the log-likelihood loss of every second query after a solution for the others: does a setting suit?"""
    problem, _ = setting.problem(slice(None), edges).scaled(setting.learned)
    fitted, held = (Problem(problem.features[i::2], problem.offset[i::2], problem.right) for i in range(2))
    penalty = _penalty(problem, setting.learned)
    weight, _ = with_temperature(fitted, (penalty == MEAN_PENALTY).to(penalty))
    return held.objective(solve(fitted, weight, False, 4 * penalty), False)[0].item()


def _penalty(problem: Problem, learned: int) -> Tensor:
    """Penalties of the features ``(f,)``: the means over all ranks of the ``learned`` bases, then the bins."""
    penalty = torch.full_like(problem.features[0, 0], PENALTY)
    penalty[:learned] = MEAN_PENALTY
    return penalty


def _solutions(problem: Problem, starts: list[Tensor], learned: int) -> list[Tensor]:
    """Solves from the best of several starts ``(1 + bins, n_bases)``; returns weights of the same shape."""
    problem, deviation = problem.scaled(learned)
    penalty = _penalty(problem, learned)
    equal = (penalty == MEAN_PENALTY).to(penalty)
    unit = deviation.masked_fill(deviation.isinf(), 0.0)
    scaled = [equal, *(unit * weight.to(unit).flatten() for weight in starts)]
    some = Problem(problem.features[::4].contiguous(), problem.offset[::4], problem.right)
    first = min((with_temperature(some, weight) for weight in scaled), key=lambda pair: pair[1])[0]
    likely = solve(problem, first, False, penalty)
    solved = [solve(problem, likely, True, penalty), likely]
    return [torch.unflatten(weight / deviation, 0, (-1, learned)) for weight in solved]


def _cosine(setting: _Setting, rows: slice) -> Tensor:
    """Whether the candidate with the largest cosine similarity is right, with 0 for missing values: bool ``(L,)``."""
    part = setting.queries.part(rows)
    unit = 1.0 if setting.units is None else setting.units
    query, keys = (normalize((x * unit).nan_to_num(0.0), dim=-1) for x in (part.query, setting.patterns))
    score = (query @ keys.mT).gather(1, part.candidates)
    return correct(score, Problem(score, part.offset, part.right))


@torch.no_grad()
def learn(
    patterns: Tensor,
    labels: Tensor | None,
    asked: Questions,
    generator: torch.Generator,
    bases: Sequence[BaseArgument] = BASES,
    bins: int = BINS,
) -> Learned:
    """Learns a similarity that finds the pattern, or the class, that a query belongs to.

    The result is never much worse than a fixed score: if L1, trimmed L1, Euclid, the dot product or one saturating base
    is better than the learned weights by more than a standard error on held-out queries, it is the result.

    Args:
        patterns: ``(N, d)``; NaN is a missing value.
        labels: class of each pattern ``(N,)``; None to find the pattern itself. With labels, a pattern does not answer
            for queries that were made of it, so that the accuracy is that of unseen patterns.
        asked: queries, and what belongs to them.
        generator: random generator on the device of the patterns.
        bases: bases of the similarity.
        bins: number of rank bins; with 1 the weights do not depend on ranks.
    """
    began = time.perf_counter()
    wide = accumulation_dtype(patterns.dtype)
    patterns, asked = patterns.to(wide), asked._replace(query=asked.query.to(wide))
    edges = bin_edges(patterns.shape[1], bins)

    def prepare(unit: Tensor | None, bases: Sequence[BaseArgument], part: Questions, candidates: int) -> _Setting:
        return _prepare(unit, patterns, labels, part, bases, generator, candidates)

    def try_out(unit: Tensor | None, bases: Sequence[BaseArgument]) -> float:
        return _trial_loss(
            prepare(unit, bases, asked.part(slice(0, min(TRIAL, asked.fitted))), TRIAL_CANDIDATES), edges
        )

    # Units of each dimension and products cost time in every search, so they have to pay.
    own, loss = units(differences(patterns)), try_out(None, bases)
    own_loss = try_out(own, bases)
    unit, loss = (own, own_loss) if own_loss < GAIN * loss else (None, loss)
    more = (*bases, *(base for base in OPTIONAL if base not in bases))
    if try_out(unit, more) < GAIN * loss:
        bases = more
    setting = prepare(unit, bases, asked, CANDIDATES)
    n, fitted = setting.learned, int(setting.queries.usable[: asked.fitted].sum())
    starts = [weight for each in fixed_weights(setting.bases[:n], edges).values() for weight in each]
    solved = _solutions(setting.problem(slice(0, fitted), edges), starts, n)

    rest = slice(fitted, None) if fitted < len(setting.queries.query) else slice(0, None)
    held = setting.problem(rest, edges, learned=False)
    scores = fixed_weights(setting.bases, edges)
    scores["learned"] = [pad(weight, (0, len(setting.bases) - n)) for weight in solved]
    right = {name: torch.stack([held.correct(weight) for weight in each]) for name, each in scores.items()}
    chosen, best, rows = _choose(right)
    rows = {"cosine": _cosine(setting, rest)[1::2].double().mean().item(), **rows}
    weight = scores[chosen][best].to(patterns)
    if not weight.any():  # constant patterns say nothing about weights
        weight = pad(starts[0].to(patterns), (0, len(setting.bases) - n))
    calibrated, _ = with_temperature(held, weight.flatten())
    used = [j for j in range(len(setting.bases)) if weight[:, j].any()]
    queries = len(held.offset) // 2
    return Learned(
        bases=tuple(setting.bases[j] for j in used),
        widths=tuple(setting.widths[j] for j in used),
        units=unit,
        weights=expand(weight[:, used], edges),
        temperature=(weight.norm() / calibrated.norm()).item(),
        report=Report(tuple(rows.items()), chosen, queries, time.perf_counter() - began),
    )


def _choose(right: dict[str, Tensor]) -> tuple[str, int, dict[str, float]]:
    """Chooses a score by every second held-out query, and returns accuracies of the other queries.

    Args:
        right: by name, whether each of several scores is right for each query: bool ``(scores, L)``.

    Returns:
        The name and number of the chosen score, and for each name the accuracy of its best score.
    """
    best = {name: int(each[:, ::2].sum(1).argmax()) for name, each in right.items()}
    rows = {name: each[best[name], 1::2].double().mean().item() for name, each in right.items()}
    learned = right["learned"][best["learned"], ::2].double()
    chosen, gain = "learned", 0.0
    for name in AVAILABLE:
        if name in right:
            more = right[name][best[name], ::2].double() - learned
            margin = more.mean().item() - more.std(correction=0).item() / math.sqrt(len(more))
            chosen, gain = (name, margin) if margin > gain else (chosen, gain)
    return chosen, best[chosen], rows

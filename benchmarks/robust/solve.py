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
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot, pad

from ahop_layers.errors import AHopError, check_patterns, describe
from ahop_layers.ops.reference import accumulation_dtype

Base = str | tuple[str, float]
"""``"l1"``, ``"dis"``, ``"dot"``, ``("near", q)`` or ``("clip", q)``, where q is a quantile of :func:`width_of`."""

Damage = Callable[[Tensor, torch.Generator], Tensor]
"""Returns damaged copies of patterns ``(n, d)``; all randomness comes from the generator."""

BASES: tuple[Base, ...] = ("l1", *(("near", q) for q in (0.02, 0.05, 0.1, 0.2, 0.5)))
BINS = 14
QUERIES, MOST_QUERIES, QUERY_ELEMENTS = 512, 1024, 2**16
"""Number of queries of the fit, more for few dimensions; as many are held out, half for the choice, half reported."""

CANDIDATES = 256
"""Number of patterns that a query is compared with: some right ones, the hardest wrong ones, and random ones."""

MAX_RIGHT, RANDOM = 32, 64
MINED = 2**21
"""Number of elements of the patterns out of which candidates are taken, to bound the time for large memories."""

SAMPLE = 2**17
"""Number of differences between stored patterns that determine widths."""

STEPS = 80
PENALTY, MEAN_PENALTY = 1e-3, 1e-6
"""Penalties of the weights of rank bins and of the means over all ranks."""

CLIPS = (0.05, 0.2, 0.5)
"""Quantiles at which the differences of clipped L1 are clipped."""

OPTIONAL: tuple[Base, ...] = ("dot",)
"""Bases that are added if they pay: they need a sort of their own."""

TRIAL, GAIN = 256, 0.95
"""Units of each dimension, and optional bases, must lower the loss of so many queries to this fraction."""

AVAILABLE = ("L1", "trimmed L1", "Euclid", "dot product", "near")
"""Baselines that may be the result. The others are only reported: no kernel computes them."""

BLOCK = {"cpu": 2**19}
"""Number of differences that are held at once: on a CPU they stay in the cache. GPUs take 2**26."""

_NUMPY = importlib.util.find_spec("numpy") is not None


class Report(NamedTuple):
    """Held-out accuracy of the baselines and of the learned similarity, and the choice that was made.

    Accuracy is that among the candidates of each query. ``rows`` has names and accuracies.
    """

    rows: tuple[tuple[str, float], ...]
    chosen: str
    seconds: float

    def __str__(self) -> str:
        lines = [f"{name:<12} {accuracy:.3f}" for name, accuracy in self.rows]
        if self.chosen != "learned":
            lines.append(f"Learning does not pay here: {self.chosen} is as good.")
        return "\n".join([*lines, f"fitted in {self.seconds:.1f} s"])


class Learned(NamedTuple):
    """A score ``sum over bases of weights[base] . sort(base(|query - pattern| / scale))``, best dimension first.

    Attributes:
        bases: the bases, each ``"l1"``, ``"dis"`` or ``("near", q)``.
        widths: the width of each base ``(n_bases,)``; 1 for a base without one.
        scale: the unit of each dimension ``(d,)``, or None if all have the unit 1.
        weights: the weight of each rank of the sorted, not cumulated, similarities ``(n_bases, d)``.
        temperature: the scores divided by it are logits.
        report: held-out accuracy.
    """

    bases: tuple[Base, ...]
    widths: Tensor
    scale: Tensor | None
    weights: Tensor
    temperature: float
    report: Report

    @torch.no_grad()
    def scores(self, query: Tensor, patterns: Tensor) -> Tensor:
        """Scores ``query (L, d)`` against ``patterns (N, d)``: ``(L, N)``; -inf without a common known dimension."""
        query, patterns = (x if self.scale is None else x / self.scale for x in (query, patterns))
        rows = []
        for part in torch.split(query, _step(query, patterns.numel())):
            values, known = sorted_similarities(part[:, None], patterns, self.bases, self.widths.tolist())
            if known is not None:
                ranks = torch.arange(1, query.shape[1] + 1, device=query.device)
                values = (stretch(value, known, ranks) for value in values)
            score = torch.stack([x @ weight for x, weight in zip(values, self.weights, strict=True)]).sum(0)
            rows.append(score if known is None else score.masked_fill(known == 0, -torch.inf))
        return torch.cat(rows)


class Problem(NamedTuple):
    """Candidates of queries: features ``(L, C, f)``, log weights ``(L, C)``; the first ``right`` candidates are right.

    A log weight is -inf for a candidate that takes no part, and the log of the number of patterns that a random one
    represents.
    """

    features: Tensor
    offset: Tensor
    right: int

    def scaled(self) -> tuple["Problem", Tensor]:
        """Returns the problem with centered features of unit deviation, and their deviations ``(f,)``."""
        size = self.features.abs().amax((0, 1))
        features = self.features - self.features.mean(1, keepdim=True)
        deviation = features.square().mean((0, 1)).sqrt()
        deviation = torch.where(deviation > 1e-6 * size, deviation, torch.inf)  # constant up to rounding
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


def width_of(patterns: Tensor, quantile: float, generator: torch.Generator) -> float:
    """Returns a quantile of the nonzero absolute differences between stored patterns; 1 if there are none.

    It is interpolated linearly between distinct differences, from 0 on: with discrete values, small quantiles are below
    the smallest difference.
    """
    return _quantile(_pair_differences(patterns, generator).flatten(), quantile)


def _pair_differences(patterns: Tensor, generator: torch.Generator) -> Tensor:
    """Absolute differences of random pairs of patterns ``(pairs, d)``."""
    count = max(64, SAMPLE // patterns.shape[1])
    first, second = torch.randint(len(patterns), (2, count), generator=generator, device=patterns.device)
    return (patterns[first] - patterns[second]).abs_()


def _quantile(differences: Tensor, quantile: float) -> float:
    values, counts = torch.unique(differences[differences > 0], return_counts=True)
    if not len(values):
        return 1.0
    share = counts.cumsum(0).double() / counts.sum()
    at = int(torch.searchsorted(share, quantile).clamp(max=len(values) - 1))
    low, start = (values[at - 1].item(), share[at - 1].item()) if at else (0.0, 0.0)
    return float(low + (values[at].item() - low) * (quantile - start) / (share[at].item() - start))


def dimension_scale(patterns: Tensor, generator: torch.Generator) -> Tensor:
    """Returns the unit of each dimension ``(d,)``: the median absolute difference between stored patterns.

    Where more than half of the differences are 0 it is their mean. A constant dimension has the median unit.
    """
    differences = _pair_differences(patterns, generator)
    median, mean = differences.nanmedian(0).values, differences.nanmean(0)
    scale = torch.where(median > 0, median, mean)
    varies = scale > 0
    return torch.where(varies, scale, scale[varies].median() if varies.any() else 1.0)


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
        for base, width in zip(bases, widths, strict=True):
            if base == "dot":
                yield -_sort_(-query * key)
            elif base == "l1":
                yield -ascending
            elif base == "dis":
                yield -ascending.square()
            else:
                yield (ascending / -width).exp_() if base[0] == "near" else -ascending.clamp(max=width)

    return values(), known


def _sort_(values: Tensor) -> Tensor:
    """Sorts in ascending order, NaN last; overwrites ``values`` on a CPU."""
    if _NUMPY and values.device.type == "cpu":
        values.numpy().sort(axis=-1)  # about 15 times faster than PyTorch
        return values
    return values.sort(-1).values


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
    """Damaged copies ``(L, d)`` of patterns, their candidates ``(L, C)``, log weights and right ones: see Problem."""

    query: Tensor
    candidates: Tensor
    offset: Tensor
    right: int

    def problem(self, patterns: Tensor, bases: Sequence[Base], widths: Sequence[float], edges: list[int]) -> Problem:
        """Computes the features of the candidates."""
        values = features(self.query, patterns[self.candidates], bases, widths, edges)
        return Problem(values.transpose(-1, -2).flatten(-2), self.offset, self.right)  # means of all bases first

    def part(self, rows: slice) -> "Queries":
        """Returns some of the queries."""
        return Queries(self.query[rows], self.candidates[rows], self.offset[rows], self.right)


def find_candidates(
    query: Tensor,
    index: Tensor,
    patterns: Tensor,
    labels: Tensor | None,
    clips: Sequence[float],
    generator: torch.Generator,
) -> Queries:
    """Takes candidates for ``query (L, d)``, damaged copies of the patterns ``index (L,)``.

    The hardest wrong patterns are those with the smallest L1 distance, or the smallest distance clipped at one of
    ``clips``. With labels, all patterns of the class are right except the one that the query was made of, unless it is
    the only one.
    """
    rows = []
    largest = 1 if labels is None else min(MAX_RIGHT, int(torch.unique(labels, return_counts=True)[1].max()))
    wrong = max(0, min(CANDIDATES, len(patterns)) - largest)
    random = min(RANDOM, wrong // 2)
    place, step = torch.arange(len(patterns), device=patterns.device), _step(query, patterns.numel())
    for part, at in zip(torch.split(query, step), torch.split(index, step), strict=True):
        own = place == at[:, None]
        same = own if labels is None else labels == labels[at][:, None]
        right = torch.where((same & ~own).any(1, keepdim=True), same & ~own, same)
        difference = (part[:, None] - patterns).abs_()
        known = (~difference.isnan()).to(query.dtype).mean(-1)
        distances = [difference.nansum(-1), *(difference.clamp(max=clip).nansum(-1) for clip in clips)]
        dot = part.nan_to_num(0.0) @ patterns.nan_to_num(0.0).mT
        near = torch.stack([dot, *(-distance for distance in distances)]) / known.clamp(min=1e-9)
        near = (near - near.mean(-1, keepdim=True)) / near.std(-1, correction=0, keepdim=True).clamp(min=1e-30)
        near = near.amax(0).masked_fill(known == 0, -torch.inf)
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
    return Queries(query[usable], candidates[usable], weights[usable], largest)


def solve(problem: Problem, start: Tensor, smooth: bool, penalty: Tensor) -> Tensor:
    """Minimizes the objective plus ``penalty . weight**2`` by L-BFGS from ``start (f,)``, on scaled features."""
    weight = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weight], max_iter=STEPS, history_size=20, line_search_fn="strong_wolfe")

    @torch.no_grad()
    def closure() -> Tensor:
        value, gradient = problem.objective(weight, smooth)
        weight.grad = gradient + 2 * penalty * weight
        return value + penalty @ weight.square()

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return weight.detach()


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


def pool_weights(weights: Tensor, edges: list[int]) -> Tensor:
    """Pools weights of ranks ``(n_bases, d)`` into weights of features ``(1 + bins, n_bases)``."""
    parts = torch.split(weights, torch.tensor(edges).diff(prepend=torch.zeros(1, dtype=torch.long)).tolist(), -1)
    sums = torch.stack([part.sum(-1) for part in parts])
    return torch.cat([torch.zeros_like(sums[:1]), sums])


class _Setting(NamedTuple):
    """Patterns and queries in units of ``scale``, and bases: first the ``learned`` ones, then those of baselines."""

    scale: Tensor | None
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
    scale: Tensor | None,
    patterns: Tensor,
    labels: Tensor | None,
    index: Tensor,
    query: Tensor,
    bases: Sequence[Base],
    generator: torch.Generator,
) -> _Setting:
    if scale is not None:
        patterns, query = patterns / scale, query / scale
    differences = _pair_differences(patterns, generator).flatten()
    distinct: dict[tuple[str, float], Base] = {}
    for base in bases:  # discrete values may give several quantiles the same width
        distinct.setdefault((_kind(base), 1.0 if isinstance(base, str) else _quantile(differences, base[1])), base)
    clips = [_quantile(differences, q) for q in CLIPS]
    fixed: list[tuple[Base, float]] = [
        ("dis", 1.0),
        *((("clip", q), clip) for q, clip in zip(CLIPS, clips, strict=True)),
    ]
    queries = find_candidates(query, index, patterns, labels, clips, generator)
    all_bases = [*distinct.values(), *(base for base, _ in fixed)]
    widths = [*(width for _, width in distinct), *(width for _, width in fixed)]
    return _Setting(scale, patterns, all_bases, widths, len(distinct), queries)


def _trial_loss(setting: _Setting, edges: list[int]) -> float:
    """Returns the log-likelihood loss of every second query after a solution for the others: does a setting suit?"""
    problem, _ = setting.problem(slice(None), edges).scaled()
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
    problem, deviation = problem.scaled()
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
    unit = 1.0 if setting.scale is None else setting.scale
    query, keys = (normalize((x * unit).nan_to_num(0.0), dim=-1) for x in (part.query, setting.patterns))
    score = (query @ keys.mT).gather(1, part.candidates)
    return correct(score, Problem(score, part.offset, part.right))


@torch.no_grad()
def learn(
    patterns: Tensor,
    labels: Tensor | None,
    damage: Damage,
    *,
    bases: Sequence[Base] = BASES,
    generator: torch.Generator,
    start: Tensor | None = None,
    bins: int = BINS,
) -> Learned:
    """Learns a similarity that finds the pattern, or the class, of a damaged copy of a stored pattern.

    The result is never much worse than a fixed score: if L1, trimmed L1, Euclid or one saturating base is better than
    the learned weights by more than a standard error on held-out queries, it is the result.

    Args:
        patterns: ``(N, d)``; NaN is a missing value.
        labels: class of each pattern ``(N,)``; None to find the pattern itself. With labels, a pattern does not answer
            for its own copies, so that the accuracy is that of unseen patterns.
        damage: damages patterns.
        bases: bases of the similarity, each monotone in the absolute difference.
        generator: random generator on the device of the patterns.
        start: present weights of the ranks ``(n_bases, d)``, which are one of the starts.
        bins: number of rank bins; with 1 the weights do not depend on ranks.

    Raises:
        AHopError: an argument is invalid, or ``damage`` changes the shape.

    >>> patterns = torch.rand(200, 16, generator=torch.Generator().manual_seed(0))
    >>> def damage(x, generator):
    ...     wrong = torch.rand(x.shape, generator=generator) < 0.3
    ...     return torch.where(wrong, torch.rand(x.shape, generator=generator), x)
    >>> learned = learn(patterns, None, damage, generator=torch.Generator().manual_seed(0))
    >>> learned.scores(patterns[:5], patterns).argmax(-1)
    tensor([0, 1, 2, 3, 4])
    """
    began = time.perf_counter()
    check_patterns(patterns)
    if labels is not None and labels.shape != patterns.shape[:1]:
        raise AHopError(f"labels must be (N,) with N = {len(patterns)}, got {describe(labels)}")
    if start is not None and start.shape != (len(bases), patterns.shape[1]):
        raise AHopError(f"start must be (n_bases, d) = {(len(bases), patterns.shape[1])}, got {describe(start)}")
    kept = torch.randperm(len(patterns), generator=generator, device=patterns.device)
    kept = kept[: max(CANDIDATES, MINED // patterns.shape[1])]
    stored, labels = patterns[kept], None if labels is None else labels[kept]
    count = 2 * max(QUERIES, min(MOST_QUERIES, QUERY_ELEMENTS // stored.shape[1]))
    index = torch.randint(len(stored), (count,), generator=generator, device=stored.device)
    query = damage(stored[index], generator)
    if query.shape != (count, stored.shape[1]):
        raise AHopError(f"damage must keep the shape {(count, stored.shape[1])}, got {describe(query)}")
    wide = accumulation_dtype(patterns.dtype)
    stored, query = stored.to(wide), query.to(wide)

    edges = bin_edges(stored.shape[1], bins)

    def prepare(scale: Tensor | None, bases: Sequence[Base], count: int | None = None) -> _Setting:
        return _prepare(scale, stored, labels, index[:count], query[:count], bases, generator)

    # Units of each dimension and products cost time in every search, so they have to pay.
    loss = _trial_loss(prepare(None, bases, TRIAL), edges)
    own = dimension_scale(stored, generator)
    own_loss = _trial_loss(prepare(own, bases, TRIAL), edges)
    scale, loss = (own, own_loss) if own_loss < GAIN * loss else (None, loss)
    more = (*bases, *(base for base in OPTIONAL if base not in bases))
    if _trial_loss(prepare(scale, more, TRIAL), edges) < GAIN * loss:
        bases, start = more, None if start is None else pad(start, (0, 0, 0, len(more) - len(start)))
    setting = prepare(scale, bases)
    half, n = len(setting.queries.query) // 2, setting.learned
    starts = [weight for each in fixed_weights(setting.bases[:n], edges).values() for weight in each]
    if start is not None:
        own_rows = [list(bases).index(base) for base in setting.bases[:n]]
        starts.append(pool_weights(start[own_rows].to(stored), edges))
    solved = _solutions(setting.problem(slice(0, half), edges), starts, n)

    held = setting.problem(slice(half, None), edges, learned=False)
    scores = fixed_weights(setting.bases, edges)
    scores["learned"] = [pad(weight, (0, len(setting.bases) - n)) for weight in solved]
    right = {name: torch.stack([held.correct(weight) for weight in each]) for name, each in scores.items()}
    chosen, best, rows = _choose(right)
    rows["cosine"] = _cosine(setting, slice(half, None))[1::2].double().mean().item()
    weight = scores[chosen][best].to(stored)
    if not weight.any():  # constant patterns say nothing about weights
        weight = pad(starts[0].to(stored), (0, len(setting.bases) - n))
    calibrated, _ = with_temperature(held, weight.flatten())
    used = [j for j in range(len(setting.bases)) if weight[:, j].any()]
    return Learned(
        bases=tuple(setting.bases[j] for j in used),
        widths=stored.new_tensor([setting.widths[j] for j in used]),
        scale=scale,
        weights=expand(weight[:, used], edges),
        temperature=(weight.norm() / calibrated.norm()).item(),
        report=Report(tuple(rows.items()), chosen, time.perf_counter() - began),
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
            margin = more.mean().item() - more.std().item() / math.sqrt(len(more))
            chosen, gain = (name, margin) if margin > gain else (chosen, gain)
    return chosen, best[chosen], rows

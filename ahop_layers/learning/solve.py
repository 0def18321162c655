"""Learning a robust similarity by solving a small regression, without a learning rate, epochs or batches.

A score is linear in its weights. With the default similarity, the absolute differences of a query and a pattern are
sorted, and every base that is monotone in the difference is evaluated on the sorted values, so all bases share one
sort. The values of a base are averaged over all ranks, and over bins of ranks whose widths grow geometrically. The
weights of these features are found by softmax regression on damaged copies of the stored patterns with L-BFGS, by the
log-likelihood first and then by a bounded one, which counts hopeless queries little. Weights of bins are penalized, so
that a score depends on ranks only where this pays, and are expanded to ranks afterwards. A given similarity is solved
in the same way, from its own bases and blocks.

A dimension that is NaN in the query or in the pattern takes no part: the sorted similarities of the m known dimensions,
as a step function, are stretched to d ranks.
"""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from ahop_layers.learning.candidates import CANDIDATES, Queries, find_candidates
from ahop_layers.learning.questions import Questions
from ahop_layers.learning.ranks import BINS, bin_edges, block_features, candidate_scores, features, pools
from ahop_layers.learning.regression import PENALTY, Problem, solutions, trial_loss
from ahop_layers.ops.reference import accumulation_dtype, fold
from ahop_layers.similarity.adaptive import BaseArgument
from ahop_layers.similarity.protocol import Solvable
from ahop_layers.similarity.widths import differences, quantiles, units

BASES: tuple[BaseArgument, ...] = ("l1", *(("near", q) for q in (0.02, 0.05, 0.1, 0.2, 0.5)))
OPTIONAL: tuple[BaseArgument, ...] = ("dot",)
"""Bases that are added if they pay: they need a sort of their own."""

CLIPS = (0.05, 0.2, 0.5)
"""Quantiles at which the differences of clipped L1 are clipped."""

TRIAL, TRIAL_CANDIDATES, GAIN, UNITS_GAIN = 256, 96, 0.95, 0.8
"""Optional bases, and units of each dimension, must lower the loss of so many queries to these fractions."""

IMAGE_BINS, ENOUGH_IMAGES = 12, 1024
"""Number of rank bins of views of images, and of images for which penalties need not be larger."""

AVAILABLE = ("L1", "trimmed L1", "Euclid", "dot product", "near")
"""Baselines that may be the result. The others are only reported: no kernel computes them."""


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

    bases: tuple[BaseArgument, ...]
    widths: tuple[float, ...]
    units: Tensor | None
    weights: Tensor
    temperature: float
    report: Report


def fixed_weights(bases: Sequence[BaseArgument], edges: list[int]) -> dict[str, list[Tensor]]:
    """Returns the weights ``(n_bases, 1 + bins)`` of fixed scores: each base alone, and L1 trimmed at each edge."""
    names = {"l1": "L1", "dis": "Euclid", "dot": "dot product", "near": "near", "clip": "clipped L1"}
    fixed: dict[str, list[Tensor]] = {}
    for j, base in enumerate(bases):
        alone = torch.zeros(len(bases), 1 + len(edges))
        alone[j, 0] = 1.0
        fixed.setdefault(names[_kind(base)], []).append(alone)
        if base == "l1":
            for trimmed in _trimmed(edges):
                fixed.setdefault("trimmed L1", []).append(torch.zeros_like(alone))
                fixed["trimmed L1"][-1][j] = trimmed
    return fixed


def _trimmed(edges: list[int]) -> list[Tensor]:
    """Returns weights of features ``(1 + bins,)`` that sum the similarities of the first ranks, up to each edge."""
    widths = torch.tensor([0, *edges]).diff().float()
    return [pad(widths[:kept], (1, len(edges) - kept)) for kept in range(1, len(edges) + 1)]


def _kind(base: BaseArgument) -> str:
    return base if isinstance(base, str) else base[0]


class _Setting(NamedTuple):
    """Patterns and queries in ``units``, and bases: first the ``learned`` ones, then those of baselines."""

    units: Tensor | None
    patterns: Tensor
    bases: list[BaseArgument]
    widths: list[float]
    learned: int
    queries: Queries

    def problem(self, rows: slice, edges: list[int], learned: bool = True) -> Problem:
        """Computes the features of some queries, of the learned bases alone or of all."""
        count, part = self.learned if learned else len(self.bases), self.queries.part(rows)
        found = features(part.query, self.patterns, part.candidates, self.bases[:count], self.widths[:count], edges)
        return Problem(found, part.offset, part.right, [1 + len(edges)] * count)


def _setting(unit: Tensor | None, patterns: Tensor, bases: Sequence[BaseArgument], queries: Queries) -> _Setting:
    """Adds the bases of baselines, and the widths of all."""
    named: list[BaseArgument] = [*bases, "dis", *(("clip", q) for q in CLIPS)]
    found = quantiles(differences(patterns), [1.0 if isinstance(base, str) else base[1] for base in named])
    widths = [1.0 if isinstance(base, str) else width for base, width in zip(named, found, strict=True)]
    distinct: dict[tuple[str, float], int] = {}
    for row in range(len(bases)):  # discrete values may give several quantiles the same width
        distinct.setdefault((_kind(named[row]), widths[row]), row)
    rows = [*distinct.values(), *range(len(bases), len(named))]
    return _Setting(unit, patterns, [named[row] for row in rows], [widths[row] for row in rows], len(distinct), queries)


def _cosine(setting: _Setting, rows: slice, problem: Problem) -> float:
    """Returns the accuracy of cosine similarity, with 0 for missing values, for every second query."""
    part, unit = setting.queries.part(rows), 1.0 if setting.units is None else setting.units
    query, keys = (normalize((x * unit).nan_to_num(0.0), dim=-1) for x in (part.query, setting.patterns))
    return problem.is_right((query @ keys.mT).gather(1, part.candidates))[1::2].double().mean().item()


def _held_out(queries: Queries, asked: Questions) -> tuple[slice, slice]:
    """Returns the rows of the queries of the fit, and of the held-out ones: the same if none is held out."""
    fitted = int(queries.usable[: asked.fitted].sum())
    return slice(0, fitted), slice(fitted, None) if fitted < len(queries.query) else slice(0, None)


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

    ``labels`` are the class of each pattern ``(N,)``; None finds the pattern itself. With labels, a pattern does not
    answer for queries that were made of it, so that the accuracy is that of unseen patterns. With one of ``bins``, the
    weights do not depend on ranks.
    """
    began = time.perf_counter()
    patterns, asked = _widened(patterns, asked)
    edges = bin_edges(patterns.shape[1], bins)
    some = asked.part(slice(0, min(TRIAL, asked.fitted)))

    def prepare(unit: Tensor | None, bases: Sequence[BaseArgument], asked: Questions, candidates: int) -> _Setting:
        scaled = patterns if unit is None else patterns / unit
        asked = asked if unit is None else asked._replace(query=asked.query / unit)
        return _setting(unit, scaled, bases, find_candidates(asked, scaled, labels, generator, candidates))

    def try_out(unit: Tensor | None, bases: Sequence[BaseArgument]) -> float:
        return trial_loss(prepare(unit, bases, some, TRIAL_CANDIDATES).problem(slice(None), edges))

    # Units of each dimension and products cost time in every search, so they have to pay.
    own, loss = units(differences(patterns)), try_out(None, bases)
    own_loss = try_out(own, bases)
    unit, loss = (own, own_loss) if own_loss < UNITS_GAIN * loss else (None, loss)
    more = (*bases, *(base for base in OPTIONAL if base not in bases))
    if try_out(unit, more) < GAIN * loss:
        bases = more
    setting = prepare(unit, bases, asked, CANDIDATES)
    n, (fitted, rest) = setting.learned, _held_out(setting.queries, asked)
    starts = [weight for each in fixed_weights(setting.bases[:n], edges).values() for weight in each]
    solved = solutions(setting.problem(fitted, edges), [start.flatten() for start in starts])

    held = setting.problem(rest, edges, learned=False)
    scores = fixed_weights(setting.bases, edges)
    extra = (0, 0, 0, len(setting.bases) - n)
    scores["learned"] = [pad(weight.view(n, -1), extra) for weight in solved]
    right = {name: held.correct(each) for name, each in scores.items()}
    chosen, best, rows = _choose(right, AVAILABLE)
    rows = {"cosine": _cosine(setting, rest, held), **rows}
    weight = scores[chosen][best].to(patterns)
    if not weight.any():  # constant patterns say nothing about weights
        weight = pad(starts[0].to(patterns), extra)
    used = [j for j in range(len(setting.bases)) if weight[j].any()]
    return Learned(
        bases=tuple(setting.bases[j] for j in used),
        widths=tuple(setting.widths[j] for j in used),
        units=unit,
        weights=weight[used] @ pools(edges).to(weight),
        temperature=held.temperature(held.scores(weight.flatten()))[0],
        report=Report(tuple(rows.items()), chosen, len(held.offset) // 2, time.perf_counter() - began),
    )


@torch.no_grad()
def solve_weights(
    similarity: Solvable,
    patterns: Tensor,
    labels: Tensor | None,
    asked: Questions,
    generator: torch.Generator,
) -> tuple[list[Tensor] | None, float, Report]:
    """Solves for the weights of a similarity without heads, which keeps its bases, blocks, widths, units and bias.

    The result is the weight of each rank, for each part ``(n_bases, n)``, or None if those that it has are better; the
    temperature, by which scores are divided to be logits; and the held-out accuracy.
    """
    began = time.perf_counter()
    patterns, asked = _widened(patterns, asked)
    unbiased = asked._replace(query=similarity.unbiased(asked.query))
    overview = getattr(similarity, "overview", None)
    queries = find_candidates(unbiased, patterns, labels, generator, CANDIDATES, overview)
    queries = queries._replace(query=asked.query[queries.usable])
    fitted, rest = _held_out(queries, asked)

    parts, images = similarity.parts(), overview is not None
    counts = [part.w.shape[-1] for part in parts]
    edges = [bin_edges(n, IMAGE_BINS) if images else bin_edges(n, both_ends=True) for n in counts]
    bases = [len(part.bases) for part in parts]
    found = block_features(queries.query, patterns, queries.candidates, similarity, edges)
    sizes = [1 + len(ends) for ends, count in zip(edges, bases, strict=True) for _ in range(count)]
    # An image may have no patch in common with a candidate, but a pixel.
    first = len(sizes) if len(parts) == 1 else len(parts[0].bases)
    unknown = found[..., : sum(sizes[:first])].isnan().any(-1)
    unknown[:, : queries.right] = False
    offset = queries.offset.masked_fill(unknown, -torch.inf)
    problem = Problem(found.nan_to_num(0.0), offset, queries.right, sizes)
    penalty = None
    if images:  # what is covered is not spread evenly over an image, and queries made of one image are alike
        penalty = torch.full_like(found[0, 0], PENALTY * max(1.0, ENOUGH_IMAGES / len(patterns)))
    solved, held = solutions(problem.rows(fitted), _starts(similarity, edges), penalty), problem.rows(rest)

    setting, bins = _setting(None, patterns, ("l1", "dot"), queries), bin_edges(similarity.dim)
    plain = setting.problem(rest, bins, learned=False)
    right = {name: plain.correct(each) for name, each in fixed_weights(setting.bases, bins).items()}
    part = queries.part(rest)
    scores = candidate_scores(part.query, patterns, part.candidates, similarity)
    right["start"] = held.is_right(scores)[None]
    right["learned"] = held.correct(solved)
    chosen, best, rows = _choose(right, ("start",))
    rows = {"cosine": _cosine(setting, rest, plain), **rows}
    report = Report(tuple(rows.items()), chosen, len(held.offset) // 2, time.perf_counter() - began)
    weight = solved[best] / solved[best].abs().max().clamp(min=1e-30)
    if chosen == "start" or not weight.any():
        return None, held.temperature(scores)[0], report
    lengths = [count * (1 + len(ends)) for count, ends in zip(bases, edges, strict=True)]
    split = zip(torch.split(weight, lengths), bases, edges, strict=True)
    weights = [each.view(count, -1) @ pools(ends).to(each) for each, count, ends in split]
    return weights, held.temperature(held.scores(weight))[0], report


def _starts(similarity: Solvable, edges: list[list[int]]) -> list[Tensor]:
    """Returns starts ``(f,)``: the weights that a similarity has, and each base alone, trimmed at each edge."""
    folded = [fold(part.footprint_weight()) for part in similarity.parts()]
    own = [pad(u @ (pools(ends)[1:] > 0).to(u).mT, (1, 0)).flatten() for u, ends in zip(folded, edges, strict=True)]
    starts, first = [torch.cat(own)], 0
    for ends, weight in zip(edges, folded, strict=True):
        for _ in weight:
            for alone in _trimmed(ends):
                starts.append(torch.zeros_like(starts[0]))
                starts[-1][first : first + len(alone)] = alone.to(starts[0])
            first += 1 + len(ends)
    return starts


def _widened(patterns: Tensor, asked: Questions) -> tuple[Tensor, Questions]:
    wide = accumulation_dtype(patterns.dtype)
    return patterns.to(wide), asked._replace(query=asked.query.to(wide))


def _choose(right: dict[str, Tensor], available: Sequence[str]) -> tuple[str, int, dict[str, float]]:
    """Chooses a score by every second held-out query, and returns accuracies of the other queries.

    ``right`` says by name whether each of several scores is right for each query, bool ``(scores, L)``. The names
    ``available`` may be chosen instead of ``"learned"``. The result is the name and number of the chosen score, and for
    each name the accuracy of its best score.
    """
    best = {name: int(each[:, ::2].sum(1).argmax()) for name, each in right.items()}
    rows = {name: each[best[name], 1::2].double().mean().item() for name, each in right.items()}
    learned = right["learned"][best["learned"], ::2].double()
    chosen, gain = "learned", 0.0
    for name in available:
        if name in right:
            more = right[name][best[name], ::2].double() - learned
            margin = more.mean().item() - more.std(correction=0).item() / math.sqrt(len(more))
            chosen, gain = (name, margin) if margin > gain else (chosen, gain)
    return chosen, best[chosen], rows

"""What a fit can make of a similarity: members of its family, and the weights that are solved for each of them.

A score is linear in its weights. With the default similarity, the absolute differences of a query and a pattern are
sorted, and every base that is monotone in the difference is evaluated on the sorted values, so all these bases share
one sort. The values of a base are averaged over all ranks, and over bins of ranks whose widths grow geometrically. The
weights of these features are found by softmax regression on damaged copies of the stored patterns with L-BFGS, by the
log-likelihood first and then by a bounded one, which counts hopeless queries little. Weights of bins are penalized, so
that a score depends on ranks only where this pays, and are expanded to ranks afterwards. A given similarity is solved
in the same way, from its own bases and blocks.

A dimension that is NaN in the query or in the pattern takes no part: the sorted similarities of the m known dimensions,
as a step function, are stretched to d ranks.
"""

import copy
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ahop_layers.memory.learn.auto import BASES, PAPER, REACH, AutoSimilarity, Frame
from ahop_layers.memory.learn.candidates import CANDIDATES, Candidates, find_candidates
from ahop_layers.memory.learn.questions import Questions
from ahop_layers.memory.learn.ranks import BINS, bin_edges, block_features, features, pools
from ahop_layers.memory.learn.regression import PENALTY, Problem, rescaled, solutions, trial_losses
from ahop_layers.memory.learn.threads import in_threads
from ahop_layers.memory.variants import known_range
from ahop_layers.ops.reference import fold
from ahop_layers.similarity.adaptive import BaseArgument
from ahop_layers.similarity.widths import beyond, differences, octaves, quantiles, units

# The family of the default similarity, from the cheapest in a search on.
FAMILY: dict[str, tuple[BaseArgument, ...]] = {
    "l1 and near": BASES,
    "dis and dot": PAPER,
    "all bases": (*BASES, *PAPER),
}
SIMPLE = {"l1": "L1", "dis": "Euclid", "dot": "dot product", "near": "near"}
FEW_CANDIDATES = 64  # number of candidates of a query where the trial has a small loss
HARD = 0.4  # loss from which on it is not small
TRIAL_QUERIES = 512  # number of queries that decide how values are compared
BIAS_GAIN, UNITS_GAIN = 0.98, 0.8  # fraction of the loss to which a bias, and units, must lower it
UNITS_LEAST = 3e-4  # by how much units must lower the loss
USUAL = 0.99  # share of the values of queries that are within a reach
LONGEST_REACH = 2.0
MUCH = 1.25  # a member with more than so many times the smallest loss in a trial is left out
IMAGE_BINS = 12  # number of rank bins of views of images
ENOUGH_IMAGES = 1024  # number of images for which penalties need not be larger


class Trial(NamedTuple):
    """One result of a fit, which is taken if it finds most of the held-out queries.

    Attributes:
        name: its row in the report.
        member: what was learned. The results of a member differ in how they were solved for; the first is preferred.
        similarity: the result.
    """

    name: str
    member: str
    similarity: Any


class Setting(NamedTuple):
    """The features of queries and their candidates, and the bases that they belong to, with widths and edges of bins.

    A score is a weight ``(f,)`` of all features, which are scaled by their ``deviation (f,)``.
    """

    problem: Problem
    deviation: Tensor
    bases: list[BaseArgument]
    widths: list[float]
    edges: list[list[int]]

    @property
    def ends(self) -> list[int]:
        """The number of features before each base, and of all."""
        return list(accumulate(self.problem.sizes, initial=0))

    def member(self, bases: Sequence[BaseArgument]) -> Problem:
        """Returns the problem of some consecutive bases alone."""
        rows = [row for row, base in enumerate(self.bases) if base in bases]
        features = self.problem.features[..., self.ends[rows[0]] : self.ends[rows[-1] + 1]]
        return self.problem._replace(features=features, sizes=[self.problem.sizes[row] for row in rows])

    def simple(self) -> dict[str, list[Tensor]]:
        """Returns the weights of simple scores: each base alone, and L1 trimmed at each edge."""
        found: dict[str, list[Tensor]] = {}
        for base, first, last, edges in zip(self.bases, self.ends, self.ends[1:], self.edges, strict=False):
            own = {SIMPLE[_kind(base)]: list(torch.eye(1, last - first))}
            if base == "l1":
                own["trimmed L1"] = _trimmed(edges)
            for name, weights in own.items():
                found.setdefault(name, []).extend(pad(each, (first, self.ends[-1] - last)) for each in weights)
        return found

    def trial(self, name: str, member: str, weight: Tensor, similarity: AutoSimilarity, frame: Frame) -> Trial:
        """Returns a copy of a similarity with the ``weight (f,)`` as a trial."""
        parts = zip(torch.split(weight, self.problem.sizes), self.edges, strict=True)
        ranks = [part @ pools(edges).to(part) for part, edges in parts]
        used = [row for row, each in enumerate(ranks) if each.any()]
        bases, widths = [self.bases[row] for row in used], [self.widths[row] for row in used]
        similarity = copy.deepcopy(similarity)
        similarity.set_(bases, widths, torch.stack([ranks[row] for row in used]), frame)
        return Trial(name, member, similarity)


class Comparison:
    """Compares queries with ``patterns (N, d)`` of the classes ``labels (N,)``, for the default similarity."""

    def __init__(self, patterns: Tensor, labels: Tensor | None, bins: int, seed: int) -> None:
        self.patterns, self.labels, self.bins, self.seed = patterns, labels, bins, seed
        self.limits = known_range(patterns)

    def candidates(self, asked: Questions, frame: Frame, count: int) -> tuple[Tensor, Candidates]:
        """Returns the patterns, and queries with so many candidates, compared as the ``frame`` says."""
        query, patterns = asked.query, self.patterns
        query = (query if frame.bias is None else query - frame.bias).clamp(*beyond(*self.limits, frame.reach))
        if frame.units is not None:
            query, patterns = query / frame.units, patterns / frame.units
        generator = torch.Generator(query.device).manual_seed(self.seed)  # all frames have the same random candidates
        return patterns, find_candidates(asked._replace(query=query), patterns, self.labels, generator, count)

    def setting(self, patterns: Tensor, found: Candidates, bases: Sequence[BaseArgument]) -> Setting:
        """Computes the features of queries and their candidates."""
        shares = [base[1] for base in bases if not isinstance(base, str)]
        near = iter(octaves(quantiles(differences(patterns), shares)))
        distinct: dict[tuple[str, float], BaseArgument] = {}
        for base in bases:  # discrete values may give several quantiles the same width
            distinct.setdefault((_kind(base), 1.0 if isinstance(base, str) else next(near)), base)
        bases, widths = list(distinct.values()), [width for _, width in distinct]
        both = [base in PAPER and self.bins > 1 for base in bases]
        edges = [bin_edges(patterns.shape[1], self.bins, both_ends) for both_ends in both]
        values = features(found.query, patterns, found.candidates, bases, widths, edges)
        problem = Problem(values, found.offset, found.right, [1 + len(each) for each in edges])
        return Setting(*problem.scaled_(), bases, widths, edges)

    def best_frame(
        self, asked: Questions, biases: Sequence[Tensor], bases: Sequence[BaseArgument]
    ) -> tuple[Tensor, Setting, Frame]:
        """Finds out what pays: a bias, values far beyond the patterns, and units, which cost time in every search.

        Returns the loss of each query ``(L,)``, and their setting.
        """

        def trial(frame: Frame) -> tuple[Tensor, Setting, Frame]:
            setting = self.setting(*self.candidates(asked, frame, FEW_CANDIDATES), bases)
            return trial_losses(setting.problem), setting, frame

        best = trial(Frame())

        def better(gain: float, errors: float, least: float = 0.0, **change: Any) -> tuple[Tensor, Setting, Frame]:
            found = trial(best[-1]._replace(**change))
            lower = found[0].mean() < min(gain * best[0].mean(), best[0].mean() - least)
            return found if lower and is_larger(best[0], found[0], errors) else best

        for bias in biases:
            best = better(BIAS_GAIN, 2.0, bias=bias)
        low, high = self.limits
        query = asked.query if best[-1].bias is None else asked.query - best[-1].bias
        far = torch.maximum(low - query, query - high).div_(high - low).nan_to_num_(0.0, 0.0, 0.0).flatten()
        reach = min(LONGEST_REACH, far.kthvalue(1 + int(USUAL * (len(far) - 1))).values.item())
        if reach > REACH:
            best = better(1.0, 0.0, reach=reach)
        return better(UNITS_GAIN, 1.0, UNITS_LEAST, units=units(differences(self.patterns)))


def auto_trials(
    similarity: AutoSimilarity, patterns: Tensor, labels: Tensor | None, asked: Questions, seed: int,
    biases: Sequence[Tensor] = (), bases: Sequence[BaseArgument] | None = None, bins: int = BINS,
) -> list[Trial]:  # fmt: skip
    """Returns simple scores, and what was learned for each member; with ``bases``, for one that has only these.

    ``biases`` are offsets ``(d,)`` that queries may have. A member is left out if a trial says that it loses by far, or
    that one that costs less in a search, or as much, is as good.
    """
    family = FAMILY if bases is None else {"given bases": tuple(bases)}
    comparison, every = Comparison(patterns, labels, bins, seed), list(family.values())[-1]
    some = asked.part(slice(max(asked.intact, asked.fitted - TRIAL_QUERIES), asked.fitted))
    _, trial, frame = comparison.best_frame(some, [each.to(patterns) for each in biases], every)
    losses = {name: trial_losses(trial.member(member)).mean().item() for name, member in family.items()}
    # Products need a sort of their own: of the members with and without them, the better one takes part.
    groups = [[name for name in family if ("dot" in family[name]) == products] for products in (False, True)]
    leaders = [min(group, key=losses.__getitem__) for group in groups if group]
    lowest = min(losses.values())
    left = [name for name in leaders if losses[name] <= MUCH * lowest and losses[name] <= losses[leaders[0]]]
    trials = []
    for name, weights in trial.simple().items():
        right = trial.problem.correct([rescaled(each, trial.deviation) for each in weights]).double().mean(1)
        trials.append(trial.trial(name, name, weights[int(right.argmax())], similarity, frame))
    count = FEW_CANDIDATES if labels is None and lowest < HARD else CANDIDATES
    patterns, found = comparison.candidates(asked.part(slice(0, asked.fitted)), frame, count)
    settings = [comparison.setting(patterns, found, family[name]) for name in left]

    def solved(setting: Setting) -> list[Tensor]:
        starts = [each for weights in setting.simple().values() for each in weights]
        return solutions(setting.problem, setting.deviation, starts)

    learned = in_threads(solved, settings, patterns.device)
    for name, setting, weights in zip(left, settings, learned, strict=True):
        trials += [setting.trial("learned", name, each, similarity, frame) for each in weights if each.any()]
    return trials


def given_trials(
    similarity: Any, patterns: Tensor, labels: Tensor | None, asked: Questions, generator: torch.Generator
) -> list[Trial]:
    """Returns the weights that a similarity has, and learned ones, for its bases, blocks, widths, units and bias."""
    asked, overview = asked.part(slice(0, asked.fitted)), similarity.overview
    compared = asked._replace(query=similarity.unbiased(asked.query))
    found = find_candidates(compared, patterns, labels, generator, overview=overview)
    parts = similarity.parts()
    counts, bases = [part.w.shape[-1] for part in parts], [len(part.bases) for part in parts]
    edges = [bin_edges(n, IMAGE_BINS) if overview else bin_edges(n, both_ends=True) for n in counts]
    values = block_features(asked.query[found.usable], patterns, found.candidates, similarity, edges)
    sizes = [1 + len(ends) for ends, count in zip(edges, bases, strict=True) for _ in range(count)]
    # An image may have no patch in common with a candidate, but a pixel.
    first = len(sizes) if len(parts) == 1 else len(parts[0].bases)
    unknown = values[..., : sum(sizes[:first])].isnan().any(-1)
    unknown[:, : found.right] = False
    problem = Problem(values.nan_to_num_(0.0), found.offset.masked_fill(unknown, -torch.inf), found.right, sizes)
    penalty = None
    if overview:  # what is covered is not spread evenly over an image, and queries made of one image are alike
        penalty = torch.full_like(values[0, 0], PENALTY * max(1.0, ENOUGH_IMAGES / len(patterns)))
    problem, deviation = problem.scaled_()
    trials = [Trial("start", "start", similarity)]
    for weight in solutions(problem, deviation, _starts(similarity, edges), penalty):
        weight = weight / weight.abs().max().clamp(min=1e-30)
        split = torch.split(weight, [count * (1 + len(ends)) for count, ends in zip(bases, edges, strict=True)])
        views = zip(split, bases, edges, strict=True)
        ranks = [each.view(count, -1) @ pools(ends).to(each) for each, count, ends in views]
        if weight.any():
            learned = copy.deepcopy(similarity)
            learned.set_ranks_(ranks)
            trials.append(Trial("learned", "learned", learned))
    return trials


def _starts(similarity: Any, edges: list[list[int]]) -> list[Tensor]:
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


def _trimmed(edges: list[int]) -> list[Tensor]:
    """Returns weights of features ``(1 + bins,)`` that sum the similarities of the first ranks, up to each edge."""
    widths = torch.tensor([0, *edges]).diff().float()
    return [pad(widths[:kept], (1, len(edges) - kept)) for kept in range(1, len(edges) + 1)]


def is_larger(value: Tensor, other: Tensor, errors: float) -> bool:
    """Returns whether the mean of ``value (l,)`` is larger than that of ``other (l,)`` by so many standard errors."""
    more = value.double() - other.double()
    return more.mean().item() > errors * more.std(correction=0).item() / math.sqrt(len(more))


def _kind(base: BaseArgument) -> str:
    return base if isinstance(base, str) else base[0]

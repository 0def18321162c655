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

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from ahop_layers.memory.learn.auto import BASES, OPTIONAL, AutoSimilarity
from ahop_layers.memory.learn.candidates import CANDIDATES, Candidates, find_candidates
from ahop_layers.memory.learn.questions import Questions
from ahop_layers.memory.learn.ranks import BINS, bin_edges, block_features, candidate_scores, features, pools
from ahop_layers.memory.learn.regression import PENALTY, Problem, solutions, trial_loss
from ahop_layers.ops.reference import accumulation_dtype, fold
from ahop_layers.similarity.adaptive import BaseArgument
from ahop_layers.similarity.protocol import Solvable, is_solvable
from ahop_layers.similarity.widths import differences, octaves, quantiles, units

CLIPPED_QUANTILES = (0.05, 0.2, 0.5)  # quantiles at which the differences of clipped L1 are clipped
TRIAL_QUERIES = 256  # number of queries of a trial of other units or bases
TRIAL_CANDIDATES = 96  # number of candidates of each of them
BASES_GAIN = 0.95  # optional bases must lower the loss of a trial to this fraction
UNITS_GAIN = 0.8  # units of each dimension must lower it to this fraction
IMAGE_BINS = 12  # number of rank bins of views of images
ENOUGH_IMAGES = 1024  # number of images for which penalties need not be larger
INTACT_ELEMENTS = 2**26  # number of values that are compared to see whether stored patterns find themselves


class Shortlist(NamedTuple):
    """How many patterns ``shortlist="auto"`` scores, its recall of what an exact search finds, and seconds a query."""

    length: int
    recall: float
    seconds: float
    exact_seconds: float

    def __str__(self) -> str:
        times = f"{1e3 * self.seconds:.2f} ms a query, exact {1e3 * self.exact_seconds:.2f} ms"
        return f"shortlist of {self.length}: recall {self.recall:.3f} of an exact search, {times}"


class FitReport(NamedTuple):
    """Accuracy on held-out queries of simple scores and of the learned one.

    A query is compared with the candidates of the fit, so that the accuracy among all patterns can be lower.

    Attributes:
        rows: names of scores and their accuracies. A score with a parameter has the best one of the whole range.
        chosen: the score that :meth:`~ahop_layers.AssociativeMemory.fit` chose; ``"start"`` is the one before it.
        queries: number of held-out queries.
        seconds: duration of the fit.
        shortlist: what ``shortlist="auto"`` means from now on; None if there were no codes, see
            :meth:`~ahop_layers.AssociativeMemory.build_codes`.
        repair: the share of the squared error of damaged patterns that
            :meth:`~ahop_layers.AssociativeMemory.repair` leaves; 1 if it does not pay. None if there are too few.

    >>> print(FitReport((("L1", 0.5), ("learned", 0.9)), "learned", 256, 1.25))
    accuracy on 256 held-out queries
    L1             0.500
    learned        0.900
    fitted in 1.2 s
    """

    rows: tuple[tuple[str, float], ...]
    chosen: str
    queries: int
    seconds: float
    shortlist: Shortlist | None = None
    repair: float | None = None

    def __str__(self) -> str:
        lines = [f"{name:<14} {accuracy:.3f}" for name, accuracy in self.rows]
        if self.chosen != "learned" and "learned" in dict(self.rows):
            lines.append(f"learning does not pay here: {self.chosen} is as good and was chosen")
        if self.shortlist is not None:
            lines.append(str(self.shortlist))
        if self.repair is not None:
            only = "repair fills unknown values only: it brings wrong ones no nearer to the truth"
            lines.append(only if self.repair == 1 else f"repair leaves {self.repair:.2f} of the squared error")
        return "\n".join([f"accuracy on {self.queries} held-out queries", *lines, f"fitted in {self.seconds:.1f} s"])


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
    """Patterns and queries in ``units``, and bases: first the ``learned`` ones, then the bases of baselines."""

    units: Tensor | None
    patterns: Tensor
    bases: list[BaseArgument]
    widths: list[float]
    learned: int
    queries: Candidates

    def problem(self, rows: slice, edges: list[int], learned: bool = True) -> Problem:
        """Computes the features of some queries, of the learned bases alone or of all."""
        count, part = self.learned if learned else len(self.bases), self.queries.part(rows)
        found = features(part.query, self.patterns, part.candidates, self.bases[:count], self.widths[:count], edges)
        return Problem(found, part.offset, part.right, [1 + len(edges)] * count)


def _setting(unit: Tensor | None, patterns: Tensor, bases: Sequence[BaseArgument], queries: Candidates) -> _Setting:
    """Adds the bases of baselines, and the widths of all."""
    named: list[BaseArgument] = [*bases, "dis", *(("clip", q) for q in CLIPPED_QUANTILES)]
    shares = [base[1] for base in named if not isinstance(base, str)]
    found = iter(octaves(quantiles(differences(patterns), shares)))
    widths = [1.0 if isinstance(base, str) else next(found) for base in named]
    distinct: dict[tuple[str, float], int] = {}
    for row in range(len(bases)):  # discrete values may give several quantiles the same width
        distinct.setdefault((_kind(named[row]), widths[row]), row)
    rows = [*distinct.values(), *range(len(bases), len(named))]
    return _Setting(unit, patterns, [named[row] for row in rows], [widths[row] for row in rows], len(distinct), queries)


def _cosine(setting: _Setting, rows: slice, problem: Problem) -> Tensor:
    """Returns whether cosine similarity, with 0 for missing values, is right for each query: bool ``(L,)``."""
    part, unit = setting.queries.part(rows), 1.0 if setting.units is None else setting.units
    query, keys = (normalize((x * unit).nan_to_num(0.0), dim=-1) for x in (part.query, setting.patterns))
    return problem.is_right((query @ keys.mT).gather(1, part.candidates))


class _Fixed:
    """A score ``(L, d), (N, d) -> (L, N)`` without weights to solve for: it is compared with simple scores."""

    available: tuple[str, ...] = ("start",)
    errors = 0.0  # standard errors by which a learned score must be better than the first one to be preferred

    def __init__(
        self, similarity: Any, patterns: Tensor, labels: Tensor | None, asked: Questions, generator: torch.Generator
    ) -> None:
        self.similarity, self.patterns = similarity, patterns
        unbiased = getattr(similarity, "unbiased", lambda query: query)
        overview = getattr(similarity, "overview", None)
        compared = asked._replace(query=unbiased(asked.query))
        found = find_candidates(compared, patterns, labels, generator, CANDIDATES, overview)
        self.candidates = found._replace(query=asked.query[found.usable])
        self.setting = _setting(None, patterns, ("l1", "dot"), self.candidates)

    def solve(self, rows: slice) -> None:
        """Solves for weights from some of the queries."""

    def judge(self, rows: slice) -> dict[str, Tensor]:
        """Returns by name whether each of several scores is right for each of some queries, bool ``(scores, L)``."""
        edges = bin_edges(self.patterns.shape[1])
        self.held = self.setting.problem(rows, edges, learned=False)
        right = {name: self.held.correct(each) for name, each in fixed_weights(self.setting.bases, edges).items()}
        self.scores = self._scores(self.candidates.part(rows))
        return {**right, "start": self.held.is_right(self.scores)[None]}

    def _scores(self, part: Candidates) -> Tensor:
        missing = {"missing": True} if part.query.isnan().any() or self.patterns.isnan().any() else {}
        return self.similarity(part.query, self.patterns, **missing).gather(1, part.candidates)

    def take(self, chosen: str, number: int) -> float:
        """Gives the similarity the chosen weights, and returns the temperature of its scores."""
        return self.held.temperature(self.scores)[0]


class _Given(_Fixed):
    """The weights of a similarity that keeps its bases, blocks, widths, units and bias."""

    similarity: Solvable

    def solve(self, rows: slice) -> None:
        """Solves for the weights of all ranks of all parts."""
        similarity, patterns, candidates = self.similarity, self.patterns, self.candidates
        parts, images = similarity.parts(), hasattr(similarity, "overview")
        counts = [part.w.shape[-1] for part in parts]
        self.edges = [bin_edges(n, IMAGE_BINS) if images else bin_edges(n, both_ends=True) for n in counts]
        self.bases = [len(part.bases) for part in parts]
        found = block_features(candidates.query, patterns, candidates.candidates, similarity, self.edges)
        sizes = [1 + len(ends) for ends, count in zip(self.edges, self.bases, strict=True) for _ in range(count)]
        # An image may have no patch in common with a candidate, but a pixel.
        first = len(sizes) if len(parts) == 1 else len(parts[0].bases)
        unknown = found[..., : sum(sizes[:first])].isnan().any(-1)
        unknown[:, : candidates.right] = False
        offset = candidates.offset.masked_fill(unknown, -torch.inf)
        self.problem = Problem(found.nan_to_num(0.0), offset, candidates.right, sizes)
        penalty = None
        if images:  # what is covered is not spread evenly over an image, and queries made of one image are alike
            penalty = torch.full_like(found[0, 0], PENALTY * max(1.0, ENOUGH_IMAGES / len(patterns)))
        self.solved = solutions(self.problem.rows(rows), _starts(similarity, self.edges), penalty)

    def judge(self, rows: slice) -> dict[str, Tensor]:
        """Adds the score before the fit, and the learned ones."""
        right, self.held = super().judge(rows), self.problem.rows(rows)
        right["start"] = self.held.is_right(self.scores)[None]
        return {**right, "learned": self.held.correct(self.solved)}

    def _scores(self, part: Candidates) -> Tensor:
        return candidate_scores(part.query, self.patterns, part.candidates, self.similarity)

    def take(self, chosen: str, number: int) -> float:
        """Sets the solved weights, unless those before the fit are better."""
        weight = self.solved[number] / self.solved[number].abs().max().clamp(min=1e-30)
        if chosen == "start" or not weight.any():
            return super().take(chosen, number)
        lengths = [count * (1 + len(ends)) for count, ends in zip(self.bases, self.edges, strict=True)]
        split = zip(torch.split(weight, lengths), self.bases, self.edges, strict=True)
        self.similarity.set_ranks_([each.view(count, -1) @ pools(ends).to(each) for each, count, ends in split])
        return self.held.temperature(self.held.scores(weight))[0]


class _Auto:
    """The bases, units and weights of an :class:`AutoSimilarity`; it may become one of several simple scores.

    Units of each dimension and products cost time in every search, so they have to pay in a trial.
    """

    available = ("L1", "trimmed L1", "Euclid", "dot product", "near")
    errors = 2.0

    def __init__(
        self, similarity: AutoSimilarity, patterns: Tensor, labels: Tensor | None, asked: Questions,
        generator: torch.Generator, bases: Sequence[BaseArgument] = BASES, bins: int = BINS,
    ) -> None:  # fmt: skip
        self.similarity, self.edges = similarity, bin_edges(patterns.shape[1], bins)
        some = asked.part(slice(0, min(TRIAL_QUERIES, asked.fitted)))

        def prepare(unit: Tensor | None, bases: Sequence[BaseArgument], asked: Questions, count: int) -> _Setting:
            scaled = patterns if unit is None else patterns / unit
            asked = asked if unit is None else asked._replace(query=asked.query / unit)
            return _setting(unit, scaled, bases, find_candidates(asked, scaled, labels, generator, count))

        def try_out(unit: Tensor | None, bases: Sequence[BaseArgument]) -> float:
            return trial_loss(prepare(unit, bases, some, TRIAL_CANDIDATES).problem(slice(None), self.edges))

        own, loss = units(differences(patterns)), try_out(None, bases)
        own_loss = try_out(own, bases)
        unit, loss = (own, own_loss) if own_loss < UNITS_GAIN * loss else (None, loss)
        more = (*bases, *(base for base in OPTIONAL if base not in bases))
        bases = more if try_out(unit, more) < BASES_GAIN * loss else bases
        self.setting = prepare(unit, bases, asked, CANDIDATES)
        self.candidates = self.setting.queries

    def solve(self, rows: slice) -> None:
        """Solves for the weights of rank bins of all bases."""
        n = self.setting.learned
        self.starts = [each for some in fixed_weights(self.setting.bases[:n], self.edges).values() for each in some]
        problem = self.setting.problem(rows, self.edges)
        self.solved = solutions(problem, [start.flatten() for start in self.starts])

    def judge(self, rows: slice) -> dict[str, Tensor]:
        """Returns by name whether each of several scores is right for each of some queries, bool ``(scores, L)``."""
        n, bases = self.setting.learned, self.setting.bases
        self.held, self.extra = self.setting.problem(rows, self.edges, learned=False), (0, 0, 0, len(bases) - n)
        self.scores = fixed_weights(bases, self.edges)
        self.scores["learned"] = [pad(weight.view(n, -1), self.extra) for weight in self.solved]
        return {name: self.held.correct(each) for name, each in self.scores.items()}

    def take(self, chosen: str, number: int) -> float:
        """Gives the similarity the chosen bases, units and weights, and returns the temperature of its scores."""
        setting = self.setting
        weight = self.scores[chosen][number].to(setting.patterns)
        if not weight.any():  # constant patterns say nothing about weights
            weight = pad(self.starts[0].to(setting.patterns), self.extra)
        used = [row for row in range(len(setting.bases)) if weight[row].any()]
        self.similarity.set_(
            [setting.bases[row] for row in used],
            [setting.widths[row] for row in used],
            setting.units,
            weight[used] @ pools(self.edges).to(weight),
        )
        return self.held.temperature(self.held.scores(weight.flatten()))[0]


@torch.no_grad()
def learn(
    similarity: Any, patterns: Tensor, labels: Tensor | None, asked: Questions, generator: torch.Generator,
    show: Callable[[str], None] = lambda step: None, **options: Any,
) -> tuple[float, FitReport]:  # fmt: skip
    """Learns a similarity that finds the pattern, or the class, that a query belongs to.

    The result is never much worse than a fixed score: if one is better than the learned weights by more than a standard
    error on held-out queries, it is the result. For ``similarity="auto"`` these are L1, trimmed L1, Euclid, the dot
    product and one saturating base; for others the score before the fit.

    The similarity is learned in place. With the class of each of the ``patterns (N, d)`` as ``labels (N,)``, a pattern
    does not answer for queries that were made of it, so that the accuracy holds for unseen patterns. ``show`` is told
    what is done next. ``options`` are, for ``"auto"``, the ``bases``, and the number of ``bins`` of ranks; with one,
    ranks do not matter. Returns the temperature, by which scores are divided to be logits, and the accuracy.
    """
    began = time.perf_counter()
    wide = accumulation_dtype(patterns.dtype)
    patterns, asked = patterns.to(wide), asked._replace(query=asked.query.to(wide))
    kind: Any = _Fixed
    if is_solvable(similarity):
        kind = _Auto if isinstance(similarity, AutoSimilarity) else _Given
    show("comparing queries with candidates")
    learner = kind(similarity, patterns, labels, asked, generator, **options)
    fitted = int(learner.candidates.usable[: asked.fitted].sum())
    rest = slice(fitted, None) if fitted < len(learner.candidates.query) else slice(0, None)
    show("solving for weights")
    learner.solve(slice(0, fitted))
    show("judging scores by held-out queries")
    right = learner.judge(rest)
    right = {"cosine": _cosine(learner.setting, rest, learner.held)[None], **right}
    reported = torch.ones_like(right["cosine"][0])
    if asked.label is not None and (asked.label >= 0).any():
        reported = asked.label[learner.candidates.usable][rest] >= 0  # the accuracy is that of classes
    reported[::2] = False  # these choose
    best = {name: int(each[:, ::2].sum(1).argmax()) for name, each in right.items()}
    rows = {name: each[best[name], reported].double().mean().item() for name, each in right.items()}
    found = before = _intact_found(similarity, patterns)
    for chosen, number in _preferences(right, best, learner.available, learner.errors):
        if chosen == "start":
            found = before
            break
        learner.similarity = copy.deepcopy(similarity)
        learner.take(chosen, number)
        found = _intact_found(learner.similarity, patterns)
        if found >= before:
            break
    learner.similarity = similarity
    temperature = learner.take(chosen, number)
    rows[chosen] = right[chosen][number, reported].double().mean().item()
    rows["intact records"] = found
    queries = int(reported.sum())
    return temperature, FitReport(tuple(rows.items()), chosen, queries, time.perf_counter() - began)


def _intact_found(similarity: Any, patterns: Tensor) -> float:
    """Returns the share of ``patterns (N, d)`` that no other pattern beats when they are asked for without damage."""
    count = min(len(patterns), max(1, INTACT_ELEMENTS // patterns.numel()))
    own = torch.arange(count, device=patterns.device) * len(patterns) // count
    missing = {"missing": True} if patterns.isnan().any() else {}
    bias = getattr(similarity, "bias", None)
    query = patterns[own] if bias is None else patterns[own] + bias  # which the similarity subtracts
    scores: Tensor = similarity(query, patterns, **missing)
    return (scores.gather(1, own[:, None]) >= scores.amax(1, keepdim=True)).double().mean().item()


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


def _preferences(
    right: dict[str, Tensor], best: dict[str, int], available: Sequence[str], errors: float
) -> list[tuple[str, int]]:
    """Orders scores by every second held-out query: names and numbers, the one to take first.

    ``right`` says by name whether each of several scores is right for each query, bool ``(scores, L)``, and ``best`` is
    the number of the best score of each name. The first learned score fails least where damage is heavier than in most
    queries: it is taken unless another learned one is better by more than ``errors`` standard errors. The names
    ``available`` are taken if they are better than the best learned one by more than one, or if no learned score is
    acceptable.
    """
    if "learned" not in right:
        return [("start", 0)]
    judged = {name: each[:, ::2].double() for name, each in right.items()}

    def is_better(score: Tensor, other: Tensor, errors: float) -> bool:
        more = score - other
        return more.mean().item() > errors * more.std(correction=0).item() / math.sqrt(len(more))

    learned = judged["learned"].mean(1).argsort(descending=True, stable=True).tolist()
    first = judged["learned"][0]
    learned.sort(key=lambda number: number > 0 and not is_better(judged["learned"][number], first, errors))
    simple = [(name, best[name]) for name in available if name in right]
    simple.sort(key=lambda each: -judged[each[0]][each[1]].mean().item())
    better = [each for each in simple if is_better(judged[each[0]][each[1]], judged["learned"][learned[0]], 1.0)]
    others = [each for each in simple if each not in better]
    return [*better, *(("learned", number) for number in learned), *others]

"""The fit of a similarity: its family is solved for, and what finds the most held-out queries is taken."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ahop_layers.memory.learn.auto import AutoSimilarity
from ahop_layers.memory.learn.members import Trial, auto_trials, given_trials, is_larger
from ahop_layers.memory.learn.questions import Questions
from ahop_layers.memory.learn.regression import Problem
from ahop_layers.memory.learn.threads import in_threads
from ahop_layers.memory.state import Shortlist
from ahop_layers.memory.variants import known_range
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.similarity.protocol import Similarity, is_solvable

JUDGED_ELEMENTS = 2**31  # number of values that are compared to judge a score by queries of a fit
LEAST_JUDGED = 128  # number of queries that judge it, however many values that compares
SCORES_AT_ONCE = 2**19  # number of scores of a judgment that are held at once
TEMPERATURE_SCORES = 2**18  # number of scores from which the temperature is found, unless 64 queries have more
CLEARLY = 3.0  # number of standard errors
COSTLY_GAIN = 0.95  # fraction of the errors to which a member must lower them, if a search with it takes longer
FIRST_ROUND = 4  # one in so many queries drops what loses clearly
INTACT_ELEMENTS = 2**26  # number of values that are compared to see whether stored patterns find themselves


class FitReport(NamedTuple):
    """Accuracy on held-out queries of simple scores and of the learned one.

    They are found among all stored patterns, or among a sample of those of a large memory.

    Attributes:
        rows: names of scores and their accuracies. A score with a parameter has one for the whole range of damage.
        chosen: the score that :meth:`~ahop_layers.AssociativeMemory.fit` chose; ``"start"`` is the one before it.
        queries: number of held-out queries.
        seconds: duration of the fit.
        shortlist: what ``shortlist="auto"`` means from now on; None if there were no codes, see
            :meth:`~ahop_layers.AssociativeMemory.build_codes`.
        repair: the share of the squared error of damaged patterns that
            :meth:`~ahop_layers.AssociativeMemory.repair` leaves; 1 if it does not pay. None if there are too few.
        members: what was learned from, and the accuracies; the best one is taken, or one that is cheaper in a search
            and as good within a standard error.
        result: what the similarity is now.

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
    members: tuple[tuple[str, float], ...] = ()
    result: str = ""

    def __str__(self) -> str:
        lines = [f"{name:<14} {accuracy:.3f}" for name, accuracy in self.rows]
        if len(self.members) > 1:
            lines.append("learned from " + ", ".join(f"{name}: {accuracy:.3f}" for name, accuracy in self.members))
        if self.chosen != "learned" and "learned" in dict(self.rows):
            lines.append(f"learning does not pay here: {self.chosen} is as good and was chosen")
        if self.result:
            lines.append(f"the similarity is {self.result}")
        if self.shortlist is not None:
            lines.append(str(self.shortlist))
        if self.repair is not None:
            only = "repair fills unknown values only: others come no nearer to the truth, or clean rows change"
            lines.append(only if self.repair == 1 else f"repair leaves {self.repair:.2f} of the squared error")
        return "\n".join([f"accuracy on {self.queries} held-out queries", *lines, f"fitted in {self.seconds:.1f} s"])


class Judge:
    """Finds out how many held-out queries a similarity finds among ``patterns (N, d)`` of the classes ``labels (N,)``.

    ``count`` patterns are stored, of which these are a sample. If a query asks for a class, the pattern that it was
    made of does not answer for it, unless it is the only one.
    """

    def __init__(self, patterns: Tensor, labels: Tensor | None, asked: Questions, count: int) -> None:
        asked = asked.part((~asked.query.isnan().all(-1)).nonzero().flatten())
        self.asked = asked.part(slice(0, max(LEAST_JUDGED, JUDGED_ELEMENTS // patterns.numel())))
        self.patterns, self.labels, self.count = patterns, labels, count
        self.limits, self.unknown = known_range(patterns), bool(patterns.isnan().any())

    def problem(self, similarity: Similarity, rows: Tensor) -> Problem:
        """Scores the queries ``rows (l,)``: right patterns, then wrong ones, as a problem of one feature, the score."""
        part, patterns = self.asked.part(rows), self.patterns
        query = similarity.within(part.query, *self.limits)
        missing: Any = {"missing": True} if self.unknown or query.isnan().any() else {}
        scores = similarity(query, patterns, **missing)
        right = own = torch.arange(len(patterns), device=patterns.device) == part.origin[:, None]
        if self.labels is not None and part.label is not None:
            same = torch.where(part.label[:, None] < 0, own, self.labels == part.label[:, None])
            right = torch.where((same & ~own).any(1, keepdim=True), same & ~own, same)
            own = same
        scores = torch.cat([scores.masked_fill(~right, -torch.inf), scores.masked_fill(own, -torch.inf)], 1)
        offset = torch.zeros_like(scores)
        offset[:, len(patterns) :] = math.log(self.count / len(patterns))
        return Problem(scores[..., None], offset.masked_fill(scores == -torch.inf, -torch.inf), len(patterns), [1])

    def finds(self, similarity: Similarity, rows: Tensor) -> Tensor:
        """Returns whether the similarity finds each of the queries ``rows (l,)``: bool ``(l,)``."""
        found = []
        for part in torch.split(rows, max(1, SCORES_AT_ONCE // len(self.patterns))):
            problem = self.problem(similarity, part)
            found.append(problem.is_right(problem.features[..., 0]))
        return torch.cat(found)

    def temperature(self, similarity: Similarity) -> tuple[float, float]:
        """Returns the number to divide scores by so that they are logits, and their log-likelihood loss."""
        rows = torch.arange(len(self.asked.query), device=self.patterns.device)
        problem = self.problem(similarity, rows[: max(64, TEMPERATURE_SCORES // len(self.patterns))])
        return problem.temperature(problem.features[..., 0])


@torch.no_grad()
def learn(
    similarity: Similarity, patterns: Tensor, labels: Tensor | None, asked: Questions, generator: torch.Generator,
    show: Callable[[str], None] = lambda step: None, mined: Tensor | None = None, count: int = 0, **options: Any,
) -> tuple[Any, float, FitReport]:  # fmt: skip
    """Learns a similarity that finds the pattern, or the class, that a query belongs to.

    The result is never much worse than a fixed score: if one is better than the learned weights by more than a standard
    error on held-out queries, it is the result. For ``similarity="auto"`` these are L1, trimmed L1, Euclid, the dot
    product and one saturating base; for others the score before the fit.

    With the class of each of the ``patterns (N, d)`` as ``labels (N,)``, a pattern does not answer for queries that
    were made of it, so that the accuracy holds for unseen patterns. ``mined`` are the indices of the patterns out of
    which candidates are taken, by default all; the origin of a query is one of these. ``count`` is the number of stored
    patterns, if ``patterns`` are a sample. ``show`` is told what is done next. ``options`` are those of
    :func:`auto_trials`. Returns the learned similarity, the temperature, by which scores are divided to be logits, and
    the accuracy.
    """
    began = time.perf_counter()
    wide = accumulation_dtype(patterns.dtype)
    patterns, asked = patterns.to(wide), asked._replace(query=asked.query.to(wide))
    held = asked.held()
    if mined is not None:
        held = held._replace(origin=torch.where(held.origin < 0, held.origin, mined[held.origin]))
    judge = Judge(patterns, labels, held, count or len(patterns))
    if mined is not None:
        patterns, labels = patterns[mined], None if labels is None else labels[mined]
    show("solving for weights")
    trials, errors = [Trial("start", "start", similarity)], 0.0
    if isinstance(similarity, AutoSimilarity):
        fresh = copy.deepcopy(similarity)
        fresh.reset_parameters()
        before = _intact_found(fresh, patterns)
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        trials, errors = auto_trials(fresh, patterns, labels, asked, seed, **options), 2.0
    else:
        before = _intact_found(similarity, patterns)
        if is_solvable(similarity):
            trials = given_trials(similarity, patterns, labels, asked, generator)
    show("judging scores by held-out queries")
    made = [trial.similarity for trial in trials]
    rows = torch.arange(len(judge.asked.query), device=patterns.device)
    reported = rows[1::2] if len(rows) > 1 else rows
    order = _preferences(trials, _found(judge, made, rows[::2]), errors, lambda each: judge.temperature(each)[1])
    accepted = (number for number in order if _intact_found(made[number], patterns) >= before)
    chosen = next(accepted, order[0])
    shown: dict[str, int] = {}
    for number in (chosen, *order):
        shown.setdefault(trials[number].member, number)
    if judge.asked.label is not None and (judge.asked.label[reported] >= 0).any():
        reported = reported[judge.asked.label[reported] >= 0]  # the accuracy is that of classes
    found = in_threads(lambda number: judge.finds(made[number], reported), shown.values(), patterns.device)
    accuracy = {member: each.double().mean().item() for member, each in zip(shown, found, strict=True)}
    learned = [member for member, number in shown.items() if trials[number].name == "learned"]
    table = {name: accuracy[name] for name in dict.fromkeys(trial.name for trial in trials) if name in accuracy}
    table |= {"learned": accuracy[learned[0]]} if learned else {}
    table["intact records"] = _intact_found(made[chosen], patterns)
    temperature, seconds = judge.temperature(made[chosen])[0], time.perf_counter() - began
    report = FitReport(tuple(table.items()), trials[chosen].name, len(reported), seconds)
    if isinstance(similarity, AutoSimilarity):
        members = tuple((member, accuracy[member]) for member in learned)
        report = report._replace(members=members, result=repr(made[chosen]))
    return made[chosen], temperature, report


def _found(judge: Judge, made: Sequence[Any], rows: Tensor) -> Tensor:
    """Returns which of the queries ``rows (l,)`` each similarity finds: bool ``(similarities, l)``.

    One in FIRST_ROUND of them tells which similarities lose clearly; for these, all others count as wrong.
    """
    first = torch.arange(len(rows), device=rows.device) % FIRST_ROUND == 0
    right = torch.zeros(len(made), len(rows), dtype=torch.bool, device=rows.device)
    left: Sequence[int] = range(len(made))
    for part in (first, ~first):
        if part.any():
            found = in_threads(lambda number: judge.finds(made[number], rows[part]), left, rows.device)  # noqa: B023
            for number, each in zip(left, found, strict=True):
                right[number, part] = each
            best = right[right.sum(1).argmax(), part]
            left = [number for number in left if not is_larger(best, right[number, part], CLEARLY)]
    return right


def _preferences(trials: Sequence[Trial], right: Tensor, errors: float, loss: Callable[[Any], float]) -> list[int]:
    """Orders trials by the queries that each of them finds, bool ``(trials, l)``: the first one is to be taken.

    Of the results of one member, the first fails least where damage is heavier than in most queries: it stands for the
    member unless another one is better by more than ``errors`` standard errors. Without ``errors``, the result is taken
    that finds most queries, and of equal ones that with the smallest ``loss``. A member that is more expensive in a
    search must be better by more than one, and so must simple scores, which are also taken if no other is acceptable.
    """
    count = right.sum(1).tolist()
    members: dict[str, list[int]] = {}
    simple = []
    for number, trial in enumerate(trials):
        if trial.name == "learned":
            members.setdefault(trial.member, []).append(number)
        else:
            simple.append(number)
    for numbers in members.values():
        first = numbers[0]
        if errors:
            better = [each for each in numbers[1:] if is_larger(right[each], right[first], errors)]
            numbers.sort(key=lambda each: -count[each])
            numbers.sort(key=lambda each: (each not in better, each != first))
        else:
            numbers.sort(key=lambda each: (-count[each], loss(trials[each].similarity)))
    simple.sort(key=lambda number: -count[number])
    if not members:
        return simple
    wrong, chosen = (~right).double().mean(1), next(iter(members))
    for name, (number, *_) in members.items():  # from the cheapest on
        other = members[chosen][0]
        if wrong[number] < COSTLY_GAIN * wrong[other] and is_larger(right[number], right[other], 1.0):
            chosen = name
    ranked = [members.pop(chosen), *members.values()]
    taken = right[ranked[0][0]]
    better = [number for number in simple if is_larger(right[number], taken, 1.0)]
    return [
        *better,
        *(each for numbers in ranked for each in numbers),
        *(each for each in simple if each not in better),
    ]


def _intact_found(similarity: Similarity, patterns: Tensor) -> float:
    """Returns the share of ``patterns (N, d)`` that no other pattern beats when they are asked for without damage."""
    count = min(len(patterns), max(1, INTACT_ELEMENTS // patterns.numel()))
    own = torch.arange(count, device=patterns.device) * len(patterns) // count
    missing: Any = {"missing": True} if patterns.isnan().any() else {}
    scores: Tensor = similarity(similarity.biased(patterns[own]), patterns, **missing)
    return (scores.gather(1, own[:, None]) >= scores.amax(1, keepdim=True)).double().mean().item()

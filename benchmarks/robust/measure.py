"""What the tables measure: accuracies of baselines, and of memories before and after fits."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

import ahop_layers as ah
from ahop_layers.memory.learn import questions
from ahop_layers.memory.learn.auto import AutoSimilarity
from ahop_layers.memory.learn.solve import learn
from ahop_layers.memory.variants import as_damage
from benchmarks.bags import auc
from benchmarks.harness.memory import clock
from benchmarks.robust.tasks import Task

Figures = dict[str, dict[float, float]]
"""Accuracy by the name of a method, and by the level."""

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
QUANTILES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
BASELINES = ("L1", "Euclid", "clipped L1", "trimmed L1", "exp(-d/w)", "cosine")
CHOICE_QUERIES = 512
MISSING = (0.3, 0.6)
PAIRS = (16, 32, 64, 128, 256, 512, 1024)
FACTORS = (0.001, 1.0, 1000.0)
STRANGERS, FALSE_ACCEPTS, BINS = 10, 0.01, 15
ABLATION: dict[str, dict[str, Any]] = {
    "ranks of L1": {"bases": ("l1",)},
    "saturating bases": {"bins": 1},
    "saturating bases, ranks": {},
}
"""Learned score -> what :func:`learn_part` is to learn."""
BLOCK = {"cpu": 2**20}


def block_scores(query: Tensor, stored: Tensor, clips: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Functions that compute the scores of the baselines ``(parameters, L, N)``, of pairs that fit into memory."""
    difference = (query[:, None] - stored).abs()
    known = (~difference.isnan()).float().mean(-1).clamp(min=1e-9)

    def trimmed() -> Tensor:
        ordered = difference.nan_to_num(torch.inf).sort(-1).values
        total = pad(ordered.nan_to_num(posinf=0.0).cumsum(-1), (1, 0))
        shares = torch.tensor(SHARES, device=query.device)[:, None, None]
        place = (shares * (known * difference.shape[-1])).round().long().clamp(min=1)
        return -torch.stack([total.gather(-1, at[..., None])[..., 0] for at in place]) / known

    def cosine() -> Tensor:
        first, second = (normalize(x.nan_to_num(0.0), dim=-1) for x in (query, stored))
        return (first @ second.mT)[None]

    return {
        "L1": lambda: -difference.nansum(-1)[None] / known,
        "Euclid": lambda: -difference.square().nansum(-1)[None] / known,
        "clipped L1": lambda: torch.stack([-difference.clamp(max=clip).nansum(-1) / known for clip in clips]),
        "trimmed L1": trimmed,
        "exp(-d/w)": lambda: torch.stack([(difference / -clip).exp().nansum(-1) / known for clip in clips]),
        "cosine": cosine,
    }


def distances(query: Tensor, stored: Tensor, clips: Tensor, names: Sequence[str] = BASELINES) -> dict[str, Tensor]:
    """Scores of baselines with all their parameters, larger is better: by name ``(parameters, L, N)``."""
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    for part in query.split(max(1, BLOCK.get(query.device.type, 2**27) // stored.numel())):
        scores = block_scores(part, stored, clips)
        for name in names:
            parts[name].append(scores[name]())
    return {name: torch.cat(each, 1) for name, each in parts.items()}


def baselines(
    task: Task, asked: Mapping[float, Tensor], generator: torch.Generator, names: Sequence[str] = BASELINES
) -> Figures:
    """Returns the accuracy of baselines, with the parameters that are best for damaged stored patterns."""
    scaled = task.stored / task.unit
    first, second = torch.randint(len(scaled), (2, 256), generator=generator, device=scaled.device)
    apart = (scaled[first] - scaled[second]).abs().flatten()
    apart = apart[apart > 0][:100_000]
    clips = torch.cat([apart.quantile(torch.tensor(QUANTILES).to(apart)), apart.quantile(0.02)[None] / 4])

    # Parameters: damaged copies of stored patterns, which do not answer for themselves where classes are to be found.
    index = torch.randint(len(scaled), (CHOICE_QUERIES,), generator=generator, device=scaled.device)
    scores = distances(task.draw(task.stored[index], generator) / task.unit, scaled, clips, names)
    best = {}
    for name, each in scores.items():
        if task.labels is not None:
            each[:, torch.arange(len(index)), index] = -torch.inf
        right = each.argmax(-1) == index if task.labels is None else task.labels[each.argmax(-1)] == task.labels[index]
        best[name] = int(right.double().mean(-1).argmax())
    found: Figures = {name: {} for name in names}
    for level, query in asked.items():
        for name, each in distances(query / task.unit, scaled, clips, names).items():
            found[name][level] = task.accuracy(each[best[name]].argmax(-1))
    return found


def recall(task: Task, memory: ah.AssociativeMemory, asked: Mapping[float, Tensor]) -> dict[float, float]:
    """Returns the accuracy of the best pattern of a memory at each level."""
    return {level: task.accuracy(memory.recall(query)) for level, query in asked.items()}


def learn_part(memory: ah.AssociativeMemory, task: Task, seed: int, **options: Any) -> None:
    """Fits a memory to the damage with some ``bases`` only, or without ranks: ``bins=1``."""
    generator = torch.Generator(task.stored.device).manual_seed(seed)
    asked = questions.draw(as_damage(task.draw), task.stored, task.labels, generator)
    memory.similarity = learn(memory._state.frozen, task.stored, task.labels, asked, generator, **options)[0]


def measure_levels(task: Task, generator: torch.Generator, seed: int) -> Figures:
    """Returns the accuracy of each method at each level, and the seconds of the fit as the level -1."""
    asked = task.queries(generator)
    memory = ah.AssociativeMemory(task.stored, labels=task.labels)
    found = {"not fitted": recall(task, memory, asked)}
    began = clock(task.stored.device)
    memory.fit(task.draw, seed=seed)
    found["fitted"] = {-1.0: clock(task.stored.device) - began}
    found["fitted"] |= recall(task, memory, asked)
    if task.labels is not None:
        found["fitted, by class"] = {
            level: (memory.classify(query) == task.target).double().mean().item() for level, query in asked.items()
        }
    learn_part(memory, task, seed, bins=1)
    found["fitted, not sorted"] = recall(task, memory, asked)
    return found | baselines(task, asked, generator)


def measure_missing(task: Task, generator: torch.Generator, seed: int) -> Figures:
    """Returns the accuracy with missing values, and with no other damage than at the level 0."""
    lowest = torch.zeros(len(task.asked), 1).to(task.asked)
    query = task.damage(task.asked, lowest, generator) if 0.0 in task.levels else task.asked
    asked = {share: ah.variants.Missing(share)(query, generator) for share in MISSING}
    memory = ah.AssociativeMemory(task.stored, labels=task.labels)
    found = {"not fitted": recall(task, memory, asked)}
    memory.fit(seed=seed)
    found["fitted"] = recall(task, memory, asked)
    return found | baselines(task, asked, generator, ("L1", "Euclid"))


def measure_pairs(task: Task, generator: torch.Generator, seed: int) -> Figures:
    """Returns the mean accuracy over all levels: by the number of given pairs, without a fit, and with the damage."""
    asked = task.queries(generator)
    target, query = task.pairs(max(PAIRS), generator)
    fits: dict[tuple[str, int], Any] = {("not fitted", 0): None, ("damage", 0): task.draw}
    fits |= {("pairs", count): (target[:count], query[:count]) for count in PAIRS}
    found: Figures = {}
    for (method, count), data in fits.items():
        memory = ah.AssociativeMemory(task.stored, labels=task.labels)
        if data is not None:
            memory.fit(data, seed=seed)
        found.setdefault(method, {})[count] = mean(recall(task, memory, asked).values())
    return found


def measure_ablation(task: Task, generator: torch.Generator, seed: int) -> Figures:
    """Returns the accuracy at each level of L1, of trimmed L1, and of parts of the learned similarity.

    The level -1 says whether a fit took products.
    """
    asked = task.queries(generator)
    found = baselines(task, asked, generator, ("L1", "trimmed L1"))
    for method, options in ABLATION.items():
        memory = ah.AssociativeMemory(task.stored, labels=task.labels)
        learn_part(memory, task, seed, **options)
        similarity = cast(AutoSimilarity, memory.similarity)
        product = similarity.w[similarity.bases.index("dot")].any()
        found[method] = {-1.0: float(product), **recall(task, memory, asked)}
    return found


def measure_scale(task: Task, generator: torch.Generator, seed: int) -> Figures:
    """Returns the mean accuracy over all levels after a fit, by the factor of all values."""
    asked, found = task.queries(generator), {}
    for factor in FACTORS:
        scaled = task.scaled(factor)
        memory = ah.AssociativeMemory(scaled.stored, labels=task.labels)
        memory.fit(scaled.draw, seed=seed)
        queries = {level: factor * query for level, query in asked.items()}
        found[factor] = mean(recall(task, memory, queries).values())
    return {"fitted": found}


def calibration_error(confidence: Tensor, right: Tensor) -> float:
    """Returns the mean difference of confidence and accuracy over BINS bins of equal width, weighted by their size."""
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    gap = torch.zeros(BINS, dtype=torch.float64, device=place.device)
    gap.index_add_(0, place, confidence.double() - right.double())
    return (gap.abs().sum() / len(confidence)).item()


def known_and_foreign(task: Task, generator: torch.Generator) -> tuple[Task, Tensor]:
    """Leaves some people, or a quarter of the rows, out of a task, and returns what is left and what was left out.

    Half of the photos of the others are stored.
    """
    if task.labels is None or task.spare is None or task.spare_labels is None:
        order = torch.randperm(len(task.stored), generator=generator, device=task.stored.device)
        rows = task.stored[order[len(order) // 4 :]]
        left = task._replace(stored=rows, asked=rows, target=torch.arange(len(rows), device=rows.device))
        return left, task.stored[order[: len(order) // 4]]
    rows = torch.cat([task.stored, task.asked, task.spare])
    labels = torch.cat([task.labels, task.target, task.spare_labels])
    people = labels.unique()
    people = people[torch.randperm(len(people), generator=generator, device=people.device)]
    foreign = torch.isin(labels, people[:STRANGERS])
    here = (~foreign).nonzero().flatten()
    here = here[torch.randperm(len(here), generator=generator, device=here.device)]
    stored, asked = here.tensor_split(2)
    left = task._replace(stored=rows[stored], labels=labels[stored], asked=rows[asked], target=labels[asked])
    return left, rows[foreign]


def measure_confidence(task: Task, generator: torch.Generator, seed: int) -> Figures:
    """Returns how well the confidence of the best hit tells known queries from foreign ones, at one level of damage.

    All queries are damaged alike, as in the fit. The calibration error counts equal shares of both.
    """
    task, strangers = known_and_foreign(task, generator)
    level = 0.5 if 0.5 in task.levels else 0.4

    def damage(x: Tensor, generator: torch.Generator) -> Tensor:
        return task.damage(x, torch.full((len(x), 1), level).to(x), generator)

    memory = ah.AssociativeMemory(task.stored, labels=task.labels)
    memory.fit(damage, seed=seed)
    known, foreign = (memory.search(damage(x, generator)) for x in (task.asked, strangers))
    threshold = memory.threshold(FALSE_ACCEPTS)
    sure, unsure = known.confidence[:, 0], foreign.confidence[:, 0]
    right = (known.indices[:, 0] if task.labels is None else task.labels[known.indices[:, 0]]) == task.target
    count = min(len(sure), len(unsure))
    both = torch.cat([sure[:count], unsure[:count]]), torch.cat([right[:count], torch.zeros_like(right[:count])])
    here = torch.cat([torch.ones_like(sure), torch.zeros_like(unsure)])
    found = {
        "AUROC": auc(here, torch.cat([sure, unsure])),
        "AUROC of the score": auc(here, torch.cat([known.scores[:, 0], foreign.scores[:, 0]])),
        "calibration error": calibration_error(*both),
        "false accepts": (unsure > threshold).double().mean().item(),
        "accepted": (sure > threshold).double().mean().item(),
        "accuracy": right.double().mean().item(),
    }
    if task.labels is None:
        found["explained"] = explained(memory, task, damage, generator)
    return {name: {level: value} for name, value in found.items()}


def explained(memory: ah.AssociativeMemory, task: Task, damage: Any, generator: torch.Generator) -> float:
    """Returns the share of values, changed by more than two widths, that are among the lowest contributions."""
    similarity = cast(AutoSimilarity, memory.similarity)
    query = damage(task.stored, generator)
    units = torch.ones_like(task.stored[0]) if similarity.units is None else similarity.units
    used = [row for row, name in enumerate(similarity.names) if name == "near" and similarity.w[row].any()]
    width = 1.0 if similarity.widths is None or not used else similarity.widths[used].median().item()
    changed = (query - task.stored).abs() > 2 * width * units
    place = torch.arange(len(query), device=query.device)
    reasons = memory.explain(query, index=place).masked_fill(query.isnan(), torch.inf)
    lowest = reasons.argsort(-1).argsort(-1) < changed.sum(-1, keepdim=True)
    return ((lowest & changed).sum() / changed.sum()).item()

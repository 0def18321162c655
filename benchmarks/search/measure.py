"""The measurements of the search benchmark: the accuracy of each method at each level of damage."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness.memory import clock
from benchmarks.harness.rows import ResultTable
from benchmarks.search.data import LEVELS, TRAINING_LEVELS, Split, damage, load, queries, split_halves
from benchmarks.search.packaged import OWN, MemoryClassifier
from benchmarks.search.rivals import RIVALS, Answer, Classifier, Training

METHODS: dict[str, Training] = {**RIVALS, **OWN}


class Trained(NamedTuple):
    """A method that is trained once for all levels of one kind of damage on one split."""

    data: str
    kind: str
    split: int
    method: str

    def row(self, level: float) -> dict[str, object]:
        """The columns that identify the measurement at one level."""
        return {**self._asdict(), "level": level}


class Shown(NamedTuple):
    """Queries, what each method answered, and what each pixel adds to the score of the adaptive memory."""

    split: Split
    query: Tensor
    answers: dict[str, Answer]
    explained: Tensor | None


def wanted(
    sets: Iterable[str], kinds: Iterable[str], splits: int, methods: Sequence[str], levels: Sequence[float] | None
) -> dict[Trained, list[float]]:
    """Returns the levels to measure of each trained method. ``levels`` selects some of those of each kind."""
    chosen = {kind: [level for level in LEVELS[kind] if levels is None or level in levels] for kind in kinds}
    return {
        Trained(data, kind, split, method): each
        for data in sets
        for split in range(splits)
        for kind, each in chosen.items()
        for method in methods
        if each
    }


def train(method: str, split: Split, kind: str, seed: int) -> Classifier:
    """Trains a method on the stored images, with queries of all levels of one kind of damage."""
    return METHODS[method](split.stored, damage(kind, TRAINING_LEVELS, split.stored), seed)


def accuracies(each: Trained, asked: dict[float, Tensor], split: Split) -> list[dict[str, object]]:
    """Trains a method and returns its accuracy at each level, with the seconds of training and of the queries.

    Args:
        each: the method.
        asked: level -> queries ``(n, d)``.
        split: stored and asked images.
    """
    device = split.stored.rows.device
    start = clock(device)
    classify = train(each.method, split, each.kind, each.split)
    fit = clock(device) - start
    rows: list[dict[str, object]] = []
    for level, query in asked.items():
        start = clock(device)
        label = classify(query).label
        accuracy = (label == split.asked.labels).double().mean().item()
        times = {"fit_s": f"{fit:.3g}", "query_s": f"{clock(device) - start:.3g}"}
        rows.append({**each.row(level), "queries": len(query), "accuracy": f"{accuracy:.4f}", **times})
    return rows


def measure_missing(
    levels_of: dict[Trained, list[float]], folder: Path, device: torch.device, results: ResultTable
) -> None:
    """Measures and stores what the results do not have yet for this device. Prints a line for each method."""
    missing = {
        each: left
        for each, levels in levels_of.items()
        if (left := [level for level in levels if not results.has(each.row(level))])
    }
    start = clock(device)
    for (data, split), parts in itertools.groupby(missing, lambda each: (each.data, each.split)):
        halves = Split(*(half.to(device) for half in split_halves(load(data, folder), split)))
        for kind, methods in itertools.groupby(parts, lambda each: each.kind):
            asked = {level: queries(halves, kind, level, split) for level in LEVELS[kind]}
            for each in methods:
                rows = accuracies(each, {level: asked[level] for level in missing[each]}, halves)
                results.add(*rows)
                print(f"{clock(device) - start:6.1f} s  {_shown(each, rows)}", flush=True)


def _shown(each: Trained, rows: Sequence[dict[str, object]]) -> str:
    """Returns a line with the accuracy at each level and the seconds of training and of all queries."""
    asked = sum(float(str(row["query_s"])) for row in rows)
    figures = " ".join(f"{row['accuracy']}" for row in rows)
    name = f"{each.data}, split {each.split}, {each.kind}, {each.method}"
    return f"{name}: {figures} (fit {rows[0]['fit_s']} s, queries {asked:.3g} s)"


def answers(
    data: str, kind: str, level: float, methods: Sequence[str], folder: Path, device: torch.device, count: int = 6
) -> Shown:
    """Trains the methods on the first split and asks all of them the same few queries, of different classes."""
    split = Split(*(part.to(device) for part in split_halves(load(data, folder), 0)))
    classes = split.asked.labels.unique()
    spread = classes[torch.linspace(0, len(classes) - 1, min(count, len(classes))).long()]
    chosen = torch.stack([(split.asked.labels == label).nonzero()[0, 0] for label in spread])
    query = queries(split, kind, level, 0)[chosen]
    found, explained = {}, None
    for method in methods:
        classify = train(method, split, kind, 0)
        found[method] = classify(query)
        if isinstance(classify, MemoryClassifier):
            explained = classify.memory.explain(query, found[method].index)
    return Shown(split._replace(asked=split.asked.subset(chosen)), query, found, explained)

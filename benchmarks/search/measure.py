"""The measurements of the search benchmark: the accuracy of each method at each level of corruption."""

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.harness.rows import ResultTable, Row
from benchmarks.search.data import LEVELS, TRAINING_LEVELS, Split, corruption, load, queries, split_halves
from benchmarks.search.ours import OURS, AdaptiveClassifier, adaptive
from benchmarks.search.rivals import RIVALS, Answer, Classifier, Training

METHODS: dict[str, Training] = {**RIVALS, OURS: adaptive}


class Trained(NamedTuple):
    """A method that is trained once for all levels of one kind of corruption on one split."""

    data: str
    kind: str
    split: int
    method: str

    def row(self, level: float) -> dict[str, object]:
        """The columns that identify the measurement at one level."""
        return {**self._asdict(), "level": level}


class Shown(NamedTuple):
    """Queries, what each method answered, and how the patches of query and answer of the adaptive memory agree."""

    split: Split
    query: Tensor
    answers: dict[str, Answer]
    agreement: Tensor | None


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
    """Trains a method on the stored images, with queries of all levels of one kind of corruption."""
    return METHODS[method](split.stored, corruption(kind, TRAINING_LEVELS, split.stored), seed)


def accuracies(each: Trained, levels: Sequence[float], split: Split) -> Iterator[dict[str, object]]:
    """Trains a method, and yields its accuracy, and the seconds of training and of the queries, at each level."""

    def seconds() -> float:
        if split.stored.rows.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    start = seconds()
    classify = train(each.method, split, each.kind, each.split)
    fit = seconds() - start
    for level in levels:
        query = queries(split, each.kind, level, each.split)
        start = seconds()
        label = classify(query).label
        accuracy = (label == split.asked.labels).double().mean().item()
        times = {"fit_s": f"{fit:.3g}", "query_s": f"{seconds() - start:.3g}"}
        yield {**each.row(level), "accuracy": f"{accuracy:.4f}", **times}


def measure_missing(
    levels_of: dict[Trained, list[float]], folder: Path, device: torch.device, results: ResultTable
) -> None:
    """Measures and stores what the results do not have yet for this device."""
    missing = {
        each: left
        for each, levels in levels_of.items()
        if (left := [level for level in levels if not results.has(each.row(level))])
    }
    split, source = None, None
    for each, levels in tqdm(missing.items(), desc="search", unit="method", disable=None):
        if split is None or source != (each.data, each.split):
            source = (each.data, each.split)
            images = load(each.data, folder)
            split = Split(*(part.to(device) for part in split_halves(images, each.split)))
        results.add(*accuracies(each, levels, split))


def rows_of(levels_of: dict[Trained, list[float]], rows: Sequence[Row]) -> list[Row]:
    """Returns the stored rows of these measurements, in their order."""
    keys = [
        {name: str(value) for name, value in each.row(level).items()} for each in levels_of for level in levels_of[each]
    ]
    return [row for key in keys for row in rows if key.items() <= row.items()]


def answers(
    data: str, kind: str, level: float, methods: Sequence[str], folder: Path, device: torch.device, count: int = 6
) -> Shown:
    """Trains the methods on the first split and asks all of them the same few queries, of different classes."""
    split = Split(*(part.to(device) for part in split_halves(load(data, folder), 0)))
    classes = split.asked.labels.unique()
    spread = classes[torch.linspace(0, len(classes) - 1, min(count, len(classes))).long()]
    chosen = torch.stack([(split.asked.labels == label).nonzero()[0, 0] for label in spread])
    query = queries(split, kind, level, 0)[chosen]
    found, agreement = {}, None
    for method in methods:
        classify = train(method, split, kind, 0)
        found[method] = classify(query)
        if isinstance(classify, AdaptiveClassifier):
            agreement = classify.agreement(query, found[method].index)
    return Shown(split._replace(asked=split.asked.subset(chosen)), query, found, agreement)

"""The measurements of the bag benchmark, one outer fold at a time, in parallel processes."""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmarks.bag_sets import BagSet
from benchmarks.bags import DATA_SETS, auc
from benchmarks.harness.command import explain_missing_data
from benchmarks.harness.pool import make_pool
from benchmarks.harness.rows import ResultTable, Row
from benchmarks.paper.bag_classifier import BagClassifier
from benchmarks.paper.mil.training import (
    INNER_FOLDS,
    VARIANTS,
    StandardizedBags,
    choose,
    outer_folds,
    scores,
    settings,
    train,
)

DATA = ("tiger", "fox", "elephant", "ucsb")
POOLINGS = ("dot", "sparse", "kernel", "adaptive", "adaptive x10", "gated", "uniform")
NETWORKS = 3


class OuterFold(NamedTuple):
    """One outer fold of one measurement."""

    part: str
    data: str
    pooling: str
    repeat: int
    fold: int
    folds: int

    @property
    def key(self) -> Row:
        """The columns that identify the row of all folds, including the settings."""
        offered = settings(self.data)
        counts = f"{self.folds} folds, {INNER_FOLDS} inner, {len(offered)} settings"
        return {
            "part": self.part,
            "data": self.data,
            "settings": f"{counts}, {offered[0].epochs} epochs, {NETWORKS} networks",
            "pooling": self.pooling,
            "repeat": str(self.repeat),
        }


@cache
def load(name: str, folder: Path) -> BagSet:
    """Reads a data set, once per process."""
    return DATA_SETS[name](folder)


def measure(outer: OuterFold, folder: Path) -> dict[str, float]:
    """Measures one fold. The repeat and the fold determine all seeds."""
    data, seed, offered = load(outer.data, folder), 1000 * outer.repeat + outer.fold, settings(outer.data)
    kept, held = outer_folds(data, outer.folds, outer.repeat)[outer.fold]

    def tested(models: list[BagClassifier], bags: StandardizedBags) -> float:
        chosen = bags.packed(held)
        return auc(data.labels[held], torch.stack([scores(model, *chosen) for model in models]).mean(0))

    if outer.part == "nested":
        setting, epochs = choose(data, kept, outer.pooling, offered, seed)
        clean = StandardizedBags(data, kept, setting.clip)
        seeds = [seed + 10_000 * number for number in range(NETWORKS)]
        models = [train(clean, kept, outer.pooling, setting, each, epochs)[0] for each in seeds]
        found = {"auc": tested(models, clean), "epochs": epochs}
        for name, variant in VARIANTS.items():
            found[name] = tested(models, StandardizedBags(data, kept, setting.clip, variant, seed))
        return found
    setting, found = offered[0], {}
    for name, variant in VARIANTS.items():
        bags = StandardizedBags(data, kept, setting.clip, variant, seed)
        found[name] = tested([train(bags, kept, outer.pooling, setting, seed, setting.epochs)[0]], bags)
    return found


def missing_folds(options: argparse.Namespace, results: ResultTable) -> Iterator[OuterFold]:
    """Yields what the results do not have yet: part by part, and all of a repeat before the next."""
    every = product(options.parts, range(options.repeats), options.data, options.poolings)
    for part, repeat, data, pooling in every:
        first = OuterFold(part, data, pooling, repeat, 0, options.folds)
        if not results.has(first.key):
            yield from (first._replace(fold=fold) for fold in range(options.folds))


def run(options: argparse.Namespace, results: ResultTable) -> None:
    """Measures what is missing, and stores a row when all its folds are complete."""
    missing = list(missing_folds(options, results))
    with explain_missing_data():
        for name in dict.fromkeys(outer.data for outer in missing):
            load(name, options.data_dir)  # reports missing files before any process starts
    folds: dict[OuterFold, list[dict[str, float]]] = defaultdict(list)
    with make_pool(options) as pool, tqdm(total=len(missing), unit="fold") as progress:
        for outer, found in pool.figures(missing, partial(measure, folder=options.data_dir)):
            progress.set_description(f"{outer.part}, repeat {outer.repeat}, {outer.data}, {outer.pooling}")
            progress.update()
            complete = folds[outer._replace(fold=0)]
            complete.append(found)
            if len(complete) == outer.folds:
                means = {name: statistics.mean(fold[name] for fold in complete) for name in found}
                results.add_figures(outer.key, means)

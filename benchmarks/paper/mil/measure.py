"""Multiple-instance learning on Tiger, Fox, Elephant and UCSB: Hopfield poolings on equal terms, and under corruption.

To run: AHOP_DATA_DIR=DIR python -m benchmarks.paper.mil run [--processes 14] [--minutes 18]
        python -m benchmarks.paper.mil report

- ``nested``: test AUC by ten-fold cross-validation, in the published folds where there are such. Hyper-parameters and
  the number of epochs are chosen on three inner folds of the training bags. Then three networks are trained on all of
  them, from other seeds, and their logits are averaged. The test bags are tested clean, and corrupted.
- ``corrupted``: all bags are corrupted, those for training and those for test; the first setting, without a search.

Corruptions are the paper's variants, drawn anew for each instance, of features in units of their deviation: a share of
the features is replaced by random values, noise is added, or a constant bias. Poolings: M-Hop (``dot``), S-Hop
(``sparse``), K-Hop (``kernel``), A-Hop (``adaptive``; ``adaptive x10``: with similarities that learn ten times as
fast), ``gated`` attention, and ``uniform`` weights: M-Hop's pooling with every instance weighing the same. All have the
same folds, seeds and settings to choose from.

A row is the mean over the folds of one repeat. Rows go to a CSV file as they come, repeat by repeat, and are not
measured again. After ``--minutes`` nothing new is begun; the same command goes on from there. docs/data.md says which
files are read.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmarks.harness.command import explain_missing_data
from benchmarks.harness.report import picture_for
from benchmarks.harness.rows import RESULTS, Rows
from benchmarks.paper.mil.report import PARTS, draw, report
from benchmarks.paper.mil.training import INNER_FOLDS, VARIANTS, Bags, choose, outer_folds, scores, settings, train

# isort: split
from examples.bags.data import DATA_SETS, BagSet
from examples.bags.model import BagClassifier, auc

DATA = ("tiger", "fox", "elephant", "ucsb")
POOLINGS = ("dot", "sparse", "kernel", "adaptive", "adaptive x10", "gated", "uniform")
NETWORKS = 3


class Job(NamedTuple):
    """One outer fold of one measurement."""

    part: str
    data: str
    pooling: str
    repeat: int
    fold: int
    folds: int


@cache
def load(name: str, where: Path) -> BagSet:
    """A data set, read once in each process."""
    return DATA_SETS[name](where)


def measure(job: Job, where: Path) -> dict[str, float]:
    """The figures of one fold; everything random follows from the repeat and the fold."""
    data, seed, offered = load(job.data, where), 1000 * job.repeat + job.fold, settings(job.data)
    kept, held = outer_folds(data, job.folds, job.repeat)[job.fold]

    def tested(models: list[BagClassifier], bags: Bags) -> float:
        chosen = bags.packed(held)
        return auc(data.labels[held], torch.stack([scores(model, *chosen) for model in models]).mean(0))

    if job.part == "nested":
        setting, epochs = choose(data, kept, job.pooling, offered, seed)
        clean, seeds = Bags(data, kept, setting.clip), (seed + 10_000 * number for number in range(NETWORKS))
        models = [train(clean, kept, job.pooling, setting, each, epochs)[0] for each in seeds]
        spoilt = {name: Bags(data, kept, setting.clip, variant, seed) for name, variant in VARIANTS.items()}
        found = {"auc": tested(models, clean), "epochs": epochs}
        return found | {name: tested(models, bags) for name, bags in spoilt.items()}
    setting, found = offered[0], {}
    for name, variant in VARIANTS.items():
        bags = Bags(data, kept, setting.clip, variant, seed)
        found[name] = tested([train(bags, kept, job.pooling, setting, seed, setting.epochs)[0]], bags)
    return found


_where, _deadline = Path(), 0.0


def _prepare(where: Path, deadline: float) -> None:
    """Tell a new process where the data lie and when to begin nothing more."""
    global _where, _deadline
    _where, _deadline = where, deadline
    torch.set_num_threads(1)


def _work(job: Job) -> tuple[Job, dict[str, float] | None]:
    return job, measure(job, _where) if time.time() < _deadline else None


def jobs(options: argparse.Namespace, rows: Rows) -> Iterator[Job]:
    """What the rows do not hold yet: all of a repeat before the next, and the search before what needs none."""
    for part in options.parts:
        for repeat in range(options.repeats):
            for data in options.data:
                for pooling in options.poolings:
                    first = Job(part, data, pooling, repeat, 0, options.folds)
                    if not rows.holds(row_key(first)):
                        yield from (first._replace(fold=fold) for fold in range(options.folds))


def row_key(job: Job) -> dict[str, str]:
    """What the row of all folds is found by; the settings are in it, so that others start anew."""
    count, epochs = len(settings(job.data)), settings(job.data)[0].epochs
    text = f"{job.folds} folds, {INNER_FOLDS} inner, {count} settings, {epochs} epochs, {NETWORKS} networks"
    return {"part": job.part, "data": job.data, "settings": text, "pooling": job.pooling, "repeat": str(job.repeat)}


def work(options: argparse.Namespace, todo: list[Job]) -> Iterator[tuple[Job, dict[str, float] | None]]:
    """The figures of all jobs as they come, from other processes or from this one."""
    prepared = (options.data_dir, time.time() + 60 * options.minutes)
    if options.processes == 1:
        _prepare(*prepared)
        yield from map(_work, todo)
    elif todo:
        with multiprocessing.get_context("spawn").Pool(options.processes, _prepare, prepared) as pool:
            yield from pool.imap_unordered(_work, todo)


def run(options: argparse.Namespace, rows: Rows) -> None:
    """Measure in parallel; a row is kept once all its folds are there."""
    todo = list(jobs(options, rows))
    with explain_missing_data():
        for name in dict.fromkeys(job.data for job in todo):
            load(name, options.data_dir)  # what is missing is said here, once
    done: dict[Job, list[dict[str, float]]] = defaultdict(list)
    with tqdm(total=len(todo), unit="fold") as progress:
        for job, found in work(options, todo):
            if found is None:
                continue
            progress.set_description(f"{job.part}, repeat {job.repeat}, {job.data}, {job.pooling}")
            progress.update()
            group = done[job._replace(fold=0)]
            group.append(found)
            if len(group) == job.folds:
                rows.add(row_key(job), {name: statistics.mean(fold[name] for fold in group) for name in found})
    if progress.n < len(todo):
        print(f"stopped after {options.minutes:g} minutes; the same command goes on from here")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("run", "report"):
        add = commands.add_parser(command).add_argument
        add("--output", type=Path, default=RESULTS / "mil.csv", help="the rows (benchmarks/results/mil.csv)")
        add("--picture", type=Path, help="of AUC against strength (docs/pictures; for another output, beside it)")
        if command == "run":
            home = os.environ.get("AHOP_DATA_DIR", "data")
            add("--data-dir", type=Path, default=Path(home), help="folder with mil/ (AHOP_DATA_DIR, else data)")
            add("--parts", nargs="+", choices=PARTS, default=tuple(PARTS), help=" ".join(PARTS))
            add("--data", nargs="+", choices=DATA, default=DATA, help=" ".join(DATA))
            add("--poolings", nargs="+", choices=POOLINGS, default=POOLINGS, help=" ".join(POOLINGS))
            add("--folds", type=int, default=10, help="outer folds (10)")
            add("--repeats", type=int, default=5, help="each with other folds and seeds (5)")
            add("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="how many at a time")
            add("--minutes", type=float, default=float("inf"), help="begin nothing more after so many")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    options = parse(arguments)
    torch.set_num_threads(1)
    rows = Rows(options.output)
    if options.command == "run":
        rows.about("cpu")
        run(options, rows)
    print(report(rows.rows))
    picture = options.picture or picture_for(options.output, "mil")
    if draw(rows.rows, picture):
        print(f"\npicture: {picture}")


if __name__ == "__main__":
    main()

"""Memory retrieval, as the paper's figure and tables have it: how often the pattern behind a query is found.

To run: python -m benchmarks.paper.retrieval [--table figure|accuracy|ablations|timing|all] [--quick] [--device cuda]

Patterns are drawn anew in every run, and so are the signs of the bias. Queries are mixed variants, drawn as the paper's
appendix says: noise of variance d_noise, then a share d_mask of the dimensions replaced by uniform values, then a bias
of fixed random signs and size d_bias. Accuracy counts queries whose pattern is the one nearest to what is read out,
error is squared and per dimension, both on queries that no fit has seen. In brackets stand the paper's figures, below
them the Bayes limit: the accuracy of the exact maximum-a-posteriori decision, for one who knows the bias and for one
who must guess its signs from the query at hand. Sorted similarities forget which dimension is which, so no A-Hop
without de-biasing can pass the latter. Where a figure of the paper does, its queries cannot have been drawn and scored
in this way.

A measured row is kept at once, and not measured again on the same device: an interrupted run goes on where it was.
MNIST lies in ``--data-dir``, AHOP_DATA_DIR or data (see docs/data.md); without it its columns are left out.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ahop_layers.memory.memory import AssociativeMemory
from ahop_layers.variants import Mixed, bayes_accuracy, retrieval_accuracy, retrieval_error
from benchmarks.harness.command import explain_missing_data
from benchmarks.harness.report import Row, picture_for
from benchmarks.harness.rows import RESULTS, origin, read, replaced, write
from benchmarks.paper.retrieval import report
from benchmarks.paper.retrieval.systems import SYSTEMS, ReferenceSimilarity, data_folder, mnist, synthetic

LIMITS = {"Bayes limit": True, "Bayes limit, bias guessed": False}
KEY = ("data", "patterns", "dim", "mask", "noise", "bias", "system", "run", "steps", "batch")


@dataclass(frozen=True)
class Job:
    """One row to measure; the row of the same job is never measured twice."""

    data: str
    patterns: int
    dim: int
    mask: float
    noise: float
    bias: float
    system: str
    run: int
    steps: int
    batch: int

    @property
    def key(self) -> tuple[str, ...]:
        """What the row is found by."""
        return tuple(str(value) for value in asdict(self).values())


class Budget(NamedTuple):
    """Steps of a fit, and queries a step."""

    steps: int
    batch: int


class Size(NamedTuple):
    """How large a benchmark is: the full one, or a small version for a CPU."""

    runs: int = 5
    queries: int = 2000
    patterns: tuple[int, ...] = (2048, 4096)
    dim: int = 64
    figure: Budget = Budget(200, 256)
    synthetic: Budget = Budget(600, 512)
    images: Budget = Budget(100, 256)
    ablations: Budget = Budget(300, 256)
    timing: Budget = Budget(200, 512)
    timed: tuple[tuple[int, int], ...] = ((64, 2048), (128, 2048), (256, 2048), (64, 4096), (64, 8192))


SMALL = Budget(25, 32)
QUICK = Size(
    runs=1, queries=200, patterns=(96,), dim=24, figure=SMALL, synthetic=Budget(50, 64), ablations=SMALL,
    timing=Budget(10, 32), timed=((16, 96), (24, 96)),
)  # fmt: skip


def jobs(table: str, size: Size, images: bool) -> list[Job]:
    """The rows of one table."""
    settings: list[tuple[str, int, int, tuple[float, float, float], Budget]] = []
    if table == "figure":
        systems = report.FIGURE_SYSTEMS
        for patterns, levels in product(size.patterns, report.FIGURE_LEVELS):
            settings.append(("synthetic", patterns, size.dim, levels, size.figure))
    else:
        systems = report.ACCURACY_SYSTEMS if table == "accuracy" else report.ABLATION_SYSTEMS
        budget = size.synthetic if table == "accuracy" else size.ablations
        for level in (0.4, 0.5):
            settings.append(("synthetic", size.patterns[0], size.dim, (level,) * 3, budget))
        for level in (0.6, 0.7) if table == "accuracy" and images else ():
            settings.append(("mnist", size.patterns[0], 784, (level,) * 3, size.images))
    found = []
    for (data, patterns, dim, levels, budget), system, run in product(settings, systems, range(size.runs)):
        fits = system in SYSTEMS and SYSTEMS[system].lr > 0
        found.append(Job(data, patterns, dim, *levels, system, run, *(budget if fits else Budget(0, 0))))
    return found


def rows_of(jobs: Sequence[Job], rows: Sequence[Row]) -> list[Row]:
    """The row of each job that has one, in the order of the jobs."""
    kept = {tuple(row[name] for name in KEY): row for row in rows}
    return [kept[job.key] for job in jobs if job.key in kept]


def measure(job: Job, size: Size, patterns: Tensor) -> dict[str, float]:
    """Accuracy and error of a system, or a Bayes limit, on fresh queries."""
    variant = Mixed(job.mask, job.noise, job.bias, seed=job.run)
    generator = torch.Generator(patterns.device).manual_seed(1000 + job.run)
    queries = size.queries if job.data == "synthetic" else size.queries // 4
    if job.system in LIMITS:
        return {"accuracy": bayes_accuracy(variant, patterns, queries, generator, bias_known=LIMITS[job.system])}
    memory = SYSTEMS[job.system].fitted(patterns, variant, job.steps, job.batch, job.run)
    index, query = variant.sample(patterns, queries, generator)
    return {"accuracy": retrieval_accuracy(memory, index, query), "error": retrieval_error(memory, index, query)}


def median_milliseconds(work: Callable[[], object]) -> float:
    """The median of twenty calls; of fewer, but three, once a second has passed."""
    times: list[float] = []
    while len(times) < 3 or (len(times) < 20 and sum(times) < 1000):
        start = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def timings(size: Size, device: torch.device) -> list[dict[str, object]]:
    """Milliseconds of a fit and of a recall, by dimensions and patterns; and those of the reference on a CPU."""
    rows: list[dict[str, object]] = []
    variant = Mixed(0.4, 0.4, 0.4)

    def clock(memory: AssociativeMemory, steps: int) -> tuple[float, float]:
        query = variant.sample(memory.patterns, size.timing.batch)[1]
        memory.fit(variant, epochs=2, batch=size.timing.batch, progress=False)  # kernels are loaded or compiled
        memory.recall(query)
        start = time.perf_counter()
        memory.fit(variant, epochs=steps, batch=size.timing.batch, progress=False)[-1].item()
        train = 1000 * (time.perf_counter() - start)
        return train * size.timing.steps / steps, median_milliseconds(lambda: memory.recall(query)[-1].item())

    enough = size.timing.steps if device.type == "cuda" else 5  # on a CPU a few of the steps tell the time of all
    for dim, count in size.timed:
        patterns = synthetic(count, dim, 0).to(device)
        for system in ("A-Hop, debias", "A-Hop, debias, table", "table alone, debias", "unsorted, U"):
            train, infer = clock(SYSTEMS[system].build(patterns), enough)
            rows.append({"dim": dim, "patterns": count, "system": system, "train_ms": train, "recall_ms": infer})
    dim, count = size.timed[0]
    plain = AssociativeMemory(synthetic(count, dim, 0), ReferenceSimilarity(dim, debias=True))
    train, infer = clock(plain, 3)
    rows.append({"dim": dim, "patterns": count, "system": "reference, CPU", "train_ms": train, "recall_ms": infer})
    return [{**row, "steps": size.timing.steps, "batch": size.timing.batch} for row in rows]


def main() -> None:
    """Measure what is missing, print the tables, draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", default="all", choices=["figure", "accuracy", "ablations", "timing", "all"])
    parser.add_argument("--runs", type=int, help="runs of each row (5; with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="a small version: few patterns, few steps, no MNIST")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda where there is one (auto)")
    parser.add_argument("--data-dir", type=Path, help="folder with mnist/ (AHOP_DATA_DIR, else data)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the rows (benchmarks/results)")
    args = parser.parse_args()
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device, size = torch.device("cuda" if cuda else "cpu"), QUICK if args.quick else Size()
    size = size if args.runs is None else size._replace(runs=args.runs)
    with explain_missing_data():
        folder = None if args.quick else data_folder(args.data_dir)
    tables = ["figure", "accuracy", "ablations", "timing"] if args.table == "all" else [args.table]
    about = origin(device.type)
    suffix = "_quick" if args.quick else ""
    path = args.output / f"retrieval{suffix}.csv"

    by_table = {table: jobs(table, size, folder is not None) for table in tables if table != "timing"}
    wanted = list(dict.fromkeys(job for each in by_table.values() for job in each))
    rows: list[dict[str, object]] = [dict(row) for row in read(path)]
    here = about["device"]
    done = {tuple(str(row[name]) for name in KEY) for row in rows if row["device"] == here}
    missing = sorted((job for job in wanted if job.key not in done), key=lambda job: (job.data, job.patterns, job.run))
    patterns, held = torch.empty(0), None
    for job in tqdm(missing, desc="retrieval", unit="row", disable=None):
        source = (job.data, job.patterns, job.dim, job.run)
        if source != held:
            drawn = mnist(folder, job.patterns, job.run) if job.data == "mnist" and folder else synthetic(*source[1:])
            patterns, held = drawn.to(device), source
        blank = {"accuracy": "", "error": ""}
        rows.append({**asdict(job), **blank, **measure(job, size, patterns), **about})
        write(path, rows)

    mine = [row for row in read(path) if row["device"] == here]
    for table, each in by_table.items():
        print(report.TABLES[table](rows_of(each, mine)), end="\n\n")
    if "timing" in tables:
        timed = [{name: str(value) for name, value in {**row, **about}.items()} for row in timings(size, device)]
        timings_path = args.output / f"retrieval_timing{suffix}.csv"
        write(timings_path, replaced(read(timings_path), timed, "device"))
        print(report.timing_table(timed))
    if "figure" in tables:
        print(f"picture: {report.draw(rows_of(by_table['figure'], mine), picture_for(path, 'retrieval'))}")


if __name__ == "__main__":
    main()

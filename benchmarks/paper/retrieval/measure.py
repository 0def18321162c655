"""The measurements of the retrieval benchmark: accuracy and error of memories, time of a fit and of a recall."""

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

from ahop_layers.memory.variants import Mixed
from benchmarks.harness.memory import least_seconds
from benchmarks.harness.rows import ResultTable
from benchmarks.paper.networks import NETWORKS, Network
from benchmarks.paper.retrieval import report
from benchmarks.paper.retrieval.accuracy import bayes_accuracy, retrieval_accuracy, retrieval_error
from benchmarks.paper.retrieval.systems import SYSTEMS, ReferenceSimilarity, mnist, synthetic
from benchmarks.paper.training import train

BIAS_KNOWN = {report.LIMIT: True, report.GUESSED: False}
"""Whether a Bayes limit is that of a known bias."""


@dataclass(frozen=True)
class Measurement:
    """One row: a system on the patterns and queries of one run."""

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
    def source(self) -> tuple[str, int, int, int]:
        """The arguments that determine the stored patterns."""
        return self.data, self.patterns, self.dim, self.run


class Budget(NamedTuple):
    """Steps of a fit, and queries per step."""

    steps: int
    batch: int


class Size(NamedTuple):
    """Size of the benchmark."""

    runs: int = 5
    queries: int = 2000
    patterns: tuple[int, ...] = (2048, 4096)
    dim: int = 64
    figure: Budget = Budget(200, 256)
    synthetic: Budget = Budget(600, 512)
    images: Budget = Budget(100, 256)
    ablations: Budget = Budget(300, 256)
    concepts: tuple[int, ...] = (128, 256, 512, 1024)
    multimodal: Budget = Budget(100, 256)
    timing: Budget = Budget(200, 512)
    timed: tuple[tuple[int, int], ...] = ((64, 2048), (128, 2048), (256, 2048), (64, 4096), (64, 8192))


SMALL = Budget(25, 32)
QUICK = Size(
    runs=1, queries=200, patterns=(96,), dim=24, figure=SMALL, synthetic=Budget(50, 64), ablations=SMALL,
    concepts=(32, 64), multimodal=SMALL, timing=Budget(10, 32), timed=((16, 96), (24, 96)),
)  # fmt: skip


def measurements(table: str, size: Size, images: bool) -> list[Measurement]:
    """Returns the measurements of one table, those on MNIST only with ``images``."""
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
        trained = system in SYSTEMS and SYSTEMS[system].lr > 0
        found.append(Measurement(data, patterns, dim, *levels, system, run, *(budget if trained else Budget(0, 0))))
    return found


def measure(wanted: Measurement, size: Size, patterns: Tensor) -> dict[str, float]:
    """Measures accuracy and error of a system, or a Bayes limit, on new queries."""
    variant = Mixed(wanted.mask, wanted.noise, wanted.bias, seed=wanted.run)
    generator = torch.Generator(patterns.device).manual_seed(1000 + wanted.run)
    queries = size.queries if wanted.data == "synthetic" else size.queries // 4
    if wanted.system in BIAS_KNOWN:
        known = BIAS_KNOWN[wanted.system]
        return {"accuracy": bayes_accuracy(variant, patterns, queries, generator, bias_known=known)}
    memory = SYSTEMS[wanted.system].fitted(patterns, variant, wanted.steps, wanted.batch, wanted.run)
    index, query = variant.sample(patterns, queries, generator)
    return {"accuracy": retrieval_accuracy(memory, index, query), "error": retrieval_error(memory, index, query)}


def measure_missing(
    wanted: Sequence[Measurement], size: Size, folder: Path | None, device: torch.device, results: ResultTable
) -> None:
    """Measures and stores what the results do not have yet for this device."""
    missing = [each for each in dict.fromkeys(wanted) if not results.has(asdict(each))]
    missing.sort(key=lambda each: (each.data, each.patterns, each.run))
    patterns, source = torch.empty(0), None
    for each in tqdm(missing, desc="retrieval", unit="row", disable=None):
        if each.source != source:
            source = each.source
            images = each.data == "mnist" and folder is not None
            drawn = mnist(folder, each.patterns, each.run) if images else synthetic(*source[1:])
            patterns = drawn.to(device)
        results.add({**asdict(each), "accuracy": "", "error": "", **measure(each, size, patterns)})


def median_milliseconds(call: Callable[[], object]) -> float:
    """Returns the median time of 20 calls, or of fewer, but at least three, after a second in total."""
    times: list[float] = []
    while len(times) < 3 or (len(times) < 20 and sum(times) < 1000):
        times.append(1000 * least_seconds(call, "cpu", 1))
    return statistics.median(times)


def timings(size: Size, device: torch.device) -> list[dict[str, object]]:
    """Measures the milliseconds of a fit and of a recall by dimensions and patterns, and those of the CPU reference."""
    rows: list[dict[str, object]] = []
    variant = Mixed(0.4, 0.4, 0.4)
    steps, batch = size.timing

    def measure_times(network: Network, system: str, timed_steps: int) -> None:
        query = variant.sample(network.patterns, batch)[1]
        train(network, variant, 2, batch=batch)  # loads or compiles the kernels
        network.recall(query)
        start = time.perf_counter()
        train(network, variant, timed_steps, batch=batch)[-1].item()
        fit = 1000 * (time.perf_counter() - start) * steps / timed_steps
        recall = median_milliseconds(lambda: network.recall(query)[-1].item())
        count, dim = network.patterns.shape
        rows.append({
            "dim": dim, "patterns": count, "system": system, "train_ms": fit, "recall_ms": recall, "steps": steps,
            "batch": batch,
        })  # fmt: skip

    builds = {name: NETWORKS[name] for name in ("A-Hop, debias", "A-Hop, debias, table")}
    builds |= {name: SYSTEMS[name].build for name in ("table alone, debias", "unsorted, U")}

    for dim, count in size.timed:
        patterns = synthetic(count, dim, 0).to(device)
        for system, build in builds.items():
            # A CPU is slow: time a few steps and extrapolate.
            measure_times(build(patterns), system, steps if device.type == "cuda" else 5)
    dim, count = size.timed[0]
    reference = Network(synthetic(count, dim, 0), ReferenceSimilarity(dim, debias=True))
    measure_times(reference, report.REFERENCE, 3)
    return rows

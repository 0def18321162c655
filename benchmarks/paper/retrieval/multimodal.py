"""Multimodal retrieval: a query finds its concept in one memory, and its trace finds the other side in a second memory.

A concept has two sides, each stored in a memory of its own. Phase 1 retrieves the concept of a damaged first side.
That concept links to its trace, a damaged copy of its second side. Phase 2 retrieves the second side of the trace. A
query counts as right if both phases find its concept.

The paper describes neither the data nor the levels of its table. Here both sides are handwritten digits of
scikit-learn, which need no download and suffice for 1024 concepts. The figures of the paper are of another task.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import groupby, product

import torch
from tqdm import tqdm

from ahop_layers.memory.variants import Mixed
from benchmarks.harness.rows import ResultTable
from benchmarks.paper.figures import MULTIMODAL
from benchmarks.paper.retrieval.accuracy import Memory, nearest_to_readout
from benchmarks.paper.retrieval.measure import Size
from benchmarks.paper.retrieval.systems import SYSTEMS, digit_pairs

QUERY_LEVELS, TRACE_LEVELS = (0.2, 0.05, 0.6), (0.1, 0.002, 0.6)
"""Mask, noise and bias of the queries and of the traces."""

# K2-Hop learns a matrix: with 1024 digits, a larger learning rate and more steps, which are cheap, improve it.
MEMORIES = {**SYSTEMS, "K2-Hop": replace(SYSTEMS["K2-Hop"], lr=0.01)}
MORE_STEPS = {"K2-Hop": 4}
"""System -> its number of steps as a multiple of the others'."""


@dataclass(frozen=True)
class TwoPhases:
    """One row: the systems of phase 1 and phase 2 on the concepts and queries of one run."""

    data: str
    concepts: int
    mask_1: float
    noise_1: float
    bias_1: float
    mask_2: float
    noise_2: float
    bias_2: float
    system_1: str
    system_2: str
    run: int
    steps_1: int
    steps_2: int
    batch: int

    @property
    def source(self) -> tuple[int, int]:
        """The arguments that determine the concepts."""
        return self.concepts, self.run


def measurements(size: Size) -> list[TwoPhases]:
    """Returns the measurements of the table: the pairs of systems of the paper, by number of concepts and run."""
    found, (steps, batch) = [], size.multimodal
    for concepts, pair, run in product(size.concepts, MULTIMODAL, range(size.runs)):
        taken = [steps * MORE_STEPS.get(system, 1) if MEMORIES[system].lr else 0 for system in pair]
        found.append(TwoPhases("digits", concepts, *QUERY_LEVELS, *TRACE_LEVELS, *pair, run, *taken, batch))
    return found


def accuracies(wanted: Sequence[TwoPhases], queries: int, device: torch.device) -> Iterator[float]:
    """Yields the accuracy of each pair of systems, all for the same concepts. A system is fitted once to each side."""
    first = wanted[0]
    generator = torch.Generator(device).manual_seed(1000 + first.run)
    sides = [side.to(device) for side in digit_pairs(*first.source)]
    variants = [
        Mixed(first.mask_1, first.noise_1, first.bias_1, seed=2 * first.run),
        Mixed(first.mask_2, first.noise_2, first.bias_2, seed=2 * first.run + 1),
    ]
    index, query = variants[0].sample(sides[0], queries, generator)
    traces = variants[1](sides[1], generator)

    @cache
    def memory(side: int, system: str, steps: int) -> Memory:
        return MEMORIES[system].fitted(sides[side], variants[side], steps, first.batch, first.run)

    for each in wanted:
        concept = nearest_to_readout(memory(0, each.system_1, each.steps_1), query)
        found = nearest_to_readout(memory(1, each.system_2, each.steps_2), traces[concept])
        yield ((concept == index) & (found == index)).double().mean().item()


def measure_missing(wanted: Sequence[TwoPhases], size: Size, device: torch.device, results: ResultTable) -> None:
    """Measures and stores what the results do not have yet for this device."""
    missing = [each for each in wanted if not results.has(asdict(each))]
    missing.sort(key=lambda each: each.source)
    with tqdm(total=len(missing), desc="multimodal", unit="row", disable=None) as progress:
        for _, group in groupby(missing, lambda each: each.source):
            pairs = list(group)
            for each, accuracy in zip(pairs, accuracies(pairs, size.queries, device), strict=True):
                results.add({**asdict(each), "accuracy": accuracy})
                progress.update()

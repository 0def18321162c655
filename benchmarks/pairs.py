"""How many pairs a fit of a memory needs: accuracy of search against the number of pairs.

To run: python -m benchmarks.pairs [--seeds 5] [--device cuda]

Stores 500 embeddings of 64 dimensions and norm 1. Queries have Gaussian noise, with half the deviation of an embedding,
and each of their dimensions is erased with probability 0.7. A pair is a query and the index of its embedding. Each fit
takes at least five epochs and about 100 steps. Accuracy is that of 2,000 further queries: the fraction whose embedding
has the largest score. The row without pairs has the initial dot product, that of ``described`` is fitted to a variant
with the same damage, which draws new queries in each step.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ahop_layers.memory.memory import AssociativeMemory
from ahop_layers.variants import Custom
from benchmarks.harness.command import make_parser
from benchmarks.harness.report import GRAY, drawing, group, picture_for, table
from benchmarks.harness.rows import RESULTS, ResultTable, Row

COUNTS = (0, 100, 250, 500, 1000, 2000, 4000, 8000, 16000)
DESCRIBED = "described"
PATTERNS, DIM, QUERIES, BATCH = 500, 64, 2000, 512


def damage(origin: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Adds noise to embeddings ``(n, d)``, and erases each dimension with probability 0.7."""
    noise = torch.empty_like(origin).normal_(generator=generator) * (0.5 / math.sqrt(origin.shape[1]))
    kept = torch.empty_like(origin).uniform_(generator=generator) >= 0.7
    return (origin + noise) * kept


def epochs_for(count: int) -> int:
    """Returns the number of epochs for ``count`` pairs."""
    return max(5, 100 // math.ceil(0.9 * count / BATCH))  # a tenth is held out


def measure(pairs: str, seed: int, device: torch.device) -> float:
    """Returns the accuracy after a fit with a number of pairs, or with described damage."""
    generator = torch.Generator(device).manual_seed(seed)
    patterns = normalize(torch.randn(PATTERNS, DIM, generator=generator, device=device), dim=-1)
    described = Custom(damage)
    index, query = described.sample(patterns, QUERIES, generator)
    memory = AssociativeMemory.preset("A-Hop", patterns)
    if pairs == DESCRIBED:
        memory.fit(described, epochs=100, batch=BATCH, progress=False, seed=seed)
    elif int(pairs):
        data = described.sample(patterns, int(pairs), generator)
        memory.fit(data, epochs=epochs_for(int(pairs)), batch=BATCH, progress=False, seed=seed)
    return (memory.recall(query) == index).double().mean().item()


def report(rows: Sequence[Row]) -> str:
    """Mean and standard deviation over the seeds, a line for each number of pairs."""
    body = []
    for (pairs,), here in group(rows, "pairs").items():
        values = [float(row["accuracy"]) for row in here]
        deviation = f"{stdev(values):.3f}" if len(values) > 1 else ""
        name = {"0": "none: the dot product", DESCRIBED: "none: the damage is described"}.get(pairs)
        body.append([name or f"{int(pairs):,}", f"{mean(values):.3f}", deviation])
    return table(["pairs", "accuracy", "standard deviation"], body)


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Draws accuracy against the number of pairs."""
    means = {pairs: mean(float(row["accuracy"]) for row in here) for (pairs,), here in group(rows, "pairs").items()}
    counts = [pairs for pairs in means if pairs not in ("0", DESCRIBED)]
    with drawing(path, (6, 3.4)) as figure:
        axis = figure.subplots()
        axis.semilogx([int(pairs) for pairs in counts], [means[pairs] for pairs in counts], label="fitted")
        if "0" in means:
            axis.axhline(means["0"], color=GRAY, linestyle=":", label="dot product")
        if DESCRIBED in means:
            axis.axhline(means[DESCRIBED], color=GRAY, linestyle="--", label="described damage")
        axis.set(xlabel="pairs", ylabel="accuracy")
        axis.grid()
        axis.legend(frameon=False)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the missing rows, prints the table, and draws the plot."""
    parser = make_parser("pairs", __doc__)
    add = parser.add_argument
    add("--pairs", nargs="+", type=int, choices=COUNTS, default=COUNTS, help="numbers of pairs (default: all)")
    add("--seeds", type=int, default=5, help="seeds of patterns, queries and fits (default: %(default)s)")
    add("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    add("--output", type=Path, default=RESULTS / "pairs.csv", help="CSV file (default: %(default)s)")
    options = parser.parse_args(arguments)
    results = ResultTable(options.output, options.device)
    for pairs in (*map(str, options.pairs), DESCRIBED):
        for seed in range(options.seeds):
            key = {"pairs": pairs, "seed": seed}
            if not results.has(key):
                results.add({**key, "accuracy": f"{measure(pairs, seed, torch.device(options.device)):.4f}"})
    print(report(results.own_rows))
    print(f"plot: {draw(results.own_rows, picture_for(options.output, 'pairs'))}")


if __name__ == "__main__":
    main()

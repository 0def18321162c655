"""Time, memory and recall of the search for patterns, and what it would take for a billion of them.

To run: python -m benchmarks.search_costs [--device cuda] [--parts exact,shortlist,recall] [--help]

- ``exact``: seconds and peak memory of ``search`` with k 10 for numbers of patterns with 64 dimensions.
- ``shortlist``: the same with a shortlist, whose first stage is a matrix product.
- ``recall``: how often a shortlist has the pattern that a search of all patterns finds, under weak and strong
  damage, and the accuracy of both.

The memory excludes the patterns. The similarity has random weights, so that all footprints are sorted. The report
extrapolates the largest measurement of each part to 10^9 patterns, in proportion to their number.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import ahop_layers as ah
from benchmarks.harness.command import make_parser
from benchmarks.harness.memory import peak, reset_peak
from benchmarks.harness.report import bold_best, group, table
from benchmarks.harness.rows import RESULTS, ResultTable, Row

PARTS = ("exact", "shortlist", "recall")
SIZES = {"cpu": (10_000, 100_000, 1_000_000), "cuda": (10_000, 100_000, 1_000_000, 5_000_000, 20_000_000)}
TARGET = 10**9
KEY = ("part", "patterns", "dim", "queries", "k", "damage", "shortlist")
DAMAGES = {
    "weak: 20 % replaced": ah.variants.Mixed(0.2),
    "strong: 60 % replaced": ah.variants.Mixed(0.6),
    "outliers: 40 % replaced, values up to 4": ah.variants.Mixed(0.4, low=-4, high=4),
}


def make_patterns(count: int, dim: int, device: str) -> torch.Tensor:
    """Returns patterns that are uniform in [-1, 1]."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(count, dim, generator=generator, device=device).mul_(2).sub_(1)


def make_memory(patterns: torch.Tensor) -> ah.AssociativeMemory:
    """Returns a memory with random positive weights, which need a full sort."""
    memory = ah.AssociativeMemory(patterns, "adaptive", check=False)
    torch.manual_seed(0)
    torch.nn.init.uniform_(memory.similarity.w)
    torch.nn.init.ones_(memory.similarity.beta)
    return memory


def seconds_of(call: Callable[[], object], device: str, repeats: int) -> float:
    """Returns the shortest time of several calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_times(options: argparse.Namespace, results: ResultTable) -> None:
    """Measures the parts ``exact`` and ``shortlist``."""
    largest = make_patterns(max(options.sizes), options.dim, options.device)
    shortlists = {"exact": None, "shortlist": options.shortlist}
    for count in options.sizes:
        memory = make_memory(largest[:count])
        for part in [part for part in shortlists if part in options.parts]:
            for queries in options.queries:
                x = memory.patterns[:queries] + 0.1

                def search(x: torch.Tensor = x, memory: ah.AssociativeMemory = memory, part: str = part) -> object:
                    return memory.search(x, min(options.k, len(memory.patterns)), shortlists[part])

                search()  # loads the kernels and keeps the norms
                before = reset_peak(options.device)
                search()
                most = max(0, peak(options.device) - before)
                seconds = seconds_of(search, options.device, options.repeats)
                key = (part, count, options.dim, queries, options.k, "", shortlists[part] or "")
                figures = {"seconds": f"{seconds:.4g}", "bytes": most, "measure": "", "value": ""}
                results.replace([dict(zip(KEY, key, strict=True)) | figures], *KEY)
                size = f"{count:,} patterns, {queries} queries"
                print(f"{part}: {size}: {seconds:.4f} s, {most / 1e6:.0f} MB", flush=True)


def measure_recall(options: argparse.Namespace, results: ResultTable) -> None:
    """Measures the part ``recall``."""
    patterns = make_patterns(options.recall_patterns, options.dim, options.device)
    for name, variant in DAMAGES.items():
        fitted = ah.AssociativeMemory(patterns[:2000], "adaptive")
        fitted.fit(variant)
        memory = ah.AssociativeMemory(patterns, fitted.similarity)
        generator = torch.Generator(options.device).manual_seed(1)
        index, query = variant.sample(patterns, options.recall_queries, generator)
        exact = memory.recall(query)
        for m in options.recall_shortlists:
            found = memory.search(query, 1, shortlist=m)[1][:, 0]
            figures = {"recall": found == exact, "accuracy": found == index, "exact accuracy": exact == index}
            key = ("recall", len(patterns), options.dim, options.recall_queries, 1, name, m)
            shown = {measure: values.double().mean().item() for measure, values in figures.items()}
            base = dict(zip(KEY, key, strict=True)) | {"seconds": "", "bytes": ""}
            results.replace([base | {"measure": each, "value": f"{shown[each]:.4f}"} for each in shown], *KEY)
            print(f"{name}, shortlist {m}: {shown}", flush=True)


def report(rows: Sequence[Row]) -> str:
    """Returns tables of the times and of the recall."""
    parts = []
    times = [row for row in rows if row["part"] != "recall"]
    if times:
        body = []
        for (patterns, queries), mine in group(times, "patterns", "queries").items():
            seconds = bold_best([f"{float(row['seconds']):.4f}" for row in mine], min)
            for row, shown in zip(mine, seconds, strict=True):
                memory = f"{int(row['bytes']) / 1e6:,.0f}"
                body.append([f"{int(patterns):,}", queries, row["shortlist"] or "none", shown, memory])
        parts.append(table(["patterns", "queries", "shortlist", "seconds", "memory, MB"], body))
        parts.append(extrapolation(times))
    figures = group([row for row in rows if row["part"] == "recall"], "damage", "shortlist")
    if figures:
        header = ["damage", "shortlist", "recall", "accuracy", "accuracy of an exact search"]
        body = [[*key, *(f"{float(row['value']):.3f}" for row in mine)] for key, mine in figures.items()]
        parts.append(table(header, body))
    return "\n\n".join(parts)


def extrapolation(rows: Sequence[Row]) -> str:
    """Returns a table of the time and memory that 10^9 patterns would take, in proportion to the largest measurement.

    Time and the memory of the patterns are shared out among devices by ``shard_``. A device holds at most 100 GB.
    """
    body = []
    for (part, queries, dim), mine in group(rows, "part", "queries", "dim").items():
        largest = max(mine, key=lambda row: int(row["patterns"]))
        size = 4 * int(dim) * TARGET
        devices = -(-size // 10**11)
        seconds = float(largest["seconds"]) * TARGET / int(largest["patterns"])
        shown = [f"{size / 1e9:.0f}", str(devices), f"{seconds:.2f}", f"{seconds / devices:.2f}"]
        body.append([part, queries, f"{int(largest['patterns']):,}", *shown])
    header = ["search", "queries", "measured with", "patterns, GB", "devices of 100 GB", "seconds, one", "seconds, all"]
    return f"Extrapolated to {TARGET:,} patterns:\n\n{table(header, body)}"


def integers(text: str) -> list[int]:
    """Parses integers separated by commas."""
    return [int(float(part)) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the chosen parts and prints a report."""
    parser = make_parser("search_costs", __doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to measure (default: %(default)s)")
    parser.add_argument("--sizes", type=integers, help="numbers of patterns (default: 1e4 to 1e6, on cuda to 2e7)")
    parser.add_argument("--queries", type=integers, default=[1, 2, 64], help="numbers of queries (default: 1,2,64)")
    parser.add_argument("--output", type=Path, default=RESULTS / "search_costs.csv", help="file (default: %(default)s)")
    for name, default, text in (
        ("dim", 64, "dimensions of a pattern"),
        ("k", 10, "number of patterns to find"),
        ("shortlist", 1000, "length of the shortlist"),
        ("repeats", 3, "number of timed searches, of which the fastest counts"),
        ("recall-patterns", 200_000, "number of patterns of the part recall"),
        ("recall-queries", 500, "number of queries of the part recall"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    shortlists = [100, 1000, 10_000]
    parser.add_argument("--recall-shortlists", type=integers, default=shortlists, help="default: 100,1000,10000")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"--parts must be out of {', '.join(PARTS)}, got {', '.join(unknown)}")
    options.sizes = options.sizes or SIZES["cuda" if options.device == "cuda" else "cpu"]
    results = ResultTable(options.output, options.device)
    if {"exact", "shortlist"} & set(options.parts):
        measure_times(options, results)
    if "recall" in options.parts:
        measure_recall(options, results)
    print(report(results.own_rows))


if __name__ == "__main__":
    main()

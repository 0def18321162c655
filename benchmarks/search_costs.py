"""Time and memory of the exact search for patterns, and what it would take for a billion of them.

To run: python -m benchmarks.search_costs [--device cuda] [--recall] [--help]

Seconds and peak memory of ``search`` with k 10 for numbers of patterns with 64 dimensions. The memory excludes the
patterns. The similarity has random weights, so that all footprints are sorted. The report extrapolates the largest
measurement to 10^9 patterns, in proportion to their number.

With --recall, recall and seconds a query of the default similarity after a fit, exact and with shortlists, and of FAISS
indices of vectors, for correlated patterns with up to 80 % of the values of a query replaced or missing. Needs FAISS.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import ahop_layers as ah
from benchmarks import search_recall
from benchmarks.harness.command import make_parser
from benchmarks.harness.memory import peak, reset_peak
from benchmarks.harness.report import group, table
from benchmarks.harness.rows import RESULTS, ResultTable, Row

SIZES = {"cpu": (10_000, 100_000, 1_000_000), "cuda": (10_000, 100_000, 1_000_000, 5_000_000, 20_000_000)}
TARGET = 10**9
KEY = ("patterns", "dim", "queries", "k")


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


def measure(options: argparse.Namespace, results: ResultTable) -> None:
    """Measures searches of all numbers of patterns and of queries."""
    largest = make_patterns(max(options.sizes), options.dim, options.device)
    for count in options.sizes:
        memory = make_memory(largest[:count])
        for queries in options.queries:
            x = memory.patterns[:queries] + 0.1

            def search(x: torch.Tensor = x, memory: ah.AssociativeMemory = memory) -> object:
                return memory.search(x, min(options.k, len(memory.patterns)))

            search()  # loads the kernels
            before = reset_peak(options.device)
            search()
            most = max(0, peak(options.device) - before)
            seconds = seconds_of(search, options.device, options.repeats)
            key = dict(zip(KEY, (count, options.dim, queries, options.k), strict=True))
            results.replace([key | {"seconds": f"{seconds:.4g}", "bytes": most}], *KEY)
            print(f"{count:,} patterns, {queries} queries: {seconds:.4f} s, {most / 1e6:.0f} MB", flush=True)


def report(rows: Sequence[Row]) -> str:
    """Returns tables of the times, and of what a billion patterns would take."""
    body = [
        [f"{int(row['patterns']):,}", row["queries"], f"{float(row['seconds']):.4f}", f"{int(row['bytes']) / 1e6:,.0f}"]
        for row in rows
    ]
    return "\n\n".join([table(["patterns", "queries", "seconds", "memory, MB"], body), extrapolation(rows)])


def extrapolation(rows: Sequence[Row]) -> str:
    """Returns a table of the time and memory that 10^9 patterns would take, in proportion to the largest measurement.

    Time and the memory of the patterns are shared out among devices by ``shard_``. A device holds at most 100 GB.
    """
    body = []
    for (queries, dim), mine in group(rows, "queries", "dim").items():
        largest = max(mine, key=lambda row: int(row["patterns"]))
        size = 4 * int(dim) * TARGET
        devices = -(-size // 10**11)
        seconds = float(largest["seconds"]) * TARGET / int(largest["patterns"])
        shown = [f"{size / 1e9:.0f}", str(devices), f"{seconds:.2f}", f"{seconds / devices:.2f}"]
        body.append([queries, f"{int(largest['patterns']):,}", *shown])
    header = ["queries", "measured with", "patterns, GB", "devices of 100 GB", "seconds, one", "seconds, all"]
    return f"Extrapolated to {TARGET:,} patterns:\n\n{table(header, body)}"


def integers(text: str) -> list[int]:
    """Parses integers separated by commas."""
    return [int(float(part)) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures searches and prints a report."""
    parser = make_parser("search_costs", __doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--sizes", type=integers, help="numbers of patterns (default: 1e4 to 1e6, on cuda to 2e7)")
    parser.add_argument("--queries", type=integers, default=[1, 2, 64], help="numbers of queries (default: 1,2,64)")
    parser.add_argument("--recall", action="store_true", help="measure the recall of shortlists, on the CPU")
    parser.add_argument("--output", type=Path, help="file (default: search_costs.csv or search_recall.csv)")
    for name, default, text in (
        ("dim", 64, "dimensions of a pattern"),
        ("k", 10, "number of patterns to find"),
        ("repeats", 3, "number of timed searches, of which the fastest counts"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    options = parser.parse_args(arguments)
    options.sizes = options.sizes or SIZES["cuda" if options.device == "cuda" else "cpu"]
    output = options.output or RESULTS / ("search_recall.csv" if options.recall else "search_costs.csv")
    results = ResultTable(output, options.device)
    if options.recall:
        search_recall.measure(options, results)
        print(search_recall.report(results.own_rows))
    else:
        measure(options, results)
        print(report(results.own_rows))


if __name__ == "__main__":
    main()

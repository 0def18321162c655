"""Time, memory and recall of searches for a pattern half of whose values are replaced: exact, and with a shortlist.

To run: python -m benchmarks.search_costs [--device cuda] [--recall] [--help]

Patterns have 64 dimensions that depend on each other. The similarity is the default one, fitted without arguments to
the first 10,000 patterns. Times are of one query in batches of a size. The memory of a search excludes patterns and
codes, which are made before. Recall is the share of 128 queries whose origin is found. A shortlist has 500 patterns; on
a GPU all searches are exact.

With --recall, recall and seconds a query of the default similarity after a fit, exact and with shortlists, and of FAISS
indices of vectors, for correlated patterns with up to 80 % of the values of a query replaced or missing, and a picture
of recall over time. Needs FAISS.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import ahop_layers as ah
from benchmarks import search_recall
from benchmarks.harness.command import make_parser
from benchmarks.harness.memory import least_seconds, peak, reset_peak
from benchmarks.harness.report import group, number, picture_for, table
from benchmarks.harness.rows import RESULTS, ResultTable, Row

SIZES = {"cpu": (10_000, 100_000, 1_000_000, 10_000_000), "cuda": (10_000, 100_000, 1_000_000, 5_000_000, 20_000_000)}
SHORTLIST = 500
FITTED = 10_000
ASKED = 128
DAMAGE = ah.variants.Replaced(0.5)
KEY = ("search", "patterns", "dim", "queries", "k")


def make_patterns(count: int, dim: int, device: str) -> torch.Tensor:
    """Returns patterns that are mixtures of a quarter as many hidden values, with noise."""
    generator = torch.Generator(device).manual_seed(0)
    hidden, mixed = (
        torch.randn(*size, generator=generator, device=device) for size in ((count, dim // 4), (dim // 4, dim))
    )
    return torch.randn(count, dim, generator=generator, device=device).addmm_(hidden, mixed, beta=0.5)


def measure(options: argparse.Namespace, results: ResultTable) -> None:
    """Measures searches of all numbers of patterns and of queries."""
    largest = make_patterns(max(options.sizes), options.dim, options.device)
    fitted = ah.AssociativeMemory(largest[:FITTED])
    fitted.fit()
    for count in options.sizes:
        memory = ah.AssociativeMemory(largest[:count], fitted.similarity, check=False)
        generator = torch.Generator(options.device).manual_seed(1)
        index, asked = DAMAGE.bind(largest[:FITTED]).sample(memory.patterns, ASKED, generator)
        lists: dict[str, int | None] = {"exact": None}
        if options.device == "cpu" and count > SHORTLIST:
            start = time.perf_counter()
            memory.build_codes()
            print(f"{count:,} patterns: codes in {time.perf_counter() - start:.1f} s", flush=True)
            lists[f"shortlist of {SHORTLIST}"] = SHORTLIST
        for name, shortlist in lists.items():
            found = memory.search(asked, 1, shortlist).indices[:, 0]  # also loads the kernels
            recall = (found == index).double().mean().item()
            for queries in options.queries:

                def search(
                    x: torch.Tensor = asked[:queries],
                    k: int = min(options.k, count),
                    memory: ah.AssociativeMemory = memory,
                    shortlist: int | None = shortlist,
                ) -> object:
                    return memory.search(x, k, shortlist)

                before = reset_peak(options.device)
                search()
                most = max(0, peak(options.device) - before)
                seconds = least_seconds(search, options.device, options.repeats) / queries
                key = dict(zip(KEY, (name, count, options.dim, queries, options.k), strict=True))
                figures = {"seconds": f"{seconds:.4g}", "bytes": most, "recall": f"{recall:.4g}"}
                results.replace([key | figures], *KEY)
                print(f"{count:,} patterns, {name}, {queries} queries: {1e3 * seconds:.3g} ms a query", flush=True)


def report(rows: Sequence[Row]) -> str:
    """Returns a table of times, memory and recall, with a column for each number of queries at once."""
    counts, body = list(dict.fromkeys(row["queries"] for row in rows)), []
    for (patterns, name), mine in group(rows, "patterns", "search").items():
        times = {row["queries"]: number(1e3 * float(row["seconds"])) for row in mine}
        used, recall = max(int(row["bytes"]) for row in mine), min(float(row["recall"]) for row in mine)
        cells = [times.get(count, "") for count in counts]
        body.append([f"{int(patterns):,}", name, *cells, f"{used / 1e6:,.0f}", f"{recall:.3f}"])
    header = [f"ms a query, {count} at once" for count in counts]
    return table(["patterns", "search", *header, "memory, MB", "recall"], body)


def integers(text: str) -> list[int]:
    """Parses integers separated by commas."""
    return [int(float(part)) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures searches and prints a report."""
    parser = make_parser("search_costs", __doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--sizes", type=integers, help="numbers of patterns (default: 1e4 to 1e7, on cuda to 2e7)")
    parser.add_argument("--queries", type=integers, default=[1, 64], help="numbers of queries (default: 1,64)")
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
        print(f"plot: {search_recall.draw(results.own_rows, picture_for(output, 'search_recall'))}")
    else:
        measure(options, results)
        print(report(results.own_rows))


if __name__ == "__main__":
    main()

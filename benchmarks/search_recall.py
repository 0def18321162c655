"""Recall and time of searches for damaged patterns: exact, shortlisted, and FAISS indices of vectors.

Codes are scanned, not indexed, because indices of codes lose damaged queries: of 200 queries with half of their values
replaced, among 100,000 patterns, lists of 500 hold 1.00 of the right patterns with IndexBinaryFlat, .91 with 64 of 256
lists of IndexBinaryIVF in .45 of its time, and .91 with IndexBinaryHNSW in 1.5 times its time.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

import ahop_layers as ah
from benchmarks.harness.memory import least_seconds
from benchmarks.harness.report import drawing, group, table
from benchmarks.harness.rows import ResultTable, Row

FACTORS = 16  # patterns are mixtures of so many random numbers, and noise
SHORTLISTS = (500, 2000)
LARGEST_GRAPH = 100_000  # most patterns of an HNSW index: building one of a million takes minutes
KEY = ("patterns", "dim", "damage", "share", "method")
SHARES = {"replaced": (0.0, 0.3, 0.5, 0.7, 0.8), "missing": (0.3, 0.5, 0.7, 0.8)}
Search = Callable[[Tensor], Tensor]


def make_patterns(count: int, dim: int) -> Tensor:
    """Returns correlated patterns ``(count, dim)``."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(FACTORS, dim, generator=generator) / 4
    patterns = torch.randn(count, FACTORS, generator=generator) @ mixing
    return patterns.add_(torch.randn(count, dim, generator=generator), alpha=0.5)


def damaged(patterns: Tensor, damage: str, share: float, count: int) -> tuple[Tensor, Tensor]:
    """Returns the indices of some patterns, and them with noise and a ``share`` of the values replaced or missing."""
    generator = torch.Generator().manual_seed(1)
    index = torch.randint(len(patterns), (count,), generator=generator)
    query = patterns[index] + 0.05 * torch.randn(count, patterns.shape[1], generator=generator)
    wrong = torch.rand(query.shape, generator=generator) < share
    low, high = patterns.aminmax()
    other = torch.rand(query.shape, generator=generator) * (high - low) + low
    return index, torch.where(wrong, other if damage == "replaced" else torch.nan, query)


def methods(patterns: Tensor, damage: str, memory: ah.AssociativeMemory) -> Iterator[tuple[str, Search]]:
    """Yields the methods that can answer queries with a ``damage``: names, and searches for the best pattern."""
    faiss, dim = import_module("faiss"), patterns.shape[1]
    yield "exact", memory.recall
    for length in SHORTLISTS:
        if length < len(patterns):
            yield f"shortlist of {length:,}", lambda x, length=length: memory.recall(x, shortlist=length)
    indices = {
        "FAISS, flat": faiss.IndexFlat(dim, faiss.METRIC_L2 if damage == "replaced" else faiss.METRIC_NaNEuclidean)
    }
    if damage == "replaced" and len(patterns) <= LARGEST_GRAPH:
        indices["FAISS, HNSW"] = faiss.IndexHNSWFlat(dim, 32)
    for name, index in indices.items():
        index.add(patterns.numpy())
        yield name, lambda x, index=index: torch.from_numpy(index.search(x.numpy(), 1)[1][:, 0])


def measure(options: argparse.Namespace, results: ResultTable) -> None:
    """Measures all methods with all numbers of patterns: the recall, and seconds a query in a batch."""
    queries = max(options.queries)
    for count in options.sizes:
        patterns = make_patterns(count, options.dim)
        memory = ah.AssociativeMemory(patterns)
        memory.build_codes()
        print(f"{count:,} patterns", memory.fit(), sep="\n", flush=True)
        for damage, shares in SHARES.items():
            for name, search in methods(patterns, damage, memory):
                for share in shares:
                    index, query = damaged(patterns, damage, share, queries)
                    found = search(query)
                    time = least_seconds(lambda x=query, search=search: search(x), "cpu", options.repeats) / queries
                    row = dict(zip(KEY, (count, options.dim, damage, share, name), strict=True))
                    recall = (found == index).double().mean().item()
                    results.replace([row | {"recall": f"{recall:.3f}", "seconds": f"{time:.3g}"}], *KEY)


def report(rows: Sequence[Row]) -> str:
    """Returns tables of the recall by the share of damaged values, and of the time of a query."""
    texts = []
    for (count, damage), some in group(rows, "patterns", "damage").items():
        body = []
        for (name,), mine in group(some, "method").items():
            milliseconds = 1e3 * max(float(row["seconds"]) for row in mine)
            body.append([name, *(row["recall"] for row in mine), f"{milliseconds:.2f}"])
        header = ["method", *(f"{float(row['share']):.0%}" for row in mine), "ms a query"]
        texts.append(f"Recall among {int(count):,} patterns by the share of values {damage}:\n\n{table(header, body)}")
    return "\n\n".join(texts)


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Draws the recall over the time of a query: a panel for each number of patterns, a line for each method."""
    with drawing(path, (8, 3.2)) as figure:
        groups = group([row for row in rows if row["damage"] == "replaced"], "patterns")
        axes = figure.subplots(1, len(groups), squeeze=False)[0]
        for axis, ((count,), here) in zip(axes, groups.items(), strict=True):
            for (name,), mine in group(here, "method").items():
                times, recalls = ([float(row[key]) for row in mine] for key in ("seconds", "recall"))
                axis.plot([1e3 * each for each in times], recalls, "o-", markersize=3, label=name)
            axis.set(xlabel="ms a query", ylabel="recall", title=f"{int(count):,} patterns")
            axis.set_xscale("log")
            axis.grid()
        axis.legend(frameon=False, fontsize=7)
    return path

"""Recall of 64 queries among a million patterns of 64 dimensions: time and peak memory beside the patterns.

To run: python -m benchmarks.recall_memory [--device cuda]
"""

import argparse
import time

import torch

import ahop_layers as ah
from benchmarks.harness.memory import in_own_process, peak, reset_peak


def measure(patterns: int, dim: int, queries: int, device: str) -> tuple[float, int]:
    """Seconds and peak bytes of one recall, in this process."""
    torch.manual_seed(0)
    memory = ah.AssociativeMemory.preset("A-Hop", torch.rand(patterns, dim, device=device) * 2 - 1, debias=True)
    query = memory.patterns[:queries] + 0.1 * torch.randn(queries, dim, device=device)
    ah.AssociativeMemory.preset("A-Hop", memory.patterns[:8], debias=True).recall(query)  # load every kernel
    before, start = reset_peak(device), time.perf_counter()
    found = memory.recall(query).cpu()
    seconds, most = time.perf_counter() - start, peak(device)
    if not torch.equal(found, torch.arange(queries)):
        raise RuntimeError("expected every query to find its pattern, got others")
    return seconds, most - before


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    seconds, most = in_own_process(measure, *vars(options).values())
    size = f"{options.queries} queries, {options.patterns:,} patterns of {options.dim}, {options.device}"
    print(f"{size}: {seconds:.2f} s, {most / 1e6:.0f} MB beside the patterns")


if __name__ == "__main__":
    main()

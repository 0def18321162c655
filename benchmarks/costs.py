"""Time and peak memory of single features.

To run: python -m benchmarks.costs recall|fit|near|mil [--device cuda] [--help]

- ``recall``: recall of 64 queries from a million patterns with 64 dimensions. The memory excludes the patterns.
- ``fit``: a fit of a memory with default arguments, after a first one that loads the kernels.
- ``near``: scores by one saturating base, by L1 with five of them, and by one base with 30 % of the query's values
  missing; and a search with default arguments before and after a fit: each as a ratio to L1.
- ``mil``: forward and backward of the pooling of one bag of 100,000 instances with 512 features. The memory excludes
  the instances and the model, and includes the gradients of all parameters.

Each measurement runs in its own process.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

import ahop_layers as ah
from ahop_layers.memory.variants import Replaced
from benchmarks.harness.command import make_parser
from benchmarks.harness.memory import Result, in_own_process, peak, reset_peak

HELP = {
    "patterns": "number of stored patterns",
    "dim": "dimensions of a pattern",
    "queries": "number of queries",
    "instances": "instances of the bag",
    "features": "features of an instance",
    "heads": "heads of the pooling",
    "embed": "width of a linear layer before the pooling, so that every instance gets a gradient; 0 for none",
}


def cost(call: Callable[[], Result], device: str) -> tuple[Result, float, int]:
    """Returns the result of a call, its seconds, and the bytes by which its peak exceeds the memory before it."""
    before, start = reset_peak(device), time.perf_counter()
    result = call()
    most = peak(device)
    return result, time.perf_counter() - start, max(0, most - before)


def recall_cost(patterns: int, dim: int, queries: int, device: str) -> tuple[float, int]:
    """Returns the seconds and peak bytes of one recall."""
    torch.manual_seed(0)
    memory = ah.AssociativeMemory(torch.rand(patterns, dim, device=device) * 2 - 1, "adaptive")
    query = memory.patterns[:queries] + 0.1 * torch.randn(queries, dim, device=device)
    ah.AssociativeMemory(memory.patterns[:8], "adaptive").recall(query)  # loads the kernels
    found, seconds, most = cost(lambda: memory.recall(query).cpu(), device)
    if not torch.equal(found, torch.arange(queries)):
        raise RuntimeError("expected every query to retrieve its pattern, got other patterns")
    return seconds, most


def solve_cost(patterns: int, dim: int, device: str) -> float:
    """Returns the seconds of a fit."""
    stored = torch.rand(patterns, dim, generator=torch.Generator().manual_seed(0)).to(device)
    ah.AssociativeMemory(stored[:200]).fit(Replaced((0.0, 0.9)))  # loads the kernels
    start = time.perf_counter()
    ah.AssociativeMemory(stored).fit(Replaced((0.0, 0.9)))
    return time.perf_counter() - start


def best_seconds(call: Callable[[], torch.Tensor], device: str) -> float:
    """Returns the shortest time of seven calls."""
    times = []
    for _ in range(8):
        start = time.perf_counter()
        call().sum().item()  # waits for a GPU
        times.append(time.perf_counter() - start)
    return min(times[1:])


def near_cost(patterns: int, dim: int, queries: int, device: str) -> dict[str, float]:
    """Returns the times of scores and searches as ratios to those of L1."""
    torch.manual_seed(0)
    key, query = torch.rand(patterns, dim, device=device), torch.rand(queries, dim, device=device)
    holes = query.masked_fill(torch.rand_like(query) < 0.3, torch.nan)
    weight, widths = torch.rand(6, dim, device=device), torch.full((6,), 0.1, device=device)

    def scores(*bases: str, missing: bool = False) -> Callable[[], torch.Tensor]:
        rows, n = holes if missing else query, len(bases)
        return lambda: ah.adaptive_similarity(rows, key, weight[:n], bases, widths=widths[:n], missing=missing)

    one = scores("l1")
    calls = {
        "near": scores("near"),
        "l1 and five near": scores("l1", *5 * ("near",)),
        "l1, missing": scores("l1", missing=True),
    }
    similarity = ah.AdaptiveSimilarity(dim, bases=("l1",), init=weight[:1]).to(device)
    memory, plain = ah.AssociativeMemory(key), ah.AssociativeMemory(key, similarity)
    base = best_seconds(one, device)
    found = {name: best_seconds(call, device) / base for name, call in calls.items()}
    base = best_seconds(lambda: plain.search(query)[0], device)
    found["search before a fit"] = best_seconds(lambda: memory.search(query)[0], device) / base
    memory.fit(Replaced((0.0, 0.9)))
    found["search after a fit"] = best_seconds(lambda: memory.search(query)[0], device) / base
    return found


def pooling_cost(instances: int, features: int, heads: int, embed: int, device: str) -> tuple[float, int]:
    """Returns the seconds and peak bytes of forward and backward of one bag."""
    torch.manual_seed(0)
    width = embed or features
    layer = nn.Sequential(nn.Linear(features, width), nn.ReLU()) if embed else nn.Identity()
    model = nn.ModuleList([layer, ah.AdaptiveHopfieldPooling(width, num_heads=heads, blocks=None)]).to(device)
    bag = torch.randn(instances, features, device=device)

    def forward_and_backward(bag: torch.Tensor) -> None:
        model[1].pool_packed(model[0](bag), [len(bag)]).sum().backward()
        model.zero_grad()

    forward_and_backward(bag[:8])  # loads the kernels
    return cost(lambda: forward_and_backward(bag), device)[1:]


def recall(options: argparse.Namespace) -> None:
    """Measures and prints a recall."""
    seconds, most = in_own_process(recall_cost, options.patterns, options.dim, options.queries, options.device)
    size = f"{options.queries} queries, {options.patterns:,} patterns of {options.dim}, {options.device}"
    print(f"{size}: {seconds:.2f} s, {most / 1e6:.0f} MB in addition to the patterns")


def fit(options: argparse.Namespace) -> None:
    """Measures and prints a fit."""
    seconds = in_own_process(solve_cost, options.patterns, options.dim, options.device)
    print(f"fit, {options.patterns:,} patterns of {options.dim}, {options.device}: {seconds:.2f} s")


def near(options: argparse.Namespace) -> None:
    """Measures and prints the ratios of saturating bases."""
    ratios = in_own_process(near_cost, options.patterns, options.dim, options.queries, options.device)
    text = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    print(f"time as a ratio to L1, {options.patterns:,} patterns of {options.dim}, {options.device}: {text}")


def mil(options: argparse.Namespace) -> None:
    """Measures and prints the pooling of a bag."""
    sizes = (options.instances, options.features, options.heads, options.embed)
    seconds, most = in_own_process(pooling_cost, *sizes, options.device)
    size = f"one bag of {options.instances:,} x {options.features}, {options.heads} heads, {options.device}"
    data = options.instances * options.features * 4
    print(f"{size}: {seconds:.2f} s, {most / 1e9:.2f} GB in addition to the data ({data / 1e9:.2f} GB)")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the costs of one feature."""
    parser = make_parser("costs", __doc__)
    commands = parser.add_subparsers(required=True, metavar="recall|fit|near|mil")

    def command(measure: Callable[[argparse.Namespace], None], text: str, **defaults: int) -> argparse.ArgumentParser:
        added = commands.add_parser(measure.__name__, help=text, description=f"Measures {text}.")
        added.set_defaults(measure=measure)
        for name, default in defaults.items():
            added.add_argument(f"--{name}", type=int, default=default, help=f"{HELP[name]} (default: %(default)s)")
        added.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
        return added

    command(recall, "the recall of an associative memory", patterns=1_000_000, dim=64, queries=64)
    command(fit, "a fit of an associative memory", patterns=1000, dim=256)
    command(near, "saturating bases, missing values and the default similarity", patterns=4096, dim=256, queries=256)
    command(mil, "the pooling of one large bag", instances=100_000, features=512, heads=8, embed=0)
    options = parser.parse_args(arguments)
    options.measure(options)


if __name__ == "__main__":
    main()

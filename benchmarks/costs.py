"""Time and peak memory of single features.

To run: python -m benchmarks.costs recall|mil|tabular [--device cuda] [--help]

- ``recall``: recall of 64 queries from a million patterns with 64 dimensions. The memory excludes the patterns.
- ``mil``: forward and backward of the pooling of one bag of 100,000 instances with 512 features. The memory excludes
  the instances and the model, and includes the gradients of all parameters.
- ``tabular``: a fit of the tabular classifier on Adult, and the prediction of 100,000 rows. The memory excludes the
  rows, the model and the predicted probabilities.

Each measurement runs in its own process.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

import ahop_layers as ah
from ahop_layers.tabular import AdaptiveMemoryClassifier
from benchmarks.harness.command import add_data_dir, explain_missing_data, make_parser
from benchmarks.harness.memory import Result, in_own_process, peak, reset_peak
from benchmarks.paper.tabular.data import files_of, load
from benchmarks.paper.tabular.models import mark_categories

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
    memory = ah.AssociativeMemory.preset("A-Hop", torch.rand(patterns, dim, device=device) * 2 - 1, debias=True)
    query = memory.patterns[:queries] + 0.1 * torch.randn(queries, dim, device=device)
    ah.AssociativeMemory.preset("A-Hop", memory.patterns[:8], debias=True).recall(query)  # loads the kernels
    found, seconds, most = cost(lambda: memory.recall(query).cpu(), device)
    if not torch.equal(found, torch.arange(queries)):
        raise RuntimeError("expected every query to retrieve its pattern, got other patterns")
    return seconds, most


def pooling_cost(instances: int, features: int, heads: int, embed: int, device: str) -> tuple[float, int]:
    """Returns the seconds and peak bytes of forward and backward of one bag."""
    torch.manual_seed(0)
    width = embed or features
    layer = nn.Sequential(nn.Linear(features, width), nn.ReLU()) if embed else nn.Identity()
    model = nn.ModuleList([layer, ah.AdaptiveHopfieldPooling(width, num_heads=heads)]).to(device)
    bag = torch.randn(instances, features, device=device)

    def forward_and_backward(bag: torch.Tensor) -> None:
        model[1].pool_packed(model[0](bag), [len(bag)]).sum().backward()
        model.zero_grad()

    forward_and_backward(bag[:8])  # loads the kernels
    return cost(lambda: forward_and_backward(bag), device)[1:]


def fit_cost(folder: Path, device: str) -> tuple[float, float]:
    """Returns the seconds of a fit with default parameters, and its test accuracy."""
    split = load("adult", folder, 0)
    X, test_X = (mark_categories(part, split.categories) for part in (split.X, split.test_X))
    model = AdaptiveMemoryClassifier(random_state=0, device=device)
    start = time.perf_counter()
    model.fit(X, split.y)
    return time.perf_counter() - start, model.score(test_X, split.test_y)


def predict_cost(folder: Path, device: str) -> int:
    """Returns the peak bytes of a prediction."""
    split = load("adult", folder, 0, rows=6000)  # the prediction could reuse the memory of a larger fit
    model = AdaptiveMemoryClassifier(random_state=0, device=device).fit(split.X, split.y)
    rows = np.resize(split.X, (100_000, split.X.shape[1]))
    probabilities, _, most = cost(lambda: model.predict_proba(rows), device)
    return most - probabilities.nbytes


def recall(options: argparse.Namespace) -> None:
    """Measures and prints a recall."""
    seconds, most = in_own_process(recall_cost, options.patterns, options.dim, options.queries, options.device)
    size = f"{options.queries} queries, {options.patterns:,} patterns of {options.dim}, {options.device}"
    print(f"{size}: {seconds:.2f} s, {most / 1e6:.0f} MB in addition to the patterns")


def mil(options: argparse.Namespace) -> None:
    """Measures and prints the pooling of a bag."""
    sizes = (options.instances, options.features, options.heads, options.embed)
    seconds, most = in_own_process(pooling_cost, *sizes, options.device)
    size = f"one bag of {options.instances:,} x {options.features}, {options.heads} heads, {options.device}"
    data = options.instances * options.features * 4
    print(f"{size}: {seconds:.2f} s, {most / 1e9:.2f} GB in addition to the data ({data / 1e9:.2f} GB)")


def tabular(options: argparse.Namespace) -> None:
    """Measures and prints a fit and a prediction of the tabular classifier."""
    with explain_missing_data():
        files_of("adult", options.data_dir)
    most = in_own_process(predict_cost, options.data_dir, options.device)
    seconds, accuracy = in_own_process(fit_cost, options.data_dir, options.device)
    size = f"Adult, default parameters, {options.device}, {torch.get_num_threads()} threads"
    print(f"{size}: fit {seconds:.1f} s, test accuracy {accuracy:.4f}; {most / 1e6:.0f} MB to predict 100,000 rows")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the costs of one feature."""
    parser = make_parser("costs", __doc__)
    commands = parser.add_subparsers(required=True, metavar="recall|mil|tabular")

    def command(measure: Callable[[argparse.Namespace], None], text: str, **defaults: int) -> argparse.ArgumentParser:
        added = commands.add_parser(measure.__name__, help=text, description=f"Measures {text}.")
        added.set_defaults(measure=measure)
        for name, default in defaults.items():
            added.add_argument(f"--{name}", type=int, default=default, help=f"{HELP[name]} (default: %(default)s)")
        added.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
        return added

    command(recall, "the recall of an associative memory", patterns=1_000_000, dim=64, queries=64)
    command(mil, "the pooling of one large bag", instances=100_000, features=512, heads=8, embed=0)
    add_data_dir(command(tabular, "the tabular classifier"), "tabular/")
    options = parser.parse_args(arguments)
    options.measure(options)


if __name__ == "__main__":
    main()

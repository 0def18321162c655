"""Find stored digits by damaged copies of them: nearest neighbors against a memory that learns its similarity.

To run: python -m examples.search

A fraction of the pixels of each query is replaced by random values. The memory is fitted once, on queries with 0 to
90 % of the pixels replaced, and never sees the queries of the table. The table has the fraction of queries whose digit
is found, mean and standard deviation over --seeds choices of the stored digits, of the training and of the queries.

Writes search.png into the folder of --out.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

import ahop_layers as ah
from examples.common import cli
from examples.common.digits import DIGITS, digit_patterns, draw_digit
from examples.common.outputs import draw_rows, spread, write_figure

LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9)
SHOWN = 0.7
Find = Callable[[Tensor], Tensor]
"""Returns the indices of the stored patterns that belong to queries."""


def damage(level: float | tuple[float, float]) -> ah.variants.Replaced:
    """Returns the corruption: a fraction of the pixels has random values. A range is drawn for each query."""
    return ah.variants.Replaced(level, low=-1.0, high=1.0)


def methods(patterns: Tensor, epochs: int, lr: float, seed: int) -> dict[str, Find]:
    """Returns the three ways to find a pattern."""
    memory = ah.AssociativeMemory.preset("A-Hop", patterns, bases=("dis", "l1"), init="l1")
    memory.fit(damage((0.0, 0.9)), epochs=epochs, lr=lr, batch=128, seed=seed)
    return {
        "Euclid": lambda query: torch.cdist(query, patterns).argmin(-1),
        "L1": lambda query: torch.cdist(query, patterns, p=1).argmin(-1),
        "adaptive": memory.recall,
    }


def draw(
    patterns: Tensor, index: Tensor, query: Tensor, found: dict[str, Tensor], accuracy: dict[str, float]
) -> Figure:
    """Draws each query with its original and with what each method found, marked as right or wrong."""
    right = {f"{name}\naccuracy {accuracy[name]:.0%}": chosen == index for name, chosen in found.items()}
    answers = dict(zip(right, (patterns[chosen] for chosen in found.values()), strict=True))
    figure = draw_rows({"original": patterns[index], "query": query, **answers}, draw_digit, 0.8, 0.85, right)
    figure.suptitle(f"{SHOWN:.0%} of the pixels replaced", fontsize=10)
    return figure


def compare(options: argparse.Namespace) -> tuple[dict[str, dict[float, list[float]]], Figure]:
    """Returns the accuracies of each method by level, one for each seed, and the picture of the last seed."""
    accuracies: dict[str, dict[float, list[float]]] = {}
    for seed in range(options.seed, options.seed + options.seeds):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(DIGITS, generator=generator)[: options.patterns]
        patterns = digit_patterns()[order]
        found = methods(patterns, options.epochs, options.lr, seed)
        for level in LEVELS:
            index, query = damage(level).sample(patterns, 1000, generator)
            for name, find in found.items():
                accuracy = (find(query) == index).double().mean().item()
                accuracies.setdefault(name, {}).setdefault(level, []).append(accuracy)
    index, query = damage(SHOWN).sample(patterns, 14, generator)
    shown = {name: means[SHOWN][-1] for name, means in accuracies.items()}
    return accuracies, draw(patterns, index, query, {name: find(query) for name, find in found.items()}, shown)


def make_parser() -> cli.Parser:
    """Returns the parser of the command line."""
    parser = cli.Parser("search", __doc__, "out/search", ["search.png"], lr=0.05)
    count = cli.integer_between(20, DIGITS)
    parser.option("--patterns", type=count, metavar="N", default=500, help=f"number of stored digits, at most {DIGITS}")
    parser.option("--epochs", default=100, **cli.SHARED["epochs"])
    parser.option("--seeds", type=cli.positive_int, metavar="N", default=3, help="number of seeds, from --seed on")
    return parser


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[float, list[float]]]:
    """Fits a memory for each seed, prints the table, draws the picture, and returns the accuracies."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    with parser.one_line_errors():
        parser.start(options)
        accuracies, figure = compare(options)
        print(f"\n{options.patterns} digits stored, 1,000 queries, {options.seeds} seeds\n")
        print(f"{'pixels replaced':<18}" + "".join(f"{name:>18}" for name in accuracies))
        for level in LEVELS:
            print(f"{level:<18.0%}" + "".join(f"{spread(values[level]):>18}" for values in accuracies.values()))
        write_figure(options.out / "search.png", figure)
        print(f"\npicture: {options.out / 'search.png'}")
    return accuracies


if __name__ == "__main__":
    main()

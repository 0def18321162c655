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
from examples.common.command import Parser, number
from examples.common.outputs import DIGITS, digit_patterns, draw_digit, draw_rows, spread

LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9)
SHOWN = 0.7


def damage(level: float | tuple[float, float]) -> ah.variants.Replaced:
    """Returns the damage: a fraction of the pixels has random values. A range is drawn for each query."""
    return ah.variants.Replaced(level, low=-1.0, high=1.0)


def methods(patterns: Tensor, seed: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Returns three functions that find the indices of the stored patterns of queries."""
    memory = ah.AssociativeMemory(patterns)
    memory.fit(damage((0.0, 0.9)), seed=seed)
    return {
        "Euclid": lambda query: torch.cdist(query, patterns).argmin(-1),
        "L1": lambda query: torch.cdist(query, patterns, p=1).argmin(-1),
        "adaptive": memory.recall,
    }


def compare(options: argparse.Namespace) -> tuple[dict[str, dict[float, list[float]]], Figure]:
    """Returns the accuracies of each method by level, one for each seed, and the picture of the last seed."""
    accuracies: dict[str, dict[float, list[float]]] = {}
    for seed in range(options.seed, options.seed + options.seeds):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(DIGITS, generator=generator)[: options.patterns]
        patterns = digit_patterns()[order]
        found = methods(patterns, seed)
        for level in LEVELS:
            index, query = damage(level).sample(patterns, 1000, generator)
            for name, find in found.items():
                accuracy = (find(query) == index).double().mean().item()
                accuracies.setdefault(name, {}).setdefault(level, []).append(accuracy)
    index, query = damage(SHOWN).sample(patterns, 14, generator)
    rows, right = {"original": patterns[index], "query": query}, {}
    for name, find in found.items():
        label = f"{name}\naccuracy {accuracies[name][SHOWN][-1]:.0%}"
        rows[label], right[label] = patterns[find(query)], find(query) == index
    figure = draw_rows(rows, draw_digit, 0.8, 0.85, right)
    figure.suptitle(f"{SHOWN:.0%} of the pixels replaced", fontsize=10)
    return accuracies, figure


def make_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser("search", __doc__, ["search.png"])
    add = parser.add_argument
    add("--patterns", type=number(int, 20, DIGITS), metavar="N", default=500, help="number of stored digits")
    add("--seeds", type=number(int, 1), metavar="N", default=3, help="number of seeds, from --seed on")
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
        figure.savefig(options.out / "search.png", dpi=100)
        print(f"\npicture: {options.out / 'search.png'}")
    return accuracies


if __name__ == "__main__":
    main()

"""Find stored digits by damaged copies of them: nearest neighbors against a memory that learns its similarity.

To run: python -m examples.search

A fraction of the pixels of each query is replaced by random values. The memory is fitted once, on queries with 0 to
90 % of the pixels replaced, and never sees the queries of the table. The table has the fraction of queries whose digit
is found, mean and standard deviation over --seeds choices of the stored digits, of the training and of the queries.

Writes search.png into the folder of --out.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor

import ahop_layers as ah

LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9)
SHOWN = 0.7
Accuracies = dict[str, dict[float, list[float]]]  # method -> fraction of replaced pixels -> accuracy for each seed


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


def compare(count: int, seeds: Sequence[int]) -> tuple[Accuracies, Figure]:
    """Returns the accuracies among ``count`` stored digits, and the picture of the last seed."""
    accuracies: Accuracies = {}
    digits = torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32)
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        patterns = digits[torch.randperm(len(digits), generator=generator)[:count]]
        found = methods(patterns, seed)
        for level in LEVELS:
            index, query = damage(level).sample(patterns, 1000, generator)
            for name, find in found.items():
                accuracy = (find(query) == index).double().mean().item()
                accuracies.setdefault(name, {}).setdefault(level, []).append(accuracy)
    index, query = damage(SHOWN).sample(patterns, 14, generator)
    rows = [("original", patterns[index], None), ("query", query, None)]
    for name, find in found.items():
        label = f"{name}\naccuracy {accuracies[name][SHOWN][-1]:.0%}"
        rows.append((label, patterns[find(query)], find(query) == index))
    return accuracies, draw(rows)


def draw(rows: Sequence[tuple[str, Tensor, Tensor | None]]) -> Figure:
    """Draws rows of digits; those with answers are framed and marked as right or wrong."""
    figure = Figure(figsize=(12.4, 0.85 * len(rows)), layout="constrained")
    figure.suptitle(f"{SHOWN:.0%} of the pixels replaced", fontsize=10)
    for (name, digits, right), axes in zip(rows, figure.subplots(len(rows), 14), strict=True):
        for place, axis in enumerate(axes):
            axis.imshow(digits[place].reshape(8, 8).numpy(), cmap="gray_r", vmin=-1, vmax=1)
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(right is not None)
            if right is not None:
                color, sign = ("#6a9a3b", "\u2713") if right[place] else ("#c8555b", "\u2717")
                axis.spines[:].set(color=color, linewidth=2.5)
                box = {"facecolor": color, "linewidth": 0, "boxstyle": "round,pad=0.15"}
                axis.text(0.94, 0.06, sign, transform=axis.transAxes, ha="right", color="white", fontsize=9, bbox=box)
        axes[0].set_ylabel(name, rotation=0, ha="right", va="center")
    return figure


def spread(values: Sequence[float]) -> str:
    """Returns the mean of several runs and their standard deviation."""
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def main(arguments: Sequence[str] | None = None) -> Accuracies:
    """Fits a memory for each seed, prints the table, draws the picture, and returns the accuracies."""
    shown = type("Help", (argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter), {})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    add, whole = parser.add_argument, {"type": int, "metavar": "N"}
    add("--patterns", **whole, default=500, help="number of stored digits, from 20 to 1797")
    add("--seeds", **whole, default=3, help="number of seeds, from --seed on")
    add("--seed", **whole, default=0, help="seed of all random number generators")
    add("--out", type=Path, metavar="DIR", default="out/search", help="folder of the picture")
    options = parser.parse_args(arguments)
    accuracies, figure = compare(options.patterns, range(options.seed, options.seed + options.seeds))
    print(f"\n{options.patterns} digits stored, 1,000 queries, {options.seeds} seeds\n")
    print(f"{'pixels replaced':<18}" + "".join(f"{name:>18}" for name in accuracies))
    for level in LEVELS:
        print(f"{level:<18.0%}" + "".join(f"{spread(values[level]):>18}" for values in accuracies.values()))
    options.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out / "search.png", dpi=100)
    print(f"\npicture: {options.out / 'search.png'}")
    return accuracies


if __name__ == "__main__":
    main()

"""Repair damaged rows of a table for a trained network: a memory of clean rows stands before it, nothing is retrained.

To run: python -m examples.repair

A network learns to diagnose tumors from 30 measurements, scikit-learn's breast cancer table. Then a share of the
measurements is replaced by random values within the range of their column, nobody knows where, or is missing.
ahop_layers.Repair compares such a row with stored clean ones, finds the values that are wrong, and replaces them. It is
fitted once, without arguments, and the network is not changed.

Prints a table of accuracies on test rows. Writes accuracy.png, the table as lines, and repair.png, one damaged row with
the values that are found to be wrong, into the folder of --out.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import ahop_layers as ah

SHARES = (0.0, 0.1, 0.3, 0.5, 0.7)
DAMAGES = {"replaced": ah.variants.Replaced, "missing": ah.variants.Missing}
STORED = 400  # the other rows of the 569 are test rows


class FillMeans(nn.Module):
    """Replaces unknown values by the mean of their column, before the network alone."""

    def forward(self, rows: Tensor) -> Tensor:
        """Fills standardized rows, whose means are 0."""
        return rows.nan_to_num(0.0)


def train(rows: Tensor, labels: Tensor, steps: int) -> nn.Module:
    """Trains a network on clean rows."""
    network = nn.Sequential(nn.Linear(rows.shape[1], 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(network(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval()


@torch.no_grad()
def accuracy(network: nn.Module, rows: Tensor, labels: Tensor) -> float:
    """Returns the share of rows that a network classifies correctly."""
    return (network(rows).argmax(-1) == labels).double().mean().item()


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Trains, fits, prints the table, draws the pictures, and returns the accuracies of each line of the table."""
    shown = type("Help", (argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter), {})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--steps", type=int, metavar="N", default=200, help="training steps of the network")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of all random number generators")
    parser.add_argument("--out", type=Path, metavar="DIR", default="out/repair", help="folder of the pictures")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    rows, labels = (torch.tensor(each) for each in load_breast_cancer(return_X_y=True))
    order = torch.randperm(len(rows))
    rows, labels = rows.float()[order], labels[order]
    rows = (rows - rows[:STORED].mean(0)) / rows[:STORED].std(0)
    stored, tested = rows[:STORED], rows[STORED:]
    network = train(stored, labels[:STORED], options.steps)
    memory = ah.AssociativeMemory(stored, labels=network(stored).argmax(-1))  # its own answers help, and cost nothing
    print(memory.fit(seed=options.seed))
    before = {"network alone": FillMeans(), "with ah.Repair": ah.Repair(memory)}
    found: dict[str, list[float]] = {}
    for kind, damage in DAMAGES.items():
        for share in SHARES:
            query = damage(share).bind(stored)(tested)
            for name, layer in before.items():
                right = accuracy(nn.Sequential(layer, network), query, labels[STORED:])
                found.setdefault(f"{kind}, {name}", []).append(right)
    print(f"\n{'share of the values':<26}" + "".join(f"{share:>8.0%}" for share in SHARES))
    for name, values in found.items():
        print(f"{name:<26}" + "".join(f"{value:8.3f}" for value in values))
    options.out.mkdir(parents=True, exist_ok=True)
    query = ah.variants.Replaced(0.2).bind(stored)(tested[:1])[0]
    ah.plots.repair(memory, query).savefig(options.out / "repair.png", dpi=100)
    figure = Figure(figsize=(5, 3), layout="constrained")
    axis = figure.subplots()
    for name, values in found.items():
        axis.plot(SHARES, values, "-o" if "Repair" in name else "--o", label=name)
    axis.set(xlabel="share of damaged values", ylabel="accuracy", ylim=(0.35, 1))
    axis.legend(frameon=False, fontsize="small")
    figure.savefig(options.out / "accuracy.png", dpi=100)
    print(f"\npictures: {options.out / 'repair.png'}, {options.out / 'accuracy.png'}")
    return found


if __name__ == "__main__":
    main()

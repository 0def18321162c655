"""Repair damaged inputs of a trained network: a memory of clean rows stands before it, and nothing is retrained.

To run: python -m examples.repair

A network learns to read digits. Then some pixels of its inputs are replaced by random values, at places that nobody
knows, or are missing. ahop_layers.Repair compares the input with stored clean digits, estimates which values are intact
and replaces the others. The memory is fitted once, without arguments, and the network is not changed.

Prints a table of accuracies, and writes repair.png, one row of it with the suspicious values marked, and accuracy.png
into the folder of --out.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ahop_layers as ah

SHARES = (0.0, 0.3, 0.5, 0.7)
DAMAGES = {"replaced": ah.variants.Replaced, "missing": ah.variants.Missing}


def train(rows: Tensor, labels: Tensor, steps: int) -> nn.Module:
    """Trains a network on clean rows."""
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.02)
    for _ in range(steps):
        index = torch.randint(len(rows), (128,))
        loss = nn.functional.cross_entropy(network(rows[index]), labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval()


@torch.no_grad()
def accuracy(network: nn.Module, rows: Tensor, labels: Tensor) -> float:
    """Returns the accuracy; unknown values that reach the network are 0."""
    found = network(rows if isinstance(network[0], ah.Repair) else rows.nan_to_num(0.0))
    return (found.argmax(-1) == labels).double().mean().item()


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Trains, fits and measures; returns the accuracies of each line of the table."""
    shown = type("Help", (argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter), {})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--steps", type=int, metavar="N", default=1000, help="training steps of the network")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of all random number generators")
    parser.add_argument("--out", type=Path, metavar="DIR", default="out/repair", help="folder of the pictures")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    pixels, digits = (torch.tensor(each) for each in load_digits(return_X_y=True))
    order = torch.randperm(len(digits))
    rows, labels = pixels.float()[order] / 16, digits[order]
    stored, tested = slice(0, 1200), slice(1200, None)
    network = train(rows[stored], labels[stored], options.steps)
    memory = ah.AssociativeMemory(rows[stored])
    print(memory.fit(seed=options.seed))
    networks = {"network alone": network, "with ah.Repair": nn.Sequential(ah.Repair(memory), *network)}
    found: dict[str, list[float]] = {}
    for kind, damage in DAMAGES.items():
        for share in SHARES:
            query = damage(share).bind(rows[stored])(rows[tested])
            for name, each in networks.items():
                found.setdefault(f"{kind}, {name}", []).append(accuracy(each, query, labels[tested]))
    print(f"\n{'share of the pixels':<26}" + "".join(f"{share:>8.0%}" for share in SHARES))
    for name, values in found.items():
        print(f"{name:<26}" + "".join(f"{value:8.3f}" for value in values))
    options.out.mkdir(parents=True, exist_ok=True)
    query = ah.variants.Replaced(0.3).bind(rows[stored])(rows[tested][:1])
    ah.plots.repair(memory, query[0]).savefig(options.out / "repair.png", dpi=100)
    figure = Figure(figsize=(5, 3), layout="constrained")
    axis = figure.subplots()
    for name, values in found.items():
        axis.plot(SHARES, values, "-o" if "Repair" in name else "--o", label=name)
    axis.set(xlabel="share of damaged pixels", ylabel="accuracy", ylim=(0, 1))
    axis.legend(frameon=False, fontsize="small")
    figure.savefig(options.out / "accuracy.png", dpi=100)
    print(f"\npictures: {options.out / 'repair.png'}, {options.out / 'accuracy.png'}")
    return found


if __name__ == "__main__":
    main()

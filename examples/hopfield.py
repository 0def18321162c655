"""Switch a model on the layers of hopfield-layers to adaptive ones: the outputs stay, and the similarity learns.

To run: python -m examples.hopfield

The model pools bags of 20 bit patterns: does a bag contain one of 8 signals? It is written against ``hflayers``, as
any project on hopfield-layers is, and built twice: with plain layers and, after one line, with adaptive ones. The
adaptive model loads the weights of the plain one and computes the same. Both are then trained on the same bags. The
adaptive model is saved, loaded into a new one, and reverted to plain layers: it keeps its weights, and its similarity
is the dot product again. Times stand beside the plain layers of this package: hopfield-layers is on no registry.

Writes the checkpoint hopfield.pt and the picture hopfield.png, the loss of both models, into the folder of --out.
"""

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import ahop_layers as ah
from ahop_layers import hopfield as plain_layers  # or ``import hflayers``, if it is installed
from ahop_layers.hflayers.auxiliary.data import BitPatternSet

BATCH = 64


def build(hflayers: Any) -> nn.Module:
    """Builds the model of a project that was written for ``hflayers``."""
    pooling = hflayers.HopfieldPooling(input_size=64, hidden_size=16, num_heads=8)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), pooling, nn.Linear(64, 1), nn.Flatten(0))


def draw_bags(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns bags ``(count, 20, 8)`` and their labels ``(count,)``; the same signals for every seed."""
    data = BitPatternSet(count, num_instances=20, num_signals=8, seed_data=seed)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return data.bags.float()[order], data.targets.float()[order]


def train(
    model: nn.Module, bags: Tensor, labels: Tensor, epochs: int, lr: float, seed: int
) -> tuple[list[float], float]:
    """Trains a model and returns the mean loss of each epoch, and the median of the seconds of a step."""
    optimizer = torch.optim.AdamW(ah.parameter_groups(model, lr, weight_decay=0.01))
    generator, losses, seconds = torch.Generator().manual_seed(seed), [], []
    for _ in range(epochs):
        total = 0.0
        for index in torch.randperm(len(bags), generator=generator).split(BATCH):
            began = perf_counter()
            loss = binary_cross_entropy_with_logits(model(bags[index]), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seconds.append(perf_counter() - began)
            total += loss.item() * len(index) / len(bags)
        losses.append(total)
    return losses, median(seconds)


@torch.no_grad()
def accuracy(model: nn.Module, bags: Tensor, labels: Tensor) -> float:
    """Returns the fraction of bags that are classified correctly."""
    return ((model(bags) > 0) == (labels > 0)).double().mean().item()


@torch.no_grad()
def difference(one: nn.Module, other: nn.Module, bags: Tensor) -> float:
    """Returns the largest difference of the outputs of two models."""
    return (one(bags) - other(bags)).abs().max().item()


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Switches, trains, saves, loads and reverts a model, prints the table, and returns its figures."""
    shown = type("Help", (argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter), {})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    add, whole = parser.add_argument, {"type": int, "metavar": "N"}
    add("--bags", **whole, default=2048, help="number of training bags")
    add("--epochs", **whole, default=16, help="number of epochs")
    add("--lr", type=float, default=5e-3, help="learning rate")
    add("--seed", **whole, default=0, help="seed of all random number generators")
    add("--out", type=Path, metavar="DIR", default="out/hopfield", help="folder for all output files")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    bags, test = draw_bags(options.bags, options.seed), draw_bags(1024, options.seed + 1000)

    plain = build(plain_layers)
    ah.install_as_hflayers()  # from here on, every ``import hflayers`` finds the adaptive layers
    adaptive = build(import_module("hflayers"))
    adaptive.load_state_dict(plain.state_dict())  # a checkpoint of hopfield-layers
    found = {"outputs differ after the switch": difference(plain, adaptive, test[0])}

    losses = {}
    for name, model in (("plain", plain), ("adaptive", adaptive)):
        losses[name], seconds = train(model, *bags, options.epochs, options.lr, options.seed)
        found[f"ms per training step, {name}"] = 1e3 * seconds
        found[f"test accuracy, {name}"] = accuracy(model, *test)

    options.out.mkdir(parents=True, exist_ok=True)
    torch.save(adaptive.state_dict(), options.out / "hopfield.pt")
    loaded = build(import_module("hflayers"))
    loaded.load_state_dict(torch.load(options.out / "hopfield.pt", weights_only=True))
    found["outputs differ after saving and loading"] = difference(adaptive, loaded, test[0])
    ah.revert_(loaded, discard=True)  # drops the trained similarities
    plain.load_state_dict(loaded.state_dict())  # plain layers again, with the trained weights
    found["outputs of reverted and plain layers differ"] = difference(plain, loaded, test[0])

    print()
    for name, value in found.items():
        print(f"{name:<48}{value:>10.1e}" if "differ" in name else f"{name:<48}{value:>10.3f}")
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axis = figure.subplots()
    for (name, values), style in zip(losses.items(), ("--", "-"), strict=True):
        axis.plot(range(1, len(values) + 1), values, style, label=name)
    axis.set(xlabel="epoch", ylabel="training loss")
    axis.legend(frameon=False)
    figure.savefig(options.out / "hopfield.png", dpi=100)
    print(f"\npicture: {options.out / 'hopfield.png'}")
    return found


if __name__ == "__main__":
    main()

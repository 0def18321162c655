"""The measurements of the lookup benchmark: accuracy of face classifiers and AUC of bag classifiers."""

from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import ahop_layers as ah
from ahop_layers.memory.variants import Level, Replaced, Variant
from benchmarks.bag_sets import BagSet, bags_of_digits, damage_bags
from benchmarks.bags import auc
from benchmarks.damages import Occluded
from benchmarks.paper.bag_classifier import BagClassifier, HopfieldPool, embed_digits
from benchmarks.paper.lookup.networks import FACE_NETWORKS, FaceClassifier, first_layer, optimize, train_faces
from benchmarks.search.data import load as load_images

load = cache(load_images)
LEVELS = {"pixels": (0.0, 0.3, 0.5, 0.7, 0.8, 0.9), "block": (0.1, 0.3, 0.5, 0.7)}
"""Kind of damage of faces -> fractions of the test images that are damaged."""
TRAINED = {"pixels": (0.0, 0.9), "block": (0.0, 0.8)}
"""Range of the fractions in training."""
BAG_NETWORKS = ("none", "cnn", "cnn, pretrained", "lookup, not trained", "lookup", "repair")
BAG_LEVELS = (0.5, 0.7)
STORED = 1000
"""Number of clean digits that are in no bag: those of the lookup, and of the pretraining."""


class Size(NamedTuple):
    """Size of the benchmark.

    Attributes:
        steps: training steps of a face network, except ``lookup``.
        lookup_steps: training steps of ``lookup``.
        persons: number of persons.
        bags: number of training and test bags.
        epochs: number of epochs of a bag network.
        pretraining: training steps of ``cnn, pretrained``.
    """

    steps: int = 800
    lookup_steps: int = 300
    persons: int = 38
    bags: tuple[int, int] = (1000, 1000)
    epochs: int = 10
    pretraining: int = 500


QUICK = Size(steps=1, lookup_steps=1, persons=3, bags=(4, 4), epochs=1, pretraining=1)


class Measurement(NamedTuple):
    """One trained network. The seed determines the data and the training."""

    part: str
    damage: str
    network: str
    seed: int
    settings: str


def measurements(parts: list[str], seeds: int, size: Size) -> list[Measurement]:
    """Returns all measurements of some parts."""
    found = []
    if "faces" in parts:
        for seed, kind, name in product(range(seeds), LEVELS, FACE_NETWORKS):
            found.append(Measurement("faces", kind, name, seed, f"{size.persons} persons, {_steps(name, size)} steps"))
    if "bags" in parts:
        settings = f"{size.bags[0]} bags, {size.epochs} epochs, {STORED} stored"
        for seed, level, name in product(range(seeds), BAG_LEVELS, BAG_NETWORKS):
            found.append(Measurement("bags", f"pixels {level}", name, seed, settings))
    return found


def measure(wanted: Measurement, folder: Path, size: Size, device: torch.device) -> dict[str, float]:
    """Trains one network and returns its figures."""
    torch.manual_seed(wanted.seed)
    return (measure_faces if wanted.part == "faces" else measure_bags)(wanted, folder, size, device)


def _steps(name: str, size: Size) -> int:
    if name == "lookup, not trained":
        return 0
    return size.lookup_steps if name == "lookup" else size.steps


def damage(kind: str, level: Level, side: int) -> Variant:
    """Returns the damage of images: random values of pixels, or a covered block of random brightness."""
    if kind == "pixels":
        return Replaced(level, low=0.0, high=1.0)
    return Occluded(level, (side, side))


def measure_faces(wanted: Measurement, folder: Path, size: Size, device: torch.device) -> dict[str, float]:
    """Returns the accuracy on the faces that are not stored, by the fraction that is damaged."""
    images, labels, _ = load("faces", folder)
    shown = labels < size.persons
    images, labels = images[shown].to(device), labels[shown].to(device)
    side, kind = round(images.shape[1] ** 0.5), wanted.damage
    chosen = half_of_each(labels, wanted.seed)
    model = FaceClassifier(wanted.network, images[chosen], labels[chosen], side, kind).to(device)
    steps = _steps(wanted.network, size)
    if steps:
        variant = damage(kind, TRAINED[kind], side)
        train_faces(model, images[chosen], labels[chosen], variant, steps, wanted.seed)
    found = {}
    for level in LEVELS[kind]:
        generator = torch.Generator(device).manual_seed(1000 + wanted.seed)
        query = damage(kind, level, side)(images[~chosen], generator)
        found[str(level)] = accuracy(model.eval(), query, labels[~chosen])
    return found


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Returns the fraction of images that are classified correctly."""
    predicted = torch.cat([model(part).argmax(-1) for part in torch.split(images, 256)])
    return (predicted == labels).double().mean().item()


def half_of_each(labels: Tensor, seed: int) -> Tensor:
    """Chooses a random half of each class: bool ``(n,)``."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).to(labels.device)
    chosen = torch.zeros_like(labels, dtype=torch.bool)
    for label in labels.unique():
        own = order[labels[order] == label]
        chosen[own[: len(own) // 2]] = True
    return chosen


class PackedBags:
    """All instances of some bags on a device, concatenated."""

    def __init__(self, data: BagSet, index: range, device: torch.device) -> None:
        bags = [data.read(number) for number in index]
        self.rows, self.labels = torch.cat(bags).to(device), data.labels[list(index)].to(device)
        self.sizes = [len(bag) for bag in bags]
        self.starts = np.cumsum([0, *self.sizes])

    def gather(self, chosen: list[int]) -> tuple[Tensor, list[int], Tensor]:
        """Returns instances, sizes and labels of the chosen bags."""
        rows = torch.cat([self.rows[self.starts[number] : self.starts[number + 1]] for number in chosen])
        return rows, [self.sizes[number] for number in chosen], self.labels[chosen]


def measure_bags(wanted: Measurement, folder: Path, size: Size, device: torch.device) -> dict[str, float]:
    """Returns the AUC of bags of damaged digits: does a bag hold a nine?"""
    level, name, seed = float(wanted.damage.split()[1]), wanted.network, wanted.seed
    generator = np.random.default_rng(seed)
    digits, classes, _ = load("digits", folder)
    data = bags_of_digits(digits, classes.numpy(), 10_000, size.bags, generator, STORED)
    damaged = damage_bags(data, level, seed)
    train = PackedBags(data if name == "repair" else damaged, range(size.bags[0]), device)
    test, stored = PackedBags(damaged, data.test, device), data.stored.to(device)
    first = first_layer(name, stored).to(device)
    if name == "cnn, pretrained":
        pretrain(first, stored, level, size.pretraining, seed)
    if name == "lookup, not trained":
        first.requires_grad_(False)
    model = BagClassifier(nn.Sequential(first, embed_digits(64)), HopfieldPool(dropout=0.5)).to(device)
    steps = -(-size.bags[0] // 32)
    order = torch.Generator().manual_seed(seed)
    batches = [part for _ in range(size.epochs) for part in torch.randperm(size.bags[0], generator=order).split(32)]

    def loss(step: int) -> Tensor:
        rows, sizes, labels = train.gather(batches[step].tolist())
        return nn.functional.binary_cross_entropy_with_logits(model(rows, sizes)[0], labels)

    optimize(model, loss, size.epochs * steps, 2e-3)
    if name == "repair":
        memory = ah.AssociativeMemory(stored.unflatten(1, (28, 28)))
        memory.fit(seed=seed, progress=False)
        test.rows = memory.repair(test.rows).values
    with torch.no_grad():
        parts = torch.arange(len(test.sizes)).split(32)
        logits = torch.cat([model(*test.gather(part.tolist())[:2])[0] for part in parts])
    return {"auc": auc(test.labels, logits)}


def pretrain(first: nn.Module, stored: Tensor, level: float, steps: int, seed: int) -> None:
    """Trains a first layer to restore damaged stored digits, with the same information that a lookup has."""
    generator = torch.Generator(stored.device).manual_seed(seed)
    variant = damage("pixels", level, 28)

    def loss(step: int) -> Tensor:
        index, images = variant.sample(stored, 128, generator)
        return nn.functional.mse_loss(first(images), stored[index])

    optimize(first, loss, steps, 2e-3)

"""Stored patterns, queries and their damage: faces, MNIST, scikit-learn's digits, embeddings and sensors."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.search.data import load

Damage = Callable[[Tensor, Tensor, torch.Generator], Tensor]
"""Damages patterns ``(n, d)`` at levels ``(n, 1)``."""

NAMES = {
    "faces16": "faces of 16 x 16 pixels, person",
    "faces32": "faces of 32 x 32 pixels, person",
    "mnist": "MNIST digits, class",
    "digits": "scikit-learn's digits, pattern",
    "embeddings": "unit-norm embeddings, 70 % erased, pattern",
    "sensors": "48 sensors in different units, pattern",
}
"""Data set -> what it is, and what is to be found."""

LEVELS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9)


class Task(NamedTuple):
    """A data set, and what is asked.

    Attributes:
        stored: the stored patterns ``(N, d)``.
        labels: their classes ``(N,)``; None if the pattern itself is to be found.
        asked: intact queries ``(n, d)``.
        target: the class or the pattern that each query belongs to ``(n,)``.
        damage: what happens to a query.
        levels: the measured levels of the damage.
        highest: the highest level that a fit draws.
        unit: the unit of each dimension for the baselines.
        spare: further patterns, which are neither stored nor asked; None if the pattern itself is to be found.
        spare_labels: the classes of the further patterns.
    """

    stored: Tensor
    labels: Tensor | None
    asked: Tensor
    target: Tensor
    damage: Damage
    levels: Sequence[float]
    highest: float
    unit: Tensor = torch.ones(())
    spare: Tensor | None = None
    spare_labels: Tensor | None = None

    def to(self, device: torch.device) -> "Task":
        """Moves all tensors to a device."""
        moved: dict[str, Any] = {key: x.to(device) for key, x in self._asdict().items() if isinstance(x, Tensor)}
        return self._replace(**moved)

    def scaled(self, factor: float) -> "Task":
        """Multiplies all values by a factor."""

        def damage(x: Tensor, level: Tensor, generator: torch.Generator) -> Tensor:
            return factor * self.damage(x / factor, level, generator)

        scaled = {key: factor * getattr(self, key) for key in ("stored", "asked", "unit")}
        return self._replace(damage=damage, **scaled)

    def queries(self, generator: torch.Generator) -> dict[float, Tensor]:
        """Damages the queries at each level."""
        levels = {level: torch.full((len(self.asked), 1), level).to(self.asked) for level in self.levels}
        return {level: self.damage(self.asked, each, generator) for level, each in levels.items()}

    def pairs(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws pairs of a class, or of the index of a stored pattern, and a damaged query."""
        origin, target = self.spare, self.spare_labels
        if origin is None or target is None:
            origin, target = self.stored, torch.arange(len(self.stored), device=self.stored.device)
        index = torch.randint(len(origin), (count,), generator=generator, device=origin.device)
        return target[index], self.draw(origin[index], generator)

    def draw(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Damages each pattern at a random level of the range."""
        level = torch.rand(len(x), 1, generator=generator, device=x.device) * self.highest
        return self.damage(x, level, generator)

    def accuracy(self, index: Tensor) -> float:
        """Returns the fraction of queries whose class, or pattern, is that of the stored pattern ``index``."""
        found = index if self.labels is None else self.labels[index]
        return (found == self.target).double().mean().item()


def replace(low: Tensor, high: Tensor) -> Damage:
    """Replaces values by uniform ones between ``low`` and ``high``; the level is the probability."""

    def damage(x: Tensor, level: Tensor, generator: torch.Generator) -> Tensor:
        wrong, values = torch.rand(2, *x.shape, generator=generator, device=x.device)
        return torch.where(wrong < level, low.to(x) + (high - low).to(x) * values, x)

    return damage


def erase(origin: Tensor, level: Any, generator: torch.Generator | None = None) -> Tensor:
    """Adds noise with half the deviation of unit vectors ``(n, d)``, and erases a fraction 0.7 of the dimensions."""
    noise = torch.empty_like(origin).normal_(generator=generator) * (0.5 / origin.shape[1] ** 0.5)
    kept = torch.empty_like(origin).uniform_(generator=generator) >= 0.7
    return (origin + noise) * kept


def break_sensors(stored: Tensor) -> Damage:
    """Adds noise, and makes sensors stuck, spiking or missing; the level is the fraction of these."""

    def damage(x: Tensor, level: Tensor, generator: torch.Generator) -> Tensor:
        values, deviation = stored.to(x), stored.std(0).to(x)
        wrong, kind, size = torch.rand(3, *x.shape, generator=generator, device=x.device)
        noise = torch.empty_like(x).normal_(generator=generator)
        row = torch.randint(len(values), x.shape, generator=generator, device=x.device)
        other = values.gather(0, row)
        spike = x + (3 + 7 * size) * deviation * torch.sign(noise)
        fault = torch.where(kind < 1 / 3, other, torch.where(kind < 2 / 3, spike, torch.nan))
        return torch.where(wrong < level, fault, x + 0.1 * deviation * noise)

    return damage


def images(name: str, folder: Path) -> tuple[Tensor, Tensor]:
    """Loads faces of 16 x 16 or 32 x 32 pixels, or MNIST."""
    rows, labels, _ = load("digits" if name == "mnist" else "faces", folder)
    if name == "mnist":
        return rows, labels
    side = int(name.removeprefix("faces"))
    cells = rows.reshape(-1, side, 32 // side, side, 32 // side)
    return cells.mean((2, 4)).flatten(1), labels


def make_task(name: str, folder: Path, generator: torch.Generator) -> Task:
    """Draws a split of a data set."""
    if name in ("faces16", "faces32", "mnist"):
        rows, labels = images(name, folder)
        order = torch.randperm(len(rows), generator=generator)
        sizes = (1207, 1207, 1207) if name == "mnist" else (1000, 600, len(order) - 1600)
        stored, asked, spare = order[: sum(sizes)].split(sizes)
        damage = replace(torch.zeros(()), torch.ones(()))
        task = Task(rows[stored], labels[stored], rows[asked], labels[asked], damage, LEVELS, 0.9)
        return task._replace(spare=rows[spare], spare_labels=labels[spare])
    if name == "digits":
        from sklearn.datasets import load_digits

        rows = torch.from_numpy(load_digits().data.astype(np.float32) / 16)
        return Task(rows, None, rows, torch.arange(len(rows)), replace(rows.amin(0), rows.amax(0)), LEVELS, 0.9)
    if name == "embeddings":
        rows = normalize(torch.randn(500, 64, generator=generator), dim=-1)
        target = torch.randint(len(rows), (2000,), generator=generator)
        return Task(rows, None, rows[target], target, erase, (0.7,), 0.7)
    hidden = torch.randn(800, 12, generator=generator) @ torch.randn(12, 48, generator=generator) / 12**0.5
    own = hidden + 0.5 * torch.randn(800, 48, generator=generator)
    units, means = 10 ** (6 * torch.rand(48, generator=generator) - 3), torch.randn(48, generator=generator)
    rows = (own + 3 * means) * units
    return Task(rows, None, rows, torch.arange(800), break_sensors(rows), (0.0, 0.2, 0.4, 0.6), 0.6, rows.std(0))

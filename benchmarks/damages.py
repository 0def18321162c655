"""Damages of queries that the benchmarks have beside the package: a covered block of an image, faults of sensors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ahop_layers.memory.variants import Level, Missing, Variant, known_range

Values = Callable[[Tensor, Generator | None], Tensor]
"""Returns wrong values ``(n, d)`` for rows ``(n, d)``."""


def random_level(rows: Tensor, level: Level, generator: Generator | None) -> Tensor:
    """Returns the level of each row, drawn uniformly from a range: ``(n, d) -> (n, 1)``."""
    if not isinstance(level, tuple):
        return torch.full_like(rows[:, :1], level)
    return torch.empty_like(rows[:, :1]).uniform_(*level, generator=generator)


def random_block(rows: Tensor, share: Level, shape: tuple[int, int], generator: Generator | None) -> Tensor:
    """Chooses a block of each image ``(n, height * width)``, with its aspect ratio and ``share`` of its area: bool."""
    side, inside = random_level(rows, share, generator).sqrt(), []
    for size in shape:
        length = (side * size).round()
        start = torch.empty_like(side).uniform_(generator=generator) * (size - length + 1)
        first = start.floor().minimum(size - length)  # the product can round up
        place = torch.arange(size, device=rows.device)
        inside.append((place >= first) & (place < first + length))
    return (inside[0][:, :, None] & inside[1][:, None, :]).flatten(1)


@dataclass(frozen=True)
class Occluded(Variant):
    """Covers a block at a random position of an image with a random brightness from 0 to 1.

    >>> (Occluded(0.25, (4, 4))(torch.full((2, 16), 2.0)) < 2).sum(-1)
    tensor([4, 4])
    """

    share: Level
    shape: tuple[int, int]

    def __call__(self, origin: Tensor, generator: Generator | None = None) -> Tensor:
        """Damages each row of ``origin (n, height * width)``."""
        inside = random_block(origin, self.share, self.shape, generator)
        return torch.where(inside, random_level(origin, (0.0, 1.0), generator), origin)


@dataclass(frozen=True)
class Wrong(Variant):
    """Gives a share of the values of each row the values that a function returns in their place.

    >>> Wrong(0.5, lambda rows, generator: rows + 1)(torch.zeros(3, 8)).sum(-1)
    tensor([4., 4., 4.])
    """

    share: Level
    values: Values

    def __call__(self, origin: Tensor, generator: Generator | None = None) -> Tensor:
        """Damages each row of ``origin (n, d)``."""
        wrong = Missing(self.share)(origin, generator).isnan()
        return torch.where(wrong, self.values(origin, generator), origin)


@dataclass(frozen=True, eq=False)
class Drifted(Variant):
    """Multiplies the distances of adjacent columns from their mean by one gain of each row, from a quarter to four.

    >>> (Drifted(0.5, torch.zeros(8))(torch.ones(3, 8)) != 1).sum(-1)
    tensor([4, 4, 4])
    """

    share: Level
    mean: Tensor

    def __call__(self, origin: Tensor, generator: Generator | None = None) -> Tensor:
        """Damages each row of ``origin (n, d)``, from a random column on."""
        start, gain = torch.rand(2, len(origin), 1, generator=generator, device=origin.device)
        place = torch.arange(origin.shape[1], device=origin.device) / origin.shape[1]
        inside = (place - start) % 1 < random_level(origin, self.share, generator)
        return torch.where(inside, self.mean + (origin - self.mean) * 2 ** (4 * gain - 2), origin)


def sensor_faults(stored: Tensor) -> dict[str, Values]:
    """Returns how values go wrong, for :class:`Wrong`.

    Values are ``swapped`` with another row of ``stored (N, d)``, ``stuck`` at one value of their column, ``saturated``
    at an end of its range, ``spikes`` of 3 to 10 of its deviations, or ``missing``. Under ``faults``, each value is one
    of the last four.

    >>> values = sensor_faults(torch.rand(9, 4))["saturated"]
    >>> Wrong(0.5, values)(torch.full((2, 4), 5.0)).eq(5).sum(-1)
    tensor([2, 2])
    """
    (low, high), deviation = known_range(stored), stored.std(0)

    def uniform(rows: Tensor, generator: Generator | None) -> Tensor:
        return torch.rand(rows.shape, generator=generator, device=rows.device)

    def swapped(rows: Tensor, generator: Generator | None) -> Tensor:
        return stored.gather(0, (uniform(rows, generator) * len(stored)).long().clamp(max=len(stored) - 1))

    constants = swapped(stored[:1], Generator(stored.device).manual_seed(1))

    def stuck(rows: Tensor, _: Generator | None) -> Tensor:
        return constants.expand_as(rows)

    def saturated(rows: Tensor, generator: Generator | None) -> Tensor:
        return torch.where(uniform(rows, generator) < 0.5, low, high)

    def spikes(rows: Tensor, generator: Generator | None) -> Tensor:
        size = 14 * uniform(rows, generator) - 7
        return rows + (size + 3 * size.sign()) * deviation

    def missing(rows: Tensor, _: Generator | None) -> Tensor:
        return torch.full_like(rows, torch.nan)

    kinds: dict[str, Values] = {"stuck": stuck, "saturated": saturated, "spikes": spikes, "missing": missing}

    def faults(rows: Tensor, generator: Generator | None) -> Tensor:
        number = (uniform(rows, generator) * len(kinds)).long().clamp(max=len(kinds) - 1)
        return torch.stack([values(rows, generator) for values in kinds.values()]).gather(0, number[None])[0]

    return kinds | {"swapped": swapped, "faults": faults}

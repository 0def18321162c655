"""A covered block of an image, as a damage of queries."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ahop_layers.memory.variants import Level, Variant


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

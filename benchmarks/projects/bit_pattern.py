"""hopfield-layers, bit patterns: a Hopfield layer relates the instances of a bag."""

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from benchmarks.projects.project import Project


def build(layers: Any) -> nn.Module:
    """Builds the network of the example."""
    return nn.Sequential(layers.Hopfield(input_size=8), nn.Flatten(), nn.Linear(8 * 16, 1), nn.Flatten(0))


def batch(generator: Generator) -> tuple[Tensor, Tensor]:
    """Draws bags of 16 bit patterns; two of the patterns in half of the bags are among 8 signals."""
    signals = torch.randint(0, 2, (8, 8), generator=Generator().manual_seed(43))
    patterns = torch.arange(1, 256)[:, None] >> torch.arange(8) & 1
    others = patterns[~(patterns[:, None] == signals).all(-1).any(-1)]
    bags = others[torch.randint(len(others), (32, 16), generator=generator)]
    for bag in bags[:16]:
        places = torch.randperm(16, generator=generator)[:2]
        bag[places] = signals[torch.randint(8, (2,), generator=generator)]
    return bags.float(), (torch.arange(32) < 16).float()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Computes the loss of the classes."""
    return functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


PROJECT = Project("`Hopfield`, one tensor is all three patterns", build, batch, loss)

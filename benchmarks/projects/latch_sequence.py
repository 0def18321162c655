"""hopfield-layers, latch sequences: a pooling layer finds the first character of a sequence."""

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from benchmarks.projects.bit_pattern import loss
from benchmarks.projects.project import Project


def build(layers: Any) -> nn.Module:
    """Builds the network of the example."""
    return nn.Sequential(layers.HopfieldPooling(input_size=6), nn.Linear(6, 1), nn.Flatten(0))


def batch(generator: Generator) -> tuple[Tensor, Tensor]:
    """Draws sequences of 20 characters."""
    characters = torch.randint(2, 6, (32, 20), generator=generator)
    targets = characters[:, 0] = torch.randint(0, 2, (32,), generator=generator)
    return functional.one_hot(characters, 6).float(), targets.float()


PROJECT = Project("`HopfieldPooling` of 6 dimensions", build, batch, loss, blocks=3)

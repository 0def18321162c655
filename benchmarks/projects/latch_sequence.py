"""hopfield-layers, latch sequences: a pooling layer finds the first character of a sequence."""

from typing import Any

import torch
from torch import Generator, Tensor, nn

from ahop_layers.hflayers.auxiliary.data import LatchSequenceSet
from benchmarks.projects.bit_pattern import loss
from benchmarks.projects.project import Project


def build(layers: Any) -> nn.Module:
    """Builds the network of the example."""
    return nn.Sequential(layers.HopfieldPooling(input_size=6), nn.Linear(6, 1), nn.Flatten(0))


def batch(generator: Generator) -> tuple[Tensor, Tensor]:
    """Draws sequences of 20 characters."""
    data = LatchSequenceSet(num_samples=32, seed=int(torch.randint(10**6, (1,), generator=generator)))
    return torch.stack([item["data"] for item in data]), data.targets.float()  # type: ignore[attr-defined]


PROJECT = Project("`HopfieldPooling` of 6 dimensions", build, batch, loss, blocks=3)

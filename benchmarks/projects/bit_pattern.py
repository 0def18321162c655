"""hopfield-layers, bit patterns: a Hopfield layer relates the instances of a bag."""

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from ahop_layers.hflayers.auxiliary.data import BitPatternSet
from benchmarks.projects.project import Project, supervised


def build(layers: Any) -> nn.Module:
    """Builds the network of the example."""
    return nn.Sequential(layers.Hopfield(input_size=8), nn.Flatten(), nn.Linear(8 * 16, 1), nn.Flatten(0))


def batch(generator: Generator) -> tuple[Tensor, Tensor]:
    """Draws bags of 16 bit patterns."""
    seed = int(torch.randint(10**6, (1,), generator=generator))
    bags = BitPatternSet(num_bags=32, num_instances=16, num_signals=8, num_signals_per_bag=2, seed_data=seed)
    return bags.bags.float(), bags.targets.float()


loss = supervised(functional.binary_cross_entropy_with_logits)
PROJECT = Project("`Hopfield`, one tensor is all three patterns", build, batch, loss)

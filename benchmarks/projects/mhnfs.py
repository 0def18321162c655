"""MHNfs: the context module enriches query and support molecules by a large reference set."""

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from benchmarks.projects.project import Project, supervised

WIDTH, REFERENCE = 128, 256


def initialize(module: nn.Module) -> None:
    """Initializes linear layers, as the project does with ``apply``."""
    if type(module) is nn.Linear:
        nn.init.kaiming_normal_(module.weight, nonlinearity="linear")


class Context(nn.Module):
    """The Hopfield layer and a classifier by similarity to the support set."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.encoder = nn.Linear(32, WIDTH)
        self.hopfield = layers.Hopfield(
            input_size=WIDTH, hidden_size=64, stored_pattern_size=WIDTH, pattern_projection_size=WIDTH,
            output_size=WIDTH, num_heads=4, scaling=0.044, dropout=0.5,
        )  # fmt: skip
        self.hopfield.apply(initialize)

    def forward(self, molecules: Tensor, reference: Tensor) -> Tensor:
        """Returns a logit for each task; the first molecule is the query, the next 4 are active, the rest inactive."""
        embedded, stored = self.encoder(molecules), self.encoder(reference)
        flat = embedded.reshape(1, -1, WIDTH)
        enriched = (flat + self.hopfield((stored, flat, stored))).reshape(embedded.shape)
        scores = functional.normalize(enriched[:, :1], dim=-1) @ functional.normalize(enriched[:, 1:], dim=-1).mT
        return 4 * (scores[:, 0, :4].mean(1) - scores[:, 0, 4:].mean(1))


def batch(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draws tasks of a query, 4 active and 4 inactive molecules, and a reference set."""
    label = torch.randint(2, (8,), generator=generator)
    molecules = torch.randn(8, 9, 32, generator=generator)
    molecules[:, 1:5, 0] += 2
    molecules[:, 0, 0] += 2.0 * label
    return molecules, torch.randn(1, REFERENCE, 32, generator=generator), label.float()


loss = supervised(functional.binary_cross_entropy_with_logits)
PROJECT = Project("`Hopfield` with a reference set, initialized by `apply`", Context, batch, loss)

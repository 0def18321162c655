"""HyperPCM: a context module enriches embeddings of proteins with a memory of other proteins."""

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from benchmarks.projects.project import Project, supervised

WIDTH = 64


class Context(nn.Module):
    """Associates a batch of embeddings with a memory; the batch is the second dimension."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.hopfield = layers.Hopfield(
            input_size=WIDTH, hidden_size=32, stored_pattern_size=WIDTH, pattern_projection_size=WIDTH,
            output_size=WIDTH, num_heads=8, scaling=32**-0.5, dropout=0.5,
        )  # fmt: skip
        self.hopfield.apply(lambda module: isinstance(module, nn.Linear) and nn.init.zeros_(module.bias))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, embedding: Tensor, memory: Tensor) -> Tensor:
        """Returns logits of ``(N, WIDTH)``, given a memory ``(S, WIDTH)``; the residual is added in place."""
        states, stored = embedding.unsqueeze(0), memory.unsqueeze(0)
        enriched = self.hopfield((stored, states, stored))
        enriched += states
        return self.head(enriched.squeeze(0)).squeeze(-1)


def batch(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draws embeddings, a memory without them, and labels."""
    x = torch.randn(16, WIDTH, generator=generator)
    return x, torch.randn(100, WIDTH, generator=generator), (x[:, 0] > 0).float()


loss = supervised(functional.binary_cross_entropy_with_logits)
PROJECT = Project("`Hopfield` with a memory, the residual added in place", Context, batch, loss)

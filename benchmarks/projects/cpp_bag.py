"""cpp_bag: a pooling layer summarizes the cells of a slide, whose number differs."""

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from benchmarks.projects.project import Project, supervised


class Slides(nn.Module):
    """Cell features, pooled with several heads, to the class of a slide."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(128, 64), nn.ReLU())
        self.pooling = layers.HopfieldPooling(input_size=64, hidden_size=32, num_heads=4, quantity=1, dropout=0.1)
        self.head = nn.Linear(64, 5)

    def forward(self, cells: Tensor, padding: Tensor) -> Tensor:
        """Classifies padded bags ``(N, S, 128)``; True in ``padding`` is no cell."""
        return self.head(self.pooling(self.embed(cells), stored_pattern_padding_mask=padding))


def batch(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draws slides of 20 to 100 cells."""
    sizes, label = (torch.randint(*span, (8,), generator=generator) for span in ((20, 101), (0, 5)))
    cells = torch.randn(8, 100, 128, generator=generator)
    cells[torch.arange(8), :10, label] += 2
    return cells, torch.arange(100) >= sizes[:, None], label


loss = supervised(functional.cross_entropy)
PROJECT = Project("`HopfieldPooling` with padding masks", Slides, batch, loss)

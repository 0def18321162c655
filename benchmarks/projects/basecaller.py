"""Hopfield basecaller: ``nn.TransformerEncoder`` of Hopfield encoder layers after a convolution."""

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from ahop_layers.hflayers.transformer import HopfieldEncoderLayer
from benchmarks.projects.project import Project

WIDTH = 64


class Basecaller(nn.Module):
    """A signal to the log probabilities of bases, with CTC."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(1, WIDTH, 9, stride=3, padding=4), nn.ReLU())
        # Without dropout: its mask depends on the strides of the layer's output, which hflayers returns transposed.
        layer = HopfieldEncoderLayer(layers.Hopfield(input_size=WIDTH, num_heads=4), dim_feedforward=128, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, signal: Tensor) -> Tensor:
        """Returns log probabilities ``(T, N, 5)`` of a signal ``(N, 1, samples)``."""
        return self.head(self.encoder(self.stem(signal).mT)).log_softmax(-1).transpose(0, 1)


def batch(generator: Generator) -> tuple[Tensor, Tensor]:
    """Draws signals whose level follows a sequence of bases."""
    bases = torch.randint(1, 5, (8, 12), generator=generator)
    levels = bases.repeat_interleave(12, dim=1).float().unsqueeze(1) - 2.5
    return levels + 0.3 * torch.randn(levels.shape, generator=generator), bases


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Computes the CTC loss."""
    steps = model(batch[0])
    lengths = torch.full((len(batch[1]),), len(steps)), torch.full((len(batch[1]),), batch[1].shape[1])
    return functional.ctc_loss(steps, batch[1], *lengths)


PROJECT = Project("`HopfieldEncoderLayer` in `nn.TransformerEncoder`", Basecaller, batch, loss)

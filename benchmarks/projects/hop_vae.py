"""Hop-VAE: a lookup layer with static patterns in place of a vector-quantized bottleneck."""

from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.projects.project import Project

WIDTH = 64


class Autoencoder(nn.Module):
    """Looks each position of an encoded image up among learned patterns."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, WIDTH, 4, 2, 1))
        self.hopfield = layers.HopfieldLayer(
            input_size=WIDTH, quantity=128, stored_pattern_as_static=True, state_pattern_as_static=True
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(WIDTH, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Reconstructs images ``(N, 3, 32, 32)``."""
        encoded = self.encoder(images)
        retrieved = self.hopfield(encoded.flatten(2).mT)
        return self.decoder(retrieved.mT.unflatten(2, encoded.shape[2:]))


def batch(generator: Generator) -> Tensor:
    """Draws smooth images."""
    return nn.functional.interpolate(torch.randn(8, 3, 4, 4, generator=generator), size=32, mode="bilinear")


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Computes the reconstruction error."""
    return (model(batch) - batch).square().mean()


PROJECT = Project("`HopfieldLayer`, static stored and state patterns", Autoencoder, batch, loss)

"""Hopfield-integrated-test: a pooling layer with update steps denoises images; a bag is one image."""

from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.projects.project import Project, supervised


class Denoiser(nn.Module):
    """An image as a bag of one pattern, whose weight is always 1: only projections and norms are trained."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.hopfield_pool = layers.HopfieldPooling(
            input_size=28 * 28, hidden_size=8, num_heads=8, update_steps_max=5, scaling=0.25
        )

    def forward(self, images: Tensor) -> Tensor:
        """Restores images ``(N, 1, 28, 28)``."""
        return self.hopfield_pool(images.view(-1, 1, 28 * 28)).view(-1, 1, 28, 28).sigmoid()


def batch(generator: Generator) -> tuple[Tensor, Tensor]:
    """Draws smooth images, and the same with noise."""
    coarse = torch.rand(20, 1, 4, 4, generator=generator)
    images = nn.functional.interpolate(coarse, size=28, mode="bilinear")
    return (images + 0.5 * torch.randn(images.shape, generator=generator)).clamp(0, 1), images


loss = supervised(nn.functional.mse_loss)
PROJECT = Project("`HopfieldPooling` over bags of one pattern, with update steps", Denoiser, batch, loss, blocks=2)

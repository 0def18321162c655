"""HopCPT: the errors of similar time steps predict the error of the present one."""

from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.projects.project import Project

WIDTH = 32


class Errors(nn.Module):
    """Associates encoded contexts and reads the absolute errors, which are not projected."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.hopfield = layers.Hopfield(
            batch_first=True, input_size=WIDTH, hidden_size=WIDTH, pattern_size=1, output_size=None, num_heads=1,
            stored_pattern_size=WIDTH, pattern_projection_size=1, scaling=1 / WIDTH**0.5,
            normalize_pattern_projection=False, normalize_pattern_projection_affine=False,
            pattern_projection_as_static=True, disable_out_projection=True,
        )  # fmt: skip

    def forward(self, context: Tensor, errors: Tensor) -> Tensor:
        """Predicts the absolute error ``(N, T, 1)`` of each step from all others."""
        encoded = self.encoder(context)
        mask = torch.eye(context.shape[1], dtype=torch.bool)
        triple = (encoded, encoded, errors.abs())
        weights = self.hopfield.get_association_matrix(triple, association_mask=mask)
        if weights.shape != (len(context), 1, context.shape[1], context.shape[1]):
            raise ValueError(f"expected one weight for each pair of steps, got {tuple(weights.shape)}")
        return self.hopfield(triple, association_mask=mask)


def batch(generator: Generator) -> tuple[Tensor, Tensor]:
    """Draws time series whose error depends on the context."""
    context = torch.randn(4, 64, 8, generator=generator)
    return context, context[..., :1].exp() * torch.randn(4, 64, 1, generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Computes the squared error of the predicted absolute error."""
    return (model(*batch) - batch[1].abs()).square().mean()


PROJECT = Project("`Hopfield` with static pattern projections of size 1", Errors, batch, loss)

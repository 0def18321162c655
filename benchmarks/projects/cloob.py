"""CLOOB: a static Hopfield layer retrieves the embeddings of images and texts before a contrastive loss."""

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from benchmarks.projects.project import NO_NORMS, STATIC, Project

DIM, BATCH = 1024, 256


class Pairs(nn.Module):
    """Two encoders and the layer, which is part of the model so that its similarity is trained."""

    def __init__(self, layers: Any, dim: int | None = None) -> None:
        super().__init__()
        dim = dim or DIM
        self.image, self.text = nn.Linear(64, dim), nn.Linear(64, dim)
        self.hopfield = layers.Hopfield(
            input_size=dim, scaling=8.0, disable_out_projection=True, num_heads=1, dropout=False, **STATIC, **NO_NORMS
        )

    def retrieve(self, stored: Tensor, state: Tensor) -> Tensor:
        """Retrieves states ``(batch, dim)`` from stored patterns of that shape, and normalizes them."""
        retrieved = self.hopfield((stored[None], state[None], stored[None])).squeeze(0)
        return functional.normalize(retrieved, dim=-1)


def batch(generator: Generator) -> tuple[Tensor, Tensor]:
    """Draws pairs with common content."""
    common = torch.randn(BATCH, 64, generator=generator)
    return common, common + 0.5 * torch.randn(BATCH, 64, generator=generator)


def infoloob(anchors: Tensor, samples: Tensor) -> Tensor:
    """Computes the contrastive loss that leaves the positive pair out of the denominator."""
    scores = 30.0 * anchors @ samples.T
    others = scores.masked_fill(torch.eye(len(scores), dtype=torch.bool), -torch.inf)
    return (others.logsumexp(1) - scores.diagonal()).mean() / 30.0


def loss(model: Pairs, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Computes the loss in both directions, with four retrievals."""
    image, text = (functional.normalize(x, dim=-1) for x in (model.image(batch[0]), model.text(batch[1])))
    by_image = infoloob(model.retrieve(image, image), model.retrieve(image, text))
    return by_image + infoloob(model.retrieve(text, text), model.retrieve(text, image))


PROJECT = Project(f"static `Hopfield`, {BATCH} x {BATCH} patterns of {DIM} dimensions", Pairs, batch, loss, blocks=16)

"""A bag classifier with a choice of pooling: the model of examples/mil.py and of the bag benchmark.

It embeds every instance, pools the instances of a bag to one vector, and applies a linear layer.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

import ahop_layers as ah
from ahop_layers.errors import check_choice
from examples.bags.pooling import POOLINGS, make_pooling
from examples.common.lookup import Lookup


class Standardize(nn.Module):
    """Standardizes features and clips them at four standard deviations; a constant feature becomes zero."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))

    def fit(self, bags: Iterable[Tensor]) -> None:
        """Computes mean and standard deviation of the features, one bag at a time."""
        count, total, squares = 0, 0.0, 0.0
        for bag in bags:
            wide = bag.double()
            count, total, squares = count + len(bag), total + wide.sum(0), squares + wide.square().sum(0)
        if count == 0:
            raise ah.AHopError("expected a training bag with instances, got only empty bags")
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        self.mean.copy_(mean)
        self.scale.copy_(torch.where(deviation > 1e-6 * (1 + mean.abs()), 1 / deviation, 0))

    def forward(self, instances: Tensor) -> Tensor:
        """Standardizes ``instances (total, features)``."""
        return ((instances - self.mean) * self.scale).clamp(-4, 4)


def embed_features(features: int, width: int) -> nn.Module:
    """Returns a linear layer with ReLU."""
    return nn.Sequential(nn.Linear(features, width), nn.ReLU())


def embed_digits(width: int, side: int = 28) -> nn.Module:
    """Returns a small convolutional network for images of 28 x 28 or 8 x 8 pixels, given as rows."""
    kernel, stride = (5, 2) if side == 28 else (3, 1)
    return nn.Sequential(
        nn.Unflatten(1, (1, side, side)), nn.Conv2d(1, 8, kernel, stride), nn.ReLU(), nn.Conv2d(8, 16, kernel, stride),
        nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, width), nn.ReLU(),
    )  # fmt: skip


FIRST = ("none", "lookup", "cnn")
"""First layers of a network for digits."""


def first_layer(name: str, side: int, stored: Tensor | None = None, keep: float = 1.0) -> nn.Module:
    """Returns a layer that maps corrupted images to images, rows of ``side * side`` pixels.

    Args:
        name: ``"none"``, ``"cnn"`` (three convolutions), or ``"lookup"``: reads similar stored images.
        side: height and width of an image.
        stored: clean images ``(N, side * side)`` for the lookup.
        keep: see :class:`~examples.common.lookup.Lookup`.

    Raises:
        AHopError: an unknown name, or a lookup without stored images.
    """
    check_choice("first", name, FIRST)
    if name == "lookup":
        if stored is None or not len(stored):
            raise ah.AHopError("first='lookup' needs stored images, got none")
        return Lookup(stored, keep=keep, blocks=[None, ah.patches(side, side, 2)])
    if name == "none":
        return nn.Identity()
    return nn.Sequential(
        nn.Unflatten(1, (1, side, side)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(), nn.Conv2d(32, 1, 3, padding=1), nn.Flatten(),
    )  # fmt: skip


class BagClassifier(nn.Module):
    """Embeds instances, pools bags, and classifies them.

    Args:
        embed: maps ``(total, features)`` to ``(total, width)``.
        pooling: a name of ``POOLINGS``.
        width: dimension of an embedded instance.
        heads: heads of the Hopfield association.
        head_width: dimension of a head, or hidden dimension of gated attention.
        scaling: factor of the scores of the Hopfield association.
        dropout: probability of dropping the weight of an instance in training.
        padded: see :class:`~examples.bags.pooling.HopfieldPool`.

    Raises:
        AHopError: an unknown pooling, or ``padded`` with a pooling that has no padded form.
    """

    def __init__(
        self,
        embed: nn.Module,
        pooling: str = "adaptive",
        width: int = 64,
        heads: int = 4,
        head_width: int = 32,
        scaling: float = 1.0,
        dropout: float = 0.0,
        padded: bool = False,
    ) -> None:
        super().__init__()
        check_choice("pooling", pooling, POOLINGS)
        self.embed, self.head = embed, nn.Linear(width, 1)
        self.pool = make_pooling(pooling, width, heads, head_width, scaling, dropout, padded)

    def forward(self, instances: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """Computes logits ``(bags,)`` and instance weights ``(total,)`` from ``instances (total, features)``.

        The pooled vector of an empty bag is zero before the output projection.
        """
        pooled, weights = self.pool(self.embed(instances), sizes)
        return self.head(pooled).squeeze(-1), weights


def auc(labels: Tensor, scores: Tensor) -> float:
    """Computes the area under the ROC curve; a tie counts half. NaN if a label is missing."""
    above, below = scores[labels == 1], scores[labels == 0]
    difference = above[:, None] - below
    return ((difference > 0).double() + 0.5 * (difference == 0)).mean().item()

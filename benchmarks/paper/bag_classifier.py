"""The bag classifier of the bag benchmarks: embeds every instance, pools a bag to one vector, applies a linear layer.

Bags are concatenated, without padding. Every pooling maps ``instances (total, width)`` and the sizes of the bags to
``pooled (bags, width)`` and the ``weights (total,)`` of the instances.
"""

from typing import Any

from einops import rearrange
from torch import Tensor, nn

import ahop_layers as ah
from ahop_layers.packed import Bags
from ahop_layers.separation import Separation


class HopfieldPool(nn.Module):
    """Pools by a Hopfield association; ``options`` are those of ``AdaptiveHopfieldPooling``."""

    def __init__(self, width: int = 64, heads: int = 4, head_width: int = 32, **options: Any) -> None:
        super().__init__()
        self.pooling = ah.AdaptiveHopfieldPooling(width, head_width, num_heads=heads, blocks=None, **options)

    def forward(self, instances: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """Returns the pooled bags and the weights of the instances, averaged over heads."""
        pooled, weights = self.pooling.pool_packed(instances, sizes, return_association=True)
        return pooled, weights.mean((1, 2))


class GatedPool(nn.Module):
    """Pools by gated attention: the score of an instance ``h`` is ``w . (tanh(V h) * sigmoid(U h))``."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.tanh, self.gate, self.score = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, 1)
        self.dropout, self.separation = nn.Dropout(dropout), Separation()

    def forward(self, instances: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """Returns the pooled bags and the weights of the instances."""
        bags = Bags(sizes, instances.device)
        scores = self.score(self.tanh(instances).tanh() * self.gate(instances).sigmoid())
        weights = self.separation(rearrange(scores, "t 1 -> t 1 1"), groups=bags)
        pooled = bags.read(self.dropout(weights), rearrange(instances, "t d -> t 1 d"))
        return rearrange(pooled, "n 1 1 d -> n d"), weights.flatten()


class BagClassifier(nn.Module):
    """Embeds instances, pools bags, and classifies them.

    Args:
        embed: maps ``(total, features)`` to ``(total, width)``.
        pool: a pooling; None for :class:`HopfieldPool`.
        width: dimension of an embedded instance.
    """

    def __init__(self, embed: nn.Module, pool: nn.Module | None = None, width: int = 64) -> None:
        super().__init__()
        self.embed, self.pool, self.head = embed, pool or HopfieldPool(width), nn.Linear(width, 1)

    def forward(self, instances: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """Computes logits ``(bags,)`` and instance weights ``(total,)`` from ``instances (total, features)``.

        The pooled vector of an empty bag is zero before the output projection.
        """
        pooled, weights = self.pool(self.embed(instances), sizes)
        return self.head(pooled).squeeze(-1), weights


def embed_digits(width: int) -> nn.Module:
    """Returns a small convolutional network for images of 28 x 28 pixels, given as rows."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 8, 5, 2), nn.ReLU(), nn.Conv2d(8, 16, 5, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 16, width), nn.ReLU(),
    )  # fmt: skip

"""A classifier of bags whose pooling can be exchanged: the model of examples/mil.py and benchmarks/mil.py.

Every instance is embedded, a pooling of mil_pooling.py makes one vector of a bag, and a linear layer classifies it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

import ahop_layers as ah
from ahop_layers.errors import check_choice
from examples.bags.pooling import POOLINGS, make_pooling


class Standardize(nn.Module):
    """Features in deviations from their mean, clipped at four; a feature that never varied becomes zero."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))

    def fit(self, bags: Iterable[Tensor]) -> None:
        """Measure mean and deviation, one bag at a time."""
        count, total, squares = 0, 0.0, 0.0
        for bag in bags:
            wide = bag.double()
            count, total, squares = count + len(bag), total + wide.sum(0), squares + wide.square().sum(0)
        if count == 0:
            raise ah.AHopError("expected an instance in some bag for training, got empty bags only")
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        self.mean.copy_(mean)
        self.scale.copy_(torch.where(deviation > 1e-6 * (1 + mean.abs()), 1 / deviation, 0))

    def forward(self, instances: Tensor) -> Tensor:
        """``(total, features)``, both."""
        return ((instances - self.mean) * self.scale).clamp(-4, 4)


def embed_features(features: int, width: int) -> nn.Module:
    """One layer over a row of features."""
    return nn.Sequential(nn.Linear(features, width), nn.ReLU())


def embed_digits(width: int) -> nn.Module:
    """A small convolution over 28 x 28 pixels, which come as a row of 784."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 16, width), nn.ReLU(),
    )  # fmt: skip


class BagClassifier(nn.Module):
    """Embed, pool, classify.

    Args:
        embed: from ``(total, features)`` to ``(total, width)``.
        pooling: a name of ``POOLINGS``.
        width: of an embedded instance.
        heads, head_width, scaling: of a Hopfield association; gated attention is ``head_width`` wide.
        dropout: the probability with which the weight of an instance is dropped in training.
        padded: see :class:`HopfieldPool`.
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
        """``instances (total, features)`` -> logits ``(bags,)`` and weights of instances ``(total,)``.

        An empty bag is pooled to what no instance at all reads (zeros before the output projection), and classified.
        """
        pooled, weights = self.pool(self.embed(instances), sizes)
        return self.head(pooled).squeeze(-1), weights


def auc(labels: Tensor, scores: Tensor) -> float:
    """How often a bag of label 1 scores above one of label 0, a tie counting half; NaN if a label is missing."""
    above, below = scores[labels == 1], scores[labels == 0]
    difference = above[:, None] - below
    return ((difference > 0).double() + 0.5 * (difference == 0)).mean().item()

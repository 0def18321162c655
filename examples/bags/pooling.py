"""Poolings of the embedded instances of a bag to one vector. Bags are concatenated, without padding.

Five poolings are Hopfield associations with the same projections:

- ``adaptive``: the learned similarity of this package (A-Hop), which is initialized to the dot product;
- ``dot``: the dot product, the modern Hopfield network (M-Hop);
- ``sparse``: the dot product with sparsemax as separation (S-Hop);
- ``kernel``: ``(phi q) . (phi k)`` with a learned matrix per head and 1.5-entmax as separation (K-Hop);
- ``uniform``: equal weights, the baseline that needs no score.

The others are ``gated`` attention (Ilse et al., 2018) and the ``mean`` and ``max`` of the embedded instances.
"""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import ahop_layers as ah
from ahop_layers.packed import Bags
from ahop_layers.separation import Separation
from examples.common.kernel_similarity import KernelSimilarity
from examples.common.similarities import Constant, DotProduct

SEPARATIONS = {
    "adaptive": "softmax",
    "dot": "softmax",
    "sparse": "sparsemax",
    "kernel": "entmax15",
    "uniform": "softmax",
}


SIMILARITIES = {"dot": DotProduct, "sparse": DotProduct, "kernel": KernelSimilarity, "uniform": Constant}


class HopfieldPool(nn.Module):
    """Pools packed bags by a Hopfield association.

    Args:
        width: dimension of an instance.
        name: a key of ``SEPARATIONS``.
        heads, head_width, scaling, dropout: see ``AdaptiveHopfieldPooling``.
        padded: pad the bags, for comparison. The outputs are equal; the separation loss of K-Hop is not, because it
            then covers each bag alone, including the padding.
    """

    def __init__(
        self, width: int, name: str, heads: int, head_width: int, scaling: float, dropout: float, padded: bool = False
    ) -> None:
        super().__init__()
        self.padded = padded
        self.pooling = ah.AdaptiveHopfieldPooling(
            width,
            head_width,
            num_heads=heads,
            scaling=scaling,
            dropout=dropout,
            separation=SEPARATIONS[name],
            similarity=SIMILARITIES.get(name),
        )

    def forward(self, instances: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """Pools ``instances (total, width)`` to ``(bags, width)``; also returns their weights ``(total,)``."""
        if not self.padded:
            pooled, weights = self.pooling.pool_packed(instances, sizes, return_association=True)
            return pooled, weights.mean((1, 2))
        rows = pad_sequence(list(instances.split(sizes)), batch_first=True)
        blocked = torch.arange(rows.shape[1]) >= torch.tensor(sizes)[:, None]
        blocked = blocked.to(rows.device)
        weights = self.pooling.get_association_matrix(rows, blocked).mean((1, 2))
        return self.pooling(rows, blocked), weights[~blocked]


class GatedPool(nn.Module):
    """Pools by gated attention: the score of an instance ``h`` is ``w . (tanh(V h) * sigmoid(U h))``."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.tanh, self.gate, self.score = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, 1)
        self.dropout, self.separation = nn.Dropout(dropout), Separation()

    def forward(self, instances: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """Pools ``instances (total, width)`` to ``(bags, width)``; also returns their weights ``(total,)``."""
        bags = Bags(sizes, instances.device)
        scores = self.score(self.tanh(instances).tanh() * self.gate(instances).sigmoid())
        weights = bags.separate(rearrange(scores, "t 1 -> t 1 1"), self.separation)
        pooled = bags.read(self.dropout(weights), rearrange(instances, "t d -> t 1 d"))
        return rearrange(pooled, "n 1 1 d -> n d"), weights.flatten()


class MeanPool(nn.Module):
    """Pools by the mean; zeros for an empty bag."""

    def forward(self, instances: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """Pools ``instances (total, width)`` to ``(bags, width)``; also returns their weights ``(total,)``."""
        bags = Bags(sizes, instances.device)
        weights = (1 / bags.sizes)[bags.bag]
        return bags.sum(instances * weights[:, None]), weights


class MaxPool(nn.Module):
    """Pools by the maximum of each feature; the weight of an instance is the share of features it determines."""

    def forward(self, instances: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """Pools ``instances (total, width)`` to ``(bags, width)``; also returns their weights ``(total,)``."""
        bags = Bags(sizes, instances.device)
        index = bags.bag[:, None].expand_as(instances)
        zeros = instances.new_zeros(len(sizes), instances.shape[1])
        pooled = zeros.scatter_reduce(0, index, instances, "amax", include_self=False)
        return pooled, (instances == pooled[bags.bag]).to(instances.dtype).mean(1)


POOLINGS = (*SEPARATIONS, "gated", "mean", "max")


def make_pooling(
    name: str, width: int, heads: int, head_width: int, scaling: float, dropout: float, padded: bool = False
) -> nn.Module:
    """Returns a pooling by its name.

    It maps ``(total, width)`` and the sizes of the bags to pooled ``(bags, width)`` and weights ``(total,)``.

    Raises:
        AHopError: ``padded`` with a pooling that has no padded form.
    """
    if padded and name not in SEPARATIONS:
        raise ah.AHopError(f"padded=True needs one of {', '.join(SEPARATIONS)}, got {name!r}")
    if name in SEPARATIONS:
        return HopfieldPool(width, name, heads, head_width, scaling, dropout, padded)
    if name == "gated":
        return GatedPool(width, head_width, dropout)
    return MeanPool() if name == "mean" else MaxPool()

"""Poolings: from the embedded instances of a bag to one vector. Bags lie end to end, without padding.

Those that weigh instances by a Hopfield association, all with the same projections around it:

- ``adaptive``: the learned similarity of this package (A-Hop), exactly the dot product until it is trained;
- ``dot``: the dot product, the modern Hopfield network (M-Hop);
- ``sparse``: the dot product separated by sparsemax (S-Hop);
- ``kernel``: ``(phi q) . (phi k)`` with a learned matrix per head, separated by entmax with alpha = 1.5 (K-Hop);
- ``uniform``: every instance of a bag weighs the same. What this reaches needs no score at all.

The others: ``gated`` attention (Ilse et al., 2018), ``mean`` and ``max`` of the embedded instances.
"""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import ahop_layers as ah
from ahop_layers.packed import Bags
from ahop_layers.separation import Separation
from examples.common.kernel_similarity import KernelSimilarity

SEPARATIONS = {
    "adaptive": "softmax",
    "dot": "softmax",
    "sparse": "sparsemax",
    "kernel": "entmax15",
    "uniform": "softmax",
}


class NoScore(nn.Module):
    """The same score for every instance."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Zeros: ``(..., L, d)``, ``(..., S, d)`` -> ``(..., L, S)``."""
        return query.new_zeros(*key.shape[:-2], query.shape[-2], key.shape[-2])


class HopfieldPool(nn.Module):
    """Pools packed bags by a Hopfield association with the score of the given name.

    ``padded=True`` walks the padded path instead, for comparison: the outputs are the same. (K-Hop's separation loss is
    not: it then looks at each bag alone, padding included.)
    """

    def __init__(
        self, width: int, name: str, heads: int, head_width: int, scaling: float, dropout: float, padded: bool = False
    ) -> None:
        super().__init__()
        self.padded = padded
        self.pooling = ah.AdaptiveHopfieldPooling(
            width, head_width, num_heads=heads, scaling=scaling, dropout=dropout, separation=SEPARATIONS[name]
        )
        core = self.pooling.hopfield.association_core
        if name != "adaptive":
            scores = {"kernel": lambda: KernelSimilarity(head_width, heads), "uniform": NoScore}
            core.similarity = scores[name]() if name in scores else None

    def forward(self, instances: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """``instances (total, width)`` -> pooled ``(bags, width)``, weights ``(total,)``."""
        if not self.padded:
            pooled, weights = self.pooling.pool_packed(instances, sizes, return_association=True)
            return pooled, weights.mean((1, 2))
        rows = pad_sequence(list(instances.split(sizes)), batch_first=True)
        blocked = torch.arange(rows.shape[1]) >= torch.tensor(sizes)[:, None]
        blocked = blocked.to(rows.device)
        weights = self.pooling.get_association_matrix(rows, blocked).mean((1, 2))
        return self.pooling(rows, blocked), weights[~blocked]


class GatedPool(nn.Module):
    """Gated attention: the score of an instance ``h`` is ``w . (tanh(V h) * sigmoid(U h))``."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.tanh, self.gate, self.score = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, 1)
        self.dropout, self.separation = nn.Dropout(dropout), Separation()

    def forward(self, instances: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """``instances (total, width)`` -> pooled ``(bags, width)``, weights ``(total,)``."""
        bags = Bags(sizes, instances.device)
        scores = self.score(self.tanh(instances).tanh() * self.gate(instances).sigmoid())
        weights = bags.separate(rearrange(scores, "t 1 -> t 1 1"), self.separation)
        pooled = bags.read(self.dropout(weights), rearrange(instances, "t d -> t 1 d"))
        return rearrange(pooled, "n 1 1 d -> n d"), weights.flatten()


class MeanPool(nn.Module):
    """The mean of a bag; an empty bag gives zeros."""

    def forward(self, instances: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """``instances (total, width)`` -> pooled ``(bags, width)``, weights ``(total,)``."""
        bags = Bags(sizes, instances.device)
        weights = (1 / bags.sizes)[bags.bag]
        return bags.sum(instances * weights[:, None]), weights


class MaxPool(nn.Module):
    """The largest value of each feature in a bag; an instance weighs the share of features it decides."""

    def forward(self, instances: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """``instances (total, width)`` -> pooled ``(bags, width)``, weights ``(total,)``."""
        bags = Bags(sizes, instances.device)
        index = bags.bag[:, None].expand_as(instances)
        zeros = instances.new_zeros(len(sizes), instances.shape[1])
        pooled = zeros.scatter_reduce(0, index, instances, "amax", include_self=False)
        return pooled, (instances == pooled[bags.bag]).to(instances.dtype).mean(1)


POOLINGS = (*SEPARATIONS, "gated", "mean", "max")


def make_pooling(
    name: str, width: int, heads: int, head_width: int, scaling: float, dropout: float, padded: bool = False
) -> nn.Module:
    """The pooling of a name, from ``(total, width)`` and the sizes of bags to ``(bags, width)`` and ``(total,)``."""
    if padded and name not in SEPARATIONS:
        raise ah.AHopError(f"padded=True needs one of {', '.join(SEPARATIONS)}, got {name!r}")
    if name in SEPARATIONS:
        return HopfieldPool(width, name, heads, head_width, scaling, dropout, padded)
    if name == "gated":
        return GatedPool(width, head_width, dropout)
    return MeanPool() if name == "mean" else MaxPool()

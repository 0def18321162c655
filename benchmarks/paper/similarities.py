"""Similarities of the baselines, without parameters, for attention and pooling."""

from torch import Tensor, nn

from ahop_layers.similarity.protocol import dot_product


class DotProduct(nn.Module):
    """Scores by the dot product. ``dim`` and ``num_heads`` are ignored."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores ``query (..., L, d)`` against ``key (..., S, d)``: ``(..., L, S)``."""
        return dot_product(query, key)


class Constant(nn.Module):
    """Scores every key zero, so that all weights are equal. ``dim`` and ``num_heads`` are ignored."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores ``query (..., L, d)`` against ``key (..., S, d)``: ``(..., L, S)``."""
        return query.new_zeros(*key.shape[:-2], query.shape[-2], key.shape[-2])

"""Similarities without parameters: the dot product, and the negative squared and absolute distances."""

import torch
from torch import Tensor

from ahop_layers.ops import adaptive_similarity
from ahop_layers.ops.gpu import launch as gpu
from ahop_layers.ops.reference import accumulation_dtype, pair_values


def dot_product(query: Tensor, key: Tensor) -> Tensor:
    """Computes the dot product: ``(..., L, d)``, ``(..., S, d)`` -> ``(..., L, S)``."""
    return query @ key.mT


class FixedSimilarity:
    """The sum of a base similarity over all dimensions.

    Args:
        base: ``"dot"``, ``"dis"`` or ``"l1"``.

    >>> FixedSimilarity("l1")(torch.zeros(1, 3), torch.tensor([[1.0, 2.0, 9.0]]))
    tensor([[-12.]])
    """

    allows_missing = True

    def __init__(self, base: str) -> None:
        self.base = base

    def __call__(self, query: Tensor, key: Tensor, missing: bool = False) -> Tensor:
        """Scores ``query (..., L, d)`` against ``key (..., S, d)``: ``(..., L, S)``.

        If ``missing``, NaN is an unknown value: the score is ``d / m`` times the sum over the m of d dimensions that
        both know, and -inf if there is none.
        """
        if self.base == "dot" and not missing:
            return dot_product(query, key)
        if self.base == "dis" and not missing:
            # Center first to avoid cancellation far from the origin. A rounded center keeps integers exact.
            center = key.mean(-2, keepdim=True).detach().round()
            query, key = query - center, key - center
            return 2 * query @ key.mT - query.square().sum(-1, keepdim=True) - key.square().sum(-1).unsqueeze(-2)
        if query.is_cuda and not missing and (gpu.unavailable() or not gpu.serves(query, (self.base,), 1)):
            # Of float64, or of many dimensions, plain PyTorch would take longer.
            wide = accumulation_dtype(query.dtype)
            return -torch.cdist(query.to(wide), key.to(wide), p=1).to(query.dtype)
        return adaptive_similarity(query, key, query.new_ones(1, 1), (self.base,), missing=missing)  # one block

    def explain(self, query: Tensor, key: Tensor) -> Tensor:
        """Returns what each dimension adds to the scores of the pairs of ``query (L, d)`` and ``key (L, d)``."""
        known = ~(query.isnan() | key.isnan())
        values = pair_values(query[:, None], key[:, None], self.base).reshape(query.shape)
        return values.nan_to_num(0.0) * (query.shape[-1] / known.sum(-1, keepdim=True).clamp(min=1))

    def __repr__(self) -> str:
        return f"FixedSimilarity({self.base!r})"


FIXED = {base: FixedSimilarity(base) for base in ("dot", "dis", "l1")}
"""The similarities without parameters, by the base that each sums up."""

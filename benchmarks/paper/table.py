"""A learned base similarity, alone and added to the footprints of an adaptive similarity."""

import torch
from torch import Tensor, nn

import ahop_layers as ah

KNOTS = (41, 9)
"""Number of knots for query values and for key values."""


class TableSimilarity(nn.Module):
    """Learns a function of two scalars as a table, and sums it over the dimensions.

    ``score = sum over i of table(query_i - bias_i, key_i)``. The table has evenly spaced knots, is interpolated
    bilinearly, and is extrapolated linearly outside the knots. The score is linear in the table and costs one matrix
    product. Unlike footprints, the table can weight a dimension by the value of the query alone: for example, a value
    outside the range of the patterns was not masked.

    Args:
        patterns: stored patterns. The knots cover key values up to their largest absolute value, and query values up to
            twice that value.
        init: ``"dot"`` (the score equals the dot product) or ``"zero"``.
        debias: learn a vector that is subtracted from every query, initialized to zero.

    >>> query, key = torch.randn(4, 16), torch.randn(9, 16)
    >>> torch.allclose(TableSimilarity(key)(query, key), query @ key.T, atol=1e-4)
    True
    """

    def __init__(self, patterns: Tensor, init: str = "dot", debias: bool = False) -> None:
        super().__init__()
        self.reach = patterns.abs().max().item()
        rows, columns = (torch.linspace(-1, 1, count) for count in KNOTS)
        self.table = nn.Parameter((init == "dot") * 2 * self.reach**2 * torch.outer(rows, columns))
        self.bias = nn.Parameter(torch.zeros(patterns.shape[1])) if debias else None
        self.to(patterns)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores ``query (L, d)`` against ``key (S, d)``: ``(L, S)``."""
        query = query if self.bias is None else query - self.bias
        queries = _interpolation(query / (2 * self.reach), KNOTS[0]) @ self.table
        return queries.flatten(-2) @ _interpolation(key / self.reach, KNOTS[1]).flatten(-2).mT


def _interpolation(values: Tensor, count: int) -> Tensor:
    """Returns linear interpolation weights of values for ``count`` knots from -1 to 1: ``(..., d) -> (..., d, count)``.

    Outside the knots, the outermost two extrapolate.
    """
    place = ((values + 1) * ((count - 1) / 2)).unsqueeze(-1)
    inside = place.clamp(0, count - 1)
    knots = torch.arange(count, dtype=values.dtype, device=values.device)
    share = (1 - (inside - knots).abs()).clamp(min=0)
    below, above = (place - inside).clamp(max=0), (place - inside).clamp(min=0)
    first = (knots == 1).to(values.dtype) - (knots == 0).to(values.dtype)
    return share + below * first - above * first.flip(0)


class AdaptiveTableSimilarity(nn.Module):
    """An adaptive similarity with a bias, plus a learned table that is initialized to zero.

    >>> query, key = torch.randn(4, 16), torch.randn(9, 16)
    >>> torch.allclose(AdaptiveTableSimilarity(key)(query, key), query @ key.T, atol=1e-5)
    True
    """

    def __init__(self, patterns: Tensor) -> None:
        super().__init__()
        self.adaptive = ah.AdaptiveSimilarity(patterns.shape[1]).to(patterns)
        self.table = TableSimilarity(patterns, init="zero")
        self.bias = nn.Parameter(torch.zeros_like(patterns[0]))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores ``query (L, d)`` against ``key (S, d)``: ``(L, S)``."""
        return self.adaptive(query - self.bias, key) + self.table(query - self.bias, key)

"""A learned base similarity, alone and added to the footprints of an adaptive similarity."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError, check_choice, check_numbers, check_sizes
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.similarity.adaptive import AdaptiveSimilarity, Init, without_bias
from ahop_layers.similarity.blocks import BlocksArgument


class TableSimilarity(nn.Module):
    """Learns a function of two scalars as a table, and sums it over the dimensions.

    ``score = sum over i of table(query_i - bias_i, key_i)``. The table has evenly spaced knots, is interpolated
    bilinearly, and is extrapolated linearly outside the knots. The score is linear in the table and costs one matrix
    product. Unlike footprints, the table can weight a dimension by the value of the query alone: for example, a value
    outside the range of the patterns was not masked.

    Args:
        dim: dimension ``d`` of a query or key.
        key_range: the knots cover key values from ``-key_range`` to ``key_range`` and query values of twice that range.
        knots: number of knots for query values and for key values, at least 2 each.
        init: ``"dot"`` (the score equals the dot product) or ``"zero"``.
        debias: learn a vector that is subtracted from every query, initialized to zero.

    >>> similarity = TableSimilarity(16)
    >>> query, key = torch.randn(4, 16), torch.randn(9, 16)
    >>> torch.allclose(similarity(query, key), query @ key.T, atol=1e-4)
    True
    """

    allows_missing = True
    reach: Tensor

    def __init__(
        self,
        dim: int,
        key_range: float | Tensor = 1.0,
        knots: tuple[int, int] = (41, 9),
        init: str = "dot",
        debias: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(dim=dim)
        check_numbers("a positive number", key_range=key_range)
        limits = torch.finfo(torch.float32)
        if not limits.tiny <= float(key_range) <= limits.max:
            raise AHopError(f"key_range must be within the range of float32, got {float(key_range):.3g}")
        if not isinstance(knots, Sequence) or len(knots) != 2 or not all(isinstance(n, int) and n >= 2 for n in knots):
            raise AHopError(f"knots must be two integers of at least 2, got {knots!r}")
        check_choice("init", init, ("zero", "dot"))
        self.dim, self.knots, self.init = dim, tuple(knots), init
        self.register_buffer("reach", torch.tensor(float(key_range)))
        self.table = nn.Parameter(torch.empty(*knots))
        self.bias = nn.Parameter(torch.empty(dim)) if debias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Resets the table to ``init`` and the bias to zero."""
        if self.bias is not None:
            self.bias.zero_()
        rows, columns = (torch.linspace(-1, 1, count) for count in self.knots)
        products = 2 * self.reach**2 * torch.outer(rows, columns).to(self.table)
        self.table.copy_(products if self.init == "dot" else torch.zeros_like(products))

    def forward(self, query: Tensor, key: Tensor, missing: bool = False) -> Tensor:
        """Scores ``query (..., L, d)`` against ``key (..., S, d)``: ``(..., L, S)``.

        If ``missing``, NaN is an unknown value: the score is ``d / m`` times the sum over the m of d dimensions that
        both know, and -inf if there is none.
        """
        table, reach = self.table.to(query.dtype), self.reach.to(query.dtype)
        queries = _interpolation(without_bias(query, self.bias) / (2 * reach), self.knots[0], missing) @ table
        keys = _interpolation(key / reach, self.knots[1], missing)
        scores = queries.flatten(-2) @ keys.flatten(-2).mT
        if not missing:
            return scores
        wide = accumulation_dtype(scores.dtype)  # half precision cannot count all dimensions
        common = (~query.isnan()).to(wide) @ (~key.isnan()).to(wide).mT
        scaled = scores * (self.dim / common.clamp(min=1))
        return scaled.masked_fill(common == 0, -torch.inf).to(scores.dtype)

    def extra_repr(self) -> str:
        """Constructor arguments, for ``repr``."""
        return f"{self.dim}, {self.reach:.4g}, knots={self.knots}, init={self.init!r}, debias={self.bias is not None}"


def _interpolation(values: Tensor, count: int, missing: bool) -> Tensor:
    """Returns linear interpolation weights of values for ``count`` knots from -1 to 1: ``(..., d) -> (..., d, count)``.

    If ``missing``, the weights of NaN are 0.
    """
    if missing:
        unknown = values.isnan()
        return _interpolation(values.masked_fill(unknown, 0.0), count, False).masked_fill(unknown.unsqueeze(-1), 0.0)
    place = ((values + 1) * ((count - 1) / 2)).unsqueeze(-1)
    inside = place.clamp(0, count - 1)
    knots = torch.arange(count, dtype=values.dtype, device=values.device)
    share = (1 - (inside - knots).abs()).clamp(min=0)
    # Outside the knots, extrapolate from the outermost two.
    below, above = (place - inside).clamp(max=0), (place - inside).clamp(min=0)
    first = (knots == 1).to(values.dtype) - (knots == 0).to(values.dtype)
    return share + below * first - above * first.flip(0)


class AdaptiveTableSimilarity(AdaptiveSimilarity):
    """An adaptive similarity plus a learned table.

    Args:
        dim, bases, init, debias, blocks: as for :class:`AdaptiveSimilarity`.
        key_range, knots: as for :class:`TableSimilarity`. The table has no blocks. It is initialized to zero.

    >>> similarity = AdaptiveTableSimilarity(16, debias=True)
    >>> query, key = torch.randn(4, 16), torch.randn(9, 16)
    >>> torch.allclose(similarity(query, key), query @ key.T, atol=1e-5)
    True
    """

    explain = None  # type: ignore[assignment]

    def __init__(
        self,
        dim: int,
        bases: Sequence[str] = ("dis", "dot"),
        init: Init = "dot",
        debias: bool = False,
        key_range: float | Tensor = 1.0,
        knots: tuple[int, int] = (41, 9),
        blocks: BlocksArgument = None,
    ) -> None:
        super().__init__(dim, None, bases, init, debias, blocks)
        self.table = TableSimilarity(dim, key_range, knots, init="zero")

    def reset_parameters(self) -> None:
        """Resets the footprint weights to ``init``, and the table and the bias to zero."""
        super().reset_parameters()
        if "table" in self._modules:  # the constructor of the base class calls this before the table exists
            self.table.reset_parameters()

    def forward(
        self, query: Tensor, key: Tensor, missing: bool = False, prepared: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Scores ``query (..., L, d)`` against ``key (..., S, d)``; see :class:`AdaptiveSimilarity`."""
        learned: Tensor = self.table(self.unbiased(query), key, missing)
        return super().forward(query, key, missing, prepared) + learned

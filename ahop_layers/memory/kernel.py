"""Modulations: how patterns are changed before queries are compared with them."""

import math

import torch
from torch import Tensor, nn

from ahop_layers.errors import check_sizes
from ahop_layers.ops.reference import accumulation_dtype


def crowding(points: Tensor) -> Tensor:
    """How close ``points (..., n, d)`` lie: ``log mean exp(-2 |u - v|^2)`` over all pairs, ``(..., n, d) -> (...)``.

    It is the separation loss of K-Hop. Points count by their direction alone, else distances could grow for ever; a
    single point is not crowded by any other: 0.

    >>> crowding(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    tensor(-4.)
    """
    n = points.shape[-2]
    if n < 2:
        return points.sum((-2, -1)) * 0
    unit = nn.functional.normalize(points.to(accumulation_dtype(points.dtype)), dim=-1)
    squares = 2 - 2 * unit @ unit.mT
    once = torch.ones(n, n, dtype=torch.bool, device=points.device).tril(-1)
    return (-2 * squares).masked_fill(~once, -torch.inf).flatten(-2).logsumexp(-1) - math.log(math.comb(n, 2))


class KernelModulation(nn.Module):
    """``mod(pattern) = Phi^T Phi pattern``: a dot product with it compares ``Phi pattern`` and ``Phi query``.

    Args:
        dim: number of dimensions ``d`` of a pattern.
        features: number of rows of Phi, by default ``d``.

    Parameters:
        phi ``(features, d)``, at the start the identity, so that nothing is changed.

    Raises:
        AHopError: sizes that are no whole numbers of at least 1.

    >>> import torch
    >>> patterns = torch.randn(5, 8)
    >>> torch.equal(KernelModulation(8)(patterns), patterns)
    True
    """

    def __init__(self, dim: int, features: int | None = None) -> None:
        super().__init__()
        features = dim if features is None else features
        check_sizes(dim=dim, features=features)
        self.phi = nn.Parameter(torch.eye(features, dim))

    def forward(self, patterns: Tensor) -> Tensor:
        """Modulate ``patterns (..., d) -> (..., d)``."""
        phi = self.phi.to(patterns.dtype)
        return patterns @ phi.mT @ phi

    def separation_loss(self, patterns: Tensor) -> Tensor:
        """How close the patterns ``(n, d)`` lie after Phi: their :func:`crowding`.

        >>> far, near = torch.eye(3), torch.full((3, 3), 0.5) + 0.1 * torch.eye(3)
        >>> modulation = KernelModulation(3)
        >>> bool(modulation.separation_loss(far) < modulation.separation_loss(near))
        True
        """
        return crowding(patterns @ self.phi.to(patterns.dtype).mT)

    def extra_repr(self) -> str:
        """Give the constructor back."""
        return f"{self.phi.shape[1]}, features={self.phi.shape[0]}"

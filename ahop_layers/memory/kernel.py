"""Modulations: transformations of the patterns before queries are compared with them."""

import math

import torch
from torch import Tensor, nn

from ahop_layers.errors import check_sizes
from ahop_layers.ops.reference import accumulation_dtype


def uniformity_loss(points: Tensor) -> Tensor:
    """The log of the mean Gaussian kernel ``exp(-2 |u - v|^2)`` over all pairs of points: ``(..., n, d) -> (...)``.

    This is the separation loss of K-Hop. Points are normalized first, because otherwise distances could grow without
    bound. A single point has the value 0.

    >>> uniformity_loss(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    tensor(-4.)
    """
    n = points.shape[-2]
    if n < 2:
        return points.sum((-2, -1)) * 0
    unit = nn.functional.normalize(points.to(accumulation_dtype(points.dtype)), dim=-1)
    squares = 2 - 2 * unit @ unit.mT
    pairs = torch.ones(n, n, dtype=torch.bool, device=points.device).tril(-1)
    return (-2 * squares).masked_fill(~pairs, -torch.inf).flatten(-2).logsumexp(-1) - math.log(math.comb(n, 2))


class KernelModulation(nn.Module):
    """Computes ``mod(pattern) = Phi^T Phi pattern``, so that a dot product compares ``Phi pattern`` and ``Phi query``.

    Args:
        dim: dimension ``d`` of a pattern.
        features: number of rows of Phi; None for ``d``.

    Attributes:
        phi: learned ``(features, d)``, initialized to the identity, so that initially patterns are unchanged.

    Raises:
        AHopError: a size is not a positive integer.

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
        """The :func:`uniformity_loss` of ``Phi patterns`` for patterns ``(n, d)``: lower values mean larger distances.

        >>> far, near = torch.eye(3), torch.full((3, 3), 0.5) + 0.1 * torch.eye(3)
        >>> modulation = KernelModulation(3)
        >>> bool(modulation.separation_loss(far) < modulation.separation_loss(near))
        True
        """
        return uniformity_loss(patterns @ self.phi.to(patterns.dtype).mT)

    def extra_repr(self) -> str:
        """Constructor arguments, for ``repr``."""
        return f"{self.phi.shape[1]}, features={self.phi.shape[0]}"

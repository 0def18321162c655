"""Modulations: how patterns are changed before queries are compared with them."""

import math

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError


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
        for name, size in (("dim", dim), ("features", features)):
            if not isinstance(size, int) or size < 1:
                raise AHopError(f"{name} must be a whole number of at least 1, got {size!r}")
        self.phi = nn.Parameter(torch.eye(features, dim))

    def forward(self, patterns: Tensor) -> Tensor:
        """Modulate ``patterns (..., d) -> (..., d)``."""
        phi = self.phi.to(patterns.dtype)
        return patterns @ phi.mT @ phi

    def separation_loss(self, patterns: Tensor, sharpness: float = 2.0) -> Tensor:
        """How close the patterns ``(n, d)`` lie after Phi: ``log mean exp(-sharpness * squared distance / d)``.

        Phi counts by its direction alone, at the norm it starts with; else distances could grow for ever.

        >>> far, near = torch.eye(3), torch.full((3, 3), 0.5) + 0.1 * torch.eye(3)
        >>> modulation = KernelModulation(3)
        >>> bool(modulation.separation_loss(far) < modulation.separation_loss(near))
        True
        """
        n, d = patterns.shape
        phi = self.phi * (min(self.phi.shape) ** 0.5 / self.phi.norm())
        distances = torch.nn.functional.pdist(patterns @ phi.mT).square()
        return (-sharpness / d * distances).logsumexp(0) - math.log(n * (n - 1) / 2)

    def extra_repr(self) -> str:
        """Give the constructor back."""
        return f"{self.phi.shape[1]}, features={self.phi.shape[0]}"

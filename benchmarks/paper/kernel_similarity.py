"""The learned kernel of K-Hop: a modulation of stored patterns, and a similarity for attention and for pooling."""

import math

import torch
from torch import Tensor, nn

from ahop_layers.ops.reference import accumulation_dtype

MOST_KEYS = 128
"""Upper bound on the keys of the separation loss, which compares all pairs. They are taken at equal distances."""


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
    """Computes ``mod(pattern) = phi^T phi pattern``, so that a dot product compares ``phi pattern`` and ``phi query``.

    ``phi (dim, dim)`` is learned. It is initialized to the identity, so that patterns are unchanged.

    >>> patterns = torch.randn(5, 8)
    >>> torch.equal(KernelModulation(8)(patterns), patterns)
    True
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.eye(dim))

    def forward(self, patterns: Tensor) -> Tensor:
        """Modulates ``patterns (..., d) -> (..., d)``."""
        return patterns @ self.phi.mT @ self.phi

    def separation_loss(self, patterns: Tensor) -> Tensor:
        """The :func:`uniformity_loss` of ``phi patterns`` for patterns ``(n, d)``: the lower, the larger distances."""
        return uniformity_loss(patterns @ self.phi.mT)


class KernelSimilarity(nn.Module):
    """The score ``(phi q) . (phi k)`` of K-Hop, with a matrix ``phi`` per head that is initialized to the identity.

    K-Hop trains ``phi`` by the separation loss alone, and everything else by the task. So the score detaches ``phi``,
    and the separation loss detaches the keys. The loss is the uniformity, after ``phi``, of all keys that are scored
    together: the tokens of an image, or the instances of a batch of packed bags. It depends only on the direction of
    ``phi``.

    Args:
        dim: dimension of a head.
        num_heads: number of heads.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.eye(dim).repeat(num_heads, 1, 1))
        self.separation_loss: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores ``query (..., H, L, d)`` against ``key (..., H, S, d)``: ``(..., H, L, S)``."""
        self.separation_loss = self._uniformity_loss(key.detach()) if self.training else None
        phi = self.phi.detach()
        fixed = (phi * (math.sqrt(phi.shape[-1]) / phi.norm(dim=(-2, -1), keepdim=True))).to(query.dtype).mT
        return (query @ fixed) @ (key @ fixed).mT

    def _uniformity_loss(self, key: Tensor) -> Tensor:
        some = key[..., :: -(-key.shape[-2] // MOST_KEYS) or 1, :]
        with torch.autocast(key.device.type, enabled=False):
            return uniformity_loss(some.to(self.phi.dtype) @ self.phi.mT).mean()


def separation_loss(model: nn.Module) -> Tensor | float:
    """Returns the sum of the separation losses of a training step; 0 for a model without K-Hop kernels."""
    kernels = [part for part in model.modules() if isinstance(part, KernelSimilarity)]
    return sum(kernel.separation_loss for kernel in kernels)

"""AdaptivePool: adaptive Hopfield pooling with the interface of torchmil's ``AttentionPool``.

torchmil itself is not imported. Its masks are 1 for an instance and 0 for padding, the opposite of hflayers.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ahop_layers.errors import AHopError, check_floating, check_sizes, describe
from ahop_layers.hopfield.adaptive import AdaptiveHopfieldPooling
from ahop_layers.ops.reference import accumulation_dtype


class AdaptivePool(nn.Module):
    """Pools the instances of padded bags; replaces ``pool`` in a torchmil ABMIL.

    Args:
        in_dim: number of features of an instance.
        att_dim: width of the association, over all heads.
        num_heads: number of heads.
        keywords: further arguments of :class:`AdaptiveHopfieldPooling`, such as ``scaling``, ``dropout``, ``blocks``
            (of the ``att_dim / num_heads`` dimensions of a head), ``similarity`` or ``device``.

    Shapes: input ``(batch, bag, in_dim)``, mask ``(batch, bag)``; output ``(batch, in_dim)``.

    >>> pool = AdaptivePool(16, att_dim=32, num_heads=4)
    >>> bags, mask = torch.randn(3, 7, 16), torch.ones(3, 7)
    >>> mask[0, 2:] = 0  # the first bag has two instances
    >>> z, att = pool(bags, mask, return_att=True)
    >>> z.shape, att.shape
    (torch.Size([3, 16]), torch.Size([3, 7]))
    """

    def __init__(self, in_dim: int, att_dim: int = 128, num_heads: int = 1, **keywords: Any) -> None:
        super().__init__()
        check_sizes(in_dim=in_dim, att_dim=att_dim, num_heads=num_heads)
        if att_dim % num_heads:
            raise AHopError(f"att_dim must be a multiple of num_heads, got {att_dim} and {num_heads}")
        for name in ("quantity", "output_size", "batch_first"):
            if name in keywords:
                raise AHopError(f"{name} is fixed by the interface of torchmil, got {name}={keywords[name]!r}")
        self.in_dim, self.att_dim = in_dim, att_dim
        self.pooling = AdaptiveHopfieldPooling(in_dim, att_dim // num_heads, num_heads=num_heads, **keywords)

    def forward(
        self, X: Tensor, mask: Tensor | None = None, return_att: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Pools ``X (batch, bag, in_dim)``.

        Args:
            X: padded bags.
            mask: ``(batch, bag)`` of any dtype, 0 for padding; None if there is no padding. An empty bag is pooled to
                the bias of the output projection.
            return_att: also return unnormalized attention values ``(batch, bag)``, as torchmil does: their softmax over
                the instances of a bag is the mean weight over the heads.
        """
        check_floating(X=X)
        if X.ndim != 3 or X.shape[-1] != self.in_dim:
            raise AHopError(f"X must be (batch, bag, in_dim) with in_dim = {self.in_dim}, got {describe(X)}")
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != X.shape[:2]):
            got = describe(mask) if isinstance(mask, Tensor) else type(mask).__name__
            raise AHopError(f"mask must be a tensor (batch, bag) = {tuple(X.shape[:2])} or None, got {got}")
        real = torch.ones(X.shape[:2], dtype=torch.bool, device=X.device) if mask is None else mask != 0
        pooled, weights = self.pooling.pool_packed(X[real], real.sum(1), return_association=True)
        if not return_att:
            return pooled
        wide = accumulation_dtype(X.dtype)
        lowest = torch.finfo(wide).tiny  # for padding, and for a weight of zero from a sparse separation
        mean = weights.mean((1, 2), dtype=wide).clamp(min=lowest).log().to(X.dtype)
        att = mean.new_full(real.shape, math.log(lowest))
        return pooled, att.masked_scatter(real, mean)

"""Widths of saturating bases and units of dimensions, from the differences between stored patterns."""

import torch
from torch import Tensor

from ahop_layers.ops.reference import accumulation_dtype

SAMPLE = 2**17
"""Number of differences between random pairs of patterns that determine widths and units."""

_SEED = 0x5851F42D


@torch.no_grad()
def differences(patterns: Tensor) -> Tensor:
    """Returns the absolute differences of random pairs of ``patterns (..., N, d)``: ``(pairs, d)``.

    The pairs depend on N and d alone. Only their rows are read, so that patterns can be memory-mapped.
    """
    patterns = patterns.flatten(0, -2) if patterns.ndim > 2 else patterns
    count = max(64, SAMPLE // patterns.shape[1])
    chosen = torch.randint(len(patterns), (2, count), generator=torch.Generator().manual_seed(_SEED))
    rows = patterns[chosen.flatten().to(patterns.device)].to(accumulation_dtype(patterns.dtype))
    return (rows[:count] - rows[count:]).abs_()


@torch.no_grad()
def width(values: Tensor, quantile: float) -> float:
    """Returns a quantile of those ``values`` that are larger than 0, or 1 if there are none.

    It is interpolated linearly between distinct values, from 0 on: of discrete data, small quantiles are below the
    smallest difference.

    >>> width(torch.tensor([0.0, 2.0, 2.0, 4.0, 4.0]), 0.25), width(torch.zeros(3), 0.5)
    (1.0, 1.0)
    """
    distinct, counts = torch.unique(values[values > 0], return_counts=True)  # NaN is not larger
    if not len(distinct):
        return 1.0
    share = counts.cumsum(0).double() / counts.sum()
    at = int(torch.searchsorted(share, quantile).clamp(max=len(distinct) - 1))
    low, start = (distinct[at - 1].item(), share[at - 1].item()) if at else (0.0, 0.0)
    return float(low + (distinct[at].item() - low) * (quantile - start) / (share[at].item() - start))


@torch.no_grad()
def units(values: Tensor) -> Tensor:
    """Returns the unit of each dimension of ``values (pairs, d)``, absolute differences: their median ``(d,)``.

    Where more than half of the differences are 0 it is their mean. A constant dimension has the median unit.

    >>> units(torch.tensor([[1.0, 0.0, 0.0], [3.0, 0.0, 0.0], [2.0, 0.0, 3.0]]))
    tensor([2., 1., 1.])
    """
    median, mean = values.nanmedian(0).values, values.nanmean(0)
    scale = torch.where(median > 0, median, mean)
    varies = scale > 0
    return torch.where(varies, scale, scale[varies].median() if varies.any() else 1.0)

"""Scales of stored patterns: widths of saturating bases, and units of dimensions."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ahop_layers.ops.reference import accumulation_dtype

SAMPLE = 2**17  # number of differences between random pairs of patterns that determine widths and units
NEARLY = 0.15  # largest change of a width that is moved to a power of two of another one
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
def quantiles(values: Tensor, shares: Sequence[float]) -> list[float]:
    """Returns quantiles of the ``values`` larger than 0, or 1 for each if there are none.

    They are interpolated linearly between distinct values, from 0 on: of discrete data, small quantiles are below the
    smallest difference. None is so small that the largest value overflows in units of it.
    """
    distinct, counts = torch.unique(values[values > 0], return_counts=True)  # NaN is not larger
    if not len(distinct):
        return [1.0] * len(shares)
    reached = counts.cumsum(0).double() / counts.sum()
    place = torch.searchsorted(reached, reached.new_tensor(shares)).clamp(max=len(distinct) - 1)
    low, start = (torch.cat([each.new_zeros(1), each])[place].double() for each in (distinct, reached))
    rest = (reached.new_tensor(shares) - start) / (reached[place] - start)
    return (low + (distinct[place].double() - low) * rest).clamp(min=_least(distinct[-1])).tolist()


def octaves(widths: Sequence[float]) -> list[float]:
    """Moves widths onto a wider one divided by a power of two, where that changes them by less than NEARLY.

    The CPU kernel computes one exponential for all widths that differ by powers of two.

    >>> octaves([1.0, 3.5, 4.1, 8.0])
    [1.0, 3.5, 4.0, 8.0]
    """
    found: dict[float, float] = {}
    for width in sorted(widths, reverse=True):
        near = [wider * 2.0 ** min(-1, round(math.log2(width / wider))) for wider in found.values()]
        free = (each for each in near if abs(each / width - 1) < NEARLY and each not in found.values())
        found[width] = next(free, width)
    return [found[width] for width in widths]


def _least(largest: Tensor) -> float:
    """Returns the least width or unit of differences up to the largest one."""
    return 100 * torch.finfo(largest.dtype).tiny * max(1.0, largest.item())


@torch.no_grad()
def units(values: Tensor) -> Tensor:
    """Returns the unit of each dimension of ``values (pairs, d)``, absolute differences: their median ``(d,)``.

    Where more than half of the differences are 0 it is their mean. A constant dimension has the median unit. No unit is
    so small that the largest difference overflows in units of it.
    """
    median, mean = values.nanmedian(0).values, values.nanmean(0)
    scale = torch.where(median > 0, median, mean)
    varies = scale > 0
    scale = torch.where(varies, scale, scale[varies].median() if varies.any() else 1.0)
    return scale.clamp(min=_least(values.nan_to_num(0.0).max()))


def beyond(low: Tensor, high: Tensor, reach: Tensor | float) -> tuple[Tensor, Tensor]:
    """Moves the limits ``(d,)`` of each dimension apart by a share of their distance; a constant one by the largest.

    A dimension without a known value, whose limits are NaN, has no limits.

    >>> beyond(torch.tensor([0.0, 5.0]), torch.tensor([10.0, 5.0]), 0.1)
    (tensor([-1.,  4.]), tensor([11.,  6.]))
    """
    span = (high - low).nan_to_num(0.0)
    span = reach * torch.where(span > 0, span, span.max())
    return (low - span).nan_to_num(-torch.inf), (high + span).nan_to_num(torch.inf)

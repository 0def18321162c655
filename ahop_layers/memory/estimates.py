"""Estimates from the data before training: the bias, the scale of the patterns and the inverse temperature."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ahop_layers.memory.batches import Pairs, sample_pairs
from ahop_layers.memory.losses import Measure
from ahop_layers.memory.shards import Rows, Shard
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.variants import Variant

MIN_DEVIATION = 4.0
"""Smallest standard deviation of the logits of a query at the start of training.

Scores that say little have their smallest loss at a small inverse temperature. The readout is then an average of many
patterns, and training is slow.
"""


@torch.no_grad()
def estimate_bias(bias: Tensor, data: Variant | Pairs, patterns: Rows, batch: int, generator: torch.Generator) -> None:
    """Initialize a zero bias ``(d,)`` to the least-squares solution of ``query = a * pattern + bias``; keep others.

    ``a`` is a scalar: masking and noise shrink the correlation with the pattern, but do not shift the mean. It is 1 if
    all queries come from one pattern, because they do not determine it then. Gradient descent finds the bias only
    slowly, and until then the other weights compensate for a wrong one.
    """
    if bias.any():
        return
    index, query = sample_pairs(data, patterns, 8 * batch, generator) if isinstance(data, Variant) else data
    wide = accumulation_dtype(query.dtype)
    query = query.to(wide)
    origin = torch.where(query.isnan(), torch.nan, patterns[index].to(wide))  # known values alone
    mean = origin.nanmean(0)
    deviation = origin - mean
    total = deviation.square().nansum()
    varies = total > 1e-6 * origin.square().nansum()  # more than the rounding of the mean
    slope = torch.where(varies, (deviation * query).nansum() / total, 1.0)
    bias.copy_((query.nanmean(0) - slope * mean).nan_to_num(0.0))


@torch.no_grad()
def scale_of(patterns: Tensor) -> float:
    """The half width of a uniform distribution with the variance of the patterns: 1 for patterns uniform in [-1, 1].

    It estimates the variance about the mean of each dimension from at most 2**21 values. It is 1 for equal patterns.
    """
    rows = patterns[:: max(1, patterns.numel() // 2**21)]
    values = rows.to(accumulation_dtype(rows.dtype))
    scale = (3 * (values - values.nanmean(0)).square().nanmean()).sqrt().item()
    return scale if scale > 0 else 1.0


@torch.no_grad()
def best_inverse_temperature(
    scores: Callable[[Tensor], Iterable[Tensor]], measure: Measure, batches: Sequence[Pairs], shard: Shard | None = None
) -> Tensor:
    """The factor of the scores that minimizes the loss of ``batches``, a scalar.

    The search is relative to the standard deviation of the scores, so that the result is inversely proportional to
    them. The loss falls without limit if the largest score is always right, so the result is the smallest factor with a
    loss within 0.01 of the minimum. It gives the scores a deviation of at least MIN_DEVIATION, also if no factor lowers
    the loss.

    Args:
        scores: yields the scores ``(L, B)`` of queries ``(L, d)`` for one block of patterns at a time.
        measure: computes the loss of scores.
        batches: targets and queries.
        shard: the part of the patterns that ``scores`` and ``measure`` have; None for all.
    """
    unit = _deviation(scores(batches[0][1]), shard).reciprocal()
    count = sum(len(target) for target, _ in batches)

    def search(factors: Tensor) -> Tensor:
        losses = torch.zeros_like(factors)
        for target, query in batches:
            blocks = [block.to(unit.dtype) for block in scores(query)]
            values = [measure((factor * unit * block for block in blocks), target) for factor in factors]
            losses += len(target) / count * torch.stack(values)
        return factors[(losses <= losses.min() + 0.01).int().argmax()]

    octaves = torch.arange(-6, 11, device=unit.device).to(unit.dtype).exp2()
    best = search(torch.cat([torch.zeros_like(octaves[:1]), octaves]))
    if best > 0:
        best = search(best * torch.arange(-0.9, 1.0, 0.1, device=unit.device).to(unit.dtype).exp2())
    return unit * best.clamp(min=MIN_DEVIATION)


def _deviation(blocks: Iterable[Tensor], shard: Shard | None) -> Tensor:
    """The root mean square over queries of the standard deviation of their scores, or 1 if all are equal."""
    scores = torch.cat(list(blocks), -1)
    peak = scores.abs().max().to(accumulation_dtype(scores.dtype))  # divides the scores, because squares can overflow
    if shard is None:
        variance = (scores / peak).var(-1, correction=0)
    else:
        peak = shard.gather(peak).max()
        scaled = scores / peak
        mean = shard.total(scaled.sum(-1)) / shard.count
        variance = shard.total((scaled - mean[:, None]).square().sum(-1)) / shard.count
    deviation = peak * variance.mean().sqrt()
    return torch.where(deviation > 0, deviation, 1.0)

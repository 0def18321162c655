"""Training of a memory by gradients, for what is not solved: kernels, tables, and parameters of other modules.

Random numbers are drawn on the device of the patterns, and about every twentieth loss is read: copies from and to a GPU
synchronize with it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ahop_layers.errors import AHopError
from ahop_layers.learning.questions import Pairs
from ahop_layers.memory.arrays import from_numpy
from ahop_layers.memory.labels import Classes, class_logsumexp, leave_out
from ahop_layers.memory.shards import Whole
from ahop_layers.memory.storage import Stored
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.training import Batches
from ahop_layers.variants import Variant, as_damage

HELD_OUT, HELD_OUT_SHARE, FEWEST_HELD_OUT, EVALUATED = 512, 0.1, 32, 128
"""Most queries that are held out, their share of given pairs, the fewest, and how many are evaluated at once."""

MIN_DEVIATION = 4.0
"""Smallest deviation of the logits of a query at the start. With less, training is slow: the readout is an average."""

Measure = Callable[[Iterable[Tensor], Tensor], Tensor]
"""Computes the mean loss of logits ``(L, B)`` of consecutive blocks of patterns, for targets ``(L,)``."""


def as_data(damage: Any, device: torch.device) -> Variant | Pairs | None:
    """Returns a damage as a variant, or pairs with their arrays as tensors on ``device``."""
    if damage is None or not isinstance(damage, (tuple, list)):
        return None if damage is None else as_damage(damage)
    if any(map(callable, damage)):
        return as_damage(damage)
    if len(damage) != 2:
        raise AHopError(f"data must be a variant or a pair (index, query), got {len(damage)} values")
    index, query = (from_numpy(each, device) for each in damage)
    return index, query


def sample_pairs(variant: Variant, stored: Stored, n: int, draw: torch.Generator) -> Pairs:
    """Draws ``n`` queries of a bound variant, the same on all ranks of a sharded memory."""
    index = torch.randint(stored.count, (n,), generator=draw, device=draw.device)
    return index, variant(stored.sample(index), draw)


def retrieval_batches(data: Variant | Pairs, stored: Stored, epochs: int, batch: int, draw: torch.Generator) -> Batches:
    """Batches of ``(index, query)``: one random batch of a variant per epoch, or all of the given pairs per epoch.

    Of given pairs, a tenth is held out. If that is too small an estimate, all of them are used for both.
    """
    if isinstance(data, Variant):
        fresh = sample_pairs(data, stored, HELD_OUT, draw)
        draws = (sample_pairs(data, stored, batch, draw) for _ in range(epochs))
        return Batches(epochs, draws, _split(fresh, batch))
    index, query = data
    size = min(int(HELD_OUT_SHARE * len(index)), HELD_OUT)
    mixed = torch.randperm(len(index), generator=draw, device=draw.device)
    held_out, kept = (mixed[:size], mixed[size:]) if size >= FEWEST_HELD_OUT else (mixed[:HELD_OUT], mixed)
    count = math.ceil(len(kept) / batch)
    orders = (torch.randperm(len(kept), generator=draw, device=draw.device) for _ in range(epochs))
    # Of equal size: a small batch has a noisy gradient.
    parts = (rows for order in orders for rows in torch.tensor_split(kept[order], count))
    draws = ((index[rows], query[rows]) for rows in parts)
    return Batches(epochs * count, draws, _split((index[held_out], query[held_out]), batch))


def separation_batches(stored: Stored, epochs: int, batch: int, draw: torch.Generator) -> Batches:
    """One batch per epoch: ``batch`` random patterns without replacement."""
    orders = (torch.randperm(stored.count, generator=draw, device=draw.device) for _ in range(epochs))
    return Batches(epochs, (stored.sample(order[:batch]) for order in orders))


def _split(pairs: Pairs, batch: int) -> list[Pairs]:
    """Splits pairs into batches, so that an evaluation needs little more memory than a step."""
    return list(zip(*(torch.split(each, max(batch, EVALUATED)) for each in pairs), strict=True))


@torch.no_grad()
def estimate_bias(bias: Tensor, origin: Tensor, query: Tensor) -> None:
    """Initializes a bias ``(d,)`` to the least-squares solution of ``query = a * origin + bias``, for ``(n, d)``.

    ``a`` is a scalar: masking and noise shrink the correlation with the pattern, but do not shift the mean. With a
    single pattern it is unidentifiable, and 1. Gradient descent finds the bias only slowly, and until then the other
    weights compensate for a wrong one.
    """
    wide = accumulation_dtype(query.dtype)
    query = query.to(wide)
    origin = torch.where(query.isnan(), torch.nan, origin.to(wide))  # known values alone
    mean = origin.nanmean(0)
    deviation = origin - mean
    total = deviation.square().nansum()
    varies = total > 1e-6 * origin.square().nansum()  # more than the rounding of the mean
    slope = torch.where(varies, (deviation * query).nansum() / total, 1.0)
    bias.copy_((query.nanmean(0) - slope * mean).nan_to_num(0.0))


@torch.no_grad()
def best_inverse_temperature(
    scores: Callable[[Tensor], Iterable[Tensor]], measure: Measure, batches: Sequence[Pairs], ranks: Whole
) -> Tensor:
    """The factor of the scores that minimizes the loss of ``batches`` of targets and queries, a scalar.

    ``scores`` yields those of queries ``(L, d)`` for one block of the patterns of this rank at a time. The search is
    relative to their standard deviation, so that the result is inversely proportional to them. The loss falls without
    limit if the largest score is always right, so the result is the smallest factor with a loss within 0.01 of the
    minimum. It gives the scores a deviation of at least MIN_DEVIATION, also if no factor lowers the loss.
    """
    some = ranks.columns(torch.cat(list(scores(batches[0][1])), -1))
    peak = some.abs().max().to(accumulation_dtype(some.dtype))
    deviation = peak * (some / peak).std(-1, correction=0).square().mean().sqrt()  # squares could overflow
    unit = torch.where(deviation > 0, deviation, 1.0).reciprocal()
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


# Losses of the logits ``(L, B)`` of consecutive blocks of the patterns of this rank: the mean over the queries.


def measure_of(classes: Classes | None, ranks: Whole, made_of_patterns: bool) -> Measure:
    """Returns the loss for queries of patterns; with ``classes``, of classes or of the classes of patterns."""
    if classes is None:
        return lambda blocks, index: ranks.cross_entropy(torch.cat(list(blocks), -1), index)
    return partial(label_loss if made_of_patterns else class_loss, classes=classes, ranks=ranks)


def class_loss(blocks: Iterable[Tensor], target: Tensor, classes: Classes, ranks: Whole) -> Tensor:
    """The loss for queries of the classes ``target (L,)``, from 0 to ``n_classes - 1``."""
    return functional.cross_entropy(class_logsumexp(blocks, classes, ranks), target)


def label_loss(blocks: Iterable[Tensor], index: Tensor, classes: Classes, ranks: Whole) -> Tensor:
    """The loss for queries of the classes of the patterns ``index (L,)``, each without that pattern.

    A pattern is kept if it is the only one of its class.
    """
    target = ranks.pick(classes.of_pattern, index)
    column = (index - ranks.start).masked_fill(classes.counts[target] == 1, -1)
    return class_loss(leave_out(blocks, column), target, classes, ranks)

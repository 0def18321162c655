"""Labels of stored patterns: checks, classes, and scores of classes."""

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ahop_layers.errors import AHopError, describe
from ahop_layers.memory.search import from_numpy
from ahop_layers.memory.shards import Shard
from ahop_layers.ops.reference import accumulation_dtype


class Classes(NamedTuple):
    """The classes of labels.

    Attributes:
        labels: the distinct labels in ascending order ``(n_classes,)``.
        counts: number of patterns of each class ``(n_classes,)``.
        of_pattern: the class of each pattern ``(N,)``, from 0 to ``n_classes - 1``.
    """

    labels: Tensor
    counts: Tensor
    of_pattern: Tensor


_kept: MutableMapping[Tensor, tuple[int, Classes]] = WeakTensorKeyDictionary()


def as_labels(
    labels: Any, count: int, device: torch.device | None = None, name: str = "labels", each: str = "pattern"
) -> Tensor:
    """Returns a copy of ``labels (count,)`` as int64 on ``device``, by default on their own device.

    Raises:
        AHopError: ``labels`` is not a tensor, array or sequence of ``count`` integers.
    """
    try:
        given = torch.as_tensor(from_numpy(labels))
    except (RuntimeError, TypeError, ValueError):
        got = getattr(labels, "dtype", type(labels).__name__)
        raise AHopError(f"{name} must be integers (N,), one for each {each}, got {got}") from None
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise AHopError(f"{name} must be integers (N,), one for each {each}, got {given.dtype}")
    if given.shape != (count,):
        raise AHopError(f"{name} must be (N,) = ({count},), one for each {each}, got {describe(given)}")
    return given.detach().to(device or given.device, torch.int64, copy=True)


def classes_of(labels: Tensor) -> Classes:
    """Returns the classes of ``labels (N,)``.

    They are kept for as long as ``labels`` exists, and are computed again if the tensor was modified in place.
    """
    if torch.compiler.is_compiling() or labels.is_inference():  # inference tensors have no version counter
        return _classes(labels)
    kept = _kept.get(labels)
    if kept is None or kept[0] != labels._version:
        # Tensors created in inference mode could not be used with gradients later.
        with torch.inference_mode(False):
            kept = _kept[labels] = (labels._version, _classes(labels))
    return kept[1]


def _classes(labels: Tensor) -> Classes:
    distinct, index, counts = labels.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    return Classes(distinct, counts, index)


def class_logsumexp(blocks: Iterable[Tensor], classes: Classes, shard: Shard | None = None) -> Tensor:
    """Returns the log-sum-exp of the scores of each class ``(L, n_classes)``.

    Args:
        blocks: the scores ``(L, B)`` of consecutive blocks of patterns.
        classes: the classes of all patterns, and the class of each pattern of this rank.
        shard: the part of the patterns that ``blocks`` has; None for all.
    """
    totals: list[Tensor] = []
    index, start = classes.of_pattern, 0
    for scores in blocks:
        end = start + scores.shape[-1]
        wide = scores.to(accumulation_dtype(scores.dtype))
        totals.append(_block_logsumexp(wide, index[start:end], len(classes.labels)))
        totals = [torch.logaddexp(*totals)] if len(totals) == 2 else totals
        start = end
    total = totals[0].to(scores.dtype)
    return total if shard is None else shard.gather(total).logsumexp(0)


def _block_logsumexp(scores: Tensor, index: Tensor, n_classes: int) -> Tensor:
    """The log-sum-exp of ``scores (L, B)`` for each class: ``(L, n_classes)``, -inf for a class without a pattern."""
    limits = torch.finfo(scores.dtype)
    with torch.no_grad():  # the result does not depend on the shift
        lowest = scores.new_full((len(scores), n_classes), -torch.inf)
        shift = lowest.scatter_reduce(-1, index.expand_as(scores), scores, "amax").clamp(limits.min, limits.max)
    exponentials = (scores - shift[:, index]).exp()
    return torch.zeros_like(shift).index_add(-1, index, exponentials).log() + shift


def labeled_data(data: Any, classes: Classes, patterns: Tensor, shard: Shard | None) -> tuple[Any, Tensor] | None:
    """Returns the pairs ``(label, query)`` as ``(class, query)``, and the mean pattern of each class.

    Returns None for other data, such as a variant.

    Args:
        data: as for :meth:`ahop_layers.AssociativeMemory.fit`.
        classes: the classes of the patterns.
        patterns: ``(N, d)``, or the part of this rank.
        shard: the part of the patterns that ``patterns`` is; None for all.

    Raises:
        AHopError: a label is not an integer, or no stored pattern has it.
    """
    if not isinstance(data, (tuple, list)) or len(data) != 2 or not isinstance(data[1], Tensor) or not data[1].ndim:
        return None
    given = as_labels(data[0], len(data[1]), patterns.device, "labels of data", "query")
    position = torch.searchsorted(classes.labels, given).clamp(max=len(classes.labels) - 1)
    unknown = given[classes.labels[position] != given]
    if len(unknown):
        raise AHopError(f"labels of data must be labels of stored patterns, got {unknown[0].item()}")
    wide = patterns.to(accumulation_dtype(patterns.dtype))
    sums = wide.new_zeros(len(classes.labels), patterns.shape[1]).index_add(0, classes.of_pattern, wide)
    sums = sums if shard is None else shard.total(sums)
    return (position, data[1]), (sums / classes.counts[:, None]).to(patterns.dtype)


def leave_out(blocks: Iterable[Tensor], index: Tensor) -> Iterator[Tensor]:
    """Yields the scores ``(L, B)`` of each block, with -inf for the pattern ``index (L,)`` of each row.

    An index that no block contains changes nothing.
    """
    start = 0
    for scores in blocks:
        column = (index - start)[:, None]
        inside = (column >= 0) & (column < scores.shape[-1])
        column = column.clamp(0, scores.shape[-1] - 1)
        yield scores.scatter(-1, column, scores.gather(-1, column).masked_fill(inside, -torch.inf))
        start += scores.shape[-1]

"""Labels of stored patterns: checks, classes, and scores of classes."""

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ahop_layers.errors import AHopError, describe
from ahop_layers.memory.search import from_numpy
from ahop_layers.ops.reference import accumulation_dtype

_kept: MutableMapping[Tensor, tuple[int, Tensor, Tensor]] = WeakTensorKeyDictionary()


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


def classes_of(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the distinct labels in ascending order ``(n_classes,)``, and the class of each pattern ``(N,)``.

    Both are kept for as long as ``labels`` exists, and are computed again if the tensor was modified in place.
    """
    if labels.is_inference():  # no version counter
        return labels.unique(return_inverse=True)  # type: ignore[no-untyped-call, no-any-return]
    kept = _kept.get(labels)
    if kept is None or kept[0] != labels._version:
        # Tensors created in inference mode could not be used with gradients later.
        with torch.inference_mode(False):
            kept = _kept[labels] = (labels._version, *labels.unique(return_inverse=True))  # type: ignore[no-untyped-call]
    return kept[1:]


def class_logsumexp(blocks: Iterable[Tensor], index: Tensor, n_classes: int) -> Tensor:
    """Returns the log-sum-exp of the scores of each class ``(L, n_classes)``.

    Args:
        blocks: the scores ``(L, B)`` of consecutive blocks of patterns.
        index: the class of each pattern ``(N,)``, from 0 to ``n_classes - 1``.
        n_classes: number of classes.
    """
    totals: list[Tensor] = []
    start = 0
    for scores in blocks:
        end = start + scores.shape[-1]
        totals.append(_block_logsumexp(scores.to(accumulation_dtype(scores.dtype)), index[start:end], n_classes))
        totals = [torch.logaddexp(*totals)] if len(totals) == 2 else totals
        start = end
    return totals[0].to(scores.dtype)


def _block_logsumexp(scores: Tensor, index: Tensor, n_classes: int) -> Tensor:
    """The log-sum-exp of ``scores (L, B)`` for each class: ``(L, n_classes)``, -inf for a class without a pattern."""
    limits = torch.finfo(scores.dtype)
    with torch.no_grad():  # the result does not depend on the shift
        lowest = scores.new_full((len(scores), n_classes), -torch.inf)
        shift = lowest.scatter_reduce(-1, index.expand_as(scores), scores, "amax").clamp(limits.min, limits.max)
    exponentials = (scores - shift[:, index]).exp()
    return torch.zeros_like(shift).index_add(-1, index, exponentials).log() + shift


def labeled_data(data: Any, labels: Tensor, patterns: Tensor) -> tuple[Any, Tensor]:
    """Returns the pairs ``(label, query)`` as ``(class, query)``, and the mean pattern of each class.

    Other data, such as a variant, is returned unchanged and with ``patterns``.

    Raises:
        AHopError: a label is not an integer, or no stored pattern has it.
    """
    if not isinstance(data, (tuple, list)) or len(data) != 2 or not isinstance(data[1], Tensor) or not data[1].ndim:
        return data, patterns
    classes, index = classes_of(labels)
    given = as_labels(data[0], len(data[1]), labels.device, "labels of data", "query")
    position = torch.searchsorted(classes, given).clamp(max=len(classes) - 1)
    unknown = given[classes[position] != given]
    if len(unknown):
        raise AHopError(f"labels of data must be labels of stored patterns, got {unknown[0].item()}")
    wide = patterns.to(accumulation_dtype(patterns.dtype))
    sums = wide.new_zeros(len(classes), patterns.shape[1]).index_add(0, index, wide)
    return (position, data[1]), (sums / index.bincount()[:, None]).to(patterns.dtype)


def leave_out(blocks: Iterable[Tensor], index: Tensor, classes: Tensor) -> Iterator[Tensor]:
    """Yields the scores ``(L, B)`` of each block, with -inf for the pattern ``index (L,)`` of each row.

    A pattern is kept if it is the only one of its class. ``classes (N,)`` has the class of each pattern.
    """
    alone = classes.bincount()[classes[index]] == 1
    start = 0
    for scores in blocks:
        column = (index - start)[:, None]
        inside = (column >= 0) & (column < scores.shape[-1]) & ~alone[:, None]
        column = column.clamp(0, scores.shape[-1] - 1)
        yield scores.scatter(-1, column, scores.gather(-1, column).masked_fill(inside, -torch.inf))
        start += scores.shape[-1]

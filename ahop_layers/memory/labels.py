"""Labels of stored patterns: checks, classes, and scores of classes."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ahop_layers.errors import AHopError, describe
from ahop_layers.memory.arrays import from_numpy
from ahop_layers.memory.shards import Whole
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


Ids = tuple[str | int, ...]
"""The name of each pattern."""


def as_labels(
    labels: Any,
    count: int,
    device: torch.device | None = None,
    name: str = "labels",
    each: str = "pattern",
    names: tuple[str, ...] | None = None,
    strings: bool | None = None,
) -> tuple[Tensor, tuple[str, ...] | None]:
    """Returns a copy of ``labels (count,)`` as int64 on ``device``, and the names of the classes, if they have any.

    Args:
        labels: integers, or strings: each is then an index of the names.
        count: the number of labels.
        device: by default that of the labels.
        name, each: how errors call the labels, and what each of them belongs to.
        names: the names of the classes so far; others are appended.
        strings: whether labels must be strings, or must be integers; None allows both.

    Raises:
        AHopError: ``labels`` is not a tensor, array or sequence of ``count`` integers or strings.
    """
    given = from_numpy(labels)
    if isinstance(given, int):
        given = torch.tensor(given)
    if not isinstance(given, Tensor):
        words = _listed(name, given)
        if words and all(isinstance(word, str) for word in words):
            if strings is False:
                raise AHopError(f"{name} must be integers, as those stored, got strings")
            names = tuple(sorted(set(words))) if names is None else (*names, *sorted({*words} - {*names}))
            place = {word: index for index, word in enumerate(names)}
            given, strings = torch.tensor([place[word] for word in words]), False
        else:
            try:
                given = torch.as_tensor(words)
            except (RuntimeError, TypeError, ValueError):
                raise AHopError(f"{name} must be integers or strings (N,), one for each {each}, got others") from None
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise AHopError(f"{name} must be integers or strings (N,), one for each {each}, got {given.dtype}")
    if given.shape != (count,):
        raise AHopError(f"{name} must be (N,) = ({count},), one for each {each}, got {describe(given)}")
    if strings:
        raise AHopError(f"{name} must be strings, as those stored, got integers")
    if names is not None and count and not 0 <= int(given.min()) <= int(given.max()) < len(names):
        raise AHopError(f"{name} must be indices of the {len(names)} names of classes, got others")
    return given.detach().to(device or given.device, torch.int64, copy=True), names


def as_ids(ids: Any, count: int | None = None) -> Ids:
    """Returns ids, strings or integers, as a tuple.

    Raises:
        AHopError: they are no sequence of strings and integers, not ``count``, or two of them are equal.
    """
    given = from_numpy(ids)
    listed = given.tolist() if isinstance(given, Tensor) and given.ndim == 1 else _listed("ids", given)
    if not all(isinstance(each, (str, int)) and not isinstance(each, bool) for each in listed):
        wrong = next(type(each).__name__ for each in listed if not isinstance(each, (str, int)) or type(each) is bool)
        raise AHopError(f"ids must be strings or integers, one for each pattern, got {wrong}")
    if count is not None and len(listed) != count:
        raise AHopError(f"ids must be one for each of {count} patterns, got {len(listed)}")
    if len(set(listed)) < len(listed):
        seen: set[Any] = set()
        twice = next(each for each in listed if each in seen or seen.add(each))  # type: ignore[func-returns-value]
        raise AHopError(f"ids must differ, got {twice!r} more than once")
    return tuple(listed)


def _listed(name: str, values: Any) -> list[Any]:
    """Returns a sequence, or an array of strings, as a list."""
    unordered = isinstance(values, (str, bytes, set, frozenset, dict)) or not hasattr(values, "__len__")
    if unordered or getattr(values, "ndim", 1) != 1:
        raise AHopError(f"{name} must be a sequence, got {type(values).__name__}")
    return [each.item() if hasattr(each, "item") else each for each in values]


def classes_of(labels: Tensor) -> Classes:
    """Returns the classes of ``labels (N,)``."""
    distinct, index, counts = labels.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    return Classes(distinct, counts, index)


def class_logsumexp(blocks: Iterable[Tensor], classes: Classes, ranks: Whole) -> Tensor:
    """Returns the log-sum-exp of the scores of each class ``(L, n_classes)``.

    Args:
        blocks: the scores ``(L, B)`` of consecutive blocks of patterns.
        classes: the classes of all patterns, and the class of each pattern of this rank.
        ranks: the part of the patterns that ``blocks`` has.
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
    return total if ranks.ranks == 1 else ranks.gather(total).logsumexp(0)


def _block_logsumexp(scores: Tensor, index: Tensor, n_classes: int) -> Tensor:
    """The log-sum-exp of ``scores (L, B)`` for each class: ``(L, n_classes)``, -inf for a class without a pattern."""
    limits = torch.finfo(scores.dtype)
    with torch.no_grad():  # the result does not depend on the shift
        lowest = scores.new_full((len(scores), n_classes), -torch.inf)
        shift = lowest.scatter_reduce(-1, index.expand_as(scores), scores, "amax").clamp(limits.min, limits.max)
    exponentials = (scores - shift[:, index]).exp()
    return torch.zeros_like(shift).index_add(-1, index, exponentials).log() + shift


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

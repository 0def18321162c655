"""Labels of stored patterns: checks, classes, and scores of classes."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ahop_layers.errors import AHopError, describe
from ahop_layers.memory.arrays import check_values, from_numpy, is_integer


class Classes(NamedTuple):
    """The distinct labels, ascending; the class of each pattern ``(N,)``, from 0; the count of each label."""

    labels: Tensor
    of_pattern: Tensor
    counts: Tensor


Ids = tuple[str | int, ...]
"""The name of each pattern."""


def as_labels(
    labels: Any, count: int, device: torch.device | None = None, name: str = "labels", each: str = "pattern",
    names: tuple[str, ...] | None = (),
) -> tuple[Tensor, tuple[str, ...] | None]:  # fmt: skip
    """Returns a copy of ``labels (count,)`` as int64 on ``device``, and the names of the classes, if they have any.

    Errors call the labels ``name``, and what each of them belongs to ``each``. If they are strings, a label is an index
    of the names. ``names`` has the names so far, to which others are appended. None requires integers.
    """
    rule = f"one for each {each}"
    given = from_numpy(labels)
    given, words = (torch.tensor(given) if isinstance(given, int) else given), False
    if not isinstance(given, Tensor):
        listed = _listed(name, given)
        words = bool(listed) and all(isinstance(word, str) for word in listed)
        if words and names is None:
            raise AHopError(f"{name} must be integers, as those stored, got strings")
        if words:
            names = (*(names or ()), *sorted({*listed} - {*(names or ())}))
            codes = {word: code for code, word in enumerate(names)}
            listed = [codes[word] for word in listed]
        try:
            given = torch.as_tensor(listed)
        except (RuntimeError, TypeError, ValueError):
            raise AHopError(f"{name} must be integers or strings (N,), {rule}, got others") from None
    check_values(name, given)
    if not is_integer(given):
        raise AHopError(f"{name} must be integers or strings (N,), {rule}, got {given.dtype}")
    if given.shape != (count,):
        raise AHopError(f"{name} must be (N,) = ({count},), {rule}, got {describe(given)}")
    if names and not words:
        raise AHopError(f"{name} must be strings, as those stored, got integers")
    return given.detach().to(device or given.device, torch.int64, copy=True), names or None


def as_ids(ids: Any, count: int | None = None) -> Ids:
    """Returns ``count`` different ids, strings or integers, as a tuple."""
    given = from_numpy(ids)
    listed = _listed("ids", given)
    wrong = [type(each).__name__ for each in listed if not isinstance(each, (str, int)) or isinstance(each, bool)]
    if wrong:
        raise AHopError(f"ids must be strings or integers, one for each pattern, got {wrong[0]}")
    if count is not None and len(listed) != count:
        raise AHopError(f"ids must be one for each of {count} patterns, got {len(listed)}")
    if len(set(listed)) < len(listed):
        raise AHopError(f"ids must differ, got {Counter(listed).most_common(1)[0][0]!r} more than once")
    return tuple(listed)


def _listed(name: str, values: Any) -> list[Any]:
    """Returns a sequence, a vector, or an array of strings, as a list. Strings must be valid Unicode, as JSON needs."""
    if isinstance(values, Tensor):
        check_values(name, values)
        values = values.tolist() if values.ndim == 1 else values
    unordered = isinstance(values, (str, bytes, set, frozenset, dict)) or not hasattr(values, "__len__")
    if unordered or getattr(values, "ndim", 1) != 1:
        raise AHopError(f"{name} must be a sequence, got {type(values).__name__}")
    listed = [each.item() if hasattr(each, "item") else each for each in values]
    try:
        "".join(each for each in listed if isinstance(each, str)).encode()
    except UnicodeEncodeError as error:
        raise AHopError(f"{name} must be valid Unicode, got the surrogate {error.object[error.start]!r}") from None
    return listed


def class_logsumexp(chunks: Iterable[Tensor], of_pattern: Tensor, n_classes: int) -> Tensor:
    """Returns the log-sum-exp of the scores of each class ``(L, n_classes)``, -inf for a class without a pattern.

    ``chunks`` are the scores ``(L, n)``, in at least float32, of consecutive chunks of patterns of the classes
    ``of_pattern (N,)``.
    """
    totals: list[Tensor] = []
    start = 0
    for scores in chunks:
        index, limits = of_pattern[start : start + scores.shape[-1]], torch.finfo(scores.dtype)
        with torch.no_grad():  # the result does not depend on the shift
            lowest = scores.new_full((len(scores), n_classes), -torch.inf)
            shift = lowest.scatter_reduce(-1, index.expand_as(scores), scores, "amax").clamp(limits.min, limits.max)
        exponentials = (scores - shift[:, index]).exp()
        totals.append(torch.zeros_like(shift).index_add(-1, index, exponentials).log() + shift)
        totals, start = [torch.logaddexp(*totals)] if len(totals) == 2 else totals, start + len(index)
    return totals[0]

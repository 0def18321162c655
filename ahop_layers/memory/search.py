"""Search for the patterns with the largest scores, and conversion of queries from and to NumPy."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ahop_layers.errors import AHopError, check_floating, check_same_device, describe

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array = TypeVar("Array", Tensor, "NDArray[Any]")
"""A tensor or a NumPy array: methods return the kind of array that they are called with."""

QUERY_ROWS = 256
"""Number of queries that are scored at once where the scores of a block of patterns are not kept."""

RANKED_SCORES = 2**22
"""Number of scores that are ranked at once. Small blocks are concatenated, because each ranking has a fixed cost."""


def as_queries(x: Any, patterns: Tensor) -> Tensor:
    """Returns ``x (..., d)`` as a tensor with the dtype of ``patterns (N, d)``, a NumPy array also on their device.

    Raises:
        AHopError: ``x`` is no floating-point tensor or array, has another width, or is on another device.
    """
    name = "queries x"
    if not isinstance(x, Tensor):
        try:
            x = from_numpy(x, patterns.device)
        except (TypeError, ValueError):
            raise AHopError(f"{name} must have a floating-point dtype, got {x.dtype}") from None
    check_floating(**{name: x})
    check_width(name, x, patterns)
    check_same_device(**{name: x, "patterns": patterns})
    queries: Tensor = x.to(patterns.dtype)
    return queries


def check_width(name: str, x: Tensor, patterns: Tensor) -> None:
    """Raises unless ``x (..., d)`` has the width of ``patterns (N, d)``."""
    if x.ndim < 1 or x.shape[-1] != patterns.shape[1]:
        raise AHopError(f"{name} must be (..., d) with the d = {patterns.shape[1]} of the patterns, got {describe(x)}")


def as_given(x: Array, result: Tensor) -> Array:
    """Returns ``result`` as a NumPy array if ``x`` is one. NumPy has no bfloat16, which becomes float32."""
    if isinstance(x, Tensor):
        return result
    wide = result.float() if result.dtype == torch.bfloat16 else result
    array: Array = wide.detach().cpu().numpy()
    return array


def from_numpy(x: Any, device: torch.device | None = None) -> Any:
    """Returns a NumPy array, or a column of pandas, as a tensor on ``device``, and anything else unchanged."""
    numpy = sys.modules.get("numpy")  # not a dependency: where it is not imported, nobody has an array
    if hasattr(x, "to_numpy"):
        x = x.to_numpy()
    if numpy is None or not isinstance(x, numpy.ndarray):
        return x
    # Copies arrays that are read-only or have negative strides, which torch.from_numpy does not support.
    return torch.from_numpy(numpy.require(x, requirements=["C", "W"])).to(device)


def top_k(blocks: Iterable[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """Returns the ``k`` largest scores of each row, best first, and their indices: ``(L, k)`` each.

    Equal scores are ordered by index, as in a stable sort of all scores.

    Args:
        blocks: the scores ``(L, B)`` of consecutive blocks of patterns.
        k: at most the number of patterns.
    """
    best: list[tuple[Tensor, Tensor]] = []
    start = 0
    for scores in _concatenated(blocks):
        values, indices = _top_of_block(scores, min(k, scores.shape[-1]))
        best.append((values, indices + start))
        start += scores.shape[-1]
        best = [merge(best, k)]
    return best[0]


def merge(parts: Sequence[tuple[Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """Returns the ``k`` largest scores and their indices out of several results ``(L, K)`` of :func:`top_k`.

    All indices of a part are smaller than those of the next one. Within a part, equal scores are ordered by index.
    """
    values, indices = (torch.cat(each, -1) for each in zip(*parts, strict=True))
    values, order = values.sort(dim=-1, descending=True, stable=True)  # keeps the order of equal scores
    return values[..., :k], indices.gather(-1, order[..., :k])


def _concatenated(blocks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Concatenates consecutive blocks ``(L, B)`` up to RANKED_SCORES scores."""
    held: list[Tensor] = []
    count = 0
    for block in blocks:
        if held and count + block.numel() > RANKED_SCORES:
            yield torch.cat(held, -1)
            held, count = [], 0
        held.append(block)
        count += block.numel()
    if held:
        yield torch.cat(held, -1)


def _top_of_block(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of ``scores (L, B)`` and their indices, in the order of the indices."""
    if k == 1:
        values, indices = scores.max(-1, keepdim=True)  # the first maximum
        return values, indices
    size = scores.shape[-1]
    largest = scores.topk(min(k + 1, size), -1)
    # topk chooses arbitrarily among scores that equal the k-th largest. NaN, which is largest, equals nothing.
    unique = largest.values[..., -1] < largest.values[..., -2] if k < size else scores.new_ones(1)
    if not torch.compiler.is_compiling() and unique.all():  # a branch on values would break the graph
        indices = largest.indices[..., :k].sort(-1).values
    else:
        indices = _first_of_block(scores, k, largest.values[..., k - 1 : k])
    return scores.gather(-1, indices), indices


def _first_of_block(scores: Tensor, k: int, threshold: Tensor) -> Tensor:
    """The indices of the ``k`` largest of ``scores (L, B)``, the first of those that equal the ``threshold (L, 1)``."""
    # Ranks unique integers: first all scores above the k-th largest, then all that equal it, each in the order of their
    # indices.
    size = scores.shape[-1]
    group = 1 + (scores <= threshold).int() - ((scores >= threshold) | scores.isnan()).int()
    rank = group.mul_(size).add_(torch.arange(size, dtype=torch.int32, device=scores.device))
    chosen = rank.topk(k, -1, largest=False, sorted=False).values.long() % size
    return chosen.sort(-1).values

"""Features of queries and patterns in which a score is linear: means of sorted similarities over bins of ranks."""

import importlib.util
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ahop_layers.memory.learn.threads import in_threads
from ahop_layers.ops.operators import adaptive_similarity
from ahop_layers.ops.reference import block_sums, known_blocks, pair_values, stretched
from ahop_layers.similarity.adaptive import AdaptiveSimilarity, BaseArgument
from ahop_layers.similarity.protocol import Similarity

BINS = 14  # number of rank bins from the largest similarity on
CPU_DIFFERENCES = 2**19  # number of differences that are held at once on a CPU, where they stay in the cache
GPU_DIFFERENCES = 2**26
GATHERED_ELEMENTS = 2**22  # number of elements of candidates that are gathered at once for a single operation

Part = tuple[Tensor, Tensor]
"""Some queries ``(l, d)``, and the indices of their candidates ``(l, C)``."""
_NUMPY = importlib.util.find_spec("numpy") is not None


def bin_edges(n: int, bins: int = BINS, both_ends: bool = False) -> list[int]:
    """Returns the last rank of each bin, up to ``n``; one bin means that ranks do not matter.

    Widths grow geometrically from the first rank on, or from ``both_ends`` to the middle.

    >>> bin_edges(64, 5), bin_edges(64, 5, both_ends=True)
    ([1, 3, 8, 23, 64], [1, 2, 6, 13, 32, 51, 58, 62, 63, 64])
    """
    if both_ends:
        half = bin_edges((n + 1) // 2, bins)
        return sorted({*half, *(n - edge for edge in half if edge < n), n})
    return sorted({round(n ** (i / (bins - 1))) for i in range(bins)}) if bins > 1 else [n]


def pools(edges: list[int]) -> Tensor:
    """Returns the weights of ranks that give the mean over all ranks, and the mean of each bin: ``(1 + bins, n)``.

    Weights of features times this matrix are weights of ranks.

    >>> torch.tensor([[4.0, 1.0, 6.0]]) @ pools([1, 4])
    tensor([[2., 3., 3., 3.]])
    """
    ends = torch.tensor(edges)
    bins = one_hot(torch.searchsorted(ends, torch.arange(1, edges[-1] + 1)), len(edges)).mT.float()
    rows = torch.cat([torch.ones(1, edges[-1]), bins])
    return rows / rows.sum(-1, keepdim=True)


def sorted_similarities(
    query: Tensor, key: Tensor, bases: Sequence[BaseArgument], widths: Sequence[float]
) -> tuple[Iterator[Tensor], Tensor | None]:
    """Similarities of each base in descending order, and the number of known dimensions, None if all are known.

    Unknown values come last and are NaN. All bases except ``dot`` share one sort.
    """
    difference = (query - key).abs_()
    missing = difference.isnan()
    known = difference.shape[-1] - missing.sum(-1) if missing.any() else None

    def values() -> Iterator[Tensor]:
        ascending = _sort_(difference) if set(bases) != {"dot"} else difference
        for base, unit in zip(bases, widths, strict=True):
            if base == "dot":
                yield -_sort_(-query * key)
            elif base == "l1":
                yield -ascending
            elif base == "dis":
                yield -ascending.square()
            else:
                yield (ascending / -unit).exp_()

    return values(), known


def _sort_(values: Tensor) -> Tensor:
    """Sorts in ascending order, NaN last; overwrites ``values`` on a CPU."""
    if not (_NUMPY and values.device.type == "cpu"):
        return values.sort(-1).values
    values.numpy().sort(axis=-1)  # about 15 times faster than PyTorch
    return values


def features(
    query: Tensor, patterns: Tensor, candidates: Tensor, bases: Sequence[BaseArgument], widths: Sequence[float],
    edges: Sequence[list[int]],
) -> Tensor:  # fmt: skip
    """Mean similarity of queries and their candidates over all ranks, then in each bin of ranks.

    ``(L, d), (N, d), (L, C) -> (L, C, f)``; the features of the first base are the first. ``edges`` are the edges of
    each base.
    """
    pool = {tuple(ends): pools(ends).to(query) for ends in edges}
    complete = not patterns.isnan().any()
    averages = query.new_empty(*candidates.shape, sum(1 + len(ends) for ends in edges))

    def average(part: tuple[Tensor, Tensor, Tensor]) -> None:
        own, key, result = part[0][:, None], gathered(patterns, part[1]), part[2]
        values, known = sorted_similarities(own, key, bases, widths)
        if known is not None and complete:  # the same number for all candidates of a query
            stretch = {
                ends: stretched(each, known[:, :1].expand(-1, len(each))).mT.contiguous()  # or it is slow on ARM
                for ends, each in pool.items()
            }
            found = [x.nan_to_num(0.0) @ stretch[tuple(ends)] for x, ends in zip(values, edges, strict=True)]
        else:
            found = [_pooled(x, known, pool[tuple(ends)], ends) for x, ends in zip(values, edges, strict=True)]
        torch.cat(found, -1, out=result)

    step = rows_at_once(query, candidates.shape[1] * patterns.shape[1])
    parts = (torch.split(each, step) for each in (query, candidates, averages))
    in_threads(average, zip(*parts, strict=True), query.device)
    return averages


@torch.no_grad()
def block_features(
    query: Tensor, patterns: Tensor, candidates: Tensor, similarity: Similarity, edges: list[list[int]]
) -> Tensor:
    """As :func:`features`, for a similarity: the features of the bases of its first part are the first.

    ``edges`` are the edges of each part. The features of a pair without a common known block are NaN.
    """
    columns = []
    views = zip(similarity.parts(), similarity.views(query), similarity.views(patterns), edges, strict=True)
    for part, own, keys, ends in views:
        missing = bool(own.isnan().any() or keys.isnan().any())
        found = _part_features(own, keys, candidates, part, ends, missing and not part.blocks.normalize)
        if missing:
            common = (~own.isnan()).to(found) @ (~keys.isnan()).to(found).mT
            found = found.masked_fill((common.gather(1, candidates) == 0)[..., None], torch.nan)
        columns.append(found)
    return torch.cat(columns, -1)


def _part_features(
    query: Tensor, patterns: Tensor, candidates: Tensor, part: AdaptiveSimilarity, edges: list[int], missing: bool
) -> Tensor:
    """Returns the features of one part of a similarity; NaN is an unknown value if ``missing``."""
    widths = [1.0] * len(part.bases) if part.widths is None else part.widths.tolist()
    monotone = all(base in ("l1", "dis", "dot") or not isinstance(base, str) for base in part.bases)
    if monotone and part.blocks.assignment is None and part.bias is part.units is None:
        return features(query, patterns, candidates, part.bases, widths, [edges] * len(widths))
    pool, whole = pools(edges).to(query), query.new_ones(1, 1)
    # Once, not once for each pair.
    query, patterns, numbers = part.compared(query, patterns, missing or part.blocks.normalize)

    def with_gaps(some: Part) -> Tensor:
        own, key = some[0][:, None], gathered(patterns, some[1])
        similarities, present = known_blocks(own, key, part.names, edges[-1], numbers, part.widths)
        known = present.sum(-1).squeeze(1)
        ordered = (-_sort_(-each.masked_fill(~present, torch.nan).squeeze(1)) for each in similarities)
        return torch.cat([_pooled(each, known, pool, edges) for each in ordered], -1)

    def complete(some: Part) -> Tensor:
        own, key, columns = some[0][:, None], gathered(patterns, some[1]), []
        for name, width in zip(part.names, widths, strict=True):
            unit = query.new_tensor([width])
            if edges == [1]:  # nothing is sorted, and all features are the score
                values = adaptive_similarity(own, key, whole, (name,), None, widths=unit).squeeze(1)[..., None]
                columns.append(values @ pool.mT)
                continue
            values = pair_values(own, key, name, unit[0]).squeeze(1)
            if numbers is None:  # a matrix product is faster than short sums
                values = torch.unflatten(values, -1, (edges[-1], -1))
                values = values @ values.new_ones(values.shape[-1])
            else:
                values = block_sums(values, edges[-1], numbers)
            columns.append(-_sort_(values.neg_()) @ pool.mT)
        return torch.cat(columns, -1)

    if missing:
        return torch.cat(in_threads(with_gaps, pairs(query, patterns, candidates), query.device))
    return torch.cat(in_threads(complete, pairs(query, patterns, candidates, GATHERED_ELEMENTS), query.device))


def pairs(query: Tensor, patterns: Tensor, candidates: Tensor, least: int = 0) -> Iterator[Part]:
    """Yields some queries and their candidates at a time, with at least so many elements."""
    elements = candidates.shape[1] * patterns.shape[1]
    step = max(rows_at_once(query, elements), least // max(1, elements))
    return zip(torch.split(query, step), torch.split(candidates, step), strict=True)


def gathered(patterns: Tensor, places: Tensor) -> Tensor:
    """Returns the patterns at ``places (l, C)``: ``(l, C, d)``."""
    return torch.unflatten(patterns.index_select(0, places.flatten()), 0, places.shape)  # faster than patterns[places]


def _pooled(values: Tensor, known: Tensor | None, pool: Tensor, edges: list[int]) -> Tensor:
    """Averages sorted values over all ranks and over bins: ``(..., n) -> (..., 1 + bins)``.

    The first ``known (...)`` values are stretched to n ranks; without any, the averages are 0.
    """
    if known is None:
        return values @ pool.mT
    n, ends = edges[-1], torch.tensor(edges, device=values.device)
    widths = ends.diff(prepend=ends.new_zeros(1))
    total = pad(values.nan_to_num(0.0).cumsum(-1), (1, 0))
    place = ends.to(values.dtype) * (known[..., None] / n)
    low = place.floor().long().clamp(max=n - 1)
    start = total.gather(-1, low)
    reached = start + (place - low) * (total.gather(-1, low + 1) - start)
    binned = reached.diff(prepend=torch.zeros_like(reached[..., :1])) * (n / known.clamp(min=1)[..., None]) / widths
    mean = binned @ (widths / n).to(values.dtype)
    return torch.cat([mean[..., None], binned], -1)


def rows_at_once(query: Tensor, elements: int) -> int:
    """Returns the number of queries whose ``elements`` differences each are held at once."""
    return max(1, (GPU_DIFFERENCES if query.is_cuda else CPU_DIFFERENCES) // elements)

"""Features of queries and patterns in which a score is linear: means of sorted similarities over bins of ranks."""

import importlib.util
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ahop_layers.ops.operators import adaptive_similarity
from ahop_layers.ops.reference import block_sums, known_blocks, pair_values, stretched
from ahop_layers.similarity.adaptive import AdaptiveSimilarity, BaseArgument
from ahop_layers.similarity.protocol import Solvable

BINS = 14  # number of rank bins from the largest similarity on
CPU_DIFFERENCES = 2**19  # number of differences that are held at once on a CPU, where they stay in the cache
GPU_DIFFERENCES = 2**26
GATHERED_ELEMENTS = 2**22  # number of elements of candidates that are gathered at once for a single operation

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

    Unknown values come last and are NaN. All bases except ``dot`` share one sort. ``("clip", q)`` is clipped L1, a
    baseline.
    """
    difference = (query - key).abs_()
    missing = difference.isnan()
    known = difference.shape[-1] - missing.sum(-1) if missing.any() else None

    def values() -> Iterator[Tensor]:
        ascending = _sort_(difference)
        for base, unit in zip(bases, widths, strict=True):
            if base == "dot":
                yield -_sort_(-query * key)
            elif base == "l1":
                yield -ascending
            elif base == "dis":
                yield -ascending.square()
            else:
                yield (ascending / -unit).exp_() if base[0] == "near" else -ascending.clamp(max=unit)

    return values(), known


def _sort_(values: Tensor) -> Tensor:
    """Sorts in ascending order, NaN last; overwrites ``values`` on a CPU."""
    if not (_NUMPY and values.device.type == "cpu"):
        return values.sort(-1).values
    parts = torch.tensor_split(values.flatten(0, -2), torch.get_num_threads())
    with ThreadPoolExecutor(len(parts)) as pool:  # NumPy is about 15 times faster than PyTorch
        list(pool.map(lambda part: part.numpy().sort(axis=-1), parts))
    return values


def features(
    query: Tensor, patterns: Tensor, candidates: Tensor, bases: Sequence[BaseArgument], widths: Sequence[float],
    edges: list[int],
) -> Tensor:  # fmt: skip
    """Mean similarity of queries and their candidates over all ranks, then in each bin of ranks.

    ``(L, d), (N, d), (L, C) -> (L, C, f)``; the features of the first base are the first.
    """
    rows, pool, complete = [], pools(edges).to(query), not patterns.isnan().any()
    for part, key in pairs(query, patterns, candidates):
        values, known = sorted_similarities(part[:, None], key, bases, widths)
        if known is not None and complete:  # the same number for all candidates of a query
            own = stretched(pool, known[:, :1].expand(-1, len(pool)))
            own = own.mT.contiguous()  # a transposed batch is slow on ARM
            rows.append(torch.cat([x.nan_to_num(0.0) @ own for x in values], -1))
        else:
            rows.append(torch.cat([_pooled(x, known, pool, edges) for x in values], -1))
    return torch.cat(rows)


@torch.no_grad()
def block_features(
    query: Tensor, patterns: Tensor, candidates: Tensor, similarity: Solvable, edges: list[list[int]]
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
        return features(query, patterns, candidates, part.bases, widths, edges)
    rows, pool = [], pools(edges).to(query)
    # Once, not once for each pair.
    query, patterns, numbers = part.compared(query, patterns, missing or part.blocks.normalize)
    if missing:
        for some, key in pairs(query, patterns, candidates):
            similarities, present = known_blocks(some[:, None], key, part.names, edges[-1], numbers, part.widths)
            known, columns = present.sum(-1).squeeze(1), []
            for each in similarities:
                ordered = -_sort_(-each.masked_fill(~present, torch.nan).squeeze(1))
                columns.append(_pooled(ordered, known, pool, edges))
            rows.append(torch.cat(columns, -1))
        return torch.cat(rows)
    whole = query.new_ones(1, 1)
    for some, key in pairs(query, patterns, candidates, GATHERED_ELEMENTS):
        columns = []
        for name, width in zip(part.names, widths, strict=True):
            own = query.new_tensor([width])
            if edges == [1]:  # nothing is sorted, and all features are the score
                values = adaptive_similarity(some[:, None], key, whole, (name,), None, widths=own).squeeze(1)[..., None]
                columns.append(values @ pool.mT)
                continue
            values = pair_values(some[:, None], key, name, own[0]).squeeze(1)
            if numbers is None:  # a matrix product is faster than short sums
                values = torch.unflatten(values, -1, (edges[-1], -1))
                values = values @ values.new_ones(values.shape[-1])
            else:
                values = block_sums(values, edges[-1], numbers)
            columns.append(-_sort_(values.neg_()) @ pool.mT)
        rows.append(torch.cat(columns, -1))
    return torch.cat(rows)


@torch.no_grad()
def candidate_scores(query: Tensor, patterns: Tensor, candidates: Tensor, similarity: Solvable) -> Tensor:
    """Scores queries ``(L, d)`` against their candidates among ``patterns (N, d)``: ``(L, C)``."""
    if query.isnan().any() or patterns.isnan().any():
        rows = [similarity(some[:, None], key, missing=True) for some, key in pairs(query, patterns, candidates)]
        return torch.cat(rows).squeeze(1)
    total = query.new_zeros(candidates.shape)
    for part, own, keys in zip(similarity.parts(), similarity.views(query), similarity.views(patterns), strict=True):
        first, second, numbers = part.compared(own, keys)
        weight, rows = part.footprint_weight(), []
        for some, key in pairs(first, second, candidates, GATHERED_ELEMENTS):
            rows.append(adaptive_similarity(some[:, None], key, weight, part.names, numbers, widths=part.widths))
        total += torch.cat(rows).squeeze(1)
    return total


def pairs(query: Tensor, patterns: Tensor, candidates: Tensor, least: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields some queries ``(l, d)`` and their candidates ``(l, C, d)`` at a time, with at least so many elements."""
    elements = candidates.shape[1] * patterns.shape[1]
    step = max(rows_at_once(query, elements), least // max(1, elements))
    for part, places in zip(torch.split(query, step), torch.split(candidates, step), strict=True):
        key = patterns.index_select(0, places.flatten())  # faster than patterns[places]
        yield part, torch.unflatten(key, 0, places.shape)


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

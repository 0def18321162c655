"""The reference computed in tiles of bounded memory: the fallback where no faster kernel supports a call.

Every kernel module has this interface. Tensors are ``query (N, H, L, d)``, ``key (N, H, S, d)`` and weights
``(H, n_bases, n)``, with any strides; n divides d, and blocks are consecutive. ``widths (n_bases,)`` belong to
bases that saturate, by default 1. Half-precision inputs are scored in float32.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ahop_layers.ops.protocols import Need, allocate_grads
from ahop_layers.ops.reference import (
    BASES,
    accumulation_dtype,
    block_sums,
    fold,
    folded_similarity,
    missing_similarity,
    stretched,
    unstretched,
)

# Memory of one tile or slice: with the buffers of a sort, a call takes less than 64 MB besides its results. Slices and
# launches on a GPU take more, because to start an operation is expensive there.
SCRATCH_BYTES = 40 * 2**20
GPU_SCRATCH_BYTES = 5 * SCRATCH_BYTES
MISSING_COPIES = 3  # times as much memory for a pair where values can be unknown: weights differ between pairs


def unavailable() -> str | None:
    """Returns None: this kernel is always available."""
    return None


def detail() -> str:
    """Returns one line on how this kernel runs here."""
    return "plain PyTorch in tiles of bounded memory, any device"


def serves(query: Tensor, bases: Sequence[str], blocks: int, missing: bool = False) -> bool:
    """Returns whether the slopes of all bases are known; tensors and numbers of blocks are not restricted."""
    return all(BASES[base].slopes is not None for base in bases)


def score(
    query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str], dtype: torch.dtype | None = None,
    widths: Tensor | None = None, missing: bool = False, blocks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Computes ``(N, H, L, d), (N, H, S, d), (H, n_bases, n) -> (N, H, L, S)``.

    The scores have ``dtype``: the dtype of the query or, by default, at least float32. If ``missing``, NaN is an
    unknown value: see :func:`ahop_layers.ops.reference.missing_similarity`. This kernel alone takes ``blocks (d,)``,
    the block of each dimension.
    """
    weight = fold(weight, accumulation_dtype(weight.dtype))
    copies = MISSING_COPIES if missing else 1
    wide = accumulation_dtype(query.dtype)
    products = not missing and blocks is None and all(base == "dot" for base in bases)
    scores = query.new_empty(*query.shape[:-1], key.shape[-2], dtype=dtype or wide)
    with torch.autocast(query.device.type, enabled=False):  # which would multiply by the weights in half precision
        for n, h, rows, columns in _tiles(query, key, weight.shape[-1], copies, products):
            tile = query[n, h, rows].to(wide), key[n, h, columns].to(wide), weight[h]
            if missing:
                scores[n, h, rows, columns] = missing_similarity(*tile, bases, blocks, widths)
            else:
                scores[n, h, rows, columns] = folded_similarity(*tile, bases, widths, blocks)
    return scores


def score_backward(
    grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str], need: Need,
    widths: Tensor | None = None, missing: bool = False, numbers: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the gradients of :func:`score`; gradients that ``need`` excludes are empty tensors.

    The slope of a score with respect to the similarity of a dimension is the weight at the rank of its block. At a tie
    any order gives a valid subgradient; this function uses the order of ``torch.sort``. ``numbers (d,)`` is the block
    of each dimension.
    """
    dtype, blocks = accumulation_dtype(query.dtype), weight.shape[-1]
    weight = fold(weight, accumulation_dtype(weight.dtype))
    grads = [grad.zero_() for grad in allocate_grads((query, key, weight), need, dtype)]
    at = torch.arange(query.shape[-1], device=query.device) * blocks // query.shape[-1] if numbers is None else numbers
    for n, h, rows, columns in _tiles(query, key, blocks, MISSING_COPIES if missing else 1):
        queries, keys = query[n, h, rows].to(dtype).unsqueeze(-2), key[n, h, columns].to(dtype).unsqueeze(-3)
        tile_grad = grad[n, h, rows, columns].unsqueeze(-1)
        if missing:
            known = ~(queries.isnan() | keys.isnan())
            queries, keys = torch.where(known, queries, 0.0), torch.where(known, keys, 0.0)
            counts, sizes = (block_sums(each.to(dtype), blocks, numbers) for each in (known, torch.ones_like(known)))
            factor = (sizes / counts)[..., at].masked_fill_(~known, 0.0)
            present = counts > 0
            count = present.sum(-1)
            tile_grad = tile_grad.masked_fill(count.unsqueeze(-1) == 0, 0.0)
        for index, base in enumerate(bases):
            width = widths[index] if widths is not None and BASES[base].saturates else 1.0
            pair = queries / width, keys / width
            values = BASES[base].value(*pair)
            values = block_sums(values.mul_(factor) if missing else values, blocks, numbers)
            values = values.masked_fill_(~present, -torch.inf) if missing else values
            similarities, order = values.sort(dim=-1, descending=True)
            del values
            if need[2]:
                at_rank = similarities.masked_fill_(similarities == -torch.inf, 0.0) if missing else similarities
                at_rank = at_rank.mul_(tile_grad)
                grads[2][h, index] += (unstretched(at_rank, count) if missing else at_rank).sum((0, 2, 3))
            if not (need[0] or need[1]):
                continue
            at_rank = weight[h, index][:, None, None].expand_as(similarities)
            at_rank = stretched(at_rank, count) if missing else at_rank
            at_dim = similarities.scatter_(-1, order, at_rank).mul_(tile_grad / width)
            at_dim = at_dim if blocks == query.shape[-1] and numbers is None else at_dim[..., at]
            at_dim = at_dim * factor if missing else at_dim
            del order
            slopes: Any = BASES[base].slopes  # not None, see serves
            for which, slope, pairs_axis in zip((0, 1), slopes(*pair), (-2, -3), strict=True):
                if need[which]:
                    place = (n, h, rows) if which == 0 else (n, h, columns)
                    grads[which][place] += (at_dim * slope).sum(pairs_axis)
    query_grad, key_grad, weight_grad = grads
    # The cumulative sum is the transpose of fold.
    return query_grad.to(query.dtype), key_grad.to(key.dtype), weight_grad.cumsum(-1)


def _tiles(
    query: Tensor, key: Tensor, blocks: int, copies: int = 1, products: bool = False
) -> Iterator[tuple[slice, ...]]:
    """Yields slices over (N, H, L, S), as large as the scratch memory allows, longest along the last axes."""
    (n, h, length, d), count = query.shape, key.shape[-2]
    # Values, of blocks if all are products, sorted values and two temporaries; the sort's int64 indices, and the same
    # amount inside the sort.
    values = blocks if products else d
    pair_bytes = copies * (values * 4 * accumulation_dtype(query.dtype).itemsize + blocks * 16)
    room = max(1, SCRATCH_BYTES // pair_bytes)
    axes = []
    for size in (count, length, h, n):
        step = max(1, min(size, room))
        room //= step
        axes.append([slice(start, start + step) for start in range(0, size, step)])
    return product(*reversed(axes))

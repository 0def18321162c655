"""The chunked kernel: the reference computation in blocks of bounded memory, for calls that no faster kernel supports.

It implements the interface :class:`ahop_layers.ops.backend.Kernel`.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import cast

import torch
from torch import Tensor

from ahop_layers.ops.reference import BASES, Slopes, accumulation_dtype, folded_similarity

SCRATCH_BYTES = 40 * 2**20
"""Memory limit of one block. With the buffers of the sort, a call stays below 64 MB besides its results."""

Need = tuple[bool, bool, bool]


def unavailable() -> str | None:
    """Returns None: this kernel is always available."""
    return None


def detail() -> str:
    """Returns one line on how this kernel runs here."""
    return "plain PyTorch in blocks of bounded memory, any device"


def serves(query: Tensor, bases: Sequence[str]) -> bool:
    """Returns whether all bases have slopes; any tensor is supported."""
    return all(BASES[base].slopes is not None for base in bases)


def score(query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str]) -> Tensor:
    """Computes ``(N, H, L, d), (N, H, S, d), (H, n_bases, d) -> (N, H, L, S)``."""
    dtype = accumulation_dtype(query.dtype)
    scores = query.new_empty(*query.shape[:-1], key.shape[-2], dtype=dtype)
    for n, h, rows, columns in _blocks(query, key):
        block = folded_similarity(query[n, h, rows].to(dtype), key[n, h, columns].to(dtype), weight[h], bases)
        scores[n, h, rows, columns] = block
    return scores


def score_backward(
    grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str], need: Need
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of :func:`score`; gradients that ``need`` excludes are empty tensors.

    The derivative of a score with respect to a similarity is the weight at the similarity's rank. Ties are ranked in
    the order of ``torch.sort``; any order is a valid subgradient.
    """
    dtype = accumulation_dtype(query.dtype)
    grads = [
        torch.zeros(tensor.shape if wanted else 0, dtype=dtype, device=tensor.device)
        for tensor, wanted in zip((query, key, weight), need, strict=True)
    ]
    for n, h, rows, columns in _blocks(query, key):
        queries, keys = query[n, h, rows].to(dtype).unsqueeze(-2), key[n, h, columns].to(dtype).unsqueeze(-3)
        block_grad = grad[n, h, rows, columns].unsqueeze(-1)
        for index, base in enumerate(bases):
            similarities, order = BASES[base].value(queries, keys).sort(dim=-1, descending=True)
            if need[2]:
                grads[2][h, index] += similarities.mul_(block_grad).sum((0, 2, 3))
            if not (need[0] or need[1]):
                continue
            at_rank = weight[h, index][:, None, None].expand_as(similarities)
            at_dimension = similarities.scatter_(-1, order, at_rank).mul_(block_grad)
            del order
            slopes = cast(Slopes, BASES[base].slopes)
            for which, slope, pairs_axis in zip((0, 1), slopes(queries, keys), (-2, -3), strict=True):
                if need[which]:
                    place = (n, h, rows) if which == 0 else (n, h, columns)
                    grads[which][place] += (at_dimension * slope).sum(pairs_axis)
    query_grad, key_grad, weight_grad = grads
    return query_grad.to(query.dtype), key_grad.to(key.dtype), weight_grad


def _blocks(query: Tensor, key: Tensor) -> Iterator[tuple[slice, ...]]:
    """Yields slices over (N, H, L, S) that fit in ``SCRATCH_BYTES``, filling the last axes first."""
    (n, h, length, d), count = query.shape, key.shape[-2]
    # Values, sorted values and two temporaries, plus the int64 indices of the sort and as much again inside the sort.
    pair_bytes = d * (4 * accumulation_dtype(query.dtype).itemsize + 16)
    room = max(1, SCRATCH_BYTES // pair_bytes)
    axes = []
    for size in (count, length, h, n):
        step = max(1, min(size, room))
        room //= step
        axes.append([slice(start, start + step) for start in range(0, size, step)])
    return product(*reversed(axes))

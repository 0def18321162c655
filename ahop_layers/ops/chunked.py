"""The reference in blocks of bounded memory: serves wherever no faster kernel does.

Every kernel module has this interface. Tensors are ``query (N, H, L, d)``, ``key (N, H, S, d)`` and folded weights
``(H, n_bases, d)``, with any strides; half-precision inputs are scored in float32.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import cast

import torch
from torch import Tensor

from ahop_layers.ops.reference import BASES, Slopes, accumulation_dtype, folded_similarity

SCRATCH_BYTES = 40 * 2**20
"""What one block may use: with the sort's own buffers a call stays below 64 MB beside its results."""

Need = tuple[bool, bool, bool]


def unavailable() -> str | None:
    """Always available."""
    return None


def detail() -> str:
    """One line on how this kernel runs here."""
    return "plain PyTorch in blocks of bounded memory, any device"


def serves(query: Tensor, bases: Sequence[str]) -> bool:
    """Any tensor, and every base whose slopes are known."""
    return all(BASES[base].slopes is not None for base in bases)


def score(query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str]) -> Tensor:
    """``(N, H, L, d), (N, H, S, d), (H, n_bases, d) -> (N, H, L, S)``."""
    dtype = accumulation_dtype(query.dtype)
    scores = query.new_empty(*query.shape[:-1], key.shape[-2], dtype=dtype)
    for n, h, rows, columns in _blocks(query, key):
        block = folded_similarity(query[n, h, rows].to(dtype), key[n, h, columns].to(dtype), weight[h], bases)
        scores[n, h, rows, columns] = block
    return scores


def score_backward(
    grad: Tensor, query: Tensor, key: Tensor, weight: Tensor, bases: Sequence[str], need: Need
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`score`; one that ``need`` does not ask for comes back empty.

    The slope of a score with respect to one similarity is the weight at that similarity's rank. At a tie either order
    is a valid subgradient; this one takes the order ``torch.sort`` takes.
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
    """Slices over (N, H, L, S), as large as the scratch allows, longest along the last axes."""
    (n, h, length, d), count = query.shape, key.shape[-2]
    # Values, sorted values and two temporaries, with the sort's int64 indices and as much again inside the sort.
    pair_bytes = d * (4 * accumulation_dtype(query.dtype).itemsize + 16)
    room = max(1, SCRATCH_BYTES // pair_bytes)
    axes = []
    for size in (count, length, h, n):
        step = max(1, min(size, room))
        room //= step
        axes.append([slice(start, start + step) for start in range(0, size, step)])
    return product(*reversed(axes))

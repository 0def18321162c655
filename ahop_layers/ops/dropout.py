"""Dropout as a function of a seed and a position, so that every kernel drops the same weights.

A hash of the seed, the head, the query and the key decides on each weight. Forward and backward pass compute it, and no
mask is stored. All arithmetic is in unsigned 32-bit integers.
"""

from itertools import product

import torch
from torch import Tensor

WORD = 2**32 - 1
# Numbers of positions that are hashed at once on a CPU and on a GPU, where starting an operation is expensive.
TILE, GPU_TILE = 2**17, 2**22
# Constants modulo 2^32 with small absolute values, so that their products with 32-bit numbers fit into int64.
FIRST, SECOND, ROW, COLUMN = 0x7FEB352D, 0x846CA68B - 2**32, 0x9E3779B9 - 2**32, 0x85EBCA6B - 2**32


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * FIRST) & WORD
    x = x ^ (x >> 15)
    x = (x * SECOND) & WORD
    return x ^ (x >> 16)


def kept(seed: Tensor, heads: Tensor, rows: Tensor, columns: Tensor, dropout: float) -> Tensor:
    """Returns which weights remain at a probability ``dropout``, a bool tensor ``(heads, rows, columns)``.

    All tensors are int64: the ``seed (1,)``, the index ``n * H + h`` of each head of the batch, and the indices of the
    queries and of the keys.

    >>> seed, heads, rows, columns = torch.tensor([7]), torch.arange(2), torch.arange(40), torch.arange(50)
    >>> all_bits = kept(seed, heads, rows, columns, 0.25)
    >>> all_bits.shape, round(all_bits.double().mean().item(), 2)
    (torch.Size([2, 40, 50]), 0.75)
    >>> torch.equal(kept(seed, heads[1:], rows[5:8], columns[9:], 0.25), all_bits[1:, 5:8, 9:])
    True
    """
    low, high = seed & WORD, (seed >> 32) & WORD
    start = _mix(low ^ _mix(heads))[:, None]
    row = _mix((start + rows * ROW) & WORD)
    other = _mix(row ^ high)
    column, limit = (columns * COLUMN) & WORD, threshold(dropout)
    bits = torch.empty(len(heads), len(rows), len(columns), dtype=torch.bool, device=seed.device)
    room = max(1, (TILE if seed.device.type == "cpu" else GPU_TILE) // max(1, len(columns)))
    step = max(1, min(len(rows), room))
    steps = ((len(heads), max(1, room // step)), (len(rows), step))
    for place in product(*([slice(i, i + by) for i in range(0, size, by)] for size, by in steps)):
        y = (row[place].unsqueeze(-1) + column) & WORD
        y ^= y >> 16
        y.mul_(FIRST).bitwise_and_(WORD)
        y ^= y >> 15
        y ^= other[place].unsqueeze(-1)
        y.mul_(SECOND).bitwise_and_(WORD)
        y ^= y >> 16
        bits[place] = y >= limit
    return bits


def threshold(dropout: float) -> int:
    """Returns the smallest hash of a weight that remains."""
    return min(round(dropout * 2**32), WORD)


def scale(dropout: float) -> float:
    """Returns the factor of the weights that remain."""
    return 0.0 if dropout >= 1 else 1 / (1 - dropout)

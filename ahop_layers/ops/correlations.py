"""Similarities of normalized blocks with unknown values, from matrix products.

They are those of :func:`ahop_layers.ops.reference.known_blocks` with a constant. The mean, norm and product of what
both rows of a pair know are sums of products of one row with the other, so no tensor of size L x S x d is formed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BASES = ("dis", "dot")
WIDE = torch.float64  # differences of squares lose digits


def serves(query: Tensor, bases: Sequence[str]) -> bool:
    """Returns whether products give all bases, on a device that has float64."""
    return set(bases) <= set(BASES) and query.device.type != "mps"


class KnownRows(NamedTuple):
    """Rows in float64, with 0 for unknown values: queries as ``(..., n, L, d / n)``, keys as ``(..., n, d / n, S)``."""

    known: Tensor | None  # 1 where a value is known, or None if all are
    values: Tensor
    squares: Tensor


def known_rows(rows: Tensor, n: int, are_keys: bool) -> KnownRows:
    """Prepares ``rows (..., L, d)`` of n consecutive blocks, in which NaN is unknown, for :func:`correlate`."""
    blocks = torch.unflatten(rows, -1, (n, -1)).transpose(-2, -3)
    blocks = blocks.mT if are_keys else blocks
    unknown = blocks.isnan()
    values = torch.where(unknown, 0.0, blocks - rows.nanmean()).to(WIDE, memory_format=torch.contiguous_format)
    return KnownRows((~unknown).to(WIDE) if unknown.any() else None, values, values.square())


def correlate(query: KnownRows, key: KnownRows, bases: Sequence[str], constant: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes the similarities of blocks for each of the :data:`BASES`, ``(n_bases, ..., L, S, n)``, NaN if missing.

    ``constant`` is a scalar or ``(..., 1, 1, 1)``.
    """
    width = query.values.shape[-1]
    known = torch.ones_like(query.values) if query.known is None else query.known
    if key.known is None:
        count, query_sum, query_square = (each.sum(-1, keepdim=True) for each in (known, *query[1:]))
    else:
        count, query_sum, query_square = (each @ key.known for each in (known, *query[1:]))
    many = count.clamp(min=1)
    key_sum = known @ key.values
    product = torch.addcmul(query.values @ key.values, query_sum / many, key_sum, value=-1)
    key_square = (known @ key.squares) - key_sum.square() / many
    query_square = query_square - query_sum.square() / many
    factor, missing = (width / many).to(dtype), (count < min(2, width)).movedim(-3, -1)
    squares = [factor * each.to(dtype).clamp(min=torch.finfo(dtype).tiny) for each in (query_square, key_square)]
    query_norm, key_norm = (square.sqrt() + constant for square in squares)
    dot = product.to(dtype) * (factor / query_norm) / key_norm
    found = []
    for base in bases:
        value = dot if base == "dot" else 2 * dot - squares[0] / query_norm**2 - squares[1] / key_norm**2
        found.append(value.movedim(-3, -1).masked_fill(missing, torch.nan))
    return torch.stack(found)

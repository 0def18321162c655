"""Attention in slices of queries: the implementation of ``ahop::attend`` on top of any kernel for scores.

The scores of one slice fit in a scratch memory of fixed size. The backward pass computes them again from the inputs and
the log-sum-exp of each query, so no tensor of size L x S is kept.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ahop_layers.ops.dropout import kept, scale
from ahop_layers.ops.protocols import AttendNeed, Kernel, empty_results
from ahop_layers.ops.reference import accumulation_dtype

SCRATCH_BYTES = {"cpu": 40 * 2**20}
"""Memory of the scores, weights and temporaries of one slice, by device type."""

LARGE_SCRATCH_BYTES = 64 * 2**20
"""The same for other devices."""

PAIR_VALUES = 4
"""Number of values of the accumulation dtype that a slice holds for each pair of query and key."""


class _Slice(NamedTuple):
    """A range of batch entries, query heads, the key heads that these use, and queries."""

    n: slice
    heads: slice
    key_heads: slice
    rows: slice

    def of_queries(self, tensor: Tensor) -> Tensor:
        """Returns the part of a tensor ``(N, H, L, ...)``."""
        return tensor[self.n, self.heads, self.rows]

    def of_keys(self, tensor: Tensor) -> Tensor:
        """Returns the part of a tensor ``(N, Hk, S, ...)``."""
        return tensor[self.n, self.key_heads]

    def of_mask(self, mask: Tensor) -> Tensor:
        """Returns the part of a tensor that broadcasts to ``(N, H, L, S)``."""
        parts = zip(mask.shape, (self.n, self.heads, self.rows), strict=False)
        return mask[tuple(slice(None) if size == 1 else part for size, part in parts)]


class Sliced:
    """Attention in slices of queries; see :class:`ahop_layers.ops.protocols.Attention`."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor,
        bases: Sequence[str],
        mask: Tensor | None,
        causal: bool,
        dropout: float,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Computes the readout and the log-sum-exp of the scores of each query."""
        out, log_sum = empty_results(query, value)
        if key.shape[-2] == 0:
            return out.zero_(), log_sum.fill_(torch.inf)
        for part in _slices(query, key):
            scores = self._scores(part, query, key, weight, bases, mask, causal)
            largest = scores.amax(-1, keepdim=True)
            weights = scores.softmax(-1)
            del scores
            log_sums = largest - weights.amax(-1, keepdim=True).log()
            if mask is not None:  # a causal mask alone leaves each query a key
                empty = largest == -torch.inf
                log_sums = log_sums.masked_fill(empty, torch.inf)
                weights.masked_fill_(empty, 0.0)
            part.of_queries(log_sum).copy_(log_sums.squeeze(-1))
            if seed is not None:
                weights.mul_(_kept(part, query, key, seed, dropout)).mul_(scale(dropout))
            values = per_query_head(part.of_keys(value), weights.shape[1])
            part.of_queries(out).copy_(weights.to(value.dtype) @ values)
        return out, log_sum

    def attend_backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor,
        bases: Sequence[str],
        mask: Tensor | None,
        causal: bool,
        dropout: float,
        seed: Tensor | None,
        out: Tensor,
        log_sum: Tensor,
        need: AttendNeed,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Computes the gradients of query, key, value and weight; those that ``need`` excludes are empty tensors."""
        dtype = accumulation_dtype(query.dtype)
        query_grad, key_grad, value_grad, weight_grad = (
            torch.zeros(
                tensor.shape if wanted else 0, dtype=query.dtype if tensor is query else dtype, device=grad.device
            )
            for tensor, wanted in zip((query, key, value, weight), need, strict=True)
        )
        score_need = need[0], need[1], need[3]
        for part in _slices(query, key):
            part_grad, part_query = part.of_queries(grad), part.of_queries(query)
            heads, key_heads = part_query.shape[1], part.key_heads.stop - part.key_heads.start
            weights = self._scores(part, query, key, weight, bases, mask, causal)
            weights.sub_(part.of_queries(log_sum).unsqueeze(-1)).exp_()
            remains = None if seed is None else _kept(part, query, key, seed, dropout)
            if need[2]:
                read = weights if remains is None else (weights * remains).mul_(scale(dropout))
                read_grad = read.to(value.dtype).mT @ part_grad
                del read
                part.of_keys(value_grad).add_(_per_key_head(read_grad, key_heads))
            if not any(score_need):
                continue
            score_grad = (part_grad @ per_query_head(part.of_keys(value), heads).mT).to(dtype)
            if remains is not None:
                score_grad.mul_(remains).mul_(scale(dropout))
            mean = (part_grad.to(dtype) * part.of_queries(out)).sum(-1, keepdim=True)
            score_grad.sub_(mean).mul_(weights)
            del weights, remains
            keys = per_query_head(part.of_keys(key), heads)
            grads = self.kernel.score_backward(score_grad, part_query, keys, weight[part.heads], bases, score_need)
            if need[0]:
                part.of_queries(query_grad).copy_(grads[0])
            if need[1]:
                part.of_keys(key_grad).add_(_per_key_head(grads[1], key_heads))
            if need[3]:
                weight_grad[part.heads] += grads[2]
        return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype), weight_grad

    def _scores(
        self,
        part: _Slice,
        query: Tensor,
        key: Tensor,
        weight: Tensor,
        bases: Sequence[str],
        mask: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Computes the masked scores of a slice in the accumulation dtype."""
        queries = part.of_queries(query)
        keys = per_query_head(part.of_keys(key), queries.shape[1])
        scores = self.kernel.score(queries, keys, weight[part.heads], bases)
        if mask is not None and mask.dtype == torch.bool:
            scores.masked_fill_(part.of_mask(mask), -torch.inf)
        elif mask is not None:
            scores += part.of_mask(mask).to(scores.dtype)
        if causal:
            rows = torch.arange(part.rows.start, part.rows.stop, device=query.device)
            scores.masked_fill_(torch.arange(key.shape[-2], device=query.device) > rows[:, None], -torch.inf)
        return scores


def _slices(query: Tensor, key: Tensor) -> Iterator[_Slice]:
    """Yields slices over N, H and L, as large as the scratch memory allows, longest along L."""
    (n, heads, length, _), (_, key_heads, count, _) = query.shape, key.shape
    if 0 in (n, heads, length, count):
        return
    group = heads // key_heads
    pair_bytes = PAIR_VALUES * accumulation_dtype(query.dtype).itemsize
    room = max(1, SCRATCH_BYTES.get(query.device.type, LARGE_SCRATCH_BYTES) // (pair_bytes * count))
    row_step = _even(length, room)
    room //= row_step
    # A slice has all heads of several groups or a part of one group, so that its heads share keys in equal numbers.
    if room >= group:
        head_step = group * _even(key_heads, room // group)
    else:
        head_step = next(size for size in range(max(1, room), 0, -1) if group % size == 0)
    n_step = _even(n, room // head_step)
    for first, head, row in product(range(0, n, n_step), range(0, heads, head_step), range(0, length, row_step)):
        stop = min(head + head_step, heads)
        yield _Slice(
            slice(first, min(first + n_step, n)),
            slice(head, stop),
            slice(head // group, (stop - 1) // group + 1),
            slice(row, min(row + row_step, length)),
        )


def _even(size: int, room: int) -> int:
    """Returns the length, at most ``room`` or 1, of the fewest slices of about equal length that cover ``size``."""
    return -(-size // -(-size // max(1, room)))


def per_query_head(tensor: Tensor, heads: int) -> Tensor:
    """Repeats ``(N, Hk, S, d)`` for the query heads that share a key head: ``(N, heads, S, d)``.

    >>> per_query_head(torch.arange(2).reshape(1, 2, 1, 1), 6).flatten()
    tensor([0, 0, 0, 1, 1, 1])
    """
    if tensor.shape[1] == heads:
        return tensor
    return tensor.unsqueeze(2).expand(-1, -1, heads // tensor.shape[1], -1, -1).flatten(1, 2)


def _per_key_head(grad: Tensor, key_heads: int) -> Tensor:
    """Sums ``(N, heads, S, d)`` over the query heads that share a key head: ``(N, Hk, S, d)``."""
    return grad if grad.shape[1] == key_heads else torch.unflatten(grad, 1, (key_heads, -1)).sum(2)


def _kept(part: _Slice, query: Tensor, key: Tensor, seed: Tensor, dropout: float) -> Tensor:
    """Returns which weights of a slice remain, ``(n, heads, rows, S)``."""
    ranges = (part.n, part.heads, part.rows, slice(0, key.shape[-2]))
    n, heads, rows, columns = (torch.arange(each.start, each.stop, device=query.device) for each in ranges)
    places = n[:, None] * query.shape[1] + heads
    return torch.unflatten(kept(seed, places.flatten(), rows, columns, dropout), 0, places.shape)

"""Attention in slices of queries: the implementation of ``ahop::attend`` on top of any kernel for scores.

The scores of one slice fit in a scratch memory of fixed size. The backward pass computes them again from the inputs and
the log-sum-exp of each query, so no tensor of size L x S is kept.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ahop_layers.ops.chunked import GPU_SCRATCH_BYTES, SCRATCH_BYTES
from ahop_layers.ops.dropout import kept, scale
from ahop_layers.ops.protocols import AttentionCall, KernelModule
from ahop_layers.ops.reference import accumulation_dtype

PAIR_VALUES = 4  # number of values of the accumulation dtype that a slice holds for each pair of query and key


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
        """Returns the part of a tensor ``(N, Hk, S, d)``, repeated for the query heads."""
        return per_query_head(tensor[self.n, self.key_heads], self.heads.stop - self.heads.start)

    def add_to_keys(self, total: Tensor, grad: Tensor) -> None:
        """Adds ``(n, heads, S, d)``, summed over the query heads that share a key head, to ``(N, Hk, S, d)``."""
        key_heads = self.key_heads.stop - self.key_heads.start
        total[self.n, self.key_heads] += torch.unflatten(grad, 1, (key_heads, -1)).sum(2)

    def inputs(self, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, Sequence[str]]:
        """Returns query, key, weight and bases as kernels take them."""
        return self.of_queries(call.query), self.of_keys(call.key), call.weight[self.heads], call.bases

    def mask_(self, scores: Tensor, call: AttentionCall) -> Tensor:
        if call.mask is not None:
            parts = zip(call.mask.shape, (self.n, self.heads, self.rows), strict=False)
            mask = call.mask[tuple(slice(None) if size == 1 else part for size, part in parts)]
            is_bool = mask.dtype == torch.bool
            scores = scores.masked_fill_(mask, -torch.inf) if is_bool else scores.add_(mask.to(scores.dtype))
        if call.causal:
            rows = torch.arange(self.rows.start, self.rows.stop, device=scores.device)
            scores.masked_fill_(torch.arange(scores.shape[-1], device=scores.device) > rows[:, None], -torch.inf)
        return scores

    def remaining(self, call: AttentionCall) -> Tensor | None:
        """Returns which weights dropout keeps, ``(n, heads, rows, S)``, or None if it keeps all."""
        if call.seed is None:
            return None
        ranges = (self.n, self.heads, self.rows, slice(0, call.key.shape[-2]))
        n, heads, rows, columns = (torch.arange(each.start, each.stop, device=call.seed.device) for each in ranges)
        places = n[:, None] * call.query.shape[1] + heads
        return torch.unflatten(kept(call.seed, places.flatten(), rows, columns, call.dropout), 0, places.shape)


def _drop_(weights: Tensor, remaining: Tensor | None, dropout: float) -> Tensor:
    """Drops weights, or their gradients, in place."""
    return weights if remaining is None else weights.mul_(remaining).mul_(scale(dropout))


class Sliced:
    """Attention in slices of queries; see :class:`ahop_layers.ops.protocols.Attention`."""

    def __init__(self, kernel: KernelModule) -> None:
        self.kernel = kernel

    def forward(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Computes the readout and the log-sum-exp of the scores of each query."""
        given, call, value = call, call.combined(), call.value
        out, log_sum = call.empty_results()
        if call.key.shape[-2] == 0:
            return out.zero_(), log_sum.fill_(torch.inf)
        if given.weight.requires_grad and hasattr(self.kernel, "compile_ahead"):
            self.kernel.compile_ahead(call.query, given.weight, call.bases, log_sum.dtype)
        for part in _slices(call.query, call.key):
            scores = part.mask_(self.kernel.score(*part.inputs(call)), call)
            dtype = value.dtype if call.seed is None else scores.dtype
            weights, log_sums = softmax(scores, dtype, call.mask is not None)
            del scores
            part.of_queries(log_sum).copy_(log_sums)
            weights = _drop_(weights, part.remaining(call), call.dropout).to(value.dtype)
            part.of_queries(out).copy_(weights @ part.of_keys(value))
        return out, log_sum

    def backward(
        self, call: AttentionCall, grad: Tensor, out: Tensor, log_sum: Tensor, need: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        """Computes the gradients of query, key, value, weight and beta; empty ones where ``need`` is False."""
        given, call, value, weigh = call, call.combined(), call.value, need[3] or need[4]
        query_grad = call.query.new_zeros(call.query.shape if need[0] else 0)
        key_grad, value_grad, weight_grad = (
            tensor.new_zeros(tensor.shape if wanted else 0, dtype=log_sum.dtype)
            for tensor, wanted in zip(call[1:4], (*need[1:3], True), strict=True)
        )
        kernel: Any = self.kernel
        for part in _slices(call.query, call.key):
            part_grad, remaining = part.of_queries(grad), part.remaining(call)
            scores = part.mask_(kernel.score(*part.inputs(call)), call)
            slopes = part_grad @ part.of_keys(value).mT
            slopes = slopes if remaining is None else _drop_(slopes.to(log_sum.dtype), remaining, call.dropout)
            weights, score_grad = softmax_backward(scores, part.of_queries(log_sum), slopes, value.dtype)
            del scores, slopes
            if need[0] or need[1] or weigh:
                grads = kernel.score_backward(score_grad, *part.inputs(call), (need[0], need[1], weigh))
                if need[0]:
                    part.of_queries(query_grad).copy_(grads[0])
                if need[1]:
                    part.add_to_keys(key_grad, grads[1])
                if weigh:
                    weight_grad[part.heads] += grads[2]
            if need[2]:
                part.add_to_keys(value_grad, _drop_(weights, remaining, call.dropout).mT @ part_grad)
        grads = query_grad, key_grad.to(call.key.dtype), value_grad.to(value.dtype), *given.weight_grads(weight_grad)
        return tuple(x if wanted else x.new_empty(0) for x, wanted in zip(grads, need, strict=True))


def softmax(scores: Tensor, dtype: torch.dtype, masked: bool) -> tuple[Tensor, Tensor]:
    """Computes the softmax of scores ``(..., S)`` in a dtype, and the log-sum-exp ``(...)``.

    A row of ``-inf`` has weights of zero and an infinite log-sum-exp; without ``masked`` there is none.
    """
    largest, weights = scores.amax(-1, keepdim=True), scores.softmax(-1)
    log_sums = largest - weights.amax(-1, keepdim=True).log()
    if masked:
        empty = largest == -torch.inf
        log_sums = log_sums.masked_fill(empty, torch.inf)
        weights.masked_fill_(empty, 0.0)
    return weights.to(dtype), log_sums.squeeze(-1)


def softmax_backward(scores: Tensor, log_sum: Tensor, slopes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Computes the weights in a dtype, and the gradients of the scores from the gradients of the weights, ``slopes``.

    The readout is not used: its rounding would reach the gradient of the footprint weights. The rounding of the
    log-sum-exp is divided out.
    """
    weights, slopes = scores.sub_(log_sum.unsqueeze(-1)).exp_(), slopes.to(scores.dtype)
    total = weights.sum(-1, keepdim=True).clamp_(min=torch.finfo(weights.dtype).tiny)  # 0 if all keys are masked
    score_grad = (slopes - (weights * slopes).sum(-1, keepdim=True).div_(total)).mul_(weights)
    return weights.to(dtype), score_grad


def _slices(query: Tensor, key: Tensor) -> Iterator[_Slice]:
    """Yields slices over N, H and L, as large as the scratch memory allows, longest along L."""
    (n, heads, length, _), (_, key_heads, count, _) = query.shape, key.shape
    if 0 in (n, heads, length, count):
        return
    group = heads // key_heads
    pair_bytes = PAIR_VALUES * accumulation_dtype(query.dtype).itemsize
    scratch = SCRATCH_BYTES if query.device.type == "cpu" else GPU_SCRATCH_BYTES
    room = max(1, scratch // (pair_bytes * count))
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
        batch, rows = slice(first, min(first + n_step, n)), slice(row, min(row + row_step, length))
        yield _Slice(batch, slice(head, stop), slice(head // group, (stop - 1) // group + 1), rows)


def _even(size: int, room: int) -> int:
    """Returns the length, at most ``room`` or 1, of the fewest slices of about equal length that cover ``size``."""
    return -(-size // -(-size // max(1, room)))


def per_query_head(tensor: Tensor, heads: int) -> Tensor:
    """Repeats ``(N, Hk, S, d)`` for the query heads that share a key head: ``(N, heads, S, d)``."""
    if tensor.shape[1] == heads:
        return tensor
    return tensor.unsqueeze(2).expand(-1, -1, heads // tensor.shape[1], -1, -1).flatten(1, 2)

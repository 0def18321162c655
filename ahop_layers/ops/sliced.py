"""Attention in slices of queries: the implementation of ``ahop::attend`` on top of any kernel for scores.

The scores of one slice fit in a scratch memory of fixed size. The backward pass computes them again from the inputs and
the log-sum-exp of each query, so no tensor of size L x S is kept.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ahop_layers.ops.chunked import Need
from ahop_layers.ops.dropout import kept, scale
from ahop_layers.ops.protocols import AttendNeed, Kernel, SoftmaxKernel, empty_results
from ahop_layers.ops.reference import accumulation_dtype, fold

SCRATCH_BYTES = {"cpu": 40 * 2**20}
"""Memory of the scores, weights and temporaries of one slice, by device type."""

LARGE_SCRATCH_BYTES = 192 * 2**20
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


class _Call(NamedTuple):
    """The arguments of a call that forward and backward pass share."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    bases: Sequence[str]
    mask: Tensor | None
    causal: bool
    dropout: float
    seed: Tensor | None

    def scored(self, part: _Slice) -> tuple[Tensor, Tensor, Tensor, Sequence[str]]:
        """Returns the query, key and weight of a slice, and the bases, as kernels take them."""
        query = part.of_queries(self.query)
        return query, per_query_head(part.of_keys(self.key), query.shape[1]), self.weight[part.heads], self.bases

    def remaining(self, part: _Slice) -> Tensor | None:
        """Returns which weights of a slice dropout keeps, ``(n, heads, rows, S)``, or None if it keeps all."""
        if self.seed is None:
            return None
        ranges = (part.n, part.heads, part.rows, slice(0, self.key.shape[-2]))
        n, heads, rows, columns = (torch.arange(each.start, each.stop, device=self.seed.device) for each in ranges)
        places = n[:, None] * self.query.shape[1] + heads
        return torch.unflatten(kept(self.seed, places.flatten(), rows, columns, self.dropout), 0, places.shape)

    def drop(self, weights: Tensor, remaining: Tensor | None) -> Tensor:
        """Drops weights of a slice, or their gradients, in place."""
        return weights if remaining is None else weights.mul_(remaining).mul_(scale(self.dropout))


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
        call = _Call(query, key, value, fold(weight), bases, mask, causal, dropout, seed)
        out, log_sum = empty_results(query, value)
        if key.shape[-2] == 0:
            return out.zero_(), log_sum.fill_(torch.inf)
        compute = self.kernel.softmax if isinstance(self.kernel, SoftmaxKernel) else softmax
        for part in _slices(query, key):
            scores = self._scores(call, part)
            weights, log_sums = compute(scores, value.dtype if seed is None else scores.dtype, mask is not None)
            del scores
            part.of_queries(log_sum).copy_(log_sums)
            weights = call.drop(weights, call.remaining(part)).to(value.dtype)
            part.of_queries(out).copy_(weights @ per_query_head(part.of_keys(value), weights.shape[1]))
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
        call = _Call(query, key, value, fold(weight), bases, mask, causal, dropout, seed)
        query_grad = query.new_zeros(query.shape if need[0] else 0)
        key_grad, value_grad, weight_grad = (
            tensor.new_zeros(tensor.shape if wanted else 0, dtype=log_sum.dtype)
            for tensor, wanted in zip((key, value, weight), need[1:], strict=True)
        )
        for part in _slices(query, key):
            key_heads = part.key_heads.stop - part.key_heads.start
            part_grad, log_sums = part.of_queries(grad), part.of_queries(log_sum).unsqueeze(-1)
            remaining = call.remaining(part)
            if need[0] or need[1] or need[3]:
                mean = None
                if out.dtype == log_sum.dtype:  # a rounded readout would reach the gradient of the footprint weights
                    mean = (part_grad * part.of_queries(out)).sum(-1, keepdim=True)
                grads, weights = self._score_backward(
                    call, part, part_grad, remaining, log_sums, mean, (need[0], need[1], need[3])
                )
            else:
                grads, weights = (), self._scores(call, part).sub_(log_sums).exp_()
            if need[0]:
                part.of_queries(query_grad).copy_(grads[0])
            if need[1]:
                part.of_keys(key_grad).add_(_per_key_head(grads[1], key_heads))
            if need[2]:
                read_grad = call.drop(weights, remaining).to(value.dtype).mT @ part_grad
                part.of_keys(value_grad).add_(_per_key_head(read_grad, key_heads))
            if need[3]:
                weight_grad[part.heads] += grads[2]
        # The cumulative sum is the transpose of fold.
        return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype), weight_grad.cumsum(-1)

    def _score_backward(
        self,
        call: _Call,
        part: _Slice,
        grad: Tensor,
        remaining: Tensor | None,
        log_sums: Tensor,
        mean: Tensor | None,
        need: Need,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Computes the gradients of query, key and weight, and the weights of the softmax, for one slice.

        ``grad`` is the gradient of the readout, ``mean`` its inner product with the readout, or None.
        """
        values = per_query_head(part.of_keys(call.value), grad.shape[1])
        weights_grad = call.drop((grad @ values.mT).to(log_sums.dtype), remaining)
        if isinstance(self.kernel, SoftmaxKernel):
            shift = log_sums.expand_as(weights_grad)
            if call.mask is not None or call.causal:
                shift = shift - _masked(torch.zeros_like(weights_grad), call, part)
            grads = self.kernel.softmax_backward(weights_grad, *call.scored(part), shift, mean, need)
            return grads, weights_grad
        weights = self._scores(call, part).sub_(log_sums).exp_()
        score_grad = softmax_grad(weights, weights_grad, mean)
        return self.kernel.score_backward(score_grad, *call.scored(part), need), weights

    def _scores(self, call: _Call, part: _Slice) -> Tensor:
        """Computes the masked scores of a slice in the accumulation dtype."""
        return _masked(self.kernel.score(*call.scored(part)), call, part)


def softmax_grad(weights: Tensor, grad: Tensor, mean: Tensor | None) -> Tensor:
    """Returns the gradient of the scores, given softmax weights and their gradient, which is overwritten.

    ``mean`` is the weighted mean of ``grad`` or, to be computed here, None.

    >>> softmax_grad(torch.tensor([0.25, 0.75]), torch.tensor([1.0, 0.0]), None)
    tensor([ 0.1875, -0.1875])
    """
    mean = (weights * grad).sum(-1, keepdim=True) if mean is None else mean
    return grad.sub_(mean).mul_(weights)


def softmax(scores: Tensor, dtype: torch.dtype, masked: bool) -> tuple[Tensor, Tensor]:
    """Computes the softmax of scores ``(..., S)`` in a dtype, and the log-sum-exp ``(...)``.

    A row of ``-inf`` has weights of zero and an infinite log-sum-exp; without ``masked`` there is none.

    >>> softmax(torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]]), torch.float32, masked=True)
    (tensor([[0.5000, 0.5000],
            [0.0000, 0.0000]]), tensor([0.6931,    inf]))
    """
    largest, weights = scores.amax(-1, keepdim=True), scores.softmax(-1)
    log_sums = largest - weights.amax(-1, keepdim=True).log()
    if masked:
        empty = largest == -torch.inf
        log_sums = log_sums.masked_fill(empty, torch.inf)
        weights.masked_fill_(empty, 0.0)
    return weights.to(dtype), log_sums.squeeze(-1)


def _masked(scores: Tensor, call: _Call, part: _Slice) -> Tensor:
    """Masks the scores of a slice in place."""
    mask = None if call.mask is None else part.of_mask(call.mask)
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(mask, -torch.inf)
    elif mask is not None:
        scores += mask.to(scores.dtype)
    if call.causal:
        rows = torch.arange(part.rows.start, part.rows.stop, device=scores.device)
        scores.masked_fill_(torch.arange(scores.shape[-1], device=scores.device) > rows[:, None], -torch.inf)
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

"""Packed bags: the instances of variable-size bags, concatenated without padding.

:class:`Bags` computes reductions within bags. :class:`Packed` is the memory layout that makes
:func:`~ahop_layers.association.associate` work on bags. ``N`` counts bags, ``total`` their instances, ``H`` heads and
``Q`` queries.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from ahop_layers.errors import AHopError, check_floating, describe
from ahop_layers.ops.onnx import is_onnx_export
from ahop_layers.ops.operators import assert_in_graph
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.separation import Rows, Separation
from ahop_layers.similarity.protocol import ScoreFunction

# Maps patterns ``(N, rows, E)``, by part 1 or 2 (keys, values), to patterns or to heads ``(N, H, rows, d)``.
OfPart = Callable[[Tensor, int], Tensor]
# Maximal number of elements of the instances in a slice: bounds memory, but keeps the device busy.
SLICE_ELEMENTS = {"cpu": 2**22, "cuda": 2**24}
# On a CPU, segment_reduce is faster than index_add for rows of up to this length, and slower for longer ones.
SHORT_ROW = 16


class _Spread(torch.autograd.Function):
    """Repeats the row of a bag for its instances. Its gradient is deterministic on a GPU, unlike with indexing."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bags: "Bags") -> Tensor:
        ctx.bags = bags
        return rows.index_select(0, bags.bag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.bags.sum(grad), None


class Bags(Rows):
    """Reductions within packed bags of given ``sizes``, on the device of their instances.

    If the ``total`` of the sizes is given, the values of a tensor ``(N,)`` are not read, so that the code compiles.
    """

    def __init__(self, sizes: Sequence[int] | Tensor, device: torch.device, total: int | None = None) -> None:
        self.sizes = torch.as_tensor(sizes, device=device, dtype=torch.long)
        self.total = int(sum(sizes)) if total is None else total
        if is_onnx_export():  # which supports repeat_interleave without output_size only
            self.bag = (torch.arange(self.total, device=device)[:, None] >= self.sizes.cumsum(0)).sum(-1)
        else:
            number = torch.arange(self.sizes.shape[0], device=device)
            self.bag = number.repeat_interleave(self.sizes, output_size=self.total)

    def sum(self, rows: Tensor) -> Tensor:
        """Sums the rows of each bag: ``(total, ...) -> (N, ...)``."""
        short = rows.is_cpu and rows.shape[1:].numel() <= SHORT_ROW and not rows.requires_grad
        if (rows.is_cuda or short) and not is_onnx_export():  # on a GPU, index_add is not deterministic
            return torch.segment_reduce(rows.contiguous(), "sum", lengths=self.sizes, unsafe=True, initial=0.0)
        return rows.new_zeros(self.sizes.shape[0], *rows.shape[1:]).index_add(0, self.bag, rows)

    def amax(self, rows: Tensor) -> Tensor:
        """Computes the maximum of the rows of each bag, without gradient: ``(total, ...) -> (N, ...)``."""
        place = self.bag.view(-1, *[1] * (rows.ndim - 1)).expand_as(rows)
        lowest = -torch.inf if rows.is_floating_point() else torch.iinfo(rows.dtype).min
        return rows.new_full((self.sizes.shape[0], *rows.shape[1:]), lowest).scatter_reduce(0, place, rows, "amax")

    def spread(self, rows: Tensor) -> Tensor:
        """Repeats the row of each bag for its instances: ``(N, ...) -> (total, ...)``."""
        if torch.compiler.is_compiling():  # which does not support dynamic shapes in an autograd.Function
            return rows.index_select(0, self.bag)
        return _Spread.apply(rows, self)  # type: ignore[no-untyped-call]

    def read(self, weights: Tensor, values: Tensor) -> Tensor:
        """Sums the values ``(total, H, e)`` of each bag by weights ``(total, H, Q)``: ``(N, H, Q, e)``."""
        columns = weights.to(accumulation_dtype(values.dtype)).unbind(-1)  # by query, to avoid (total, H, Q, e)
        return torch.stack([self.sum(column[..., None] * values) for column in columns], 2).to(values.dtype)


class PackedPatterns(NamedTuple):
    """Packed bags as the stored patterns and pattern projections of a Hopfield layer, which normalizes them."""

    instances: Tensor  # (total, E)
    sizes: list[int] | Tensor  # of the bags; a tensor (N,), for compilation, means a single slice
    normalize: OfPart


class Packed:
    """The keys and values of packed bags; weights are ``(total, H, Q)``.

    It has the methods of :class:`~ahop_layers.association.Padded`. Keys and values are computed in slices to bound
    memory. In training they are recomputed for their gradients. A bag may span several slices.

    Args:
        patterns: the bags.
        heads: projects patterns to heads.
        zero_association: append a key and a value of zeros to each bag. Weights are then ``(total + N, H, Q)``.
        keep_keys: compute all keys once and keep them, as update steps require.
    """

    def __init__(
        self, patterns: PackedPatterns, heads: OfPart, *, zero_association: bool = False, keep_keys: bool = False
    ) -> None:
        instances, sizes, self.normalize = patterns
        self.heads, total, device = heads, instances.shape[0], instances.device
        self.bags = self.extended = Bags(sizes, device, total)
        self.keys: Any = self.project(instances, 1) if keep_keys else None
        self.places: Tensor | None = None
        if zero_association:
            self.extended = Bags(self.bags.sizes + 1, device, total + self.bags.sizes.shape[0])
            self.places = torch.arange(total, device=device) + self.bags.bag
        self.slices: list[list[int]] = [[]]
        self.pieces, self.lengths = [1], [total]
        if not isinstance(sizes, Tensor):
            limit = SLICE_ELEMENTS["cuda" if instances.is_cuda else "cpu"] // max(1, instances.shape[1])
            self.slices, self.pieces = cut(sizes, max(1, limit))
            self.lengths = [sum(pieces) for pieces in self.slices]
        self.parts = instances.split_with_sizes(self.lengths)

    def project(self, instances: Tensor, part: int) -> Tensor:
        """Computes part 1 or 2 (keys, values) of instances: ``(rows, E) -> (rows, H, d)``."""
        return rearrange(self.heads(self.normalize(instances[None], part), part), "1 h t d -> t h d")

    def weigh(self, state: Tensor, score: ScoreFunction, separation: Separation) -> Tensor:
        """Turns the scores of the states ``(1 or N, H, Q, d)`` against the keys of their bags into weights."""

        def shared(state: Tensor, keys: Tensor) -> Tensor:
            return rearrange(score(state, rearrange(keys, "t h d -> 1 h t d")), "1 h q t -> t h q")

        def of_slice(state: Tensor, part: Tensor) -> Tensor:
            return shared(state, self.project(part, 1))

        if self.keys is None:
            scores = torch.cat([self._compute(of_slice, state, part) for part in self.parts])
        elif state.shape[0] == 1 or not self.bags.total:
            scores = shared(state[:1], self.keys)
        else:
            scores = score(self.bags.spread(state), self.keys.unsqueeze(2)).squeeze(-1)
        if self.places is not None:
            zero = score(state, torch.zeros_like(state[:1, :, :1])).squeeze(-1).expand(self.bags.sizes.shape[0], -1, -1)
            scores = self.extended.spread(zero).index_copy(0, self.places, scores)
        return separation(scores, groups=self.extended)

    def next_state(self, weights: Tensor) -> Tensor:
        """Sums the weighted keys of each bag, which were kept: ``(N, H, Q, d)``."""
        return self.bags.read(self.of_instances(weights), self.keys)

    def read(self, weights: Tensor) -> Tensor:
        """Sums the weighted values of each bag: ``(N, H, Q, e)``."""

        def of_slice(weights: Tensor, part: Tensor, pieces: list[int]) -> Tensor:
            bags = self.bags if len(self.slices) == 1 else Bags(pieces, part.device)
            return bags.read(weights, self.project(part, 2))

        each = zip(self.of_instances(weights).split_with_sizes(self.lengths), self.parts, self.slices, strict=True)
        read = torch.cat([self._compute(of_slice, *given) for given in each])
        return read if max(self.pieces, default=1) == 1 else Bags(self.pieces, read.device).sum(read)

    def change(self, weights: Tensor, before: Tensor) -> Tensor:
        """Computes the norm of the difference of two sets of weights: ``(N, H)``."""
        return self.extended.sum((weights - before).square().sum(-1)).sqrt()

    def of_instances(self, weights: Tensor) -> Tensor:
        """Returns the weights ``(total, H, Q)`` without the zero association."""
        return weights if self.places is None else weights.index_select(0, self.places)

    def _compute(self, function: Callable[..., Tensor], *given: Any) -> Tensor:
        """Calls a function of a slice, and once more in the backward pass if there are several slices."""
        if len(self.slices) == 1 or not torch.is_grad_enabled():
            return function(*given)
        from torch.utils.checkpoint import checkpoint  # imported on demand: in torch 2.6 this takes 0.5 s, for sympy

        return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)


def cut(sizes: list[int], limit: int) -> tuple[list[list[int]], list[int]]:
    """Cuts packed bags into slices of at most ``limit`` instances.

    Returns the sizes of the pieces of each slice, which belong to one bag each, and the number of pieces of each bag.

    >>> cut([3, 0, 9], 5)
    ([[3, 0, 2], [5], [2]], [1, 1, 3])
    """
    slices: list[list[int]] = [[]]
    pieces, room = [], limit
    for size in sizes:
        pieces.append(0)
        while size or not pieces[-1]:
            if size and not room:
                slices.append([])
                room = limit
            slices[-1].append(min(size, room))
            pieces[-1] += 1
            size, room = size - slices[-1][-1], room - slices[-1][-1]
    return slices, pieces


def check_bags(instances: Any, bag_sizes: Any) -> tuple[Tensor, list[int] | Tensor]:
    """Returns instances ``(total, E)`` and the sizes of their bags; raises unless these fit.

    The sizes are a list, or under compilation a tensor whose values are checked when the graph runs.
    """
    check_floating(instances=instances)
    if instances.is_nested or instances.ndim != 2:
        got = "a nested tensor" if instances.is_nested else describe(instances)
        raise AHopError(f"instances must be (total, input_size), concatenated over all bags, got {got}")
    try:
        sizes = torch.as_tensor(bag_sizes)
    except (RuntimeError, TypeError, ValueError):
        sizes = torch.empty(())
    fractional = sizes.is_floating_point() or sizes.is_complex() or sizes.dtype == torch.bool
    valid = sizes.ndim == 1 and (not fractional or sizes.shape[0] == 0)
    if valid and torch.compiler.is_compiling():
        fits = (sizes.sum() == instances.shape[0]) & (sizes >= 0).all()
        assert_in_graph(fits, "bag_sizes must be integers >= 0 that add up to the number of instances")
        return instances, sizes
    counts = sizes.tolist() if valid else [-1]
    if min(counts, default=0) < 0:
        raise AHopError(f"bag_sizes must be a sequence of integers >= 0, got {bag_sizes!r}")
    if sum(counts) != len(instances):
        raise AHopError(f"bag_sizes must add up to the number of instances, {len(instances)}, got {sum(counts)}")
    return instances, counts

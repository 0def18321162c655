"""Packed bags: the instances of variable-size bags, concatenated without padding.

:class:`Bags` computes reductions and scores within bags. :class:`Packed` is the memory layout that makes
:func:`~ahop_layers.association.associate` work on bags. ``N`` counts bags, ``total`` their instances, ``H`` heads and
``Q`` queries.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ahop_layers.errors import AHopError, check_floating, describe
from ahop_layers.ops.operators import assert_in_graph
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.separation import Rows, Separation
from ahop_layers.similarity.protocol import Similarity

# Computes keys or values ``(rows, H, d)`` of instances ``(rows, E)``.
Projection = Callable[[Tensor], Tensor]
# Maximal number of elements of the instances in a slice: bounds memory, but keeps the device busy.
SLICE_ELEMENTS = {"cpu": 2**22, "cuda": 2**24}
# If every bag has its own states, a bag is padded to a multiple of this size and scored in blocks of it.
BLOCK = 16
# On a CPU, segment_reduce is faster than index_add for rows of up to this length, and slower for longer ones.
SHORT_ROW = 16


class _Spread(torch.autograd.Function):
    """Repeats the row of a bag for its instances. Unlike that of indexing, the gradient is deterministic on a GPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bags: "Bags") -> Tensor:
        ctx.bags = bags
        return rows.index_select(0, bags.bag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.bags.sum(grad), None


class Bags(Rows):
    """Reductions and scores within packed bags of given ``sizes``, on the device of their instances.

    If the ``total`` of the sizes is given, the values of a tensor ``(N,)`` are not read, so that the code compiles.
    """

    def __init__(self, sizes: Sequence[int] | Tensor, device: torch.device, total: int | None = None) -> None:
        self.sizes = torch.as_tensor(sizes, device=device, dtype=torch.long)
        self.total = int(sum(sizes)) if total is None else total
        number = torch.arange(self.sizes.shape[0], device=device)
        self.bag = number.repeat_interleave(self.sizes, output_size=self.total)
        if isinstance(sizes, Tensor):
            self._blocks = self.total // BLOCK + sizes.shape[0]  # an upper bound
        else:
            self._blocks = sum(-(-size // BLOCK) for size in sizes)

    def sum(self, rows: Tensor) -> Tensor:
        """Sums the rows of each bag: ``(total, ...) -> (N, ...)``."""
        short = rows.is_cpu and rows.shape[1:].numel() <= SHORT_ROW and not rows.requires_grad
        if rows.is_cuda or short:  # on a GPU, index_add is not deterministic
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

    def score(self, state: Tensor, key: Tensor, score: Similarity) -> Tensor:
        """Scores states ``(1 or N, H, Q, d)`` against the keys of their bags, ``(total, H, d)``: ``(total, H, Q)``."""
        if state.shape[0] == 1 or not self.total:
            return score_shared(state[:1], key, score)
        count = (self.sizes + BLOCK - 1) // BLOCK
        # Position of a bag among the padded bags, minus its position among the bags.
        shift = BLOCK * (count.cumsum(0) - count) - (self.sizes.cumsum(0) - self.sizes)
        count[-1] += self._blocks - count.sum()  # an upper bound leaves blocks without instances
        blocks = Bags(count, key.device, self._blocks)
        start = BLOCK * torch.arange(self._blocks, device=key.device) - shift[blocks.bag]
        members = (start[:, None] + torch.arange(BLOCK, device=key.device)).clamp(max=self.total - 1)
        keys = rearrange(key.index_select(0, members.flatten()), "(n b) h d -> n h b d", b=BLOCK)
        scores = rearrange(score(blocks.spread(state), keys), "n h q b -> (n b) h q")
        return scores.index_select(0, torch.arange(self.total, device=key.device) + shift[self.bag])


def score_shared(state: Tensor, key: Tensor, score: Similarity) -> Tensor:
    """Scores a state ``(1, H, Q, d)`` that all bags share against keys ``(total, H, d)``: ``(total, H, Q)``."""
    return rearrange(score(state, rearrange(key, "t h d -> 1 h t d")), "1 h q t -> t h q")


class Packed:
    """The keys and values of packed bags; weights are ``(total, H, Q)``.

    It implements :class:`~ahop_layers.association.Stored`. Keys and values are computed in slices to bound memory. In
    training they are recomputed for their gradients. A bag may span several slices.

    Args:
        instances: ``(total, E)``.
        sizes: number of instances of each bag: a list, or for compilation a tensor ``(N,)``, which has a single slice.
        key, value: projections of instances.
        zero_association: append a key and a value of zeros to each bag. Weights are then ``(total + N, H, Q)``.
        keep_keys: compute all keys once and keep them, as update steps require.
    """

    def __init__(
        self,
        instances: Tensor,
        sizes: list[int] | Tensor,
        key: Projection,
        value: Projection,
        *,
        zero_association: bool = False,
        keep_keys: bool = False,
    ) -> None:
        total, device = instances.shape[0], instances.device
        self.bags = self.extended = Bags(sizes, device, total)
        self.project_key, self.project_value = key, value
        self.keys = key(instances) if keep_keys else None
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

    def score(self, state: Tensor, score: Similarity) -> Tensor:
        """Scores the states ``(1 or N, H, Q, d)`` against the keys of their bags."""

        def of_slice(state: Tensor, part: Tensor) -> Tensor:
            return score_shared(state, self.project_key(part), score)

        if self.keys is None:
            scores = torch.cat([self._compute(of_slice, state, part) for part in self.parts])
        else:
            scores = self.bags.score(state, self.keys, score)
        if self.places is None:
            return scores
        zero = score(state, torch.zeros_like(state[:1, :, :1])).squeeze(-1)
        return self.extended.spread(zero.expand(self.bags.sizes.shape[0], -1, -1)).index_copy(0, self.places, scores)

    def separate(self, scores: Tensor, separation: Separation) -> Tensor:
        """Turns the scores of each bag into weights."""
        return separation(scores, groups=self.extended)

    def next_state(self, weights: Tensor) -> Tensor:
        """Sums the weighted keys of each bag: ``(N, H, Q, d)``."""
        if self.keys is None:
            raise AHopError("update steps need keep_keys=True, got False")
        return self.bags.read(self.of_instances(weights), self.keys)

    def read(self, weights: Tensor) -> Tensor:
        """Sums the weighted values of each bag: ``(N, H, Q, e)``."""

        def of_slice(weights: Tensor, part: Tensor, pieces: list[int]) -> Tensor:
            bags = self.bags if len(self.slices) == 1 else Bags(pieces, part.device)
            return bags.read(weights, self.project_value(part))

        each = zip(self.of_instances(weights).split_with_sizes(self.lengths), self.parts, self.slices, strict=True)
        read = torch.cat([self._compute(of_slice, *given) for given in each])
        return read if max(self.pieces, default=1) == 1 else Bags(self.pieces, read.device).sum(read)

    def change(self, weights: Tensor, before: Tensor) -> Tensor:
        """Computes the norm of the difference of two sets of weights: ``(N, H)``."""
        return self.extended.sum((weights - before).square().sum(-1)).sqrt()

    def of_instances(self, weights: Tensor) -> Tensor:
        """Returns the weights ``(total, H, Q)`` without those of the zero association."""
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
        raise AHopError(f"instances must be (total, input_size), those of all bags concatenated, got {got}")
    if torch.compiler.is_compiling() and isinstance(bag_sizes, (Tensor, list, tuple)):
        bag_sizes = torch.as_tensor(bag_sizes)
        if bag_sizes.ndim != 1 or bag_sizes.is_floating_point() or bag_sizes.dtype == torch.bool:
            raise AHopError(f"bag_sizes must be (N,) of integers, got {describe(bag_sizes)} of {bag_sizes.dtype}")
        fits = (bag_sizes.sum() == instances.shape[0]) & (bag_sizes >= 0).all()
        assert_in_graph(fits, "bag_sizes must be integers >= 0 that add up to the number of instances")
        return instances, bag_sizes
    sizes = bag_sizes.tolist() if hasattr(bag_sizes, "tolist") else bag_sizes
    sizes = sizes if isinstance(sizes, Sequence) else [None]
    sizes = [size.tolist() if hasattr(size, "tolist") else size for size in sizes]
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes):
        raise AHopError(f"bag_sizes must be a sequence of integers >= 0, got {bag_sizes!r}")
    if sum(sizes) != len(instances):
        raise AHopError(f"bag_sizes must add up to the number of instances, {len(instances)}, got {sum(sizes)}")
    return instances, sizes

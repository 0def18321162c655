"""Bags: sums, scores and separations within bags of instances that lie end to end."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ahop_layers.association import Score
from ahop_layers.errors import AHopError, check_floating, describe
from ahop_layers.ops.reference import accumulation_dtype
from ahop_layers.separation import Separation

Rows = Callable[[Tensor], Tensor]


class _Spread(torch.autograd.Function):
    """Rows of bags to rows of instances; the gradient sums in a fixed order, unlike that of indexing on a GPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bags: "Bags") -> Tensor:
        ctx.bags = bags
        return rows.index_select(0, bags.bag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.bags.sum(grad), None


class Bags:
    """Sums, separations and scores within bags of instances that lie end to end.

    Args:
        sizes: instances per bag.
        device: where the instances are.
    """

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self.total = sum(sizes)
        self.sizes = torch.tensor(sizes, device=device, dtype=torch.long)
        count = torch.arange(len(sizes), device=device)
        self.bag = count.repeat_interleave(self.sizes, output_size=self.total)
        self._sizes = sizes

    def sum(self, rows: Tensor) -> Tensor:
        """Sum the rows of each bag: ``(total, ...) -> (N, ...)``."""
        if rows.is_cuda:  # where index_add adds in any order
            return torch.segment_reduce(rows.contiguous(), "sum", lengths=self.sizes, unsafe=True, initial=0.0)
        return rows.new_zeros(len(self.sizes), *rows.shape[1:]).index_add(0, self.bag, rows)

    def spread(self, rows: Tensor) -> Tensor:
        """Give every instance the row of its bag: ``(N, ...) -> (total, ...)``."""
        spread: Tensor = _Spread.apply(rows, self)  # type: ignore[no-untyped-call]
        return spread

    def read(self, weights: Tensor, values: Tensor) -> Tensor:
        """Read values ``(total, H, e)`` by weights ``(total, H, Q)``: ``(N, H, Q, e)``."""
        columns = weights.to(accumulation_dtype(values.dtype)).unbind(-1)  # one query at a time: no (total, H, Q, e)
        return torch.stack([self.sum(column[..., None] * values) for column in columns], 2).to(values.dtype)

    def change(self, weights: Tensor, before: Tensor) -> Tensor:
        """The norm of the difference of two sets of weights: ``(N, H)``."""
        return self.sum((weights - before).square().sum(-1)).sqrt()

    def score(self, state: Tensor, key: Tensor, score: Score) -> Tensor:
        """Score states ``(1 or N, H, Q, d)`` against the keys of their bags, ``(total, H, d)``: ``(total, H, Q)``."""
        if len(state) == 1 and self.total:
            return score_shared(state, key, score)

        def of_bags(bags: Tensor, index: Tensor, valid: Tensor) -> Tensor:
            return score(state[bags], rearrange(key[index], "b s h d -> b h s d"))

        return self._by_width(of_bags, key.new_zeros(0, key.shape[1], state.shape[2]))

    def separate(self, scores: Tensor, separation: Separation) -> Tensor:
        """Separate the scores ``(total, H, Q)`` of each bag."""
        if separation.name == "softmax":
            wide = scores.to(accumulation_dtype(scores.dtype))
            index = self.bag[:, None, None].expand_as(wide)
            lowest = wide.new_full((len(self.sizes), *wide.shape[1:]), -torch.inf)
            largest = lowest.scatter_reduce(0, index, wide.detach(), "amax")
            powers = (wide - largest.index_select(0, self.bag)).exp()
            return (powers / self.spread(self.sum(powers))).to(scores.dtype)

        def of_bags(bags: Tensor, index: Tensor, valid: Tensor) -> Tensor:
            padded = rearrange(scores[index], "b s h q -> b h q s")
            # Past the hooks, which expect the weights of all bags.
            weights = separation.forward(padded.masked_fill(~valid[:, None, None], -torch.inf))
            return weights

        return self._by_width(of_bags, scores[:0])

    def _by_width(self, of_bags: Callable[[Tensor, Tensor, Tensor], Tensor], nothing: Tensor) -> Tensor:
        """Work on bags of similar size together, padded to a power of two: at most twice as much as no padding."""
        widths: dict[int, list[int]] = {}
        for bag, size in enumerate(self._sizes):
            if size:
                widths.setdefault(1 << (size - 1).bit_length(), []).append(bag)
        starts = self.sizes.cumsum(0) - self.sizes
        parts, order = [nothing], [self.bag[:0]]
        for width, members in widths.items():
            bags, column = torch.tensor(members, device=starts.device), torch.arange(width, device=starts.device)
            valid = column < self.sizes[bags, None]
            index = (starts[bags, None] + column).clamp(max=self.total - 1)
            parts.append(rearrange(of_bags(bags, index, valid), "b h q s -> b s h q")[valid])
            order.append(index[valid])
        return torch.cat(parts).index_select(0, torch.cat(order).argsort())


def score_shared(state: Tensor, key: Tensor, score: Score) -> Tensor:
    """Score a state ``(1, H, Q, d)`` that all bags share against keys ``(total, H, d)``: ``(total, H, Q)``."""
    return rearrange(score(state, rearrange(key, "t h d -> 1 h t d")), "1 h q t -> t h q")


class Slices:
    """Instances of bags that lie end to end, worked on in slices, so that what is computed from them stays small.

    In training each slice is computed again for its gradients. A bag may be spread over several slices.

    Args:
        instances: ``(total, E)``.
        sizes: instances per bag.
        limit: how many instances make a slice at most.
    """

    def __init__(self, instances: Tensor, sizes: list[int], limit: int) -> None:
        self.slices, self.pieces = cut(sizes, limit)
        self.lengths = [sum(pieces) for pieces in self.slices]
        self.parts = instances.split_with_sizes(self.lengths)
        self.again = len(self.slices) > 1 and torch.is_grad_enabled()

    def _compute(self, function: Callable[..., Tensor], *given: Any) -> Tensor:
        if not self.again:
            return function(*given)
        from torch.utils.checkpoint import checkpoint  # only now: in torch 2.6 it takes half a second, for sympy

        result: Tensor = checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)
        return result

    def score(self, state: Tensor, key: Rows, score: Score) -> Tensor:
        """Score a state ``(1, H, Q, d)`` against the keys that ``key`` makes of instances: ``(total, H, Q)``."""

        def scores(state: Tensor, part: Tensor) -> Tensor:
            return score_shared(state, key(part), score)

        return torch.cat([self._compute(scores, state, part) for part in self.parts])

    def read(self, weights: Tensor, value: Rows) -> Tensor:
        """Read the values that ``value`` makes of instances by weights ``(total, H, Q)``: ``(N, H, Q, e)``."""

        def readout(weights: Tensor, part: Tensor, pieces: list[int]) -> Tensor:
            return Bags(pieces, part.device).read(weights, value(part))

        each = zip(weights.split_with_sizes(self.lengths), self.parts, self.slices, strict=True)
        read = torch.cat([self._compute(readout, *given) for given in each])
        return read if max(self.pieces, default=1) == 1 else Bags(self.pieces, read.device).sum(read)


def cut(sizes: list[int], limit: int) -> tuple[list[list[int]], list[int]]:
    """Cut bags that lie end to end into slices of at most ``limit`` instances.

    Returns:
        For each slice the sizes of its pieces, each of one bag, and for each bag the number of its pieces.

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


def end_to_end(instances: Tensor, bag_sizes: Sequence[int] | Tensor | None) -> tuple[Tensor, list[int]]:
    """Instances ``(total, E)`` and the sizes of their bags, checked."""
    check_floating(instances=instances)
    if instances.is_nested:
        if bag_sizes is not None:
            raise AHopError("a nested tensor knows its bag sizes, got bag_sizes as well")
        bags = instances.unbind()
        return torch.cat(bags), [len(bag) for bag in bags]
    if instances.ndim != 2:
        raise AHopError(f"instances must be (total, input_size) or nested, got {describe(instances)}")
    sizes = bag_sizes.tolist() if isinstance(bag_sizes, Tensor) else bag_sizes
    whole = isinstance(sizes, Sequence) and all(isinstance(size, int) and size >= 0 for size in sizes)
    if sizes is None or not whole:
        raise AHopError(f"bag_sizes must be whole numbers of at least 0, got {bag_sizes!r}")
    if sum(sizes) != len(instances):
        raise AHopError(f"bag_sizes must add up to the {len(instances)} instances, got {sum(sizes)}")
    return instances, list(sizes)

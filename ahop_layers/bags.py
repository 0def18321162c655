"""Bags: sums, scores and separations within bags of instances that lie end to end."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ahop_layers.association import Score
from ahop_layers.errors import AHopError, check_floating, describe
from ahop_layers.ops.chunked import accumulator
from ahop_layers.separation import Separation


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

    def read(self, weights: Tensor, values: Tensor) -> Tensor:
        """Read values ``(total, H, e)`` by weights ``(total, H, Q)``: ``(N, H, Q, e)``."""
        columns = weights.to(accumulator(values.dtype)).unbind(-1)  # one query at a time: no (total, H, Q, e)
        return torch.stack([self.sum(column[..., None] * values) for column in columns], 2).to(values.dtype)

    def change(self, weights: Tensor, before: Tensor) -> Tensor:
        """The norm of the difference of two sets of weights: ``(N, H)``."""
        return self.sum((weights - before).square().sum(-1)).sqrt()

    def score(self, state: Tensor, key: Tensor, score: Score) -> Tensor:
        """Score states ``(1 or N, H, Q, d)`` against the keys of their bags, ``(total, H, d)``: ``(total, H, Q)``."""
        if len(state) == 1 and self.total:
            return rearrange(score(state, rearrange(key, "t h d -> 1 h t d")), "1 h q t -> t h q")

        def of_bags(bags: Tensor, index: Tensor, valid: Tensor) -> Tensor:
            return score(state[bags], rearrange(key[index], "b s h d -> b h s d"))

        return self._by_width(of_bags, key.new_zeros(0, key.shape[1], state.shape[2]))

    def separate(self, scores: Tensor, separation: Separation) -> Tensor:
        """Separate the scores ``(total, H, Q)`` of each bag."""
        if separation.name == "softmax":
            wide = scores.to(accumulator(scores.dtype))
            index = self.bag[:, None, None].expand_as(wide)
            lowest = wide.new_full((len(self.sizes), *wide.shape[1:]), -torch.inf)
            largest = lowest.scatter_reduce(0, index, wide.detach(), "amax")
            powers = (wide - largest.index_select(0, self.bag)).exp()
            sums: Tensor = _Spread.apply(self.sum(powers), self)  # type: ignore[no-untyped-call]
            return (powers / sums).to(scores.dtype)

        def of_bags(bags: Tensor, index: Tensor, valid: Tensor) -> Tensor:
            padded = rearrange(scores[index], "b s h q -> b h q s")
            weights: Tensor = separation(padded.masked_fill(~valid[:, None, None], -torch.inf))
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

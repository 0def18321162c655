"""Shards: each rank of a process group keeps a part of the patterns of a memory.

All communication is a differentiable gather. Its gradient is the sum over the losses of all ranks, so the mean of the
parameter gradients over the ranks, as DistributedDataParallel computes it, is the gradient of the mean loss.
"""

import zlib
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from ahop_layers.errors import AHopError, describe
from ahop_layers.memory.arrays import merge
from ahop_layers.ops.reference import accumulation_dtype


class Whole:
    """All ``count`` patterns of a memory on one rank, which is alone and communicates nothing."""

    alone, rank, ranks, start = True, 0, 1, 0

    def __init__(self, count: int) -> None:
        self.count = self.stop = count
        self.sizes = [count]

    def gather(self, tensor: Tensor) -> Tensor:
        """Stacks the tensors of all ranks, of equal shape and dtype: ``(...) -> (ranks, ...)``. Differentiable."""
        return tensor[None]

    def total(self, tensor: Tensor) -> Tensor:
        """Sums the tensors of all ranks, in the order of the ranks."""
        return tensor if self.alone else self.gather(tensor).sum(0)

    def pick(self, rows: Tensor, index: Tensor) -> Tensor:
        """Returns the rows ``index (n,)`` of all ranks, of which this rank has ``rows``."""
        if self.alone:
            return rows[index]
        column = index - self.start
        own = (column >= 0) & (column < len(rows))
        found = rows.new_zeros(len(index), *rows.shape[1:])
        found[own] = rows[column[own]]
        return self.total(found)

    def columns(self, tensor: Tensor, most: int | None = None) -> Tensor:
        """Concatenates columns of all ranks, ``(L, stop - start)`` here; of each rank at most ``most`` columns."""
        if self.alone:
            return tensor
        widths = self.sizes if most is None else [min(most, size) for size in self.sizes]
        gathered = self.gather(functional.pad(tensor, (0, max(widths) - tensor.shape[-1])))
        return torch.cat([part[..., :width] for part, width in zip(gathered, widths, strict=True)], -1)

    def best(self, scores: Tensor, indices: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Returns the ``k`` largest scores and their indices, out of those of the patterns of each rank ``(L, K)``."""
        if self.alone:
            return scores, indices
        return merge([(self.columns(scores, k), self.columns(indices + self.start, k))], k)

    def queries(self, rows: Tensor, error: AHopError | None = None) -> tuple[Tensor, slice]:
        """Returns the queries of all ranks and the place of those of this rank, ``rows (L, d)``.

        Every rank scores the queries of all ranks against its patterns, in the widest of their dtypes. Queries that are
        equal on all ranks and need no gradient are scored once. Raises on all ranks if one has an ``error``: the others
        would wait for it.
        """
        failed = []
        if not self.alone:
            differentiable = rows.requires_grad and torch.is_grad_enabled()
            header = [len(rows), differentiable, error is not None, rows.itemsize]
            lengths, needed, failed, sizes = self.gather(torch.tensor(header, device=rows.device)).T.tolist()
            if rows.itemsize < max(sizes):
                rows = rows.to(torch.float64 if max(sizes) == 8 else torch.float32)
        if error is not None:
            raise error
        if any(failed):
            raise AHopError(f"queries x must be valid on all ranks, got an error on rank {failed.index(1)}")
        if self.alone:
            return rows, slice(None)
        padded = self.gather(functional.pad(rows, (0, 0, 0, max(lengths) - len(rows))))
        if not any(needed) and len(set(lengths)) == 1 and bool((padded == padded[0]).all()):
            return rows, slice(None)
        first = sum(lengths[: self.rank])
        joined = torch.cat([part[:length] for part, length in zip(padded, lengths, strict=True)])
        return joined, slice(first, first + len(rows))

    def cross_entropy(self, logits: Tensor, index: Tensor) -> Tensor:
        """Computes the mean cross entropy of the logits of all ranks, ``(L, stop - start)`` here, of ``index (L,)``."""
        if self.alone:
            return functional.cross_entropy(logits, index)
        wide = logits.to(accumulation_dtype(logits.dtype))
        column = index - self.start
        own = (column >= 0) & (column < wide.shape[-1])
        picked = wide.gather(-1, column.clamp(0, wide.shape[-1] - 1)[:, None])[:, 0]
        sums, targets = self.gather(torch.stack([wide.logsumexp(-1), torch.where(own, picked, 0.0)])).unbind(1)
        return (sums.logsumexp(0) - targets.sum(0)).mean()

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replaces the gradient of each parameter by its mean over the ranks."""
        for parameter in parameters:
            if parameter.grad is not None and not self.alone:
                parameter.grad.copy_(self.total(parameter.grad) / self.ranks)

    def agree(self, call: str, device: torch.device) -> None:
        """Raises on all ranks unless each of them makes the same call, before any of them waits for the others."""
        if not self.alone:
            digest = torch.tensor(zlib.crc32(call.encode()), device=device)
            if not bool((self.gather(digest) == digest).all()):
                raise AHopError(f"all ranks of a sharded memory must make the same call, got {call} on this one")

    def check_shapes(self, name: str, tensor: Tensor) -> None:
        """Raises unless a tensor has the same shape and dtype on all ranks."""
        code = sum(map(ord, str(tensor.dtype)))
        header = torch.tensor([tensor.ndim, code, *[*tensor.shape, 0, 0, 0][:3]], device=tensor.device)
        if not bool((self.gather(header) == header).all()):
            raise AHopError(f"{name} must have the same shape and dtype on all ranks, got {describe(tensor)} on this")

    @torch.no_grad()
    def check_equal(self, name: str, tensor: Tensor) -> None:
        """Raises unless a tensor has the same shape, and probably the same values, on all ranks."""
        if self.alone:
            return
        self.check_shapes(name, tensor)
        values = tensor.double().nan_to_num(0.5).flatten()
        mean = values.abs().mean() if len(values) else values.sum()
        ramp = torch.linspace(1, 2, len(values), dtype=values.dtype, device=values.device)
        sums = self.gather(torch.stack([mean, (values * ramp).sum()]))
        if not bool((sums == sums[0]).all()):
            raise AHopError(f"{name} must be equal on all ranks of a sharded memory, got different values")


class Shard(Whole):
    """The part ``start:stop`` of ``count`` patterns that this rank of a group keeps, on a device that it supports."""

    alone = False

    def __init__(self, group: Any, count: int, device: torch.device) -> None:
        if not distributed.is_available() or not distributed.is_initialized():
            raise AHopError("shard_ needs torch.distributed: call torch.distributed.init_process_group first, got none")
        self.group, self.count = group, count
        self.rank, self.ranks = distributed.get_rank(group), distributed.get_world_size(group)
        if self.rank < 0:
            raise AHopError("group must contain this process, got a group of other processes")
        members: Any = distributed.group.WORLD if group is None else group
        try:
            members._get_backend(device)
        except RuntimeError as error:
            backend = distributed.get_backend(group)
            raise AHopError(f"group must support tensors on {device.type}, got {backend}: {error}") from error
        if count < self.ranks:
            raise AHopError(f"the memory must have a pattern for each of {self.ranks} ranks, got {count} patterns")
        bounds = [count * rank // self.ranks for rank in range(self.ranks + 1)]
        self.start, self.stop = bounds[self.rank : self.rank + 2]
        self.sizes = [stop - start for start, stop in pairwise(bounds)]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shard":
        return self

    def __reduce__(self) -> NoReturn:
        raise AHopError("a sharded memory cannot be pickled: save its state dict")

    def gather(self, tensor: Tensor) -> Tensor:
        """Stacks the tensors of all ranks, of equal shape and dtype: ``(...) -> (ranks, ...)``. Differentiable."""
        gathered: Tensor = _Gather.apply(tensor, self)  # type: ignore[no-untyped-call]
        return gathered

    @torch.no_grad()
    def copy_from_first_rank(self, module: nn.Module) -> None:
        """Makes all parameters and buffers of a module equal to those of the first rank of the group."""
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(self.gather(tensor)[0])


class _Gather(torch.autograd.Function):
    """Stacks a tensor of each rank; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shard: Shard) -> Tensor:
        """Gathers ``(...) -> (ranks, ...)``."""
        ctx.shard = shard
        flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)  # gloo does not support all dtypes
        if not len(flat):
            return tensor.new_empty(shard.ranks, *tensor.shape)
        parts = [torch.empty_like(flat) for _ in range(shard.ranks)]
        distributed.all_gather(parts, flat, group=shard.group)
        return torch.stack(parts).view(tensor.dtype).reshape(shard.ranks, *tensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Sums the gradients ``(ranks, ...)`` of all ranks, and returns the part of this rank."""
        total = grad.to(accumulation_dtype(grad.dtype), copy=True, memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=ctx.shard.group)
        return total[ctx.shard.rank].to(grad.dtype), None

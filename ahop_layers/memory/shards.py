"""Shards: each rank of a process group keeps a part of the patterns, and searches are merged over the ranks."""

import zlib
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed
from torch.nn import functional

from ahop_layers.errors import AHopError, describe
from ahop_layers.memory.arrays import merge


class Shards:
    """The part ``start:stop`` of ``count`` patterns that this rank of a process group keeps.

    Args:
        group: a process group that supports ``device``; None means all processes.
        count: the number of patterns of all ranks.
    """

    def __init__(self, group: Any, count: int, device: torch.device) -> None:
        if not distributed.is_available() or not distributed.is_initialized():
            raise AHopError("shard_ needs torch.distributed: call torch.distributed.init_process_group first, got none")
        self.group, self.count, self.device = group, count, device
        self.rank, self.ranks = distributed.get_rank(group), distributed.get_world_size(group)
        if self.rank < 0:
            raise AHopError("group must contain this process, got a group of other processes")
        if count < self.ranks:
            raise AHopError(f"the memory must have a pattern for each of {self.ranks} ranks, got {count} patterns")
        bounds = [count * rank // self.ranks for rank in range(self.ranks + 1)]
        self.start, self.stop = bounds[self.rank : self.rank + 2]
        self.sizes = [stop - start for start, stop in pairwise(bounds)]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shards":
        return self

    def __reduce__(self) -> NoReturn:
        raise AHopError("a sharded memory cannot be pickled or saved: save it before shard_")

    def gather(self, tensor: Tensor) -> Tensor:
        """Stacks the tensors of all ranks, of equal shape and dtype: ``(...) -> (ranks, ...)``."""
        flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)  # gloo does not support all dtypes
        parts = [torch.empty_like(flat) for _ in range(self.ranks)]
        if len(flat):
            distributed.all_gather(parts, flat, group=self.group)
        return torch.stack(parts).view(tensor.dtype).reshape(self.ranks, *tensor.shape)

    def agree(self, call: str, rows: Tensor | None = None) -> None:
        """Raises on all ranks unless each of them makes the same call with the same ``rows``, before anyone waits."""
        digest = zlib.crc32(call.encode())
        if rows is not None:
            digest = zlib.crc32(rows.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(), digest)
        own = torch.tensor(digest, device=self.device)
        if not bool((self.gather(own) == own).all()):
            raise AHopError(f"all ranks of a sharded memory must make the same call with equal values, got {call} here")

    def columns(self, tensor: Tensor, most: int | None = None) -> Tensor:
        """Concatenates columns ``(L, n)`` of all ranks, one for each pattern; of each rank at most ``most``."""
        widths = self.sizes if most is None else [min(most, size) for size in self.sizes]
        gathered = self.gather(functional.pad(tensor, (0, max(widths) - tensor.shape[-1])))
        return torch.cat([part[..., :width] for part, width in zip(gathered, widths, strict=True)], -1)

    def best(self, scores: Tensor, indices: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Returns the ``k`` largest scores of all ranks and their indices, out of the best of each rank ``(L, K)``."""
        return merge([(self.columns(scores, k), self.columns(indices + self.start, k))], k)

    @torch.no_grad()
    def take(self, patterns: Tensor, others: str) -> Tensor:
        """Returns a copy of this rank's part of ``patterns (N, d)``.

        Raises on all ranks unless patterns have the same shape, and evenly spaced ones the same values. ``others``
        describes what else must be equal.
        """
        self.agree(f"shard_ of {describe(patterns)}")
        self.agree(f"shard_ with {others}", patterns[:: max(1, patterns.numel() // 2**21)])
        return patterns[self.start : self.stop].clone()

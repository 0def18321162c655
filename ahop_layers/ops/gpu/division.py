"""How the work of a call is divided among launches and programs."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from ahop_layers.ops.chunked import SCRATCH_BYTES

PROGRAMS_PER_SLOT = 8
"""Maximum number of programs in a backward launch per concurrently running warp."""


@lru_cache(maxsize=None)
def slots(device: torch.device) -> int:
    """Returns the number of concurrent warps: eight per multiprocessor, the limit set by the kernels' registers."""
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def rows_per_program(length: int, warps: int, device: torch.device, unit: int = 1, most_chunks: int = 65535) -> int:
    """Returns the number of queries per program, a multiple of ``unit``, those that the kernel processes at a time."""
    units = -(-length // unit)
    # Loading the keys takes about as long as half a query, or as two tiles of queries.
    start, waves = (0.5, 6) if unit == 1 else (2, 1)
    return unit * max(_even_split(units, warps, slots(device), start, waves), -(-units // min(65535, most_chunks)))


@lru_cache(maxsize=4096)
def _even_split(length: int, warps: int, slots: int, start: float, least_waves: int) -> int:
    """Returns the number of queries per program that fills the last wave well and rarely reloads keys.

    ``start`` is the time to load the keys, in queries. Several waves balance programs of different duration.
    """

    def time(rows: int) -> float:
        waves = -(-(warps * -(-length // rows)) // slots)
        return waves * (rows + start)

    most = length * warps // (least_waves * slots)
    return min(range(1, max(1, min(length, most)) + 1), key=time)


def launches(query: Tensor, key: Tensor, keys: int) -> Iterator[tuple[slice, slice]]:
    """Yields slices over N and L, as large as the partial sums of the query gradient allow, for tiles of ``keys``."""
    n, heads, length, d = query.shape
    room = max(1, SCRATCH_BYTES // (4 * d * heads * -(-key.shape[-2] // keys)))
    step = min(length, room)
    outer = max(1, min(n, room // step))
    return product(*([slice(i, i + by) for i in range(0, size, by)] for size, by in ((n, outer), (length, step))))


class BackwardDivision:
    """Programs of a backward launch: strips of tiles of keys, and chunks of queries."""

    def __init__(self, query: Tensor, key: Tensor, keys: int, warps: int) -> None:
        (n, heads, length, d), count = query.shape, key.shape[-2]
        self.tiles = -(-count // keys)
        # Enough programs to fill the GPU several times. Beyond that, a program processes several tiles and writes
        # fewer partial sums.
        self.span = max(1, n * heads * self.tiles // (PROGRAMS_PER_SLOT * slots(query.device)))
        self.strips = -(-self.tiles // self.span)
        self.programs = n * heads * self.strips
        most_chunks = max(1, SCRATCH_BYTES // (4 * key.shape[:-1].numel() * d))
        self.rows = rows_per_program(length, self.programs * warps, query.device, 1, most_chunks)
        self.chunks = -(-length // self.rows)

    def partial_sums(self, query: Tensor, key: Tensor, weight: Tensor, warps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns memory for partial sums.

        Query: ``(strips, N, H, L, d)``; key: ``(chunks, N, H, S, d)``;
        weight: ``(strips, chunks, N, H, warps, n_bases, n)``.
        """
        of_weights = self.strips, self.chunks, *query.shape[:2], warps, *weight.shape[1:]
        shapes = (self.strips, *query.shape), (self.chunks, *key.shape), of_weights
        first, second, third = (torch.empty(shape, device=query.device) for shape in shapes)
        return first, second, third


def aligned(tensor: Tensor, alignment: int) -> Tensor:
    """Returns the tensor with rows of adjacent numbers at aligned addresses. Copies only if necessary."""
    places = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1])]
    fits = tensor.stride(-1) == 1 and all(place % alignment == 0 for place in places)
    # clone() instead of contiguous(), which returns a contiguous tensor as it is, even if it is not aligned.
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)

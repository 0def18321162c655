"""How the work of a call is divided among programs."""

from functools import lru_cache
from itertools import product

import torch

from ahop_layers.ops.chunked import SCRATCH_BYTES

START = 0.5  # the time to load the keys of a program, in queries
TAIL = 0.7  # the time in which the last programs end, in programs
LEAST_WAVES = 3  # of programs that fill the GPU evenly, so that the last ones end at the same time
SCRATCH_COST = 0.04  # of each SCRATCH_BYTES of parts, as a fraction of the time of all work
MOST_PARTS = 512  # of a gradient, which a thread adds up


@lru_cache(maxsize=None)
def slots(device: torch.device) -> int:
    """Returns the number of concurrent warps: eight per multiprocessor, the limit set by the kernels' registers."""
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@lru_cache(maxsize=4096)
def even_split(length: int, warps: int, slots: int, least_waves: int = 1) -> int:
    """Returns the number of queries, or rounds of them, per program that fills the last wave and rarely reloads keys.

    Several waves balance programs of different duration.
    """

    def time(rows: int) -> float:
        waves = -(-(warps * -(-length // rows)) // slots)
        return waves * (rows + START)

    most = length * warps // (least_waves * slots)
    return min(range(1, max(1, min(length, most)) + 1), key=time)


@lru_cache(maxsize=4096)
def divide(tiles: int, length: int, warps: int, slots: int, strip_bytes: int, chunk_bytes: int) -> tuple[int, int]:
    """Returns the numbers of tiles of keys and of queries that a program of a backward pass processes.

    More strips of tiles and chunks of queries fill the GPU better, but each has a part of the gradients, of
    ``strip_bytes`` or ``chunk_bytes``. ``warps`` is the number of those that have the same tile and queries.
    """

    def cost(division: tuple[int, int]) -> float:
        span, rows = division
        strips, chunks = -(-tiles // span), -(-length // rows)
        program, all_work = span * (rows + START), tiles * (length + chunks * START) * warps / slots
        time, waves = all_work + TAIL * program, -(-strips * chunks * warps // slots)
        if waves >= LEAST_WAVES:
            time = min(time, waves * program)
        parts = strips * strip_bytes + chunks * chunk_bytes
        return max(program, time) / (tiles * length * warps / slots) + SCRATCH_COST * parts / SCRATCH_BYTES

    return min(product(_sizes(tiles), _sizes(length)), key=cost)


def _sizes(total: int) -> set[int]:
    """Returns the sizes of equal parts that cover ``total``."""
    return {-(-total // parts) for parts in range(1, min(total, MOST_PARTS) + 1)}

"""How the work of a call is divided among programs."""

from functools import lru_cache

import torch

PROGRAMS_PER_SLOT = 8
"""Maximum number of programs of a backward pass per concurrently running warp."""


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

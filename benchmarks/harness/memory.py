"""Time and peak memory.

Memory is that of PyTorch's allocator on a GPU, and of the resident set of the process on a CPU (Linux only).
"""

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

CLEAR = Path("/proc/self/clear_refs")
Result = TypeVar("Result")


def clock(device: str | torch.device) -> float:
    """Returns the time in seconds after all work on the device."""
    if str(device).startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def least_seconds(call: Callable[[], object], device: str | torch.device, repeats: int) -> float:
    """Returns the shortest time of several calls."""
    times = []
    for _ in range(repeats):
        start = clock(device)
        call()
        times.append(clock(device) - start)
    return min(times)


def reset_peak(device: str) -> int:
    """Resets the peak and returns the memory in use, in bytes."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    CLEAR.write_text("5")
    return peak(device)


def peak(device: str) -> int:
    """Returns the peak memory since the last reset, in bytes. Synchronizes a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def in_own_process(function: Callable[..., Result], *arguments: object) -> Result:
    """Calls the function in a new process, whose memory no earlier measurement has used."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)

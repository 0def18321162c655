"""Peak memory: of PyTorch's allocator on a GPU, of the resident set of the process on a CPU (Linux only)."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

CLEAR = Path("/proc/self/clear_refs")
Result = TypeVar("Result")


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

"""Peak memory of a piece of work, on a GPU by PyTorch's allocator, on a CPU by the resident memory (Linux only)."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

CLEAR = Path("/proc/self/clear_refs")
Result = TypeVar("Result")


def reset_peak(device: str) -> int:
    """Forget the peak so far and return what is held now, in bytes."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    CLEAR.write_text("5")
    return peak(device)


def peak(device: str) -> int:
    """The most memory held since the last reset, in bytes."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def in_own_process(function: Callable[..., Result], *job: object) -> Result:
    """Call the function where no earlier measurement has touched the memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, job)

"""Independent parts of a fit, each in a thread of its own.

An operation that PyTorch divides among its threads ends when the last of them does. A fit has thousands of operations,
each of which would wait for a thread that another process keeps from running.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")


def in_threads(function: Callable[[Part], Result], parts: Iterable[Part], device: torch.device) -> list[Result]:
    """Applies a function, without gradients, to each of several parts, on a GPU to one after the other.

    There are as many threads as PyTorch has, and the operations in each of them are single-threaded.

    >>> in_threads(lambda part: part.sum().item(), torch.arange(6).split(2), torch.device("cpu"))
    [1, 5, 9]
    """
    listed, wanted = list(parts), torch.get_num_threads()
    count = min(wanted, len(listed))
    if not listed or wanted < 2 or device.type != "cpu":
        return [function(part) for part in listed]
    started = Barrier(count + 1)

    def start() -> None:
        torch.set_num_threads(1)  # of this thread, and of those that start while it is set
        started.wait()

    def run(part: Part) -> Result:
        with torch.no_grad():
            return function(part)

    with ThreadPoolExecutor(count, initializer=start) as pool:
        try:
            futures = [pool.submit(run, part) for part in listed]
            started.wait()
            torch.set_num_threads(wanted)
            return [future.result() for future in futures]
        finally:
            started.abort()
            pool.shutdown(cancel_futures=True)

"""Parallel measurements that stop after a time and resume."""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar

import torch

Job = TypeVar("Job")
Figures = dict[str, float]


class Pool:
    """Processes with one thread each, or this one without an executor, and the time after which nothing starts."""

    def __init__(self, executor: ProcessPoolExecutor | None, minutes: float) -> None:
        self.executor, self.minutes = executor, minutes
        self.deadline = time.monotonic() + 60 * minutes

    def figures(self, jobs: Sequence[Job], function: Callable[[Job], Figures]) -> Iterator[tuple[Job, Figures]]:
        """Yields the figures of each job as soon as they are complete. Says so if the time is up before all are."""
        left = len(jobs)
        for pair in self._measured(jobs, function):
            left -= 1
            yield pair
        if left:
            print(f"stopped after {self.minutes:g} minutes; the same command resumes here")

    def _measured(self, jobs: Sequence[Job], function: Callable[[Job], Figures]) -> Iterator[tuple[Job, Figures]]:
        if self.executor is None:
            for each in jobs:
                if time.monotonic() > self.deadline:
                    return
                yield each, function(each)
            return
        futures = {self.executor.submit(function, each): each for each in jobs}
        for future in as_completed(futures):
            if not future.cancelled():
                yield futures[future], future.result()
            if time.monotonic() > self.deadline:
                for other in futures:
                    other.cancel()


@contextmanager
def make_pool(options: argparse.Namespace) -> Iterator[Pool]:
    """A pool with the options ``processes`` and ``minutes``. An error cancels what has not started."""
    if options.processes == 1:
        torch.set_num_threads(1)
        yield Pool(None, options.minutes)
        return
    # Processes are spawned: a forked process cannot use CUDA, and inherits the thread pools of the libraries.
    executor = ProcessPoolExecutor(options.processes, get_context("spawn"), torch.set_num_threads, (1,))
    try:
        yield Pool(executor, options.minutes)
    finally:
        executor.shutdown(cancel_futures=True)

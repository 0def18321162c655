"""Parallel measurements that stop after a time and resume."""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, Protocol

import torch

from benchmarks.harness.rows import ResultTable, Row


class Measurement(Protocol):
    """A measurement in a table of results."""

    @property
    def key(self) -> Row:
        """The columns that identify its rows."""

    @property
    def columns(self) -> Row:
        """All columns of its rows but the figures."""


class Pool:
    """Processes with one thread each, or this one without an executor, and the time after which nothing starts."""

    def __init__(self, executor: ProcessPoolExecutor | None, minutes: float) -> None:
        self.executor, self.minutes = executor, minutes
        self.deadline = time.monotonic() + 60 * minutes

    def measure(
        self, wanted: Iterable[Measurement], function: Callable[[Any], dict[str, float]], results: ResultTable
    ) -> bool:
        """Measures what the results do not have yet, and stores each as soon as it is complete.

        Returns:
            Whether all of it was measured before the time was up.
        """
        missing = [each for each in wanted if not results.has(each.key)]
        for done, (each, figures) in enumerate(self._measured(missing, function), 1):
            results.add_figures(each.columns, figures)
            shown = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
            print(f"{done}/{len(missing)}: {', '.join(each.key.values())}: {shown}", flush=True)
        if late := self._is_late():
            print(f"stopped after {self.minutes:g} minutes; the same command resumes here")
        return not late

    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def _measured(
        self, missing: Iterable[Measurement], function: Callable[[Any], dict[str, float]]
    ) -> Iterator[tuple[Measurement, dict[str, float]]]:
        if self.executor is None:
            for each in missing:
                yield each, function(each)
                if self._is_late():
                    return
            return
        futures = {self.executor.submit(function, each): each for each in missing}
        for future in as_completed(futures):
            if not future.cancelled():
                yield futures[future], future.result()
            if self._is_late():
                for other in futures:
                    other.cancel()


@contextmanager
def make_pool(options: argparse.Namespace) -> Iterator[Pool]:
    """A pool with the options of :func:`add_pool_options`. An error cancels what has not started."""
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


def add_pool_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--processes``, ``--minutes`` and ``--report``."""
    add = parser.add_argument
    add("--processes", type=int, default=1, help="parallel processes, each with one thread (default: %(default)s)")
    add("--minutes", type=float, default=float("inf"), help="start nothing new after this time (default: no limit)")
    add("--report", action="store_true", help="only print the tables of the stored results")

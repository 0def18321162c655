"""Sorting networks as lists of comparators."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple


class Network(NamedTuple):
    """A sorting network for ``size`` values.

    ``comparators`` holds pairs ``(low, high)`` of positions with ``low < high``. A comparator moves the smaller value
    to ``low``. Applied in order, the comparators sort any input in ascending order without branches.
    """

    size: int
    comparators: tuple[tuple[int, int], ...]


@lru_cache(maxsize=None)
def sorting_network(size: int) -> Network:
    """Returns Batcher's odd-even merge sort for any ``size >= 1``.

    It is the network of the next power of two without the comparators beyond ``size``: the missing positions would hold
    infinity, which a comparator never moves down.

    >>> sorting_network(4).comparators
    ((0, 1), (2, 3), (0, 2), (1, 3), (1, 2))
    >>> len(sorting_network(64).comparators)
    543
    """
    return Network(size, tuple(_odd_even_merge_sort(size)))


def _odd_even_merge_sort(size: int) -> Iterator[tuple[int, int]]:
    """Merges sorted runs of ``run`` values pairwise; a merge compares at distances ``step`` that halve."""
    run = 1
    while run < size:
        step = run
        while step >= 1:
            for start in range(step % run, size - step, 2 * step):
                for low in range(start, min(start + step, size - step)):
                    high = low + step
                    if low // (2 * run) == high // (2 * run):
                        yield low, high
            step //= 2
        run *= 2


@lru_cache(maxsize=None)
def bitonic_merge(size: int) -> Network:
    """Returns a network that sorts any bitonic sequence: one that rises and then falls, or a rotation of one.

    It has fewer comparators than a sort of ``size`` values. A half-cleaner splits an even length into a bitonic half of
    smaller values and one of larger values; an odd length is sorted.

    >>> len(bitonic_merge(64).comparators)
    192
    """
    return Network(size, tuple(_clean_halves(0, size)))


def _clean_halves(start: int, size: int) -> Iterator[tuple[int, int]]:
    if size % 2:
        yield from ((start + low, start + high) for low, high in sorting_network(size).comparators)
        return
    half = size // 2
    yield from ((low, low + half) for low in range(start, start + half))
    yield from _clean_halves(start, half)
    yield from _clean_halves(start + half, half)

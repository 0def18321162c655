"""Sorting networks as comparator lists: what every kernel runs instead of a sort."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple


class Network(NamedTuple):
    """A sorting network for ``size`` values.

    ``comparators`` holds pairs ``(low, high)`` of positions, ``low < high``: the smaller value goes to ``low``. Run in
    order they sort any input into ascending order, with no branch and no index.
    """

    size: int
    comparators: tuple[tuple[int, int], ...]

    def layers(self) -> list[list[tuple[int, int]]]:
        """Comparators grouped into layers that touch each position at most once, as early as they can run."""
        ready = [0] * self.size
        layers: list[list[tuple[int, int]]] = []
        for low, high in self.comparators:
            when = max(ready[low], ready[high])
            ready[low] = ready[high] = when + 1
            if when == len(layers):
                layers.append([])
            layers[when].append((low, high))
        return layers

    @property
    def depth(self) -> int:
        """Number of layers: the time the network takes if each layer runs at once."""
        return len(self.layers())


@lru_cache(maxsize=None)
def sorting_network(size: int) -> Network:
    """Batcher's odd-even merge sort for any ``size >= 1``.

    The network of the next power of two, without the comparators that reach past ``size``: the missing positions would
    hold infinitely large values, which a comparator never moves down.

    >>> sorting_network(4).comparators
    ((0, 1), (2, 3), (0, 2), (1, 3), (1, 2))
    >>> network = sorting_network(64)
    >>> len(network.comparators), network.depth
    (543, 21)
    """
    return Network(size, tuple(_odd_even_merge_sort(size)))


def _odd_even_merge_sort(size: int) -> Iterator[tuple[int, int]]:
    """Merge sorted runs of ``run`` values pairwise; within a merge, compare at halving distances ``step``."""
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
    """Comparators that sort any bitonic sequence: one that rises and then falls, or a rotation of such a one.

    Cheaper than a sort of ``size`` values. A half-cleaner splits an even length into a smaller and a larger bitonic
    half; what is left at an odd length is sorted.

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

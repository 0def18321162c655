"""How the lanes of a warp share the dimensions and blocks of query-key pairs in ``lanes.cuh``."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import gcd
from typing import NamedTuple

WARP = 32


class Layout(NamedTuple):
    """The part of a query-key pair that each lane processes.

    A block is summed by ``split * copies`` lanes, each of which reads ``width`` dimensions of it. Lanes with adjacent
    indices read adjacent addresses.

    Attributes:
        group: lanes that sort the blocks of a pair.
        chunk: blocks per lane that it sorts; ``group * chunk >= n``.
        width: dimensions per block that a lane reads.
        split: lanes of a group that share the dimensions of a block, and share out the sums of their blocks.
        copies: groups that share the dimensions of a block. They exchange their sums and sort the same values.
    """

    group: int
    chunk: int
    width: int = 1
    split: int = 1
    copies: int = 1

    @property
    def blocks(self) -> int:
        """Blocks the kernel processes; inputs are padded to this number."""
        return self.group * self.chunk

    @property
    def block_size(self) -> int:
        """Dimensions of a block the kernel processes; blocks are padded to this number."""
        return self.width * self.parts

    @property
    def dims(self) -> int:
        """Dimensions the kernel processes."""
        return self.blocks * self.block_size

    @property
    def held(self) -> int:
        """Blocks of which a lane reads dimensions."""
        return self.chunk * self.split

    @property
    def per_lane(self) -> int:
        """Dimensions that a lane reads."""
        return self.held * self.width

    @property
    def lanes(self) -> int:
        """Lanes that process one pair."""
        return self.group * self.copies

    @property
    def pairs(self) -> int:
        """Pairs a warp processes at once."""
        return WARP // self.lanes

    @property
    def readers(self) -> int:
        """Lanes of a group that read different blocks."""
        return self.group // self.split

    @property
    def parts(self) -> int:
        """Lanes that share the dimensions of a block."""
        return self.split * self.copies

    @property
    def run(self) -> int:
        """Adjacent blocks that a lane reads: reader ``r`` reads runs ``r``, ``r + readers``, ``r + 2 * readers``..."""
        if self.parts > 1:
            return 1
        return self.held if self.readers == 1 else gcd(self.held, max(1, 4 // self.width))

    @property
    def stretch(self) -> int:
        """Adjacent dimensions that a lane reads. Lanes that share a block read its stretches in turns."""
        return self.run * self.width if self.parts == 1 else gcd(self.width, 4)

    def constants(self) -> dict[str, int]:
        """Returns the constants of ``lanes.cuh``."""
        return {**self._asdict(), "run": self.run, "stretch": self.stretch}


@lru_cache(maxsize=None)
def choose_layout(n: int, size: int, alone: int, shared: int, step: int = 1) -> Layout:
    """Returns the cheapest layout for ``n`` blocks of ``size`` dimensions.

    A lane holds up to ``alone`` dimensions of a pair that it processes by itself, or up to ``shared`` of one that
    several lanes process (more if a warp has no room otherwise). ``step`` divides the chunks that lanes share.
    """
    if n * size <= alone:
        return Layout(1, n, size)
    layouts = list(_layouts(n, size, step))
    room = max(shared, min(layout.per_lane for layout in layouts))
    return min((layout for layout in layouts if layout.per_lane <= room), key=_cost)


def _layouts(n: int, size: int, step: int) -> Iterator[Layout]:
    for levels, splits, halvings in product(range(6), repeat=3):
        group, split, copies = 2**levels, 2**splits, 2**halvings
        chunk, width = step * -(-n // (step * group)), -(-size // (split * copies))
        fits = 1 < group * copies <= WARP and split <= group
        if fits and group // 2 * chunk < n and split * copies // 2 * width < size:
            # Some larger chunks have cheaper merges.
            larger = range(chunk, chunk + 8, step) if group > 1 else (chunk,)
            yield from (Layout(group, each, width, split, copies) for each in larger)


def _cost(layout: Layout) -> float:
    """Returns instructions per pair and base: two per comparator and dimension, four per value exchanged by lanes.

    A lane reads up to four words at a time. A warp reads 128 adjacent bytes in the time of four instructions, for all
    of its pairs, and what it reads serves two bases.
    """
    chunk, levels = layout.chunk, layout.group.bit_length() - 1
    own = 2 * comparators(chunk) + levels * 2 * _merge_comparators(chunk)
    exchanged = layout.held - chunk + chunk * (layout.copies.bit_length() - 1) + chunk * levels * (levels + 1) / 2
    sums = 2 * layout.per_lane if layout.block_size > 1 else 0
    word = gcd(layout.stretch, 4)
    lines = max(1, layout.lanes * min(layout.stretch, WARP) / WARP)
    reads = layout.per_lane / word * lines * 4 * WARP / layout.pairs / 2
    return layout.lanes * (own + sums + 4 * exchanged) + reads


@lru_cache(maxsize=None)
def comparators(size: int) -> int:
    """Returns the number of comparators of Batcher's odd-even merge sort, as ``sort.cuh`` has it.

    >>> [comparators(size) for size in (1, 4, 64)]
    [0, 5, 543]
    """
    count, run = 0, 1
    while run < size:
        step = run
        while step >= 1:
            for start in range(step % run, size - step, 2 * step):
                lows = range(start, min(start + step, size - step))
                count += sum(low // (2 * run) == (low + step) // (2 * run) for low in lows)
            step //= 2
        run *= 2
    return count


def _merge_comparators(size: int) -> int:
    """Returns the number of comparators of a bitonic merge; an odd number of values is sorted."""
    return comparators(size) if size % 2 else size // 2 + 2 * _merge_comparators(size // 2)

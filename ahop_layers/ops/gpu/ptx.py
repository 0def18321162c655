"""Sorting in the registers of an NVIDIA GPU: the layout of values over lanes, and the PTX that sorts them.

A *group* of lanes processes one query-key pair at a time, and each lane sorts a *chunk* of its blocks: few blocks fit
in one lane, many are spread over the warp. A lane sorts its chunk with a network, and shuffles merge the chunks.
Registers are untyped (``.b32``), so a value can be read as float or integer.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import gcd
from typing import NamedTuple

from ahop_layers.ops.gpu.networks import bitonic_merge, sorting_network

WARP = 32


class Layout(NamedTuple):
    """The part of a query-key pair that each lane processes.

    A block is summed by ``split * copies`` lanes, each of which reads ``width`` dimensions of it. Lanes with adjacent
    indices read adjacent addresses.

    Attributes:
        group: lanes that sort the blocks of a pair.
        chunk: blocks per lane that it sorts; ``group * chunk >= n``.
        width: dimensions per block that a lane reads.
        split: lanes of a group that share the dimensions of a block, and share out its sum with those of others.
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
    own = 2 * len(sorting_network(chunk).comparators) + levels * 2 * len(bitonic_merge(chunk).comparators)
    exchanged = layout.held - chunk + chunk * (layout.copies.bit_length() - 1) + chunk * levels * (levels + 1) / 2
    sums = 2 * layout.per_lane if layout.block_size > 1 else 0
    word = gcd(layout.stretch, 4)
    lines = max(1, layout.lanes * min(layout.stretch, WARP) / WARP)
    reads = layout.per_lane / word * lines * 4 * WARP / layout.pairs / 2
    return layout.lanes * (own + sums + 4 * exchanged) + reads


class Program:
    """Builder of PTX code: emits instructions and allocates registers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.registers: dict[str, int] = {}

    def new(self, kind: str = "b32") -> str:
        """Allocates a register of the PTX type ``kind``."""
        number = self.registers.get(kind, 0)
        self.registers[kind] = number + 1
        return f"{kind}_{number}"

    def op(self, instruction: str, *operands: object, kind: str = "b32") -> str:
        """Emits ``instruction result, operands`` and returns the new register ``result``."""
        result = self.new(kind)
        self.do(instruction, result, *operands)
        return result

    def do(self, instruction: str, *operands: object) -> None:
        """Emits ``instruction operands``."""
        self.lines.append(f"{instruction} {', '.join(map(str, operands))};")

    def text(self, shared_bytes: int = 0) -> str:
        """Returns the code as a block with its own scope."""
        declared = [f".reg .{kind} {kind}_<{count}>;" for kind, count in self.registers.items()]
        if shared_bytes:
            declared.append(f".shared .align 16 .b8 scratch[{shared_bytes}];")
        return "\n".join(["{", *declared, *self.lines, "}"])

    def vector(self, words: Sequence[str]) -> str:
        """Returns the operand of an access to 1, 2 or 4 words."""
        return words[0] if len(words) == 1 else f"{{{', '.join(words)}}}"

    def label(self, name: str) -> None:
        """Emits a label."""
        self.lines.append(f"{name}:")

    def repeat(self, label: str, left: str, *advance: tuple[str, object]) -> None:
        """Ends the loop that starts at ``label`` and runs ``left`` times (at least once); advances addresses."""
        for address, stride in advance:
            self.do("add.s64", address, address, stride)
        self.do("sub.s32", left, left, 1)
        self.lines.append(f"@{self.op('setp.gt.s32', left, 0, kind='pred')} bra {label};")

    def for_each_base(self, count: int, looped: bool, body: Callable[[str, range], None]) -> None:
        """Emits ``body(left, indices)`` for the bases: once per base, or once for all of them in a loop.

        ``left`` counts down from ``count``. A loop keeps a long network in the instruction cache; unrolled code lets
        the assembler overlap the instructions of two bases.
        """
        left = self.op("mov.b32", count)
        if looped:
            self.label("BASE")
            body(left, range(count))
            self.repeat("BASE", left)
        else:
            for index in range(count):
                body(left, range(index, index + 1))

    def switch(self, left: str, cases: Sequence[Callable[[], None]]) -> None:
        """Emits code that runs case ``len(cases) - left``; a single case runs unconditionally."""
        if len(cases) == 1:
            return cases[0]()
        name = f"CASE_{len(self.lines)}"
        for number, case in enumerate(cases):
            other = self.op("setp.ne.u32", left, len(cases) - number, kind="pred")
            self.lines.append(f"@{other} bra {name}_{number};")
            case()
            self.lines.append(f"bra {name};")
            self.label(f"{name}_{number}")
        self.label(name)

    def either(self, predicate: str, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Emits two alternatives: ``first`` runs where the predicate, equal in all lanes, holds, else ``second``."""
        name = f"EITHER_{len(self.lines)}"
        self.lines.append(f"@{predicate} bra.uni {name}_FIRST;")
        second()
        self.lines.append(f"bra.uni {name};")
        self.label(f"{name}_FIRST")
        first()
        self.label(name)

    def lane_bit(self, lane: str, bit: int) -> str:
        """Returns a predicate: whether this bit of the lane index is set."""
        return self.op("setp.ne.u32", self.op("and.b32", lane, bit), 0, kind="pred")

    def shuffle(self, value: str, distance: int) -> str:
        """Returns the value of the lane whose index is this one's ``xor distance``."""
        return self.op("shfl.sync.bfly.b32", value, distance, WARP - 1, "0xffffffff")

    def exchange_halves(self, values: Sequence[str], distance: int, upper: str) -> list[str]:
        """Adds up the values of two lanes; each keeps one half of the sums, the lane with ``upper`` the second."""
        half = len(values) // 2
        pairs = list(zip(values[:half], values[half:], strict=True))
        kept = [self.op("selp.b32", high, low, upper) for low, high in pairs]
        sent = [self.op("selp.b32", low, high, upper) for low, high in pairs]
        return [self.op("add.f32", a, self.shuffle(b, distance)) for a, b in zip(kept, sent, strict=True)]

    def load_words(self, address: str, count: int, offset: int = 0) -> list[str]:
        """Loads ``count`` consecutive 32-bit words, in accesses as wide as ``count`` allows."""
        width = gcd(count, 4)
        return [
            word
            for start in range(0, count, width)
            for word in self.load_vector(f"{address}+{offset + 4 * start}", [self.new() for _ in range(width)])
        ]

    def load_vector(
        self, place: str, words: list[str], predicate: str | None = None, space: str = "global"
    ) -> list[str]:
        """Loads 1, 2 or 4 adjacent words into registers in one access, where the predicate holds."""
        guard, kind = f"@{predicate} " if predicate else "", f".v{len(words)}" if len(words) > 1 else ""
        self.do(f"{guard}ld.{space}{kind}.b32", self.vector(words), f"[{place}]")
        return words

    def store_words(
        self,
        address: str,
        words: Sequence[str],
        predicate: str,
        unit: int,
        step: int = 1,
        offset: int = 0,
        space: str = "global",
    ) -> None:
        """Stores words where the predicate holds, in accesses of up to four words.

        They form units of adjacent words; units lie ``step`` units apart.
        """
        for start, vector in vectors(words, unit):
            place = f"[{address}+{offset + 4 * (start // unit * unit * step + start % unit)}]"
            kind = f".v{len(vector)}" if len(vector) > 1 else ""
            self.do(f"@{predicate} st.{space}{kind}.b32", place, self.vector(vector))

    def add_words(
        self, address: str, words: Sequence[str], predicate: str, again: str, unit: int, step: int = 1
    ) -> None:
        """Stores words as :meth:`store_words`; adds them to the stored ones where ``again`` holds too."""
        both = self.op("and.pred", predicate, again, kind="pred")
        before = self.load_units(address, len(words), both, unit, step)
        totals = [self.op("add.f32", a, b) for a, b in zip(before, words, strict=True)]
        self.store_words(address, totals, predicate, unit, step)

    def load_units(self, address: str, count: int, predicate: str, unit: int, step: int = 1) -> list[str]:
        """Loads words that :meth:`store_words` stored, where the predicate holds, and 0 elsewhere."""
        words = [self.op("mov.b32", 0) for _ in range(count)]
        for start, vector in vectors(words, unit):
            self.load_vector(f"{address}+{4 * (start // unit * unit * step + start % unit)}", list(vector), predicate)
        return words

    def load_floats(self, address: str, count: int, dtype: str, offset: int = 0) -> list[str]:
        """Loads ``count`` consecutive values as float32."""
        if dtype == "f32":
            return self.load_words(address, count, offset)
        floats: list[str] = []
        if count % 2:
            for index in range(count):
                half = self.new("b16")
                self.do("ld.global.b16", half, f"[{address}+{offset + 2 * index}]")
                floats.append(self.widen(half, dtype))
            return floats
        for word in self.load_words(address, count // 2, offset):
            floats += self.unpack(word, dtype)
        return floats

    def load_or_zero(self, address: str, dtype: str, predicate: str) -> str:
        """Loads one value as float32 where the predicate holds, and 0 elsewhere."""
        if dtype == "f32":
            return self.load_vector(address, [self.op("mov.b32", 0)], predicate)[0]
        half = self.op("mov.b16", 0, kind="b16")
        self.do(f"@{predicate} ld.global.b16", half, f"[{address}]")
        return self.widen(half, dtype)

    def store(self, address: str, value: str, dtype: str, predicate: str) -> None:
        """Stores a float32 value, rounded to the dtype, where the predicate holds."""
        if dtype == "f32":
            self.do(f"@{predicate} st.global.b32", f"[{address}]", value)
        else:
            self.do(f"@{predicate} st.global.b16", f"[{address}]", self.op(f"cvt.rn.{dtype}.f32", value, kind="b16"))

    def unpack(self, word: str, dtype: str) -> tuple[str, str]:
        """Returns the low and high halves of a packed word as float32."""
        if dtype == "bf16":
            return self.op("shl.b32", word, 16), self.op("and.b32", word, "0xffff0000")
        low, high = self.new("b16"), self.new("b16")
        self.do("mov.b32", f"{{{low}, {high}}}", word)
        return self.widen(low, dtype), self.widen(high, dtype)

    def widen(self, half: str, dtype: str) -> str:
        """Returns a 16-bit value as float32."""
        if dtype == "f16":
            return self.op("cvt.f32.f16", half)
        return self.op("shl.b32", self.op("cvt.u32.u16", half), 16)


def vectors(words: Sequence[str], unit: int) -> Iterator[tuple[int, Sequence[str]]]:
    """Yields the words of units in groups of up to four, and the index of the first word of each group."""
    width = gcd(gcd(len(words), unit), 4)
    for start in range(0, len(words), width):
        yield start, words[start : start + width]


Item = tuple[str, ...]
"""Registers that move together through a network: a value, or a value and its origin."""


class Values:
    """Sorts values. A comparator propagates NaN to both outputs, so a NaN reaches the score."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def exchange(self, p: Program, low: Item, high: Item) -> tuple[Item, Item]:
        """Emits a comparator within a lane."""
        smaller, larger = (p.op(f"{side}.{self.kind}", low[0], high[0]) for side in ("min", "max"))
        return (smaller,), (larger,)

    def cross(self, p: Program, mine: Item, sent: Item, distance: int, upper: str) -> Item:
        """Emits a comparator between two lanes; the upper lane keeps the larger value."""
        smaller, larger = self.exchange(p, mine, (p.shuffle(sent[0], distance),))
        return (p.op("selp.b32", larger[0], smaller[0], upper),)


class Tagged:
    """Sorts pairs (float32 value, tag) exactly. The tags remain a permutation for all values, including NaN."""

    def exchange(self, p: Program, low: Item, high: Item) -> tuple[Item, Item]:
        """Emits a comparator within a lane."""
        swap = p.op("setp.gt.f32", low[0], high[0], kind="pred")
        first = tuple(p.op("selp.b32", b, a, swap) for a, b in zip(low, high, strict=True))
        second = tuple(p.op("selp.b32", a, b, swap) for a, b in zip(low, high, strict=True))
        return first, second

    def cross(self, p: Program, mine: Item, sent: Item, distance: int, upper: str) -> Item:
        """Emits a comparator between two lanes; both evaluate the same comparison, so no value is lost."""
        theirs = tuple(p.shuffle(register, distance) for register in sent)
        lower_value, upper_value = (
            p.op("selp.b32", a, b, upper) for a, b in ((theirs[0], mine[0]), (mine[0], theirs[0]))
        )
        swap = p.op("setp.gt.f32", lower_value, upper_value, kind="pred")
        return tuple(p.op("selp.b32", a, b, swap) for a, b in zip(theirs, mine, strict=True))


def sort(p: Program, items: list[Item], layout: Layout, order: Values | Tagged, lane: str) -> list[Item]:
    """Sorts the items of a group in ascending order; lane ``r`` holds positions ``r * chunk`` and up."""
    items = list(items)

    def run(comparators: Sequence[tuple[int, int]]) -> None:
        for low, high in comparators:
            items[low], items[high] = order.exchange(p, items[low], items[high])

    run(sorting_network(layout.chunk).comparators)
    width = 2
    while width <= layout.group:
        # Comparing two sorted halves with the upper one reversed leaves the smaller values below; both are bitonic.
        upper = p.lane_bit(lane, width // 2)
        items = [order.cross(p, mine, sent, width - 1, upper) for mine, sent in zip(items, items[::-1], strict=True)]
        distance = width // 4
        while distance:
            upper = p.lane_bit(lane, distance)
            items = [order.cross(p, mine, mine, distance, upper) for mine in items]
            distance //= 2
        run(bitonic_merge(layout.chunk).comparators)
        width *= 2
    return items

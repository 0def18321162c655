"""Sorting in the registers of an NVIDIA GPU: the layout of values over lanes, and the PTX that sorts them.

A *group* of lanes processes one query-key pair at a time, and each lane holds a *chunk* of its dimensions: a small
``d`` fits in one lane, a large one is spread over the warp. A lane sorts its chunk with a network, and shuffles merge
the chunks. Registers are untyped (``.b32``), so a value can be read as float or integer.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from ahop_layers.ops.gpu.networks import bitonic_merge, sorting_network

WARP = 32


class Layout(NamedTuple):
    """``group`` lanes share a pair, each with ``chunk`` dimensions; ``group * chunk >= d``."""

    group: int
    chunk: int

    @property
    def dims(self) -> int:
        """Dimensions the kernel processes; inputs are padded to this number."""
        return self.group * self.chunk

    @property
    def pairs(self) -> int:
        """Pairs a warp processes at once."""
        return WARP // self.group


@lru_cache(maxsize=None)
def choose_layout(d: int, alone: int, shared: int) -> Layout:
    """Returns the cheapest layout of up to ``alone`` registers for a single lane or ``shared`` per lane of a group."""
    if d <= alone:
        return Layout(1, d)
    layouts = []
    for levels in range(1, 6):
        group = 2**levels
        smallest = -(-d // group)
        layouts += [Layout(group, chunk) for chunk in range(smallest, min(smallest + 8, shared + 1))]
    return min(layouts, key=_cost)


def _cost(layout: Layout) -> float:
    """Returns instructions per pair: two per comparator, four per value exchanged between lanes."""
    group, chunk = layout
    levels = group.bit_length() - 1
    own = 2 * len(sorting_network(chunk).comparators) + levels * 2 * len(bitonic_merge(chunk).comparators)
    return group * (own + 4 * chunk * levels * (levels + 1) / 2)


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

    def lane_bit(self, lane: str, bit: int) -> str:
        """Returns a predicate: whether this bit of the lane index is set."""
        return self.op("setp.ne.u32", self.op("and.b32", lane, bit), 0, kind="pred")

    def shuffle(self, value: str, distance: int) -> str:
        """Returns the value of the lane whose index is this one's ``xor distance``."""
        return self.op("shfl.sync.bfly.b32", value, distance, WARP - 1, "0xffffffff")

    def load_words(self, address: str, count: int, offset: int = 0) -> list[str]:
        """Loads ``count`` consecutive 32-bit words, in accesses as wide as ``count`` allows."""
        words = [self.new() for _ in range(count)]
        width = gcd(count, 4)
        for start in range(0, count, width):
            place = f"[{address}+{offset + 4 * start}]"
            if width == 1:
                self.do("ld.global.b32", words[start], place)
            else:
                self.do(f"ld.global.v{width}.b32", f"{{{', '.join(words[start : start + width])}}}", place)
        return words

    def store_words(self, address: str, words: Sequence[str], predicate: str, offset: int = 0) -> None:
        """Stores consecutive 32-bit words where the predicate holds."""
        width = gcd(len(words), 4)
        for start in range(0, len(words), width):
            place = f"[{address}+{offset + 4 * start}]"
            if width == 1:
                self.do(f"@{predicate} st.global.b32", place, words[start])
            else:
                vector = f"{{{', '.join(words[start : start + width])}}}"
                self.do(f"@{predicate} st.global.v{width}.b32", place, vector)

    def add_words(self, address: str, words: Sequence[str], predicate: str, again: str) -> None:
        """Stores consecutive words where the predicate holds; adds to the stored values where ``again`` holds too."""
        both = self.op("and.pred", predicate, again, kind="pred")
        totals = []
        for place, word in enumerate(words):
            before = self.op("mov.b32", 0)
            self.do(f"@{both} ld.global.b32", before, f"[{address}+{4 * place}]")
            totals.append(self.op("add.f32", before, word))
        self.store_words(address, totals, predicate)

    def load_floats(self, address: str, count: int, dtype: str) -> list[str]:
        """Loads ``count`` consecutive values as float32."""
        if dtype == "f32":
            return self.load_words(address, count)
        floats: list[str] = []
        for word in self.load_words(address, count // 2):
            floats += self.unpack(word, dtype)
        return floats

    def unpack(self, word: str, dtype: str) -> tuple[str, str]:
        """Returns the low and high halves of a packed word as float32."""
        if dtype == "bf16":
            return self.op("shl.b32", word, 16), self.op("and.b32", word, "0xffff0000")
        low, high = self.new("b16"), self.new("b16")
        self.do("mov.b32", f"{{{low}, {high}}}", word)
        return self.op("cvt.f32.f16", low), self.op("cvt.f32.f16", high)


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

"""PTX bodies of the NVIDIA kernels: a sorting network per query-key pair, in registers.

A *group* of lanes owns one pair at a time, each lane holding a *chunk* of its dimensions: small ``d`` fits one lane, a
large one spreads over the warp. A lane sorts its chunk by a network; chunks are merged through shuffles. Registers are
declared untyped (``.b32``), so that values can be read as float or integer.

A network sorts ascending and the definition descending, and what is sorted for a distance is its negative. So the
weights of a product are read backwards, and distances count negatively.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from ahop_layers.ops.networks import bitonic_merge, sorting_network

WARP = 32
TAG_BITS = 10
"""Low bits of a word that tell where a half-precision similarity came from: 32 slots of a lane, 32 lanes of a group."""


class Layout(NamedTuple):
    """``group`` lanes share a pair, each with ``chunk`` dimensions: together ``group * chunk >= d``."""

    group: int
    chunk: int

    @property
    def dims(self) -> int:
        """Dimensions the kernel works on; inputs are padded up to it."""
        return self.group * self.chunk

    @property
    def pairs(self) -> int:
        """Pairs a warp works on at once."""
        return WARP // self.group


@lru_cache(maxsize=None)
def choose_layout(d: int, alone: int, shared: int) -> Layout:
    """The cheapest layout for ``d``: up to ``alone`` registers where a lane works alone, ``shared`` in a group."""
    if d <= alone:
        return Layout(1, d)
    layouts = []
    for levels in range(1, 6):
        group = 2**levels
        smallest = -(-d // group)
        layouts += [Layout(group, chunk) for chunk in range(smallest, min(smallest + 8, shared + 1))]
    return min(layouts, key=_cost)


def _cost(layout: Layout) -> float:
    """Instructions per pair: two a comparator, four a value that crosses lanes."""
    group, chunk = layout
    levels = group.bit_length() - 1
    own = 2 * len(sorting_network(chunk).comparators) + levels * 2 * len(bitonic_merge(chunk).comparators)
    return group * (own + 4 * chunk * levels * (levels + 1) / 2)


class Program:
    """PTX text under construction: instructions, and registers named as they are asked for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.registers: dict[str, int] = {}

    def new(self, kind: str = "b32") -> str:
        """A fresh register of the PTX type ``kind``."""
        number = self.registers.get(kind, 0)
        self.registers[kind] = number + 1
        return f"{kind}_{number}"

    def op(self, instruction: str, *operands: object, kind: str = "b32") -> str:
        """Emit ``instruction result, operands`` and return the fresh result."""
        result = self.new(kind)
        self.do(instruction, result, *operands)
        return result

    def do(self, instruction: str, *operands: object) -> None:
        """Emit ``instruction operands``."""
        self.lines.append(f"{instruction} {', '.join(map(str, operands))};")

    def text(self, shared_bytes: int = 0) -> str:
        """The whole block, in a scope of its own."""
        declared = [f".reg .{kind} {kind}_<{count}>;" for kind, count in self.registers.items()]
        if shared_bytes:
            declared.append(f".shared .align 16 .b8 scratch[{shared_bytes}];")
        return "\n".join(["{", *declared, *self.lines, "}"])

    def lane_bit(self, lane: str, bit: int) -> str:
        """A predicate: this bit of the lane's number is set."""
        return self.op("setp.ne.u32", self.op("and.b32", lane, bit), 0, kind="pred")

    def shuffle(self, value: str, distance: int) -> str:
        """The value of the lane whose number differs by ``xor distance``."""
        return self.op("shfl.sync.bfly.b32", value, distance, WARP - 1, "0xffffffff")

    def load_words(self, address: str, count: int, offset: int = 0) -> list[str]:
        """``count`` consecutive 32-bit words, in accesses as wide as ``count`` allows."""
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
        """Store consecutive 32-bit words where the predicate holds."""
        width = gcd(len(words), 4)
        for start in range(0, len(words), width):
            place = f"[{address}+{offset + 4 * start}]"
            if width == 1:
                self.do(f"@{predicate} st.global.b32", place, words[start])
            else:
                vector = f"{{{', '.join(words[start : start + width])}}}"
                self.do(f"@{predicate} st.global.v{width}.b32", place, vector)

    def load_floats(self, address: str, count: int, dtype: str) -> list[str]:
        """``count`` consecutive values as float32."""
        if dtype == "f32":
            return self.load_words(address, count)
        floats: list[str] = []
        for word in self.load_words(address, count // 2):
            floats += self.unpack(word, dtype)
        return floats

    def unpack(self, word: str, dtype: str) -> tuple[str, str]:
        """The two halves of a packed word, low and high, as float32."""
        if dtype == "bf16":
            return self.op("shl.b32", word, 16), self.op("and.b32", word, "0xffff0000")
        low, high = self.new("b16"), self.new("b16")
        self.do("mov.b32", f"{{{low}, {high}}}", word)
        return self.op("cvt.f32.f16", low), self.op("cvt.f32.f16", high)


Comparators = Sequence[tuple[int, int]]
Item = tuple[str, ...]
"""The registers that move together through a network: a value, or a value and where it came from."""


class Values:
    """Sorts plain values; a NaN spreads over everything it meets, so that it reaches the score."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def exchange(self, p: Program, low: Item, high: Item) -> tuple[Item, Item]:
        """One comparator within a lane."""
        smaller, larger = (p.op(f"{side}.{self.kind}", low[0], high[0]) for side in ("min", "max"))
        return (smaller,), (larger,)

    def cross(self, p: Program, mine: Item, sent: Item, distance: int, upper: str) -> Item:
        """One comparator between two lanes: the upper one keeps the larger value."""
        smaller, larger = self.exchange(p, mine, (p.shuffle(sent[0], distance),))
        return (p.op("selp.b32", larger[0], smaller[0], upper),)


class Tagged:
    """Sorts (float32 value, tag): exact, and the tags stay a permutation whatever the values are, NaN included."""

    def exchange(self, p: Program, low: Item, high: Item) -> tuple[Item, Item]:
        """One comparator within a lane."""
        swap = p.op("setp.gt.f32", low[0], high[0], kind="pred")
        first = tuple(p.op("selp.b32", b, a, swap) for a, b in zip(low, high, strict=True))
        second = tuple(p.op("selp.b32", a, b, swap) for a, b in zip(low, high, strict=True))
        return first, second

    def cross(self, p: Program, mine: Item, sent: Item, distance: int, upper: str) -> Item:
        """One comparator between two lanes: both decide by the same comparison, so exactly one of two values moves."""
        theirs = tuple(p.shuffle(register, distance) for register in sent)
        lower_value, upper_value = (
            p.op("selp.b32", a, b, upper) for a, b in ((theirs[0], mine[0]), (mine[0], theirs[0]))
        )
        swap = p.op("setp.gt.f32", lower_value, upper_value, kind="pred")
        return tuple(p.op("selp.b32", a, b, swap) for a, b in zip(theirs, mine, strict=True))


def sort(p: Program, items: list[Item], layout: Layout, order: Values | Tagged, lane: str) -> list[Item]:
    """Sort a group's items ascending: lane ``r`` of the group ends with positions ``r * chunk`` and up."""
    items, last = nearly_sort(p, items, layout, order, lane)
    _run(p, items, order, last)
    return items


def nearly_sort(
    p: Program, items: list[Item], layout: Layout, order: Values | Tagged, lane: str
) -> tuple[list[Item], Comparators]:
    """All of :func:`sort` but the comparators that are the last to touch their positions; these are returned too."""
    items = list(items)
    network, width = sorting_network(layout.chunk), 2
    while width <= layout.group:
        _run(p, items, order, network.comparators)
        # Two sorted halves: comparing with the mirror image leaves the smaller half below, both bitonic.
        upper = p.lane_bit(lane, width // 2)
        items = [order.cross(p, mine, sent, width - 1, upper) for mine, sent in zip(items, items[::-1], strict=True)]
        distance = width // 4
        while distance:
            upper = p.lane_bit(lane, distance)
            items = [order.cross(p, mine, mine, distance, upper) for mine in items]
            distance //= 2
        network, width = bitonic_merge(layout.chunk), 2 * width
    earlier, last = network.split_last()
    _run(p, items, order, earlier)
    return items, last


def _run(p: Program, items: list[Item], order: Values | Tagged, comparators: Comparators) -> None:
    for low, high in comparators:
        items[low], items[high] = order.exchange(p, items[low], items[high])


def similarity(p: Program, base: str, query: str, key: str) -> str:
    """What is sorted for a base, in float32: the squared or absolute difference, or the product."""
    if base == "dot":
        return p.op("mul.f32", query, key)
    difference = p.op("sub.f32", query, key)
    return p.op("mul.f32", difference, difference) if base == "dis" else p.op("abs.f32", difference)


def load_weights(p: Program, base: str, index: int, forwards: str, backwards: str, layout: Layout) -> list[str]:
    """The weights of base ``index`` that meet this lane's positions, in ascending order."""
    start, offset = (backwards if base == "dot" else forwards), 4 * layout.dims * index
    weights = p.load_words(start, layout.chunk, offset)
    return weights[::-1] if base == "dot" else weights


SCORE_ARGUMENTS = ("key", "key2", "query", "query_stride", "weight", "weight_back", "out", "out2", "out_stride")
SCORE_CONSTRAINTS = "=r," + "l," * len(SCORE_ARGUMENTS) + "r,r,r"


@lru_cache(maxsize=None)
def score(layout: Layout, bases: tuple[str, ...], dtype: str) -> str:
    """Score one key a group (float32) or two (half precision, packed) against ``rows`` queries, one after the other."""
    p = Program()
    arguments, (rows, valid, valid2) = _arguments(p, SCORE_ARGUMENTS, 3)
    keep = [p.op("setp.ne.u32", flag, 0, kind="pred") for flag in (valid, valid2)]
    lane = p.op("mov.u32", "%laneid")
    chunk, packed = layout.chunk, dtype != "f32"
    if packed:
        both = (p.load_words(arguments[name], chunk // 2) for name in ("key", "key2"))
        keys = [p.op("prmt.b32", a, b, pick) for a, b in zip(*both, strict=True) for pick in ("0x5410", "0x7632")]
    else:
        keys = p.load_words(arguments["key"], chunk)
    p.lines.append("ROW:")
    scores: list[str] = ["0f00000000"] * (1 + packed)
    for index, base in enumerate(bases):
        query = arguments["query"]
        items = _packed(p, base, query, keys, dtype) if packed else _plain(p, base, query, keys)
        kind = f"NaN.{dtype}x2" if packed else "NaN.f32"
        items, last = nearly_sort(p, items, layout, Values(kind), lane)
        weights = load_weights(p, base, index, arguments["weight"], arguments["weight_back"], layout)
        totals = _weigh(p, items, weights, last, (base, dtype))
        sign = "add" if base == "dot" else "sub"
        scores = [p.op(f"{sign}.f32", total, part) for total, part in zip(scores, totals, strict=True)]
    for total, address, predicate in zip(scores, ("out", "out2"), keep, strict=False):
        for distance in (2**level for level in range(layout.group.bit_length() - 1)):
            total = p.op("add.f32", total, p.shuffle(total, distance))
        p.do(f"@{predicate} st.global.b32", f"[{arguments[address]}]", total)
        p.do("add.s64", arguments[address], arguments[address], arguments["out_stride"])
    _next_row(p, rows, (arguments["query"], arguments["query_stride"]))
    return p.text()


def _arguments(p: Program, names: Sequence[str], numbers: int) -> tuple[dict[str, str], list[str]]:
    """Registers for the operands of the block: 64-bit ones by name, then ``numbers`` of 32 bits."""
    wide = {name: p.op("mov.b64", f"${index}", kind="b64") for index, name in enumerate(names, 1)}
    return wide, [p.op("mov.b32", f"${len(names) + 1 + index}") for index in range(numbers)]


def _plain(p: Program, base: str, query: str, keys: Sequence[str]) -> list[Item]:
    queries = p.load_words(query, len(keys))
    return [(similarity(p, base, x, k),) for x, k in zip(queries, keys, strict=True)]


def _packed(p: Program, base: str, query: str, keys: Sequence[str], dtype: str) -> list[Item]:
    """The similarities of one query to two keys, in the two halves of a word."""
    words = p.load_words(query, len(keys) // 2)
    queries = [p.op("prmt.b32", word, word, pick) for word in words for pick in ("0x1010", "0x3232")]
    if base == "dot":
        return [(p.op(f"mul.{dtype}x2", x, k),) for x, k in zip(queries, keys, strict=True)]
    differences = (p.op(f"sub.{dtype}x2", x, k) for x, k in zip(queries, keys, strict=True))
    return [(p.op(f"abs.{dtype}x2", difference),) for difference in differences]


def _floats(p: Program, base: str, item: Item, dtype: str) -> tuple[str, ...]:
    """The float32 values in an item, one a key."""
    if dtype == "f32":
        return item
    values = p.unpack(item[0], dtype)
    return tuple(p.op("mul.f32", value, value) for value in values) if base == "dis" else values


def _weigh(
    p: Program, items: Sequence[Item], weights: Sequence[str], last: Comparators, kind: tuple[str, str]
) -> list[str]:
    """``weights . sorted(values)`` of each key, where the comparators ``last`` are still to be run.

    For these ``u min(a, b) + v max(a, b) = ((u + v)(a + b) + (v - u)|a - b|) / 2``: additions in place of minimum and
    maximum, which the GPU does at twice the rate and on another pipe. Several sums in flight hide each other's latency.
    """
    base, dtype = kind
    keys = 1 if dtype == "f32" else 2
    sums, halves = ([["0f00000000"] * 2 for _ in range(keys)] for _ in range(2))
    for number, (low, high) in enumerate(last):
        level = p.op("add.f32", weights[low], weights[high])
        step = p.op("sub.f32", weights[high], weights[low])
        for half, a, b in zip(halves, *(_floats(p, base, items[side], dtype) for side in (low, high)), strict=True):
            part = p.op("fma.rn.f32", level, p.op("add.f32", a, b), half[number % 2])
            half[number % 2] = p.op("fma.rn.f32", step, p.op("abs.f32", p.op("sub.f32", a, b)), part)
    paired = {position for pair in last for position in pair}
    for number, position in enumerate(sorted(set(range(len(items))) - paired)):
        for total, value in zip(sums, _floats(p, base, items[position], dtype), strict=True):
            total[number % 2] = p.op("fma.rn.f32", value, weights[position], total[number % 2])
    return [
        p.op("fma.rn.f32", p.op("add.f32", *half), "0f3F000000", p.op("add.f32", *total))
        for half, total in zip(halves, sums, strict=True)
    ]


def _next_row(p: Program, rows: str, *advance: tuple[str, str]) -> None:
    """Close the loop over rows that the label ROW opened: there is always at least one."""
    for address, stride in advance:
        p.do("add.s64", address, address, stride)
    p.do("sub.s32", rows, rows, 1)
    more = p.op("setp.gt.s32", rows, 0, kind="pred")
    p.lines += [f"@{more} bra ROW;", "mov.b32 $0, 0;"]


BACKWARD_ARGUMENTS = (
    "key", "query", "query_stride", "weight", "weight_back", "grad", "grad_stride",
    "key_grad", "query_grad", "weight_grad",
)  # fmt: skip
BACKWARD_CONSTRAINTS = "=r," + "l," * len(BACKWARD_ARGUMENTS) + "r,r"


@lru_cache(maxsize=None)
def score_backward(layout: Layout, bases: tuple[str, ...], dtype: str) -> str:
    """Gradients of one warp's pairs: its keys stay in registers, queries pass by.

    The slope of a score with respect to a similarity is the weight at the similarity's rank. So each similarity carries
    the place in shared memory where its dimension expects that weight; after the sort, position ``j`` writes its weight
    to the place it carries. A place belongs to one lane's column of 32 banks. Float32 carries the place in a register
    beside the value; half precision in the low bits of the value itself, which it does not need.
    """
    p = Program()
    arguments, (rows, valid_flag) = _arguments(p, BACKWARD_ARGUMENTS, 2)
    valid = p.op("setp.ne.u32", valid_flag, 0, kind="pred")
    lane = p.op("mov.u32", "%laneid")
    scratch = p.op("mov.u32", "scratch")
    column = p.op("mad.lo.u32", lane, 4, scratch)
    chunk, row_bytes = layout.chunk, 4 * layout.dims
    sums = GroupSums(p, layout, lane)
    row_place = p.op("add.s64", arguments["query_grad"], sums.offset, kind="b64")

    keys = p.load_floats(arguments["key"], chunk, dtype)
    key_grads = [p.op("mov.b32", 0) for _ in keys]
    weight_grads = [[p.op("mov.b32", 0) for _ in keys] for _ in bases]
    p.lines.append("ROW:")
    grad = p.op("mov.b32", 0)
    p.do(f"@{valid} ld.global.b32", grad, f"[{arguments['grad']}]")
    signed = {base: grad if base == "dot" else p.op("neg.f32", grad) for base in bases}
    for index, base in enumerate(bases):
        queries = p.load_floats(arguments["query"], chunk, dtype)
        values = [similarity(p, base, x, k) for x, k in zip(queries, keys, strict=True)]
        region = _slot(chunk, index, 0)
        if dtype == "f32":
            places = [p.op("add.u32", column, region + _slot(chunk, 0, slot)) for slot in range(chunk)]
            items = sort(p, list(zip(values, places, strict=True)), layout, Tagged(), lane)
        else:
            items = _sort_words(p, base, values, layout, lane, p.op("add.u32", scratch, region))
        weights = load_weights(p, base, index, arguments["weight"], arguments["weight_back"], layout)
        for total, (value, place), weight in zip(weight_grads[index], items, weights, strict=True):
            p.do("fma.rn.f32", total, signed[base], value, total)
            p.do("st.shared.b32", f"[{place}]", weight)
    p.do("bar.warp.sync", "0xffffffff")
    queries = p.load_floats(arguments["query"], chunk, dtype)
    query_grads = []
    for slot, (x, k, key_grad) in enumerate(zip(queries, keys, key_grads, strict=True)):
        query_grad = p.op("mov.b32", 0)
        for index, base in enumerate(bases):
            weight = p.op("ld.shared.b32", f"[{column}+{_slot(chunk, index, slot)}]")
            _add_slopes(p, base, p.op("mul.f32", weight, signed[base]), x, k, query_grad, key_grad)
        query_grads.append(query_grad)
    p.do("bar.warp.sync", "0xffffffff")  # before the next row's places are written
    p.store_words(row_place, sums.reduce(query_grads), sums.first)
    p.do("add.s64", row_place, row_place, row_bytes)
    _next_row(
        p,
        rows,
        (arguments["query"], arguments["query_stride"]),
        (arguments["grad"], arguments["grad_stride"]),
    )
    p.store_words(arguments["key_grad"], key_grads, valid)
    for index, (base, totals) in enumerate(zip(bases, weight_grads, strict=True)):
        share = sums.reduce(totals)
        place = p.op("add.s64", arguments["weight_grad"], sums.offset, kind="b64")
        if base == "dot":  # backwards, as its weights were read
            end = p.op("sub.s64", arguments["weight_grad"], sums.offset, kind="b64")
            place, share = p.op("add.s64", end, row_bytes - 4 * len(share), kind="b64"), share[::-1]
        p.store_words(place, share, sums.first, offset=row_bytes * index)
    return p.text(shared_bytes=_slot(chunk, len(bases), 0))


def _slot(chunk: int, index: int, slot: int) -> int:
    """Bytes from a lane's column to its ``slot`` for base ``index``."""
    return 4 * WARP * (chunk * index + slot)


def _sort_words(p: Program, base: str, values: Sequence[str], layout: Layout, lane: str, region: str) -> list[Item]:
    """Sort (value, place) as one integer: the place in the low bits, of which half precision leaves enough."""
    mask = (1 << TAG_BITS) - 1
    part = p.op("and.b32", lane, layout.group - 1)
    start = p.op("mad.lo.u32", p.op("sub.u32", lane, part), 4, region)
    words: list[Item] = []
    for slot, value in enumerate(values):
        tag = p.op("add.u32", part, WARP * slot)
        word = p.op("lop3.b32", value, ~mask & 0xFFFFFFFF, tag, "0xea")  # (value & ~mask) | tag
        words.append((_flip_negative(p, word) if base == "dot" else word,))
    items: list[Item] = []
    for (word,) in sort(p, words, layout, Values("s32"), lane):
        word = _flip_negative(p, word) if base == "dot" else word
        place = p.op("mad.lo.u32", p.op("and.b32", word, mask), 4, start)
        items.append((p.op("and.b32", word, ~mask & 0xFFFFFFFF), place))
    return items


def _flip_negative(p: Program, word: str) -> str:
    """Invert the lower bits of a negative float, so that integer order is float order; its own inverse."""
    sign = p.op("shr.s32", word, 31)
    return p.op("lop3.b32", word, sign, "0x7fffffff", "0x78")  # word ^ (sign & 0x7fffffff)


def _add_slopes(p: Program, base: str, slope: str, query: str, key: str, query_grad: str, key_grad: str) -> None:
    """Add what one base sends to one dimension of query and key."""
    if base == "dot":
        p.do("fma.rn.f32", query_grad, slope, key, query_grad)
        p.do("fma.rn.f32", key_grad, slope, query, key_grad)
        return
    difference = p.op("sub.f32", query, key)
    if base == "dis":
        step = p.op("add.f32", difference, difference)
    else:  # the sign of the difference, 0 for 0
        away = p.op("setp.neu.f32", difference, "0f00000000", kind="pred")
        signed_one = p.op("copysign.f32", difference, "0f3F800000")
        step = p.op("selp.b32", signed_one, difference, away)
    part = p.op("mul.f32", slope, step)
    p.do("add.f32", query_grad, query_grad, part)
    p.do("sub.f32", key_grad, key_grad, part)


class GroupSums:
    """Sums over the groups of a warp, by halving: a lane keeps one half of its values and sends the other."""

    def __init__(self, p: Program, layout: Layout, lane: str) -> None:
        self.p, self.steps, repeated = p, list[tuple[int, str | None]](), 0
        count = layout.chunk
        part = p.op("and.b32", lane, layout.group - 1)
        place = p.op("mul.lo.u32", part, layout.chunk)
        distance = layout.group
        while distance < WARP:
            if count % 2:  # an odd number of values: every lane keeps all of them
                repeated |= distance
                self.steps.append((distance, None))
            else:
                count //= 2
                upper = p.lane_bit(lane, distance)
                place = p.op("add.u32", place, p.op("selp.b32", count, 0, upper))
                self.steps.append((distance, upper))
            distance *= 2
        self.offset = p.op("mul.wide.u32", place, 4, kind="b64")
        """Bytes from the start of a row of ``d`` values to the first this lane ends with."""
        self.first = p.op("setp.eq.u32", p.op("and.b32", lane, repeated), 0, kind="pred")
        """Whether this lane is the one to store them."""

    def reduce(self, values: Sequence[str]) -> list[str]:
        """This lane's share of the sums."""
        p, values = self.p, list(values)
        for distance, upper in self.steps:
            if upper is None:
                values = [p.op("add.f32", value, p.shuffle(value, distance)) for value in values]
                continue
            half = len(values) // 2
            pairs = list(zip(values[:half], values[half:], strict=True))
            kept = [p.op("selp.b32", high, low, upper) for low, high in pairs]
            sent = [p.op("selp.b32", low, high, upper) for low, high in pairs]
            values = [p.op("add.f32", a, p.shuffle(b, distance)) for a, b in zip(kept, sent, strict=True)]
        return values

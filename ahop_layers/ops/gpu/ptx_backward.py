"""PTX body of the backward kernel for NVIDIA GPUs."""

from collections.abc import Sequence
from functools import lru_cache, partial
from math import gcd

from ahop_layers.ops.gpu.ptx import WARP, Item, Layout, Program, Tagged, Values, sort
from ahop_layers.ops.gpu.ptx_kernels import (
    MAX_UNROLLED,
    MIN_SKIPPED,
    FlatWeights,
    dissimilarities,
    distances,
    load_dimensions,
    read_arguments,
)

TAG_BITS = 10
"""Low bits of a word that hold the origin of a half-precision similarity: 32 slots per lane, 32 lanes per group."""

BACKWARD_ARGUMENTS = (
    "key", "key_stride", "query", "query_stride", "weight", "grad", "grad_stride", "grad_key_stride",
    "key_grad", "query_grad", "weight_grad", "number", "count", "statistics",
)  # fmt: skip
BACKWARD_CONSTRAINTS = "=r," + "l," * len(BACKWARD_ARGUMENTS) + "r,r"


@lru_cache(maxsize=None)
def score_backward(
    layout: Layout,
    n: int,
    bases: tuple[str, ...],
    dtype: str,
    warps: int = 1,
    tagged_words: bool = False,
    may_skip: bool = False,
    grad_dtype: str = "f32",
    of_softmax: bool = False,
) -> str:
    """Computes gradients: a warp keeps a tile of keys in registers and loops over queries, then tiles.

    The derivative of a score with respect to a similarity is the weight at the similarity's rank. Each similarity
    carries the shared-memory address where its block expects that weight; after the sort, position ``j`` writes weight
    ``j`` to the address it carries. Each lane has its own bank, so accesses do not conflict. The address stands in a
    second register or, with ``tagged_words``, in low bits of the value that half precision does not use.

    Several ``warps`` process the same queries with different keys and add up the gradients of the queries in shared
    memory. ``may_skip`` skips the sort where the weights are constant; the gradient of the weights is then undefined.

    With ``of_softmax``, ``grad`` holds gradients of softmax weights in float32, and is overwritten by the weights.
    ``statistics`` has two numbers per query: the log-sum-exp of its scores in base 2, and the sum of its weights
    times their gradients. The sort that gives the order also gives the score.
    """
    p = Program()
    arguments, (all_rows, tiles) = read_arguments(p, BACKWARD_ARGUMENTS, 2)
    lane = p.op("mov.u32", "%laneid")
    warp = p.op("shr.u32", p.op("mov.u32", "%tid.x"), 5)
    slots_bytes = _slot(layout.chunk, len(bases), 0)
    scratch = p.op("mad.lo.u32", warp, slots_bytes, p.op("mov.u32", "scratch"))
    column = p.op("mad.lo.u32", lane, 4, scratch)
    chunk, looped = layout.chunk, n > MAX_UNROLLED and not of_softmax
    row_bytes, weight_bytes = 4 * layout.dims, 4 * layout.blocks
    flat = None
    if may_skip and n >= MIN_SKIPPED and not of_softmax:
        flat = FlatWeights(p, layout, n, len(bases), arguments["weight"], lane)
    # Lanes that share blocks read the derivatives from the columns of all of them.
    first_column = p.op("mad.lo.u32", p.op("and.b32", lane, WARP - layout.split), 4, scratch)
    sums = WarpSums(p, layout.per_lane, layout.lanes, layout.lanes, lane, grad_unit(layout))
    weight_sums = WarpSums(p, chunk, layout.group, layout.lanes, lane)
    part = p.op("and.b32", lane, layout.lanes - 1)
    key_grad_offset = p.op("mul.wide.u32", part, 4 * grad_unit(layout), kind="b64")
    exchange = RowExchange(p, layout, warps, warp, lane, warps * slots_bytes)
    weight_grads = [[p.op("mov.b32", 0) for _ in range(chunk)] for _ in bases]
    values = [p.new() for _ in range(chunk)]
    # Index of this lane's key; lanes past the last key repeat it and store nothing.
    pair = p.op("shr.u32", p.op("mov.u32", "%tid.x"), layout.lanes.bit_length() - 1)
    number = p.op("add.s64", arguments["number"], p.op("cvt.u64.u32", pair, kind="b64"), kind="b64")
    again = p.op("setp.ne.u32", 0, 0, kind="pred")

    p.label("TILE")
    valid = p.op("setp.lt.s64", number, arguments["count"], kind="pred")
    own = p.op("min.s64", number, p.op("sub.s64", arguments["count"], 1, kind="b64"), kind="b64")
    key, grad_place = (
        p.op("mad.lo.s64", own, arguments[stride], arguments[start], kind="b64")
        for start, stride in (("key", "key_stride"), ("grad", "grad_key_stride"))
    )
    keys = load_dimensions(p, layout, key, dtype)
    key_grads = [p.op("mov.b32", 0) for _ in keys]
    query = p.op("mov.b64", arguments["query"], kind="b64")
    row_place = p.op("mov.b64", arguments["query_grad"], kind="b64")
    rows = p.op("mov.b32", all_rows)
    statistics = p.op("mov.b64", arguments["statistics"], kind="b64")

    p.label("ROW")
    grad = p.load_or_zero(grad_place, grad_dtype, valid)
    log_sum, mean = p.load_vector(statistics, [p.new(), p.new()]) if of_softmax else ("", "")
    against = p.op("neg.f32", grad)  # derivative of the loss with respect to a weighted dissimilarity
    row_sums = p.op("add.s64", row_place, sums.offset, kind="b64")
    before: list[str] = []
    if warps == 1:  # loaded early, to be added after the sort
        stored = p.op("and.pred", sums.first, again, kind="pred")
        before = p.load_units(row_sums, sums.count, stored, sums.unit, sums.step)
    sorted_items: list[tuple[list[Item], list[str]]] = []  # of each base, with the weights of these positions
    weight, region = p.op("mov.b64", arguments["weight"], kind="b64"), p.op("mov.b32", 0)
    row = load_dimensions(p, layout, query, dtype) if layout.block_size > 1 and not looped else None

    def compare(index: int) -> None:
        dissimilarities(p, layout, bases[index], row or load_dimensions(p, layout, query, dtype), keys, values, lane)

    def deliver_weights(left: str, indices: range) -> None:
        p.switch(left, [partial(compare, index) for index in indices])
        if tagged_words:
            items = _sort_words(p, values, layout, lane, p.op("add.u32", scratch, region))
        else:
            own_column = p.op("add.u32", column, region)
            places = [p.op("add.u32", own_column, _slot(chunk, 0, slot)) for slot in range(chunk)]
            items = sort(p, list(zip(values, places, strict=True)), layout, Tagged(), lane)
        words = p.load_words(weight, chunk)
        for (_, place), word in zip(items, words, strict=True):
            p.do("st.shared.b32", f"[{place}]", word)
        if of_softmax:
            sorted_items.append((items, words))
        else:
            p.switch(left, [partial(_add_products, p, against, items, weight_grads[index]) for index in indices])
        p.do("add.u32", region, region, _slot(chunk, 1, 0))
        p.do("add.s64", weight, weight, weight_bytes)

    def deliver_constants(flat: FlatWeights) -> None:
        for index, constant in enumerate(flat.constants):
            for slot in range(chunk):
                p.do("st.shared.b32", f"[{column}+{_slot(chunk, index, slot)}]", constant)

    def deliver_sorted() -> None:
        p.for_each_base(len(bases), looped, deliver_weights)

    if flat:
        p.either(flat.holds, partial(deliver_constants, flat), deliver_sorted)
    else:
        deliver_sorted()
    if of_softmax:
        share = _share(p, layout, sorted_items, log_sum)
        first = p.op("setp.eq.u32", part, 0, kind="pred")
        p.do(f"@{p.op('and.pred', first, valid, kind='pred')} st.global.b32", f"[{grad_place}]", share)
        grad = p.op("selp.b32", p.op("mul.f32", share, p.op("sub.f32", grad, mean)), 0, valid)
        against = p.op("neg.f32", grad)
        for (items, _), totals in zip(sorted_items, weight_grads, strict=True):
            _add_products(p, against, items, totals)
        p.do("add.s64", statistics, statistics, 8)
    p.do("bar.warp.sync", "0xffffffff")
    queries = row or load_dimensions(p, layout, query, dtype)
    query_grads = []
    for block in range(layout.held):
        slopes = []
        owner, slot = divmod(block, chunk)
        for index, base in enumerate(bases):
            at_rank = p.op("ld.shared.b32", f"[{first_column}+{4 * owner + _slot(chunk, index, slot)}]")
            slopes.append(p.op("mul.f32", at_rank, grad if base == "dot" else against))
        for index in range(block * layout.width, (block + 1) * layout.width):
            query_grads.append(p.op("mov.b32", 0))
            for base, slope in zip(bases, slopes, strict=True):
                _add_slopes(p, base, slope, queries[index], keys[index], query_grads[-1], key_grads[index])
    p.do("bar.warp.sync", "0xffffffff")  # all reads finish before the next query overwrites the weights
    reduced = sums.reduce(query_grads)
    if warps == 1:
        totals = [p.op("add.f32", a, b) for a, b in zip(before, reduced, strict=True)]
        p.store_words(row_sums, totals, sums.first, sums.unit, sums.step)
    else:
        exchange.add(reduced, sums, row_place, again)
    p.do("add.s64", row_place, row_place, row_bytes)
    p.repeat("ROW", rows, (query, arguments["query_stride"]), (grad_place, arguments["grad_stride"]))

    key_grad_place = p.op("mad.lo.s64", own, row_bytes, arguments["key_grad"], kind="b64")
    key_grad_place = p.op("add.s64", key_grad_place, key_grad_offset, kind="b64")
    p.store_words(key_grad_place, key_grads, valid, sums.unit, sums.step)
    p.do("setp.eq.u32", again, 0, 0)
    p.repeat("TILE", tiles, (number, warps * layout.pairs))
    place = p.op("add.s64", arguments["weight_grad"], weight_sums.offset, kind="b64")
    for index, totals in enumerate(weight_grads):
        reduced = weight_sums.reduce(totals)
        p.store_words(place, reduced, weight_sums.first, weight_sums.unit, weight_sums.step, weight_bytes * index)
    p.do("mov.b32", "$0", 0)
    return p.text(shared_bytes(layout, len(bases), warps))


def shared_bytes(layout: Layout, bases: int, warps: int) -> int:
    """Returns the shared memory of :func:`score_backward`: derivatives of each warp, and two rows of gradients."""
    rows = 2 * warps * 4 * layout.dims if warps > 1 else 0
    return warps * _slot(layout.chunk, bases, 0) + rows


def grad_unit(layout: Layout) -> int:
    """Returns how many adjacent gradients of a row belong to one lane.

    The lanes store their gradients in turns, one unit each, so that a warp writes adjacent addresses. A unit is a
    stretch, as in the inputs, if the sums over pairs leave stretches whole or divide them evenly.
    """
    kept = [layout.per_lane] if layout.lanes == 1 else _halves(layout.per_lane, layout.lanes)
    stretch = layout.per_lane if layout.lanes == 1 else layout.stretch
    return stretch if all(count % stretch == 0 or stretch % count == 0 for count in kept) else gcd(kept[-1], 4)


def _add_products(p: Program, factor: str, items: Sequence[Item], totals: Sequence[str]) -> None:
    for total, (value, _) in zip(totals, items, strict=True):
        p.do("fma.rn.f32", total, factor, value, total)


def _share(
    p: Program, layout: Layout, sorted_items: Sequence[tuple[Sequence[Item], Sequence[str]]], log_sum: str
) -> str:
    """Returns the softmax weight of a pair from the sorted dissimilarities of each base."""
    score = p.op("mov.b32", 0)
    for items, words in sorted_items:
        for (value, _), word in zip(items, words, strict=True):
            score = p.op("fma.rn.f32", value, word, score)
    for distance in distances(1, layout.group):
        score = p.op("add.f32", score, p.shuffle(score, distance))
    exponent = p.op("sub.f32", p.op("mul.f32", score, "0fBFB8AA3B"), log_sum)  # -log2(e)
    return p.op("ex2.approx.ftz.f32", exponent)


def _slot(chunk: int, index: int, slot: int) -> int:
    """Returns the offset in bytes of ``slot`` for base ``index`` within a lane's column."""
    return 4 * WARP * (chunk * index + slot)


def _sort_words(p: Program, values: Sequence[str], layout: Layout, lane: str, region: str) -> list[Item]:
    """Sorts (value, address) packed in one integer, with the address in low bits that half precision does not use."""
    mask = (1 << TAG_BITS) - 1
    part = p.op("and.b32", lane, layout.group - 1)
    start = p.op("mad.lo.u32", p.op("sub.u32", lane, part), 4, region)
    words: list[Item] = []
    for slot, value in enumerate(values):
        tag = p.op("add.u32", part, WARP * slot)
        word = p.op("lop3.b32", value, ~mask & 0xFFFFFFFF, tag, "0xea")  # (value & ~mask) | tag
        words.append((_flip_negative(p, word),))
    items: list[Item] = []
    for (word,) in sort(p, words, layout, Values("s32"), lane):
        word = _flip_negative(p, word)
        place = p.op("mad.lo.u32", p.op("and.b32", word, mask), 4, start)
        middle = p.op("lop3.b32", word, ~mask & 0xFFFFFFFF, (mask + 1) // 2, "0xea")  # of all values with these bits
        items.append((middle, place))
    return items


def _flip_negative(p: Program, word: str) -> str:
    """Inverts the lower bits of a negative float, so that integer order equals float order; its own inverse."""
    sign = p.op("shr.s32", word, 31)
    return p.op("lop3.b32", word, sign, "0x7fffffff", "0x78")  # word ^ (sign & 0x7fffffff)


def _add_slopes(p: Program, base: str, slope: str, query: str, key: str, query_grad: str, key_grad: str) -> None:
    """Adds the gradient of one base to one dimension of query and key."""
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
    p.do("fma.rn.f32", query_grad, slope, step, query_grad)
    p.do("fma.rn.f32", key_grad, p.op("neg.f32", slope), step, key_grad)


class WarpSums:
    """Sums over the pairs of a warp by recursive halving: a lane keeps half of its values and sends the other half.

    ``group`` lanes hold ``count`` different values each; the further ``lanes`` of a pair hold copies. The lanes store
    their sums in turns, one ``unit`` each, by default all their sums.
    """

    def __init__(self, p: Program, count: int, group: int, lanes: int, lane: str, unit: int | None = None) -> None:
        self.p, self.steps, repeated = p, list[tuple[int, str | None]](), lanes - group
        self.unit, self.step = unit or count, group
        place = p.op("mul.lo.u32", p.op("and.b32", lane, group - 1), self.unit)
        for distance, half in zip(distances(lanes, WARP), _halves(count, lanes)[1:], strict=True):
            if half == count:  # with an odd number of values, every lane keeps all of them
                repeated |= distance
                self.steps.append((distance, None))
            else:
                count = half
                upper = p.lane_bit(lane, distance)
                by = count * (1 if count % self.unit else self.step)
                place = p.op("add.u32", place, p.op("selp.b32", by, 0, upper))
                self.steps.append((distance, upper))
        self.count = count
        """Number of sums that this lane holds."""
        self.offset = p.op("mul.wide.u32", place, 4, kind="b64")
        """Offset in bytes, within a row of values, of the first sum that this lane holds."""
        self.first = p.op("setp.eq.u32", p.op("and.b32", lane, repeated), 0, kind="pred")
        """Whether this lane stores its sums."""

    def reduce(self, values: Sequence[str]) -> list[str]:
        """Returns the sums that this lane holds."""
        p, values = self.p, list(values)
        for distance, upper in self.steps:
            if upper is None:
                values = [p.op("add.f32", value, p.shuffle(value, distance)) for value in values]
            else:
                values = p.exchange_halves(values, distance, upper)
        return values


def _halves(count: int, lanes: int) -> list[int]:
    """Returns the number of values that a lane of :class:`WarpSums` holds at first and after each step."""
    counts = [count]
    for _ in distances(lanes, WARP):
        counts.append(counts[-1] if counts[-1] % 2 else counts[-1] // 2)
    return counts


class RowExchange:
    """Adds up a row of gradients over the warps of a program in shared memory; each warp adds a part to the row.

    Two buffers take turns, so that one barrier per row is enough.
    """

    def __init__(self, p: Program, layout: Layout, warps: int, warp: str, lane: str, start: int) -> None:
        self.p, self.warps, self.row_bytes = p, warps, 4 * layout.dims
        self.unit = gcd(layout.dims, 4)
        self.units = -(-layout.dims // (self.unit * WARP * warps))
        self.buffer = p.op("add.u32", p.op("mov.u32", "scratch"), start)
        self.other = p.op("add.u32", self.buffer, warps * self.row_bytes)
        self.warp = warp
        self.first = p.op("mad.lo.u32", warp, WARP * self.units, lane)
        self.last = layout.dims // self.unit

    def add(self, words: Sequence[str], sums: WarpSums, row: str, again: str) -> None:
        """Adds the warps' sums of a row to the row in memory."""
        p, unit = self.p, self.unit
        own = p.op("mad.lo.u32", self.warp, self.row_bytes, self.buffer)
        own = p.op("add.u32", own, p.op("cvt.u32.u64", sums.offset))
        p.store_words(own, words, sums.first, sums.unit, sums.step, space="shared")
        p.do("bar.sync", 0)
        for index in range(self.units):
            number = p.op("add.u32", self.first, WARP * index)
            inside = p.op("setp.lt.u32", number, self.last, kind="pred")
            place = p.op("mad.lo.u32", number, 4 * unit, self.buffer)
            totals = ["0f00000000"] * unit
            for warp in range(self.warps):
                part = [p.op("mov.b32", 0) for _ in range(unit)]
                p.load_vector(f"{place}+{warp * self.row_bytes}", part, inside, "shared")
                totals = [p.op("add.f32", a, b) for a, b in zip(totals, part, strict=True)]
            p.add_words(p.op("mad.wide.u32", number, 4 * unit, row, kind="b64"), totals, inside, again, unit)
        swapped = p.op("mov.b32", self.buffer)
        p.do("mov.b32", self.buffer, self.other)
        p.do("mov.b32", self.other, swapped)

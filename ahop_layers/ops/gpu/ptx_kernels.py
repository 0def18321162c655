"""PTX bodies of the NVIDIA kernels: forward and backward of the adaptive similarity.

The kernels sort *dissimilarities*, the negatives of base similarities, in ascending order. The score is the negative
dot product of the sorted dissimilarities and the weights.
"""

from collections.abc import Sequence
from functools import lru_cache, partial

from ahop_layers.ops.gpu.ptx import WARP, Item, Layout, Program, Tagged, Values, sort

MAX_UNROLLED = 64
"""Up to this number of dimensions the code has one network per base; beyond it, all bases share one in a loop."""

TAG_BITS = 10
"""Low bits of a word that hold the origin of a half-precision similarity: 32 slots per lane, 32 lanes per group."""


def dissimilarity(p: Program, base: str, query: str, key: str) -> str:
    """Returns the dissimilarity in float32: the squared or absolute difference, or the negative product."""
    if base == "dot":
        return p.op("mul.f32", p.op("neg.f32", query), key)
    difference = p.op("sub.f32", query, key)
    return p.op("mul.f32", difference, difference) if base == "dis" else p.op("abs.f32", difference)


SCORE_ARGUMENTS = ("key", "key2", "query", "query_stride", "weight", "out", "out2", "out_stride")
SCORE_CONSTRAINTS = "=r," + "l," * len(SCORE_ARGUMENTS) + "r,r,r"


@lru_cache(maxsize=None)
def score(layout: Layout, bases: tuple[str, ...], dtype: str) -> str:
    """Scores one key per group (float32) or two packed keys (half precision) against ``rows`` consecutive queries."""
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
    values = [p.new() for _ in keys]
    scores = [p.new() for _ in range(1 + packed)]

    p.label("ROW")
    for total in scores:
        p.do("mov.b32", total, 0)
    weight = p.op("mov.b64", arguments["weight"], kind="b64")
    order = Values(f"NaN.{dtype}x2" if packed else "NaN.f32")

    def add_score(left: str, indices: range) -> None:
        query = arguments["query"]
        p.switch(left, [partial(_dissimilarities, p, bases[i], query, keys, dtype, values) for i in indices])
        items = sort(p, [(value,) for value in values], layout, order, lane)
        p.switch(left, [partial(_weigh, p, bases[i], items, weight, dtype, scores) for i in indices])
        p.do("add.s64", weight, weight, 4 * layout.dims)

    p.for_each_base(len(bases), layout.dims > MAX_UNROLLED, add_score)
    for total, address, predicate in zip(scores, ("out", "out2"), keep, strict=False):
        result = p.op("neg.f32", total)
        for distance in (2**level for level in range(layout.group.bit_length() - 1)):
            result = p.op("add.f32", result, p.shuffle(result, distance))
        p.do(f"@{predicate} st.global.b32", f"[{arguments[address]}]", result)
        p.do("add.s64", arguments[address], arguments[address], arguments["out_stride"])
    p.repeat("ROW", rows, (arguments["query"], arguments["query_stride"]))
    p.do("mov.b32", "$0", 0)
    return p.text()


def _arguments(p: Program, names: Sequence[str], numbers: int) -> tuple[dict[str, str], list[str]]:
    """Returns registers for the operands of the block: 64-bit operands by name, then ``numbers`` 32-bit operands."""
    wide = {name: p.op("mov.b64", f"${index}", kind="b64") for index, name in enumerate(names, 1)}
    return wide, [p.op("mov.b32", f"${len(names) + 1 + index}") for index in range(numbers)]


def _dissimilarities(
    p: Program, base: str, query: str, keys: Sequence[str], dtype: str, results: Sequence[str]
) -> None:
    """Computes dissimilarities to one key, or in half precision to two packed keys (``dis``: not yet squared)."""
    if dtype == "f32":
        queries = p.load_words(query, len(keys))
    else:
        picks = [(word, pick) for word in p.load_words(query, len(keys) // 2) for pick in ("0x1010", "0x3232")]
        queries = [p.op("prmt.b32", word, word, pick) for word, pick in picks]
    for x, k, result in zip(queries, keys, results, strict=True):
        if dtype == "f32":
            p.do("mov.b32", result, dissimilarity(p, base, x, k))
        elif base == "dot":
            p.do(f"mul.{dtype}x2", result, p.op(f"neg.{dtype}x2", x), k)
        else:
            p.do(f"abs.{dtype}x2", result, p.op(f"sub.{dtype}x2", x, k))


def _weigh(p: Program, base: str, items: Sequence[Item], weight: str, dtype: str, totals: Sequence[str]) -> None:
    """Adds ``weights . values`` of each key. Two partial sums hide latency and round better than one."""
    sums = [["0f00000000"] * 2 for _ in totals]
    weights = p.load_words(weight, len(items))
    for position, (item, factor) in enumerate(zip(items, weights, strict=True)):
        values = item if dtype == "f32" else p.unpack(item[0], dtype)
        for chains, value in zip(sums, values, strict=True):
            if base == "dis" and dtype != "f32":
                value = p.op("mul.f32", value, value)
            chains[position % 2] = p.op("fma.rn.f32", value, factor, chains[position % 2])
    for total, chains in zip(totals, sums, strict=True):
        p.do("add.f32", total, total, p.op("add.f32", *chains))


BACKWARD_ARGUMENTS = (
    "key", "key_stride", "query", "query_stride", "weight", "grad", "grad_stride", "grad_key_stride",
    "key_grad", "query_grad", "weight_grad", "number", "count",
)  # fmt: skip
BACKWARD_CONSTRAINTS = "=r," + "l," * len(BACKWARD_ARGUMENTS) + "r,r"


@lru_cache(maxsize=None)
def score_backward(layout: Layout, bases: tuple[str, ...], dtype: str) -> str:
    """Computes the gradients of one warp: it keeps a tile of keys in registers and loops over queries, then tiles.

    The derivative of a score with respect to a similarity is the weight at the similarity's rank. Each similarity
    carries the shared-memory address where its dimension expects that weight; after the sort, position ``j`` writes
    weight ``j`` to the address it carries. Each lane has its own bank, so accesses do not conflict. Float32 carries the
    address in a second register; half precision carries it in the low bits of the value, which it does not use.
    """
    p = Program()
    arguments, (all_rows, tiles) = _arguments(p, BACKWARD_ARGUMENTS, 2)
    lane = p.op("mov.u32", "%laneid")
    scratch = p.op("mov.u32", "scratch")
    column = p.op("mad.lo.u32", lane, 4, scratch)
    chunk, row_bytes = layout.chunk, 4 * layout.dims
    sums = GroupSums(p, layout, lane)
    weight_grads = [[p.op("mov.b32", 0) for _ in range(chunk)] for _ in bases]
    values = [p.new() for _ in range(chunk)]
    number = arguments["number"]  # index of this lane's key; lanes past the last key repeat it and store nothing
    again = p.op("setp.ne.u32", 0, 0, kind="pred")

    p.label("TILE")
    valid = p.op("setp.lt.s64", number, arguments["count"], kind="pred")
    own = p.op("min.s64", number, p.op("sub.s64", arguments["count"], 1, kind="b64"), kind="b64")
    key, grad_place = (
        p.op("mad.lo.s64", own, arguments[stride], arguments[start], kind="b64")
        for start, stride in (("key", "key_stride"), ("grad", "grad_key_stride"))
    )
    keys = p.load_floats(key, chunk, dtype)
    key_grads = [p.op("mov.b32", 0) for _ in keys]
    query = p.op("mov.b64", arguments["query"], kind="b64")
    row_place = p.op("add.s64", arguments["query_grad"], sums.offset, kind="b64")
    rows = p.op("mov.b32", all_rows)

    p.label("ROW")
    grad = p.op("mov.b32", 0)
    p.do(f"@{valid} ld.global.b32", grad, f"[{grad_place}]")
    against = p.op("neg.f32", grad)  # derivative of the loss with respect to a weighted dissimilarity
    weight, region = p.op("mov.b64", arguments["weight"], kind="b64"), p.op("mov.b32", 0)

    def deliver_weights(left: str, indices: range) -> None:
        p.switch(left, [partial(_exact_dissimilarities, p, bases[i], query, keys, dtype, values) for i in indices])
        if dtype == "f32":
            own_column = p.op("add.u32", column, region)
            places = [p.op("add.u32", own_column, _slot(chunk, 0, slot)) for slot in range(chunk)]
            items = sort(p, list(zip(values, places, strict=True)), layout, Tagged(), lane)
        else:
            items = _sort_words(p, values, layout, lane, p.op("add.u32", scratch, region))
        for (_, place), word in zip(items, p.load_words(weight, chunk), strict=True):
            p.do("st.shared.b32", f"[{place}]", word)
        p.switch(left, [partial(_add_products, p, against, items, weight_grads[i]) for i in indices])
        p.do("add.u32", region, region, _slot(chunk, 1, 0))
        p.do("add.s64", weight, weight, row_bytes)

    p.for_each_base(len(bases), layout.dims > MAX_UNROLLED, deliver_weights)
    p.do("bar.warp.sync", "0xffffffff")
    queries = p.load_floats(query, chunk, dtype)
    query_grads = []
    for slot, (x, k, key_grad) in enumerate(zip(queries, keys, key_grads, strict=True)):
        query_grad = p.op("mov.b32", 0)
        for index, base in enumerate(bases):
            at_rank = p.op("ld.shared.b32", f"[{column}+{_slot(chunk, index, slot)}]")
            slope = p.op("mul.f32", at_rank, grad if base == "dot" else against)
            _add_slopes(p, base, slope, x, k, query_grad, key_grad)
        query_grads.append(query_grad)
    p.do("bar.warp.sync", "0xffffffff")  # all reads finish before the next query overwrites the weights
    p.add_words(row_place, sums.reduce(query_grads), sums.first, again)
    p.do("add.s64", row_place, row_place, row_bytes)
    p.repeat("ROW", rows, (query, arguments["query_stride"]), (grad_place, arguments["grad_stride"]))

    key_grad_place = p.op("mad.lo.s64", own, row_bytes, arguments["key_grad"], kind="b64")
    p.store_words(key_grad_place, key_grads, valid)
    p.do("setp.eq.u32", again, 0, 0)
    p.repeat("TILE", tiles, (number, layout.pairs))
    place = p.op("add.s64", arguments["weight_grad"], sums.offset, kind="b64")
    for index, totals in enumerate(weight_grads):
        p.store_words(place, sums.reduce(totals), sums.first, offset=row_bytes * index)
    p.do("mov.b32", "$0", 0)
    return p.text(shared_bytes=_slot(chunk, len(bases), 0))


def _exact_dissimilarities(
    p: Program, base: str, query: str, keys: Sequence[str], dtype: str, results: Sequence[str]
) -> None:
    for x, k, result in zip(p.load_floats(query, len(keys), dtype), keys, results, strict=True):
        p.do("mov.b32", result, dissimilarity(p, base, x, k))


def _add_products(p: Program, factor: str, items: Sequence[Item], totals: Sequence[str]) -> None:
    for total, (value, _) in zip(totals, items, strict=True):
        p.do("fma.rn.f32", total, factor, value, total)


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
        items.append((p.op("and.b32", word, ~mask & 0xFFFFFFFF), place))
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
    part = p.op("mul.f32", slope, step)
    p.do("add.f32", query_grad, query_grad, part)
    p.do("sub.f32", key_grad, key_grad, part)


class GroupSums:
    """Sums over the groups of a warp by recursive halving: a lane keeps half of its values and sends the other half."""

    def __init__(self, p: Program, layout: Layout, lane: str) -> None:
        self.p, self.steps, repeated = p, list[tuple[int, str | None]](), 0
        count = layout.chunk
        part = p.op("and.b32", lane, layout.group - 1)
        place = p.op("mul.lo.u32", part, layout.chunk)
        distance = layout.group
        while distance < WARP:
            if count % 2:  # with an odd number of values, every lane keeps all of them
                repeated |= distance
                self.steps.append((distance, None))
            else:
                count //= 2
                upper = p.lane_bit(lane, distance)
                place = p.op("add.u32", place, p.op("selp.b32", count, 0, upper))
                self.steps.append((distance, upper))
            distance *= 2
        self.offset = p.op("mul.wide.u32", place, 4, kind="b64")
        """Offset in bytes, within a row of ``d`` values, of the first sum that this lane holds."""
        self.first = p.op("setp.eq.u32", p.op("and.b32", lane, repeated), 0, kind="pred")
        """Whether this lane stores its sums."""

    def reduce(self, values: Sequence[str]) -> list[str]:
        """Returns the sums that this lane holds."""
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

"""PTX body of the forward kernel for NVIDIA GPUs.

The kernels sort *dissimilarities* of blocks, the negatives of base similarities, in ascending order. The score is the
negative dot product of the sorted dissimilarities and the weights. Bases of single dimensions that have the same order,
that of the absolute differences, share one sort.
"""

from collections.abc import Sequence
from functools import lru_cache, partial

from ahop_layers.ops.gpu.ptx import Layout, Program, Values, sort

MAX_UNROLLED = 64
"""Up to this number of blocks the code has one network per base; beyond it, all bases share one in a loop."""

MIN_SKIPPED = 9
"""From this number of blocks on, a branch skips the network where the weights make the order irrelevant."""


SCORE_ARGUMENTS = ("key", "key2", "query", "query_stride", "weight", "out", "out2", "out_stride")
SCORE_CONSTRAINTS = "=r," + "l," * len(SCORE_ARGUMENTS) + "r,r,r"


@lru_cache(maxsize=None)
def score(layout: Layout, n: int, bases: tuple[str, ...], dtype: str, packed: bool = False, out: str = "f32") -> str:
    """Scores one key per group of lanes, or two packed keys, against ``rows`` consecutive queries.

    ``packed`` computes in half precision, two keys at a time, which only blocks of one dimension allow. ``out`` is the
    dtype of the scores.
    """
    p = Program()
    arguments, (rows, valid, valid2) = read_arguments(p, SCORE_ARGUMENTS, 3)
    keep = [p.op("setp.ne.u32", flag, 0, kind="pred") for flag in (valid, valid2)]
    lane = p.op("mov.u32", "%laneid")
    looped = n > MAX_UNROLLED
    skips = n >= MIN_SKIPPED and "near" not in bases
    flat = FlatWeights(p, layout, n, len(bases), arguments["weight"], lane) if skips else None
    sorts = _sorts(layout, bases, packed)
    if packed:
        both = zip(*(_load_words(p, layout, arguments[name]) for name in ("key", "key2")), strict=True)
        keys = [p.op("prmt.b32", a, b, pick) for a, b in both for pick in ("0x5410", "0x7632")]
    else:
        keys = load_dimensions(p, layout, arguments["key"], dtype)
    values = [p.new() for _ in range(layout.chunk)]
    scores = [p.new() for _ in range(1 + packed)]

    p.label("ROW")
    for total in scores:
        p.do("mov.b32", total, 0)
    query = arguments["query"]
    # Wide blocks need few registers for values and keep the query in registers for all bases.
    row = load_dimensions(p, layout, query, dtype) if layout.block_size > 1 and not looped else None

    def compare(base: str) -> None:
        if packed:
            _packed_dissimilarities(p, base, _load_words(p, layout, query), keys, dtype, values)
        else:
            dissimilarities(p, layout, base, row or load_dimensions(p, layout, query, dtype), keys, values, lane)

    def weigh(ordered: list[str], base: str, members: list[int]) -> None:
        for index in members:
            weights, rates = (4 * layout.blocks * (index + after) for after in (0, len(bases)))
            factors = p.load_words(arguments["weight"], layout.chunk, weights)
            change = bases[index] if bases[index] != base else None
            rate = p.load_words(arguments["weight"], 1, rates)[0] if change == "near" else ""
            _weigh(p, change, ordered, factors, rate, scores, dtype if packed else None)

    def add_score(left: str, indices: range) -> None:
        p.switch(left, [partial(compare, sorts[index][0]) for index in indices])
        kind = Values(f"NaN.{dtype}x2" if packed else "NaN.f32")
        ordered = [value for (value,) in sort(p, [(value,) for value in values], layout, kind, lane)]
        p.switch(left, [partial(weigh, ordered, *sorts[index]) for index in indices])

    def add_flat_score(flat: FlatWeights) -> None:
        queries = row or load_dimensions(p, layout, query, dtype)
        columns = zip(*(p.unpack(word, dtype) for word in keys), strict=True) if packed else (keys,)
        for total, column in zip(scores, columns, strict=True):
            for base, constant in zip(bases, flat.constants, strict=True):
                chains: list[str | None] = [None] * 4
                for slot, pair in enumerate(zip(queries, column, strict=True)):
                    pair = flat.without_padding(slot, pair)
                    chains[slot % 4] = _dissimilarity(p, base, *pair, chains[slot % 4])
                sums = [chain for chain in chains if chain is not None]
                while len(sums) > 1:
                    sums.append(p.op("add.f32", sums.pop(0), sums.pop(0)))
                p.do("fma.rn.f32", total, sums[0], constant, total)
            for distance in distances(layout.group, layout.lanes):
                p.do("add.f32", total, total, p.shuffle(total, distance))

    def add_sorted_score() -> None:
        p.for_each_base(len(sorts), looped, add_score)

    if flat:
        p.either(flat.holds, partial(add_flat_score, flat), add_sorted_score)
    else:
        add_sorted_score()
    for total, address, predicate in zip(scores, ("out", "out2"), keep, strict=False):
        result = p.op("neg.f32", total)
        for distance in distances(1, layout.group):
            result = p.op("add.f32", result, p.shuffle(result, distance))
        p.store(arguments[address], result, out, predicate)
        p.do("add.s64", arguments[address], arguments[address], arguments["out_stride"])
    p.repeat("ROW", rows, (query, arguments["query_stride"]))
    p.do("mov.b32", "$0", 0)
    return p.text()


def _sorts(layout: Layout, bases: Sequence[str], packed: bool) -> list[tuple[str, list[int]]]:
    """Returns the base whose dissimilarities each sort orders, and the indices of the bases that share it."""
    shared = [index for index, base in enumerate(bases) if base != "dot"]
    if layout.block_size > 1 or (len(shared) < 2 and "near" not in bases and not packed):
        shared = []
    alone = [(base, [index]) for index, base in enumerate(bases) if index not in shared]
    return [("l1", shared), *alone] if shared else alone


def distances(first: int, end: int) -> list[int]:
    """Returns the powers of two from ``first`` to below ``end``."""
    return [1 << level for level in range(first.bit_length() - 1, end.bit_length() - 1)]


def read_arguments(p: Program, names: Sequence[str], numbers: int) -> tuple[dict[str, str], list[str]]:
    """Returns registers for the operands of the block: 64-bit operands by name, then ``numbers`` 32-bit operands."""
    wide = {name: p.op("mov.b64", f"${index}", kind="b64") for index, name in enumerate(names, 1)}
    return wide, [p.op("mov.b32", f"${len(names) + 1 + index}") for index in range(numbers)]


def load_dimensions(p: Program, layout: Layout, address: str, dtype: str) -> list[str]:
    """Loads the dimensions of this lane, block by block, as float32."""
    item = 4 if dtype == "f32" else 2
    run_step = layout.readers * layout.run * layout.block_size * item
    step = layout.parts * layout.stretch * item
    return [
        value
        for run in range(layout.held // layout.run)
        for stretch in range(layout.run * layout.width // layout.stretch)
        for value in p.load_floats(address, layout.stretch, dtype, run * run_step + stretch * step)
    ]


def _load_words(p: Program, layout: Layout, address: str) -> list[str]:
    """Loads the dimensions of this lane in half precision, two per word."""
    runs = range(layout.held // layout.run)
    step = 2 * layout.readers * layout.run
    return [word for run in runs for word in p.load_words(address, layout.run // 2, run * step)]


class FlatWeights:
    """Finds weights that are constant for each base, as those of a dot product are: no order matters then.

    Attributes:
        holds: predicate, equal in all lanes of the warp: whether the weights of all bases are constant.
        constants: the weight of each base.
    """

    def __init__(self, p: Program, layout: Layout, n: int, bases: int, weight: str, lane: str) -> None:
        self.p, self.layout, self.n = p, layout, n
        part = p.op("and.b32", lane, layout.group - 1)
        first = p.op("mul.lo.u32", part, layout.chunk)
        start = p.op("sub.s64", weight, p.op("mul.wide.u32", first, 4, kind="b64"), kind="b64")
        equal = p.op("setp.eq.u32", 0, 0, kind="pred")
        self.constants = []
        for index in range(bases):
            offset = 4 * layout.blocks * index
            (constant,) = p.load_words(start, 1, offset)
            self.constants.append(constant)
            for place, word in enumerate(p.load_words(weight, layout.chunk, offset)):
                same = p.op("setp.eq.f32", word, constant, kind="pred")
                if layout.blocks > n:
                    padding = p.op("setp.ge.u32", p.op("add.u32", first, place), n, kind="pred")
                    same = p.op("or.pred", same, padding, kind="pred")
                equal = p.op("and.pred", equal, same, kind="pred")
        self.holds = p.op("vote.sync.all.pred", equal, "0xffffffff", kind="pred")
        self.reader = p.op("shr.u32", part, layout.split.bit_length() - 1)

    def without_padding(self, slot: int, pair: tuple[str, str]) -> tuple[str, str]:
        """Returns query and key values of a slot of this lane, or zeros if its block is padding."""
        p, layout = self.p, self.layout
        run, place = divmod(slot // layout.width, layout.run)
        block = run * layout.readers * layout.run + place
        if block + (layout.readers - 1) * layout.run < self.n:
            return pair
        number = p.op("mad.lo.u32", self.reader, layout.run, block)
        padding = p.op("setp.ge.u32", number, self.n, kind="pred")
        first, second = (p.op("selp.b32", 0, value, padding) for value in pair)
        return first, second


def dissimilarities(
    p: Program,
    layout: Layout,
    base: str,
    queries: Sequence[str],
    keys: Sequence[str],
    results: Sequence[str],
    lane: str,
) -> None:
    """Computes the dissimilarities of the blocks: sums of squared or absolute differences, or of negative products."""
    totals = []
    chains = 4 if layout.held == 1 else 2  # several partial sums hide latency and round better than one
    for block in range(layout.held):
        sums: list[str] = []
        for slot in range(block * layout.width, (block + 1) * layout.width):
            earlier = sums.pop(0) if len(sums) == chains else None
            sums.append(_dissimilarity(p, base, queries[slot], keys[slot], earlier))
        while len(sums) > 1:
            sums.append(p.op("add.f32", sums.pop(0), sums.pop(0)))
        totals += sums
    for distance in reversed(distances(1, layout.split)):
        totals = p.exchange_halves(totals, distance, p.lane_bit(lane, distance))
    for distance in distances(layout.group, layout.lanes):
        totals = [p.op("add.f32", total, p.shuffle(total, distance)) for total in totals]
    for result, total in zip(results, totals, strict=True):
        p.do("mov.b32", result, total)


def _dissimilarity(p: Program, base: str, query: str, key: str, earlier: str | None = None) -> str:
    """Returns the dissimilarity of one dimension, added to an earlier sum."""
    if base == "dot":
        factors = p.op("neg.f32", query), key
    else:
        difference = p.op("sub.f32", query, key)
        if base == "l1":
            distance = p.op("abs.f32", difference)
            return distance if earlier is None else p.op("add.f32", distance, earlier)
        factors = difference, difference
    return p.op("mul.f32", *factors) if earlier is None else p.op("fma.rn.f32", *factors, earlier)


def _packed_dissimilarities(
    p: Program, base: str, words: Sequence[str], keys: Sequence[str], dtype: str, results: Sequence[str]
) -> None:
    """Computes dissimilarities ``dot`` or ``l1`` of a query, two dimensions per word, to two packed keys."""
    queries = [p.op("prmt.b32", word, word, pick) for word in words for pick in ("0x1010", "0x3232")]
    for x, k, result in zip(queries, keys, results, strict=True):
        if base == "dot":
            p.do(f"mul.{dtype}x2", result, p.op(f"neg.{dtype}x2", x), k)
        else:
            p.do(f"abs.{dtype}x2", result, p.op(f"sub.{dtype}x2", x, k))


def _weigh(
    p: Program,
    base: str | None,
    values: Sequence[str],
    weights: Sequence[str],
    rate: str,
    totals: Sequence[str],
    packed: str | None,
) -> None:
    """Adds ``weights . values`` of each key; ``base`` turns absolute differences into its dissimilarities first.

    Two partial sums hide latency and round better than one.
    """
    sums = [["0f00000000"] * 2 for _ in totals]
    for position, (value, factor) in enumerate(zip(values, weights, strict=True)):
        for chains, each in zip(sums, p.unpack(value, packed) if packed else (value,), strict=True):
            if base == "dis":
                each = p.op("mul.f32", each, each)
            elif base == "near":
                each = p.op("neg.f32", p.op("ex2.approx.ftz.f32", p.op("mul.f32", each, rate)))
            chains[position % 2] = p.op("fma.rn.f32", each, factor, chains[position % 2])
    for total, chains in zip(totals, sums, strict=True):
        p.do("add.f32", total, total, p.op("add.f32", *chains))

"""PTX body of fused attention on tensor cores: block similarities, softmax and readout without a matrix of scores.

A warp owns 16 queries and streams keys and values, 16 at a time. It keeps the running maximum and sum of its rows, and
the readout, in registers, and stores the readout and the log-sum-exp of the scores.
"""

from collections.abc import Sequence
from functools import lru_cache

from ahop_layers.ops.gpu.attend_pairs import LOG2_E, MINUS_INFINITY, PAIR_ARGUMENTS, Pairs, Rules
from ahop_layers.ops.gpu.mma import CHUNK, HALVES, ROWS, Network, Tile, load_weights, rows_left, tile_bytes
from ahop_layers.ops.gpu.ptx import Program
from ahop_layers.ops.gpu.ptx_kernels import read_arguments

LN_2 = "0f3F317218"
INFINITY = "0f7F800000"

ATTEND_ARGUMENTS = (
    "query", "query_stride", "key", "key_stride", "value", "value_stride", "weight", "out", "out_stride", "log_sum",
    "count", *PAIR_ARGUMENTS,
)  # fmt: skip
ATTEND_CONSTRAINTS = "=r," + "l," * len(ATTEND_ARGUMENTS) + "r,r,r,r,r"


@lru_cache(maxsize=None)
def attend(n: int, size: int, width: int, bases: tuple[str, ...], dtype: str, warps: int, rules: Rules) -> str:
    """Returns the PTX body that attends to ``rows`` keys with the queries of ``warps`` warps, from query ``first`` on.

    ``width`` is the dimension of the values. The weights include the scaling of the scores and are not folded.
    ``first`` and ``rows`` are operands of the body.
    """
    p = Program()
    arguments, (first, rows, *numbers) = read_arguments(p, ATTEND_ARGUMENTS, 5)
    scratch = p.op("mov.u32", "scratch")
    warp = p.op("shr.u32", p.op("mov.u32", "%tid.x"), 5)
    key_bytes, value_bytes = tile_bytes(n, n * size), tile_bytes(0, width)
    own_place = p.op("mad.lo.u32", warp, key_bytes, p.op("add.u32", scratch, key_bytes + value_bytes))
    own, keys = Tile(p, n, size, dtype, own_place), Tile(p, n, size, dtype, scratch, warps)
    values = Tile(p, 1, width, dtype, p.op("add.u32", scratch, key_bytes), warps)
    network = Network(p, n, dtype, own, keys)
    norms = "dis" in bases
    weights = exponents(p, load_weights(p, n, bases, arguments["weight"], folds=True))
    own_first = p.op("mad.lo.u32", warp, ROWS, first)
    number = p.op("cvt.s64.s32", own_first, kind="b64")
    own_left = rows_left(p, arguments["count"], number)
    idle = p.op("setp.eq.s32", own_left, 0, kind="pred")  # a tile past the last query
    own_start = p.op("mad.lo.s64", number, arguments["query_stride"], arguments["query"], kind="b64")
    key, value = arguments["key"], arguments["value"]
    if rules.causal:
        p.do("min.s32", rows, rows, p.op("add.u32", first, ROWS * warps))  # later keys are masked for all queries
    own_words = own.fetch(own_start, arguments["query_stride"], own_left, own.registers())
    key_words = keys.fetch(key, arguments["key_stride"], rows, keys.registers())
    value_words = values.fetch(value, arguments["value_stride"], rows, values.registers())
    key_step, value_step = (
        p.op("mul.lo.s64", arguments[f"{side}_stride"], ROWS, kind="b64") for side in ("key", "value")
    )
    own.put(own_words, norms)
    network.load_own(norms)
    valid = [p.op("setp.lt.s32", p.op("add.u32", network.row, offset), own_left, kind="pred") for offset in (0, 8)]
    pairs = Pairs(p, rules, arguments, numbers, "query", network.column)
    pairs.own_rows(own_first, network.row, valid)
    position = p.op("mov.b32", 0)
    largest = [p.op("mov.b32", MINUS_INFINITY) for _ in range(2)]  # of the two rows of this lane, in base 2
    totals = [p.op("mov.b32", 0) for _ in range(2)]
    readout = [[p.op("mov.b32", 0) for _ in range(4)] for _ in range(values.chunks)]

    p.label("TILE")
    keys.synchronize()  # all reads of the previous tile are finished
    keys.store(key_words, norms)
    values.store(value_words, False)
    keys.synchronize()
    p.do("add.s64", key, key, key_step)
    p.do("add.s64", value, value, value_step)
    left = p.op("sub.s32", rows, ROWS)
    keys.fetch(key, arguments["key_stride"], left, key_words)
    values.fetch(value, arguments["value_stride"], left, value_words)

    def read_tile() -> None:
        pairs.other_rows(position)
        scores = _scores(network, bases, weights, pairs, rows)
        decay = [_exponentiate(p, scores, row, largest[row], totals[row], rules) for row in (0, 1)]
        if rules.dropout:
            for half in HALVES:
                scores[half] = [p.op("selp.b32", x, 0, pairs.keep(half, i)) for i, x in enumerate(scores[half])]
        shares = as_matrix(p, scores, dtype)
        for chunk, matrix in enumerate(values.matrices(transposed=True)):
            for index, register in enumerate(readout[chunk]):
                p.do("mul.f32", register, register, decay[index // 2])
            network.accumulate(shares, matrix, readout[chunk])

    p.either(idle, lambda: None, read_tile)
    pairs.next_tile()
    p.do("add.s32", position, position, ROWS)
    p.do("sub.s32", rows, rows, ROWS - 1)  # repeat subtracts one more
    p.repeat("TILE", rows)

    first_lane = p.op("setp.eq.u32", network.column, 0, kind="pred")
    for row in (0, 1):
        total = totals[row]
        for distance in (1, 2):
            total = p.op("add.f32", total, p.shuffle(total, distance))
        place = p.op("cvt.s64.s32", pairs.own[row], kind="b64")
        empty = p.op("setp.eq.f32", total, "0f00000000", kind="pred")
        inverse = p.op("selp.b32", 0, p.op("rcp.approx.ftz.f32", total), empty)
        if rules.dropout:
            inverse = p.op("mul.f32", inverse, pairs.factor)
        address = p.op("mad.lo.s64", place, arguments["out_stride"], arguments["out"], kind="b64")
        address = p.op("add.s64", address, p.op("mul.wide.u32", network.column, 2, kind="b64"), kind="b64")
        store_halves(p, address, readout, row, inverse, dtype, valid[row])
        stores = p.op("and.pred", valid[row], first_lane, kind="pred")
        log_sum = p.op("mul.f32", p.op("add.f32", largest[row], p.op("lg2.approx.ftz.f32", total)), LN_2)
        address = p.op("mad.lo.s64", place, 4, arguments["log_sum"], kind="b64")
        p.do(f"@{stores} st.global.b32", f"[{address}]", p.op("selp.b32", INFINITY, log_sum, empty))
    p.do("mov.b32", "$0", 0)
    return p.text(key_bytes + value_bytes + warps * key_bytes)


def exponents(p: Program, weights: Sequence[Sequence[str]]) -> list[list[str]]:
    """Returns weights such that scores are exponents of 2."""
    return [[p.op("mul.f32", word, LOG2_E) for word in words] for words in weights]


def weighted_sum(network: Network, ordered: Sequence[Sequence[str]], weights: Sequence[Sequence[str]]) -> str:
    """Returns the weighted sum of sorted similarities."""
    p = network.p
    chains = [network.zero] * 2
    for values, factors in zip(ordered, weights, strict=True):
        for position, (value, factor) in enumerate(zip(values, factors, strict=True)):
            chains[position % 2] = p.op("fma.rn.f32", value, factor, chains[position % 2])
    return p.op("add.f32", *chains)


def _scores(
    network: Network, bases: Sequence[str], weights: Sequence[Sequence[str]], pairs: Pairs, left: str
) -> list[list[str]]:
    """Returns the scores of a tile, of each half four: two rows with two columns each."""
    scores = []
    for half in HALVES:
        similarities = network.similarities(bases, half)
        four = []
        for pair in range(4):
            ordered = [network.sort([block[pair] for block in blocks], "NaN.f32") for blocks in similarities]
            four.append(pairs.masked(weighted_sum(network, ordered, weights), half, pair, left))
        scores.append(four)
    return scores


def _exponentiate(p: Program, scores: list[list[str]], row: int, largest: str, total: str, rules: Rules) -> str:
    """Replaces the scores of one row by their powers of 2 and adds these to the total of the row.

    Powers are relative to the largest score so far. Returns the factor of everything that was added before.
    """
    mine = [(half, 2 * row + side) for half in HALVES for side in (0, 1)]
    top = largest
    for half, pair in mine:
        top = p.op("max.NaN.f32", top, scores[half][pair])
    for distance in (1, 2):
        top = p.op("max.NaN.f32", top, p.shuffle(top, distance))
    base = top
    if rules.may_empty_rows:  # the difference of infinities is NaN
        none = p.op("setp.eq.f32", top, MINUS_INFINITY, kind="pred")
        base = p.op("selp.b32", 0, top, none)
    decay = p.op("ex2.approx.ftz.f32", p.op("sub.f32", largest, base))
    p.do("mov.b32", largest, top)
    part = None
    for half, pair in mine:
        share = scores[half][pair] = p.op("ex2.approx.ftz.f32", p.op("sub.f32", scores[half][pair], base))
        part = share if part is None else p.op("add.f32", part, share)
    p.do("fma.rn.f32", total, total, decay, part)
    return decay


def as_matrix(p: Program, values: Sequence[Sequence[str]], dtype: str) -> list[str]:
    """Returns the values of a tile, of each half four, as a 16 x 16 matrix in half precision."""
    return [
        p.op(f"cvt.rn.{dtype}x2.f32", values[half][2 * row + 1], values[half][2 * row])
        for half in HALVES
        for row in (0, 1)
    ]


def store_halves(
    p: Program, address: str, chunks: Sequence[Sequence[str]], row: int, factor: str | None, dtype: str, valid: str
) -> None:
    """Stores a row of 16 x 8 matrices, times a factor, in half precision."""
    for chunk, four in enumerate(chunks):
        pair = four[2 * row : 2 * row + 2]
        low, high = pair if factor is None else (p.op("mul.f32", x, factor) for x in pair)
        word = p.op(f"cvt.rn.{dtype}x2.f32", high, low)
        p.do(f"@{valid} st.global.b32", f"[{address}+{2 * CHUNK * chunk}]", word)

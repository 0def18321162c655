"""PTX bodies for few wide blocks in half precision, on tensor cores: forward and backward of the similarity."""

from functools import lru_cache

from ahop_layers.ops.gpu.mma import (
    CHUNK,
    HALVES,
    ROWS,
    Network,
    RankedWeights,
    TileExchange,
    base_factor,
    make_tiles,
    rows_left,
    shared_bytes,
)
from ahop_layers.ops.gpu.ptx import Program
from ahop_layers.ops.gpu.ptx_backward import BACKWARD_ARGUMENTS, WarpSums
from ahop_layers.ops.gpu.ptx_kernels import read_arguments

SCORE_ARGUMENTS = ("own", "own_stride", "other", "other_stride", "weight", "out", "out_own", "out_other", "count")
SCORE_CONSTRAINTS = "=r," + "l," * len(SCORE_ARGUMENTS) + "r,r"


@lru_cache(maxsize=None)
def score(n: int, size: int, bases: tuple[str, ...], dtype: str, warps: int, out: str = "f32") -> str:
    """Scores the tiles of ``warps`` warps, from row ``first`` on, against ``rows`` rows of the other side."""
    p = Program()
    arguments, (first, rows) = read_arguments(p, SCORE_ARGUMENTS, 2)
    own, other = make_tiles(p, n, size, dtype, warps)
    network = Network(p, n, dtype, own, other)
    weights = [
        [p.op("mul.f32", word, base_factor(base)) for word in p.load_words(arguments["weight"], n, 4 * n * index)]
        for index, base in enumerate(bases)
    ]
    norms = "dis" in bases
    warp = p.op("shr.u32", p.op("mov.u32", "%tid.x"), 5)
    number = p.op("cvt.s64.s32", p.op("mad.lo.u32", warp, ROWS, first), kind="b64")
    own_left = rows_left(p, arguments["count"], number)
    own_start = p.op("mad.lo.s64", number, arguments["own_stride"], arguments["own"], kind="b64")
    start, tile_stride = arguments["other"], p.op("mul.lo.s64", arguments["other_stride"], ROWS, kind="b64")
    own_words = own.fetch(own_start, arguments["own_stride"], own_left, own.registers())
    fetched = other.fetch(start, arguments["other_stride"], rows, other.registers())
    own.put(own_words, norms)
    network.load_own(norms)
    out_rows = []
    for offset in (0, 8):
        row = p.op("add.u32", network.row, offset)
        index = p.op("add.s64", number, p.op("cvt.u64.u32", row, kind="b64"), kind="b64")
        place = p.op("mad.lo.s64", index, arguments["out_own"], arguments["out"], kind="b64")
        column = p.op("cvt.u64.u32", network.column, kind="b64")
        place = p.op("mad.lo.s64", column, arguments["out_other"], place, kind="b64")
        out_rows.append((place, p.op("setp.lt.s32", row, own_left, kind="pred")))
    next_half = p.op("mul.lo.s64", arguments["out_other"], 8, kind="b64")

    p.label("TILE")
    other.put(fetched, norms)
    p.do("add.s64", start, start, tile_stride)
    other.fetch(start, arguments["other_stride"], p.op("sub.s32", rows, ROWS), fetched)
    for half in HALVES:
        totals = [[network.zero] * 2 for _ in range(4)]
        for base, factors in zip(bases, weights, strict=True):
            for chains, values in zip(totals, zip(*network.similarities(base, half), strict=True), strict=True):
                ordered = network.sort(list(values), "NaN.f32")
                for position, (value, factor) in enumerate(zip(ordered, factors, strict=True)):
                    chains[position % 2] = p.op("fma.rn.f32", value, factor, chains[position % 2])
        for pair, chains in enumerate(totals):
            place, inside = out_rows[pair // 2]
            column = p.op("add.u32", network.column, 8 * half + pair % 2)
            exists = p.op("and.pred", inside, p.op("setp.lt.s32", column, rows, kind="pred"), kind="pred")
            address = p.op("add.s64", place, arguments["out_other"], kind="b64") if pair % 2 else place
            p.store(address, p.op("add.f32", *chains), out, exists)
        for place, _ in out_rows:
            p.do("add.s64", place, place, next_half)
    p.do("sub.s32", rows, rows, ROWS - 1)  # repeat subtracts one more
    p.repeat("TILE", rows)
    p.do("mov.b32", "$0", 0)
    return p.text(shared_bytes(n, n * size, warps, exchange=False))


@lru_cache(maxsize=None)
def score_backward(n: int, size: int, bases: tuple[str, ...], dtype: str, warps: int, grad_dtype: str = "f32") -> str:
    """Computes gradients: a warp keeps a tile of keys and their gradients in registers and streams the queries.

    The derivative of a score with respect to a similarity is the weight at the similarity's rank. A similarity carries
    the index of its block in its low bits through the sort. The ranks select bytes of the weights, and the products of
    these weights with the gradient of the score are factors of matrix products: with the queries for the gradient of
    the keys, and transposed with the keys for the gradient of the queries.
    """
    p = Program()
    arguments, (all_rows, tiles) = read_arguments(p, BACKWARD_ARGUMENTS, 2)
    lane = p.op("mov.u32", "%laneid")
    warp = p.op("shr.u32", p.op("mov.u32", "%tid.x"), 5)
    own, other = make_tiles(p, n, size, dtype, warps)
    network = Network(p, n, dtype, own, other)
    ranks = RankedWeights(p, n, bases, arguments["weight"], dtype)
    exchange = TileExchange(p, n * size, warps, shared_bytes(n, n * size, warps, exchange=False))
    chunks_of = [range(block * own.per_block, (block + 1) * own.per_block) for block in range(n)]
    norms, row_bytes = "dis" in bases, 4 * n * size
    weight_grads = [[p.op("mov.b32", 0) for _ in range(n)] for _ in bases]
    column = p.op("cvt.u64.u32", network.column, kind="b64")
    offsets = [p.op("cvt.u64.u32", p.op("add.u32", network.row, offset), kind="b64") for offset in (0, 8)]
    place_in_row = p.op("mul.wide.u32", network.column, 4, kind="b64")
    tile_stride = p.op("mul.lo.s64", arguments["query_stride"], ROWS, kind="b64")
    grad_half = p.op("mul.lo.s64", arguments["grad_stride"], 8, kind="b64")
    number = p.op("mad.wide.u32", warp, ROWS, arguments["number"], kind="b64")
    again = p.op("setp.ne.u32", 0, 0, kind="pred")
    nothing = p.op("mov.b32", "0x80008000")  # two times -0, which changes no sum

    p.label("TILE")
    own_left = rows_left(p, arguments["count"], number)
    idle = p.op("setp.eq.s32", own_left, 0, kind="pred")  # a tile past the last key
    own_start = p.op("mad.lo.s64", number, arguments["key_stride"], arguments["key"], kind="b64")
    query, row_place = (p.op("mov.b64", arguments[name], kind="b64") for name in ("query", "query_grad"))
    rows = p.op("mov.b32", all_rows)
    own_words = own.fetch(own_start, arguments["key_stride"], own_left, own.registers())
    fetched = other.fetch(query, arguments["query_stride"], rows, other.registers())
    own.put(own_words, norms)
    network.load_own(norms)
    own_grads = [[p.op("mov.b32", 0) for _ in range(4)] for _ in range(own.chunks)]
    own_sums = [p.op("mov.b32", 0) for _ in range(4)]
    valid = [p.op("setp.lt.s32", p.op("add.u32", network.row, offset), own_left, kind="pred") for offset in (0, 8)]
    grad_places, own_places = [], []
    for offset in offsets:
        index = p.op("add.s64", number, offset, kind="b64")
        place = p.op("mad.lo.s64", index, arguments["grad_key_stride"], arguments["grad"], kind="b64")
        grad_places.append(p.op("mad.lo.s64", column, arguments["grad_stride"], place, kind="b64"))
        place = p.op("mad.lo.s64", index, row_bytes, arguments["key_grad"], kind="b64")
        own_places.append(p.op("add.s64", place, place_in_row, kind="b64"))

    p.label("ROW")
    other.put(fetched, norms)
    p.do("add.s64", query, query, tile_stride)
    other.fetch(query, arguments["query_stride"], p.op("sub.s32", rows, ROWS), fetched)
    grads = []
    for half in HALVES:
        for row, side in ((0, 0), (0, 1), (1, 0), (1, 1)):
            place = grad_places[row]
            index = p.op("add.u32", network.column, 8 * half + side)
            exists = p.op("and.pred", valid[row], p.op("setp.lt.s32", index, rows, kind="pred"), kind="pred")
            address = p.op("add.s64", place, arguments["grad_stride"], kind="b64") if side else place
            grads.append(p.load_or_zero(address, grad_dtype, exists))
        for place in grad_places:
            p.do("add.s64", place, place, grad_half)

    def slopes_of(position: int, base: str) -> list[list[str]]:
        """Adds to the gradient of the weights; returns the derivatives of each block, a 16 x 16 matrix."""
        slopes: list[list[str]] = [[] for _ in range(n)]
        for half in HALVES:
            weights = []
            four = grads[4 * half : 4 * half + 4]
            for values, grad in zip(zip(*network.similarities(base, half), strict=True), four, strict=True):
                ordered, order = ranks.sort(network, list(values))
                for total, value in zip(weight_grads[position], ordered, strict=True):
                    p.do("fma.rn.f32", total, grad, value, total)
                weights.append(ranks.weights(position, order))
            for row in (0, 1):
                pair = p.op(f"cvt.rn.{dtype}x2.f32", four[2 * row + 1], four[2 * row])
                for block in range(n):
                    sides = (weights[2 * row + side][block // 2] for side in (0, 1))
                    both = p.op("prmt.b32", *sides, "0x7632" if block % 2 else "0x5410")
                    slopes[block].append(p.op(f"fma.rn.{dtype}x2", both, pair, nothing))
        return slopes

    def add_gradients() -> None:
        """Adds to the gradients of the own tile, and stores those of the streamed one."""
        other_grads = [[network.zero] * 4 for _ in range(own.chunks)]
        other_sums = [network.zero] * 4
        for position, base in enumerate(bases):
            slopes = slopes_of(position, base)
            streamed, kept = other.matrices(transposed=True), own.matrices(transposed=True)
            for block, factors in enumerate(slopes):
                turned = [p.op("movmatrix.sync.aligned.m8n8.trans.b16", factors[i]) for i in (0, 2, 1, 3)]
                for chunk in chunks_of[block]:
                    network.accumulate(factors, streamed[chunk], own_grads[chunk])
                    other_grads[chunk] = network.multiply(turned, kept[chunk], other_grads[chunk])
                if base == "dis":
                    marked = p.op("setp.eq.u32", network.row, block, kind="pred")
                    column_of_ones = [p.op("selp.b32", _ones(dtype), 0, marked)] * 2
                    network.accumulate(factors, column_of_ones, own_sums)
                    other_sums = network.multiply(turned, column_of_ones, other_sums)
        if norms:
            halves = [other.half(half) for half in HALVES]
            for block in range(n):
                sums = network.row_sums(other_sums, block)
                for chunk in chunks_of[block]:
                    values = [halves[half][chunk] for half in HALVES]
                    other_grads[chunk] = network.subtract(other_grads[chunk], sums, values)
        exchange.store(network, other_grads)

    def add_nothing() -> None:
        exchange.store(network, [[network.zero] * 4] * own.chunks)

    p.either(idle, add_nothing, add_gradients)
    exchange.add(row_place, rows, again)
    p.do("add.s64", row_place, row_place, ROWS * row_bytes)
    p.do("sub.s32", rows, rows, ROWS - 1)  # repeat subtracts one more
    p.repeat("ROW", rows)

    for block in range(n if norms else 0):
        sums = network.row_sums(own_sums, block)
        for chunk in chunks_of[block]:
            own_grads[chunk] = network.subtract(own_grads[chunk], sums, network.matrices[chunk])
    for row, place in enumerate(own_places):
        words = [word for chunk in own_grads for word in chunk[2 * row : 2 * row + 2]]
        p.store_words(place, words, valid[row], unit=2, step=CHUNK // 2)
    p.do("setp.eq.u32", again, 0, 0)
    p.repeat("TILE", tiles, (number, warps * ROWS))
    warp_sums = WarpSums(p, n, 1, 1, lane)
    start = p.op("add.s64", arguments["weight_grad"], warp_sums.offset, kind="b64")
    for position, (base, totals) in enumerate(zip(bases, weight_grads, strict=True)):
        reduced = warp_sums.reduce([p.op("mul.f32", total, base_factor(base)) for total in totals])
        p.store_words(start, reduced, warp_sums.first, warp_sums.unit, offset=4 * n * position)
    p.do("mov.b32", "$0", 0)
    return p.text(shared_bytes(n, n * size, warps, exchange=True))


def _ones(dtype: str) -> str:
    """Returns a word of two ones."""
    return "0x3F803F80" if dtype == "bf16" else "0x3C003C00"

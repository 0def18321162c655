"""PTX bodies for few wide blocks in half precision, on tensor cores: forward and backward of the similarity."""

from functools import lru_cache

from ahop_layers.ops.gpu.mma import (
    CHUNK,
    HALVES,
    ROWS,
    Network,
    load_weights,
    make_tiles,
    rows_left,
    shared_bytes,
)
from ahop_layers.ops.gpu.mma_gradients import Gradients, TileExchange
from ahop_layers.ops.gpu.ptx import Program
from ahop_layers.ops.gpu.ptx_backward import BACKWARD_ARGUMENTS
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
    weights = load_weights(p, n, bases, arguments["weight"])
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
        for factors, similarities in zip(weights, network.similarities(bases, half), strict=True):
            for chains, values in zip(totals, zip(*similarities, strict=True), strict=True):
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
    return p.text(shared_bytes(n, n * size, warps))


@lru_cache(maxsize=None)
def score_backward(n: int, size: int, bases: tuple[str, ...], dtype: str, warps: int, grad_dtype: str = "f32") -> str:
    """Computes gradients: a warp keeps a tile of keys and their gradients in registers and streams the queries."""
    p = Program()
    arguments, (all_rows, tiles) = read_arguments(p, BACKWARD_ARGUMENTS, 2)
    warp = p.op("shr.u32", p.op("mov.u32", "%tid.x"), 5)
    own, other = make_tiles(p, n, size, dtype, warps)
    network = Network(p, n, dtype, own, other)
    gradients = Gradients(network, bases, load_weights(p, n, bases, arguments["weight"]))
    exchange = TileExchange(p, n * size, warps, shared_bytes(n, n * size, warps))
    norms, row_bytes = "dis" in bases, 4 * n * size
    column = p.op("cvt.u64.u32", network.column, kind="b64")
    offsets = [p.op("cvt.u64.u32", p.op("add.u32", network.row, offset), kind="b64") for offset in (0, 8)]
    place_in_row = p.op("mul.wide.u32", network.column, 4, kind="b64")
    tile_stride = p.op("mul.lo.s64", arguments["query_stride"], ROWS, kind="b64")
    grad_half = p.op("mul.lo.s64", arguments["grad_stride"], 8, kind="b64")
    number = p.op("mad.wide.u32", warp, ROWS, arguments["number"], kind="b64")
    again = p.op("setp.ne.u32", 0, 0, kind="pred")

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
    gradients.start()
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

    def add_gradients() -> None:
        exchange.store(network, gradients.add(lambda half, pair, _: grads[4 * half + pair]))

    def add_nothing() -> None:
        exchange.store(network, [[network.zero] * 4] * own.chunks)

    p.either(idle, add_nothing, add_gradients)
    exchange.add(row_place, rows, again)
    p.do("add.s64", row_place, row_place, ROWS * row_bytes)
    p.do("sub.s32", rows, rows, ROWS - 1)  # repeat subtracts one more
    p.repeat("ROW", rows)

    own_grads = gradients.finish()
    for row, place in enumerate(own_places):
        words = [word for chunk in own_grads for word in chunk[2 * row : 2 * row + 2]]
        p.store_words(place, words, valid[row], unit=2, step=CHUNK // 2)
    p.do("setp.eq.u32", again, 0, 0)
    p.repeat("TILE", tiles, (number, warps * ROWS))
    gradients.store_weights(arguments["weight_grad"])
    p.do("mov.b32", "$0", 0)
    return p.text(shared_bytes(n, n * size, warps) + TileExchange.bytes(n * size, warps))

"""PTX body of the backward pass of fused attention.

A warp owns 16 keys and values and keeps their gradients in registers. It streams queries, 16 at a time, whose gradients
the warps of a program add up in shared memory. Each similarity is sorted once: the sorted values give the score, and
their order the derivatives.
"""

from functools import lru_cache, partial

from ahop_layers.ops.gpu.attend_kernels import as_matrix, exponents, store_halves, weighted_sum
from ahop_layers.ops.gpu.attend_pairs import PAIR_ARGUMENTS, Pairs, Rules
from ahop_layers.ops.gpu.mma import CHUNK, HALVES, ROWS, Network, Tile, load_weights, rows_left, tile_bytes
from ahop_layers.ops.gpu.mma_gradients import Gradients, TileExchange
from ahop_layers.ops.gpu.ptx import Program
from ahop_layers.ops.gpu.ptx_kernels import read_arguments

STORE_HALVES, STORE_FLOATS, ADD_FLOATS = range(3)
"""How :func:`attend_backward` writes the gradients of keys and values."""

ATTEND_BACKWARD_ARGUMENTS = (
    "query", "query_stride", "key", "key_stride", "value", "value_stride", "weight", "grad", "grad_stride",
    "statistics", "query_grad", "key_grad", "key_grad_stride", "value_grad", "value_grad_stride", "weight_grad",
    "number", "count", *PAIR_ARGUMENTS,
)  # fmt: skip
ATTEND_BACKWARD_CONSTRAINTS = "=r," + "l," * len(ATTEND_BACKWARD_ARGUMENTS) + "r,r,r,r,r,r,r"


@lru_cache(maxsize=None)
def attend_backward(n: int, size: int, width: int, bases: tuple[str, ...], dtype: str, warps: int, rules: Rules) -> str:
    """Returns the PTX body for the gradients of ``all_rows`` queries and of ``tiles`` tiles of keys per warp.

    Queries are those from ``start`` on; ``all_rows``, ``start``, ``tiles`` and ``mode`` are operands of the body.

    ``grad`` is the gradient of the readout. ``statistics`` has two float32 numbers per query, padded to whole tiles:
    the log-sum-exp of its scores in base 2, infinite past the last query, and the product of its readout and
    ``grad``. Query gradients are float32, added up over the tiles of keys; if causal, they are added to what is stored,
    since tiles of keys skip earlier queries. Those of keys and values are stored in half precision if ``mode`` is
    ``STORE_HALVES``, else in float32, and with ``ADD_FLOATS`` they are added to what is stored.
    """
    p = Program()
    arguments, (all_rows, tiles, start, mode, *numbers) = read_arguments(p, ATTEND_BACKWARD_ARGUMENTS, 7)
    d = n * size
    scratch = p.op("mov.u32", "scratch")
    warp = p.op("shr.u32", p.op("mov.u32", "%tid.x"), 5)
    key_bytes, value_bytes = tile_bytes(n, d), tile_bytes(0, width)
    step = key_bytes + value_bytes
    own_place = p.op("mad.lo.u32", p.op("add.u32", warp, 1), step, scratch)
    own, queries = Tile(p, n, size, dtype, own_place), Tile(p, n, size, dtype, scratch, warps)
    values = Tile(p, 1, width, dtype, p.op("add.u32", own_place, key_bytes))
    upstream = Tile(p, 1, width, dtype, p.op("add.u32", scratch, key_bytes), warps)
    network = Network(p, n, dtype, own, queries)
    folded = load_weights(p, n, bases, arguments["weight"], folds=True)
    gradients = Gradients(network, bases, folded)
    exchange = TileExchange(p, d, warps, (warps + 1) * step)
    weights = exponents(p, folded)
    pairs = Pairs(p, rules, arguments, numbers, "key", network.column)
    norms = "dis" in bases
    strides = {side: p.op("mul.lo.s64", arguments[f"{side}_stride"], ROWS, kind="b64") for side in ("query", "grad")}
    number = p.op("mad.wide.u32", warp, ROWS, arguments["number"], kind="b64")
    first_column = p.op("mul.wide.u32", network.column, 8, kind="b64")
    again = p.op("setp.ne.u32", int(rules.causal), 0, kind="pred")
    floats, adds = (p.op("setp.ge.u32", mode, least, kind="pred") for least in (STORE_FLOATS, ADD_FLOATS))
    program_number = p.op("cvt.u32.u64", arguments["number"])  # of the first key of all warps

    p.label("TILE")
    own_left = rows_left(p, arguments["count"], number)
    idle = p.op("setp.eq.s32", own_left, 0, kind="pred")  # a tile past the last key
    query, grad, query_grad = (p.op("mov.b64", arguments[name], kind="b64") for name in ("query", "grad", "query_grad"))
    statistics = p.op("add.s64", arguments["statistics"], first_column, kind="b64")
    rows, position = p.op("mov.b32", all_rows), p.op("mov.b32", start)
    skipped = None
    if rules.causal:  # earlier queries do not see the keys of this tile
        skipped = _skipped_rows(p, program_number, start, all_rows)
        p.do("sub.s32", rows, rows, skipped)
        p.do("add.s32", position, position, skipped)
        wide = p.op("cvt.u64.u32", skipped, kind="b64")
        for place, stride in (
            (query, arguments["query_stride"]), (grad, arguments["grad_stride"]), (query_grad, 4 * d), (statistics, 8)
        ):  # fmt: skip
            p.do("mad.lo.s64", place, wide, stride, place)
    key_start, value_start = (
        p.op("mad.lo.s64", number, arguments[f"{side}_stride"], arguments[side], kind="b64")
        for side in ("key", "value")
    )
    own_words = own.fetch(key_start, arguments["key_stride"], own_left, own.registers())
    value_words = values.fetch(value_start, arguments["value_stride"], own_left, values.registers())
    query_words = queries.fetch(query, arguments["query_stride"], rows, queries.registers())
    grad_words = upstream.fetch(grad, arguments["grad_stride"], rows, upstream.registers())
    own.put(own_words, norms)
    values.put(value_words, False)
    network.load_own(norms)
    gradients.start()
    value_grads = [[p.op("mov.b32", 0) for _ in range(4)] for _ in range(values.chunks)]
    valid = [p.op("setp.lt.s32", p.op("add.u32", network.row, offset), own_left, kind="pred") for offset in (0, 8)]
    pairs.own_rows(p.op("cvt.u32.u64", number), network.row, valid)
    if skipped is not None:
        pairs.skip(skipped)

    p.label("ROW")
    # The previous tile was read before the barrier of the exchange.
    queries.store(query_words, norms)
    upstream.store(grad_words, False)
    at_columns = [
        p.load_vector(f"{statistics}+{8 * 8 * half}", [p.new() for _ in range(4)]) for half in HALVES
    ]  # log-sum and product of two columns
    queries.synchronize()
    p.do("add.s64", query, query, strides["query"])
    p.do("add.s64", grad, grad, strides["grad"])
    p.do("add.s64", statistics, statistics, 8 * ROWS)
    left = p.op("sub.s32", rows, ROWS)
    queries.fetch(query, arguments["query_stride"], left, query_words)
    upstream.fetch(grad, arguments["grad_stride"], left, grad_words)

    def add_gradients() -> None:
        pairs.other_rows(position)
        matrices = values.matrices()
        products = []
        for half in HALVES:
            total = [network.zero] * 4
            columns = upstream.half(half)
            for chunk in range(0, values.chunks, 2):
                matrix = [word for words in matrices[chunk : chunk + 2] for word in words]
                total = network.multiply(matrix, columns[chunk : chunk + 2], total)
            products.append(total)
        shares: list[list[str]] = [[], []]

        def grad_of(half: int, pair: int, ordered: list[list[str]]) -> str:
            log_sum, product = at_columns[half][2 * (pair % 2) : 2 * (pair % 2) + 2]
            score = pairs.masked(weighted_sum(network, ordered, weights), half, pair, rows)
            share = p.op("ex2.approx.ftz.f32", p.op("sub.f32", score, log_sum))
            share = p.op("selp.b32", share, 0, valid[pair // 2])
            share_grad, kept_share = products[half][pair], share
            if rules.dropout:
                keep = pairs.keep(half, pair)
                share_grad, kept_share = (
                    p.op("selp.b32", p.op("mul.f32", x, pairs.factor), 0, keep) for x in (share_grad, share)
                )
            shares[half].append(kept_share)
            return p.op("mul.f32", share, p.op("sub.f32", share_grad, product))

        query_grads = gradients.add(grad_of)
        kept = as_matrix(p, shares, dtype)
        for chunk, matrix in enumerate(upstream.matrices(transposed=True)):
            network.accumulate(kept, matrix, value_grads[chunk])
        exchange.store(network, query_grads)

    def add_nothing() -> None:
        exchange.store(network, [[network.zero] * 4] * own.chunks)

    p.either(idle, add_nothing, add_gradients)
    exchange.add(query_grad, rows, again)
    p.do("add.s64", query_grad, query_grad, 4 * ROWS * d)
    pairs.next_tile()
    p.do("add.s32", position, position, ROWS)
    p.do("sub.s32", rows, rows, ROWS - 1)  # repeat subtracts one more
    p.repeat("ROW", rows)

    own_grads = {"key_grad": gradients.finish(), "value_grad": value_grads}

    def store_own(item: int) -> None:
        for name, chunks in own_grads.items():
            for row in (0, 1):
                place = p.op("cvt.s64.s32", pairs.own[row], kind="b64")
                address = p.op("mad.lo.s64", place, arguments[f"{name}_stride"], arguments[name], kind="b64")
                address = p.op("add.s64", address, p.op("mul.wide.u32", network.column, item, kind="b64"), kind="b64")
                if item == 2:
                    store_halves(p, address, chunks, row, None, dtype, valid[row])
                else:
                    words = [word for four in chunks for word in four[2 * row : 2 * row + 2]]
                    p.add_words(address, words, valid[row], adds, unit=2, step=CHUNK // 2)

    p.either(floats, partial(store_own, 4), partial(store_own, 2))
    p.do("setp.eq.u32", again, 0, 0)
    p.do("add.s32", program_number, program_number, warps * ROWS)
    p.repeat("TILE", tiles, (number, warps * ROWS))
    gradients.store_weights(arguments["weight_grad"])
    p.do("mov.b32", "$0", 0)
    return p.text((warps + 1) * step + TileExchange.bytes(d, warps))


def _skipped_rows(p: Program, key: str, start: str, rows: str) -> str:
    """Returns how many queries before ``key`` are skipped: whole tiles of those from ``start`` on, but not all."""
    before = p.op("max.s32", p.op("sub.s32", key, start), 0)
    most = p.op("sub.s32", rows, 1)
    return p.op("and.b32", p.op("min.s32", before, most), -ROWS)

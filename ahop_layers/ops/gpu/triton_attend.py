"""The Triton kernels of attention: two that run a PTX body, one that prepares the backward pass, and a softmax.

Strides count elements, those of the mask bytes. A program of the forward pass owns a tile of queries, one of the
backward pass ``span`` tiles of keys. Query heads with index ``h`` read the key head ``h // group``.
"""

import triton
import triton.language as tl

NAMES = (
    "qn", "qh", "ql", "kn", "kh", "ks", "vn", "vh", "vs", "on", "oh", "ol", "gn", "gh", "gl", "mn", "mh", "ml", "ms",
    "wh", "heads", "group", "length", "count", "tiles", "span", "start", "rows", "padded", "strips", "mode", "item",
    "threshold", "width", "total",
)  # fmt: skip
POINTERS = (
    "query", "key", "value", "weight", "mask", "seed", "out", "log_sum", "grad", "statistics", "query_grad", "key_grad",
    "value_grad", "weight_grad", "scores", "weights",
)  # fmt: skip
# No argument is specialized on its value or alignment, so one compiled kernel serves all shapes.
shape_free = triton.jit(do_not_specialize=list(NAMES), do_not_specialize_on_alignment=list(POINTERS))


@triton.jit
def _same_in_all_threads(threads: tl.constexpr):
    """Returns a tensor of zeros with one element per thread: an inline block runs once per element."""
    return tl.zeros([threads], tl.int64)


@triton.jit
def _warp(threads: tl.constexpr):
    thread = tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r,r", [tl.arange(0, threads)], dtype=tl.int32, is_pure=True, pack=1
    )
    return thread // 32


@shape_free
def attend_mma(
    query, key, value, weight, mask, seed, out, log_sum,
    qn: tl.int64, qh: tl.int64, ql: tl.int64, kn: tl.int64, kh: tl.int64, ks: tl.int64,
    vn: tl.int64, vh: tl.int64, vs: tl.int64, on: tl.int64, oh: tl.int64, ol: tl.int64,
    mn: tl.int64, mh: tl.int64, ml: tl.int64, ms: tl.int64, wh: tl.int64,
    heads: tl.int64, group: tl.int64, length: tl.int64, count: tl.int64, tiles: tl.int64, threshold: tl.int64, factor,
    BODY: tl.constexpr, CONSTRAINTS: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Runs the forward body. A program reads ROWS queries out."""
    zero = _same_in_all_threads(32 * WARPS)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    n, h = head // heads, head % heads
    first = (tl.program_id(0) % tiles * ROWS).to(tl.int32)
    tl.inline_asm_elementwise(
        BODY,
        CONSTRAINTS,
        [
            (query + n * qn + h * qh).to(tl.int64) + zero,
            ql * 2,
            (key + n * kn + h // group * kh).to(tl.int64),
            ks * 2,
            (value + n * vn + h // group * vh).to(tl.int64),
            vs * 2,
            (weight + h * wh).to(tl.int64),
            (out + n * on + h * oh).to(tl.int64),
            ol * 2,
            (log_sum + head * length).to(tl.int64),
            length,
            mask.to(tl.int64) + n * mn + h * mh,
            ml,
            ms,
            seed.to(tl.int64),
            first,
            count.to(tl.int32),
            head.to(tl.int32),
            threshold.to(tl.int32),
            factor.to(tl.int32, bitcast=True),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@shape_free
def attend_backward_mma(
    query, key, value, weight, mask, seed, grad, statistics, query_grad, key_grad, value_grad, weight_grad,
    qn: tl.int64, qh: tl.int64, ql: tl.int64, kn: tl.int64, kh: tl.int64, ks: tl.int64,
    vn: tl.int64, vh: tl.int64, vs: tl.int64, gn: tl.int64, gh: tl.int64, gl: tl.int64,
    mn: tl.int64, mh: tl.int64, ml: tl.int64, ms: tl.int64, wh: tl.int64,
    heads: tl.int64, group: tl.int64, count: tl.int64, start: tl.int64, rows: tl.int64, padded: tl.int64,
    strips: tl.int64, span: tl.int64, tiles: tl.int64, mode: tl.int64, item: tl.int64, threshold: tl.int64, factor,
    BODY: tl.constexpr, CONSTRAINTS: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Runs the backward body for ``rows`` queries from ``start`` on. A program owns ``span`` tiles of ROWS keys.

    ``key_grad`` and ``value_grad`` point to bytes, and hold numbers of ``item`` bytes.
    """
    warp = _warp(32 * WARPS)
    strip = tl.program_id(0) % strips
    head = (tl.program_id(0) // strips).to(tl.int64)
    all_heads = tl.num_programs(0) // strips
    n, h = head // heads, head % heads
    tl.inline_asm_elementwise(
        BODY,
        CONSTRAINTS,
        [
            (query + n * qn + h * qh + start * ql).to(tl.int64),
            ql * 2,
            (key + n * kn + h // group * kh).to(tl.int64),
            ks * 2,
            (value + n * vn + h // group * vh).to(tl.int64),
            vs * 2,
            (weight + h * wh).to(tl.int64),
            (grad + n * gn + h * gh + start * gl).to(tl.int64),
            gl * 2,
            (statistics + (head * padded + start) * 2).to(tl.int64),
            (query_grad + (strip * all_heads + head) * rows * DIM).to(tl.int64),
            key_grad.to(tl.int64) + head * count * DIM * item,
            DIM * item,
            value_grad.to(tl.int64) + head * count * WIDTH * item,
            WIDTH * item,
            (weight_grad + (tl.program_id(0).to(tl.int64) * WARPS + warp) * WEIGHTS).to(tl.int64),
            (strip * span * ROWS).to(tl.int64),
            count,
            mask.to(tl.int64) + n * mn + h * mh + start * ml,
            ml,
            ms,
            seed.to(tl.int64),
            rows.to(tl.int32),
            tl.minimum(span, tiles - strip * span).to(tl.int32),
            start.to(tl.int32),
            mode.to(tl.int32),
            head.to(tl.int32),
            threshold.to(tl.int32),
            factor.to(tl.int32, bitcast=True),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@shape_free
def attend_statistics(
    out, grad, log_sum, statistics,
    on: tl.int64, oh: tl.int64, ol: tl.int64, gn: tl.int64, gh: tl.int64, gl: tl.int64,
    heads: tl.int64, length: tl.int64, padded: tl.int64, width: tl.int64,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    """Computes two numbers per query: its log-sum-exp in base 2, and the product of its readout and ``grad``."""
    blocks = tl.cdiv(padded, ROWS)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    n, h = head // heads, head % heads
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    exists = row[:, None] < length
    if not FILLED:
        exists = exists & (column < width)
    # Rows are aligned to 16 bytes, so a thread loads eight numbers at a time.
    readouts = tl.multiple_of(out + n * on + h * oh, 8) + row[:, None] * tl.multiple_of(ol, 8) + column
    upstreams = tl.multiple_of(grad + n * gn + h * gh, 8) + row[:, None] * tl.multiple_of(gl, 8) + column
    readout, upstream = tl.load(readouts, mask=exists, other=0.0), tl.load(upstreams, mask=exists, other=0.0)
    products = tl.sum(readout.to(tl.float32) * upstream.to(tl.float32), 1)
    log_sums = tl.load(log_sum + head * length + row, mask=row < length, other=float("inf")) * 1.4426950408889634
    place = statistics + (head * padded + row) * 2
    tl.store(place, log_sums, mask=row < padded)
    tl.store(place + 1, products, mask=row < padded)


@shape_free
def softmax_rows(
    scores, weights, log_sum, total: tl.int64, count: tl.int64, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Computes the softmax of ``total`` rows of ``count`` scores, and the log-sum-exp of each row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < total
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    shift = tl.zeros([ROWS], tl.float32)
    for start in range(0, count, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = exists[:, None] & (column < count)[None, :]
        x = tl.load(scores + row[:, None] * count + column[None, :], mask=inside, other=float("-inf"))
        above = tl.maximum(largest, tl.max(x, 1))
        shift = tl.where(above == float("-inf"), 0.0, above)  # the difference of infinities is NaN
        sums = sums * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift[:, None]), 1)
        largest = above
    log_sums = tl.where(sums == 0, float("inf"), shift + tl.log(sums))
    tl.store(log_sum + row, log_sums, mask=exists)
    for start in range(0, count, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = exists[:, None] & (column < count)[None, :]
        x = tl.load(scores + row[:, None] * count + column[None, :], mask=inside, other=float("-inf"))
        share = tl.exp(x - log_sums[:, None])
        tl.store(weights + row[:, None] * count + column[None, :], share.to(weights.dtype.element_ty), mask=inside)

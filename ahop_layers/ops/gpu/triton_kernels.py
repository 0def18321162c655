"""The Triton kernels: two that run a PTX body on NVIDIA GPUs, and two portable ones for all devices of Triton.

``launch.py`` imports this file when a kernel runs for the first time. Strides count elements. A program owns a tile of
keys and loops over ``rows`` queries. It writes each partial sum to its own address, so results do not depend on the
order in which programs run.
"""

import triton
import triton.language as tl

NAMES = "qn qh ql kn kh ks wh on oh ol os gn gh gl gs heads length count rows span tiles total d".split()  # noqa: SIM905
# No argument is specialized on its value or alignment, so one compiled kernel serves all shapes.
shape_free = triton.jit(
    do_not_specialize=NAMES,
    do_not_specialize_on_alignment=["query", "key", "weight", "out", "grad", "query_grad", "key_grad", "weight_grad"],
)


@triton.jit
def _thread(threads: tl.constexpr):
    """Returns the thread index that holds each element: PTX shuffles address threads, not elements."""
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r,r", [tl.arange(0, threads)], dtype=tl.int32, is_pure=True, pack=1
    )


@shape_free
def score_ptx(
    query, key, weight, out,
    qn: tl.int64, qh: tl.int64, ql: tl.int64, kn: tl.int64, kh: tl.int64, ks: tl.int64, wh: tl.int64,
    on: tl.int64, oh: tl.int64, ol: tl.int64, os: tl.int64,
    heads: tl.int64, length: tl.int64, count: tl.int64, rows: tl.int64, total: tl.int64,
    BODY: tl.constexpr, CONSTRAINTS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    PACK: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Runs the PTX forward body. Lanes index the concatenated keys of all heads, so short heads leave no lane idle."""
    thread = _thread(THREADS)
    slot = tl.program_id(0).to(tl.int64) * (THREADS // GROUP) + thread // GROUP
    part = (thread % GROUP) * CHUNK
    first = (slot < total) & (part == 0)
    slot = tl.minimum(slot, total - 1)
    per_head = (count + PACK - 1) // PACK
    s = slot % per_head * PACK
    n = slot // per_head // heads
    h = slot // per_head % heads
    other = tl.minimum(s + 1, count - 1)
    start = tl.program_id(1).to(tl.int64) * rows
    key_head = key + n * kn + h * kh + part
    query_row = query + n * qn + h * qh + start * ql + part
    out_row = out + n * on + h * oh + start * ol
    item: tl.constexpr = query.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        BODY,
        CONSTRAINTS,
        [
            (key_head + s * ks).to(tl.int64),
            (key_head + other * ks).to(tl.int64),
            query_row.to(tl.int64),
            ql * item,
            (weight + h * wh + part).to(tl.int64),
            (out_row + s * os).to(tl.int64),
            (out_row + other * os).to(tl.int64),
            ol * 4,
            tl.minimum(rows, length - start).to(tl.int32),
            first.to(tl.int32),
            (first & (s + 1 < count)).to(tl.int32),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@shape_free
def score_backward_ptx(
    grad, query, key, weight, query_grad, key_grad, weight_grad,
    gn: tl.int64, gh: tl.int64, gl: tl.int64, gs: tl.int64,
    qn: tl.int64, qh: tl.int64, ql: tl.int64, kn: tl.int64, kh: tl.int64, ks: tl.int64, wh: tl.int64,
    heads: tl.int64, length: tl.int64, count: tl.int64, rows: tl.int64, span: tl.int64, d: tl.int64,
    BODY: tl.constexpr, CONSTRAINTS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, BASES: tl.constexpr,
):  # fmt: skip
    """Runs the PTX backward body. A program is one warp and processes ``span`` tiles of keys."""
    thread = _thread(32)
    part = (thread % GROUP) * CHUNK
    tiles = tl.cdiv(count, 32 // GROUP)
    strips = tl.cdiv(tiles, span)
    strip = tl.program_id(0) % strips
    head = (tl.program_id(0) // strips).to(tl.int64)
    n, h = head // heads, head % heads
    all_heads = tl.num_programs(0) // strips
    chunk = tl.program_id(1).to(tl.int64)
    start = chunk * rows
    item: tl.constexpr = query.dtype.element_ty.primitive_bitwidth // 8
    program = (strip * tl.num_programs(1) + chunk) * all_heads + head
    tl.inline_asm_elementwise(
        BODY,
        CONSTRAINTS,
        [
            (key + n * kn + h * kh + part).to(tl.int64),
            ks * item,
            (query + n * qn + h * qh + start * ql + part).to(tl.int64),
            ql * item,
            (weight + h * wh + part).to(tl.int64),
            (grad + n * gn + h * gh + start * gl).to(tl.int64),
            gl * 4,
            gs * 4,
            (key_grad + (chunk * all_heads + head) * count * d + part).to(tl.int64),
            (query_grad + ((strip * all_heads + head) * length + start) * d).to(tl.int64),
            (weight_grad + program * BASES * d).to(tl.int64),
            (strip * span * (32 // GROUP) + thread // GROUP).to(tl.int64),
            count,
            tl.minimum(rows, length - start).to(tl.int32),
            tl.minimum(span, tiles - strip * span).to(tl.int32),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _dissimilarity(BASES: tl.constexpr, INDEX: tl.constexpr, query, key):
    """Returns the dissimilarity of one base: the squared or absolute difference, or the negative product."""
    if BASES[INDEX] == "dot":
        value = -query * key
    elif BASES[INDEX] == "dis":
        value = (query - key) * (query - key)
    else:
        value = tl.abs(query - key)
    return value


@triton.jit
def _slopes(BASES: tl.constexpr, INDEX: tl.constexpr, query, key):
    """Returns the derivatives of :func:`_dissimilarity` with respect to query and key."""
    if BASES[INDEX] == "dot":
        by_query, by_key = -key, -query
    else:
        difference = query - key
        if BASES[INDEX] == "dis":
            by_query = 2 * difference
        else:
            by_query = (difference > 0).to(tl.float32) - (difference < 0).to(tl.float32)
        by_key = -by_query
    return by_query, by_key


@shape_free
def score_portable(
    query, key, weight, out,
    qn: tl.int64, qh: tl.int64, ql: tl.int64, kn: tl.int64, kh: tl.int64, ks: tl.int64, wh: tl.int64,
    on: tl.int64, oh: tl.int64, ol: tl.int64, os: tl.int64,
    heads: tl.int64, length: tl.int64, count: tl.int64, rows: tl.int64, tiles: tl.int64, d: tl.int64,
    BASES: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Sorts a tile of KEYS x DIMS dissimilarities along the dimensions, for one query at a time."""
    head = (tl.program_id(0) // tiles).to(tl.int64)
    n, h = head // heads, head % heads
    s = tl.program_id(0) % tiles * KEYS + tl.arange(0, KEYS)
    i = tl.arange(0, DIMS)
    inside = i < d
    keys = tl.load(
        key + n * kn + h * kh + s[:, None] * ks + i[None, :], mask=(s < count)[:, None] & inside[None, :], other=0.0
    ).to(tl.float32)
    start = tl.program_id(1).to(tl.int64) * rows
    for row in range(start, tl.minimum(start + rows, length)):
        queries = tl.load(query + n * qn + h * qh + row * ql + i, mask=inside, other=0.0).to(tl.float32)
        score = tl.zeros([KEYS], tl.float32)
        for index in tl.static_range(len(BASES)):
            values = _dissimilarity(BASES, index, queries[None, :], keys)
            # A sort can lose a NaN, so the scores of pairs with a NaN are set to NaN afterwards.
            missing = tl.max((values != values).to(tl.int32), axis=1)
            ordered = tl.sort(tl.where(inside[None, :], values, float("inf")), dim=1)
            weights = tl.load(weight + h * wh + index * d + i, mask=inside, other=0.0)
            score -= tl.sum(tl.where(inside[None, :], ordered * weights[None, :], 0.0), axis=1)
            score = tl.where(missing > 0, float("nan"), score)
        tl.store(out + n * on + h * oh + row * ol + s * os, score, mask=s < count)


@shape_free
def score_backward_portable(
    grad, query, key, weight, query_grad, key_grad, weight_grad,
    gn: tl.int64, gh: tl.int64, gl: tl.int64, gs: tl.int64,
    qn: tl.int64, qh: tl.int64, ql: tl.int64, kn: tl.int64, kh: tl.int64, ks: tl.int64, wh: tl.int64,
    heads: tl.int64, length: tl.int64, count: tl.int64, rows: tl.int64, span: tl.int64, d: tl.int64,
    BASES: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Ranks by two integer sorts, of (value, dimension) and then of (dimension, position), and sums the derivatives."""
    strips = tl.cdiv(tl.cdiv(count, KEYS), span)
    strip = tl.program_id(0) % strips
    head = (tl.program_id(0) // strips).to(tl.int64)
    n, h = head // heads, head % heads
    all_heads = tl.num_programs(0) // strips
    i = tl.arange(0, DIMS)
    inside = i < d
    SLOTS: tl.constexpr = 4 if len(BASES) == 3 else len(BASES)  # a power of two
    weights_grad = tl.zeros([SLOTS, KEYS, DIMS], tl.float32)
    base_number = tl.arange(0, SLOTS)[:, None, None]
    chunk = tl.program_id(1).to(tl.int64)
    start = chunk * rows
    for tile in range(strip * span, tl.minimum(strip * span + span, tl.cdiv(count, KEYS))):
        s = tile * KEYS + tl.arange(0, KEYS)
        within = (s < count)[:, None] & inside[None, :]
        keys = tl.load(key + n * kn + h * kh + s[:, None] * ks + i[None, :], mask=within, other=0.0).to(tl.float32)
        keys_grad = tl.zeros([KEYS, DIMS], tl.float32)
        for row in range(start, tl.minimum(start + rows, length)):
            queries = tl.load(query + n * qn + h * qh + row * ql + i, mask=inside, other=0.0).to(tl.float32)[None, :]
            slope = -tl.load(grad + n * gn + h * gh + row * gl + s * gs, mask=s < count, other=0.0)[:, None]
            row_grad = tl.zeros([KEYS, DIMS], tl.float32)
            for index in tl.static_range(len(BASES)):
                values = tl.where(inside[None, :], _dissimilarity(BASES, index, queries, keys), float("inf"))
                bits = values.to(tl.int32, bitcast=True)
                ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
                by_value = tl.sort(ordered * 4294967296 + i[None, :], dim=1)
                bits = (by_value >> 32).to(tl.int32)
                sorted_values = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
                share = tl.where(within, slope * sorted_values, 0.0)
                weights_grad += tl.where(base_number == index, share[None, :, :], 0.0)
                by_dimension = tl.sort((by_value & 0xFFFFFFFF) * 4294967296 + i[None, :], dim=1)
                rank = by_dimension & 0xFFFFFFFF
                weights = tl.load(weight + h * wh + index * d + rank, mask=within, other=0.0)
                by_query, by_key = _slopes(BASES, index, queries, keys)
                row_grad += slope * weights * by_query
                keys_grad += slope * weights * by_key
            place = query_grad + ((strip * all_heads + head) * length + row) * d + i
            before = tl.load(place, mask=inside & (tile > strip * span), other=0.0)
            tl.store(place, before + tl.sum(tl.where(within, row_grad, 0.0), axis=0), mask=inside)
        place = ((chunk * all_heads + head) * count + s[:, None]) * d + i[None, :]
        tl.store(key_grad + place, keys_grad, mask=within)
    program = (strip * tl.num_programs(1) + chunk) * all_heads + head
    for index in tl.static_range(len(BASES)):
        total = tl.sum(tl.sum(tl.where(base_number == index, weights_grad, 0.0), axis=0), axis=0)
        tl.store(weight_grad + (program * len(BASES) + index) * d + i, total, mask=inside)

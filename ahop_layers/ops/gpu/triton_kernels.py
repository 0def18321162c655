"""The Triton kernels: two that run a PTX body on NVIDIA GPUs, and two portable ones for all devices of Triton.

``launch.py`` imports this file when a kernel runs for the first time. Strides count elements. A program owns a tile of
keys and loops over ``rows`` queries. It writes each partial sum to its own address, so results do not depend on the
order in which programs run.
"""

import triton
import triton.language as tl

NAMES = "qn qh ql kn kh ks wh on oh ol os gn gh gl gs heads length count rows span tiles total blocks size".split()  # noqa: SIM905
# No argument is specialized on its value or alignment, so one compiled kernel serves all shapes.
shape_free = triton.jit(
    do_not_specialize=NAMES,
    do_not_specialize_on_alignment=[
        "query",
        "key",
        "weight",
        "out",
        "grad",
        "query_grad",
        "key_grad",
        "weight_grad",
    ],
)


@triton.jit
def _thread(threads: tl.constexpr):
    """Returns the thread index that holds each element: PTX shuffles address threads, not elements."""
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r,r", [tl.arange(0, threads)], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _lane(
    lane, GROUP: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
    COPIES: tl.constexpr, RUN: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    """Returns the first sorted position and the first dimension of a lane; ``ptx.Layout`` explains the constants."""
    member = lane % GROUP
    part = lane // GROUP * SPLIT + member % SPLIT
    return member * CHUNK, member // SPLIT * (RUN * WIDTH * SPLIT * COPIES) + part * STRETCH


@shape_free
def score_ptx(
    query, key, weight, out,
    qn: tl.int64, qh: tl.int64, ql: tl.int64, kn: tl.int64, kh: tl.int64, ks: tl.int64, wh: tl.int64,
    on: tl.int64, oh: tl.int64, ol: tl.int64, os: tl.int64,
    heads: tl.int64, length: tl.int64, count: tl.int64, rows: tl.int64, total: tl.int64,
    BODY: tl.constexpr, CONSTRAINTS: tl.constexpr,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, COPIES: tl.constexpr,
    RUN: tl.constexpr, STRETCH: tl.constexpr, PACK: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Runs the PTX forward body. Lanes index the concatenated keys of all heads, so short heads leave no lane idle."""
    LANES: tl.constexpr = GROUP * COPIES
    thread = _thread(THREADS)
    slot = tl.program_id(0).to(tl.int64) * (THREADS // LANES) + thread // LANES
    position, part = _lane(thread % LANES, GROUP, CHUNK, WIDTH, SPLIT, COPIES, RUN, STRETCH)
    first = (slot < total) & (thread % LANES == 0)
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
            (weight + h * wh + position).to(tl.int64),
            (out_row + s * os).to(tl.int64),
            (out_row + other * os).to(tl.int64),
            ol * (out.dtype.element_ty.primitive_bitwidth // 8),
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
    heads: tl.int64, length: tl.int64, count: tl.int64, rows: tl.int64, span: tl.int64,
    BODY: tl.constexpr, CONSTRAINTS: tl.constexpr,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, COPIES: tl.constexpr,
    RUN: tl.constexpr, STRETCH: tl.constexpr, BASES: tl.constexpr, WARPS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Runs the PTX backward body. A program processes ``span`` tiles of keys."""
    LANES: tl.constexpr = GROUP * COPIES
    DIMS: tl.constexpr = LANES * CHUNK * SPLIT * WIDTH
    thread = _thread(32 * WARPS)
    position, part = _lane(thread % LANES, GROUP, CHUNK, WIDTH, SPLIT, COPIES, RUN, STRETCH)
    tiles = tl.cdiv(count, KEYS)
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
            (weight + h * wh + position).to(tl.int64),
            (grad + n * gn + h * gh + start * gl).to(tl.int64),
            gl * (grad.dtype.element_ty.primitive_bitwidth // 8),
            gs * (grad.dtype.element_ty.primitive_bitwidth // 8),
            (key_grad + (chunk * all_heads + head) * count * DIMS).to(tl.int64),
            (query_grad + ((strip * all_heads + head) * length + start) * DIMS).to(tl.int64),
            (weight_grad + (program * WARPS + thread // 32) * (BASES * GROUP * CHUNK)).to(tl.int64),
            (strip * span * KEYS).to(tl.int64),
            count,
            tl.minimum(rows, length - start).to(tl.int32),
            tl.minimum(span, tiles - strip * span).to(tl.int32),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@shape_free
def score_mma(
    query, key, weight, out,
    qn: tl.int64, qh: tl.int64, ql: tl.int64, kn: tl.int64, kh: tl.int64, ks: tl.int64, wh: tl.int64,
    on: tl.int64, oh: tl.int64, ol: tl.int64, os: tl.int64,
    heads: tl.int64, length: tl.int64, count: tl.int64, rows: tl.int64, tiles: tl.int64,
    BODY: tl.constexpr, CONSTRAINTS: tl.constexpr, KEYS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Runs the forward body for tensor cores. A program processes KEYS keys and ``rows`` queries."""
    thread = _thread(32 * WARPS)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    n, h = head // heads, head % heads
    first = (tl.program_id(0) % tiles * KEYS).to(tl.int32)
    start = tl.program_id(1).to(tl.int64) * rows
    item: tl.constexpr = query.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        BODY,
        CONSTRAINTS,
        [
            (key + n * kn + h * kh).to(tl.int64) + 0 * thread.to(tl.int64),
            ks * item,
            (query + n * qn + h * qh + start * ql).to(tl.int64),
            ql * item,
            (weight + h * wh).to(tl.int64),
            (out + n * on + h * oh + start * ol).to(tl.int64),
            os * (out.dtype.element_ty.primitive_bitwidth // 8),
            ol * (out.dtype.element_ty.primitive_bitwidth // 8),
            count,
            first,
            tl.minimum(rows, length - start).to(tl.int32),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _dissimilarity(BASES: tl.constexpr, INDEX: tl.constexpr, query, key, rate=None):
    """Returns the dissimilarity of one base, the negative of its similarity; ``rate`` points to that of ``near``."""
    if BASES[INDEX] == "dot":
        value = -query * key
    elif BASES[INDEX] == "dis":
        value = (query - key) * (query - key)
    elif BASES[INDEX] == "near":
        value = -tl.exp2(tl.abs(query - key) * tl.load(rate))
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


@triton.jit
def _tile(n, size, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """Returns the dimensions of a tile ``(1, BLOCKS, SIZE)`` and which of them exist."""
    block = tl.arange(0, BLOCKS)[None, :, None]
    place = tl.arange(0, SIZE)[None, None, :]
    return block * size + place, (block < n) & (place < size)


@shape_free
def score_portable(
    query, key, weight, out,
    qn: tl.int64, qh: tl.int64, ql: tl.int64, kn: tl.int64, kh: tl.int64, ks: tl.int64, wh: tl.int64,
    on: tl.int64, oh: tl.int64, ol: tl.int64, os: tl.int64,
    heads: tl.int64, length: tl.int64, count: tl.int64, rows: tl.int64,
    tiles: tl.int64, blocks: tl.int64, size: tl.int64,
    BASES: tl.constexpr, KEYS: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Sorts a tile of KEYS x BLOCKS dissimilarities along the blocks, for one query at a time."""
    head = (tl.program_id(0) // tiles).to(tl.int64)
    n, h = head // heads, head % heads
    s = tl.program_id(0) % tiles * KEYS + tl.arange(0, KEYS)
    i, inside = _tile(blocks, size, BLOCKS, SIZE)
    j = tl.arange(0, BLOCKS)
    within = (s < count)[:, None, None] & inside
    keys = tl.load(key + n * kn + h * kh + s[:, None, None] * ks + i, mask=within, other=0.0).to(tl.float32)
    start = tl.program_id(1).to(tl.int64) * rows
    for row in range(start, tl.minimum(start + rows, length)):
        queries = tl.load(query + n * qn + h * qh + row * ql + i, mask=inside, other=0.0).to(tl.float32)
        score = tl.zeros([KEYS], tl.float32)
        for index in tl.static_range(len(BASES)):
            rate = weight + h * wh + (len(BASES) + index) * blocks
            values = tl.sum(tl.where(inside, _dissimilarity(BASES, index, queries, keys, rate), 0.0), axis=2)
            # A sort can lose a NaN, so the scores of pairs with a NaN are set to NaN afterwards.
            missing = tl.max((values != values).to(tl.int32), axis=1)
            ordered = tl.sort(tl.where((j < blocks)[None, :], values, float("inf")), dim=1)
            weights = tl.load(weight + h * wh + index * blocks + j, mask=j < blocks, other=0.0)
            score -= tl.sum(tl.where((j < blocks)[None, :], ordered * weights[None, :], 0.0), axis=1)
            score = tl.where(missing > 0, float("nan"), score)
        tl.store(out + n * on + h * oh + row * ol + s * os, score, mask=s < count)


@shape_free
def score_backward_portable(
    grad, query, key, weight, query_grad, key_grad, weight_grad,
    gn: tl.int64, gh: tl.int64, gl: tl.int64, gs: tl.int64,
    qn: tl.int64, qh: tl.int64, ql: tl.int64, kn: tl.int64, kh: tl.int64, ks: tl.int64, wh: tl.int64,
    heads: tl.int64, length: tl.int64, count: tl.int64, rows: tl.int64,
    span: tl.int64, blocks: tl.int64, size: tl.int64,
    BASES: tl.constexpr, KEYS: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Ranks by two integer sorts, of (value, block) and then of (block, position), and sums the derivatives."""
    strips = tl.cdiv(tl.cdiv(count, KEYS), span)
    strip = tl.program_id(0) % strips
    head = (tl.program_id(0) // strips).to(tl.int64)
    n, h = head // heads, head % heads
    all_heads = tl.num_programs(0) // strips
    d = blocks * size
    i, inside = _tile(blocks, size, BLOCKS, SIZE)
    j = tl.arange(0, BLOCKS)[None, :]
    SLOTS: tl.constexpr = 4 if len(BASES) == 3 else len(BASES)  # a power of two
    weights_grad = tl.zeros([SLOTS, KEYS, BLOCKS], tl.float32)
    base_number = tl.arange(0, SLOTS)[:, None, None]
    chunk = tl.program_id(1).to(tl.int64)
    start = chunk * rows
    for tile in range(strip * span, tl.minimum(strip * span + span, tl.cdiv(count, KEYS))):
        s = tile * KEYS + tl.arange(0, KEYS)
        within = (s < count)[:, None, None] & inside
        exists = (s < count)[:, None] & (j < blocks)
        keys = tl.load(key + n * kn + h * kh + s[:, None, None] * ks + i, mask=within, other=0.0).to(tl.float32)
        keys_grad = tl.zeros([KEYS, BLOCKS, SIZE], tl.float32)
        for row in range(start, tl.minimum(start + rows, length)):
            queries = tl.load(query + n * qn + h * qh + row * ql + i, mask=inside, other=0.0).to(tl.float32)
            slope = -tl.load(grad + n * gn + h * gh + row * gl + s * gs, mask=s < count, other=0.0).to(tl.float32)[
                :, None
            ]
            row_grad = tl.zeros([KEYS, BLOCKS, SIZE], tl.float32)
            for index in tl.static_range(len(BASES)):
                values = tl.sum(_dissimilarity(BASES, index, queries, keys), axis=2)
                bits = tl.where(j < blocks, values, float("inf")).to(tl.int32, bitcast=True)
                ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
                by_value = tl.sort(ordered * 4294967296 + j, dim=1)
                bits = (by_value >> 32).to(tl.int32)
                sorted_values = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
                share = tl.where(exists, slope * sorted_values, 0.0)
                weights_grad += tl.where(base_number == index, share[None, :, :], 0.0)
                by_block = tl.sort((by_value & 0xFFFFFFFF) * 4294967296 + j, dim=1)
                rank = by_block & 0xFFFFFFFF
                weights = slope * tl.load(weight + h * wh + index * blocks + rank, mask=exists, other=0.0)
                by_query, by_key = _slopes(BASES, index, queries, keys)
                row_grad += weights[:, :, None] * by_query
                keys_grad += weights[:, :, None] * by_key
            place = query_grad + ((strip * all_heads + head) * length + row) * d + i
            before = tl.load(place, mask=inside & (tile > strip * span), other=0.0)
            total = tl.sum(tl.where(within, row_grad, 0.0), axis=0, keep_dims=True)
            tl.store(place, before + total, mask=inside)
        place = ((chunk * all_heads + head) * count + s[:, None, None]) * d + i
        tl.store(key_grad + place, keys_grad, mask=within)
    program = (strip * tl.num_programs(1) + chunk) * all_heads + head
    for index in tl.static_range(len(BASES)):
        total = tl.sum(tl.sum(tl.where(base_number == index, weights_grad, 0.0), axis=0), axis=0, keep_dims=True)
        tl.store(weight_grad + (program * len(BASES) + index) * blocks + j, total, mask=j < blocks)

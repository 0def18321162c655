"""The portable kernels, for all devices of Triton.

``launch.py`` imports this file when a kernel runs for the first time. Strides count elements. A program owns a tile of
keys and loops over ``rows`` queries. It writes each partial sum to its own address, so results do not depend on the
order in which programs run.
"""

import triton
import triton.language as tl

NAMES = "qn qh ql kn kh ks wh on oh ol os gn gh gl gs heads length count rows span tiles blocks size".split()  # noqa: SIM905
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

// Gradients of scores: a warp keeps a tile of keys in registers and compares it with queries in turn.
//
// The derivative of a score with respect to a similarity is the weight at the similarity's rank. Each similarity
// carries the place in shared memory where its block expects that weight through the sort. Then rank j writes weight j
// to the place that it carries. Every lane has its own bank. Several warps have different keys of the same queries, and
// add up the gradients of a query in shared memory.
#include "score_call.cuh"

constexpr int WARPS = AHOP_WARPS, THREADS = 32 * WARPS, KEYS = WARPS * PAIRS;
constexpr bool TAGGED = AHOP_TAGGED;  // half precision: the place is in bits of a value that it does not use
// A value with its place takes twice the instructions, so less of the code is unrolled.
constexpr int NETWORKS = N > 48 && !TAGGED ? 1 : UNROLLED, LEVELS = GROUP >= 16 && !TAGGED ? 1 : 5;
constexpr int TAG_BITS = 10, PLACES = CHUNK * 32;  // places of a base: slot * 32 + lane, or its member in a group

// A value and its place. The places remain a permutation for all values, including NaN.
struct Placed {
    float x;
    u32 place;
    static DEVICE void order(Placed& a, Placed& b) {
        const bool swap = a.x < b.x;
        const Placed first = a;
        a.x = swap ? b.x : a.x, a.place = swap ? b.place : a.place;
        b.x = swap ? first.x : b.x, b.place = swap ? first.place : b.place;
    }
    DEVICE Placed of_lanes(Placed sent, int distance, bool upper) const {
        const float other = shuffle_xor(sent.x, distance);
        const u32 other_place = shuffle_xor(sent.place, distance);
        const bool swap = (upper ? other : x) < (upper ? x : other);  // the same comparison in both lanes
        return {swap ? other : x, swap ? other_place : place};
    }
};

DEVICE void set_place(Placed& item, u32 place) { item.place = place; }
DEVICE u32 place_of(const Placed& item) { return item.place; }

// The same in one word: the place is in the last bits of the value, which half precision rounds. Beside a NaN, a value
// and its place can appear twice.
typedef Ordered<float, fmaxf, fminf> Word;

DEVICE void set_place(Word& item, u32 place) {
    item.x = bits_float((float_bits(item.x) & -(1 << TAG_BITS)) | place);
}
DEVICE u32 place_of(const Word& item) { return float_bits(item.x) & ((1 << TAG_BITS) - 1); }

template <bool> struct ItemOf { typedef Placed Type; };
template <> struct ItemOf<true> { typedef Word Type; };
typedef ItemOf<TAGGED>::Type Item;

// Sums over the pairs of a warp by recursive halving: a lane keeps half of its COUNT values and sends the other half.
// With an odd number of values, every lane keeps all of them.
template <int COUNT, int DISTANCE = LANES>
struct WarpSums {
    static constexpr bool HALVES = COUNT % 2 == 0;
    typedef WarpSums<HALVES ? COUNT / 2 : COUNT, 2 * DISTANCE> Next;
    static constexpr int KEPT = Next::KEPT;

    // The first value that a lane keeps.
    static DEVICE int first(int lane) { return (HALVES && lane & DISTANCE ? COUNT / 2 : 0) + Next::first(lane); }

    // Whether a lane is the first of those that keep the same values.
    static DEVICE bool stores(int lane) { return (HALVES || !(lane & DISTANCE)) && Next::stores(lane); }

    static DEVICE void reduce(float* x, int lane) {
        if constexpr (HALVES) {
            exchange_halves<COUNT>(x, DISTANCE, lane & DISTANCE);
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) x[i] += shuffle_xor(x[i], DISTANCE);
        }
        Next::reduce(x, lane);
    }
};

template <int COUNT>
struct WarpSums<COUNT, 32> {
    static constexpr int KEPT = COUNT;
    static DEVICE int first(int) { return 0; }
    static DEVICE bool stores(int) { return true; }
    static DEVICE void reduce(float*, int) {}
};

constexpr int gcd(int a, int b) { return b ? gcd(b, a % b) : a; }
typedef WarpSums<PER_LANE> RowSums;
typedef WarpSums<CHUNK> RankSums;
constexpr int KEPT = RowSums::KEPT, VECTOR = gcd(gcd(KEPT, STRETCH), 4);

// Copies adjacent floats, up to four at a time.
template <int COUNT>
DEVICE void copy_floats(float* to, const float* from) {
    if constexpr (COUNT == 4) {
        *(float4*)to = make_float4(from[0], from[1], from[2], from[3]);
    } else if constexpr (COUNT == 2) {
        *(float2*)to = make_float2(from[0], from[1]);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) to[i] = from[i];
    }
}

// Adds the gradient of one base to one dimension of query and key; `slope` is the derivative of its similarity.
DEVICE void add_slopes(int kind, float slope, float query, float key, float& query_grad, float& key_grad) {
    const float difference = query - key;
    if (kind == DOT) {
        query_grad = fmaf(slope, key, query_grad);
        key_grad = fmaf(slope, query, key_grad);
    } else {
        const float sign = difference != 0 ? copysignf(1, difference) : difference;
        const float step = kind == DIS ? difference + difference : sign;
        query_grad = fmaf(-slope, step, query_grad);
        key_grad = fmaf(slope, step, key_grad);
    }
}

// Writes the weights of sorted values to their places, and adds the values to the gradient of the weights.
DEVICE void deliver(float* region, float (&weight_grad)[CHUNK], const u32 (&weights)[CHUNK], Item (&items)[CHUNK],
                    float grad) {
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        region[place_of(items[i])] = bits_float(weights[i]);
        weight_grad[i] = fmaf(grad, items[i].x, weight_grad[i]);
    }
}

KERNEL void __launch_bounds__(THREADS) score_backward(const ScoreCall p) {
    SHARED_MEMORY(shared);
    const Lane lane;
    const int warp = threadIdx.x / 32, all_heads = p.batch * p.heads, programs = all_heads * p.strips;
    const int program = blockIdx.x % programs, strip = program % p.strips, chunk = blockIdx.x / programs;
    const int head = program / p.strips;
    const int n = head / p.heads, h = head % p.heads, start = chunk * p.rows, first_tile = strip * p.span;
    const int tiles = min(p.span, (p.count + KEYS - 1) / KEYS - first_tile), rows = min(p.rows, p.length - start);
    const float* weight = p.folded + h * FOLDED;
    float* const ranked = (float*)shared + warp * BASES * PLACES;  // weights at the ranks of all blocks
    float* const own_ranked = ranked + lane.index - lane.member;   // of this group
    float* const rows_grad = p.query_parts + ((i64)(strip * all_heads + head) * p.length + start) * DIMS;
    float constants[BASES], weight_grad[BASES][CHUNK] = {};
    const bool flat = find_flat(constants, weight, lane);
    const int kept = RowSums::first(lane.index);
    const bool stores = RowSums::stores(lane.index);
    int turn = 0;  // of two buffers with a row for each warp

    for (int tile = 0; tile < tiles; ++tile) {
        const int number = (first_tile + tile) * KEYS + threadIdx.x / LANES, own = min(number, p.count - 1);
        const bool valid = number < p.count;  // lanes past the last key repeat it and store nothing
        const Tensor &queries_place = p.query.ready, &keys = p.key.ready;
        const char* query = queries_place.at(n, h) + start * queries_place.row;
        const char* grad_place = p.scores.at(n, h) + start * p.scores.row + own * p.scores_key;
        float key[PER_LANE], key_grad[PER_LANE] = {};
        lane.load(key, keys.at(n, h) + own * keys.row);
        for (int row = 0; row < rows; ++row, query += queries_place.row, grad_place += p.scores.row) {
            float grad = 0;
            if (valid) load_floats<1, SCORE_DTYPE>(&grad, grad_place);
            float* const row_grad = rows_grad + (i64)row * DIMS + lane.dimension;
            float before[KEPT] = {};
#pragma unroll
            for (int i = 0; WARPS == 1 && tile && stores && i < KEPT; i += VECTOR)  // early, to be added later
                copy_floats<VECTOR>(before + i, row_grad + dimension_of(kept + i));
            float queries[PER_LANE];
            if (KEEPS_ROWS) lane.load(queries, query);
            if (MAY_BE_FLAT && flat) {
#pragma unroll
                for (int i = 0; i < BASES * CHUNK; ++i) ranked[32 * i + lane.index] = constants[i / CHUNK];
            } else {
#pragma unroll NETWORKS
                for (int base = 0; base < BASES; ++base) {
                    Item items[CHUNK];
                    // All bases share one network if the loop is not unrolled, and `each` is constant anyway.
#pragma unroll
                    for (int each = 0; each < BASES; ++each) {
                        if (each != base) continue;
                        if constexpr (!KEEPS_ROWS) lane.load(queries, query);
                        compute_similarities(items, kind_of(each), queries, key, lane);
#pragma unroll
                        for (int i = 0; i < CHUNK; ++i) set_place(items[i], 32 * i + lane.member);
                    }
                    sort_group<LEVELS>(items, lane.index);
                    float* const region = own_ranked + base * PLACES;
                    u32 factors[CHUNK];
                    load_words<CHUNK>(factors, loaded_again((const char*)(weight + base * BLOCKS + lane.position)));
#pragma unroll
                    for (int each = 0; each < BASES; ++each)
                        if (each == base) deliver(region, weight_grad[each], factors, items, grad);
                }
            }
            sync_warp();
            float query_grad[PER_LANE] = {};
            if (!KEEPS_ROWS) lane.load(queries, query);
#pragma unroll
            for (int block = 0; block < HELD; ++block) {
                const int owner = lane.index / SPLIT * SPLIT + block / CHUNK;  // the lane that sorted it
#pragma unroll
                for (int base = 0; base < BASES; ++base) {
                    const float slope = grad * ranked[base * PLACES + 32 * (block % CHUNK) + owner];
#pragma unroll
                    for (int i = block * WIDTH; i < (block + 1) * WIDTH; ++i)
                        add_slopes(kind_of(base), slope, queries[i], key[i], query_grad[i], key_grad[i]);
                }
            }
            sync_warp();  // all reads finish before the next query overwrites the weights
            RowSums::reduce(query_grad, lane.index);
            if constexpr (WARPS == 1) {
#pragma unroll
                for (int i = 0; i < KEPT; ++i) before[i] += query_grad[i];
#pragma unroll
                for (int i = 0; stores && i < KEPT; i += VECTOR)
                    copy_floats<VECTOR>(row_grad + dimension_of(kept + i), before + i);
            } else {
                float* const exchange = (float*)shared + WARPS * BASES * PLACES + turn * WARPS * DIMS;
#pragma unroll
                for (int i = 0; stores && i < KEPT; i += VECTOR)
                    copy_floats<VECTOR>(exchange + warp * DIMS + lane.dimension + dimension_of(kept + i),
                                        query_grad + i);
                sync_block();
                constexpr int UNIT = gcd(DIMS, 4);
                for (int i = threadIdx.x * UNIT; i < DIMS; i += THREADS * UNIT) {
                    float* const place = rows_grad + (i64)row * DIMS + i;
                    float total[UNIT] = {};
                    if (tile) copy_floats<UNIT>(total, place);
#pragma unroll
                    for (int each = 0; each < WARPS; ++each)
#pragma unroll
                        for (int j = 0; j < UNIT; ++j) total[j] += exchange[each * DIMS + i + j];
                    copy_floats<UNIT>(place, total);
                }
                turn ^= 1;  // the buffers take turns, so one barrier for each row is enough
            }
        }
        float* const place = p.key_parts + ((i64)(chunk * all_heads + head) * p.count + own) * DIMS + lane.dimension;
        constexpr int UNIT = gcd(STRETCH, 4);
#pragma unroll
        for (int i = 0; valid && i < PER_LANE; i += UNIT) copy_floats<UNIT>(place + dimension_of(i), key_grad + i);
    }
    const i64 part = (((strip * p.chunks + chunk) * (i64)p.batch + n) * WARPS + warp) * p.heads + h;
    const bool is_copy = lane.index % LANES >= GROUP;
#pragma unroll
    for (int base = 0; base < BASES; ++base) {
        RankSums::reduce(weight_grad[base], lane.index);
        float* const place = p.weight_parts + (part * BASES + base) * BLOCKS + lane.position;
#pragma unroll
        for (int i = 0; i < RankSums::KEPT; ++i)
            if (RankSums::stores(lane.index) && !is_copy) place[RankSums::first(lane.index) + i] = weight_grad[base][i];
    }
}

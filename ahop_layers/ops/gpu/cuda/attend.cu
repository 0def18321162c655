// Fused attention, forward: block similarities, softmax and readout without a matrix of scores.
//
// A warp owns 16 queries. The warps of a block share all keys and values in shared memory if they fit (AREAS == 1), and
// go on with further queries of the head, in rounds. Otherwise they share three groups of keys: while one is used, the
// norms of the next are computed, and the one after it is copied. A group is scored in tiles of KEYS keys.
#include "tiles.cuh"

constexpr int KEYS = 32, PARTS = KEYS / 8;
constexpr int OWN_BYTES = ROWS * ((DIM_BYTES > WIDTH_BYTES ? DIM_BYTES : WIDTH_BYTES) + NORM_BYTES);
constexpr int GROUP_KEYS = AHOP_TILES * KEYS, AREAS = AHOP_AREAS;
constexpr int VALUES = GROUP_KEYS * DIM_BYTES, NORMS = VALUES + GROUP_KEYS * WIDTH_BYTES;
constexpr int AREA_BYTES = NORMS + GROUP_KEYS * NORM_BYTES;
constexpr float LARGE = 1024;  // the sum of a lane's shares from which on the readout is scaled again

struct Forward {
    Tensor query, key, value, out, mask;
    i64 mask_key;  // a further stride
    Weights weights;
    const u32* seed;
    float* log_sum;
    int heads, group, length, count, thread_blocks;
    u32 threshold;
    float factor, scaling;
};

// Computes the scores of a tile, less `largest`; `left` keys of it exist, and all if FULL.
template <bool FULL>
DEVICE void score_tile(float (&scores)[PARTS][4], const u32 (&queries)[own_words(DIM)],
                       const u32 (&query_norms)[N][2], const float (&u)[BASES][N], const float (&largest)[2], u32 keys,
                       const char* norms, int left) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        if (!FULL && 8 * part >= left) continue;
        Similarities similarities;
        similarities.compute(queries, keys + 8 * part * DIM_BYTES, query_norms, norms + 8 * NORM * part, GROUP_KEYS);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            float x[BASES][N], score = -largest[pair / 2];
            similarities.of_pair(pair, x);
#pragma unroll
            for (int i = 0; i < BASES; ++i) score = Sorter<N>::weighted_sum(x[i], u[i], score);
            scores[part][pair] = score;
        }
    }
}

KERNEL void __launch_bounds__(THREADS, BLOCKS_PER_SM) attend_forward(const Forward p) {
    SHARED_MEMORY(shared);
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    const int index = blockIdx.x / p.thread_blocks, n = index / p.heads, h = index % p.heads;
    const int place = blockIdx.x % p.thread_blocks;
    const int block = CAUSAL ? p.thread_blocks - 1 - place : place;  // the longest first
    const Lane lane;
    const char *key = p.key.at(n, h / p.group), *value = p.value.at(n, h / p.group);
    // The queries of this thread block, and of all thread blocks in a round.
    const int own_queries = warps * ROWS, step = p.thread_blocks * own_queries;
    const int rounds = AREAS > 1 ? 1 : (p.length - block * own_queries + step - 1) / step;
    const int end = block * own_queries + (rounds - 1) * step + own_queries;  // of the queries of this block
    const int last = CAUSAL ? min(p.count, end) : p.count;                    // later keys are masked
    char* own = shared + AREAS * AREA_BYTES + warp * OWN_BYTES;
    char* own_norms = own + OWN_BYTES - ROWS * NORM_BYTES;
    const u32 base = shared_address(shared);
    const int filled = AREAS > 1 ? GROUP_KEYS : (last + KEYS - 1) / KEYS * KEYS;  // keys of an area that are used

    auto copy_group = [&](int start, int area) {
        if (start < last) {
            const u32 address = base + area * AREA_BYTES;
            copy_rows<Points>(address, key, p.key.row, start, filled, p.count, threadIdx.x, blockDim.x);
            copies_commit();
            copy_rows<Values>(address + VALUES, value, p.value.row, start, filled, p.count, threadIdx.x, blockDim.x);
        }
        copies_commit();
    };
    auto prepare_group = [&](int start, int area) {
        char* data = shared + area * AREA_BYTES;
        if (start < last) store_norms<false>(data + NORMS, data, threadIdx.x, blockDim.x, GROUP_KEYS, filled);
    };

    auto copy_queries = [&](int first) {
        copy_rows<Points>(shared_address(own), p.query.at(n, h), p.query.row, first, ROWS, p.length, lane.index, 32);
    };
    int first = block * own_queries + warp * ROWS;
    copy_queries(first);
    copy_group(0, 0);
    if (AREAS > 1) copy_group(GROUP_KEYS, 1);
    float u[BASES][N];
    load_weights(u, p.weights, h, p.scaling);
#pragma unroll
    for (int i = 0; i < BASES; ++i) {
#pragma unroll
        for (int j = 0; j < N; ++j) u[i][j] *= LOG2_E;
        Sorter<N>::halve(u[i]);
    }
    Pairs pairs{p.mask.at(n, h), p.mask.row, p.mask_key, p.length, p.count, 0, 0, p.threshold};
    pairs.seed(p.seed, index);
    copies_wait<AREAS == 1 ? 1 : 2>();
    sync_block();  // the keys of the first group are visible
    prepare_group(0, 0);
    if (AREAS == 1) copies_wait<0>(), sync_block();  // and the values and norms

    for (int round = 0; round < rounds; ++round, first += step) {
        if (round) {
            if (first >= p.length) return;
            sync_warp();
            copy_queries(first);
            copies_commit();
            copies_wait<0>();
            sync_warp();
        }
        const int seen = CAUSAL && AREAS == 1 ? min(last, first + ROWS) : last;
        const int rows[2] = {first + lane.row, first + lane.row + 8};
        u32 words[2][2];
        if (DROPOUT) pairs.query_words(rows[0], words[0]), pairs.query_words(rows[1], words[1]);
        store_norms<true>(own_norms, own, lane.index);
        u32 queries[own_words(DIM)];
        load_own<DIM>(queries, shared_address(own) + lane.pair<DIM>());
        sync_warp();
        u32 query_norms[N][2];
        load_own_norms(query_norms, own_norms, lane);
        // Shares are exponents relative to `largest`, a score of the row, as soon as it has one.
        float readout[WIDTH_CHUNKS][4] = {}, largest[2] = {}, totals[2] = {};
        bool started[2] = {}, waiting = true;
        for (int start = 0, area = 0; start < seen; start += KEYS) {
            const int part = AREAS > 1 ? start % GROUP_KEYS : start;
            if (AREAS > 1 && part == 0) {
                if (start) area = area + 1 < AREAS ? area + 1 : 0;
                copies_wait<0>();
                sync_block();  // the next group and the norms of this one are visible, and the previous group was used
                copy_group(start + 2 * GROUP_KEYS, area ? area - 1 : AREAS - 1);
                prepare_group(start + GROUP_KEYS, area + 1 < AREAS ? area + 1 : 0);
            }
            if (first >= p.length) continue;
            const int offset = area * AREA_BYTES, left = seen - start;
            const char* norms = shared + offset + NORMS + NORM * part + lane.norm();
            const u32 keys = base + offset + part * DIM_BYTES + lane.quad<DIM>();
            float scores[PARTS][4];
            if (left >= KEYS) {
                score_tile<true>(scores, queries, query_norms, u, largest, keys, norms, left);
            } else {
                score_tile<false>(scores, queries, query_norms, u, largest, keys, norms, left);
            }
            if (MASK != NO_MASK || (CAUSAL && start + KEYS > first) || left < KEYS) {
#pragma unroll
                for (int i = 0; i < 4 * PARTS; ++i) {
                    const int column = i / 4 * 8 + lane.column + i % 2;
                    float& score = scores[i / 4][i % 4];
                    score = column < left ? pairs.masked(score, rows[i % 4 / 2], start + column) : -INFINITE;
                }
            }

            float shares[PARTS][4], sums[2] = {};
#pragma unroll
            for (int i = 0; i < 4 * PARTS; ++i) {
                shares[i / 4][i % 4] = exp2_approx(scores[i / 4][i % 4]);
                sums[i % 4 / 2] += shares[i / 4][i % 4];
            }
            if (any_lane(waiting || !(sums[0] + sums[1] < LARGE))) {  // also for a NaN
                float tops[2] = {-INFINITE, -INFINITE};
#pragma unroll
                for (int i = 0; i < 4 * PARTS; ++i) tops[i % 4 / 2] = max_nan(tops[i % 4 / 2], scores[i / 4][i % 4]);
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    tops[row] = max_nan(tops[row], shuffle_xor(tops[row], 1));
                    tops[row] = max_nan(tops[row], shuffle_xor(tops[row], 2));
                    const bool exists = tops[row] != -INFINITE;
                    if (!exists || (started[row] && tops[row] < 0)) tops[row] = 0;
                    const float decay = started[row] ? exp2_approx(-tops[row]) : 1;
                    started[row] |= exists;
                    largest[row] += tops[row];
                    totals[row] *= decay;
                    sums[row] = 0;
#pragma unroll
                    for (int chunk = 0; chunk < WIDTH_CHUNKS; ++chunk)
                        readout[chunk][2 * row] *= decay, readout[chunk][2 * row + 1] *= decay;
                }
                waiting = !started[0] || !started[1];
#pragma unroll
                for (int i = 0; i < 4 * PARTS; ++i) {
                    shares[i / 4][i % 4] = exp2_approx(scores[i / 4][i % 4] - tops[i % 4 / 2]);
                    sums[i % 4 / 2] += shares[i / 4][i % 4];
                }
            }
#pragma unroll
            for (int i = 0; i < 4 * PARTS; ++i) {
                const int row = i % 4 / 2;
                if (DROPOUT && !pairs.keeps(words[row], start + i / 4 * 8 + lane.column + i % 2)) shares[i / 4][i % 4] = 0;
            }
            totals[0] += sums[0];
            totals[1] += sums[1];
#pragma unroll
            for (int i = 0; i < PARTS; i += 2) {
                u32 packed[SQUARE];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float* two = shares[i + j / 2] + j % 2 * 2;
                    set_pair(packed, j, two[0], two[1]);
                }
                const u32 values = base + offset + VALUES + (part + 8 * i) * WIDTH_BYTES + lane.columns<WIDTH>();
                multiply_columns<WIDTH>(readout, [&](int) -> const u32(&)[SQUARE] { return packed; }, values);
            }
        }
        if (first >= p.length) return;
        float inverse[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            totals[row] += shuffle_xor(totals[row], 1);
            totals[row] += shuffle_xor(totals[row], 2);
            const bool empty = totals[row] == 0;
            inverse[row] = empty ? 0 : p.factor / totals[row];
            // Float32 rounds once: an error of the logarithm changes all shares that the backward pass computes.
            const float finite = SINGLE ? fmaf(largest[row], LN_2, logf(totals[row]))
                                        : (largest[row] + log2_approx(totals[row])) * LN_2;
            const float log_sum = empty ? INFINITE : finite;
            if (lane.column == 0 && rows[row] < p.length) p.log_sum[(i64)index * p.length + rows[row]] = log_sum;
        }
        store_rows<Values>(readout, inverse[0], inverse[1], own, p.out.at(n, h) + first * p.out.row, p.out.row,
                          p.length - first, lane);
    }
}

// Scores of a few wide blocks in half precision, on tensor cores. A warp owns 16 queries in registers; the warps of a
// thread block share keys in shared memory: while some are used, the next ones are copied.
#include "tiles.cuh"

constexpr int KEYS = THREADS / 2;  // 16 for each warp
constexpr int NORMS = KEYS * DIM_BYTES, AREA_BYTES = NORMS + KEYS * NORM_BYTES;  // one of two areas

struct TileScore {
    Tensor query, key, out;
    i64 out_key;  // a further stride
    Weights weights;
    int heads, length, count, rows, thread_blocks, chunks;  // `rows` keys in a chunk, thread blocks of queries
};

KERNEL void __launch_bounds__(THREADS) score_tiles(const TileScore p) {
    SHARED_MEMORY(shared);
    const Lane lane;
    const int warp = threadIdx.x / 32, head = blockIdx.x / p.thread_blocks / p.chunks;
    const int n = head / p.heads, h = head % p.heads;
    const int block = blockIdx.x % p.thread_blocks * KEYS, first = block + warp * ROWS;
    const int begin = blockIdx.x / p.thread_blocks % p.chunks * p.rows, end = min(p.count, begin + p.rows);

    auto copy_keys = [&](int start, int area) {
        if (start < end)
            copy_rows<Points>(shared_address(shared) + area * AREA_BYTES, p.key.at(n, h), p.key.row, start, KEYS, end,
                           threadIdx.x, THREADS);
        copies_commit();
    };
    // Queries are in the second area until they are in registers.
    char* const queries_area = shared + AREA_BYTES;
    copy_rows<Points>(shared_address(queries_area), p.query.at(n, h), p.query.row, block, KEYS, p.length, threadIdx.x,
                   THREADS);
    copy_keys(begin, 0);
    float u[BASES][N];
    load_weights(u, p.weights, h);
#pragma unroll
    for (int i = 0; i < BASES; ++i) Sorter<N>::halve(u[i]);
    copies_wait<0>();
    sync_block();
    store_norms<true>(queries_area + NORMS, queries_area, threadIdx.x, THREADS, KEYS);
    sync_block();
    u32 queries[own_words(DIM)], query_norms[N][2];
    load_own<DIM>(queries, shared_address(queries_area) + warp * ROWS * DIM_BYTES + lane.pair<DIM>());
    load_own_norms<KEYS>(query_norms, queries_area + NORMS + 16 * warp * ROWS, lane);
    const int rows[2] = {first + lane.row, first + lane.row + 8};
    char* const out = p.out.at(n, h) + (begin + lane.column) * p.out_key;
    char* places[2] = {out + rows[0] * p.out.row, out + rows[1] * p.out.row};
    for (int start = begin, area = 0; start < end; start += KEYS, area ^= 1) {
        char* const keys = shared + area * AREA_BYTES;
        copies_wait<0>();
        sync_block();  // the copy is visible, and the other area was used
        copy_keys(start + KEYS, area ^ 1);
        store_norms<false>(keys + NORMS, keys, threadIdx.x, THREADS, KEYS);
        sync_block();
#pragma unroll 2
        for (int part = 0; part < KEYS / 8; ++part) {
            if (first >= p.length || start + 8 * part >= end) break;
            Similarities similarities;
            similarities.compute(queries, shared_address(keys) + 8 * part * DIM_BYTES + lane.quad<DIM>(), query_norms,
                                 keys + NORMS + 8 * NORM * part + lane.norm(), KEYS);
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                float x[BASES][N], score = 0;
                similarities.of_pair(pair, x);
#pragma unroll
                for (int i = 0; i < BASES; ++i) score = Sorter<N>::weighted_sum(x[i], u[i], score);
                const int key = start + 8 * part + lane.column + pair % 2;
                char* const place = places[pair / 2] + pair % 2 * p.out_key;
                if (rows[pair / 2] >= p.length || key >= end) continue;
                store_float<MASK_DTYPE>(place, score);
            }
            places[0] += 8 * p.out_key, places[1] += 8 * p.out_key;
        }
    }
}

// Scores of a few wide blocks in half precision, on tensor cores: a warp owns 16 queries and streams keys.
#include "tiles.cuh"

constexpr int AREA_BYTES = ROWS * (DIM_BYTES + NORM_BYTES);  // of one of two tiles of keys in shared memory

struct TileScore {
    Tensor query, key, out;
    i64 out_key, weight_head;  // further strides, of the weights in numbers
    const float* weight;
    int heads, length, count, rows, tiles, chunks;  // `rows` keys in each of `chunks`
};

KERNEL void __launch_bounds__(32) score_tiles(const TileScore p) {
    SHARED_MEMORY(shared);
    const Lane lane;
    const int first = blockIdx.x % p.tiles * ROWS, begin = blockIdx.x / p.tiles % p.chunks * p.rows;
    const int head = blockIdx.x / p.tiles / p.chunks, n = head / p.heads, h = head % p.heads;
    const int end = min(p.count, begin + p.rows);
    char *const own = shared + AREA_BYTES, *const own_norms = own + ROWS * DIM_BYTES;  // until they are in registers

    auto copy_keys = [&](int start, int area) {
        if (start < end)
            copy_rows<DIM>(shared_address(shared) + area * AREA_BYTES, p.key.at(n, h), p.key.row, start, ROWS, end,
                           lane.index, 32);
        copies_commit();
    };
    copy_rows<DIM>(shared_address(own), p.query.at(n, h), p.query.row, first, ROWS, p.length, lane.index, 32);
    copy_keys(begin, 0);
    float u[BASES][N];
    load_weights(u, p.weight + h * p.weight_head);
#pragma unroll
    for (int i = 0; i < BASES; ++i) Sorter<N>::halve(u[i]);
    copies_wait<0>();
    sync_warp();
    store_norms<true>(own_norms, own, lane.index);
    sync_warp();
    u32 queries[CHUNKS + CHUNKS % 2][2], query_norms[N][2];
    load_own<DIM>(queries, shared_address(own) + lane.pair<DIM>());
    load_own_norms(query_norms, own_norms, lane);
    for (int start = begin, area = 0; start < end; start += ROWS, area ^= 1) {
        char* const keys = shared + area * AREA_BYTES;
        char* const norms = keys + ROWS * DIM_BYTES;
        copies_wait<0>();
        sync_warp();  // the copy is visible, and all reads of the other area are finished
        copy_keys(start + ROWS, area ^ 1);
        store_norms<false>(norms, keys, lane.index);
        sync_warp();
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            Similarities similarities;
            similarities.compute(queries, shared_address(keys) + 8 * part * DIM_BYTES + lane.quad<DIM>(), query_norms,
                                 norms + 128 * part + 16 * lane.row + 2 * lane.column, ROWS);
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                float x[BASES][N], score = 0;
                similarities.of_pair(pair, x);
#pragma unroll
                for (int i = 0; i < BASES; ++i) score = Sorter<N>::weighted_sum(x[i], u[i], score);
                const int query = first + lane.row + pair / 2 * 8, key = start + 8 * part + lane.column + pair % 2;
                char* const place = p.out.at(n, h) + query * p.out.row + key * p.out_key;
                if (query >= p.length || key >= end) continue;
                if (HALF_SCORES) {
                    *(unsigned short*)place = Half::pack(score, 0);
                } else {
                    *(float*)place = score;
                }
            }
        }
    }
}

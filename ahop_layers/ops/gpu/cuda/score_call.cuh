// The arguments of scores, and what runs before and after their kernels: padded rows and folded weights, and sums of
// the parts of gradients in a fixed order.
#pragma once
#include "lanes.cuh"

constexpr int D = N * SIZE;                              // dimensions of a row without padding
constexpr int GIVEN_DTYPE = AHOP_GIVEN_DTYPE;            // of queries and keys, before they are copied
constexpr bool HAS_NEAR = AHOP_HAS_NEAR;
constexpr int FOLDED = (1 + HAS_NEAR) * BASES * BLOCKS;  // numbers of a head: weights, and rates of `near`
// Of all dimensions of a padding block, which is then less similar than all others: sums of squares stay finite.
constexpr float QUERY_PADDING = -1e17f, KEY_PADDING = 1e17f;

// Queries or keys: as they are given, with a further stride in bytes, and as the kernels read them.
struct Rows {
    Tensor given;
    i64 column;
    Tensor ready;

    DEVICE bool is_copied() const { return given.data != ready.data; }
};

struct ScoreCall {
    Rows query, key;
    Tensor scores;  // or their gradient
    i64 scores_key;
    const float* weight;  // (H, BASES, N)
    i64 weight_head, weight_base, weight_rank;
    const float* widths;  // (BASES,)
    float* folded;        // (H, FOLDED)
    float* query_parts;   // (strips, N, H, L, DIMS)
    float* key_parts;     // (chunks, N, H, S, DIMS)
    float* weight_parts;  // (strips, chunks, N, warps, H, BASES, BLOCKS)
    float* weight_sums;   // (groups, H, BASES, N)
    char *query_grad, *key_grad;  // (N, H, L, D), or no pointer
    float* weight_grad;           // (H, BASES, N)
    int batch, heads, length, count;
    int rows, programs;              // queries of a program, and programs with the same queries
    int span, strips, chunks, warps; // tiles of keys in a strip, strips of a head, and chunks of queries
    int groups;                      // of parts that are summed first
};

// Copies a dimension of a row. Blocks are padded with zeros.
DEVICE void copy_dimension(const Rows& rows, const ScoreCall& p, i64 i, int length, float fill) {
    const int place = i % DIMS, block = place / BLOCK_SIZE, column = place % BLOCK_SIZE;
    const i64 row = i / DIMS, head = row / length;
    const char* from = rows.given.at(head / p.heads, head % p.heads) + row % length * rows.given.row;
    float x = block < N ? 0 : fill;
    if (block < N && column < SIZE) load_floats<1, GIVEN_DTYPE>(&x, from + (block * SIZE + column) * rows.column);
    store_float<DTYPE>(rows.ready.data + i * ITEM, x);
}

// Folds the weights of a head and base: weight . cumsum(sorted) == folded . sorted. A lane has every 32nd rank.
DEVICE void fold_weights(const ScoreCall& p, int h, int base, int lane) {
    const float* const weight = p.weight + h * p.weight_head + base * p.weight_base;
    float* const folded = p.folded + (i64)h * FOLDED + base * BLOCKS;
    float later = 0;
    for (int start = (BLOCKS - 1) / 32 * 32; start >= 0; start -= 32) {
        const int rank = start + lane;
        float total = rank < N ? weight[rank * p.weight_rank] : 0;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const float other = shuffle(total, min(lane + distance, 31));
            if (lane + distance < 32) total += other;
        }
        total += later;
        later = shuffle(total, 0);
        if (rank >= BLOCKS) continue;
        folded[rank] = rank < N ? total : 0;
        if (HAS_NEAR) folded[BASES * BLOCKS + rank] = -LOG2_E / (p.widths ? p.widths[base] : 1);  // exp(-x / width)
    }
}

KERNEL void score_prepare(const ScoreCall p) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32, folding = (p.heads * BASES + warps - 1) / warps;
    const int number = blockIdx.x * warps + threadIdx.x / 32;
    if (blockIdx.x < folding) {
        if (number < p.heads * BASES) fold_weights(p, number / BASES, number % BASES, lane);
        return;
    }
    const i64 heads = (i64)p.batch * p.heads, queries = p.query.is_copied() ? heads * p.length * DIMS : 0;
    const i64 i = (i64)(blockIdx.x - folding) * blockDim.x + threadIdx.x, keys = heads * p.count * DIMS;
    if (i < queries) {
        copy_dimension(p.query, p, i, p.length, QUERY_PADDING);
    } else if (p.key.is_copied() && i - queries < keys) {
        copy_dimension(p.key, p, i - queries, p.count, KEY_PADDING);
    }
}

DEVICE float sum_parts(const float* parts, i64 stride, int first, int end, int step = 1) {
    float total = 0;
#pragma unroll 8
    for (int part = first; part < end; part += step) total += parts[part * stride];
    return total;
}

// Sums the parts of a dimension of query or key.
DEVICE void sum_rows(char* grad, const float* parts, i64 i, i64 rows, int count) {
    const int dimension = i % D;
    const i64 place = i / D * DIMS + dimension / SIZE * BLOCK_SIZE + dimension % SIZE;
    store_float<GIVEN_DTYPE>(grad + i * bytes_of(GIVEN_DTYPE), sum_parts(parts + place, rows * DIMS, 0, count));
}

KERNEL void score_sum(const ScoreCall p) {
    const i64 heads = (i64)p.batch * p.heads, rows[2] = {heads * p.length, heads * p.count};
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (p.query_grad) {
        if (i < rows[0] * D) return sum_rows(p.query_grad, p.query_parts, i, rows[0], p.strips);
        i -= rows[0] * D;
    }
    if (p.key_grad) {
        if (i < rows[1] * D) return sum_rows(p.key_grad, p.key_parts, i, rows[1], p.chunks);
        i -= rows[1] * D;
    }
    const int all = p.heads * BASES * N, group = i / all, place = i % all;
    if (group >= p.groups) return;
    const i64 stride = (i64)p.heads * BASES * BLOCKS, parts = (i64)p.strips * p.chunks * p.batch * p.warps;
    p.weight_sums[i] = sum_parts(p.weight_parts + place / N * BLOCKS + place % N, stride, group, parts, p.groups);
}

// Sums the groups, and undoes the folding: the cumulative sum is its transpose.
KERNEL void score_sum_weights(const ScoreCall p) {
    const int lane = threadIdx.x % 32, place = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (place >= p.heads * BASES) return;
    float earlier = 0;
    for (int start = 0; start < N; start += 32) {
        const int rank = min(start + lane, N - 1);
        float total = sum_parts(p.weight_sums + place * N + rank, (i64)p.heads * BASES * N, 0, p.groups);
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const float other = shuffle(total, max(lane - distance, 0));
            if (lane >= distance) total += other;
        }
        total += earlier;
        earlier = shuffle(total, 31);
        if (start + lane < N) p.weight_grad[place * N + rank] = total;
    }
}

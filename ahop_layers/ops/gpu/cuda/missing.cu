// Scores of pairs whose values may be unknown: a warp sorts all blocks of a pair, V in the registers of each lane.
#include "sort.cuh"

constexpr int V = AHOP_VALUES;  // a power of two
constexpr int KEYS = 32;        // of a thread block
enum { DIS, DOT, L1, NEAR };

struct Missing {
    const float *query, *key;  // (N, H, L, d) and (N, H, S, d), rows of adjacent numbers
    i64 query_batch, query_head, query_row, key_batch, key_head, key_row;
    const float* weight;       // (H, bases, n), folded
    const float* before;       // (H, bases, n + 1), the sum of all earlier weights
    const float* widths;       // (bases,)
    float* out;                // (N, H, L, S)
    int heads, length, count, n, size, chunks, bases;
    int kinds;                 // two bits for each base
};

// The place of value i in shared memory, such that neither adjacent values nor those V apart share a bank.
DEVICE int place_of(int i) { return i + i / 32; }

// Sorts the values of a warp in ascending order; value j of lane l has the rank l * V + j. Lanes sort their own values,
// then runs of lanes are merged: the first step of a merge mirrors the second run, so that all comparators point the
// same way.
DEVICE void sort_warp(float (&x)[V], int lane) {
#pragma unroll
    for (int i = 0; i < Sorter<V>::NETWORK.count; ++i)
        Sorter<V>::exchange(x[Sorter<V>::NETWORK.high[i]], x[Sorter<V>::NETWORK.low[i]]);
    for (int run = 1; run < 32; run *= 2) {
        const bool upper = lane & run;
        float mirrored[V];
#pragma unroll
        for (int j = 0; j < V; ++j) mirrored[j] = shuffle_xor(x[V - 1 - j], 2 * run - 1);
#pragma unroll
        for (int j = 0; j < V; ++j) x[j] = upper ? fmaxf(x[j], mirrored[j]) : fminf(x[j], mirrored[j]);
        for (int step = run / 2; step >= 1; step /= 2) {
            const bool high = lane & step;
#pragma unroll
            for (int j = 0; j < V; ++j) {
                const float other = shuffle_xor(x[j], step);
                x[j] = high ? fmaxf(x[j], other) : fminf(x[j], other);
            }
        }
#pragma unroll
        for (int step = V / 2; step >= 1; step /= 2)
#pragma unroll
            for (int j = 0; j < V; ++j)
                if (!(j & step)) Sorter<V>::exchange(x[j | step < V ? j | step : j], x[j]);
    }
}

// The dissimilarity of one dimension, the negative of its similarity; `near` is 2^(rate * difference).
DEVICE float dissimilarity(int kind, float query, float key, float rate) {
    const float difference = fabsf(query - key);
    if (kind == DOT) return -query * key;
    if (kind == NEAR) return -exp2_approx(rate * difference);
    return kind == DIS ? difference * difference : difference;
}

// Stores the dissimilarities of all blocks, infinite where they are unknown; returns how many are known.
DEVICE int store_values(const Missing& p, float* values, int kind, const float* query, const float* key, float rate,
                        int lane) {
    int known = 0;
    for (int block = lane; block < 32 * V; block += 32) {
        float total = 0;
        int counted = 0;
        for (int i = block * p.size; block < p.n && i < (block + 1) * p.size; ++i) {
            const float a = query[i], b = key[i];
            if (a != a || b != b) continue;
            total += dissimilarity(kind, a, b, rate);
            ++counted;
        }
        values[place_of(block)] = counted ? total / ((float)counted / p.size) : INFINITE;
        known += counted > 0;
    }
    return sum_warp(known);
}

// The integral of the weights up to rank `r` of m, stretched to all n ranks.
DEVICE float reached(const float* weight, const float* before, int r, int m, int n) {
    const float place = fminf((float)(n * r) / m, n);
    const int rank = max((int)ceilf(place) - 1, 0);
    return before[rank] + (place - rank) * weight[rank];
}

// This lane's part of the score of a base, from m sorted dissimilarities, or absolute differences of single dimensions.
DEVICE float weigh(const Missing& p, const float* values, int kind, float rate, int place, int m, int lane) {
    const float *weight = p.weight + (i64)place * p.n, *before = p.before + (i64)place * (p.n + 1);
    float total = 0;
    for (int rank = lane; rank < m; rank += 32) {
        const float x = values[place_of(rank)];
        const float value = kind == DIS ? -x * x : kind == NEAR ? exp2_approx(rate * x) : -x;
        float factor = weight[rank];
        if (m < p.n) factor = reached(weight, before, rank + 1, m, p.n) - reached(weight, before, rank, m, p.n);
        total = fmaf(factor, value, total);
    }
    return total;
}

KERNEL void __launch_bounds__(128) score_missing(const Missing p) {
    SHARED_MEMORY(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* values = (float*)shared + warp * place_of(32 * V);
    const i64 row = blockIdx.x / p.chunks;  // of (N, H, L)
    const int start = blockIdx.x % p.chunks * KEYS, l = row % p.length, h = row / p.length % p.heads;
    const i64 n = row / p.length / p.heads;
    const float* query = p.query + n * p.query_batch + h * p.query_head + l * p.query_row;
    for (int s = start + warp; s < min(start + KEYS, p.count); s += 4) {
        const float* key = p.key + n * p.key_batch + h * p.key_head + s * p.key_row;
        float total = 0;
        int known = 0;
        bool sorted = false;  // the absolute differences: single dimensions have their order in all bases but `dot`
        for (int base = 0; base < p.bases; ++base) {
            const int kind = p.kinds >> 2 * base & 3;
            const bool shares = p.size == 1 && kind != DOT;
            const float rate = kind == NEAR ? -LOG2_E / p.widths[base] : 0;
            if (!(shares && sorted)) {
                sync_warp();
                known = store_values(p, values, shares ? (int)L1 : kind, query, key, rate, lane);
                sync_warp();
                float x[V];
#pragma unroll
                for (int j = 0; j < V; ++j) x[j] = values[place_of(lane + 32 * j)];
                sync_warp();
                sort_warp(x, lane);
#pragma unroll
                for (int j = 0; j < V; ++j) values[place_of(lane * V + j)] = x[j];
                sync_warp();
                sorted = shares;
            }
            total += weigh(p, values, shares ? kind : (int)DOT, rate, h * p.bases + base, known, lane);
        }
        total = sum_warp(total);
        if (lane == 0) p.out[row * p.count + s] = known ? total : -INFINITE;
    }
}

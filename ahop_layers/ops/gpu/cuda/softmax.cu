// The softmax of rows of scores, and the log-sum-exp of each. A warp has a row.
#include "common.cuh"

constexpr int DTYPE = AHOP_DTYPE;  // of the results

struct Softmax {
    const float* scores;  // (rows, count)
    char* weights;        // (rows, count)
    float* log_sum;       // (rows,)
    i64 rows;
    int count;
};

KERNEL void __launch_bounds__(256) softmax(const Softmax p) {
    const int lane = threadIdx.x % 32;
    const i64 row = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= p.rows) return;
    const float* const scores = p.scores + row * p.count;
    float largest = -INFINITE, total = 0;
    for (int i = lane; i < p.count; i += 32) largest = max_nan(largest, scores[i]);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) largest = max_nan(largest, shuffle_xor(largest, distance));
    const bool empty = largest == -INFINITE;  // all keys are masked
    for (int i = lane; i < p.count; i += 32) total += exp2_approx((scores[i] - largest) * LOG2_E);
    total = sum_warp(total);
    const float factor = empty ? 0 : 1 / total;
    for (int i = lane; i < p.count; i += 32)
        store_float<DTYPE>(p.weights + (row * p.count + i) * bytes_of(DTYPE),
                           empty ? 0 : exp2_approx((scores[i] - largest) * LOG2_E) * factor);
    if (lane == 0) p.log_sum[row] = empty ? INFINITE : largest + log2_approx(total) * LN_2;
}

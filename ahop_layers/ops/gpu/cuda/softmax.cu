// The softmax of rows of scores, the log-sum-exp of each, and its gradient. A warp has a row.
#include "common.cuh"

constexpr int DTYPE = AHOP_DTYPE, SLOPE_DTYPE = AHOP_SLOPE_DTYPE;  // of weights, and of their gradients

struct Softmax {
    float* scores;       // (rows, count); the backward pass replaces them by their gradients
    char* weights;       // (rows, count)
    float* log_sum;      // (rows,)
    const char* slopes;  // (rows, count), gradients of the weights
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

KERNEL void __launch_bounds__(256) softmax_backward(const Softmax p) {
    const int lane = threadIdx.x % 32;
    const i64 row = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= p.rows) return;
    float* const scores = p.scores + row * p.count;
    const char* const slopes = p.slopes + row * p.count * bytes_of(SLOPE_DTYPE);
    const float log_sum = p.log_sum[row];
    float total = 0, mean = 0;  // of the weights, and of the slopes
    for (int i = lane; i < p.count; i += 32) {
        const float weight = exp2_approx((scores[i] - log_sum) * LOG2_E);
        total += weight;
        mean = fmaf(weight, load_float<SLOPE_DTYPE>(slopes, i), mean);
    }
    total = sum_warp(total);
    mean = sum_warp(mean) / (total == 0 ? 1 : total);
    for (int i = lane; i < p.count; i += 32) {
        const float weight = exp2_approx((scores[i] - log_sum) * LOG2_E);
        scores[i] = weight * (load_float<SLOPE_DTYPE>(slopes, i) - mean);
        store_float<DTYPE>(p.weights + (row * p.count + i) * bytes_of(DTYPE), weight);
    }
}

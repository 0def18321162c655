// The arguments of the backward pass of attention.
#pragma once
#include "tiles.cuh"

constexpr float LOG_UNIT = SINGLE ? 1 : LOG2_E;  // base 2, but float32 would round again
constexpr int PARTS = BASES * N + 1;             // gradients of the weights, and the sum of score gradients

struct Backward {
    Tensor query, key, value, grad, mask, query_grad, key_grad, value_grad, out;
    i64 mask_key;  // a further stride
    Weights weights;
    const u32* seed;
    const float* log_sum;
    float2* statistics;   // (N * H, padded): logarithm of the sum over LOG_UNIT, and product of readout and gradient
    float4* query_sums;   // (N * H, tiles, CHUNKS, 32): what earlier thread blocks added, if there are several
    u32* turns;           // the numbers of thread blocks that started, and (N * H, tiles) that added
    float* weight_parts;  // (N * H, tiles of keys, PARTS)
    float *weight_grad, *beta_grad;  // (H, BASES, N), (H, BASES)
    int batch, heads, group, length, count;
    int strips, strip_tiles, items, slots;  // of a head, tiles of keys in each, all, and places of the ring
    u32 threshold;
    float factor, scaling;
};

DEVICE int tiles_of(int length) { return (length + ROWS - 1) / ROWS; }

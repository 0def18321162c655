// What several kernels share.
#pragma once
#include "device.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// A tensor (N, H, L, d), with strides in bytes.
struct Tensor {
    char* data;
    i64 batch, head, row;
    DEVICE char* at(i64 n, i64 h) const { return data + n * batch + h * head; }
};

DEVICE u32 shuffle_xor(u32 x, int mask) { return float_bits(shuffle_xor(bits_float(x), mask)); }

// The sum over the lanes of a warp, in all of them.
DEVICE float sum_warp(float x) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) x += shuffle_xor(x, distance);
    return x;
}

enum { FLOAT, HALF, BFLOAT };
constexpr int bytes_of(int dtype) { return dtype == FLOAT ? 4 : 2; }
template <int DTYPE> struct HalfOf { typedef Float16 Type; };
template <> struct HalfOf<BFLOAT> { typedef BFloat16 Type; };

// A float32 number in a word, with the functions of half-precision types, where a word holds two.
struct Float32 {
    static DEVICE u32 pack(float x, float) { return float_bits(x); }
    static DEVICE u32 fma(u32 a, u32 b, u32 c) { return float_bits(fmaf(bits_float(a), bits_float(b), bits_float(c))); }
};
template <class Number> constexpr bool IS_FLOAT = false;
template <> constexpr bool IS_FLOAT<Float32> = true;

template <int DTYPE>
DEVICE float load_float(const char* numbers, i64 place = 0) {
    if constexpr (DTYPE == FLOAT) return ((const float*)numbers)[place];
    float x, nothing;
    HalfOf<DTYPE>::Type::unpack(((const unsigned short*)numbers)[place], x, nothing);
    return x;
}

template <int DTYPE>
DEVICE void store_float(char* place, float x) {
    if constexpr (DTYPE == FLOAT) {
        *(float*)place = x;
    } else {
        *(unsigned short*)place = HalfOf<DTYPE>::Type::pack(x, 0);
    }
}

// Copies an aligned unit of bytes.
template <int UNIT>
DEVICE void copy_unit(char* to, const char* from) {
    if constexpr (UNIT == 16) {
        *(uint4*)to = *(const uint4*)from;
    } else if constexpr (UNIT == 2) {
        *(unsigned short*)to = *(const unsigned short*)from;
    } else {
#pragma unroll
        for (int i = 0; i < UNIT / 4; ++i) ((u32*)to)[i] = ((const u32*)from)[i];
    }
}

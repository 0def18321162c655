// Instructions that CUDA C++ has no syntax for, one small function each. Without a CUDA compiler, tests/warp_emulator.h
// defines the same functions, so that a CPU runs whole kernels.
#pragma once

typedef unsigned int u32;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;

#ifndef __CUDACC__
#include "warp_emulator.h"
#else
#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__
#define SHARED_MEMORY(name) extern __shared__ __align__(16) char name[]

#define INFINITE __int_as_float(0x7f800000)

constexpr u32 ALL_LANES = 0xffffffff;

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
DEVICE u32 float_bits(float x) { return __float_as_uint(x); }
DEVICE float bits_float(u32 x) { return __uint_as_float(x); }
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE float shuffle(float x, int lane) { return __shfl_sync(ALL_LANES, x, lane); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(ALL_LANES, x, mask); }
DEVICE bool any_lane(bool x) { return __any_sync(ALL_LANES, x); }
DEVICE u32 add_atomically(u32* place, u32 x) { return atomicAdd(place, x); }

// A function of two numbers that is one instruction.
#define OF_TWO(TYPE, LETTER, NAME, INSTRUCTION) \
    static DEVICE TYPE NAME(TYPE a, TYPE b) { \
        TYPE r; \
        asm(INSTRUCTION " %0, %1, %2;" : "=" LETTER(r) : LETTER(a), LETTER(b)); \
        return r; \
    }

// Minimum and maximum that are NaN if one argument is.
#if __CUDA_ARCH__ >= 800
OF_TWO(float, "f", max_nan, "max.NaN.f32")
OF_TWO(float, "f", min_nan, "min.NaN.f32")
#else
DEVICE float max_nan(float a, float b) { return a != a || b != b ? a + b : fmaxf(a, b); }
DEVICE float min_nan(float a, float b) { return a != a || b != b ? a + b : fminf(a, b); }
#endif

DEVICE float exp2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

DEVICE float log2_approx(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// Selects four of eight bytes: byte i of the result is byte (selector >> 4 * i) & 7 of high:low, or its sign (bit 3).
DEVICE u32 select_bytes(u32 low, u32 high, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selector));
    return r;
}

// The sign of `low` in all bits of the low half of a word, and the sign of `high` in the high half.
DEVICE u32 sign_masks(float low, float high) { return select_bytes(float_bits(low), float_bits(high), 0xffbb); }

// A word shifted left by the low five bits of `by`.
DEVICE u32 shift_left(u32 x, u32 by) {
    u32 r;
    asm("shf.l.wrap.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(0), "r"(x), "r"(by));
    return r;
}

// The same address in global memory, of which the compiler knows nothing else: what is loaded from it takes no
// registers until then.
DEVICE const char* loaded_again(const char* place) {
    u64 address = __cvta_generic_to_global(place);
    asm volatile("" : "+l"(address));
    return (const char*)__cvta_global_to_generic(address);
}

// Four 8 x 8 matrices of 16-bit numbers; the lanes 8 i to 8 i + 7 hold the addresses of the rows of matrix i.
DEVICE void load_matrices(u32* r, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

DEVICE void load_transposed(u32* r, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

DEVICE u32 transpose(u32 matrix) {
    u32 r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(matrix));
    return r;
}

// Copies a unit of bytes to shared memory in the background, or zeros; two bytes at once.
template <int UNIT>
DEVICE void copy_async(u32 address, const void* from, bool exists) {
    if constexpr (UNIT == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(address), "l"(from), "r"(exists ? 16 : 0));
    } else if constexpr (UNIT > 2) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     :: "r"(address), "l"(from), "n"(UNIT), "r"(exists ? UNIT : 0));
    } else {
        const unsigned short x = exists ? *(const unsigned short*)from : 0;
        asm volatile("st.shared.u16 [%0], %1;" :: "r"(address), "h"(x) : "memory");
    }
}

DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }

// Copies a line of memory to the cache of all multiprocessors.
DEVICE void prefetch(const char* place) { asm volatile("prefetch.global.L2 [%0];" :: "l"(place)); }

// Two words of memory that thread blocks pass to each other.
DEVICE u32 load_acquire(const u32* place) {
    u32 r;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(place) : "memory");
    return r;
}

DEVICE void store_release(u32* place, u32 x) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(place), "r"(x) : "memory");
}

// A barrier of 8 bytes in shared memory: `count` threads arrive, then it passes to the next phase.
DEVICE void barrier_init(u32 address, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(address), "r"(count) : "memory");
}

DEVICE void barrier_arrive(u32 address) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" :: "r"(address) : "memory");
}

#if __CUDA_ARCH__ >= 900
#define BARRIER_WAIT "mbarrier.try_wait.parity.shared.b64"  // sleeps for a while
#else
#define BARRIER_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif

// Whether the latest phase with this parity is complete; the writes before its arrivals are visible then.
DEVICE bool barrier_passed(u32 address, u32 parity) {
    u32 r;
    asm volatile("{.reg .pred p; " BARRIER_WAIT " p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(r) : "r"(address), "r"(parity) : "memory");
    return r;
}

// Products of 16 x 4 by 4 x 8 float32 numbers, of which the upper 19 bits count, added to `c`.
DEVICE void multiply_tf32(float (&r)[4], const float (&c)[4], const u32 (&a)[2], u32 b) {
    asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
        : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3])
        : "r"(a[0]), "r"(a[1]), "r"(b), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Products of 16 x 8 by 8 x 8 float32 numbers, of which the upper 19 bits count, added to `c`. Sums round toward zero.
DEVICE void multiply_tf32(float (&r)[4], const float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

DEVICE u32 load_shared(u32 address) {
    u32 r;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
    return r;
}

// What both half-precision types have. A word holds two numbers. `multiply` adds the product of 16 x 16 and 16 x 8
// numbers to `c`, or of 16 x 8 and 8 x 8 numbers.
#define HALF_FUNCTIONS(TYPE) \
    OF_TWO(u32, "r", mul, "mul.rn." TYPE "x2") \
    OF_TWO(u32, "r", sub, "sub.rn." TYPE "x2") \
    OF_TWO(u32, "r", max_nan, "max.NaN." TYPE "x2") \
    OF_TWO(u32, "r", min_nan, "min.NaN." TYPE "x2") \
    static DEVICE u32 fma(u32 a, u32 b, u32 c) { \
        u32 r; \
        asm("fma.rn." TYPE "x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); \
        return r; \
    } \
    static DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 " \
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); \
    } \
    static DEVICE void multiply(float (&c)[4], u32 a0, u32 a1, u32 b) { \
        asm("mma.sync.aligned.m16n8k8.row.col.f32." TYPE "." TYPE ".f32 " \
            "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b)); \
    }

struct BFloat16 {
    static constexpr u32 ONES = 0x3f803f80;
    HALF_FUNCTIONS("bf16")

    static DEVICE void unpack(u32 word, float& low, float& high) {
        low = bits_float(word << 16);
        high = bits_float(word & 0xffff0000);
    }

    static DEVICE u32 pack(float low, float high) {
        u32 r;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
};

struct Float16 {
    static constexpr u32 ONES = 0x3c003c00;
    HALF_FUNCTIONS("f16")

    // Volatile, so that it stays in a loop: the compiler would keep the results of all iterations in registers.
    static DEVICE void unpack(u32 word, float& low, float& high) {
        asm volatile("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
            : "=f"(low), "=f"(high) : "r"(word));
    }

    static DEVICE u32 pack(float low, float high) {
        u32 r;
#if __CUDA_ARCH__ >= 800
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
        asm("{.reg .b16 a, b; cvt.rn.f16.f32 a, %1; cvt.rn.f16.f32 b, %2; mov.b32 %0, {a, b};}"
            : "=r"(r) : "f"(low), "f"(high));
#endif
        return r;
    }
};
#endif

// Runs CUDA kernels on a CPU: the functions of device.cuh in plain C++. Threads are fibers that switch where those of a
// warp or block meet. Shared memory starts as NaN, asynchronous copies arrive only when they are waited for, and
// threads that never meet are an error.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

using std::max;
using std::min;
#define DEVICE inline
#define KERNEL extern "C"
#define SHARED_MEMORY(name) char* const name = emulator::shared.data()
#define INFINITE INFINITY
#define __launch_bounds__(...)

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {
struct Index { int x; };
struct Copy { u32 to; const void* from; int bytes, unit; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> copies;
    bool done;
};
struct Meeting { int arrived = 0, number = 0; void* arguments[32]; };

inline std::vector<char> shared;
inline std::vector<Fiber> fibers;
inline std::vector<Meeting> meetings;  // of each warp, and of the block
inline std::function<void()> body;
inline ucontext_t scheduler;
inline int thread, threads, block, blocks;
inline bool progress;

inline void pause() { swapcontext(&fibers[thread].context, &scheduler); }
inline void run() { body(); fibers[thread].done = true; progress = true; pause(); }

// Waits for all threads [first, end) that still run; one of them calls `act`.
template <class Act>
void meet(Meeting& meeting, int first, int end, Act act) {
    const int number = meeting.number;
    ++meeting.arrived;
    progress = true;
    while (meeting.number == number) {
        int running = 0;
        for (int i = first; i < end; ++i) running += !fibers[i].done;
        if (meeting.arrived < running) {
            pause();
        } else {
            act();
            meeting.arrived = 0, ++meeting.number;
        }
    }
}

// Calls `act` with the arguments of all lanes of the warp.
template <class T, class Act>
void in_warp(T& argument, Act act) {
    Meeting& meeting = meetings[thread / 32];
    meeting.arguments[thread % 32] = &argument;
    meet(meeting, thread / 32 * 32, std::min(threads, thread / 32 * 32 + 32), [&] { act((T**)meeting.arguments); });
}

inline void launch(int number, int count, int bytes, std::function<void()> kernel) {
    blocks = number, threads = count, body = kernel;
    for (block = 0; block < blocks; ++block) {
        shared.assign(bytes, (char)0xff);
        fibers = std::vector<Fiber>(threads);
        meetings = std::vector<Meeting>(threads / 32 + 2);
        for (Fiber& fiber : fibers) {
            fiber.stack.resize(1 << 17);
            std::fill(fiber.stack.end() - (1 << 14), fiber.stack.end(), '\xff');  // NaN where nothing is written
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
            makecontext(&fiber.context, run, 0);
        }
        // Warps run in a random order, and some of them far ahead of others: a missing barrier changes the results.
        std::mt19937 random(block + 1);
        for (int waited = 0; waited < 300; ++waited) {
            if (std::all_of(fibers.begin(), fibers.end(), [](const Fiber& fiber) { return fiber.done; })) break;
            const int first = random() % (threads / 32 + 1) * 32, rounds = 1 << random() % 12;
            progress = true;
            for (int round = 0; round < rounds && progress; ++round) {
                progress = false;
                for (thread = first; thread < std::min(threads, first + 32); ++thread)
                    if (!fibers[thread].done) swapcontext(&scheduler, &fibers[thread].context);
                if (progress) waited = 0;
            }
        }
        for (const Fiber& fiber : fibers)
            if (!fiber.done) std::fprintf(stderr, "threads never meet\n"), std::abort();
    }
}
}  // namespace emulator

#define threadIdx (emulator::Index{emulator::thread})
#define blockIdx (emulator::Index{emulator::block})
#define blockDim (emulator::Index{emulator::threads})
#define gridDim (emulator::Index{emulator::blocks})

inline u32 shared_address(const void* pointer) { return (const char*)pointer - emulator::shared.data(); }
inline u32 float_bits(float x) { u32 r; std::memcpy(&r, &x, 4); return r; }
inline float bits_float(u32 x) { float r; std::memcpy(&r, &x, 4); return r; }
inline void sync_block() { emulator::meet(emulator::meetings.back(), 0, emulator::threads, [] {}); }
inline void sync_warp() { int nothing; emulator::in_warp(nothing, [](int**) {}); }

inline float shuffle(float x, int lane) {
    struct { float x; int lane; float r; } each{x, lane, 0};
    emulator::in_warp(each, [](auto** all) { for (int i = 0; i < 32; ++i) all[i]->r = all[all[i]->lane]->x; });
    return each.r;
}

inline float shuffle_xor(float x, int mask) { return shuffle(x, (emulator::thread % 32) ^ mask); }

inline bool any_lane(bool x) {
    bool any = x;
    emulator::in_warp(any, [](bool** all) {
        const bool result = std::any_of(all, all + 32, [](bool* each) { return *each; });
        for (int i = 0; i < 32; ++i) *all[i] = result;
    });
    return any;
}

inline u32 add_atomically(u32* place, u32 x) { return (*place += x) - x; }
inline u32 load_acquire(const u32* place) { return *place; }
inline void store_release(u32* place, u32 x) { *place = x; }
struct Barrier { unsigned short count, left; u32 phase; };
inline Barrier& barrier_at(u32 address) { return *(Barrier*)&emulator::shared.at(address); }
inline void barrier_init(u32 address, unsigned short count) { barrier_at(address) = {count, count, 0}; }
inline void barrier_arrive(u32 address) {
    Barrier& barrier = barrier_at(address);
    if (--barrier.left == 0) barrier.left = barrier.count, ++barrier.phase;
    emulator::progress = true;
}
inline bool barrier_passed(u32 address, u32 parity) {
    if (barrier_at(address).phase % 2 == parity) emulator::pause();
    return barrier_at(address).phase % 2 != parity;
}
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : std::max(a, b); }
inline float min_nan(float a, float b) { return a != a || b != b ? NAN : std::min(a, b); }
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }

inline const char* loaded_again(const char* place) { return place; }
inline void prefetch(const char*) {}

inline u32 select_bytes(u32 low, u32 high, u32 selector) {
    const u64 both = (u64)high << 32 | low;
    u32 r = 0;
    for (int i = 0; i < 4; ++i) r |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return r;
}

inline u32 sign_masks(float low, float high) {
    return (std::signbit(low) ? 0xffff : 0) | (std::signbit(high) ? 0xffff0000 : 0);
}

inline u32 shift_left(u32 x, u32 by) { return x << (by & 31); }

// A lane (row g = lane / 4, columns 2 t and 2 t + 1 for t = lane % 4) holds two numbers of an 8 x 8 matrix.
inline void load_matrices_as(u32* r, u32 address, bool transposed) {
    struct { u32 address; u32* r; } each{address, r};
    emulator::in_warp(each, [=](auto** all) {
        for (int matrix = 0; matrix < 4; ++matrix)
            for (int lane = 0; lane < 32; ++lane) {
                unsigned short halves[2];
                for (int i = 0; i < 2; ++i) {
                    int row = lane / 4, column = lane % 4 * 2 + i;
                    if (transposed) std::swap(row, column);
                    const u32 place = all[8 * matrix + row]->address;
                    if (place % 16) std::fprintf(stderr, "misaligned row of a matrix\n"), std::abort();
                    std::memcpy(&halves[i], &emulator::shared.at(place + 2 * column), 2);
                }
                all[lane]->r[matrix] = halves[0] | (u32)halves[1] << 16;
            }
    });
}

inline void load_matrices(u32* r, u32 address) { load_matrices_as(r, address, false); }
inline void load_transposed(u32* r, u32 address) { load_matrices_as(r, address, true); }

inline u32 transpose(u32 matrix) {
    struct { u32 x, r; } each{matrix, 0};
    emulator::in_warp(each, [](auto** all) {
        auto at = [&](int row, int column) { return all[4 * row + column / 2]->x >> 16 * (column % 2) & 0xffff; };
        for (int i = 0; i < 32; ++i) all[i]->r = at(i % 4 * 2, i / 4) | at(i % 4 * 2 + 1, i / 4) << 16;
    });
    return each.r;
}

template <int UNIT>
void copy_async(u32 address, const void* from, bool exists) {
    if (address % UNIT || (exists && (u64)from % UNIT)) std::fprintf(stderr, "misaligned copy\n"), std::abort();
    emulator::fibers[emulator::thread].copies.push_back({address, from, exists ? UNIT : 0, UNIT});
}

inline void copies_commit() {
    auto& fiber = emulator::fibers[emulator::thread];
    fiber.groups.push_back({});
    fiber.groups.back().swap(fiber.copies);
}

template <int LEFT>
void copies_wait() {
    auto& groups = emulator::fibers[emulator::thread].groups;
    while ((int)groups.size() > LEFT) {
        for (const auto& copy : groups.front()) {
            char* to = &emulator::shared.at(copy.to);
            std::memset(to, 0, copy.unit);
            std::memcpy(to, copy.from, copy.bytes);
        }
        groups.erase(groups.begin());
    }
}

// Adds a (16 x K) times b (K x 8) to c, with numbers in the order of the instruction: two per register, or one.
template <int K, int PACKED, class Unpack>
void multiply_any(float (&r)[4], const float (&c)[4], const u32* a, const u32* b, Unpack unpack) {
    struct { float *r; const float* c; const u32 *a, *b; } each{r, c, a, b};
    emulator::in_warp(each, [=](auto** all) {
        constexpr int STEP = 4 * PACKED;  // columns of a matrix in one register of the warp
        float results[32][4];
        auto number = [&](u32 word, int k) {
            return PACKED == 2 ? unpack(k % 2 ? word >> 16 : word & 0xffff) : bits_float(word & 0xffffe000);
        };
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
                double total = all[lane]->c[i];
                for (int k = 0; k < K; ++k) {
                    const int at = k % STEP / PACKED, part = k / STEP;
                    const u32 left = all[row % 8 * 4 + at]->a[2 * part + row / 8];
                    const u32 right = all[column * 4 + at]->b[part];
                    total += (double)number(left, k) * number(right, k);
                }
                const float nearest = total;  // hardware rounds toward zero
                results[lane][i] = std::abs(nearest) > std::abs(total) ? std::nextafter(nearest, 0.0f) : nearest;
            }
        for (int lane = 0; lane < 32; ++lane) std::copy(results[lane], results[lane] + 4, all[lane]->r);
    });
}

inline void multiply_tf32(float (&r)[4], const float (&c)[4], const u32 (&a)[2], u32 b) {
    multiply_any<4, 1>(r, c, a, &b, [](u32) { return 0.0f; });
}

inline void multiply_tf32(float (&r)[4], const float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    multiply_any<8, 1>(r, c, a, b, [](u32) { return 0.0f; });
}

inline u32 load_shared(u32 address) {
    u32 r;
    std::memcpy(&r, &emulator::shared.at(address), 4);
    return r;
}

// The functions of both half-precision types, from the conversion of one number.
template <class Type>
struct HalfType {
    static void unpack(u32 word, float& low, float& high) {
        low = Type::to_float(word & 0xffff), high = Type::to_float(word >> 16);
    }
    static u32 pack(float low, float high) { return Type::from_float(low) | Type::from_float(high) << 16; }
    static u32 fma(u32 a, u32 b, u32 c) {
        float x[2], y[2], z[2];
        unpack(a, x[0], x[1]), unpack(b, y[0], y[1]), unpack(c, z[0], z[1]);
        return pack(std::fma(x[0], y[0], z[0]), std::fma(x[1], y[1], z[1]));
    }
    static u32 of_both(u32 a, u32 b, float (*function)(float, float)) {
        float x[2], y[2];
        unpack(a, x[0], x[1]), unpack(b, y[0], y[1]);
        return pack(function(x[0], y[0]), function(x[1], y[1]));
    }
    static u32 mul(u32 a, u32 b) { return of_both(a, b, [](float x, float y) { return x * y; }); }
    static u32 sub(u32 a, u32 b) { return of_both(a, b, [](float x, float y) { return x - y; }); }
    static u32 max_nan(u32 a, u32 b) { return of_both(a, b, ::max_nan); }
    static u32 min_nan(u32 a, u32 b) { return of_both(a, b, ::min_nan); }
    static void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        const u32 b[2] = {b0, b1};
        multiply_any<16, 2>(c, c, a, b, Type::to_float);
    }
    static void multiply(float (&c)[4], u32 a0, u32 a1, u32 b) {
        const u32 a[2] = {a0, a1};
        multiply_any<8, 2>(c, c, a, &b, Type::to_float);
    }
};

struct BFloat16 : HalfType<BFloat16> {
    static constexpr u32 ONES = 0x3f803f80;
    static float to_float(u32 x) { return bits_float(x << 16); }
    static u32 from_float(float x) {
        return x != x ? 0x7fc0 : (float_bits(x) + 0x7fff + (float_bits(x) >> 16 & 1)) >> 16;
    }
};

struct Float16 : HalfType<Float16> {
#ifdef __aarch64__
    using Number = __fp16;  // g++ has _Float16 on ARM from version 13 on
#else
    using Number = _Float16;
#endif
    static constexpr u32 ONES = 0x3c003c00;
    static float to_float(u32 x) { Number h; std::memcpy(&h, &x, 2); return h; }
    static u32 from_float(float x) { Number h = x; u32 r = 0; std::memcpy(&r, &h, 2); return r; }
};

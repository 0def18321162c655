// Sorting networks, weighted sums of sorted values, and weights by rank. Values are sorted in descending order.
#pragma once
#include "common.cuh"

constexpr int comparators(int size) {
    int count = 0;
    for (int run = 1; run < size; run *= 2)
        for (int step = run; step >= 1; step /= 2)
            for (int start = step % run; start < size - step; start += 2 * step)
                for (int low = start; low < start + step && low < size - step; ++low)
                    count += low / (2 * run) == (low + step) / (2 * run);
    return count;
}

// Batcher's odd-even merge sort: sorted runs are merged pairwise, at distances that halve.
template <int N>
struct Network {
    static constexpr int COUNT = comparators(N);
    int low[COUNT + 1] = {}, high[COUNT + 1] = {};
    bool last[COUNT + 1] = {};  // whether no later comparator moves either value

    constexpr Network() {
        int count = 0;
        for (int run = 1; run < N; run *= 2)
            for (int step = run; step >= 1; step /= 2)
                for (int start = step % run; start < N - step; start += 2 * step)
                    for (int i = start; i < start + step && i < N - step; ++i)
                        if (i / (2 * run) == (i + step) / (2 * run)) low[count] = i, high[count++] = i + step;
        bool moved[N] = {};
        for (int i = COUNT - 1; i >= 0; --i) {
            last[i] = !moved[low[i]] && !moved[high[i]];
            moved[low[i]] = moved[high[i]] = true;
        }
    }
};

template <int N>
struct Sorter {
    static constexpr Network<N> NETWORK{};

    static DEVICE void sort(float (&x)[N]) {
#pragma unroll
        for (int i = 0; i < NETWORK.COUNT; ++i) exchange(x[NETWORK.low[i]], x[NETWORK.high[i]]);
    }

    // The plain minimum and maximum: a NaN is lost.
    static DEVICE void exchange(float& a, float& b) {
        const float larger = fmaxf(a, b);
        b = fminf(a, b);
        a = larger;
    }

    // Changes weights by rank into those of weighted_sum: of a last comparator, half the sum and half the difference.
    static DEVICE void halve(float (&u)[N]) {
#pragma unroll
        for (int i = 0; i < NETWORK.COUNT; ++i)
            if (NETWORK.last[i]) {
                const float first = u[NETWORK.low[i]], second = u[NETWORK.high[i]];
                u[NETWORK.low[i]] = 0.5f * (first + second);
                u[NETWORK.high[i]] = 0.5f * (first - second);
            }
    }

    // Adds the sum of u by rank times x to `total`. A last comparator is a sum and an absolute difference: the units
    // for additions have twice the rate of those for minimum and maximum.
    static DEVICE float weighted_sum(float (&x)[N], const float (&u)[N], float total) {
#pragma unroll
        for (int i = 0; i < NETWORK.COUNT; ++i) {
            float &a = x[NETWORK.low[i]], &b = x[NETWORK.high[i]];
            const float larger = NETWORK.last[i] ? a + b : max_nan(a, b);
            b = NETWORK.last[i] ? fabsf(a - b) : min_nan(a, b);
            a = larger;
        }
#pragma unroll
        for (int i = 0; i < N; ++i) total = fmaf(x[i], u[i], total);
        return total;
    }
};

// Weights in half precision that are looked up by the ranks of N <= 8 blocks.
//
// A value carries a shift in its low five bits through the sort, the index of its block times the bits of a selector.
// For up to four blocks a selector is a byte, the positions of the two bytes of a weight; otherwise it is the rank, and
// low and high bytes of the weights are two tables.
template <int N, class Half>
struct RankedWeights {
    static constexpr bool BYTES = N <= 4;
    static constexpr int BITS = BYTES ? 8 : 4;
    u32 low[2], high[2];

    DEVICE void set(const float (&u)[N]) {
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pairs[i] = Half::pack(2 * i < N ? u[2 * i < N ? 2 * i : 0] : 0.0f,
                                  2 * i + 1 < N ? u[2 * i + 1 < N ? 2 * i + 1 : 0] : 0.0f);
        if (BYTES) {
            low[0] = pairs[0], low[1] = pairs[1];
        } else {
            low[0] = select_bytes(pairs[0], pairs[1], 0x6420), low[1] = select_bytes(pairs[2], pairs[3], 0x6420);
            high[0] = select_bytes(pairs[0], pairs[1], 0x7531), high[1] = select_bytes(pairs[2], pairs[3], 0x7531);
        }
    }

    // Sorts the values, and returns the selectors of the blocks.
    static DEVICE u32 sort(float (&x)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = bits_float((float_bits(x[i]) & ~31u) | (BITS * i));
        Sorter<N>::sort(x);
        // Rank 0 has the selector 0x10 of its two bytes, which the last rank brings along for all blocks.
        u32 ranks = BYTES ? 0x10101010 : 0;
        if (N > 1) ranks = funnel_left(ranks, ranks | (BYTES ? 0x22 : 1) * (N - 1), float_bits(x[N - 1]));
#pragma unroll
        for (int i = 1; i < N - 1; ++i) ranks |= funnel_left(0, BYTES ? 0x22 * i : i, float_bits(x[i]));
        return ranks;
    }

    // Looks up the weights of two pairs: those of a block are in one word.
    DEVICE void look_up(u32 first, u32 second, u32 (&weights)[N]) const {
        constexpr u32 EVEN = 0x0f0f0f0f;
        const u32 merged[2] = {(first & EVEN) | (second << 4 & ~EVEN), (first >> 4 & EVEN) | (second & ~EVEN)};
#pragma unroll
        for (int block = 0; block < N; ++block) {
            if (BYTES && block % 2 == 0) {  // with the next block
                const u32 left = select_bytes(low[0], low[1], first >> 8 * block);
                const u32 right = select_bytes(low[0], low[1], second >> 8 * block);
                weights[block] = select_bytes(left, right, 0x5410);
                if (block + 1 < N) weights[block + 1] = select_bytes(left, right, 0x7632);
            } else if (!BYTES && block % 4 < 2) {  // with the block two after it
                const u32 selector = merged[block % 2] >> 4 * (block - block % 2);
                const u32 lows = select_bytes(low[0], low[1], selector);
                const u32 highs = select_bytes(high[0], high[1], selector);
                weights[block] = select_bytes(lows, highs, 0x5140);
                if (block + 2 < N) weights[block + 2] = select_bytes(lows, highs, 0x7362);
            }
        }
    }
};

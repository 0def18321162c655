// Sorting networks, weighted sums of sorted values, and weights by rank. Values are sorted in descending order.
#pragma once
#include "common.cuh"

// Batcher's odd-even merge sort: sorted runs are merged pairwise, at distances that halve.
template <int N>
struct Network {
    static constexpr int MOST = N * N / 2 + 1;  // there are fewer
    int count = 0, low[MOST] = {}, high[MOST] = {};
    bool last[MOST] = {};  // whether no later comparator moves either value

    constexpr Network() {
        for (int run = 1; run < N; run *= 2)
            for (int step = run; step >= 1; step /= 2)
                for (int start = step % run; start < N - step; start += 2 * step)
                    for (int i = start; i < start + step && i < N - step; ++i)
                        if (i / (2 * run) == (i + step) / (2 * run)) low[count] = i, high[count++] = i + step;
        bool moved[N] = {};
        for (int i = count - 1; i >= 0; --i) {
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
        for (int i = 0; i < NETWORK.count; ++i) exchange(x[NETWORK.low[i]], x[NETWORK.high[i]]);
    }

    // The plain minimum and maximum: a NaN is lost.
    static DEVICE void exchange(float& a, float& b) {
        const float larger = fmaxf(a, b);
        b = fminf(a, b);
        a = larger;
    }

    // Changes weights by rank for weighted_sum: of a last comparator, half the sum and half the difference.
    static DEVICE void halve(float (&u)[N]) {
#pragma unroll
        for (int i = 0; i < NETWORK.count; ++i)
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
        for (int i = 0; i < NETWORK.count; ++i) {
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

// Weights in half precision that are looked up by the ranks of N <= 8 blocks, two pairs at a time.
//
// A value carries a shift in its low five bits through the sort, four times the index of its block. A rank selects one
// of eight bytes: low and high bytes of the weights are two tables.
// KIND is 2 or 4 for that number of blocks, else 1 for float32.
template <int N, class Half, int KIND = N == 2 || N == 4 ? N : IS_FLOAT<Half>>
struct RankedWeights {
    typedef u32 Order;  // four bits for the rank of a block
    u32 low[2], high[2];

    // Sets the weights, and changes them into the factors of the values that `sort` leaves.
    DEVICE void set(float (&u)[N]) {
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pairs[i] = Half::pack(2 * i < N ? u[2 * i < N ? 2 * i : 0] : 0.0f,
                                  2 * i + 1 < N ? u[2 * i + 1 < N ? 2 * i + 1 : 0] : 0.0f);
        low[0] = select_bytes(pairs[0], pairs[1], 0x6420), low[1] = select_bytes(pairs[2], pairs[3], 0x6420);
        high[0] = select_bytes(pairs[0], pairs[1], 0x7531), high[1] = select_bytes(pairs[2], pairs[3], 0x7531);
    }

    // Sorts the values.
    static DEVICE Order sort(float (&x)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = bits_float((float_bits(x[i]) & ~31u) | (4 * i));
        Sorter<N>::sort(x);
        u32 ranks = 0;
#pragma unroll
        for (int i = 1; i < N; ++i) ranks |= shift_left(i, float_bits(x[i]));
        return ranks;
    }

    // Changes sums of values that `sort` left into sums of sorted values.
    static DEVICE void undo(float (&)[N]) {}

    // Looks up the weights of two pairs: the weights of a block are in one word.
    DEVICE void look_up(Order first, Order second, u32 (&weights)[N]) const {
        constexpr u32 EVEN = 0x0f0f0f0f;
        const u32 merged[2] = {(first & EVEN) | (second << 4 & ~EVEN), (first >> 4 & EVEN) | (second & ~EVEN)};
#pragma unroll
        for (int block = 0; block < N; ++block) {
            if (block % 4 >= 2) continue;  // with the block two before it
            const u32 selector = merged[block % 2] >> 4 * (block - block % 2);
            const u32 lows = select_bytes(low[0], low[1], selector);
            const u32 highs = select_bytes(high[0], high[1], selector);
            weights[block] = select_bytes(lows, highs, 0x5140);
            if (block + 2 < N) weights[block + 2] = select_bytes(lows, highs, 0x7362);
        }
    }
};

// The bits of `set` where the mask is set, else the bits of `clear`.
DEVICE u32 choose(u32 mask, u32 set, u32 clear) { return (mask & set) | (~mask & clear); }

// The signs of numbers in all bits of the words of their weights.
template <class Half>
DEVICE u32 signs(float low, float high) {
    return IS_FLOAT<Half> ? (u32)((int)float_bits(low) >> 31) : sign_masks(low, high);
}

// Weights in float32: a pair at a time, of values that are compared in all bits. Four tables have a byte each.
template <int N, class Number>
struct RankedWeights<N, Number, 1> {
    typedef u32 Order;  // four bits for the rank of a block
    u32 tables[4][2];

    DEVICE void set(float (&u)[N]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) words[j] = float_bits(u[min(i % 2 * 4 + j, N - 1)]);
            const u32 selector = 0x40 + 0x11 * (i / 2);
            tables[i / 2][i % 2] = select_bytes(select_bytes(words[0], words[1], selector),
                                                select_bytes(words[2], words[3], selector), 0x5410);
        }
    }

    static DEVICE Order sort(float (&x)[N]) {
        u32 ranks = 0;
#pragma unroll
        for (int j = 1; j < N; ++j)
#pragma unroll
            for (int i = 0; i < j; ++i) ranks += x[i] >= x[j] ? 1u << 4 * j : 1u << 4 * i;
        Sorter<N>::sort(x);
        return ranks;
    }

    static DEVICE void undo(float (&)[N]) {}

    DEVICE void look_up(Order ranks, Order, u32 (&weights)[N]) const {
#pragma unroll
        for (int first = 0; first < N; first += 4) {
            u32 bytes[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) bytes[i] = select_bytes(tables[i][0], tables[i][1], ranks >> 4 * first);
#pragma unroll
            for (int i = first; i < first + 4 && i < N; ++i) {
                const u32 selector = i % 4 < 2 ? 0x5140 : 0x7362;
                weights[i] = select_bytes(select_bytes(bytes[0], bytes[1], selector),
                                          select_bytes(bytes[2], bytes[3], selector), i % 2 ? 0x7632 : 0x5410);
            }
        }
    }
};

// Two blocks need no sort: it leaves their sum and the size of their difference, whose sign is the order.
template <class Half>
struct RankedWeights<2, Half, 2> {
    typedef float Order;
    u32 words[2];  // of a rank, the weight twice

    DEVICE void set(float (&u)[2]) {
        words[0] = Half::pack(u[0], u[0]), words[1] = Half::pack(u[1], u[1]);
        Sorter<2>::halve(u);
    }

    static DEVICE Order sort(float (&x)[2]) {
        const float sum = x[0] + x[1], difference = x[0] - x[1];
        x[0] = sum, x[1] = fabsf(difference);
        return difference;
    }

    static DEVICE void undo(float (&x)[2]) { Sorter<2>::halve(x); }

    DEVICE void look_up(Order a, Order b, u32 (&weights)[2]) const {
        const u32 mask = signs<Half>(a, b);
        weights[0] = choose(mask, words[1], words[0]), weights[1] = choose(mask, words[0], words[1]);
    }
};

// Four blocks need no sort either. With the values of both halves, p >= q and r >= s, the largest value is p or r, the
// smallest is q or s, and the other ones are in the middle. Signs of differences are the order.
template <class Half>
struct RankedWeights<4, Half, 4> {
    struct Order {
        float first, second, large, small, middle;  // of the first half, of the second, p - r, q - s, and of the middle
    };
    u32 words[4];  // of a rank, the weight twice

    DEVICE void set(float (&u)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = Half::pack(u[i], u[i]);
        const float outer = u[0] + u[3], inner = u[1] + u[2];
        const float factors[4] = {outer + inner, 0.5f * (outer - inner), u[0] - u[3], u[1] - u[2]};
#pragma unroll
        for (int i = 0; i < 4; ++i) u[i] = 0.25f * factors[i];
    }

    // Leaves the sum of all values, largest + smallest - middle ones, largest - smallest, and the difference of the
    // middle ones, the last three twice.
    static DEVICE Order sort(float (&x)[4]) {
        const float halves[2] = {x[0] + x[1], x[2] + x[3]};
        Order order{x[0] - x[1], x[2] - x[3]};
        const float difference = halves[0] - halves[1];
        const float both = fabsf(order.first) + fabsf(order.second), more = fabsf(order.first) - fabsf(order.second);
        order.large = difference + more, order.small = difference - more;
        const float larger = fmaxf(fabsf(difference), fabsf(more));
        order.middle = both - larger;
        x[0] = halves[0] + halves[1], x[1] = fabsf(order.large) - fabsf(order.small);
        x[2] = both + larger, x[3] = fabsf(order.middle);
        return order;
    }

    static DEVICE void undo(float (&x)[4]) {
        const float outer = x[0] + 0.5f * x[1], inner = x[0] - 0.5f * x[1], range = x[2], middle = x[3];
        x[0] = 0.25f * (outer + range), x[3] = 0.25f * (outer - range);
        x[1] = 0.25f * (inner + middle), x[2] = 0.25f * (inner - middle);
    }

    DEVICE void look_up(const Order& a, const Order& b, u32 (&weights)[4]) const {
        const u32 middle = signs<Half>(a.middle, b.middle), large = signs<Half>(a.large, b.large);
        const u32 small = signs<Half>(a.small, b.small);
        const u32 masks[2] = {signs<Half>(a.first, b.first), signs<Half>(a.second, b.second)};
        const u32 upper = choose(middle, words[2], words[1]), lower = choose(middle, words[1], words[2]);
        const u32 larger[2] = {choose(large, upper, words[0]), choose(large, words[0], upper)};
        const u32 smaller[2] = {choose(small, words[3], lower), choose(small, lower, words[3])};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            weights[2 * half] = choose(masks[half], smaller[half], larger[half]);
            weights[2 * half + 1] = choose(masks[half], larger[half], smaller[half]);
        }
    }
};

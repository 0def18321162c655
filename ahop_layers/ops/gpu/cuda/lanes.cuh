// Query-key pairs over the lanes of a warp: what a lane loads, the similarities of its blocks, and how lanes sort them.
//
// A group of lanes sorts the blocks of a pair, CHUNK of them in the registers of each lane. SPLIT lanes of a group and
// COPIES groups share the dimensions of a block. See `Layout` in layout.py, whose numbers these are.
#pragma once
#include "sort.cuh"

constexpr int GROUP = AHOP_GROUP, CHUNK = AHOP_CHUNK, WIDTH = AHOP_WIDTH, SPLIT = AHOP_SPLIT, COPIES = AHOP_COPIES;
constexpr int RUN = AHOP_RUN, STRETCH = AHOP_STRETCH;  // adjacent blocks, and adjacent dimensions, of a lane
constexpr int N = AHOP_N, SIZE = AHOP_SIZE, BASES = AHOP_BASES;  // blocks and their sizes without padding, and bases
constexpr int LANES = GROUP * COPIES, PAIRS = 32 / LANES, READERS = GROUP / SPLIT, PARTS = SPLIT * COPIES;
constexpr int HELD = CHUNK * SPLIT, PER_LANE = HELD * WIDTH, BLOCKS = GROUP * CHUNK, BLOCK_SIZE = WIDTH * PARTS;
constexpr int DIMS = BLOCKS * BLOCK_SIZE, RUN_STEP = READERS * RUN * BLOCK_SIZE;
constexpr int UNROLLED = N > 64 ? 1 : BASES;           // copies of a network: a long one has to fit in a cache
constexpr bool KEEPS_ROWS = BLOCK_SIZE > 1 && N <= 64; // whether registers suffice for a row of all bases
constexpr bool MAY_BE_FLAT = AHOP_MAY_BE_FLAT;         // whether constant weights are looked for

enum { DIS, DOT, L1, NEAR };
constexpr int kind_of(int base) { return AHOP_KINDS >> 2 * base & 3; }

constexpr int DTYPE = AHOP_DTYPE, SCORE_DTYPE = AHOP_SCORE_DTYPE;  // of queries and keys, and of scores
constexpr int ITEM = bytes_of(DTYPE), SCORE_ITEM = bytes_of(SCORE_DTYPE);
typedef HalfOf<DTYPE>::Type Half;

// Loads adjacent words, up to four at a time.
template <int WORDS>
DEVICE void load_words(u32* words, const char* place) {
#pragma unroll
    for (int i = 0; i < WORDS; i += WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1) {
        if constexpr (WORDS % 4 == 0) {
            const uint4 x = *(const uint4*)(place + 4 * i);
            words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
        } else if constexpr (WORDS % 2 == 0) {
            const uint2 x = *(const uint2*)(place + 4 * i);
            words[i] = x.x, words[i + 1] = x.y;
        } else {
            words[i] = *(const u32*)(place + 4 * i);
        }
    }
}

// Loads adjacent numbers.
template <int COUNT, int TYPE>
DEVICE void load_floats(float* x, const char* place) {
    if constexpr (TYPE == FLOAT) {
        u32 words[COUNT];
        load_words<COUNT>(words, place);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) x[i] = bits_float(words[i]);
    } else if constexpr (COUNT % 2 == 0) {
        u32 words[COUNT / 2];
        load_words<COUNT / 2>(words, place);
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) HalfOf<TYPE>::Type::unpack(words[i], x[2 * i], x[2 * i + 1]);
    } else {
        float nothing;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            HalfOf<TYPE>::Type::unpack(*(const unsigned short*)(place + 2 * i), x[i], nothing);
    }
}

// The dimension of a row that a lane has in its register `slot`, after the first one.
DEVICE int dimension_of(int slot) {
    return slot / (RUN * WIDTH) * RUN_STEP + slot % (RUN * WIDTH) / STRETCH * (PARTS * STRETCH) + slot % STRETCH;
}

// The place of a lane within its pair.
struct Lane {
    int index = threadIdx.x % 32, member = index % GROUP, reader = member / SPLIT;
    int position = member * CHUNK;  // its first rank
    int dimension = reader * RUN * BLOCK_SIZE + (index % LANES / GROUP * SPLIT + member % SPLIT) * STRETCH;

    // Loads the dimensions of this lane.
    DEVICE void load(float (&x)[PER_LANE], const char* row) const {
        row = loaded_again(row) + dimension * ITEM;
#pragma unroll
        for (int slot = 0; slot < PER_LANE; slot += STRETCH)
            load_floats<STRETCH, DTYPE>(x + slot, row + dimension_of(slot) * ITEM);
    }

    // Whether register `slot` belongs to padding.
    DEVICE bool is_padding(int slot) const {
        const int block = slot / WIDTH;
        return BLOCKS > N && block / RUN * READERS * RUN + block % RUN + reader * RUN >= N;
    }
};

// Adds up the values of two lanes; each keeps half of the sums, the upper lane the second half.
template <int COUNT>
DEVICE void exchange_halves(float* x, int distance, bool upper) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
        const float kept = upper ? x[i + COUNT / 2] : x[i], sent = upper ? x[i] : x[i + COUNT / 2];
        x[i] = kept + shuffle_xor(sent, distance);
    }
}

// The similarity of one dimension, added to `total`; `near` is 2^(rate * difference).
DEVICE float add_similarity(int kind, float query, float key, float total, float rate = 0) {
    const float difference = query - key;
    if (kind == NEAR) return total + exp2_approx(fabsf(difference) * rate);
    if (kind == DOT) return fmaf(query, key, total);
    if (kind == DIS) return fmaf(-difference, difference, total);
    return total - fabsf(difference);
}

template <int DISTANCE>
DEVICE void share_out(float* totals, int lane) {
    if constexpr (DISTANCE >= 1) {
        exchange_halves<2 * DISTANCE * CHUNK>(totals, DISTANCE, lane & DISTANCE);
        share_out<DISTANCE / 2>(totals, lane);
    }
}

// Computes the similarities of the blocks that this lane sorts.
template <class T>
DEVICE void compute_similarities(T (&values)[CHUNK], int kind, const float (&query)[PER_LANE],
                                 const float (&key)[PER_LANE], Lane lane, float rate = 0) {
    constexpr int CHAINS = WIDTH == 1 ? 1 : HELD == 1 && WIDTH >= 4 ? 4 : 2;  // partial sums hide latency
    float totals[HELD];
#pragma unroll
    for (int block = 0; block < HELD; ++block) {
        float sums[CHAINS] = {};
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const int slot = block * WIDTH + i;
            sums[i % CHAINS] = add_similarity(kind, query[slot], key[slot], sums[i % CHAINS], rate);
        }
        totals[block] = CHAINS == 4 ? (sums[0] + sums[1]) + (sums[2 % CHAINS] + sums[3 % CHAINS])
                                    : CHAINS == 2 ? sums[0] + sums[1 % CHAINS] : sums[0];
    }
    share_out<SPLIT / 2>(totals, lane.index);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
#pragma unroll
        for (int distance = GROUP; distance < LANES; distance *= 2) totals[i] += shuffle_xor(totals[i], distance);
        values[i].x = kind == NEAR ? totals[i] - (BLOCK_SIZE - SIZE) : totals[i];  // where zeros are padding
    }
}

// A value to be sorted, by functions that choose the one to come first and the other one. `order` sorts two values, and
// `of_lanes` chooses among values of two lanes.
template <class T, T (*FIRST)(T, T), T (*LAST)(T, T)>
struct Ordered {
    T x;
    static DEVICE void order(Ordered& a, Ordered& b) {
        const T first = FIRST(a.x, b.x);
        b.x = LAST(a.x, b.x);
        a.x = first;
    }
    DEVICE Ordered of_lanes(Ordered sent, int distance, bool upper) const {
        const T other = shuffle_xor(sent.x, distance);
        return {upper ? LAST(x, other) : FIRST(x, other)};
    }
};

typedef Ordered<float, max_nan, min_nan> Value;  // a NaN reaches both results

template <int START, int SIZE, class T>
DEVICE void order_network(T (&x)[CHUNK]) {
#pragma unroll
    for (int i = 0; i < Sorter<SIZE>::NETWORK.count; ++i)
        T::order(x[START + Sorter<SIZE>::NETWORK.low[i]], x[START + Sorter<SIZE>::NETWORK.high[i]]);
}

// Sorts a sequence that rises and then falls, or a rotation of one: halves are made of larger and of smaller values.
template <int START, int SIZE, class T>
DEVICE void merge(T (&x)[CHUNK]) {
    if constexpr (SIZE % 2) {
        order_network<START, SIZE>(x);
    } else {
#pragma unroll
        for (int i = START; i < START + SIZE / 2; ++i) T::order(x[i], x[i + SIZE / 2]);
        merge<START, SIZE / 2>(x);
        merge<START + SIZE / 2, SIZE / 2>(x);
    }
}

// Sorts the values of a group in descending order; value j of its lane r has the rank r * CHUNK + j. LEVELS is how many
// of the merges are unrolled.
template <int LEVELS, class T>
DEVICE void sort_group(T (&x)[CHUNK], int lane) {
    order_network<0, CHUNK>(x);
#pragma unroll LEVELS
    for (int width = 2; width <= GROUP; width *= 2) {
        // Two sorted runs, the second one reversed, leave the larger values in the first lanes.
        T mirrored[CHUNK];
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) mirrored[j] = x[CHUNK - 1 - j];
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) x[j] = x[j].of_lanes(mirrored[j], width - 1, lane & width / 2);
#pragma unroll LEVELS
        for (int distance = width / 4; distance >= 1; distance /= 2)
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) x[j] = x[j].of_lanes(x[j], distance, lane & distance);
        merge<0, CHUNK>(x);
    }
}

// Whether the weights of every base are constant in all lanes of the warp, as in a dot product: no order
// matters then. `weight` belongs to a head; sets the constants.
DEVICE bool find_flat(float (&constants)[BASES], const float* weight, Lane lane) {
    bool flat = MAY_BE_FLAT;
#pragma unroll
    for (int base = 0; base < BASES; ++base) {
        constants[base] = weight[base * BLOCKS];
        u32 own[CHUNK];
        if (MAY_BE_FLAT) load_words<CHUNK>(own, (const char*)(weight + base * BLOCKS + lane.position));
#pragma unroll
        for (int i = 0; MAY_BE_FLAT && i < CHUNK; ++i)
            flat &= lane.position + i >= N || bits_float(own[i]) == constants[base];
    }
    return MAY_BE_FLAT && !any_lane(!flat);
}

// Tiles of 16 rows in shared memory, the similarities of their blocks, and which pairs of rows count.
//
// A warp owns a tile of 16 rows and streams tiles of the other side. Products of matrices leave the similarities of 16
// own rows and 8 streamed rows in the registers of the warp. A lane has four pairs: own rows `lane / 4` and 8 more,
// with streamed rows `2 * (lane % 4)` and 1 more. `dis` is computed as half of it, q k - q^2 / 2 - k^2 / 2: the norms
// are a further product, of (q^2, 1) and (1, k^2) in two parts of 11 bits each.
//
// Products of float32 numbers are TF32, or if they are PRECISE, of two parts each.
#pragma once
#include "sort.cuh"

// The command line of the compiler sets the constants of a call.
constexpr int N = AHOP_BLOCKS, SIZE = AHOP_SIZE;             // blocks, and dimensions of a block
constexpr int WIDTH = AHOP_WIDTH;                            // dimensions of a value
constexpr int PART = AHOP_PART, VALUE = AHOP_VALUE;          // the same in memory: the rest of SIZE and WIDTH are zeros
constexpr bool DOT = AHOP_DOT, DIS = AHOP_DIS;               // bases
constexpr int DIS_AT = AHOP_DIS_AT;                          // index of `dis` among two bases
constexpr int DTYPE = AHOP_DTYPE;                            // of queries, keys and values
constexpr bool PRECISE = AHOP_PRECISE;                       // see above
constexpr int MASK = AHOP_MASK;                              // see below
constexpr bool CAUSAL = AHOP_CAUSAL, DROPOUT = AHOP_DROPOUT;
constexpr int THREADS = AHOP_THREADS, BLOCKS_PER_SM = AHOP_THREAD_BLOCKS_PER_SM;  // at most, and at least

constexpr int ROWS = 16, DIM = N * SIZE, BASES = DOT + DIS, CHUNKS = DIM / 8, WIDTH_CHUNKS = WIDTH / 8;
enum { NO_MASK, BLOCKED, ADDED };
constexpr int MASK_DTYPE = MASK - ADDED;  // of an added mask

constexpr bool SINGLE = DTYPE == FLOAT;
typedef HalfOf<DTYPE>::Type Half;
template <bool> struct NumberOf { typedef Half Type; };
template <> struct NumberOf<true> { typedef Float32 Type; };
typedef NumberOf<SINGLE>::Type Number;

// Bytes of a row in shared memory: an odd number of 16, so that matrices of 8 rows touch all banks once. Matrices are
// loaded by four, so a row has room for a multiple of four.
constexpr int BYTES = bytes_of(DTYPE);  // of a number
constexpr int row_bytes(int d) { return 16 * ((BYTES * d + 63) / 64 * 4 + 1); }
constexpr int DIM_BYTES = row_bytes(DIM), WIDTH_BYTES = row_bytes(WIDTH);
constexpr int NORM = SINGLE ? 4 : 16;           // bytes of a norm: a number, or four
constexpr int NORM_BYTES = DIS ? NORM * N : 0;  // of a row
// Registers of a lane: of 16 own rows, of 8 streamed ones, and of 16 x 16 numbers.
constexpr int own_words(int d) { return (BYTES * d + 31) / 32 * 4; }
constexpr int streamed_words(int d) { return (BYTES * d + 63) / 64 * 4; }
constexpr int SQUARE = 2 * BYTES;

// Rows of D numbers in shared memory, of blocks whose first numbers are in memory and are copied in units.
template <int D_, int BLOCK, int PART>
struct Rows {
    static constexpr int D = D_, BYTES_OF_PART = BYTES * PART;
    static constexpr int UNIT = BYTES_OF_PART % 16 == 0 ? 16 : BYTES_OF_PART % 8 == 0 ? 8 : BYTES_OF_PART % 4 ? 2 : 4;
    static constexpr int EACH = BYTES * BLOCK / UNIT, FILLED = BYTES_OF_PART / UNIT;  // units of a block
    static constexpr bool WHOLE = FILLED == EACH;

    // The place in memory of a unit in shared memory.
    static DEVICE int place(int unit) { return UNIT * (WHOLE ? unit : unit / EACH * FILLED + unit % EACH); }
    static DEVICE bool exists(int unit) { return WHOLE || unit % EACH < FILLED; }
};
typedef Rows<DIM, SIZE, PART> Points;
typedef Rows<WIDTH, WIDTH, VALUE> Values;

// Starts copying rows [first, first + rows) to shared memory; those from `count` on are zeros and not read.
template <class Kind>
DEVICE void copy_rows(u32 address, const char* data, i64 stride, int first, int rows, int count, int thread,
                      int threads) {
    constexpr int UNIT = Kind::UNIT, UNITS = Kind::D * BYTES / UNIT, ROW_BYTES = row_bytes(Kind::D);
    if (32 % UNITS == 0) {  // a thread copies one column
        const int step = threads / UNITS, unit = thread % UNITS;
        int row = thread / UNITS;
        const char* from = data + (first + row) * stride + Kind::place(unit);
        address += row * ROW_BYTES + UNIT * unit;
        for (; row < rows; row += step, from += step * stride, address += step * ROW_BYTES)
            copy_async<UNIT>(address, from, Kind::exists(unit) && first + row < count);
    } else {
        for (int i = thread; i < rows * UNITS; i += threads) {
            const int row = i / UNITS, unit = i % UNITS;
            const char* from = data + (first + row) * stride + Kind::place(unit);
            copy_async<UNIT>(address + row * ROW_BYTES + UNIT * unit, from, Kind::exists(unit) && first + row < count);
        }
    }
}

// Stores half of the negative squared norm of block `item / rows` of row `item % rows`, at NORM * item. Half precision
// has four numbers: (x, x', 1, 1) for own rows, (1, 1, x, x') for streamed ones, with x the upper bits and x' the rest.
template <bool OWN>
DEVICE void store_norm(char* norms, const char* data, int rows, int item) {
    const uint4* units = (const uint4*)(data + item % rows * DIM_BYTES + item / rows * BYTES * SIZE);
    float total = 0;
#pragma unroll
    for (int unit = 0; unit < SIZE * BYTES / 16; ++unit) {
        const uint4 four = units[unit];
        const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float low, high = 0;
            if (SINGLE) low = bits_float(words[j]);
            else Half::unpack(words[j], low, high);
            total = fmaf(low, low, fmaf(high, high, total));
        }
    }
    total *= -0.5f;
    if (SINGLE) {
        *(float*)(norms + NORM * item) = total;
        return;
    }
    const float upper = bits_float(float_bits(total) & 0xffffe000), rest = total - upper;
    *(float4*)(norms + 16 * item) = OWN ? make_float4(upper, rest, 1, 1) : make_float4(1, 1, upper, rest);
}

// Stores the norms of rows, by default of a tile by one warp; of all rows, the first ones are `filled`.
template <bool OWN>
DEVICE void store_norms(char* norms, const char* data, int thread, int threads = 32, int rows = ROWS,
                        int filled = 1 << 30) {
    for (int item = thread; DIS && item < rows * N; item += threads)
        if (item % rows < filled) store_norm<OWN>(norms, data, rows, item);
}

// The place of a lane in the matrices of a warp.
struct Lane {
    int index = threadIdx.x % 32, row = index / 4, column = 2 * (index % 4);
    // Addresses for load_matrices: two chunks of 16 rows, or four chunks of 8 rows.
    template <int D> DEVICE u32 pair() const { return index % 16 * row_bytes(D) + index / 16 * 16; }
    template <int D> DEVICE u32 quad() const { return index % 8 * row_bytes(D) + index / 8 * 16; }
    // For multiply_columns.
    template <int D> DEVICE u32 columns() const { return SINGLE ? column * row_bytes(D) + 4 * row : pair<D>(); }
    // Of the norms of streamed rows.
    DEVICE u32 norm() const { return SINGLE ? 4 * column : 16 * row + 2 * column; }
};

// Loads 16 rows as left factors.
template <int D>
DEVICE void load_own(u32 (&own)[own_words(D)], u32 address) {
#pragma unroll
    for (int i = 0; i < own_words(D); i += 4) load_matrices(own + i, address + 8 * i);
}

// Loads the norms of the own rows of a lane.
DEVICE void load_own_norms(u32 (&norms)[N][2], const char* place, Lane lane) {
    place += NORM * lane.row + (SINGLE ? 0 : 2 * lane.column);
#pragma unroll
    for (int block = 0; block < N; ++block) {
        norms[block][0] = DIS ? *(const u32*)(place + NORM * ROWS * block) : 0;
        norms[block][1] = DIS ? *(const u32*)(place + NORM * (ROWS * block + 8)) : 0;
    }
}

// The upper or lower part of a float32 number, of which tensor cores take 11 bits each. It is rounded by an integer sum:
// the conversion of PTX has more instructions, and a NaN whose bits are all set stays one in the lower part. A single
// part is rounded by a factor, which keeps every NaN.
DEVICE u32 part_of(u32 x, bool lower) {
    if (!PRECISE) return float_bits(bits_float(x) * 1.00034f);
    const u32 upper = x + 0x1000;
    return lower ? float_bits(bits_float(x) - bits_float(upper & 0xffffe000)) : upper;
}

// Adds the product of 16 x K and K x 8 float32 numbers, K = 8 COUNT. Tensor cores round toward zero, so they sum few
// products, the small ones first.
template <int COUNT, class Left, class Right>
DEVICE void multiply_single(float (&c)[4], Left left, Right right) {
#pragma unroll
    for (int first = 0; first < COUNT; first += 4) {
        float r[4] = {0, 0, 0, 0};
#pragma unroll
        for (int part = PRECISE ? 0 : 2; part < 3; ++part) {
#pragma unroll
            for (int i = first; i < first + 4 && i < COUNT; ++i) {
                auto a = [&](int j) { return part_of(left(i, j), part == 0); };
                auto b = [&](int j) { return part_of(right(i, j), part == 1); };
                multiply_tf32(r, r, {a(0), a(1), a(2), a(3)}, {b(0), b(1)});
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) c[j] += r[j];
    }
}

// Adds products of 16 own rows and 8 streamed rows over chunks [from, from + count), of which `streamed` has registers.
template <int FROM, int COUNT, int OWN, int STREAMED>
DEVICE void multiply_rows(float (&c)[4], const u32 (&own)[OWN], const u32 (&streamed)[STREAMED]) {
    if constexpr (SINGLE) {
        multiply_single<COUNT>(c, [&](int i, int j) { return own[4 * (FROM + i) + j]; },
                               [&](int i, int j) { return streamed[2 * (FROM + i) + j]; });
    } else {
#pragma unroll
        for (int i = FROM; i + 1 < FROM + COUNT; i += 2) {
            const u32 a[4] = {own[2 * i], own[2 * i + 1], own[2 * i + 2], own[2 * i + 3]};
            Half::multiply(c, a, streamed[i], streamed[i + 1]);
        }
        constexpr int LAST = FROM + COUNT - 1;
        if (COUNT % 2) Half::multiply(c, own[2 * LAST], own[2 * LAST + 1], streamed[LAST]);
    }
}

template <int D>
DEVICE void load_streamed(u32 (&streamed)[streamed_words(D)], u32 address) {
#pragma unroll
    for (int i = 0; i < streamed_words(D); i += 4) load_matrices(streamed + i, address + 16 * i);
}

// Adds the products of 16 x 16 numbers, `left(chunk)`, and 16 rows of D numbers to chunks of 8 columns.
template <int D, class Left>
DEVICE void multiply_columns(float (&c)[D / 8][4], Left left, u32 address) {
    if constexpr (SINGLE) {
#pragma unroll
        for (int chunk = 0; chunk < D / 8; ++chunk) {
            u32 r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) r[i] = load_shared(address + (i / 2 * 8 + i % 2) * row_bytes(D) + 32 * chunk);
            // The columns 0, 2, 4, 6 of eight are the first four of a left factor, as a lane has two adjacent ones.
            multiply_single<2>(c[chunk], [&](int i, int j) { return left(chunk)[4 * i + j % 2 * 2 + j / 2]; },
                               [&](int i, int j) { return r[2 * i + j]; });
        }
    } else {
#pragma unroll
        for (int chunk = 0; chunk < D / 8; chunk += 2) {
            const int next = chunk + 1 < D / 8 ? chunk + 1 : chunk;
            u32 r[4];
            load_transposed(r, address + 16 * chunk);
            Half::multiply(c[chunk], left(chunk), r[0], r[1]);
            if (next > chunk) Half::multiply(c[next], left(next), r[2], r[3]);
        }
    }
}

// Sets two adjacent numbers of 16 x 16 in the registers of a lane.
DEVICE void set_pair(u32 (&square)[SQUARE], int place, float low, float high) {
    if (SINGLE) {
        square[SQUARE / 4 * place] = float_bits(low), square[SQUARE / 4 * place + SQUARE / 8] = float_bits(high);
    } else {
        square[place] = Half::pack(low, high);
    }
}

// The similarities of 16 own rows and 8 streamed rows: of each base and block, four pairs.
struct Similarities {
    float dot[N][4], dis[N][4];

    template <int B>
    DEVICE void block(const u32 (&own)[own_words(DIM)], const u32 (&streamed)[streamed_words(DIM)],
                      const u32 (&own_norms)[N][2], const char* streamed_norms, int rows) {
#pragma unroll
        for (int i = 0; i < 4; ++i) dot[B][i] = 0;
        multiply_rows<B * (SIZE / 8), SIZE / 8>(dot[B], own, streamed);
        const char* norms = streamed_norms + NORM * B * rows;
        if constexpr (DIS && SINGLE) {
            const float2 pair = *(const float2*)norms;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                dis[B][i] = dot[B][i] + (bits_float(own_norms[B][i / 2]) + (i % 2 ? pair.y : pair.x));
        } else if (DIS) {
            multiply_tf32(dis[B], dot[B], own_norms[B], *(const u32*)norms);
        }
        if constexpr (B + 1 < N) block<B + 1>(own, streamed, own_norms, streamed_norms, rows);
    }

    // `address` and `streamed_norms` belong to this lane, for the first of 8 among `rows` streamed rows.
    DEVICE void compute(const u32 (&own)[own_words(DIM)], u32 address, const u32 (&own_norms)[N][2],
                        const char* streamed_norms, int rows) {
        u32 streamed[streamed_words(DIM)];
        load_streamed<DIM>(streamed, address);
        block<0>(own, streamed, own_norms, streamed_norms, rows);
    }

    DEVICE void of_pair(int pair, float (&x)[BASES][N]) const {
#pragma unroll
        for (int block = 0; block < N; ++block) {
            if (DIS) x[0][block] = dis[block][pair];
            if (DOT) x[DIS][block] = dot[block][pair];
        }
    }
};

// The weights of scores, (H, BASES, N), and what they are multiplied by: a factor of each base, (H, BASES), or no
// pointer, and the scaling of all scores. Strides between heads are in numbers.
struct Weights {
    const float *weight, *beta;
    i64 weight_head, beta_head;

    DEVICE float factor(int h, int base, float scaling) const {
        return beta ? beta[h * beta_head + base] * scaling : scaling;
    }
};

// Loads the weights of a head and folds them: weight . cumsum(sorted) == folded . sorted. `dis` comes first here, at
// index DIS_AT in memory, and its weights are doubled.
DEVICE void load_weights(float (&u)[BASES][N], const Weights& weights, int h, float scaling) {
#pragma unroll
    for (int base = 0; base < BASES; ++base) {
        const int place = BASES == 2 ? base ^ DIS_AT : base;
        const float* const weight = weights.weight + h * weights.weight_head + place * N;
        const float factor = weights.factor(h, place, scaling);
        float total = 0;
#pragma unroll
        for (int i = N - 1; i >= 0; --i) {
            total += weight[i];
            u[base][i] = (DIS && base == 0 ? 2 * total : total) * factor;
        }
    }
}

// Which pairs a query counts: a mask, the causal order and dropout.
struct Pairs {
    const char* mask;  // of this head
    i64 mask_query, mask_key;
    int length, count;
    u32 start, high, threshold;

    DEVICE void seed(const u32* words, u32 head) {
        if (DROPOUT) start = mix(words[0] ^ mix(head)), high = words[1];
    }

    // The number of a pair in the mask, or 0.
    DEVICE float number(int query, int key) const {
        if (query >= length || key >= count) return 0;
        const char* place = mask + query * mask_query + key * mask_key;
        if (MASK == BLOCKED) return *place;
        return load_float<MASK_DTYPE>(place);
    }

    // A score as an exponent of 2 with the mask added; -inf if the pair is blocked.
    DEVICE float masked(float score, int query, int key) const {
        if (MASK == BLOCKED && number(query, key) != 0) return -INFINITE;
        if (MASK > BLOCKED) score = fmaf(number(query, key), LOG2_E, score);
        return CAUSAL && key > query ? -INFINITE : score;
    }

    // Whether dropout keeps a pair: the hash of ops/dropout.py. A query has two words.
    DEVICE void query_words(int query, u32 (&words)[2]) const {
        words[0] = mix(start + query * 0x9e3779b9u);
        words[1] = mix(words[0] ^ high);
    }

    DEVICE bool keeps(const u32 (&words)[2], int key) const {
        u32 x = words[0] + key * 0x85ebca6bu;
        x = (x ^ (x >> 16)) * 0x7feb352du;
        x = ((x ^ (x >> 15)) ^ words[1]) * 0x846ca68bu;
        return (x ^ (x >> 16)) >= threshold;
    }

    static DEVICE u32 mix(u32 x) {
        x = (x ^ (x >> 16)) * 0x7feb352du;
        x = (x ^ (x >> 15)) * 0x846ca68bu;
        return x ^ (x >> 16);
    }
};

// Stores 16 rows: half precision goes through shared memory, where the numbers of a row are adjacent.
template <class Kind>
DEVICE void store_rows(const float (&chunks)[Kind::D / 8][4], float first, float second, char* scratch, char* out,
                       i64 stride, int rows, Lane lane) {
    constexpr int D = Kind::D, UNIT = Kind::UNIT, BLOCK_BYTES = UNIT * Kind::EACH;
    if (SINGLE) {
#pragma unroll
        for (int i = 0; i < D / 4; ++i) {
            const float factor = i % 2 ? second : first, *two = chunks[i / 2] + i % 2 * 2;
            const int row = lane.row + i % 2 * 8, block = 32 * (i / 2) / BLOCK_BYTES;
            const int column = 32 * (i / 2) % BLOCK_BYTES + 4 * lane.column, left = UNIT * Kind::FILLED - column;  // bytes
            char* place = out + row * stride + block * UNIT * Kind::FILLED + column;
            if (row >= rows || left <= 0) continue;
            if (UNIT >= 8) {
                *(float2*)place = make_float2(two[0] * factor, two[1] * factor);
            } else {
                *(float*)place = two[0] * factor;
                if (left > 4) *(float*)(place + 4) = two[1] * factor;
            }
        }
        return;
    }
    sync_warp();
#pragma unroll
    for (int chunk = 0; chunk < D / 8; ++chunk) {
        char* place = scratch + lane.row * row_bytes(D) + 16 * chunk + 2 * lane.column;
        *(u32*)place = Half::pack(chunks[chunk][0] * first, chunks[chunk][1] * first);
        *(u32*)(place + 8 * row_bytes(D)) = Half::pack(chunks[chunk][2] * second, chunks[chunk][3] * second);
    }
    sync_warp();
    constexpr int UNITS = D * BYTES / UNIT;
    for (int i = lane.index; i < ROWS * UNITS; i += 32) {
        const int row = i / UNITS, unit = i % UNITS;
        if (row < rows && Kind::exists(unit))
            copy_unit<UNIT>(out + row * stride + Kind::place(unit), scratch + row * row_bytes(D) + UNIT * unit);
    }
}

// Fused attention, backward: all gradients. Before and after it, attend_sums.cu has a sum per query, and the sum of the
// weights' gradients.
//
// A block has one or more items: all keys of a head, or a strip of them. A warp owns 16 keys at a time and keeps their
// gradients in registers. Tiles of queries pass through a ring in shared memory. The warps visit each of them in the
// order of their keys and add to its gradient. After the last visit, a warp stores that gradient and copies another
// tile to its place: one that has no keys left, if there is one. No thread waits for a whole block. Blocks with other
// strips of the same head add to the gradient of a tile in turns. Similarities are sorted once: the sorted values
// give the score, and their order the derivatives.
#include "attend_call.cuh"

constexpr int SUMS = CHUNKS + DIS, SUM_BYTES = 512;  // of a tile: matrices of 16 x 8 numbers, 16 bytes for each lane
constexpr u32 MINUS_ZEROS = SINGLE ? 1u << 31 : 0x80008000;  // changes no sum
constexpr int TOGETHER = SINGLE ? 2 : 1;               // halves of a tile whose own rows are loaded at once
constexpr int WARPS = THREADS / 32;
constexpr int VISITS = 2 * WARPS;                    // barriers of a tile, which its visitors use in turns
// Similarities may have a large mean, beside which a sum in float32 would lose digits of their differences. So a lane
// sums the gradients of the weights of centered values (the sum of two or four blocks, or the values of all blocks)
// over a few tiles of queries: over all of 2,000 queries, the error is up to nine times as large.
constexpr int SUMMED = SINGLE ? 4 : 1 << 30, CENTERED = !SINGLE ? 0 : N == 2 || N == 4 ? 1 : N;
constexpr int DELAY = 2;                             // steps from the last visit of a tile until it is stored
// Shared memory holds own tiles (keys, values, norms), and tiles of queries (queries, gradients, norms, statistics,
// barriers, sums).
constexpr int SECOND = ROWS * DIM_BYTES, NORMS = SECOND + ROWS * WIDTH_BYTES, OWN_BYTES = NORMS + ROWS * NORM_BYTES;
constexpr int STATISTICS = OWN_BYTES, READY = STATISTICS + ROWS * 8, BARRIERS = READY + 16;
constexpr int TILE_SUMS = BARRIERS + 8 * VISITS;
constexpr int TILE_BYTES = TILE_SUMS + SUMS * SUM_BYTES;

// Loads two numbers of adjacent dimensions.
DEVICE void load_two(float& low, float& high, const char* place) {
    if (SINGLE) low = ((const float2*)place)->x, high = ((const float2*)place)->y;
    else Half::unpack(*(const u32*)place, low, high);
}

// The derivatives of `dis`, which are summed over queries and over keys. Half precision multiplies them by ones.
// Float32 adds them up: in a lane for its two keys, and for its columns of each half, two queries by four blocks.
struct Distances {
    u32 slopes[SINGLE ? 1 : N][SQUARE];
    float columns[2][(N + 3) / 4][8];

    // Sums the columns over the keys: lane 8 * (block % 4) + 4 * (query % 2) + query / 2 gets half + 2 * (block / 4).
    DEVICE void sum_columns(float (&sums)[4], Lane lane) {
#pragma unroll
        for (int i = 0; i < (N > 4 ? 4 : 2); ++i) {
            float(&x)[8] = columns[i % 2][i / 2];
#pragma unroll
            for (int count = 4; count; count /= 2) {
                const bool upper = lane.row & count;
#pragma unroll
                for (int j = 0; j < count; ++j) {
                    const float sent = upper ? x[j] : x[j + count], kept = upper ? x[j + count] : x[j];
                    x[j] = kept + shuffle_xor(sent, 4 * count);
                }
            }
            sums[i] = x[0];
        }
    }
};

// Subtracts rows times the sums of their derivatives, which the difference in `dis` contributes.
template <class Sum>
DEVICE void subtract_rows(float (&chunks)[CHUNKS][4], Sum sum, const char* rows, Lane lane) {
#pragma unroll
    for (int block = 0; block < N; ++block) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float factor = sum(row, block);
#pragma unroll
            for (int chunk = block * (SIZE / 8); chunk < (block + 1) * (SIZE / 8); ++chunk) {
                float low, high;
                load_two(low, high, rows + (lane.row + 8 * row) * DIM_BYTES + BYTES * (8 * chunk + lane.column));
                chunks[chunk][2 * row] -= factor * low;
                chunks[chunk][2 * row + 1] -= factor * high;
            }
        }
    }
}

// Adds the product of 16 x 16 and 16 x 8 numbers in half precision; does nothing in float32.
template <int COUNT, int WORDS>
DEVICE void multiply_half(float (&c)[COUNT], const u32 (&a)[WORDS], u32 b0, u32 b1) {
    if constexpr (WORDS == 4) Half::multiply(c, a, b0, b1);
}

// What a warp keeps: its keys and values, their gradients and the gradients of the weights.
struct OwnKeys {
    Lane lane;
    Pairs pairs;
    char* own;        // the tile in shared memory
    u32 address;      // of the tile
    int first;        // index of the first key
    float factor;     // of the shares that dropout keeps
    float exponents[BASES][N], weight_grad[BASES][N], score_grad;
    float centers[BASES];    // of float32 similarities, which are subtracted before their products are summed
    bool centered, stored;   // whether there are centers, and a part of the gradients of the weights
    RankedWeights<N, Number> ranked[BASES];
    float key_grad[CHUNKS][4], value_grad[WIDTH_CHUNKS][4], key_sums[SINGLE ? 2 * N : 4];

    // Prepares the keys and values from `start` on.
    DEVICE void begin(const Backward& p, int n, int h, int start) {
        first = start;
        sync_warp();
        copy_rows<Points>(address, p.key.at(n, h), p.key.row, first, ROWS, p.count, lane.index, 32);
        copy_rows<Values>(address + SECOND, p.value.at(n, h), p.value.row, first, ROWS, p.count, lane.index, 32);
        copies_commit();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) key_grad[chunk][i] = 0;
#pragma unroll
            for (int chunk = 0; chunk < WIDTH_CHUNKS; ++chunk) value_grad[chunk][i] = 0;
        }
#pragma unroll
        for (float& sum : key_sums) sum = 0;
        copies_wait<0>();
        sync_warp();
        store_norms<true>(own + NORMS, own, lane.index);
        sync_warp();
        const int next = first + WARPS * ROWS + lane.index % ROWS;  // of this warp, unless the item ends before
        if (next < p.count && lane.index < ROWS) prefetch(p.key.at(n, h) + next * p.key.row);
        if (next < p.count && lane.index >= ROWS) prefetch(p.value.at(n, h) + next * p.value.row);
    }

    // Stores the gradients of the keys and values.
    DEVICE void finish(const Backward& p, int n, int h) {
        auto sum = [&](int row, int block) {
            if (!SINGLE) return shuffle(key_sums[2 * row + block % 2], lane.index / 4 * 4 + block / 2);
            float& all = key_sums[row * N + block];
            all += shuffle_xor(all, 1);
            return all + shuffle_xor(all, 2);
        };
        if (DIS) subtract_rows(key_grad, sum, own, lane);
        const int left = p.count - first;
        store_rows<Points>(key_grad, 1, 1, own, p.key_grad.at(n, h) + first * p.key_grad.row, p.key_grad.row, left, lane);
        store_rows<Values>(value_grad, 1, 1, own + SECOND, p.value_grad.at(n, h) + first * p.value_grad.row,
                           p.value_grad.row, left, lane);
    }

    // Prepares the queries of head `index` of N * H.
    DEVICE void set_head(const Backward& p, int n, int index) {
        const int h = index % p.heads;
        pairs = Pairs{p.mask.at(n, h), p.mask.row, p.mask_key, p.length, p.count, 0, 0, p.threshold};
        pairs.seed(p.seed, index);
        float u[BASES][N];
        load_weights(u, p.weights, h, p.scaling);
        score_grad = 0;
        centered = stored = false;
#pragma unroll
        for (int i = 0; i < BASES; ++i) {
            ranked[i].set(u[i]);
            centers[i] = 0;  // a part is stored although causality has left out all tiles before
#pragma unroll
            for (int j = 0; j < N; ++j) exponents[i][j] = u[i][j] * LOG2_E, weight_grad[i][j] = 0;
        }
    }

    // Stores the gradients of the weights and of the scores, summed over the warp, or adds them to what it stored.
    DEVICE void store_weights(float* parts) {
        auto store = [&](int i, float x) {
            if (lane.index == 0) parts[i] = SINGLE && stored ? parts[i] + x : x;
        };
        const float all = sum_warp(score_grad);
        store(BASES * N, all);
        score_grad = 0;
#pragma unroll
        for (int i = 0; i < BASES; ++i) {
            const int place = BASES == 2 ? i ^ DIS_AT : i;
            float totals[N];
#pragma unroll
            for (int j = 0; j < N; ++j) totals[j] = sum_warp(weight_grad[i][j]), weight_grad[i][j] = 0;
#pragma unroll
            for (int j = 0; j < CENTERED; ++j) totals[j] = fmaf(centers[i], all, totals[j]);
            RankedWeights<N, Number>::undo(totals);
#pragma unroll
            for (int j = 0; j < N; ++j) store(place * N + j, DIS && i == 0 ? 2 * totals[j] : totals[j]);
        }
        stored = true;
    }

    // Computes the similarities and the gradients of shares of TOGETHER times 8 queries, from half `half` of a tile on.
    DEVICE void compare(int half, const char* tile, u32 tile_address, Similarities (&similarities)[TOGETHER],
                        float (&products)[TOGETHER][4]) {
        u32 keys[own_words(DIM)], norms[N][2];
        load_own<DIM>(keys, address + lane.pair<DIM>());
        load_own_norms(norms, own + NORMS, lane);
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
            similarities[i].compute(keys, tile_address + 8 * (half + i) * DIM_BYTES + lane.quad<DIM>(), norms,
                                    tile + NORMS + 8 * NORM * (half + i) + lane.norm(), ROWS);
        u32 values[own_words(WIDTH)], streamed[streamed_words(WIDTH)];
        load_own<WIDTH>(values, address + SECOND + lane.pair<WIDTH>());
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            load_streamed<WIDTH>(streamed, tile_address + SECOND + 8 * (half + i) * WIDTH_BYTES + lane.quad<WIDTH>());
            multiply_rows<0, WIDTH_CHUNKS>(products[i], values, streamed);
        }
    }

    // Sorts the similarities of 8 queries from `query` on. Sets the shares and the derivatives of all blocks, and of
    // `dis` alone, as columns `half` of left factors, with keys as rows.
    DEVICE void differentiate(int half, int query, const char* tile, const Similarities& similarities,
                              const float (&products)[4], u32 (&shares)[SQUARE], u32 (&slopes)[N][SQUARE],
                              Distances& distances) {
        const float4 at_columns = *(const float4*)(tile + STATISTICS + 64 * half + 8 * lane.column);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int key = first + lane.row + 8 * row;
            typename RankedWeights<N, Number>::Order ranks[2][BASES];
            float grads[2], kept[2];
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                float x[BASES][N], score = 0;
                similarities.of_pair(2 * row + side, x);
#pragma unroll
                for (int i = 0; i < BASES; ++i) {
                    ranks[side][i] = RankedWeights<N, Number>::sort(x[i]);
#pragma unroll
                    for (int j = 0; j < N; ++j) score = fmaf(x[i][j], exponents[i][j], score);
                }
                const int column = query + lane.column + side;
                score = pairs.masked(score, column, key);
                const float log_sum = side ? at_columns.z : at_columns.x;
                float share = exp2_approx(SINGLE ? fmaf(log_sum, -LOG2_E, score) : score - log_sum);
                share = key < pairs.count ? share : 0;
                float share_grad = products[2 * row + side];
                kept[side] = share;
                if (DROPOUT) {
                    u32 words[2];
                    pairs.query_words(column, words);
                    const float scale = pairs.keeps(words, key) ? factor : 0;
                    share_grad *= scale;
                    kept[side] *= scale;
                }
                grads[side] = share * (share_grad - (side ? at_columns.w : at_columns.y));
                score_grad += grads[side];
#pragma unroll
                for (int i = 0; i < BASES; ++i) {
                    if (SINGLE && !centered) centers[i] = shuffle(x[i][0], 0);
#pragma unroll
                    for (int j = 0; j < N; ++j) {
                        const float value = j < CENTERED ? x[i][j] - centers[i] : x[i][j];
                        weight_grad[i][j] = fmaf(grads[side], value, weight_grad[i][j]);
                    }
                }
                centered = true;
            }
            const int place = 2 * half + row;
            set_pair(shares, place, kept[0], kept[1]);
#pragma unroll
            for (int side = 0; side < SQUARE / 4; ++side) {  // both sides in one word of half precision
                const u32 grad = Number::pack(grads[side], grads[1]);
                u32 weights[BASES][N];
#pragma unroll
                for (int i = 0; i < BASES; ++i) ranked[i].look_up(ranks[side][i], ranks[1][i], weights[i]);
#pragma unroll
                for (int block = 0; block < N; ++block) {
                    u32 slope = MINUS_ZEROS;
#pragma unroll
                    for (int i = 0; i < BASES; ++i) {
                        slope = Number::fma(weights[i][block], grad, slope);
                        if (!DIS || i > 0) continue;
                        if (SINGLE) {
                            key_sums[SINGLE ? row * N + block : 0] += bits_float(slope);
                            distances.columns[half][block / 4][block % 4 * 2 + side] += bits_float(slope);
                        } else {
                            distances.slopes[SINGLE ? 0 : block][place] = slope;
                        }
                    }
                    slopes[block][SQUARE / 4 * place + side] = slope;
                }
            }
        }
    }

    // Adds the gradients of all pairs with a tile of 16 queries from `query` on, as its visitor `number`.
    DEVICE void add_tile(int query, char* tile, u32 tile_address, u32 number) {
        u32 shares[SQUARE], slopes[N][SQUARE];
        Distances distances = {};
#pragma unroll
        for (int half = 0; half < 2; half += TOGETHER) {
            Similarities similarities[TOGETHER];
            float products[TOGETHER][4] = {};
            compare(half, tile, tile_address, similarities, products);
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                differentiate(half + i, query + 8 * (half + i), tile, similarities[i], products[i], shares, slopes,
                              distances);
        }
        multiply_columns<WIDTH>(value_grad, [&](int) -> const u32(&)[SQUARE] { return shares; },
                                tile_address + SECOND + lane.columns<WIDTH>());
        auto slopes_of = [&](int chunk) -> const u32(&)[SQUARE] { return slopes[chunk * 8 / SIZE]; };
        multiply_columns<DIM>(key_grad, slopes_of, tile_address + lane.columns<DIM>());
        // All sums are loaded before the first one is stored: the compiler cannot know that they are different.
        char* const sums = tile + TILE_SUMS + 16 * lane.index;
        float query_sums[SUMS][4];
        if constexpr (SINGLE) {
            float query_grad[CHUNKS][4] = {}, column_sums[4] = {};
#pragma unroll
            for (int block = 0; block < N; ++block) turn(slopes[block], slopes[block]);
            multiply_columns<DIM>(query_grad, slopes_of, address + lane.columns<DIM>());
            if (DIS) distances.sum_columns(column_sums, lane);
            await_visit(tile_address, number);
#pragma unroll
            for (int i = 0; i < SUMS; ++i) load_sum(query_sums[i], sums + i * SUM_BYTES);
#pragma unroll
            for (int i = 0; i < 4 * SUMS; ++i)
                query_sums[i / 4][i % 4] += i < 4 * CHUNKS ? query_grad[i / 4 % CHUNKS][i % 4] : column_sums[i % 4];
        } else {
            if (DIS) {
#pragma unroll
                for (int block = 0; block < N; ++block) {
                    const u32 ones = lane.row == block ? Half::ONES : 0;  // a column of ones
                    multiply_half(key_sums, distances.slopes[block], ones, ones);
                }
            }
            u32 own_columns[CHUNKS + CHUNKS % 2][2];
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
                u32 r[4];
                load_transposed(r, address + lane.pair<DIM>() + 16 * chunk);
                own_columns[chunk][0] = r[0], own_columns[chunk][1] = r[1];
                own_columns[chunk + 1][0] = r[2], own_columns[chunk + 1][1] = r[3];
            }
            await_visit(tile_address, number);
#pragma unroll
            for (int i = 0; i < SUMS; ++i) load_sum(query_sums[i], sums + i * SUM_BYTES);
#pragma unroll
            for (int block = 0; block < N; ++block) {
                u32 turned[SQUARE];
                if (DIS) {
                    const u32 ones = lane.row == block ? Half::ONES : 0;
                    turn(turned, distances.slopes[block]);
                    multiply_half(query_sums[SUMS - 1], turned, ones, ones);
                }
                if (DOT) turn(turned, slopes[block]);
#pragma unroll
                for (int chunk = block * (SIZE / 8); chunk < (block + 1) * (SIZE / 8); ++chunk)
                    multiply_half(query_sums[chunk], turned, own_columns[chunk][0], own_columns[chunk][1]);
            }
        }
#pragma unroll
        for (int i = 0; i < SUMS; ++i) store_sum(sums + i * SUM_BYTES, query_sums[i]);
        end_visit(tile_address, number);
    }

    // Waits until `number` visitors have left.
    static DEVICE void await_visit(u32 tile_address, u32 number) {
        if (number == 0) return;
        const u32 barrier = tile_address + BARRIERS + (number - 1) % VISITS * 8;
        while (!barrier_passed(barrier, (number - 1) / VISITS % 2)) {}
    }

    static DEVICE void end_visit(u32 tile_address, u32 number) {
        barrier_arrive(tile_address + BARRIERS + number % VISITS * 8);
    }

    // Transposes 16 x 16 numbers; those of float32 in two halves.
    static DEVICE void turn(u32 (&turned)[SQUARE], const u32 (&matrix)[SQUARE]) {
        u32 r[SQUARE];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int from = SQUARE / 4 * (i % 2 * 2 + i / 2);
            if (SINGLE) {
                const u32 a = matrix[from], b = matrix[from + SQUARE / 8];
                const u32 lower = transpose(select_bytes(a, b, 0x5410)), upper = transpose(select_bytes(a, b, 0x7632));
                r[SQUARE / 4 * i] = select_bytes(lower, upper, 0x5410);
                r[SQUARE / 4 * i + SQUARE / 8] = select_bytes(lower, upper, 0x7632);
            } else {
                r[i] = transpose(matrix[from]);
            }
        }
#pragma unroll
        for (int i = 0; i < SQUARE; ++i) turned[i] = r[i];
    }

    static DEVICE void load_sum(float (&r)[4], const char* place) {
        const float4 x = *(const float4*)place;
        r[0] = x.x, r[1] = x.y, r[2] = x.z, r[3] = x.w;
    }

    static DEVICE void store_sum(char* place, const float (&r)[4]) {
        *(float4*)place = make_float4(r[0], r[1], r[2], r[3]);
    }
};

// Adds the gradient of a tile of queries to the sum of earlier thread blocks. Returns whether this one is the last.
DEVICE bool add_in_turn(float (&chunks)[CHUNKS][4], float4* place, u32* turn, u32 mine, u32 last, Lane lane) {
    if (mine) {
        if (lane.index == 0)
            while (load_acquire(turn) != mine) {}
        sync_warp();
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const float4 x = place[32 * chunk + lane.index];
            chunks[chunk][0] += x.x, chunks[chunk][1] += x.y, chunks[chunk][2] += x.z, chunks[chunk][3] += x.w;
        }
    }
    if (mine == last) return true;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
        OwnKeys::store_sum((char*)(place + 32 * chunk + lane.index), chunks[chunk]);
    sync_warp();
    if (lane.index == 0) store_release(turn, mine + 1);
    return false;
}

// The tiles that pass through the ring: all queries of an item, then all of the next item.
struct Ring {
    const Backward& p;
    char* places;
    int number, strip, items;        // the first item of this block, its strip, and the number of items of this block
    int keys, first_key;             // tiles of keys of an item, and the index of the first one
    int first_query, tiles, length;  // the first tile of queries that sees a key, tiles of a head, and of an item

    DEVICE Ring(const Backward& p, char* places, int number) : p(p), places(places), number(number) {
        strip = number % p.strips, items = (p.items - number + gridDim.x - 1) / gridDim.x;
        first_key = strip * p.strip_tiles, keys = min(p.strip_tiles, tiles_of(p.count) - first_key);
        first_query = CAUSAL ? min(first_key, tiles_of(p.length) - 1) : 0;
        tiles = tiles_of(p.length) - first_query, length = tiles * p.group;
    }

    DEVICE int key_head(int item) const { return (number + item * gridDim.x) / p.strips; }  // of N * Hk
    DEVICE int head(int entry) const { return key_head(entry / length) * p.group + entry % length / tiles; }
    DEVICE int query(int entry) const { return (first_query + entry % length % tiles) * ROWS; }
    DEVICE char* place(int entry) const { return places + entry % p.slots * TILE_BYTES; }

    // Starts copying a tile of queries, with what belongs to it.
    DEVICE void copy(int entry, Lane lane) const {
        const int index = head(entry), n = index / p.heads, h = index % p.heads, first = query(entry);
        char* const tile = place(entry);
        const u32 address = shared_address(tile);
        copy_rows<Points>(address, p.query.at(n, h), p.query.row, first, ROWS, p.length, lane.index, 32);
        copy_rows<Values>(address + SECOND, p.grad.at(n, h), p.grad.row, first, ROWS, p.length, lane.index, 32);
        copies_commit();
        const float2* from = p.statistics + (i64)index * tiles_of(p.length) * ROWS + first;
        if (lane.index < ROWS) ((float2*)(tile + STATISTICS))[lane.index] = from[lane.index];
#pragma unroll
        for (int i = 0; i < SUMS; ++i)
            *(float4*)(tile + TILE_SUMS + i * SUM_BYTES + 16 * lane.index) = make_float4(0, 0, 0, 0);
    }

    // Waits for the copy, and lets the visitors come.
    DEVICE void open(char* tile, Lane lane) const {
        copies_wait<0>();
        sync_warp();
        store_norms<false>(tile + NORMS, tile, lane.index);
        barrier_arrive(shared_address(tile) + READY);
    }

    // The last strip that visits a tile of queries.
    DEVICE int last_strip(int query) const {
        return CAUSAL && query + ROWS < p.length ? min(query / ROWS / p.strip_tiles, p.strips - 1) : p.strips - 1;
    }
};

// Stores the gradient of a tile of queries, or adds it to what other thread blocks still add to.
DEVICE void store_queries(const Backward& p, char* tile, int index, int first, int mine, int last, Lane lane) {
    const char* const sums = tile + TILE_SUMS + 16 * lane.index;
    float query_grad[CHUNKS][4];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) OwnKeys::load_sum(query_grad[i], sums + i * SUM_BYTES);
    if (DIS) {
        float all[4];
        OwnKeys::load_sum(all, sums + CHUNKS * SUM_BYTES);
        auto sum = [&](int row, int block) {
            if (SINGLE) return shuffle(all[row + block / 4 * 2], block % 4 * 8 + lane.row % 2 * 4 + lane.row / 2);
            return shuffle(all[2 * row + block % 2], lane.index / 4 * 4 + block / 2);
        };
        subtract_rows(query_grad, sum, tile, lane);
    }
    const i64 place = (i64)index * tiles_of(p.length) + first / ROWS;
    if (add_in_turn(query_grad, p.query_sums + place * CHUNKS * 32, p.turns + 1 + place, mine, last, lane))
        store_rows<Points>(query_grad, 1, 1, tile,
                        p.query_grad.at(index / p.heads, index % p.heads) + first * p.query_grad.row,
                        p.query_grad.row, p.length - first, lane);
    sync_warp();
}

KERNEL void __launch_bounds__(THREADS, BLOCKS_PER_SM) attend_backward(const Backward p) {
    SHARED_MEMORY(shared);
    const int warp = threadIdx.x / 32;
    char* const own_tile = shared + 16 + warp * OWN_BYTES;
    // Thread blocks work in the order in which they start: one that waits for its turn waits for others that run.
    if (threadIdx.x == 0) *(u32*)shared = add_atomically(p.turns, 1);
    sync_block();
    const Ring ring(p, shared + 16 + WARPS * OWN_BYTES, *(const u32*)shared);
    OwnKeys own;
    const Lane lane = own.lane;
    own.own = own_tile;
    own.address = shared_address(own_tile);
    own.factor = p.factor;
    const int entries = ring.items * ring.length;
    for (int i = warp; i < min(p.slots, entries); i += WARPS) {
        const u32 address = shared_address(ring.place(i));
        if (lane.index <= VISITS) barrier_init(address + (lane.index < VISITS ? BARRIERS + 8 * lane.index : READY), 32);
        ring.copy(i, lane);
    }
    sync_block();  // all barriers are there
    for (int i = warp; i < min(p.slots, entries); i += WARPS) ring.open(ring.place(i), lane);

    char* opening = nullptr;  // a tile that is being copied
    auto open = [&] {
        if (opening) ring.open(opening, lane);
        opening = nullptr;
    };
    auto store = [&](int entry) {
        char* const tile = ring.place(entry);
        const int first = ring.query(entry);
        open();
        OwnKeys::await_visit(shared_address(tile), (entry / p.slots + 1) * ring.keys);
        store_queries(p, tile, ring.head(entry), first, ring.strip, ring.last_strip(first), lane);
        if (entry + p.slots < entries) ring.copy(entry + p.slots, lane), opening = tile;
    };

    const int key_heads = p.heads / p.group, rest = (ring.keys - 1) % WARPS + 1;  // warps with keys in the last round
    const int storing = rest < WARPS ? WARPS - rest : WARPS;                       // warps that store tiles
    for (int item = 0; item < ring.items; ++item) {
        const int head = ring.key_head(item), n = head / key_heads, begin = item * ring.length;
        int stored = rest == WARPS ? warp : warp < rest ? ring.length : warp - rest;  // the next one
        // Each of these functions is called at one place: a copy of its code takes long to compile.
        for (int key = warp, step = 0, index, query, place, turn;;) {
            if (key < ring.keys && step == 0) {
                index = head * p.group, query = ring.first_query * ROWS;
                place = begin % p.slots, turn = begin / p.slots;
                own.begin(p, n, head % key_heads, (ring.first_key + key) * ROWS);
            }
            for (; key < ring.keys && step < ring.length; ++step) {
                // If the ring has room, all warps store at the same step: none waits for another one then.
                const int safe = p.slots < WARPS + 5 ? step - DELAY + 1 : (step - DELAY) / WARPS * WARPS;
                if (key + WARPS >= ring.keys && rest == WARPS && stored < safe) break;
                if (query == ring.first_query * ROWS) own.set_head(p, n, index);
                char* const tile = ring.places + place * TILE_BYTES;
                const u32 address = shared_address(tile), visit = turn * ring.keys + key;
                while (!barrier_passed(address + READY, turn % 2)) {}
                if (CAUSAL && query + ROWS <= own.first) {
                    OwnKeys::await_visit(address, visit);
                    OwnKeys::end_visit(address, visit);
                } else {
                    own.add_tile(query, tile, address, visit);
                }
                query += ROWS;
                if (query >= p.length || (SINGLE && step % SUMMED == SUMMED - 1))
                    own.store_weights(p.weight_parts + ((i64)index * tiles_of(p.count) + own.first / ROWS) * PARTS);
                if (query >= p.length) query = ring.first_query * ROWS, ++index;
                if (++place == p.slots) place = 0, ++turn;
                open();
            }
            if (key < ring.keys && step == ring.length) {
                own.finish(p, n, head % key_heads);
                key += WARPS, step = 0;
            } else if (stored < ring.length) {
                store(begin + stored), stored += storing;
            } else {
                break;
            }
        }
        open();
    }
}

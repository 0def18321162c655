// Scores of queries and keys: a group of lanes keeps a key in registers, or two, and compares it with queries in turn.
#include "score_call.cuh"

constexpr bool PACKED = AHOP_PACKED;  // two keys at a time in half precision, for blocks of one dimension
constexpr int KEYS = PACKED ? 2 : 1, THREADS = 128;

// The sorts of a query. Bases of single dimensions that have the order of the absolute differences share the first one.
struct Sorts {
    int count = 0, kinds[BASES] = {}, members[BASES] = {};  // what a sort orders, and the bases that use it, a bit each

    constexpr Sorts() {
        int shared = 0, sharing = 0;
        bool has_near = false;
        for (int base = 0; base < BASES; ++base) {
            if (kind_of(base) == DOT) continue;
            shared |= 1 << base;
            ++sharing;
            has_near |= kind_of(base) == NEAR;
        }
        if (BLOCK_SIZE > 1 || (sharing < 2 && !has_near && !PACKED)) shared = 0;
        if (shared) kinds[0] = L1, members[count++] = shared;
        for (int base = 0; base < BASES; ++base)
            if (!(shared >> base & 1)) kinds[count] = kind_of(base), members[count++] = 1 << base;
    }
};
constexpr Sorts SORTS{};

typedef Ordered<u32, Half::max_nan, Half::min_nan> Two;  // values of two keys in half precision

// The keys of a lane, and their similarities to a query.
struct OneKey {
    typedef Value Item;
    float key[PER_LANE];

    DEVICE void load(const char* first, const char*, Lane lane) { lane.load(key, first); }

    DEVICE void compare(Value (&values)[CHUNK], int kind, const char* query, const float (&kept)[PER_LANE], Lane lane,
                        float rate) const {
        if constexpr (KEEPS_ROWS) {
            compute_similarities(values, kind, kept, key, lane, rate);
        } else {
            float row[PER_LANE];
            lane.load(row, query);
            compute_similarities(values, kind, row, key, lane, rate);
        }
    }

    DEVICE float at(int slot, int) const { return key[slot]; }
    static DEVICE float value(Value value, int) { return value.x; }
};

struct TwoKeys {
    typedef Two Item;
    static constexpr int WORDS = (PER_LANE + 1) / 2;
    u32 keys[PER_LANE];

    static DEVICE void load_row(u32* words, const char* row, Lane lane) {
        row = loaded_again(row) + lane.dimension * ITEM;
#pragma unroll
        for (int slot = 0; slot < PER_LANE; slot += STRETCH)
            load_words<STRETCH / 2>(words + slot / 2, row + dimension_of(slot) * ITEM);
    }

    DEVICE void load(const char* first, const char* second, Lane lane) {
        u32 a[WORDS], b[WORDS];
        load_row(a, first, lane);
        load_row(b, second, lane);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) keys[i] = select_bytes(a[i / 2], b[i / 2], i % 2 ? 0x7632 : 0x5410);
    }

    DEVICE void compare(Two (&values)[CHUNK], int kind, const char* query, const float (&)[PER_LANE], Lane lane,
                        float) const {
        u32 row[WORDS];
        load_row(row, query, lane);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const u32 x = select_bytes(row[i / 2], row[i / 2], i % 2 ? 0x3232 : 0x1010);
            values[i].x = kind == DOT ? Half::mul(x, keys[i]) : Half::sub(x, keys[i]) | 0x80008000;  // -|x|
        }
    }

    DEVICE float at(int slot, int which) const { return value({keys[slot]}, which); }
    static DEVICE float value(Two value, int which) {
        float low, high;
        Half::unpack(value.x, low, high);
        return which ? high : low;
    }
};

template <bool> struct KeysOf { typedef OneKey Type; };
template <> struct KeysOf<true> { typedef TwoKeys Type; };
typedef KeysOf<PACKED>::Type Keys;

// Adds the weighted sum of sorted values of a base; absolute differences are changed to the values of the base.
DEVICE void weigh(float (&scores)[KEYS], const Keys::Item (&values)[CHUNK], int base, bool changed,
                  const float* weight, Lane lane) {
    const float* place = weight + base * BLOCKS + lane.position;
    const float rate = kind_of(base) == NEAR ? place[BASES * BLOCKS] : 0;
    u32 factors[CHUNK];
    load_words<CHUNK>(factors, loaded_again((const char*)place));
#pragma unroll
    for (int which = 0; which < KEYS; ++which) {
        float sums[2] = {};
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            float x = Keys::value(values[i], which);
            if (kind_of(base) == DIS && changed) x *= -x;
            if (kind_of(base) == NEAR && changed) x = exp2_approx(-x * rate);
            sums[i % 2] = fmaf(x, bits_float(factors[i]), sums[i % 2]);
        }
        scores[which] += sums[0] + sums[1];
    }
}

DEVICE void weigh_members(float (&scores)[KEYS], const Keys::Item (&values)[CHUNK], int sort, const float* weight,
                          Lane lane) {
#pragma unroll
    for (int base = 0; base < BASES; ++base)
        if (SORTS.members[sort] >> base & 1)
            weigh(scores, values, base, SORTS.kinds[sort] != kind_of(base), weight, lane);
}

// Adds the scores with constant weights.
DEVICE void add_flat(float (&scores)[KEYS], const Keys& keys, const char* query, const float (&constants)[BASES],
                     Lane lane) {
    float row[PER_LANE], column[PER_LANE];
    lane.load(row, query);
#pragma unroll
    for (int which = 0; which < KEYS; ++which) {
#pragma unroll
        for (int slot = 0; slot < PER_LANE; ++slot) column[slot] = keys.at(slot, which);
#pragma unroll
        for (int base = 0; base < BASES; ++base) {
            float sums[4] = {};
#pragma unroll
            for (int slot = 0; slot < PER_LANE; ++slot) {
                const bool padding = lane.is_padding(slot);
                sums[slot % 4] = add_similarity(kind_of(base), padding ? 0 : row[slot], padding ? 0 : column[slot],
                                                sums[slot % 4]);
            }
            scores[which] = fmaf((sums[0] + sums[1]) + (sums[2] + sums[3]), constants[base], scores[which]);
        }
#pragma unroll
        for (int distance = GROUP; distance < LANES; distance *= 2)
            scores[which] += shuffle_xor(scores[which], distance);
    }
}

KERNEL void __launch_bounds__(THREADS) score(const ScoreCall p) {
    const Lane lane;
    const u32 per_head = (p.count + KEYS - 1) / KEYS, slots = p.batch * p.heads * per_head;
    const u32 number = blockIdx.x % p.programs * (THREADS / LANES) + threadIdx.x / LANES;
    const u32 slot = min(number, slots - 1), head = slot / per_head;  // lanes past the end repeat the last key
    const int n = head / p.heads, h = head % p.heads, start = blockIdx.x / p.programs * p.rows;
    const int key = (slot - head * per_head) * KEYS, other = min(key + 1, p.count - 1);
    const bool exists = number < slots && lane.index % LANES == 0, stores[2] = {exists, exists && key + 1 < p.count};
    const Tensor &queries = p.query.ready, &all_keys = p.key.ready;
    const float* weight = p.folded + h * FOLDED;
    const char* query = queries.at(n, h) + start * queries.row;
    char* out = p.scores.at(n, h) + start * p.scores.row;
    char* places[2] = {out + key * p.scores_key, out + other * p.scores_key};
    float constants[BASES];
    const bool flat = find_flat(constants, weight, lane);
    Keys keys;
    keys.load(all_keys.at(n, h) + key * all_keys.row, all_keys.at(n, h) + other * all_keys.row, lane);
    for (int left = min(p.rows, p.length - start); left > 0; --left) {
        float scores[KEYS] = {}, kept[PER_LANE];
        if (KEEPS_ROWS) lane.load(kept, query);
        if (MAY_BE_FLAT && flat) {
            add_flat(scores, keys, query, constants, lane);
        } else {
#pragma unroll UNROLLED
            for (int sort = 0; sort < SORTS.count; ++sort) {
                Keys::Item values[CHUNK];
                // All sorts share one network if the loop is not unrolled, and `each` is constant anyway.
#pragma unroll
                for (int each = 0; each < SORTS.count; ++each)
                    if (each == sort)
                        keys.compare(values, SORTS.kinds[each], query, kept, lane,
                                     SORTS.kinds[each] == NEAR ? weight[(BASES + each) * BLOCKS] : 0);
                sort_group<UNROLLED == 1 ? 1 : 5>(values, lane.index);
#pragma unroll
                for (int each = 0; each < SORTS.count; ++each)
                    if (each == sort) weigh_members(scores, values, each, weight, lane);
            }
        }
#pragma unroll
        for (int which = 0; which < KEYS; ++which) {
#pragma unroll
            for (int distance = 1; distance < GROUP; distance *= 2)
                scores[which] += shuffle_xor(scores[which], distance);
            if (stores[which]) store_float<SCORE_DTYPE>(places[which], scores[which]);
            places[which] += p.scores.row;
        }
        query += queries.row;
    }
}

// Sums of the backward pass of attention: one per query before its kernel, and the weights' gradients after it.
#include "attend_call.cuh"

// Loads eight numbers, of which `left` exist; if none is missing in any block, the address is a multiple of 16.
template <class Kind>
DEVICE void load_eight(float (&x)[8], const char* place, int left) {
    if (!Kind::WHOLE) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = i < left ? load_float<DTYPE>(place, i) : 0;
        return;
    }
    const uint4* units = (const uint4*)place;
#pragma unroll
    for (int unit = 0; unit < BYTES / 2; ++unit) {
        const u32 words[4] = {units[unit].x, units[unit].y, units[unit].z, units[unit].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (SINGLE) x[4 * unit + i] = bits_float(words[i]);
            else Half::unpack(words[i], x[2 * i], x[2 * i + 1]);
        }
    }
}

// Adds the product of eight numbers each to `total`.
DEVICE float add_product(const float (&x)[8], const float (&y)[8], float total) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) total = fmaf(x[i], y[i], fmaf(x[i + 1], y[i + 1], total));
    return total;
}

KERNEL void attend_statistics(const Backward p) {
    constexpr int LANES = WIDTH_CHUNKS > 8 ? 16 : WIDTH_CHUNKS > 4 ? 8 : WIDTH_CHUNKS > 2 ? 4 : WIDTH_CHUNKS;
    const int padded = tiles_of(p.length) * ROWS, member = threadIdx.x % LANES;
    const i64 place = (i64)blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.turns = 0;
    const bool exists = place < (i64)p.batch * p.heads * padded;
    const int index = exists ? place / padded : 0, row = exists ? place % padded : 0;
    float total = 0;
    if (exists && row < p.length && member < WIDTH_CHUNKS) {
        const i64 n = index / p.heads, h = index % p.heads;
        float out[8], grad[8];
        const int left = VALUE - 8 * member;
        load_eight<Values>(out, p.out.at(n, h) + row * p.out.row + 8 * BYTES * member, left);
        load_eight<Values>(grad, p.grad.at(n, h) + row * p.grad.row + 8 * BYTES * member, left);
        total = add_product(out, grad, 0);
    }
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) total += shuffle_xor(total, distance);
    if (!exists || member) return;
    const float log_sum = row < p.length ? p.log_sum[(i64)index * p.length + row] * LOG_UNIT : INFINITE;
    p.statistics[place] = make_float2(log_sum, total);
    if (row % ROWS == 0) p.turns[1 + place / ROWS] = 0;
}

// Sorts the similarities of a random pair of a head; returns its share.
DEVICE float sample_pair(const Backward& p, int h, u32 number, float (&x)[BASES][N]) {
    const u32 random = Pairs::mix(number);
    const int n = number % p.batch, query = random % p.length, key = Pairs::mix(random) % p.count;
    const char* queries = p.query.at(n, h) + query * p.query.row;
    const char* keys = p.key.at(n, h / p.group) + key * p.key.row;
#pragma unroll
    for (int block = 0; block < N; ++block) {
        float dot = 0, dis = 0;
#pragma unroll
        for (int first = 0; first < PART; first += 8) {
            float q[8], k[8];
            const int place = BYTES * (block * PART + first);
            load_eight<Points>(q, queries + place, PART - first);
            load_eight<Points>(k, keys + place, PART - first);
            dot = add_product(q, k, dot);
#pragma unroll
            for (int i = 0; i < 8; ++i) q[i] -= k[i];
            dis = add_product(q, q, dis);
        }
        if (DIS) x[0][block] = -0.5f * dis;
        if (DOT) x[DIS][block] = dot;
    }
    float u[BASES][N], score = 0;
    load_weights(u, p.weights, h, p.scaling);
#pragma unroll
    for (int i = 0; i < BASES; ++i) {
        Sorter<N>::sort(x[i]);
#pragma unroll
        for (int j = 0; j < N; ++j) score = fmaf(x[i][j], u[i][j] * LOG2_E, score);
    }
    const Pairs pairs{p.mask.at(n, h), p.mask.row, p.mask_key, p.length, p.count, 0, 0, 0};
    const float log_sum = p.log_sum[((i64)n * p.heads + h) * p.length + query] * LOG2_E;
    return exp2_approx(pairs.masked(score, query, key) - log_sum);
}

// Sums the parts of a head and base in a fixed order, and undoes the folding: the cumulative sum is its transpose.
//
// The gradients of a query's scores have the sum 0, except that its readout was rounded. So a constant may be
// subtracted from the similarities of a rank: their mean, of some pairs, makes that error small.
KERNEL void attend_weights(const Backward p) {
    constexpr int COLUMNS = N == 1 ? 2 : N < 4 ? 4 : N < 8 ? 8 : 16, AHEAD = 16;  // lanes of a part, and loads at a time
    SHARED_MEMORY(shared);
    float(*const sums)[2][N + 1] = (float(*)[2][N + 1])shared;  // of each warp: of its parts and of a sample
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = lane % COLUMNS;
    const int h = blockIdx.x / BASES, base = blockIdx.x % BASES, each = tiles_of(p.count), count = p.batch * each;
    const bool is_dis = DIS && (BASES == 1 || base == DIS_AT);
    const int offset = column < N ? base * N + column : BASES * N, step = blockDim.x / COLUMNS;
    float total = 0, sampled = 0, x[BASES][N];
    for (int first = threadIdx.x / COLUMNS; first < count; first += AHEAD * step) {
        float parts[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const int i = first + k * step;
            const i64 part = ((i64)(i / each) * p.heads + h) * each + i % each;
            parts[k] = i < count && column <= N ? p.weight_parts[part * PARTS + offset] : 0;
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) total += parts[k];
    }
#pragma unroll
    for (int distance = COLUMNS; distance < 32; distance *= 2) total += shuffle_xor(total, distance);
    if (lane <= N) sums[warp][0][lane] = total;
    const float share = sample_pair(p, h, threadIdx.x, x), shares = sum_warp(share);
    if (lane == 0) sums[warp][1][N] = shares;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        total = share > 0 ? share * (is_dis ? 2 * x[0][j] : x[BASES - 1][j]) : 0;
        total = sum_warp(total);
        if (lane == 0) sums[warp][1][j] = total;
    }
    sync_block();
    if (warp) return;
    total = 0;
    for (int i = 0; lane <= N && i < blockDim.x / 32; ++i) total += sums[i][0][lane], sampled += sums[i][1][lane];
    const float all = shuffle(total, N), of_sample = shuffle(sampled, N), rest = of_sample > 0 ? all / of_sample : 0;
    const float centered = total - rest * sampled;
    total = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float earlier = shuffle(centered, i);
        total += i <= lane ? earlier : 0;
    }
    const int place = h * BASES + base;
    const float weight = lane < N ? p.weights.weight[h * p.weights.weight_head + base * N + lane] : 0;
    const float slope = sum_warp(lane < N ? total * weight : 0) * p.scaling;
    if (lane < N) p.weight_grad[place * N + lane] = total * p.weights.factor(h, base, p.scaling);
    if (lane == 0 && p.beta_grad) p.beta_grad[place] = slope;
}

/* The kernels for one instruction set and one element type. footprint.c includes this file. It defines ISA, BYTES (the
 * size of a vector), REGISTERS (the number of vector registers) and DOUBLE, and for x86 also X86, the prefix of
 * intrinsics. */
#if DOUBLE
#define T double
#define INT int64_t
#define HUGE_T DBL_MAX
#define LARGE_T 1e150
#define SMALL_T 1e-150
#define MANTISSA 52
#define BIAS 1023
#define POWER /* 2^f for |f| <= 1/2, relative error 1e-17 */                                          \
    1, 0.693147180559945309, 0.240226506959100982, 0.0555041086648215943, 0.00961812910760688853,     \
    0.00133335581464169353, 0.000154035304417360502, 1.52527338298361184e-5, 1.32154425879216897e-6,  \
    1.01780624458457735e-7, 7.0725859492692237e-9, 4.45496059818651839e-10
#else
#define T float
#define INT int32_t
#define HUGE_T FLT_MAX
#define LARGE_T 1e16f
#define SMALL_T 1e-18f
#define MANTISSA 23
#define BIAS 127
#define POWER 1, 0.693146977f, 0.240222421f, 0.0555073384f, 0.00967151343f, 0.00132647047f /* error 1.1e-7 */
#endif

#define V FN(vector)
#define I FN(integers)
#define WORD FN(word)
typedef T V __attribute__((vector_size(BYTES), may_alias));
typedef INT I __attribute__((vector_size(BYTES), may_alias));
typedef INT WORD __attribute__((may_alias));
typedef T FN(unaligned) __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
enum { FN(OCTAVES) = 8 };
typedef struct {
    T scale, limit; /* exp(-x / width) is 2^(scale * x), and 0 from x = limit on */
    T share[FN(OCTAVES)]; /* weights of width / 2^k that the base takes over, relative to its own if they are equal */
    int32_t source[FN(OCTAVES)]; /* the base that has them, or -1 */
    int32_t octaves, merged; /* the largest k; whether another base takes this one over */
} FN(width);
#define LANES ((int)(BYTES / sizeof(T)))
#define QUERIES (SMALL ? 2 : REGISTERS / 8) /* the sums of a tile take half of the registers */

/* If an operand is NaN, MIN and MAX return the second one, as on x86. MIN_NUMBER never returns a NaN of the first. */
#if defined(X86) && DOUBLE
#define MIN(a, b) ((V)X86(min_pd)(a, b))
#define MAX(a, b) ((V)X86(max_pd)(a, b))
#elif defined(X86)
#define MIN(a, b) ((V)X86(min_ps)(a, b))
#define MAX(a, b) ((V)X86(max_ps)(a, b))
#elif defined(__aarch64__) && DOUBLE
#define MIN(a, b) ((V)vminq_f64((float64x2_t)(a), (float64x2_t)(b)))
#define MAX(a, b) ((V)vmaxq_f64((float64x2_t)(a), (float64x2_t)(b)))
#define MIN_NUMBER(a, b) ((V)vminnmq_f64((float64x2_t)(a), (float64x2_t)(b)))
#elif defined(__aarch64__)
#define MIN(a, b) ((V)vminq_f32((float32x4_t)(a), (float32x4_t)(b)))
#define MAX(a, b) ((V)vmaxq_f32((float32x4_t)(a), (float32x4_t)(b)))
#define MIN_NUMBER(a, b) ((V)vminnmq_f32((float32x4_t)(a), (float32x4_t)(b)))
#else
#define MIN(a, b) ((V)(((I)(a) & ((a) < (b))) | ((I)(b) & ~((a) < (b)))))
#define MAX(a, b) ((V)(((I)(a) & ((a) > (b))) | ((I)(b) & ~((a) > (b)))))
#endif
#if !defined(MIN_NUMBER)
#define MIN_NUMBER MIN
#endif

#define GROUP(size, ...)                                                        \
    for (; groups; groups--, start += advance)                                  \
        for (V *y = x + start; y < x + vectors * height; y += height) {         \
            V r[size];                                                          \
            UNROLL for (int i = 0; i < (size); i++) r[i] = y[i * step];         \
            __VA_ARGS__                                                         \
            UNROLL for (int i = 0; i < (size); i++) y[i * step] = r[i];         \
        }                                                                       \
    break;

/* A window that extends past the end: row d, which holds infinity, replaces all rows there. */
#define RAGGED(size, first, body)                                               \
    {                                                                           \
        int64_t row[size];                                                      \
        UNROLL for (int i = 0; i < (size); i++)                                 \
            row[i] = (first) + i * step < end ? (first) + i * step : d;         \
        for (V *y = x; y < x + vectors * height; y += height) {                 \
            UNROLL for (int i = 0; i < (size); i++) r[i] = y[row[i]];           \
            body                                                                \
            UNROLL for (int i = 0; i < (size); i++) y[row[i]] = r[i];           \
        }                                                                       \
    }

/* The last steps of a merge compare rows across the edge of a window. The rows past the edge are carried over to the
 * next window in registers. */
#define CHAIN(carried, window, body)                                            \
    for (; groups; groups--, start += advance) {                                \
        V r[carried + window];                                                  \
        int64_t first = start + step;                                           \
        const int64_t whole = most(0, (end - 1 - first - (carried - 1) * step) / (window * step)); \
        for (int64_t v = 0; whole && v < vectors; v++) {                        \
            V *y = x + v * height + first;                                      \
            UNROLL for (int i = 0; i < carried; i++) r[i] = y[i * step];        \
            for (int64_t left = whole; left; left--, y += window * step) {      \
                UNROLL for (int i = carried; i < carried + window; i++) r[i] = y[i * step]; \
                body                                                            \
                UNROLL for (int i = 0; i < window; i++) y[i * step] = r[i];     \
                UNROLL for (int i = 0; i < carried; i++) r[i] = r[i + window];  \
            }                                                                   \
            UNROLL for (int i = 0; i < carried; i++) y[i * step] = r[i];        \
        }                                                                       \
        for (first += whole * window * step; first + step < end; first += window * step) \
            RAGGED(carried + window, first, body)                               \
    }                                                                           \
    break;

/* Specializes the code for a common step, as a compile-time constant. */
#define KNOWN_STEP(known, ...)                                                       \
    if (!SMALL && step == known) {                                              \
        enum { step = known };                                                  \
        __VA_ARGS__                                                             \
    } else                                                                      \
        __VA_ARGS__

/* Sort the columns of a block. With `skip_last`, a last step that compares neighbors (rows 1 and 2, rows 3 and 4, ...)
 * is left to the caller. Returns whether it was. */
static int FN(sort)(const step_t *network, V *x, int64_t d, int64_t height, int64_t vectors, int skip_last)
{
    for (;; network++) {
        const int64_t step = network->step, advance = network->advance, end = network->end;
        int64_t start = network->start, groups = network->groups;
        switch (network->code) {
        case SORT2: GROUP(2, APPLY(S2, ROWS2))
        case SORT4: GROUP(4, APPLY(S4, ROWS4))
        case SORT8: GROUP(8, APPLY(S8, ROWS8))
        case SORT16: GROUP(16, APPLY(S16, ROWS16))
        case SORT32: GROUP(32, APPLY(S16, ROWS16) APPLY(S16, NEXT16) MERGE_32)
        case MERGE32: KNOWN_STEP(2, GROUP(32, MERGE_32))
        case CHAIN1:
            if (skip_last && network[1].code == END)
                return 1;
            KNOWN_STEP(1, CHAIN(0, 2, CE(r[0], r[1])))
        case CHAIN2: KNOWN_STEP(1, CHAIN(1, 4, CE(r[1], r[3]) CE(r[2], r[4]) CE(r[0], r[1]) CE(r[2], r[3])))
        case CHAIN3: KNOWN_STEP(1, CHAIN(3, 8, CE(r[3], r[7]) CE(r[4], r[8]) CE(r[5], r[9]) CE(r[6], r[10])
                                               CE(r[1], r[3]) CE(r[2], r[4]) CE(r[5], r[7]) CE(r[6], r[8])
                                               CE(r[0], r[1]) CE(r[2], r[3]) CE(r[4], r[5]) CE(r[6], r[7])))
        case CHAIN4: KNOWN_STEP(1, CHAIN(7, 16, CE(r[7], r[15]) CE(r[8], r[16]) CE(r[9], r[17]) CE(r[10], r[18])
                                                CE(r[11], r[19]) CE(r[12], r[20]) CE(r[13], r[21]) CE(r[14], r[22])
                                                CE(r[3], r[7]) CE(r[4], r[8]) CE(r[5], r[9]) CE(r[6], r[10])
                                                CE(r[11], r[15]) CE(r[12], r[16]) CE(r[13], r[17]) CE(r[14], r[18])
                                                CE(r[1], r[3]) CE(r[2], r[4]) CE(r[5], r[7]) CE(r[6], r[8])
                                                CE(r[9], r[11]) CE(r[10], r[12]) CE(r[13], r[15]) CE(r[14], r[16])
                                                CE(r[0], r[1]) CE(r[2], r[3]) CE(r[4], r[5]) CE(r[6], r[7])
                                                CE(r[8], r[9]) CE(r[10], r[11]) CE(r[12], r[13]) CE(r[14], r[15])))
        default: return 0;
        }
    }
}

#define CONVERT(type, convert)                                                              \
    for (int64_t i = 0, place = 0; i < d; i++, place += stride)                             \
        UNROLL for (int lane = 0; lane < lanes; lane++)                                     \
            to[i * lanes + lane] = (T)convert(((const type *)from)[offset[lane] + place]);  \
    break;

/* Copy d numbers into each of `lanes` lanes, converted to T. */
INLINE void FN(load)(const void *from, int64_t dtype, const int64_t *offset, int lanes, int64_t stride, int64_t d,
                     T *to)
{
    switch (DOUBLE ? FLOAT64 : dtype) {
    case FLOAT16: CONVERT(uint16_t, from_float16)
    case BFLOAT16: CONVERT(uint16_t, from_bfloat16)
    default: CONVERT(T, )
    }
}

/* The same for a whole vector: a function of its own, since the code is long. */
static void FN(load_lanes)(const void *from, int64_t dtype, const int64_t *offset, int64_t stride, int64_t d, V *to)
{
    FN(load)(from, dtype, offset, LANES, stride, d, (T *)to);
}

/* Returns whether any of `count` numbers is NaN or so large that a sum of similarities could overflow. Without the sign
 * bit, bit patterns are ordered like the numbers, and NaN is larger than all of them. */
static int FN(special)(const T *numbers, int64_t count)
{
    const T bound = LARGE_T;
    const WORD *bits = (const WORD *)numbers;
    INT largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const INT magnitude = bits[i] & (INT)(sizeof(T) == 4 ? INT32_MAX : INT64_MAX);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest > *(const WORD *)&bound;
}

/* Columns of keys, key_grad, query and query_grad have d vectors. There is one query for each row of a tile, or for
 * each column of keys if they are paired. Columns of x, values and ordered have `blocks` vectors. A row and a column of
 * keys have column row * vectors + column of x and values, and this entry of sums and grad. */
typedef struct {
    V *keys, *x, *query;
    int64_t d, pitch;    /* rows of a column of keys, and from one to the next */
    int64_t blocks;      /* rows of a sorted column; values and ordered have one more from one column to the next */
    int64_t height;      /* rows from one column of x to the next; rows from `blocks` on hold infinity */
    int64_t query_pitch; /* from the query of one column to the next query: 0 if columns share one */
    int64_t *ranks;      /* ranks that the weights of a base distinguish: 0 if all are zero, 1 if all are equal */
    const step_t *network;
    T *numbers, *weights;
    FN(width) *widths, width; /* of each base, and of the current one */
    /* For missing values, else NULL: the known dimensions of each lane; the weights of lanes that know m dimensions,
     * [place][base][rank]; the place of m, from 1 on, or 0 unless FN(stretch) has computed them; how many places are
     * used, of `most_used`; sums of the first weights, [base][0 to d]. */
    I *known;
    T *stretched;
    int32_t *places, *used, most_used;
    double *integrals;
    V *sums, *grad, *values, *ordered, *key_grad, *query_grad, *weight_grad;
    /* For products, else NULL, see FN(shift): d equal lanes; keys minus `origin`; [row or column][DIS or DOT][FEW]: terms
     * of queries and of keys, slopes summed over columns and over rows. */
    V *origin, *shifted, *query_terms, *key_terms, *row_sums, *column_sums;
    V *row;  /* for softmax: the scores of a query */
    T *dots; /* for its gradient: sums of weights times their gradients, of each query */
} FN(buffers);

/* Copy the vectors from `first` on into the lanes of a panel. Lanes past the last vector repeat it: zeros would create
 * ties, which are slow to resolve. Returns whether a number is special. */
static int FN(load_columns)(const call_t *call, const void *from, int64_t origin, const int64_t *stride, int64_t first,
                            int64_t vectors, int64_t pitch, V *to)
{
    int special = 0;
    for (int64_t v = 0; v < vectors; v++) {
        int64_t offset[LANES];
        for (int lane = 0; lane < LANES; lane++)
            offset[lane] = origin + least(first + v * LANES + lane, call->count - 1) * stride[2];
        FN(load_lanes)(from, call->dtype, offset, stride[3], call->d, to + v * pitch);
        special |= FN(special)((const T *)(to + v * pitch), call->d * LANES);
    }
    return special;
}

static int FN(load_keys)(const call_t *call, int64_t n, int64_t h, int64_t first, int64_t vectors,
                         const FN(buffers) *at)
{
    const int64_t *stride = call->key_stride;
    return FN(load_columns)(call, call->key, n * stride[0] + h * stride[1], stride, first, vectors, at->pitch,
                            at->keys);
}

/* Copy each of `rows` queries from l on into all lanes, or queries that are paired with keys into the lanes of their
 * keys. */
static int FN(load_queries)(const call_t *call, int64_t n, int64_t h, int64_t l, int64_t rows, int64_t first,
                            int64_t vectors, const FN(buffers) *at)
{
    const int64_t *stride = call->query_stride, d = call->d;
    int special = 0;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t origin = n * stride[0] + h * stride[1] + (l + row) * stride[2];
        if (call->paired)
            return FN(load_columns)(call, call->query, origin, stride, first, vectors, at->pitch, at->query);
        T *numbers = at->numbers;
        V *query = at->query + row * at->pitch;
        FN(load)(call->query, call->dtype, &origin, 1, stride[3], d, numbers);
        for (int64_t i = 0; i < d; i++)
            query[i] = (V){0} + numbers[i];
        special |= FN(special)(numbers, d);
    }
    return special;
}

/* The k for which a base NEAR has the width of another one / 2^k and distinguishes so many ranks as it, or 0. */
static int FN(octave)(const call_t *call, const FN(buffers) *at, int64_t ranks, int64_t b, int64_t wider)
{
    const T ratio = at->widths[b].scale / at->widths[wider].scale;
    for (int octave = 1; octave < FN(OCTAVES); octave++)
        if ((T)(1 << octave) == ratio)
            return call->bases[b] == NEAR && call->bases[wider] == NEAR && at->ranks[b] == ranks && at->ranks[wider] == ranks
                       ? octave
                       : 0;
    return 0;
}

/* Let the widest of the bases NEAR whose widths differ by powers of two, and that distinguish so many ranks, take over
 * the others: they need one exponential and squares of it. */
static void FN(merge_widths)(const call_t *call, const FN(buffers) *at, int64_t ranks)
{
    for (int64_t widest = 0; widest < call->n_bases; widest++) {
        FN(width) *to = at->widths + widest;
        int is_widest = 1;
        for (int64_t b = 0; b < call->n_bases; b++)
            is_widest &= !FN(octave)(call, at, ranks, widest, b);
        for (int64_t b = 0; is_widest && b < call->n_bases; b++) {
            const int octave = FN(octave)(call, at, ranks, b, widest);
            if (!octave || at->widths[b].merged || (octave <= to->octaves && to->source[octave] >= 0))
                continue;
            const T share = at->weights[b * at->blocks] / at->weights[widest * at->blocks];
            if (ranks == 1 && !(share < 1 / SMALL_T && -share < 1 / SMALL_T)) /* sums of shares would overflow */
                continue;
            while (to->octaves < octave) {
                to->share[++to->octaves] = 0;
                to->source[to->octaves] = -1;
            }
            to->source[octave] = (int32_t)b;
            to->share[octave] += share;
            at->widths[b].merged = 1;
        }
    }
}

/* Load the weights of head h in ascending order of what is sorted, and count the ranks that they distinguish. Weights
 * of DIS are multiplied by `dis`: the backward pass uses them only as a factor of 2 * (q - k). */
static void FN(load_weights)(const call_t *call, int64_t h, T dis, const FN(buffers) *at)
{
    const int64_t blocks = call->blocks;
    for (int64_t b = 0; b < call->n_bases; b++) {
        const T *folded = (const T *)call->weight + (h * call->n_bases + b) * blocks;
        const int32_t base = call->bases[b];
        const T sign = base == NEAR ? 1 : base == DIS ? -dis : -1;
        const T scale = (T)-1.44269504088896340736 / (call->widths ? ((const T *)call->widths)[b] : 1);
        int equal = folded[0] - folded[0] == 0; /* finite */
        for (int64_t i = 0; i < blocks; i++) {
            const int reversed = base == DOT || (base == NEAR && blocks < call->d);
            at->weights[b * blocks + i] = reversed ? folded[blocks - 1 - i] : sign * folded[i];
            equal &= folded[i] == folded[0];
        }
        at->ranks[b] = !equal ? blocks : folded[0] != 0;
        at->widths[b].scale = scale > 0 ? -scale : scale;
        at->widths[b].limit = -BIAS / at->widths[b].scale;
        at->widths[b].octaves = at->widths[b].merged = 0;
    }
    FN(merge_widths)(call, at, 1);
    if (1 < blocks && blocks == call->d)
        FN(merge_widths)(call, at, blocks);
}

INLINE int FN(any)(I mask)
{
    uint64_t words[BYTES / 8], any = 0;
    memcpy(words, &mask, BYTES);
    for (int i = 0; i < BYTES / 8; i++)
        any |= words[i];
    return any != 0;
}

/* Compute exp(-x / width) in place for a few rows x >= 0: 2^e is 2^(e - n) from a polynomial times 2^n, where n is the
 * integer next to e. Adding `magic` rounds to n and leaves n + BIAS in the lowest bits, the exponent of 2^n; n = -BIAS
 * gives 0. The rows advance together, because each waits for the previous step. */
INLINE void FN(near)(V *x, int64_t rows, FN(width) width)
{
    const T magic = (T)3 * ((INT)1 << (MANTISSA - 1)) + BIAS, power[] = {POWER};
    const int degree = sizeof power / sizeof *power - 1;
    V rounded[ABREAST], sum[ABREAST];
    UNROLL for (int j = 0; j < rows; j++) x[j] = MIN((V){0} + width.limit, x[j]);
    UNROLL for (int j = 0; j < rows; j++) rounded[j] = x[j] * width.scale + magic;
    UNROLL for (int j = 0; j < rows; j++) x[j] = x[j] * width.scale - (rounded[j] - magic);
    UNROLL for (int j = 0; j < rows; j++) sum[j] = x[j] * power[degree] + power[degree - 1];
    UNROLL for (int i = degree - 2; i >= 0; i--)
        UNROLL for (int j = 0; j < rows; j++) sum[j] = sum[j] * x[j] + power[i];
    UNROLL for (int j = 0; j < rows; j++) x[j] = sum[j] * (V)((I)rounded[j] << MANTISSA);
}

/* Add a base NEAR, and all that it takes over, of a query and a few keys. The columns advance together, because each
 * waits for the previous step. */
INLINE void FN(add_near)(FN(width) width, V q, const V *keys, int64_t pitch, int64_t columns, V *sum)
{
    V x[ABREAST], own[ABREAST];
    UNROLL for (int j = 0; j < columns; j++) x[j] = MAX(q - keys[j * pitch], keys[j * pitch] - q);
    FN(near)(x, columns, width);
    UNROLL for (int j = 0; j < columns; j++) own[j] = x[j];
    for (int octave = 1; octave <= width.octaves; octave++)
        UNROLL for (int j = 0; j < columns; j++) {
            x[j] = MAX((V){0} + SMALL_T, x[j]); /* subnormal squares are slow */
            x[j] *= x[j];
            own[j] += width.share[octave] * x[j];
        }
    UNROLL for (int j = 0; j < columns; j++) sum[j] += own[j];
}

/* Compute the similarity of two rows. */
INLINE V FN(compare)(int32_t base, FN(width) width, V q, V k)
{
    if (base == DIS)
        return (q - k) * (q - k);
    if (base == DOT)
        return q * k;
    if (base != NEAR)
        return MAX(q - k, k - q);
    V sum = {0};
    FN(add_near)(width, q, &k, 0, 1, &sum);
    return sum;
}

/* Prepare a similarity for the network. A tagged similarity carries its block in the lowest bits through the sort, and
 * `exact` keeps its value. A tagged infinity would be a NaN, so infinities and NaN are clamped where they occur. */
INLINE V FN(enter)(int mode, V value, I known, I tag, I mask, V *exact, V *sum)
{
    const V huge = (V){0} + HUGE_T, last = (V){0} + (T)__builtin_inf();
    if (mode == NAN_ASIDE || mode == UNKNOWN_LAST) {
        const I number = (value == value) | ~known;
        *sum = (V)((I)*sum | ~number);
        value = (V)((I)value & number);
    }
    if (mode == UNKNOWN_LAST)
        value = (V)(((I)value & known) | ((I)last & ~known));
    if (mode == TAGGED || mode == BOUNDED)
        *exact = value;
    if (mode == BOUNDED)
        value = MAX(MIN_NUMBER(value, huge), -huge);
    if (mode == TAGGED || mode == BOUNDED)
        value = (V)(((I)value & ~mask) | (tag & mask));
    return value;
}

/* Returns the lanes where both values are known. */
INLINE I FN(both)(V q, V k) { return (q == q) & (k == k); }

#define SIMILARITY(i)                                                                                      \
    FN(enter)(mode, FN(compare)(base, at->width, negated ? -query[i] : query[i], keys[i]),                 \
              mode == UNKNOWN_LAST ? FN(both)(query[i], keys[i]) : ~(I){0}, tag + (INT)(i), masks, values + i, &sum)

/* Fill the columns of one query with similarities of single dimensions. With UNKNOWN_LAST, q*k enters as its negative,
 * so that the order of all bases is descending in similarity. Full runs of 32 rows are sorted while they are in
 * registers, which is the first step of the network. Returns the step to continue with. */
INLINE const step_t *FN(fill_by)(int32_t base, int mode, const FN(buffers) *at, INT mask, int64_t vectors)
{
    const int64_t d = at->d, pitch = at->pitch, rank_pitch = at->blocks + 1, height = at->height;
    const int64_t step = at->query_pitch;
    const int64_t whole = SMALL || mode == NAN_ASIDE || mode == BOUNDED ? 0 : d / 32; /* rare, and the code is long */
    const int aside = mode == NAN_ASIDE || mode == UNKNOWN_LAST, negated = mode == UNKNOWN_LAST && base == DOT;
    const I masks = (I){0} + mask;
    for (int64_t run = 0; run < whole; run++) {
        const I tag = (I){0} + (INT)(32 * run);
        const V *query = at->query + 32 * run, *keys = at->keys + 32 * run;
        V *x = at->x + 32 * run, *values = at->values + 32 * run, *sums = at->sums;
        for (int64_t v = 0; v < vectors; v++, query += step, keys += pitch, x += height, values += rank_pitch, sums++) {
            V r[32], sum = {0};
            UNROLL for (int i = 0; i < 16; i++) r[i] = SIMILARITY(i);
            APPLY(S16, ROWS16)
            UNROLL for (int i = 16; i < 32; i++) r[i] = SIMILARITY(i);
            APPLY(S16, NEXT16)
            MERGE_32
            UNROLL for (int i = 0; i < 32; i++) x[i] = r[i];
            if (aside)
                *sums += sum;
        }
    }
    for (int64_t i = 32 * whole; i < d; i++) {
        const I tag = (I){0} + (INT)i;
        const V *query = at->query + i, *keys = at->keys + i;
        V *x = at->x + i, *values = at->values + i, *sums = at->sums;
        for (int64_t v = 0; v < vectors; v++, query += step, keys += pitch, x += height, values += rank_pitch, sums++) {
            V sum = {0};
            *x = SIMILARITY(0);
            if (aside)
                *sums += sum;
        }
    }
    return at->network + (whole > 0);
}

#define FILL(base, mode) case 8 * base + mode: return FN(fill_by)(base, mode, at, mask, vectors);
#define FILLS(base) FILL(base, PLAIN) FILL(base, NAN_ASIDE) FILL(base, TAGGED) FILL(base, BOUNDED)

static const step_t *FN(fill)(int32_t base, int mode, const FN(buffers) *at, INT mask, int64_t vectors)
{
    switch (8 * base + mode) { FILLS(DIS) FILLS(DOT) FILLS(L1) FILL(DOT, UNKNOWN_LAST) FILL(L1, UNKNOWN_LAST) }
    return at->network;
}

/* Sum the similarities of dimensions `start` to `end` in registers, for `queries` rows by `columns` columns. */
INLINE void FN(sum_run)(int32_t base, FN(width) near, const V *query, const V *keys, int64_t pitch, int64_t start,
                        int64_t end, int64_t queries, int64_t columns, V *sum)
{
    UNROLL for (int r = 0; r < queries; r++)
        UNROLL for (int j = 0; j < columns; j++)
            sum[r * ABREAST + j] = FN(compare)(base, near, query[r * pitch + start], keys[j * pitch + start]);
    for (int64_t i = start + 1; base == NEAR && i < end; i++)
        UNROLL for (int r = 0; r < queries; r++)
            FN(add_near)(near, query[r * pitch + i], keys + i, pitch, columns, sum + r * ABREAST);
    for (int64_t i = start + 1; base != NEAR && i < end; i++)
        UNROLL for (int j = 0; j < columns; j++) {
            const V k = keys[j * pitch + i];
            UNROLL for (int r = 0; r < queries; r++)
                sum[r * ABREAST + j] += FN(compare)(base, near, query[r * pitch + i], k);
        }
}

/* The same for `width` dimensions, in runs. */
INLINE void FN(sum_block)(int32_t base, FN(width) near, const V *query, const V *keys, int64_t pitch, int64_t width,
                          int64_t queries, int64_t columns, V *sum)
{
    FN(sum_run)(base, near, query, keys, pitch, 0, least(RUN, width), queries, columns, sum);
    for (int64_t i = RUN; i < width; i += RUN) {
        V run[QUERIES * ABREAST];
        FN(sum_run)(base, near, query, keys, pitch, i, least(i + RUN, width), queries, columns, run);
        UNROLL for (int r = 0; r < queries; r++)
            UNROLL for (int j = 0; j < columns; j++) sum[r * ABREAST + j] += run[r * ABREAST + j];
    }
}

#define ENTER(mode)                                                             \
    UNROLL for (int r = 0; r < queries; r++)                                    \
        UNROLL for (int j = 0; j < columns; j++) {                              \
            V *exact = values + (r * vectors + j) * rank_pitch + block;         \
            x[(r * vectors + j) * height + block] = FN(enter)(mode, sum[r * ABREAST + j], ~(I){0}, tag, masks, \
                                                              exact, sums + r * vectors + j); \
        }                                                                       \
    break;

/* Compute the similarities of blocks `block` to `end` for `queries` rows by `columns` columns. */
INLINE void FN(sum_tile)(int32_t base, int mode, const FN(buffers) *at, INT mask, int64_t vectors, int64_t block,
                         int64_t end, int64_t row, int64_t queries, int64_t v, int64_t columns)
{
    const int64_t pitch = at->pitch, rank_pitch = at->blocks + 1, height = at->height, width = at->d / at->blocks;
    const int64_t start = block * width, c = row * vectors + v;
    const V *query = at->query + row * pitch + v * at->query_pitch + start, *keys = at->keys + v * pitch + start;
    const I masks = (I){0} + mask;
    V *x = at->x + c * height, *values = at->values + c * rank_pitch, *sums = at->sums + c;
    for (; block < end; block++, query += width, keys += width) {
        const I tag = (I){0} + (INT)block;
        V sum[QUERIES * ABREAST];
        FN(sum_block)(base, at->width, query, keys, pitch, width, queries, columns, sum);
        switch (SMALL ? BOUNDED : mode) {
        case PLAIN: ENTER(PLAIN)
        case TAGGED: ENTER(TAGGED)
        default: ENTER(mode)
        }
    }
}

/* Fill the columns of all rows with similarities of blocks. Tiles take about RUN dimensions at once, so that queries
 * stay in the first cache. */
static void FN(fill_blocks)(int32_t base, int mode, const FN(buffers) *at, INT mask, int64_t rows, int64_t vectors)
{
    const int64_t step = most(1, RUN * at->blocks / at->d);
    for (int64_t block = 0; block < at->blocks; block += step) {
        const int64_t end = least(block + step, at->blocks);
        switch (base) {
        case DIS: TILES(FN(sum_tile), DIS, mode, at, mask, vectors, block, end) break;
        case DOT: TILES(FN(sum_tile), DOT, mode, at, mask, vectors, block, end) break;
        case L1: TILES(FN(sum_tile), L1, mode, at, mask, vectors, block, end) break;
        case NEAR: TILES(FN(sum_tile), NEAR, mode, at, mask, vectors, block, end) break;
        }
    }
}

/* Returns the buffers of one row: its columns are sorted before the next row is filled. */
static FN(buffers) FN(only_row)(const FN(buffers) *at, int64_t row, int64_t vectors)
{
    FN(buffers) one = *at;
    one.query += row * at->pitch;
    one.sums += row * vectors;
    one.grad += at->grad ? row * vectors : 0;
    one.query_grad += at->query_grad ? row * at->pitch : 0;
    return one;
}

/* Returns the buffers from a column on. */
static FN(buffers) FN(from_column)(const FN(buffers) *at, int64_t column)
{
    FN(buffers) rest = *at;
    rest.x += column * at->height;
    rest.values += column * (at->blocks + 1);
    rest.sums += column;
    rest.grad += at->grad ? column : 0;
    return rest;
}

static const step_t NOTHING[] = {{END, 0, 0, 0, 0, 0}}; /* sorts a single row */

/* Returns the buffers for a single block of all dimensions. Its columns must not overwrite the infinities of x. */
static FN(buffers) FN(one_block)(const FN(buffers) *at)
{
    FN(buffers) whole = *at;
    whole.blocks = whole.height = 1;
    whole.x = at->values;
    whole.network = NOTHING;
    return whole;
}

/* Choose the vectors per panel: as many as fit in `bytes`, enough to amortize the control flow of the network, and
 * about equal for all panels. */
static void FN(split_keys)(plan_t *plan, int64_t bytes)
{
    const call_t *call = plan->call;
    const int64_t all = ceil_div(call->count, LANES);
    const int64_t rows = (call->d + column_height(call->d)) / 2; /* average of keys and sorted columns */
    const int64_t room = (call->blocks < call->d ? BLOCK_BYTES : bytes) / (rows * BYTES);
    const int64_t fit = least(call->blocks < call->d ? MAX_WIDE : MAX_VECTORS, most(ABREAST, room));
    plan->vectors = least(all, ceil_div(ceil_div(all, ceil_div(all, fit)), ABREAST) * ABREAST);
    plan->panels = ceil_div(all, plan->vectors);
}

/* Returns the number of tasks that keeps many threads busy and makes no task too large. */
static int64_t FN(enough_tasks)(const plan_t *plan)
{
    const call_t *call = plan->call;
    const int64_t keys = plan->panels * plan->vectors * LANES;
    return most(MIN_TASKS, call->n * call->heads * call->length * keys * call->d * call->n_bases / TASK_WORK);
}

/* Returns whether a network sorts up to FEW rows in one step, in registers. */
INLINE int FN(is_few)(const step_t *network)
{
    return network->code != END && network->code <= SORT8 && network[1].code == END;
}

/* Returns whether products save time, see FN(shift): a few wide blocks, DIS, and enough queries for the shifted keys. */
static int FN(uses_products)(const call_t *call)
{
    const int wide = call->d >= 4 * call->blocks && call->d <= 512 && call->blocks > 2;
    int dis = 0;
    for (int64_t b = 0; b < call->n_bases; b++)
        dis |= call->bases[b] == DIS;
    /* with a length that pairs do not have */
    return !SMALL && dis && wide && FN(is_few)(call->network) && call->length >= 2 * QUERIES;
}

/* Place the buffers of a thread in its scratch area. Returns the size of the area. */
static int64_t FN(layout)(const plan_t *plan, char *scratch, int backward, FN(buffers) *buffers)
{
    const call_t *call = plan->call;
    const int64_t d = call->d, blocks = call->blocks, vectors = plan->vectors, weights = call->n_bases * blocks;
    const int64_t rows = call->paired ? 1 : QUERIES, columns = blocks < d ? rows * vectors : vectors;
    const int64_t pitch = d + SPREAD, panel = pitch * vectors * BYTES;
    const int64_t queries = call->paired ? panel : rows * pitch * BYTES;
    arena_t arena = {scratch, 0};
    *buffers = (FN(buffers)){.d = d, .pitch = pitch, .blocks = blocks, .network = call->network};
    buffers->keys = take(&arena, panel);
    buffers->height = column_height(blocks);
    buffers->x = take(&arena, buffers->height * columns * BYTES);
    for (int64_t c = 0; scratch && c < columns; c++)
        for (int64_t i = blocks; i <= buffers->height - SPREAD; i++)
            buffers->x[c * buffers->height + i] = (V){0} + (T)__builtin_inf();
    buffers->query_pitch = call->paired ? pitch : 0;
    buffers->query = take(&arena, queries);
    buffers->numbers = take(&arena, d * (int64_t)sizeof(T));
    buffers->weights = take(&arena, weights * (int64_t)sizeof(T));
    buffers->widths = take(&arena, call->n_bases * (int64_t)sizeof(FN(width)));
    buffers->ranks = take(&arena, call->n_bases * (int64_t)sizeof(int64_t));
    buffers->sums = take(&arena, rows * vectors * BYTES);
    buffers->values = take(&arena, most((blocks + 1) * columns, 2 * rows * vectors) * BYTES);
    if (call->missing) {
        buffers->known = take(&arena, vectors * BYTES);
        buffers->most_used = (int32_t)least(blocks + 1, 2 * vectors * LANES); /* enough for the pairs of one query */
        buffers->stretched = take(&arena, buffers->most_used * weights * (int64_t)sizeof(T));
        buffers->places = take(&arena, (blocks + 1) * (int64_t)sizeof(int32_t));
        buffers->used = take(&arena, sizeof(int32_t));
        buffers->integrals = take(&arena, call->n_bases * (blocks + 1) * (int64_t)sizeof(double));
    }
    if (backward) {
        buffers->grad = take(&arena, rows * vectors * BYTES);
        buffers->ordered = take(&arena, (blocks + 1) * ABREAST * BYTES);
        buffers->key_grad = take(&arena, panel);
        buffers->query_grad = take(&arena, queries);
        buffers->weight_grad = take(&arena, weights * BYTES);
    }
    if (FN(uses_products)(call)) {
        buffers->origin = take(&arena, d * BYTES);
        buffers->shifted = take(&arena, panel);
        buffers->query_terms = take(&arena, 2 * FEW * rows * BYTES);
        buffers->key_terms = take(&arena, 2 * FEW * vectors * BYTES);
        buffers->row_sums = take(&arena, 2 * FEW * rows * BYTES);
        buffers->column_sums = take(&arena, 2 * FEW * vectors * BYTES);
    }
    if (call->softmax && backward)
        buffers->dots = take(&arena, plan->rows * (int64_t)sizeof(T));
    else if (call->softmax)
        buffers->row = take(&arena, ceil_div(call->count, LANES) * BYTES);
    return arena.used;
}

/* Compute similarities of a few columns from |q-k|, in place. Other bases have been sorted as they are. */
INLINE void FN(from_distance)(int32_t base, FN(width) width, int64_t columns, V *x)
{
    if (base == NEAR)
        FN(near)(x, columns, width);
    if (base == DIS)
        UNROLL for (int j = 0; j < columns; j++) x[j] *= x[j];
}

/* Add weights times rows to the sums. With `neighbors`, run the comparators that the sort skipped. */
INLINE void FN(weigh)(int32_t base, const FN(buffers) *at, const T *weights, int neighbors, int64_t first,
                      int64_t columns)
{
    const int64_t blocks = at->blocks, height = at->height;
    V *x = at->x + first * height, *sums = at->sums + first, rows[ABREAST];
    for (int64_t i = 0; i < blocks;) {
        const int64_t end = least(i + RUN, blocks);
        V sum[ABREAST] = {{0}};
        for (; i < end; i++) {
            UNROLL for (int j = 0; j < columns; j++) rows[j] = x[j * height + i];
            if (neighbors && i % 2 && i + 1 < blocks) {
                UNROLL for (int j = 0; j < columns; j++) {
                    V next = x[j * height + i + 1];
                    CE(rows[j], next)
                    sum[j] += weights[i] * rows[j];
                    rows[j] = next;
                }
                i++;
            }
            FN(from_distance)(base, at->width, columns, rows);
            V own[ABREAST];
            UNROLL for (int j = 0; j < columns; j++) own[j] = weights[i] * rows[j];
            for (int octave = 1; base == NEAR && octave <= at->width.octaves; octave++) {
                const int64_t from = at->width.source[octave];
                const T weight = from < 0 ? 0 : at->weights[from * blocks + i];
                UNROLL for (int j = 0; j < columns; j++) {
                    rows[j] = MAX((V){0} + SMALL_T, rows[j]);
                    rows[j] *= rows[j];
                    own[j] += weight * rows[j];
                }
            }
            UNROLL for (int j = 0; j < columns; j++) sum[j] += own[j];
        }
        UNROLL for (int j = 0; j < columns; j++) sums[j] += sum[j];
    }
}

/* Sort a few rows and weigh them while they are in registers. */
#define SORT_AND_WEIGH(size, ...)                                               \
    {                                                                           \
        V w[size], *x = at->x, *sums = at->sums;                                \
        UNROLL for (int i = 0; i < (size); i++) w[i] = (V){0} + weights[i];     \
        for (int64_t v = 0; v < vectors; v++, x += height) {                    \
            V r[size], sum = sums[v];                                           \
            UNROLL for (int i = 0; i < (size); i++) r[i] = x[i];                \
            __VA_ARGS__                                                         \
            UNROLL for (int i = 0; i < (size); i++) sum += w[i] * r[i];         \
            sums[v] = sum;                                                      \
        }                                                                       \
        break;                                                                  \
    }

static void FN(sort_and_weigh)(const step_t *network, const FN(buffers) *at, const T *weights, int64_t vectors)
{
    const int64_t height = at->height;
    switch (network->code != END && network[1].code == END ? at->blocks : 0) {
    case 2: SORT_AND_WEIGH(2, APPLY(S2, ROWS2))
    case 4: SORT_AND_WEIGH(4, APPLY(S4, ROWS4))
    case 8: SORT_AND_WEIGH(8, APPLY(S8, ROWS8))
    case 16: SORT_AND_WEIGH(16, APPLY(S16, ROWS16))
    default:
        if (FN(sort)(network, at->x, at->blocks, height, vectors, 1))
            ACROSS(FN(weigh), L1, at, weights, 1)
        else
            ACROSS(FN(weigh), L1, at, weights, 0)
    }
}

/* DIS and DOT of a few wide blocks come from one product of each block. With an origin o near the keys, q' = q - o and
 * k' = k - o,
 *     |q - k|^2 = q'.q' + k'.k' - 2 q'.k',    q.k = o.q' + o.k + q'.k'.
 * Far from zero, products of q and k themselves would lose digits. The origin is the mean of LANES keys of a head, so it
 * does not depend on the panel. */
static void FN(choose_origin)(const call_t *call, int64_t n, int64_t h, const FN(buffers) *at)
{
    const int64_t *stride = call->key_stride;
    int64_t offset[LANES];
    for (int lane = 0; lane < LANES; lane++)
        offset[lane] = n * stride[0] + h * stride[1] + lane * call->count / LANES * stride[2];
    FN(load_lanes)(call->key, call->dtype, offset, stride[3], at->d, at->shifted);
    const int special = FN(special)((const T *)at->shifted, at->d * LANES);
    for (int64_t i = 0; i < at->d; i++) {
        T mean = 0;
        UNROLL for (int lane = 0; lane < LANES; lane++) mean += at->shifted[i][lane] / LANES;
        at->origin[i] = (V){0} + (special ? 0 : mean);
    }
}

/* Subtract the origin from `columns` queries or keys from v on, and compute the terms of each block. Blocks from `blocks`
 * to FEW get a key term that is sorted last. */
INLINE void FN(shift)(const FN(buffers) *at, const V *from, V *to, int are_keys, V *terms, int64_t v, int64_t columns)
{
    const int64_t pitch = at->pitch, width = at->d / at->blocks;
    from += v * pitch, to += v * pitch, terms += 2 * v * FEW;
    for (int64_t block = 0, i = 0; block < FEW; block++) {
        V dis[ABREAST] = {{0}}, dot[ABREAST] = {{0}};
        for (int64_t end = i + width; block < at->blocks && i < end; i++)
            UNROLL for (int j = 0; j < columns; j++) {
                const V x = from[j * pitch + i], shifted = x - at->origin[i];
                to[j * pitch + i] = shifted;
                dis[j] += shifted * shifted;
                dot[j] += at->origin[i] * (are_keys ? x : shifted);
            }
        const T last = block >= at->blocks && are_keys ? HUGE_T : 0;
        UNROLL for (int j = 0; j < columns; j++) terms[2 * j * FEW + block] = dis[j] + last;
        UNROLL for (int j = 0; j < columns; j++) terms[(2 * j + 1) * FEW + block] = dot[j] + last;
    }
}

static void FN(shift_keys)(const call_t *call, int64_t n, int64_t h, const FN(buffers) *at, int64_t vectors)
{
    FN(choose_origin)(call, n, h, at);
    ACROSS(FN(shift), at, at->keys, at->shifted, 1, at->key_terms)
}

/* Shift `rows` queries. The others of a tile become zero. */
static void FN(shift_queries)(const FN(buffers) *at, int64_t rows)
{
    for (int64_t row = rows; row < QUERIES; row++)
        memset(at->query + row * at->pitch, 0, (size_t)(at->d * BYTES));
    const int64_t vectors = QUERIES;
    ACROSS(FN(shift), at, at->query, at->query, 0, at->query_terms)
}

/* Multiply shifted queries and keys block by block, for all rows by `columns` columns. */
INLINE void FN(multiply)(int size, const FN(buffers) *at, int64_t v, int64_t columns, V *products)
{
    const int64_t pitch = at->pitch, width = at->d / at->blocks;
    const V *keys = at->shifted + v * pitch;
    for (int64_t block = 0; block < size; block++, products += QUERIES * ABREAST)
        if (block < at->blocks)
            FN(sum_block)(DOT, at->width, at->query + block * width, keys + block * width, pitch, width, QUERIES,
                          columns, products);
        else
            memset(products, 0, (size_t)(QUERIES * ABREAST * BYTES));
}

/* Returns in x the values of a pair's blocks, in the order of a network. */
INLINE void FN(from_products)(int base, int size, const FN(buffers) *at, const V *products, int64_t row, int64_t v, V *x)
{
    const V *query = at->query_terms + (2 * row + base) * FEW, *key = at->key_terms + (2 * v + base) * FEW;
    UNROLL for (int i = 0; i < size; i++) {
        const V product = products[i * QUERIES * ABREAST];
        x[i] = query[i] + key[i] + product * (T)(base == DIS ? -2 : 1);
    }
}

/* Load the weights of a base, with zeros for padded blocks. */
INLINE void FN(load_few)(int size, const FN(buffers) *at, int64_t place, V *weights)
{
    UNROLL for (int i = 0; i < size; i++)
        weights[i] = (V){0} + (i < at->blocks ? at->weights[place * at->blocks + i] : 0);
}

#define SORT_FEW if (size == 4) { APPLY(S4, ROWS4) } else { APPLY(S8, ROWS8) }

/* Add to the sums of all rows by `columns` columns. `bases` has a bit for DIS and one for DOT. */
INLINE void FN(score_tile)(int bases, int size, const FN(buffers) *at, const int64_t *places, int64_t vectors, int64_t v,
                           int64_t columns)
{
    V products[FEW * QUERIES * ABREAST];
    FN(multiply)(size, at, v, columns, products);
    UNROLL for (int base = DIS; base <= DOT; base++) {
        V weights[FEW];
        if (!(bases & 1 << base))
            continue;
        FN(load_few)(size, at, places[base], weights);
        for (int64_t row = 0; row < QUERIES; row++)
            for (int j = 0; j < columns; j++) {
                V r[FEW], *sum = at->sums + row * vectors + v + j;
                FN(from_products)(base, size, at, products + row * ABREAST + j, row, v + j, r);
                SORT_FEW
                UNROLL for (int i = 0; i < size; i++) *sum += weights[i] * r[i];
            }
    }
}

/* Returns a bit for each of DIS and DOT that products compute, and their places among the bases: those with different
 * weights, or with `all` both. */
INLINE int FN(find_products)(const call_t *call, const FN(buffers) *at, int all, int64_t *places)
{
    int found = 0;
    for (int64_t b = 0; b < call->n_bases; b++)
        if (call->bases[b] <= DOT && (all || at->ranks[b] == at->blocks)) {
            found |= 1 << call->bases[b];
            places[call->bases[b]] = b;
        }
    return !SMALL && at->shifted && found & 1 << DIS ? found : 0;
}

/* Call a function for all columns of a panel, with a constant for the number of rows to sort. */
#define PRODUCTS(function)                                                      \
    if (at->blocks > 4)                                                         \
        ACROSS(function, bases, 8, at, places, vectors)                         \
    else                                                                        \
        ACROSS(function, bases, 4, at, places, vectors)

static void FN(score_products)(int bases, const FN(buffers) *at, const int64_t *places, int64_t rows, int64_t vectors)
{
    FN(shift_queries)(at, rows);
    PRODUCTS(FN(score_tile))
}

/* Compute the weights of lanes that know m blocks: the integral of the weights over m intervals of equal length. */
static void FN(stretch)(const call_t *call, const FN(buffers) *at, int64_t m)
{
    const int64_t blocks = at->blocks;
    for (int64_t b = 0; b < call->n_bases; b++) {
        const double *integrals = at->integrals + b * (blocks + 1);
        T *to = at->stretched + (*at->used * call->n_bases + b) * blocks;
        double last = 0;
        for (int64_t i = 0; i < m; i++) {
            const double place = (double)((i + 1) * blocks) / (double)m;
            const int64_t rank = least((int64_t)place, blocks - 1);
            const double next = integrals[rank] + (place - (double)rank) * (integrals[rank + 1] - integrals[rank]);
            to[i] = (T)(next - last);
            last = next;
        }
        memset(to + m, 0, (size_t)(blocks - m) * sizeof(T));
    }
    at->places[m] = ++*at->used;
}

static void FN(forget_stretched)(const FN(buffers) *at)
{
    memset(at->places, 0, (size_t)(at->blocks + 1) * sizeof *at->places);
    *at->used = 0;
}

/* Add up the weights of each base in descending order of similarity. */
static void FN(integrate)(const call_t *call, const FN(buffers) *at)
{
    const int64_t blocks = at->blocks;
    for (int64_t b = 0; b < call->n_bases; b++) {
        const T *weights = at->weights + b * blocks;
        double *integrals = at->integrals + b * (blocks + 1);
        integrals[0] = 0;
        for (int64_t i = 0; i < blocks; i++)
            integrals[i + 1] = integrals[i] + (call->bases[b] == DOT ? -weights[blocks - 1 - i] : weights[i]);
    }
    FN(forget_stretched)(at);
}

/* Count the known dimensions of each lane for one query, and compute the weights for these numbers unless they are
 * there. */
static void FN(count_known)(const call_t *call, const FN(buffers) *at, int64_t vectors)
{
    if (at->most_used <= at->blocks && *at->used + vectors * LANES > at->most_used)
        FN(forget_stretched)(at);
    for (int64_t v = 0; v < vectors; v++) {
        const V *query = at->query + v * at->query_pitch, *keys = at->keys + v * at->pitch;
        I known = {0};
        for (int64_t i = 0; i < at->d; i++)
            known -= FN(both)(query[i], keys[i]);
        at->known[v] = known;
        for (int lane = 0; at->blocks == at->d && lane < LANES; lane++) /* a single block has one weight */
            if (!at->places[known[lane]])
                FN(stretch)(call, at, known[lane]);
    }
}

/* Add the first m rows of each lane, times their weights, to the sums of a column. */
INLINE void FN(weigh_known)(int32_t base, const FN(buffers) *at, const T *stretched, int64_t pitch, int64_t v)
{
    const I known = at->known[v];
    const V *x = at->x + v * at->height;
    const T *weights[LANES];
    int64_t largest = 0, equal = 1;
    UNROLL for (int lane = 0; lane < LANES; lane++) {
        weights[lane] = stretched + (at->places[known[lane]] - 1) * pitch;
        largest = most(largest, known[lane]);
        equal &= known[lane] == known[0];
    }
    for (int64_t i = 0; i < largest;) {
        const int64_t end = least(i + RUN, largest);
        V sum = {0};
        for (; equal && i < end; i++) {
            V value = x[i];
            FN(from_distance)(base, at->width, 1, &value);
            sum += weights[0][i] * value;
        }
        for (; i < end; i++) {
            V value = x[i], weight = {0};
            FN(from_distance)(base, at->width, 1, &value);
            UNROLL for (int lane = 0; lane < LANES; lane++) weight[lane] = weights[lane][i];
            sum += weight * (V)((I)value & (known > (I){0} + (INT)i));
        }
        at->sums[v] += sum;
    }
}

/* Add a base with equal weights, for which the order of dimensions does not matter: the sum of those that are known. */
INLINE void FN(sum_known)(int32_t base, const FN(buffers) *at, T weight, int64_t v)
{
    const V *query = at->query + v * at->query_pitch, *keys = at->keys + v * at->pitch;
    V total = {0}, many = {0};
    for (int64_t i = 0; i < at->d;) {
        const int64_t end = least(i + RUN, at->d);
        V sum = {0};
        for (; i < end; i++) {
            const V value = FN(compare)(base, at->width, query[i], keys[i]);
            sum += (V)((I)value & FN(both)(query[i], keys[i]));
        }
        total += sum;
    }
    UNROLL for (int lane = 0; lane < LANES; lane++) many[lane] = (T)most(1, at->known[v][lane]);
    at->sums[v] += weight * (T)at->d / many * total;
}

#define SUM_KNOWN(base) case base: FN(sum_known)(base, &one, at->weights[b * at->blocks], v); break;

/* Returns whether the weights of a base are equal, or zero, for all dimensions, or there is a single block. */
INLINE int FN(is_flat)(const FN(buffers) *at, int64_t b) { return at->ranks[b] < at->blocks || at->blocks < at->d; }

/* Add all bases with equal weights, and minus infinity where no dimension is known. */
static void FN(forward_flat)(const call_t *call, const FN(buffers) *at, int64_t rows, int64_t vectors)
{
    for (int64_t row = 0; row < rows; row++) {
        FN(buffers) one = FN(only_row)(at, row, vectors);
        FN(count_known)(call, &one, vectors);
        for (int64_t b = 0; b < call->n_bases; b++) {
            one.width = at->widths[b];
            for (int64_t v = 0; FN(is_flat)(at, b) && !one.width.merged && v < vectors; v++)
                switch (call->bases[b]) { SUM_KNOWN(DIS) SUM_KNOWN(DOT) SUM_KNOWN(L1) SUM_KNOWN(NEAR) }
        }
        for (int64_t v = 0; v < vectors; v++)
            one.sums[v] -= (V)((I)((V){0} + (T)__builtin_inf()) & (at->known[v] == 0));
    }
}

#define WEIGH(base)                                                             \
    if (mode == UNKNOWN_LAST)                                                   \
        for (int64_t v = 0; v < vectors; v++)                                   \
            FN(weigh_known)(base, at, at->stretched + b * at->d, call->n_bases * at->d, v); \
    else                                                                        \
        ACROSS(FN(weigh), base, at, at->weights + b * at->d, 0)                 \
    break;

static void FN(weigh_shared)(const call_t *call, const FN(buffers) *at, int mode, int64_t b, int64_t vectors)
{
    switch (call->bases[b]) {
    case DIS: WEIGH(DIS)
    case NEAR: WEIGH(NEAR)
    default: WEIGH(L1)
    }
}

/* Sort |q-k| of single dimensions, or q*k if `dot`, once for all bases that need it. */
static void FN(forward_shared)(const call_t *call, const FN(buffers) *at, int dot, int mode, int64_t rows,
                               int64_t vectors)
{
    for (int64_t row = 0; row < rows; row++) {
        FN(buffers) one = FN(only_row)(at, row, vectors);
        if (mode == UNKNOWN_LAST)
            FN(count_known)(call, &one, vectors);
        const step_t *network = FN(fill)(dot ? DOT : L1, mode, &one, 0, vectors);
        FN(sort)(network, one.x, at->d, at->height, vectors, 0);
        for (int64_t b = 0; b < call->n_bases; b++)
            if ((call->bases[b] == DOT) == dot && (mode == NAN_ASIDE || !FN(is_flat)(at, b)) &&
                (mode != PLAIN || !at->widths[b].merged)) {
                one.width = at->widths[b];
                one.width.octaves *= mode == PLAIN; /* others pass each base alone */
                FN(weigh_shared)(call, &one, mode, b, vectors);
            }
    }
}

/* Compute the scores of a few queries for one panel of keys. Special numbers always pass the network: zero weights must
 * turn infinity and NaN into NaN. */
static void FN(forward_rows)(const call_t *call, const FN(buffers) *at, int64_t rows, int64_t vectors, int special)
{
    const int mode = !special ? PLAIN : call->missing ? UNKNOWN_LAST : NAN_ASIDE;
    int64_t sorted[2] = {0}, near = 0; /* bases that need sorted |q-k| and q*k of single dimensions */
    int64_t places[2];
    const int products = special ? 0 : FN(find_products)(call, at, 0, places);
    memset(at->sums, 0, (size_t)(rows * vectors * BYTES));
    for (int64_t b = 0; b < call->n_bases; b++)
        if (at->blocks == at->d && (mode == NAN_ASIDE || !FN(is_flat)(at, b))) {
            sorted[call->bases[b] == DOT]++;
            near |= call->bases[b] == NEAR;
        }
    const int share = near || sorted[0] > 1;
    if (mode == UNKNOWN_LAST)
        FN(forward_flat)(call, at, rows, vectors);
    for (int64_t b = 0; b < call->n_bases; b++) {
        const int64_t ranks = special ? at->blocks : at->ranks[b];
        const T *weights = at->weights + b * at->blocks;
        const int in_products = ranks > 1 && products >> call->bases[b] & 1;
        const int is_shared = ranks == at->d && share && call->bases[b] != DOT;
        if (!ranks || mode == UNKNOWN_LAST || (mode == PLAIN && at->widths[b].merged) || is_shared || in_products)
            continue;
        if (ranks == at->d) {
            for (int64_t row = 0; row < rows; row++) {
                const FN(buffers) one = FN(only_row)(at, row, vectors);
                FN(sort_and_weigh)(FN(fill)(call->bases[b], mode, &one, 0, vectors), &one, weights, vectors);
            }
            continue;
        }
        FN(buffers) all = ranks == 1 ? FN(one_block)(at) : *at;
        all.width = at->widths[b];
        all.width.octaves *= !special; /* special numbers pass each base alone */
        FN(fill_blocks)(call->bases[b], mode, &all, 0, rows, vectors);
        for (int64_t c = 0; c < rows * vectors; c += MAX_VECTORS) {
            const FN(buffers) some = FN(from_column)(&all, c);
            FN(sort_and_weigh)(all.network, &some, weights, least(MAX_VECTORS, rows * vectors - c));
        }
    }
    if (products)
        FN(score_products)(products, at, places, rows, vectors);
    for (int dot = 0; dot < 2; dot++)
        if (sorted[dot] && (mode == UNKNOWN_LAST || (share && !dot)))
            FN(forward_shared)(call, at, dot, mode, rows, vectors);
}

/* Returns the sum of all lanes of row i. */
INLINE T FN(total)(const V *rows, int64_t i)
{
    const T *lanes = (const T *)rows + i * LANES; /* in memory, so that a compiler can vectorize over rows */
    T sum = 0;
    UNROLL for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

/* Replace scores by exp(score - largest) and add these up. */
INLINE void FN(powers)(V *row, T largest, V *sum, int64_t v, int64_t columns)
{
    const FN(width) unit = {.scale = (T)-1.44269504088896340736, .limit = (T)(BIAS / 1.44269504088896340736)};
    V x[ABREAST];
    UNROLL for (int j = 0; j < columns; j++) x[j] = largest - row[v + j];
    FN(near)(x, columns, unit);
    UNROLL for (int j = 0; j < columns; j++) row[v + j] = x[j];
    UNROLL for (int j = 0; j < columns; j++) *sum += x[j];
}

/* Replace the scores of a query by their softmax. */
static void FN(softmax)(T *scores, int64_t count, V *row)
{
    const int64_t vectors = ceil_div(count, LANES);
    V lanes, sum = {0};
    row[vectors - 1] = (V){0} - (T)__builtin_inf();
    memcpy(row, scores, (size_t)count * sizeof(T));
    lanes = row[0];
    for (int64_t v = 1; v < vectors; v++)
        lanes = MAX(lanes, row[v]);
    T largest = lanes[0];
    for (int lane = 1; lane < LANES; lane++)
        largest = lanes[lane] > largest ? lanes[lane] : largest;
    ACROSS(FN(powers), row, largest, &sum)
    const T scale = 1 / FN(total)(&sum, 0);
    for (int64_t v = 0; v < vectors; v++)
        row[v] *= scale;
    memcpy(scores, row, (size_t)count * sizeof(T));
}

static void FN(forward_task)(const plan_t *plan, int64_t task, char *scratch)
{
    const call_t *call = plan->call;
    const int64_t chunks = plan->chunks, tiles = plan->tiles, *stride = call->score_stride;
    const int64_t chunk = task % chunks, tile = task / chunks % tiles;
    const int64_t group = task / chunks / tiles % plan->groups, h = task / chunks / tiles / plan->groups;
    const int64_t start = chunk * QUERY_CHUNK, end = least(start + QUERY_CHUNK, call->length);
    FN(buffers) at;
    FN(layout)(plan, scratch, 0, &at);
    FN(load_weights)(call, h, 1, &at);
    if (call->missing)
        FN(integrate)(call, &at);
    for (int64_t n = group * call->n / plan->groups; n < (group + 1) * call->n / plan->groups; n++) {
        T *scores = (T *)call->scores + n * stride[0] + h * stride[1];
        for (int64_t panel = tile * plan->panels / tiles; panel < (tile + 1) * plan->panels / tiles; panel++) {
            const int64_t first = panel * plan->vectors * LANES;
            const int64_t width = least(plan->vectors * LANES, call->count - first), vectors = ceil_div(width, LANES);
            const int special_keys = FN(load_keys)(call, n, h, first, vectors, &at);
            if (!SMALL && at.shifted)
                FN(shift_keys)(call, n, h, &at, vectors);
            for (int64_t l = start; l < end; l += QUERIES) {
                const int64_t rows = least(QUERIES, end - l);
                const int special = FN(load_queries)(call, n, h, l, rows, first, vectors, &at) | special_keys;
                FN(forward_rows)(call, &at, rows, vectors, special);
                for (int64_t row = 0; row < rows; row++) {
                    const T *sums = (const T *)(at.sums + row * vectors);
                    T *to = scores + (l + row) * stride[2] + first * stride[3];
                    if (stride[3] == 1)
                        memcpy(to, sums, (size_t)width * sizeof(T));
                    for (int64_t lane = 0; stride[3] != 1 && lane < width; lane++)
                        to[lane * stride[3]] = sums[lane];
                }
            }
        }
        for (int64_t l = start; call->softmax && l < end; l++)
            FN(softmax)(scores + l * stride[2], call->count, at.row);
    }
}

int FN(forward)(plan_t *plan)
{
    const call_t *call = plan->call;
    FN(split_keys)(plan, FORWARD_BYTES);
    plan->chunks = ceil_div(call->length, QUERY_CHUNK);
    plan->tiles = call->softmax ? 1 : plan->panels;
    const int64_t entry = call->heads * plan->tiles * plan->chunks; /* tasks of one batch entry */
    plan->groups = least(call->n, ceil_div(FN(enough_tasks)(plan), entry));
    plan->tasks = entry * plan->groups;
    FN(buffers) at;
    plan->scratch_bytes = FN(layout)(plan, NULL, 0, &at);
    return run(FN(forward_task), plan);
}

/* For rows `start` to `end` of a sorted column: move each weight to the block that its position came from, in place of
 * the value there, and write the values in sorted order. Tags replaced some low bits, so values that agree in all
 * other bits may be in the wrong order. Returns the lanes where that happened.
 *
 * Loads and stores limit the speed of this loop. It reads tags 64 bits at a time, computes an address in one
 * instruction, and loads a whole row before it stores, because a store would delay the loads behind it. */
INLINE I FN(untag)(const V *x, V *values, V *ordered, const T *weights, INT mask, int64_t start, int64_t end)
{
    enum { PER_WORD = 8 / sizeof(T), LOW = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? 0 : PER_WORD - 1 };
    const int shift = __builtin_ctz(BYTES);
    const uint64_t masks = (uint64_t)mask << shift, *words = (const uint64_t *)(x + start);
    char *lanes[LANES];
    UNROLL for (int lane = 0; lane < LANES; lane++) {
        lanes[lane] = (char *)((T *)values + lane);
        __asm__("" : "+r"(lanes[lane])); /* keep it in a register, or the compiler adds `lane` to every address */
    }
    V last = (V){0} - (T)__builtin_inf();
    if (start)
        last = ordered[start - 1];
    I misplaced = {0};
    for (int64_t i = start; i < end; i++) {
        const WORD weight = ((const WORD *)weights)[i];
        T *place[LANES], exact[LANES];
        UNROLL for (int lane = 0; lane < LANES; lane += PER_WORD) {
            const uint64_t word = *words++;
            place[lane + LOW] = (T *)(lanes[lane + LOW] + (word << shift & masks));
            if (PER_WORD == 2)
                place[lane + 1 - LOW] = (T *)(lanes[lane + 1 - LOW] + (word >> (32 - shift) & masks));
        }
        UNROLL for (int lane = 0; lane < LANES; lane++) exact[lane] = *place[lane];
        UNROLL for (int lane = 0; lane < LANES; lane++) *(WORD *)place[lane] = weight;
        V sorted = {exact[0]};
        UNROLL for (int lane = 1; lane < LANES; lane++) sorted[lane] = exact[lane];
        misplaced |= sorted < last;
        ordered[i] = last = sorted;
    }
    return misplaced;
}

/* Insertion sort of rows `start` to `end` of a lane by exact values; tags and weights move along. */
static void FN(reorder)(WORD *words, T *values, T *ordered, const T *weights, INT mask, int64_t start, int64_t end)
{
    for (int64_t i = start; i < end; i++) {
        const T exact = ordered[i * LANES];
        const INT moved = words[i * LANES];
        int64_t j = i;
        for (; j > 0 && ordered[(j - 1) * LANES] > exact; j--) {
            ordered[j * LANES] = ordered[(j - 1) * LANES];
            words[j * LANES] = words[(j - 1) * LANES];
            values[(words[j * LANES] & mask) * LANES] = weights[j];
        }
        if (j == i)
            continue;
        ordered[j * LANES] = exact;
        words[j * LANES] = moved;
        values[(moved & mask) * LANES] = weights[j];
    }
}

/* Move weights to blocks and sort the values of one column. */
static void FN(return_weights)(V *x, V *values, V *ordered, const T *weights, INT mask, int64_t blocks)
{
    const int64_t run = blocks <= 128 ? 64 : 16; /* with more tag bits, more values agree in the other bits */
    for (int64_t start = 0; start < blocks; start += run) {
        const int64_t end = least(start + run, blocks);
        const I misplaced = FN(untag)(x, values, ordered, weights, mask, start, end);
        for (int lane = 0; FN(any)(misplaced) && lane < LANES; lane++)
            if (misplaced[lane])
                FN(reorder)((WORD *)x + lane, (T *)values + lane, (T *)ordered + lane, weights, mask, start, end);
    }
}

INLINE void FN(add_sorted)(const V *sorted, const V *grads, V *weight_grad, int64_t blocks, int64_t columns)
{
    V grad[ABREAST];
    UNROLL for (int j = 0; j < columns; j++) grad[j] = grads[j];
    for (int64_t i = 0; i < blocks; i++) {
        V sum = weight_grad[i];
        UNROLL for (int j = 0; j < columns; j++) sum += grad[j] * sorted[j * (blocks + 1) + i];
        weight_grad[i] = sum;
    }
}

/* Move weights to blocks and add to the gradients of the weights, for a few columns. */
INLINE void FN(add_weights)(const FN(buffers) *at, const T *weights, V *weight_grad, INT mask, int64_t first,
                            int64_t columns)
{
    const int64_t blocks = at->blocks, pitch = blocks + 1;
    for (int64_t j = 0; j < columns; j++)
        FN(return_weights)(at->x + (first + j) * at->height, at->values + (first + j) * pitch, at->ordered + j * pitch,
                           weights, mask, blocks);
    FN(add_sorted)(at->ordered, at->grad + first, weight_grad, blocks, columns);
}

#undef NOTE
#define NOTE(a, b) swapped[count++] = (a) > (b);
#define UNDO(a, b)                                                              \
    {                                                                           \
        const I bits_ = ((I)(a) ^ (I)(b)) & swapped[--count];                   \
        a = (V)((I)(a) ^ bits_);                                                \
        b = (V)((I)(b) ^ bits_);                                                \
    }

/* Sort a few rows, and send the weights back through the network: the weight of each rank arrives at its block. */
#define RANK_FEW(size, sort, unsort)                                            \
    {                                                                           \
        V sums[size], ranked[size];                                             \
        UNROLL for (int i = 0; i < (size); i++) {                               \
            sums[i] = i < blocks ? weight_grad[i] : (V){0};                     \
            ranked[i] = (V){0} + (i < blocks ? weights[i] : 0);                 \
        }                                                                       \
        for (int64_t v = 0; v < vectors; v++, x += height, values += blocks + 1) { \
            V r[size];                                                          \
            I swapped[4 * (size)];                                              \
            int count = 0;                                                      \
            UNROLL for (int i = 0; i < (size); i++) r[i] = x[i];                \
            sort                                                                \
            UNROLL for (int i = 0; i < (size); i++) sums[i] += at->grad[v] * r[i]; \
            UNROLL for (int i = 0; i < (size); i++) r[i] = ranked[i];           \
            unsort                                                              \
            UNROLL for (int i = 0; i < (size); i++)                             \
                if (i < blocks)                                                 \
                    values[i] = r[i];                                           \
        }                                                                       \
        UNROLL for (int i = 0; i < (size); i++)                                 \
            if (i < blocks)                                                     \
                weight_grad[i] = sums[i];                                       \
        break;                                                                  \
    }

/* FN(sort_and_rank) for columns of up to 8 rows that carry no tags. */
static void FN(rank_few)(int32_t code, const FN(buffers) *at, const T *weights, V *weight_grad, int64_t vectors)
{
    const int64_t blocks = at->blocks, height = at->height;
    const V *x = at->x;
    V *values = at->values;
    switch (code) {
    case SORT2: RANK_FEW(2, APPLY(S2, ROWS2), APPLY(US2, ROWS2))
    case SORT4: RANK_FEW(4, APPLY(S4, ROWS4), APPLY(US4, ROWS4))
    case SORT8: RANK_FEW(8, APPLY(S8, ROWS8), APPLY(US8, ROWS8))
    }
}

#undef NOTE
#define NOTE(a, b)

/* Sort columns and add to the gradients of the weights. `values` becomes the weight of each block if `by_rank`. */
static void FN(sort_and_rank)(const step_t *network, const FN(buffers) *at, const T *weights, V *weight_grad, INT mask,
                              int by_rank, int mode, int64_t vectors)
{
    if (by_rank && mode == PLAIN) {
        FN(rank_few)(network->code, at, weights, weight_grad, vectors);
        return;
    }
    FN(sort)(network, at->x, at->blocks, at->height, vectors, 0);
    if (by_rank)
        ACROSS(FN(add_weights), at, weights, weight_grad, mask)
    else
        for (int64_t v = 0; v < vectors; v++)
            FN(add_sorted)(at->x + v * at->height, at->grad + v, weight_grad, at->blocks, 1);
}

/* Add what one dimension of one pair contributes to the gradients of query and key. */
INLINE void FN(add_slope)(int32_t base, V q, V k, V slope, V *query_grad, V *key_grad)
{
    if (base == DIS) {
        *query_grad += slope * (q - k);
        *key_grad -= slope * (q - k);
    }
    if (base == DOT) {
        *query_grad += slope * k;
        *key_grad += slope * q;
    }
    if (base == L1) {
        const V sign = (V)((I)slope & (q > k)) - (V)((I)slope & (q < k));
        *query_grad += sign;
        *key_grad -= sign;
    }
}

/* Add to the gradients of queries and keys for dimensions `start` to `end`, in registers as FN(sum_run). */
INLINE void FN(slope_run)(int32_t base, const V *slope, const V *query, const V *keys, int64_t pitch, int64_t start,
                          int64_t end, int64_t queries, int64_t columns, V *query_grad, V *key_grad)
{
    for (int64_t i = start; i < end; i++) {
        V q[QUERIES], sum[QUERIES];
        UNROLL for (int r = 0; r < queries; r++) q[r] = query[r * pitch + i];
        UNROLL for (int r = 0; r < queries; r++) sum[r] = query_grad[r * pitch + i];
        UNROLL for (int j = 0; j < columns; j++) {
            const V k = keys[j * pitch + i];
            V grad = key_grad[j * pitch + i];
            UNROLL for (int r = 0; r < queries; r++)
                FN(add_slope)(base, q[r], k, slope[r * ABREAST + j], sum + r, &grad);
            key_grad[j * pitch + i] = grad;
        }
        UNROLL for (int r = 0; r < queries; r++) query_grad[r * pitch + i] = sum[r];
    }
}

/* Add to the gradients of queries and keys for blocks `block` to `end`, in tiles as FN(sum_tile). */
INLINE void FN(slope_tile)(int32_t base, const FN(buffers) *at, int64_t vectors, int64_t block, int64_t end,
                           int64_t row, int64_t queries, int64_t v, int64_t columns)
{
    const int64_t pitch = at->pitch, rank_pitch = at->blocks + 1, width = at->d / at->blocks;
    const int64_t place = row * pitch + v * at->query_pitch, c = row * vectors + v;
    const V *query = at->query + place, *keys = at->keys + v * pitch;
    const V *weights = at->values + c * rank_pitch, *grads = at->grad + c;
    V *query_grad = at->query_grad + place, *key_grad = at->key_grad + v * pitch;
    for (; block < end; block++) {
        V slope[QUERIES * ABREAST];
        UNROLL for (int r = 0; r < queries; r++)
            UNROLL for (int j = 0; j < columns; j++)
                slope[r * ABREAST + j] = weights[(r * vectors + j) * rank_pitch + block] * grads[r * vectors + j];
        FN(slope_run)(base, slope, query, keys, pitch, block * width, (block + 1) * width, queries, columns, query_grad,
                      key_grad);
    }
}

/* Not inlined: in FN(backward_task), it would make the loops of FN(product_tile) spill registers. */
static __attribute__((noinline)) void FN(add_slopes)(int32_t base, const FN(buffers) *at, int64_t rows, int64_t vectors)
{
    const int64_t step = most(1, RUN * at->blocks / at->d);
    for (int64_t block = 0; block < at->blocks; block += step) {
        const int64_t end = least(block + step, at->blocks);
        switch (base) {
        case DIS: TILES(FN(slope_tile), DIS, at, vectors, block, end) break;
        case DOT: TILES(FN(slope_tile), DOT, at, vectors, block, end) break;
        case L1: TILES(FN(slope_tile), L1, at, vectors, block, end) break;
        }
    }
}

/* DIS and DOT by products, see FN(shift): with the slopes a of DIS and b of DOT, a query has the gradient
 *     sum a (q - k) + b k = sum (b - a) k' + q' sum a + o sum b
 * and a key the same with q and k exchanged. A product with b - a replaces one with each of them. This function also
 * adds up a and b; FN(add_sums) adds the other terms, once per query and key. */
#undef NOTE
#define NOTE(a, b) swapped[count++] = (a) > (b);
INLINE void FN(product_tile)(int bases, int size, const FN(buffers) *at, const int64_t *places, int64_t vectors,
                             int64_t v, int64_t columns)
{
    const int64_t blocks = at->blocks, width = at->d / blocks, tile = QUERIES * ABREAST;
    V products[FEW * QUERIES * ABREAST], factor[FEW * QUERIES * ABREAST];
    FN(multiply)(size, at, v, columns, products);
    UNROLL for (int base = DIS; base <= DOT; base++) {
        V weights[FEW], total[FEW] = {{0}};
        if (!(bases & 1 << base))
            continue;
        FN(load_few)(size, at, places[base], weights);
        for (int j = 0; j < columns; j++) {
            V by_column[FEW] = {{0}}, *column_sums = at->column_sums + (2 * (v + j) + base) * FEW;
            for (int64_t row = 0; row < QUERIES; row++) {
                const V grad = at->grad[row * vectors + v + j];
                V r[FEW], *row_sums = at->row_sums + (2 * row + base) * FEW;
                I swapped[4 * FEW];
                int count = 0;
                FN(from_products)(base, size, at, products + row * ABREAST + j, row, v + j, r);
                SORT_FEW
                UNROLL for (int i = 0; i < size; i++) total[i] += grad * r[i];
                UNROLL for (int i = 0; i < size; i++) r[i] = grad * weights[i];
                if (size == 4) { APPLY(US4, ROWS4) } else { APPLY(US8, ROWS8) }
                UNROLL for (int i = 0; i < size; i++) {
                    V *to = factor + i * tile + row * ABREAST + j;
                    if (base == DIS)
                        *to = -r[i];
                    else
                        *to = *to + r[i];
                    row_sums[i] += r[i];
                    by_column[i] += r[i];
                }
            }
            UNROLL for (int i = 0; i < size; i++) column_sums[i] += by_column[i];
        }
        for (int64_t i = 0; i < blocks; i++)
            at->weight_grad[places[base] * blocks + i] += total[i];
    }
    for (int64_t block = 0; block < blocks; block++)
        FN(slope_run)(DOT, factor + block * tile, at->query, at->shifted + v * at->pitch, at->pitch, block * width,
                      (block + 1) * width, QUERIES, columns, at->query_grad, at->key_grad + v * at->pitch);
}
#undef UNDO
#undef NOTE
#define NOTE(a, b)

/* Add (x - o) sum a + o sum b to the gradients of `count` queries or keys, given x - o. */
static void FN(add_sums)(const FN(buffers) *at, const V *x, const V *sums, int64_t count, V *grad)
{
    const int64_t width = at->d / at->blocks;
    for (int64_t each = 0; each < count; each++, x += at->pitch, grad += at->pitch, sums += 2 * FEW)
        for (int64_t block = 0, i = 0; block < at->blocks; block++)
            for (const int64_t end = i + width; i < end; i++)
                grad[i] += sums[block] * x[i] + sums[FEW + block] * at->origin[i];
}

/* Add to the gradients of queries, keys and weights. */
static void FN(add_products)(int bases, const FN(buffers) *at, const int64_t *places, int64_t rows, int64_t vectors)
{
    FN(shift_queries)(at, rows);
    memset(at->row_sums, 0, (size_t)(2 * FEW * QUERIES * BYTES));
    PRODUCTS(FN(product_tile))
    FN(add_sums)(at, at->query, at->row_sums, rows, at->query_grad);
}

/* Add the gradients of a few queries, or of queries paired with keys, for one panel of keys. */
static void FN(backward_rows)(const call_t *call, const FN(buffers) *at, int64_t rows, int64_t vectors, int special)
{
    const int by_rank = (call->need & (NEED_QUERY | NEED_KEY)) != 0;
    const int mode = by_rank && special ? BOUNDED : by_rank && !FN(is_few)(at->network) ? TAGGED : PLAIN;
    int64_t places[2];
    const int products = by_rank && !special ? FN(find_products)(call, at, call->need & NEED_WEIGHT, places) : 0;
    INT mask = 0;
    while (mask < at->blocks - 1)
        mask = 2 * mask + 1;
    for (int64_t b = 0; b < call->n_bases; b++) {
        const int32_t base = call->bases[b];
        const T *weights = at->weights + b * at->blocks;
        V *weight_grad = at->weight_grad + b * at->blocks;
        const int flat = !special && !(call->need & NEED_WEIGHT) && at->ranks[b] <= 1;
        if (!flat && products >> base & 1)
            continue;
        if (flat) {
            const FN(buffers) all = FN(one_block)(at);
            for (int64_t c = 0; c < rows * vectors; c++)
                all.values[2 * c] = (V){0} + weights[0];
            if (at->ranks[b])
                FN(add_slopes)(base, &all, rows, vectors);
        } else if (at->blocks == at->d) {
            for (int64_t row = 0; row < rows; row++) {
                const FN(buffers) one = FN(only_row)(at, row, vectors);
                const step_t *network = FN(fill)(base, mode, &one, mask, vectors);
                FN(sort_and_rank)(network, &one, weights, weight_grad, mask, by_rank, mode, vectors);
                if (by_rank)
                    FN(add_slopes)(base, &one, 1, vectors);
            }
        } else {
            FN(fill_blocks)(base, mode, at, mask, rows, vectors);
            for (int64_t c = 0; c < rows * vectors; c += MAX_VECTORS) {
                const FN(buffers) some = FN(from_column)(at, c);
                FN(sort_and_rank)(at->network, &some, weights, weight_grad, mask, by_rank, mode,
                                  least(MAX_VECTORS, rows * vectors - c));
            }
            if (by_rank)
                FN(add_slopes)(base, at, rows, vectors);
        }
    }
    if (products)
        FN(add_products)(products, at, places, rows, vectors);
}

/* Write the sums of the first `lanes` lanes to gradients that are `step` apart, or with `again` add them. */
static void FN(flush_lanes)(V *sums, int64_t pitch, T *restrict grads, int64_t step, int64_t d, int64_t lanes,
                            int again)
{
    for (int64_t lane = 0; lane < lanes; lane++, grads += step) {
        const T *column = (const T *)(sums + lane / LANES * pitch) + lane % LANES;
        for (int64_t i = 0; i < d; i++)
            grads[i] = again ? grads[i] + column[i * LANES] : column[i * LANES];
    }
    memset(sums, 0, (size_t)(pitch * ceil_div(lanes, LANES) * BYTES));
}

static void FN(flush_weights)(V *sums, double *weight_grad, int64_t size)
{
    for (int64_t i = 0; i < size; i++)
        weight_grad[i] += (double)FN(total)(sums, i);
    memset(sums, 0, (size_t)(size * BYTES));
}

static T FN(dot)(const T *a, const T *b, int64_t count)
{
    V sum = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        sum += *(const FN(unaligned) *)(a + i) * *(const FN(unaligned) *)(b + i);
    T total = FN(total)(&sum, 0);
    for (; i < count; i++)
        total += a[i] * b[i];
    return total;
}

static void FN(backward_task)(const plan_t *plan, int64_t task, char *scratch)
{
    const call_t *call = plan->call;
    const int64_t groups = plan->groups, tiles = plan->tiles;
    const int64_t tile = task % tiles, group = task / tiles % groups, h = task / tiles / groups;
    const int64_t d = call->d, weights = call->n_bases * call->blocks, *stride = call->score_stride;
    double *weight_grad = plan->weight_partial + task * weights;
    int64_t since_flush = 0;
    FN(buffers) at;
    FN(layout)(plan, scratch, 1, &at);
    FN(load_weights)(call, h, 2, &at);
    memset(at.key_grad, 0, (size_t)(at.pitch * plan->vectors * BYTES));
    memset(at.weight_grad, 0, (size_t)(weights * BYTES));
    const size_t sums_bytes = (size_t)(2 * FEW * plan->vectors * BYTES);
    if (!SMALL && at.shifted)
        memset(at.column_sums, 0, sums_bytes);
    for (int64_t n = group * call->n / groups; n < (group + 1) * call->n / groups; n++)
        for (int64_t panel = tile * plan->panels / tiles; panel < (tile + 1) * plan->panels / tiles; panel++) {
            const int64_t pair = n * call->heads + h, first = panel * plan->vectors * LANES;
            const int64_t keys = least(plan->vectors * LANES, call->count - first), vectors = ceil_div(keys, LANES);
            /* offset of the gradients of this panel's keys, and of queries paired with them */
            const int64_t place = (call->paired ? first * call->heads + h : pair * call->count + first) * d;
            const int64_t step = call->paired ? call->heads * d : d;
            const int special_keys = FN(load_keys)(call, n, h, first, vectors, &at);
            if (!SMALL && at.shifted)
                FN(shift_keys)(call, n, h, &at, vectors);
            memset(at.grad, 0, (size_t)((call->paired ? 1 : QUERIES) * vectors * BYTES));
            for (int64_t row = 0; row < plan->rows; row += QUERIES) {
                const int64_t rows = least(QUERIES, plan->rows - row), l = plan->first + row, end = row + rows;
                const int special = FN(load_queries)(call, n, h, l, rows, first, vectors, &at) | special_keys;
                for (int64_t r = 0; r < rows; r++) {
                    const int64_t origin = n * stride[0] + h * stride[1] + (l + r) * stride[2];
                    const T *from = (const T *)call->scores + origin + first * stride[3];
                    T *grad = (T *)(at.grad + r * vectors);
                    if (call->softmax) {
                        const T *weights = (const T *)call->softmax + (pair * call->length + l + r) * call->count;
                        if (panel == tile * plan->panels / tiles)
                            at.dots[row + r] = FN(dot)(weights, from - first, call->count);
                        for (int64_t key = 0; key < keys; key++)
                            grad[key] = weights[first + key] * (from[key] - at.dots[row + r]);
                        continue;
                    }
                    if (stride[3] == 1)
                        memcpy(grad, from, (size_t)keys * sizeof(T));
                    for (int64_t key = 0; stride[3] != 1 && key < keys; key++)
                        grad[key] = from[key * stride[3]];
                }
                if (rows < QUERIES && !call->paired)
                    memset(at.grad + rows * vectors, 0, (size_t)((QUERIES - rows) * vectors * BYTES));
                memset(at.query_grad, 0, (size_t)((call->paired ? vectors : QUERIES) * at.pitch * BYTES));
                FLUSH(FN(is_few)(at.network) && !special)
                FN(backward_rows)(call, &at, rows, vectors, special);
                FLUSH(0)
                if (call->need & NEED_QUERY && call->paired)
                    FN(flush_lanes)(at.query_grad, at.pitch, (T *)call->query_grad + place, step, d, keys, 0);
                for (int64_t r = 0; call->need & NEED_QUERY && !call->paired && r < rows; r++) {
                    T *query_grad = plan->query_partial
                        ? (T *)plan->query_partial + ((pair * tiles + tile) * plan->rows + row + r) * d
                        : (T *)call->query_grad + (pair * call->length + l + r) * d;
                    for (int64_t i = 0; i < d; i++)
                        query_grad[i] += FN(total)(at.query_grad + r * at.pitch, i);
                }
                if (call->need & NEED_KEY && (end % QUERY_CHUNK == 0 || end == plan->rows)) {
                    if (!SMALL && at.shifted && !special_keys) {
                        FN(add_sums)(&at, at.shifted, at.column_sums, vectors, at.key_grad);
                        memset(at.column_sums, 0, sums_bytes);
                    }
                    FN(flush_lanes)(at.key_grad, at.pitch, (T *)call->key_grad + place, step, d, keys,
                                    plan->first || end > QUERY_CHUNK);
                }
                since_flush += rows * vectors;
                if (since_flush >= RUN) {
                    FN(flush_weights)(at.weight_grad, weight_grad, weights);
                    since_flush = 0;
                }
            }
        }
    FN(flush_weights)(at.weight_grad, weight_grad, weights);
}

/* Sum the partial gradients of all tiles for the queries of this round. */
static void FN(gather_queries)(const plan_t *plan)
{
    const call_t *call = plan->call;
    const int64_t size = plan->rows * call->d;
    const T *partial = plan->query_partial;
    for (int64_t pair = 0; pair < call->n * call->heads; pair++)
        for (int64_t tile = 0; tile < plan->tiles; tile++, partial += size) {
            T *query_grad = (T *)call->query_grad + (pair * call->length + plan->first) * call->d;
            for (int64_t i = 0; i < size; i++)
                query_grad[i] += partial[i];
        }
    memset(plan->query_partial, 0, (size_t)(call->n * call->heads * plan->tiles * size) * sizeof(T)); /* for the next */
}

static void FN(gather_weights)(const plan_t *plan)
{
    const call_t *call = plan->call;
    const int64_t blocks = call->blocks, size = call->n_bases * blocks, parts = plan->groups * plan->tiles;
    for (int64_t h = 0; h < call->heads; h++)
        for (int64_t i = 0; i < size; i++) {
            double sum = 0;
            for (int64_t part = 0; part < parts; part++)
                sum += plan->weight_partial[(h * parts + part) * size + i];
            const int64_t b = i / blocks, position = i % blocks;
            T *folded = (T *)call->weight_grad + h * size + b * blocks;
            if (call->bases[b] == DOT)
                folded[blocks - 1 - position] = (T)sum;
            else
                folded[position] = -(T)sum;
        }
}

static int FN(plan_backward)(plan_t *plan)
{
    const call_t *call = plan->call;
    const int64_t pairs = call->n * call->heads, d = call->d;
    FN(split_keys)(plan, BACKWARD_BYTES);
    plan->groups = least(call->n, ceil_div(FN(enough_tasks)(plan), call->heads));
    plan->tiles = least(plan->panels, ceil_div(MIN_TASKS, plan->groups * call->heads));
    plan->tasks = call->heads * plan->groups * plan->tiles;
    if (call->need & NEED_QUERY)
        memset(call->query_grad, 0, (size_t)(pairs * call->length * d) * sizeof(T));
    const int64_t row_bytes = pairs * plan->tiles * d * (int64_t)sizeof(T);
    const int partial = plan->tiles > 1 && call->need & NEED_QUERY && !call->paired;
    plan->rows = partial ? least(call->length, most(1, PARTIAL_BYTES / row_bytes)) : call->length;
    FN(buffers) at;
    plan->scratch_bytes = FN(layout)(plan, NULL, 1, &at);
    plan->query_partial = partial ? calloc((size_t)plan->rows, (size_t)row_bytes) : NULL;
    plan->weight_partial = calloc((size_t)(plan->tasks * call->n_bases * call->blocks), sizeof(double));
    return !plan->weight_partial || (partial && !plan->query_partial) ? FAILED : DONE;
}

/* The tasks of one round after the other, each for `rows` queries. */
int FN(backward)(plan_t *plan)
{
    const call_t *call = plan->call;
    if (FN(plan_backward)(plan) == FAILED)
        return FAILED;
    for (; plan->first < call->length; plan->first += plan->rows) {
        plan->rows = least(plan->rows, call->length - plan->first);
        if (run(FN(backward_task), plan) == FAILED)
            return FAILED;
        if (plan->query_partial)
            FN(gather_queries)(plan);
    }
    if (call->need & NEED_WEIGHT)
        FN(gather_weights)(plan);
    return DONE;
}

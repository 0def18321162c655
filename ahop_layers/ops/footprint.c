/* Scores of query-key pairs by their sorted per-dimension similarities, and the gradients of these scores.
 *
 * Vector lanes run along keys: a block holds a few columns of d vectors each and one more, and a sorting network of
 * row-wise minima and maxima sorts all lanes of a column at once. The network comes from Python as data (see cpu.py):
 * groups of rows few enough to be sorted or merged in registers, so that memory is touched once per group and not once
 * per comparator.
 *
 * Similarities are sorted in ascending order: -(q-k)^2 and -|q-k| as their negatives, with the sign moved into the
 * weight, and q*k with the weights reversed.
 *
 * The file includes itself once per instruction set, and from there once per element type. */
#ifndef ISA

#include <fenv.h>
#include <float.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { DIS, DOT, L1 };
enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16 };
enum { NEED_QUERY = 1, NEED_KEY = 2, NEED_WEIGHT = 4 };
enum { END, SORT2, SORT4, SORT8, SORT16, MERGE8, MERGE16, CHAIN2, CHAIN3 };
enum { ABREAST = 4, MAX_VECTORS = 20, QUERY_CHUNK = 64, MIN_TASKS = 64, ALIGNMENT = 64, BOUNDLESS = 8 };
enum { FORWARD_BYTES = 52 << 10, BACKWARD_BYTES = 12 << 10, PARTIAL_BYTES = 8 << 20 };

/* A step of the sorting network: `groups` groups of rows, the first at `start`, the next `advance` further on. The rows
 * of a group are `step` apart and lie before `end`. */
typedef struct {
    int32_t code, start, advance, groups, step, end;
} step_t;

/* Mirrored field by field in cpu.py. Strides count elements; `scores` is the output or the incoming gradient. */
typedef struct {
    const void *query, *key, *weight;
    void *scores, *query_grad, *key_grad, *weight_grad;
    const int32_t *bases;
    const step_t *program;
    int64_t n, heads, length, count, d, n_bases;
    int64_t query_stride[4], key_stride[4], score_stride[4];
    int64_t dtype, need, threads;
} call_t;

/* How a call is cut into tasks: by its shape alone, so that sums add up in one order for any number of threads. */
typedef struct {
    const call_t *call;
    int64_t vectors, blocks; /* of a block of keys; blocks of all keys */
    int64_t groups;          /* runs of the batch */
    int64_t chunks;          /* forward: chunks of queries */
    int64_t tiles;           /* backward: runs of blocks */
    int64_t first, rows;     /* backward: the queries of this round */
    void *query_partial;     /* [n][head][tile][row][d], or NULL where one tile holds all keys */
    double *weight_partial;  /* [head][group][tile][base][d] */
} plan_t;

typedef void body_t(const plan_t *plan, int64_t task, char *scratch);

typedef struct {
    body_t *body;
    const plan_t *plan;
    int64_t tasks;
    atomic_llong *next;
    char *scratch;
} worker_t;

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static void *work(void *argument)
{
    worker_t *worker = argument;
    fenv_t environment;
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV); /* with denormals flushed, words tagged for the backward pass would compare equal */
    for (int64_t task; (task = atomic_fetch_add(worker->next, 1)) < worker->tasks;)
        worker->body(worker->plan, task, worker->scratch);
    fesetenv(&environment);
    return NULL;
}

/* Threads live for one call: nothing is lost in a fork and nothing is shared between callers. */
static int run(body_t *body, const plan_t *plan, int64_t tasks, int64_t scratch_bytes)
{
    int64_t threads = most(1, least(plan->call->threads, tasks)), started = 0;
    worker_t *workers = malloc((size_t)threads * sizeof *workers);
    pthread_t *handles = malloc((size_t)threads * sizeof *handles);
    void *scratch = NULL;
    int failed = !workers || !handles || posix_memalign(&scratch, ALIGNMENT, (size_t)(threads * scratch_bytes));
    if (!failed) {
        atomic_llong next = 0;
        for (int64_t i = 0; i < threads; i++)
            workers[i] = (worker_t){body, plan, tasks, &next, (char *)scratch + i * scratch_bytes};
        while (started + 1 < threads && !pthread_create(&handles[started], NULL, work, &workers[started + 1]))
            started++;
        work(&workers[0]);
        while (started)
            pthread_join(handles[--started], NULL);
    }
    free(scratch);
    free(handles);
    free(workers);
    return failed ? -1 : 0;
}

typedef struct {
    char *base;
    int64_t used;
} arena_t;

/* The next `bytes` of a scratch area, aligned; without a base this only counts. */
static void *take(arena_t *arena, int64_t bytes)
{
    void *taken = arena->base ? arena->base + arena->used : NULL;
    arena->used += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return taken;
}

static inline float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float from_bfloat16(uint16_t bits) { return from_bits((uint32_t)bits << 16); }

static inline float from_float16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, magnitude = (uint32_t)(bits & 0x7fff) << 13;
    if (magnitude >= 0x0f800000) /* inf or NaN: the largest exponent stays the largest */
        return from_bits(sign | 0x70000000 | magnitude);
    return from_bits(sign | 0x77800000) * from_bits(magnitude); /* rescaled by 2^112, denormals too */
}

static inline float from_float32(float value) { return value; }
static inline double from_float64(double value) { return value; }

/* Batcher's odd-even merges and sorts of rows held in registers. */
#define CE(a, b) { V low_ = MIN(a, b); b = MAX(a, b); a = low_; }
#define M4(a, b, c, d) CE(a, c) CE(b, d) CE(b, c)
#define M8(a, b, c, d, e, f, g, h) M4(a, c, e, g) M4(b, d, f, h) CE(b, c) CE(d, e) CE(f, g)
#define M16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) \
    M8(a, c, e, g, i, k, m, o) M8(b, d, f, h, j, l, n, p) CE(b, c) CE(d, e) CE(f, g) CE(h, i) CE(j, k) CE(l, m) CE(n, o)
#define S2(a, b) CE(a, b)
#define S4(a, b, c, d) CE(a, b) CE(c, d) M4(a, b, c, d)
#define S8(a, b, c, d, e, f, g, h) S4(a, b, c, d) S4(e, f, g, h) M8(a, b, c, d, e, f, g, h)
#define S16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) \
    S8(a, b, c, d, e, f, g, h) S8(i, j, k, l, m, n, o, p) M16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)
#define ROWS2 r[0], r[1]
#define ROWS4 ROWS2, r[2], r[3]
#define ROWS8 ROWS4, r[4], r[5], r[6], r[7]
#define ROWS16 ROWS8, r[8], r[9], r[10], r[11], r[12], r[13], r[14], r[15]
#define APPLY(shape, ...) shape(__VA_ARGS__)
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

/* Call a function for the columns of a block: for several at once, then for one after the other. */
#define ACROSS(function, ...)                                                   \
    {                                                                           \
        int64_t v = 0;                                                          \
        for (; v + ABREAST <= vectors; v += ABREAST)                            \
            function(__VA_ARGS__, v, ABREAST);                                  \
        for (; v < vectors; v++)                                                \
            function(__VA_ARGS__, v, 1);                                        \
    }

#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define FN(name) JOIN(name, ISA, T)

#define PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define BEGIN_TARGET(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_TARGET PRAGMA(clang attribute pop)
#else
#define BEGIN_TARGET(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define END_TARGET PRAGMA(GCC pop_options)
#endif

#if defined(__x86_64__)
#define ISA avx512
#define BYTES 64
#define X86(name) _mm512_##name
BEGIN_TARGET("avx512f,avx512dq,avx512bw,avx512vl,fma")
#include "footprint.c"
END_TARGET
#undef X86
#undef BYTES
#undef ISA
#define ISA avx2
#define BYTES 32
#define X86(name) _mm256_##name
BEGIN_TARGET("avx2,fma")
#include "footprint.c"
END_TARGET
#undef X86
#undef BYTES
#undef ISA
#define ISA sse2
#define X86(name) _mm_##name
#elif defined(__aarch64__)
#define ISA neon
#else
#define ISA generic
#endif
#define BYTES 16
#include "footprint.c"

typedef int entry_t(const call_t *call);
typedef struct {
    const char *name;
    entry_t *forward[2], *backward[2];
} isa_t;
#define ENTRIES(name, isa) {JOIN(name, isa, float), JOIN(name, isa, double)}
#define NAME_(isa) #isa
#define NAME(isa) NAME_(isa)

/* Fastest first. */
static const isa_t ISAS[] = {
#if defined(__x86_64__)
    {"avx512", ENTRIES(forward, avx512), ENTRIES(backward, avx512)},
    {"avx2", ENTRIES(forward, avx2), ENTRIES(backward, avx2)},
#endif
    {NAME(ISA), ENTRIES(forward, ISA), ENTRIES(backward, ISA)},
};

/* The name of instruction set `index`, fastest first; empty if this processor lacks it, NULL past the last. */
const char *ahop_isa(int64_t index)
{
    if (index < 0 || index >= (int64_t)(sizeof ISAS / sizeof *ISAS))
        return NULL;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (index == 0 && !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")))
        return "";
    if (index == 1 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")))
        return "";
#endif
    return ISAS[index].name;
}

/* Both return 0, or -1 if memory ran out. */
int ahop_forward(int64_t isa, const call_t *call) { return ISAS[isa].forward[call->dtype == FLOAT64](call); }
int ahop_backward(int64_t isa, const call_t *call) { return ISAS[isa].backward[call->dtype == FLOAT64](call); }

#elif !defined(T)

#define T float
#define INT int32_t
#define UNSIGNED uint32_t
#define HUGE_T FLT_MAX
#define LARGE_T 1e18f
#if defined(X86)
#define MIN(a, b) ((V)X86(min_ps)(a, b))
#define MAX(a, b) ((V)X86(max_ps)(a, b))
#elif defined(__aarch64__)
#define MIN(a, b) ((V)vminq_f32((float32x4_t)(a), (float32x4_t)(b)))
#define MAX(a, b) ((V)vmaxq_f32((float32x4_t)(a), (float32x4_t)(b)))
#define MIN_NUMBER(a, b) ((V)vminnmq_f32((float32x4_t)(a), (float32x4_t)(b)))
#endif
#include "footprint.c"
#undef MIN_NUMBER
#undef MAX
#undef MIN
#undef HUGE_T
#undef LARGE_T
#undef INT
#undef UNSIGNED
#undef T

#define T double
#define INT int64_t
#define UNSIGNED uint64_t
#define HUGE_T DBL_MAX
#define LARGE_T 1e150
#if defined(X86)
#define MIN(a, b) ((V)X86(min_pd)(a, b))
#define MAX(a, b) ((V)X86(max_pd)(a, b))
#elif defined(__aarch64__)
#define MIN(a, b) ((V)vminq_f64((float64x2_t)(a), (float64x2_t)(b)))
#define MAX(a, b) ((V)vmaxq_f64((float64x2_t)(a), (float64x2_t)(b)))
#define MIN_NUMBER(a, b) ((V)vminnmq_f64((float64x2_t)(a), (float64x2_t)(b)))
#endif
#include "footprint.c"
#undef MIN_NUMBER
#undef MAX
#undef MIN
#undef HUGE_T
#undef LARGE_T
#undef INT
#undef UNSIGNED
#undef T

#else

#define V FN(vector)
#define I FN(integers)
#define U FN(unsigned)
#define WORD FN(word)
typedef T V __attribute__((vector_size(BYTES), may_alias));
typedef INT I __attribute__((vector_size(BYTES), may_alias));
typedef UNSIGNED U __attribute__((vector_size(BYTES), may_alias));
typedef INT WORD __attribute__((may_alias));
#define LANES ((int)(BYTES / sizeof(T)))

/* Where an operand is NaN, the second one is taken: what x86 does. MIN_NUMBER never takes the NaN of the first. */
#if !defined(MIN)
#define MIN(a, b) ((V)(((I)(a) & ((a) < (b))) | ((I)(b) & ~((a) < (b)))))
#define MAX(a, b) ((V)(((I)(a) & ((a) > (b))) | ((I)(b) & ~((a) > (b)))))
#endif
#if !defined(MIN_NUMBER)
#define MIN_NUMBER MIN
#endif

/* A group that reaches past the end: row d, which holds infinity, stands for all rows there. */
#define RAGGED(size, first, body)                                               \
    {                                                                           \
        int64_t row[size];                                                      \
        UNROLL for (int i = 0; i < (size); i++)                                 \
            row[i] = (first) + i * step < end ? (first) + i * step : d;         \
        for (V *y = x; y < x + vectors * pitch; y += pitch) {                   \
            UNROLL for (int i = 0; i < (size); i++) r[i] = y[row[i]];           \
            body                                                                \
            UNROLL for (int i = 0; i < (size); i++) y[row[i]] = r[i];           \
        }                                                                       \
    }

#define GROUP(size, shape)                                                      \
    for (; groups; groups--, start += advance) {                                \
        V r[size];                                                              \
        if (start + (size - 1) * step < end)                                    \
            for (V *y = x + start; y < x + vectors * pitch; y += pitch) {       \
                UNROLL for (int i = 0; i < (size); i++) r[i] = y[i * step];     \
                APPLY(shape, ROWS##size)                                        \
                UNROLL for (int i = 0; i < (size); i++) y[i * step] = r[i];     \
            }                                                                   \
        else                                                                    \
            RAGGED(size, start, APPLY(shape, ROWS##size))                       \
    }                                                                           \
    break;

/* The last steps of a merge reach over the edge of each window of rows: those past it are carried to the next. */
#define CHAIN(carried, window, body)                                            \
    for (; groups; groups--, start += advance) {                                \
        V r[carried + window];                                                  \
        int64_t first = start + step;                                           \
        const int64_t whole = most(0, (end - 1 - first - (carried - 1) * step) / (window * step)); \
        for (int64_t v = 0; whole && v < vectors; v++) {                        \
            V *y = x + v * pitch + first;                                       \
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

/* The same with a usual step known to the compiler. */
#define USUAL(usual, ...)                                                       \
    if (step == usual) {                                                        \
        enum { step = usual };                                                  \
        __VA_ARGS__                                                             \
    } else                                                                      \
        __VA_ARGS__

/* Sort the columns of a block. */
static void FN(sort)(const step_t *program, V *x, int64_t d, int64_t vectors)
{
    const int64_t pitch = d + 1;
    for (;; program++) {
        const int64_t step = program->step, advance = program->advance, end = program->end;
        int64_t start = program->start, groups = program->groups;
        switch (program->code) {
        case SORT2: GROUP(2, S2)
        case SORT4: GROUP(4, S4)
        case SORT8: GROUP(8, S8)
        case SORT16: USUAL(1, GROUP(16, S16))
        case MERGE8: USUAL(4, GROUP(8, M8))
        case MERGE16: USUAL(4, GROUP(16, M16))
        case CHAIN2: USUAL(1, CHAIN(1, 4, CE(r[1], r[3]) CE(r[2], r[4]) CE(r[0], r[1]) CE(r[2], r[3])))
        case CHAIN3: USUAL(1, CHAIN(3, 8, CE(r[3], r[7]) CE(r[4], r[8]) CE(r[5], r[9]) CE(r[6], r[10])
                                          CE(r[1], r[3]) CE(r[2], r[4]) CE(r[5], r[7]) CE(r[6], r[8])
                                          CE(r[0], r[1]) CE(r[2], r[3]) CE(r[4], r[5]) CE(r[6], r[7])))
        default: return;
        }
    }
}

#define CONVERT(type, convert)                                                              \
    for (int64_t i = 0, place = 0; i < d; i++, place += stride)                             \
        UNROLL for (int lane = 0; lane < lanes; lane++)                                     \
            to[i * lanes + lane] = (T)convert(((const type *)from)[offset[lane] + place]);  \
    break;

/* Copy d numbers into each of several lanes. */
INLINE void FN(load)(const void *from, int64_t dtype, const int64_t *offset, int lanes, int64_t stride, int64_t d,
                     T *to)
{
    switch (dtype) {
    case FLOAT32: CONVERT(float, from_float32)
    case FLOAT64: CONVERT(double, from_float64)
    case FLOAT16: CONVERT(uint16_t, from_float16)
    case BFLOAT16: CONVERT(uint16_t, from_bfloat16)
    }
}

/* Whether any of `count` numbers is NaN or so large that a similarity could overflow. */
static int FN(wild)(const T *numbers, int64_t count)
{
    int wild = 0;
    for (int64_t i = 0; i < count; i++)
        wild |= !(numbers[i] < LARGE_T) | !(numbers[i] > -LARGE_T);
    return wild;
}

typedef struct {
    V *keys, *x;
    T *query, *weights;
    V *sums, *grad, *values, *key_grad, *query_grad, *weight_grad;
} FN(buffers);

/* Copy keys from `first` on into the lanes of a block, the last one again into lanes past it: zeros would only make
 * ties to settle. Returns whether a number is wild. */
static int FN(load_keys)(const call_t *call, int64_t n, int64_t h, int64_t first, int64_t vectors,
                         const FN(buffers) *at)
{
    const int64_t *stride = call->key_stride, pitch = call->d + 1, origin = n * stride[0] + h * stride[1];
    int wild = 0;
    for (int64_t v = 0; v < vectors; v++) {
        int64_t offset[LANES];
        for (int lane = 0; lane < LANES; lane++)
            offset[lane] = origin + least(first + v * LANES + lane, call->count - 1) * stride[2];
        FN(load)(call->key, call->dtype, offset, LANES, stride[3], call->d, (T *)(at->keys + v * pitch));
        wild |= FN(wild)((const T *)(at->keys + v * pitch), call->d * LANES);
        at->x[v * pitch + call->d] = (V){0} + (T)__builtin_inf();
    }
    return wild;
}

static int FN(load_query)(const call_t *call, int64_t n, int64_t h, int64_t l, T *query)
{
    const int64_t *stride = call->query_stride, offset = n * stride[0] + h * stride[1] + l * stride[2];
    FN(load)(call->query, call->dtype, &offset, 1, stride[3], call->d, query);
    return FN(wild)(query, call->d);
}

/* The weight of each position in ascending order, for head h. */
static void FN(load_weights)(const call_t *call, int64_t h, T *weights)
{
    for (int64_t b = 0; b < call->n_bases; b++) {
        const T *folded = (const T *)call->weight + (h * call->n_bases + b) * call->d;
        for (int64_t i = 0; i < call->d; i++)
            weights[b * call->d + i] = call->bases[b] == DOT ? folded[call->d - 1 - i] : -folded[i];
    }
}

#define FILL(expression, note)                              \
    for (int64_t i = 0; i < d; i++) {                       \
        const T q = query[i];                               \
        UNROLL for (int j = 0; j < columns; j++) {          \
            const V k = keys[j * pitch + i], value = expression; \
            note;                                           \
        }                                                   \
    }                                                       \
    break;

INLINE void FN(similarities)(int32_t base, const FN(buffers) *at, int64_t d, int64_t first, int64_t columns)
{
    const int64_t pitch = d + 1;
    const T *query = at->query;
    const V *keys = at->keys + first * pitch;
    V *x = at->x + first * pitch;
    switch (base) {
    case DIS: FILL((q - k) * (q - k), x[j * pitch + i] = value)
    case DOT: FILL(q * k, x[j * pitch + i] = value)
    case L1: FILL(MAX(q - k, k - q), x[j * pitch + i] = value)
    }
}

#define TAG(bounded) \
    values[j * pitch + i] = value, x[j * pitch + i] = (V)(((I)(bounded) & ~tags) | (((I){0} + (INT)i) & tags))

/* The same with the dimension in the lowest bits, for the sort to carry along. Infinities with a tag would be NaN:
 * where numbers are `wild`, similarities are bounded, as are NaN. */
INLINE void FN(tagged)(int32_t base, const FN(buffers) *at, INT mask, int wild, int64_t d, int64_t first,
                       int64_t columns)
{
    const int64_t pitch = d + 1;
    const T *query = at->query;
    const V *keys = at->keys + first * pitch;
    V *values = at->values + first * pitch, *x = at->x + first * pitch;
    const I tags = (I){0} + mask;
    const V huge = (V){0} + HUGE_T;
    switch (wild ? base : base + BOUNDLESS) {
    case DIS: FILL((q - k) * (q - k), TAG(MIN_NUMBER(value, huge)))
    case DOT: FILL(q * k, TAG(MAX(MIN_NUMBER(value, huge), -huge)))
    case L1: FILL(MAX(q - k, k - q), TAG(MIN_NUMBER(value, huge)))
    case DIS + BOUNDLESS: FILL((q - k) * (q - k), TAG(value))
    case DOT + BOUNDLESS: FILL(q * k, TAG(value))
    case L1 + BOUNDLESS: FILL(MAX(q - k, k - q), TAG(value))
    }
}

/* Vectors per block: what `bytes` hold, yet enough to repay the steering of the network, evenly over all keys. */
static void FN(cut_keys)(plan_t *plan, int64_t bytes)
{
    const int64_t all = ceil_div(plan->call->count, LANES);
    const int64_t fit = least(MAX_VECTORS, most(ABREAST, bytes / (plan->call->d * BYTES)));
    plan->vectors = least(all, ceil_div(ceil_div(all, ceil_div(all, fit)), ABREAST) * ABREAST);
    plan->blocks = ceil_div(all, plan->vectors);
}

static int64_t FN(layout)(const plan_t *plan, char *scratch, int backward, FN(buffers) *buffers)
{
    const int64_t d = plan->call->d, vectors = plan->vectors, block = (d + 1) * vectors * BYTES;
    const int64_t weights = plan->call->n_bases * d;
    arena_t arena = {scratch, 0};
    buffers->keys = take(&arena, block);
    buffers->x = take(&arena, block);
    buffers->query = take(&arena, d * (int64_t)sizeof(T));
    buffers->weights = take(&arena, weights * (int64_t)sizeof(T));
    buffers->sums = take(&arena, vectors * BYTES);
    if (backward) {
        buffers->grad = take(&arena, vectors * BYTES);
        buffers->values = take(&arena, block);
        buffers->key_grad = take(&arena, block);
        buffers->query_grad = take(&arena, d * BYTES);
        buffers->weight_grad = take(&arena, weights * BYTES);
    }
    return arena.used;
}

/* Add weights times rows to the sums, in runs of rows: shorter chains of rounding errors. */
INLINE void FN(weigh)(const V *x, const T *weights, V *sums, int64_t d, int64_t first, int64_t columns)
{
    enum { RUN = 64 };
    const int64_t pitch = d + 1;
    x += first * pitch;
    for (int64_t start = 0; start < d; start += RUN) {
        V sum[ABREAST] = {{0}};
        for (int64_t i = start; i < least(start + RUN, d); i++)
            UNROLL for (int j = 0; j < columns; j++) sum[j] += weights[i] * x[j * pitch + i];
        UNROLL for (int j = 0; j < columns; j++) sums[first + j] += sum[j];
    }
}

/* A NaN goes into the sum, not into the network. */
static void FN(set_nan_aside)(const FN(buffers) *at, int64_t d, int64_t vectors)
{
    for (int64_t v = 0; v < vectors; v++)
        for (V *x = at->x + v * (d + 1); x < at->x + v * (d + 1) + d; x++) {
            const I number = *x == *x;
            at->sums[v] = (V)((I)at->sums[v] | ~number);
            *x = (V)((I)*x & number);
        }
}

static void FN(forward_task)(const plan_t *plan, int64_t task, char *scratch)
{
    const call_t *call = plan->call;
    const int64_t chunk = task % plan->chunks, block = task / plan->chunks % plan->blocks;
    const int64_t group = task / plan->chunks / plan->blocks % plan->groups;
    const int64_t h = task / plan->chunks / plan->blocks / plan->groups, d = call->d, *stride = call->score_stride;
    const int64_t first = block * plan->vectors * LANES, width = least(plan->vectors * LANES, call->count - first);
    const int64_t vectors = ceil_div(width, LANES);
    FN(buffers) at;
    FN(layout)(plan, scratch, 0, &at);
    FN(load_weights)(call, h, at.weights);
    for (int64_t n = group * call->n / plan->groups; n < (group + 1) * call->n / plan->groups; n++) {
        const int wild_keys = FN(load_keys)(call, n, h, first, vectors, &at);
        T *scores = (T *)call->scores + n * stride[0] + h * stride[1] + first * stride[3];
        for (int64_t l = chunk * QUERY_CHUNK; l < least((chunk + 1) * QUERY_CHUNK, call->length); l++) {
            const int wild = FN(load_query)(call, n, h, l, at.query) | wild_keys;
            memset(at.sums, 0, (size_t)(vectors * BYTES));
            for (int64_t b = 0; b < call->n_bases; b++) {
                ACROSS(FN(similarities), call->bases[b], &at, d)
                if (wild)
                    FN(set_nan_aside)(&at, d, vectors);
                FN(sort)(call->program, at.x, d, vectors);
                ACROSS(FN(weigh), at.x, at.weights + b * d, at.sums, d)
            }
            for (int64_t lane = 0; lane < width; lane++)
                scores[l * stride[2] + lane * stride[3]] = ((const T *)at.sums)[lane];
        }
    }
}

static int FN(forward)(const call_t *call)
{
    plan_t plan = {.call = call, .chunks = ceil_div(call->length, QUERY_CHUNK)};
    FN(cut_keys)(&plan, FORWARD_BYTES);
    const int64_t one = call->heads * plan.blocks * plan.chunks; /* batch entry */
    plan.groups = least(call->n, ceil_div(MIN_TASKS, one));
    FN(buffers) at;
    return run(FN(forward_task), &plan, one * plan.groups, FN(layout)(&plan, NULL, 0, &at));
}

/* Order rows `start` to `end` of a lane by exact values, as far down as they have to go. */
static void FN(insert)(const T *values, WORD *words, int64_t start, int64_t end, INT mask)
{
    for (int64_t i = start; i < end; i++) {
        const INT moved = words[i * LANES];
        const T exact = values[(moved & mask) * LANES];
        int64_t j = i;
        for (; j > 0 && values[(words[(j - 1) * LANES] & mask) * LANES] > exact; j--)
            words[j * LANES] = words[(j - 1) * LANES];
        words[j * LANES] = moved;
    }
}

/* Tags took the place of some low bits: where neighbours agree in all others, order them by their exact values. */
INLINE void FN(settle)(const FN(buffers) *at, INT mask, int64_t d, int64_t first, int64_t columns)
{
    const int64_t run = d <= 128 ? 64 : 8, pitch = d + 1; /* more tag bits, more neighbours that agree */
    const U tags = (U){0} + (UNSIGNED)mask, *x = (const U *)at->x + first * pitch;
    for (int64_t start = 1; start < d; start += run) {
        const int64_t end = least(start + run, d);
        I close[ABREAST] = {{0}};
        for (int64_t i = start; i < end; i++)
            UNROLL for (int j = 0; j < columns; j++) close[j] |= (x[j * pitch + i] ^ x[j * pitch + i - 1]) <= tags;
        for (int64_t lane = 0; lane < columns * LANES; lane++)
            if (((const WORD *)close)[lane]) {
                const int64_t place = (first + lane / LANES) * pitch * LANES + lane % LANES;
                FN(insert)((const T *)at->values + place, (WORD *)at->x + place, start, end, mask);
            }
    }
}

/* Bring each weight to the dimension that its position came from, in place of the value there, and add the gradients of
 * the weights. This is bound by loads and stores: tags are read 64 bits at a time, no address takes a multiplication,
 * and a row's loads come before its stores, which would hold them up. */
static void FN(untag)(const V *x, V *values, V grad, const T *weights, V *weight_grad, INT mask, int64_t d)
{
    enum { PER_WORD = 8 / sizeof(T), LOW = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? 0 : PER_WORD - 1 };
    const uint64_t masks = (uint64_t)mask | (uint64_t)mask << 32 * (PER_WORD - 1), *words = (const uint64_t *)x;
    char *lanes[LANES];
    UNROLL for (int lane = 0; lane < LANES; lane++) {
        lanes[lane] = (char *)((T *)values + lane);
        __asm__("" : "+r"(lanes[lane])); /* a register of its own, or the compiler adds `lane` to every address */
    }
    for (int64_t i = 0; i < d; i++) {
        const WORD weight = ((const WORD *)weights)[i];
        T *place[LANES];
        V sorted;
        UNROLL for (int lane = 0; lane < LANES; lane += PER_WORD) {
            const uint64_t word = *words++ & masks;
            place[lane + LOW] = (T *)(lanes[lane + LOW] + (uint64_t)(UNSIGNED)word * BYTES);
            if (PER_WORD == 2)
                place[lane + 1 - LOW] = (T *)(lanes[lane + 1 - LOW] + (word >> (32 - __builtin_ctz(BYTES))));
        }
        UNROLL for (int lane = 0; lane < LANES; lane++) sorted[lane] = *place[lane];
        UNROLL for (int lane = 0; lane < LANES; lane++) *(WORD *)place[lane] = weight;
        weight_grad[i] += grad * sorted;
    }
}

static void FN(add_sorted)(const V *x, const V *grad, V *weight_grad, int64_t d, int64_t vectors)
{
    for (int64_t v = 0; v < vectors; v++)
        for (int64_t i = 0; i < d; i++)
            weight_grad[i] += grad[v] * x[v * (d + 1) + i];
}

#define SLOPES(for_query, for_key)                                      \
    for (int64_t i = 0; i < d; i++) {                                   \
        const T q = query[i];                                           \
        V sum = {0};                                                    \
        UNROLL for (int j = 0; j < columns; j++) {                      \
            const V k = keys[j * pitch + i], slope = slopes[j * pitch + i] * grad[j]; \
            for_query;                                                  \
            for_key;                                                    \
        }                                                               \
        query_grad[i] += sum;                                           \
    }                                                                   \
    break;

INLINE void FN(add_slopes)(int32_t base, const FN(buffers) *at, int64_t d, int64_t first, int64_t columns)
{
    const int64_t pitch = d + 1;
    const T *query = at->query;
    const V *keys = at->keys + first * pitch, *slopes = at->values + first * pitch;
    V grad[ABREAST], *query_grad = at->query_grad, *key_grad = at->key_grad + first * pitch;
    UNROLL for (int j = 0; j < columns; j++) grad[j] = at->grad[first + j] * (T)(base == DIS ? 2 : 1);
    switch (base) {
    case DIS: SLOPES(sum += slope * (q - k), key_grad[j * pitch + i] -= slope * (q - k))
    case DOT: SLOPES(sum += slope * k, key_grad[j * pitch + i] += slope * q)
    case L1: SLOPES(const V sign = (V)((I)slope & (q > k)) - (V)((I)slope & (q < k)); sum += sign,
                    key_grad[j * pitch + i] -= sign)
    }
}

static T FN(total)(V vector)
{
    T sum = 0;
    for (int64_t lane = 0; lane < LANES; lane++)
        sum += vector[lane];
    return sum;
}

/* Add the gradients of one query against one block of keys. */
static void FN(backward_row)(const call_t *call, const FN(buffers) *at, int64_t vectors, int wild)
{
    const int64_t d = call->d;
    INT mask = 0;
    while (mask < d - 1)
        mask = 2 * mask + 1;
    for (int64_t b = 0; b < call->n_bases; b++) {
        const int32_t base = call->bases[b];
        if (call->need & (NEED_QUERY | NEED_KEY)) {
            ACROSS(FN(tagged), base, at, mask, wild, d)
            FN(sort)(call->program, at->x, d, vectors);
            ACROSS(FN(settle), at, mask, d)
            for (int64_t v = 0; v < vectors; v++)
                FN(untag)(at->x + v * (d + 1), at->values + v * (d + 1), at->grad[v], at->weights + b * d,
                          at->weight_grad + b * d, mask, d);
            ACROSS(FN(add_slopes), base, at, d)
        } else {
            ACROSS(FN(similarities), base, at, d)
            FN(sort)(call->program, at->x, d, vectors);
            FN(add_sorted)(at->x, at->grad, at->weight_grad + b * d, d, vectors);
        }
    }
}

/* Empty the running sums of a block's keys into their gradients, which start at element `place`; the first time there
 * is nothing to add to. */
static void FN(flush_keys)(const call_t *call, V *sums, int64_t place, int64_t vectors, int64_t keys, int again)
{
    const int64_t d = call->d, pitch = d + 1;
    for (int64_t key = 0; call->need & NEED_KEY && key < keys; key++) {
        T *grad = (T *)call->key_grad + place + key * d;
        const T *sum = (const T *)(sums + key / LANES * pitch) + key % LANES;
        if (again)
            for (int64_t i = 0; i < d; i++)
                grad[i] += sum[i * LANES];
        else
            for (int64_t i = 0; i < d; i++)
                grad[i] = sum[i * LANES];
    }
    memset(sums, 0, (size_t)(pitch * vectors * BYTES));
}

static void FN(flush_weights)(V *sums, double *weight_grad, int64_t size)
{
    for (int64_t i = 0; i < size; i++)
        weight_grad[i] += (double)FN(total)(sums[i]);
    memset(sums, 0, (size_t)(size * BYTES));
}

static void FN(backward_task)(const plan_t *plan, int64_t task, char *scratch)
{
    const call_t *call = plan->call;
    const int64_t groups = plan->groups, tiles = plan->tiles;
    const int64_t tile = task % tiles, group = task / tiles % groups, h = task / tiles / groups;
    const int64_t d = call->d, *stride = call->score_stride;
    double *weight_grad = plan->weight_partial + task * call->n_bases * d;
    int64_t since_flush = 0;
    FN(buffers) at;
    FN(layout)(plan, scratch, 1, &at);
    FN(load_weights)(call, h, at.weights);
    memset(at.key_grad, 0, (size_t)((d + 1) * plan->vectors * BYTES));
    memset(at.weight_grad, 0, (size_t)(call->n_bases * d * BYTES));
    for (int64_t n = group * call->n / groups; n < (group + 1) * call->n / groups; n++)
        for (int64_t block = tile * plan->blocks / tiles; block < (tile + 1) * plan->blocks / tiles; block++) {
            const int64_t pair = n * call->heads + h, first = block * plan->vectors * LANES;
            const int64_t keys = least(plan->vectors * LANES, call->count - first), vectors = ceil_div(keys, LANES);
            const int wild_keys = FN(load_keys)(call, n, h, first, vectors, &at);
            memset(at.grad, 0, (size_t)(vectors * BYTES));
            for (int64_t row = 0; row < plan->rows; row++) {
                const int64_t l = plan->first + row, origin = n * stride[0] + h * stride[1] + l * stride[2];
                for (int64_t key = 0; key < keys; key++)
                    ((T *)at.grad)[key] = ((const T *)call->scores)[origin + (first + key) * stride[3]];
                const int wild = FN(load_query)(call, n, h, l, at.query) | wild_keys;
                memset(at.query_grad, 0, (size_t)(d * BYTES));
                FN(backward_row)(call, &at, vectors, wild);
                if (call->need & NEED_QUERY) {
                    T *query_grad = plan->query_partial
                        ? (T *)plan->query_partial + ((pair * tiles + tile) * plan->rows + row) * d
                        : (T *)call->query_grad + (pair * call->length + l) * d;
                    for (int64_t i = 0; i < d; i++)
                        query_grad[i] += FN(total)(at.query_grad[i]);
                }
                if (row % QUERY_CHUNK == QUERY_CHUNK - 1 || row == plan->rows - 1)
                    FN(flush_keys)(call, at.key_grad, (pair * call->count + first) * d, vectors, keys,
                                   plan->first || row >= QUERY_CHUNK);
                if (++since_flush % QUERY_CHUNK == 0)
                    FN(flush_weights)(at.weight_grad, weight_grad, call->n_bases * d);
            }
        }
    FN(flush_weights)(at.weight_grad, weight_grad, call->n_bases * d);
}

/* Sum what the tiles found for the queries of this round. */
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
}

static void FN(gather_weights)(const plan_t *plan)
{
    const call_t *call = plan->call;
    const int64_t d = call->d, size = call->n_bases * d, parts = plan->groups * plan->tiles;
    for (int64_t h = 0; h < call->heads; h++)
        for (int64_t i = 0; i < size; i++) {
            double sum = 0;
            for (int64_t part = 0; part < parts; part++)
                sum += plan->weight_partial[(h * parts + part) * size + i];
            const int64_t b = i / d, position = i % d;
            T *folded = (T *)call->weight_grad + h * size + b * d;
            if (call->bases[b] == DOT)
                folded[d - 1 - position] = (T)sum;
            else
                folded[position] = -(T)sum;
        }
}

static int FN(backward)(const call_t *call)
{
    const int64_t pairs = call->n * call->heads;
    plan_t plan = {.call = call, .groups = least(call->n, ceil_div(MIN_TASKS, call->heads)), .rows = call->length};
    FN(cut_keys)(&plan, BACKWARD_BYTES);
    plan.tiles = least(plan.blocks, ceil_div(MIN_TASKS, plan.groups * call->heads));
    const int64_t tasks = call->heads * plan.groups * plan.tiles;
    FN(buffers) at;
    const int64_t scratch_bytes = FN(layout)(&plan, NULL, 1, &at);
    const int partial = plan.tiles > 1 && call->need & NEED_QUERY;
    if (call->need & NEED_QUERY)
        memset(call->query_grad, 0, (size_t)(pairs * call->length * call->d) * sizeof(T));
    const int64_t row_bytes = pairs * plan.tiles * call->d * (int64_t)sizeof(T);
    if (partial)
        plan.rows = least(call->length, most(1, PARTIAL_BYTES / row_bytes));
    const int64_t rows = plan.rows;
    plan.query_partial = partial ? malloc((size_t)(rows * row_bytes)) : NULL;
    plan.weight_partial = calloc((size_t)(tasks * call->n_bases * call->d), sizeof(double));
    int failed = !plan.weight_partial || (partial && !plan.query_partial);
    for (; !failed && plan.first < call->length; plan.first += rows) {
        plan.rows = least(rows, call->length - plan.first);
        if (partial)
            memset(plan.query_partial, 0, (size_t)(rows * row_bytes));
        failed = run(FN(backward_task), &plan, tasks, scratch_bytes);
        if (partial && !failed)
            FN(gather_queries)(&plan);
    }
    if (!failed && call->need & NEED_WEIGHT)
        FN(gather_weights)(&plan);
    free(plan.query_partial);
    free(plan.weight_partial);
    return failed ? -1 : 0;
}

#undef V
#undef I
#undef U
#undef WORD
#undef LANES
#endif

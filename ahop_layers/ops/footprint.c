/* Scores of query-key pairs from their sorted similarities per block of dimensions, and the gradients of these scores.
 *
 * Vector lanes hold different keys, or different query-key pairs. A panel has a few columns of d vectors each: the keys
 * of all lanes. Similarities are summed over blocks in registers, for a tile of a few queries by a few columns. Each
 * query and column of keys then have a column of n vectors, one per block, and a sorting network of row-wise minima and
 * maxima sorts all lanes of a column at once. Python passes the network as data (see cpu.py): each step sorts or merges
 * a group of rows in registers, so memory is read and written once per group and not once per comparator. Columns have
 * gaps between them: at distances of a power of two they would map to the same cache lines.
 *
 * If every dimension is a block, similarities are sorted as they are computed, one query at a time. If the weights of a
 * base do not depend on the rank, its similarities are summed over all dimensions and not sorted.
 *
 * Similarities are sorted in ascending order: -(q-k)^2 and -|q-k| as their negatives, with the sign moved into the
 * weight, and q*k with the weights reversed. Bases that are monotone in |q-k| share one sort of it if every dimension is
 * a block: exp(-|q-k|/width) and -(q-k)^2 are then computed from the sorted column.
 *
 * A dimension that is unknown, NaN in the query or in the key, enters as infinity, so it is sorted behind the m known
 * ones of its lane. Lanes differ in m, and each weighs its column with the row of m in a table of stretched weights.
 *
 * footprint_impl.h holds the code of one instruction set and element type. setup.py compiles this file once for each of
 * these parts, with its number as PART, and once without PART, for what the parts share. */
#define _GNU_SOURCE /* RTLD_DEFAULT */
#include <dlfcn.h>
#include <fenv.h>
#include <float.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { ABI_VERSION = 7 }; /* also in cpu.py; increase both with every change of the interface */
enum { FAILED = -1, DONE };
enum { DIS, DOT, L1, NEAR };
enum { FLOAT32, FLOAT64, FLOAT16, BFLOAT16 }; /* the parts in double serve FLOAT64, those in float the others */
enum { NEED_QUERY = 1, NEED_KEY = 2, NEED_WEIGHT = 4 };
enum { END, SORT2, SORT4, SORT8, SORT16, SORT32, MERGE32, CHAIN1, CHAIN2, CHAIN3, CHAIN4 };
enum { ABREAST = 4, FEW = 8, MAX_VECTORS = 20, MAX_WIDE = 32, QUERY_CHUNK = 64 };
enum { MIN_TASKS = 64, ALIGNMENT = 64, SPREAD = 13 };
enum { RUN = 64 }; /* sums are added up in runs of this length, which limits the growth of rounding errors */
/* How similarities enter a network: unchanged; with NaN set aside; tagged; tagged and clamped to finite values; with
 * unknown ones last. */
enum { PLAIN, NAN_ASIDE, TAGGED, BOUNDED, UNKNOWN_LAST };
/* Sizes of a panel of keys; BLOCK_BYTES if blocks are wider than a dimension. */
enum { FORWARD_BYTES = 52 << 10, BACKWARD_BYTES = 12 << 10, BLOCK_BYTES = 256 << 10, PARTIAL_BYTES = 8 << 20 };
enum { TASK_WORK = 1 << 24 }; /* approximate limit of similarities per task, so that many threads share a large call */

/* A step of the sorting network: `groups` groups of rows, the first at row `start`, each `advance` rows after the
 * previous one. The rows of a group are `step` apart and end before row `end`. */
typedef struct {
    int32_t code, start, advance, groups, step, end;
} step_t;

/* Mirrored field by field in cpu.py. Strides count elements; `scores` is the output or the incoming gradient. */
typedef struct {
    const void *query, *key, *weight;
    const void *widths; /* one for each base, of which NEAR uses its own; NULL if all are 1 */
    void *scores, *query_grad, *key_grad, *weight_grad;
    const void *softmax; /* NULL, or that softmax follows: the output, and in a backward pass its contiguous result */
    const int32_t *bases;
    const step_t *network;
    int64_t n, heads, length, count, d;
    int64_t blocks; /* divides d; a block is d / blocks consecutive dimensions */
    int64_t n_bases;
    int64_t query_stride[4], key_stride[4], score_stride[4];
    int64_t dtype, need, threads;
    int64_t paired; /* key s is scored against query s only: `length` is 1, the third stride separates queries */
    int64_t missing; /* NaN is an unknown value; `blocks` is d or 1; without a backward pass */
} call_t;

typedef struct plan plan_t;
typedef void body_t(const plan_t *plan, int64_t task, char *scratch);

/* How a call is split into tasks. The split depends on the shape alone, so sums are
 * added in the same order for any number of threads. */
struct plan {
    const call_t *call;
    int64_t vectors, panels;  /* vectors of keys in a panel; number of panels */
    int64_t groups;           /* parts of the batch */
    int64_t chunks;           /* forward: chunks of queries */
    int64_t tiles;            /* runs of panels */
    int64_t first, rows;      /* backward: the queries of this round */
    void *query_partial;      /* [n][head][tile][row][d], or NULL if one tile holds all keys */
    double *weight_partial;   /* [head][group][tile][base][block] */
    int64_t tasks, scratch_bytes;
    body_t *body;
    void *scratch;            /* of all threads */
    atomic_llong next, started; /* next task; number of threads that have started */
};

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

int run(body_t *body, plan_t *plan);

/* Distance in rows from one sorted column to the next: a power of two, so no group of rows crosses the end of a column,
 * plus SPREAD. */
static inline int64_t column_height(int64_t blocks)
{
    int64_t height = 1;
    while (height < blocks)
        height *= 2;
    return height + SPREAD;
}

typedef struct {
    char *base;
    int64_t used;
} arena_t;

/* Returns the next `bytes` of a scratch area, aligned. Without a base it only counts them. */
static inline void *take(arena_t *arena, int64_t bytes)
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
    if (magnitude >= 0x0f800000) /* inf or NaN keep the largest exponent */
        return from_bits(sign | 0x70000000 | magnitude);
    return from_bits(sign | 0x77800000) * from_bits(magnitude); /* scaled by 2^112, which also normalizes denormals */
}

/* Sorting networks and Batcher's odd-even merges for rows in registers. Green's network for 16 rows has three
 * comparators fewer than Batcher's. FN(rank_few) defines NOTE to record which lanes a comparator exchanges. */
#define CE(a, b) { NOTE(a, b) V low_ = MIN(a, b); b = MAX(a, b); a = low_; }
#define NOTE(a, b)
#define M4(a, b, c, d) CE(a, c) CE(b, d) CE(b, c)
#define M8(a, b, c, d, e, f, g, h) M4(a, c, e, g) M4(b, d, f, h) CE(b, c) CE(d, e) CE(f, g)
#define M16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) \
    M8(a, c, e, g, i, k, m, o) M8(b, d, f, h, j, l, n, p) CE(b, c) CE(d, e) CE(f, g) CE(h, i) CE(j, k) CE(l, m) CE(n, o)
#define S2(a, b) CE(a, b)
#define S4(a, b, c, d) CE(a, b) CE(c, d) M4(a, b, c, d)
#define S8(a, b, c, d, e, f, g, h) S4(a, b, c, d) S4(e, f, g, h) M8(a, b, c, d, e, f, g, h)
#define S16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)                                    \
    CE(a, b) CE(c, d) CE(e, f) CE(g, h) CE(i, j) CE(k, l) CE(m, n) CE(o, p)                     \
    CE(a, c) CE(b, d) CE(e, g) CE(f, h) CE(i, k) CE(j, l) CE(m, o) CE(n, p)                     \
    CE(a, e) CE(b, f) CE(c, g) CE(d, h) CE(i, m) CE(j, n) CE(k, o) CE(l, p)                     \
    CE(a, i) CE(b, j) CE(c, k) CE(d, l) CE(e, m) CE(f, n) CE(g, o) CE(h, p)                     \
    CE(b, c) CE(d, m) CE(e, i) CE(f, k) CE(g, j) CE(h, l) CE(n, o)                              \
    CE(b, e) CE(c, i) CE(f, g) CE(h, n) CE(j, k) CE(l, o) CE(c, e) CE(d, i) CE(h, m) CE(l, n)   \
    CE(d, f) CE(g, i) CE(h, j) CE(k, m) CE(d, e) CE(f, g) CE(h, i) CE(j, k) CE(l, m) CE(g, h) CE(i, j)
/* The same comparators in reverse order: they return sorted rows to their places, see FN(rank_few). */
#define UM4(a, b, c, d) UNDO(b, c) UNDO(b, d) UNDO(a, c)
#define UM8(a, b, c, d, e, f, g, h) UNDO(f, g) UNDO(d, e) UNDO(b, c) UM4(b, d, f, h) UM4(a, c, e, g)
#define US2(a, b) UNDO(a, b)
#define US4(a, b, c, d) UM4(a, b, c, d) UNDO(c, d) UNDO(a, b)
#define US8(a, b, c, d, e, f, g, h) UM8(a, b, c, d, e, f, g, h) US4(e, f, g, h) US4(a, b, c, d)
#define ROWS2 r[0], r[1]
#define ROWS4 ROWS2, r[2], r[3]
#define ROWS8 ROWS4, r[4], r[5], r[6], r[7]
#define ROWS16 ROWS8, r[8], r[9], r[10], r[11], r[12], r[13], r[14], r[15]
#define NEXT16 \
    r[16], r[17], r[18], r[19], r[20], r[21], r[22], r[23], r[24], r[25], r[26], r[27], r[28], r[29], r[30], r[31]
#define EVEN16 r[0], r[2], r[4], r[6], r[8], r[10], r[12], r[14], r[16], r[18], r[20], r[22], r[24], r[26], r[28], r[30]
#define ODD16 r[1], r[3], r[5], r[7], r[9], r[11], r[13], r[15], r[17], r[19], r[21], r[23], r[25], r[27], r[29], r[31]
#define MERGE_32                                                                                        \
    APPLY(M16, EVEN16) APPLY(M16, ODD16)                                                                \
    CE(r[1], r[2]) CE(r[3], r[4]) CE(r[5], r[6]) CE(r[7], r[8]) CE(r[9], r[10]) CE(r[11], r[12])        \
    CE(r[13], r[14]) CE(r[15], r[16]) CE(r[17], r[18]) CE(r[19], r[20]) CE(r[21], r[22]) CE(r[23], r[24]) \
    CE(r[25], r[26]) CE(r[27], r[28]) CE(r[29], r[30])
#define APPLY(shape, ...) shape(__VA_ARGS__)
#define EXPORT __attribute__((visibility("default")))
#define UNROLL _Pragma("GCC unroll 32")
#define INLINE static inline __attribute__((always_inline))

/* Call a function for the columns of a panel: ABREAST columns at a time, then the remaining ones singly. */
#define ACROSS(...) ACROSS_IF(1, __VA_ARGS__)
#define ACROSS_IF(abreast, function, ...)                                       \
    {                                                                           \
        int64_t v = 0;                                                          \
        for (; (abreast) && v + ABREAST <= vectors; v += ABREAST)               \
            function(__VA_ARGS__, v, ABREAST);                                  \
        for (; v < vectors; v++)                                                \
            function(__VA_ARGS__, v, 1);                                        \
    }

/* Call a function for the tiles of a panel: QUERIES queries by ABREAST columns, then smaller ones. */
#define TILES(function, ...)                                                    \
    if (rows == QUERIES && !at->query_pitch)                                    \
        ACROSS(function, __VA_ARGS__, 0, QUERIES)                               \
    else                                                                        \
        for (int64_t row = 0; row < rows; row++)                                \
            ACROSS_IF(!at->query_pitch, function, __VA_ARGS__, row, 1)

#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define FN(name) JOIN(name, ISA, T)

/* Flush denormals to zero: weights of a softmax that round to nothing have denormal gradients, on which x86 is slow. */
#if defined(__x86_64__)
#define FLUSH(yes) _mm_setcsr((_mm_getcsr() & ~0x8040u) | ((yes) ? 0x8040u : 0));
#else
#define FLUSH(yes)
#endif

#define PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define BEGIN_TARGET(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_TARGET PRAGMA(clang attribute pop)
#else
#define BEGIN_TARGET(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define END_TARGET PRAGMA(GCC pop_options)
#endif

#if defined(PART) /* float if even, double if odd; other processors than x86 have two parts */
#define DOUBLE (PART % 2)
#define SMALL (DOUBLE || PART > 3) /* plain loops: double checks gradients, and few processors have SSE2 only */
#if defined(__x86_64__) && PART < 2
#define ISA avx512
#define BYTES 64
#define REGISTERS 32
#define X86(name) _mm512_##name
BEGIN_TARGET("avx512f,avx512dq,avx512bw,avx512vl,fma")
#include "footprint_impl.h"
END_TARGET
#elif defined(__x86_64__) && PART < 4
#define ISA avx2
#define BYTES 32
#define REGISTERS 16
#define X86(name) _mm256_##name
BEGIN_TARGET("avx2,fma")
#include "footprint_impl.h"
END_TARGET
#elif defined(__x86_64__)
#define ISA sse2
#define BYTES 16
#define REGISTERS 16
#define X86(name) _mm_##name
#include "footprint_impl.h"
#elif PART < 2
#if defined(__aarch64__)
#define ISA neon
#define REGISTERS 32
#else
#define ISA generic
#define REGISTERS 16
#endif
#define BYTES 16
#include "footprint_impl.h"
#endif
#else /* what the parts share */
static void work(void *argument)
{
    plan_t *plan = argument;
    char *scratch = (char *)plan->scratch + atomic_fetch_add(&plan->started, 1) * plan->scratch_bytes;
    fenv_t environment;
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV); /* if denormals were flushed to zero, tagged words would compare as equal */
    for (int64_t task; (task = atomic_fetch_add(&plan->next, 1)) < plan->tasks;)
        plan->body(plan, task, scratch);
    fesetenv(&environment);
}

static void *start(void *plan)
{
    work(plan);
    return NULL;
}

static pid_t home;
static __attribute__((constructor)) void remember_process(void) { home = getpid(); }

/* Run all tasks on the threads of PyTorch's OpenMP: others would compete with these, which wait actively for a while
 * after each operation. In a forked process, where they do not exist, or without OpenMP, threads live for one call. */
int run(body_t *body, plan_t *plan)
{
    const int64_t threads = most(1, least(plan->call->threads, plan->tasks));
    int64_t started = 0;
    plan->body = body;
    atomic_store(&plan->next, 0);
    atomic_store(&plan->started, 0);
    if (posix_memalign(&plan->scratch, ALIGNMENT, (size_t)(threads * plan->scratch_bytes)))
        return FAILED;
    void *openmp = threads > 1 && getpid() == home ? dlsym(RTLD_DEFAULT, "GOMP_parallel") : NULL;
    pthread_t *handles = openmp ? NULL : malloc((size_t)threads * sizeof *handles);
    if (openmp)
        ((void (*)(void (*)(void *), void *, unsigned, unsigned))openmp)(work, plan, (unsigned)threads, 0);
    else {
        while (handles && started + 1 < threads && !pthread_create(&handles[started], NULL, start, plan))
            started++;
        work(plan);
        while (started)
            pthread_join(handles[--started], NULL);
    }
    free(handles);
    free(plan->scratch);
    return DONE;
}

#if defined(__x86_64__)
#define EACH(macro) macro(avx512) macro(avx2) macro(sse2) /* fastest first */
#elif defined(__aarch64__)
#define EACH(macro) macro(neon)
#else
#define EACH(macro) macro(generic)
#endif
#define ENTRIES(name, isa) JOIN(name, isa, float), JOIN(name, isa, double)
#define DECLARE(isa) entry_t ENTRIES(forward, isa), ENTRIES(backward, isa);
#define LIST(isa) {#isa, {ENTRIES(forward, isa)}, {ENTRIES(backward, isa)}},

typedef int entry_t(plan_t *plan);
typedef struct {
    const char *name;
    entry_t *forward[2], *backward[2];
} isa_t;
EACH(DECLARE)
static const isa_t ISAS[] = {EACH(LIST)};

/* Returns the name of instruction set `index`, fastest first: empty if this processor lacks it, NULL past the last. */
EXPORT const char *ahop_isa(int64_t index)
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

EXPORT int64_t ahop_abi_version(void) { return ABI_VERSION; }

/* Both return DONE, or FAILED if memory ran out. */
EXPORT int ahop_forward(int64_t isa, const call_t *call)
{
    plan_t plan = {.call = call};
    return ISAS[isa].forward[call->dtype == FLOAT64](&plan);
}

EXPORT int ahop_backward(int64_t isa, const call_t *call)
{
    plan_t plan = {.call = call};
    const int status = ISAS[isa].backward[call->dtype == FLOAT64](&plan);
    free(plan.query_partial);
    free(plan.weight_partial);
    return status;
}
#endif

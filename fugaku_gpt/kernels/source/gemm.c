/* GEMM with float32 accumulators: c [m, n] = a [m, k] b [k, n], of float32 numbers, or of pairs of bfloat16 numbers on
   processors that multiply such pairs; results may be rounded to bfloat16 at the end.

   The structure is that of Goto and van de Geijn (Anatomy of high-performance matrix multiplication, 2008), with the
   names of BLIS (Van Zee and van de Geijn 2015): blocks of both matrices are packed into the order in which they are read.
   The micro-kernel holds MR x NR accumulators in registers and reads one panel of a [KC, MR], usually from the L1 cache,
   and one panel of b [KC, NR] from the L2 cache, which holds MC_PANELS panels of a and JR_PANELS panels of b. KC is so
   large that a panel of a almost fills the L1 cache, because loading and storing the accumulators costs more.

   If the rows of a are contiguous, a is not packed but read in place, and each thread packs panels of b for its own
   columns. Otherwise all threads pack the panels of b together and each packs the panels of a for its own rows: data that
   one thread has written is slow to access for a thread that shares no cache with it. The next block to pack comes from
   memory, which takes longer than the packing itself: micro-kernels prefetch it one cache line at a time, since their own
   panels would otherwise queue behind many requests.

   The unit of multiplication has 32 bits: a float32 number, or two bfloat16 numbers that are adjacent along the inner
   dimension. Both are copied as floats. Every sum has the same order for any number of threads. */
#include "progress.h"

#if ATTENTION_MR == 12 /* 32 registers */
#define MR 8
#else
#define MR 4
#endif
#define NR_VECTORS 3
#define NR (NR_VECTORS * LANES)
#define KC 768               /* units */
#define JR_PANELS 2          /* panels of b that stay in the L2 cache at depth KC; twice as many at half the depth */
#define MC_PANELS 16         /* panels of a that are packed at a time: MC = MC_PANELS * MR */
#define NC (64 * NR)         /* columns whose panels of b are packed at a time */
#define ACC_ROWS (128 * MR)  /* rows of accumulators that are rounded after several blocks of k: they stay in a cache */
#define PRIVATE_PANELS 16    /* panels of b that a thread packs at a time for itself */
#define PREFETCH_INTERVAL 32 /* units of a micro-kernel per prefetched cache line */
#define CACHE_LINE 64        /* bytes */
#define PREFETCH_ROWS 8      /* rows that packing prefetches ahead */
/* Distances between panels: no multiples of a page, or all panels would map to the same few sets of a cache. */
#define A_PANEL (MR * KC + LANES)
#define B_PANEL (NR * KC + LANES)

typedef struct {
    const char *x;
    int64_t row_stride, column_stride, item_size; /* strides in elements, one of which is 1; bytes */
} Matrix;

INLINE const void *element(const Matrix *s, int64_t row, int64_t column)
{
    return s->x + (row * s->row_stride + column * s->column_stride) * s->item_size;
}

/* ---- Packing */

/* Copies `count` elements and pads them with zeros to `units` units. */
INLINE void copy_padded(const void *x, int64_t count, int64_t size, float *to, int64_t units)
{
    memcpy(to, x, count * size);
    memset((char *)to + count * size, 0, units * sizeof *to - count * size);
}

/* Interleaves two rows into pairs; a missing second row counts as zeros. */
INLINE void interleave_pairs(const uint16_t *x, const uint16_t *second, const int64_t count, float *to)
{
    int64_t i = 0;
#ifdef HAS_BF16_DOT
    for (; second && i + 8 <= count; i += 8) {
        const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(x + i)));
        const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(second + i)));
        _mm256_storeu_si256((__m256i *)(to + i), _mm256_or_si256(low, _mm256_slli_epi32(high, 16)));
    }
#endif
    for (; i < count; i++) {
        const uint32_t pair = (uint32_t)x[i] | (second ? (uint32_t)second[i] << 16 : 0);
        memcpy(to + i, &pair, sizeof pair);
    }
}

/* Packs unit `j` of the inner dimension, which has `k` elements, of `count` adjacent columns. */
INLINE void pack_unit(const char *x, int64_t stride, int64_t size, int64_t j, int64_t k, const int64_t count, float *to)
{
    if (size == 4) {
        memcpy(to, x + j * stride * 4, count * 4);
        return;
    }
    const uint16_t *low = (const uint16_t *)x + 2 * j * stride;
    interleave_pairs(low, 2 * j + 1 < k ? low + stride : 0, count, to);
}

/* Packs `count` columns into adjacent panels [panels, units, width], `panel` floats apart, padded with zeros. */
INLINE void pack_panels(const char *x, int64_t stride, int64_t size, int64_t k, int64_t count, const int64_t width,
                        float *to, int64_t panel)
{
    const int64_t units = size == 4 ? k : (k + 1) / 2, in_unit = size == 4 ? 1 : 2;
    const int64_t full_panels = count / width, rest = count % width;
    for (int64_t j = 0; j < units; j++) {
        for (int64_t row = in_unit * (j + PREFETCH_ROWS); row < min_int64(in_unit * (j + PREFETCH_ROWS + 1), k); row++)
            for (int64_t byte = 0; byte < count * size; byte += 64) __builtin_prefetch(x + row * stride * size + byte);
        for (int64_t p = 0; p < full_panels; p++)
            pack_unit(x + p * width * size, stride, size, j, k, width, to + p * panel + j * width);
        if (rest) {
            float *last = to + full_panels * panel + j * width;
            pack_unit(x + full_panels * width * size, stride, size, j, k, rest, last);
            memset(last + rest, 0, (width - rest) * sizeof *last);
        }
    }
}

/* Whether the rows of a, of [k] elements, can be read in place: they are contiguous and consist of full units. */
INLINE int is_packed_layout(const Matrix *a, int64_t k)
{
    return a->column_stride == 1 && (int64_t)a->x % 4 == 0 && a->row_stride * a->item_size % 4 == 0 &&
           k * a->item_size % 4 == 0;
}

/* Packs panels of a: `count` rows from `row`, `k` elements from `column`; if a is read in place, only the last panel
   where it lacks rows. */
static void pack_a(const Matrix *a, int a_in_place, int64_t row, int64_t column, int64_t count, int64_t k, float *to)
{
    const int64_t units = a->item_size == 4 ? k : (k + 1) / 2;
    if (a->column_stride != 1) {
        pack_panels(element(a, row, column), a->column_stride, a->item_size, k, count, MR, to, A_PANEL);
        return;
    }
    for (int64_t i = a_in_place ? count / MR * MR : 0; i < round_up(count, MR); i++) {
        float *packed_row = to + i / MR * A_PANEL + i % MR * KC;
        if (i < count)
            copy_padded(element(a, row + i, column), k, a->item_size, packed_row, units);
        else
            memset(packed_row, 0, units * sizeof *packed_row);
    }
}

/* Transposes [LANES] rows of LANES numbers. */
INLINE void transpose(vec *x)
{
#if LANES == 16 && !defined(__clang__) /* clang has no such shuffle */
    typedef int32_t order __attribute__((vector_size(4 * LANES)));
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        order low, high;
        for (int lane = 0; lane < LANES; lane++) {
            low[lane] = lane & step ? LANES + lane - step : lane;
            high[lane] = lane & step ? LANES + lane : lane + step;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & step) continue;
            const vec upper = x[i], lower = x[i + step];
            x[i] = __builtin_shuffle(upper, lower, low);
            x[i + step] = __builtin_shuffle(upper, lower, high);
        }
    }
#else
    float y[LANES][LANES];
    memcpy(y, x, sizeof y);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) x[i][j] = y[j][i];
#endif
}

/* Packs one panel of b [units, NR] from `count` columns, from `column` on, that are rows in memory. */
static void pack_b_transposed(const Matrix *b, int64_t row, int64_t column, int64_t count, int64_t k, float *to)
{
    const int64_t units = b->item_size == 4 ? k : (k + 1) / 2;
    float rows[LANES][KC + LANES]; /* LANES more, so that cache lines do not all map to the same few sets */
    for (int64_t first = 0; first < NR; first += LANES) {
        for (int64_t i = 0; i < LANES; i++) {
            if (first + i < count)
                copy_padded(element(b, row, column + first + i), k, b->item_size, rows[i], units);
            else
                memset(rows[i], 0, units * sizeof(float));
        }
        for (int64_t j = 0; j < units; j += LANES) { /* `rows` has room after the last unit */
            vec block[LANES];
            for (int i = 0; i < LANES; i++) block[i] = *(const unaligned_vec *)(rows[i] + j);
            transpose(block);
            const int64_t count_of_block = min_int64(LANES, units - j);
            for (int i = 0; i < count_of_block; i++) *(unaligned_vec *)(to + (j + i) * NR + first) = block[i];
        }
    }
}

/* Packs panels of b: `count` columns from `column`, `k` elements from `row`. */
static void pack_b(const Matrix *b, int64_t row, int64_t column, int64_t count, int64_t k, float *to)
{
    if (b->column_stride == 1)
        pack_panels(element(b, row, column), b->row_stride, b->item_size, k, count, NR, to, B_PANEL);
    else
        for (int64_t j = 0; j < count; j += NR)
            pack_b_transposed(b, row, column + j, min_int64(NR, count - j), k, to + j / NR * B_PANEL);
}

/* ---- Micro-kernels */

/* sum[lane] += x * y[lane], in units */
INLINE vec multiply_add(vec sum, float x, vec y, const int type)
{
#ifdef HAS_BF16_DOT
    if (type == BFLOAT16) return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(x), (__m512bh)y);
#endif
    (void)type;
    return sum + x * y;
}

/* Where a tile is stored: its float32 sums, and the bfloat16 numbers that they are rounded to, if they are. */
typedef struct {
    float *sums;
    int64_t sums_stride; /* from one row to the next */
    uint16_t *rounded;
    int64_t rounded_stride;
} OutputTile;

/* The block that is packed next: `rows` of `bytes`, `stride` apart; `offset` bytes of the first row are prefetched. */
typedef struct {
    const char *row;
    int64_t rows, stride, bytes, offset;
} Prefetch;

INLINE Prefetch prefetch_of(const Matrix *side, int64_t row, int64_t column, int64_t rows, int64_t columns)
{
    const int by_rows = side->column_stride == 1;
    if (rows <= 0 || columns <= 0) return (Prefetch){0};
    return (Prefetch){element(side, row, column), by_rows ? rows : columns,
                      (by_rows ? side->row_stride : side->column_stride) * side->item_size,
                      (by_rows ? columns : rows) * side->item_size, 0};
}

/* Prefetches one more cache line. */
INLINE void prefetch_next(Prefetch *next)
{
    if (next->rows <= 0) return;
    __builtin_prefetch(next->row + next->offset, 0, 2);
    next->offset += CACHE_LINE;
    if (next->offset < next->bytes) return;
    next->offset = 0;
    next->row += next->stride;
    next->rows--;
}

/* c = or, with `accumulates`, c += start + a b for one panel of a, whose unit (i, j) is at i a_row + j a_column, and one
   panel of b, both of `units` units; `start` [NR] may be null. With `rounds` the sums are stored rounded to bfloat16. */
INLINE void micro_kernel(const int type, const int rounds, const int accumulates, int64_t units, const float *a,
                         const int64_t a_row, const int64_t a_column, const float *b, const float *start, OutputTile c,
                         Prefetch *next)
{
    vec sums[MR][NR_VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
#pragma GCC unroll 4
        for (int v = 0; v < NR_VECTORS; v++) {
            sums[i][v] = start ? *(const unaligned_vec *)(start + v * LANES) : (vec){0};
        }
    }
    for (int64_t first = 0, row = 0; first < units; first += PREFETCH_INTERVAL, row++) {
        if ((accumulates || !rounds) && row < MR) {
#pragma GCC unroll 4
            for (int v = 0; v < NR_VECTORS; v++) __builtin_prefetch(c.sums + row * c.sums_stride + v * LANES, 1);
        }
        prefetch_next(next);
        const int64_t end = min_int64(first + PREFETCH_INTERVAL, units);
#pragma GCC unroll 2
        for (int64_t j = first; j < end; j++) {
            vec b_row[NR_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < NR_VECTORS; v++) b_row[v] = *(const unaligned_vec *)(b + j * NR + v * LANES);
#pragma GCC unroll 16
            for (int i = 0; i < MR; i++) {
                const float a_unit = a[i * a_row + j * a_column];
#pragma GCC unroll 4
                for (int v = 0; v < NR_VECTORS; v++) sums[i][v] = multiply_add(sums[i][v], a_unit, b_row[v], type);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
#pragma GCC unroll 4
        for (int v = 0; v < NR_VECTORS; v++) {
            vec total = sums[i][v];
            if (accumulates) total += *(const unaligned_vec *)(c.sums + i * c.sums_stride + v * LANES);
            if (rounds)
                store_bfloat16(c.rounded + i * c.rounded_stride + v * LANES, total);
            else
                *(unaligned_vec *)(c.sums + i * c.sums_stride + v * LANES) = total;
        }
    }
}

typedef void MicroKernel(int64_t units, const float *a, int64_t a_row, const float *b, const float *start, OutputTile c,
                         Prefetch *next);

#define MICRO_KERNEL(name, type, rounds, accumulates, a_row, a_column)                                                 \
    static void name(int64_t units, const float *a, int64_t row, const float *b, const float *start, OutputTile c,     \
                     Prefetch *next)                                                                                   \
    {                                                                                                                  \
        (void)row;                                                                                                     \
        micro_kernel(type, rounds, accumulates, units, a, a_row, a_column, b, start, c, next);                         \
    }
#define MICRO_KERNELS(name, type, rounds)                                                                              \
    MICRO_KERNEL(set_rows_##name, type, rounds, 0, row, 1)                                                             \
    MICRO_KERNEL(set_columns_##name, type, rounds, 0, 1, MR)                                                           \
    MICRO_KERNEL(add_rows_##name, type, rounds, 1, row, 1)                                                             \
    MICRO_KERNEL(add_columns_##name, type, rounds, 1, 1, MR)
#define KERNEL_NAMES(name)                                                                                             \
    {                                                                                                                  \
        {set_rows_##name, set_columns_##name}, { add_rows_##name, add_columns_##name }                                 \
    }
MICRO_KERNELS(32, FLOAT32, 0)
#ifdef HAS_BF16_DOT
MICRO_KERNELS(16, BFLOAT16, 0)
MICRO_KERNELS(16_rounded, BFLOAT16, 1)
#endif
/* [type][rounds][accumulates][whether the columns of a panel of a are contiguous; otherwise its rows are, `row` apart] */
static MicroKernel *const KERNELS[2][2][2][2] = {
    {KERNEL_NAMES(32)},
#ifdef HAS_BF16_DOT
    {KERNEL_NAMES(16), KERNEL_NAMES(16_rounded)},
#endif
};

/* ---- Loops */

typedef struct {
    Matrix a, b;
    int64_t m, n, k;
    const float *bias;
    void *c;
    int64_t c_row;
    int type, c_type, accumulates, a_in_place; /* a_in_place: a is read without packing */
    float *sums; /* accumulators of c where it is rounded after several blocks of k: [m, columns] */
    int64_t sums_row;
    float *packed_a, *packed_b; /* panels */
} Gemm;

/* Rows and columns of c, counted in panels. */
typedef struct {
    int64_t first, last, column_first, column_last;
} PanelRange;

/* Elements [first, first + k) of the inner dimension. */
typedef struct {
    int64_t first, k, units;
    int accumulates, rounds;
} KBlock;

/* How many threads share the rows; the others share the columns. The thread with the most tiles gets as few as possible;
   among equal splits, `prefer_rows` chooses the one with the most threads for rows. */
static int row_threads(int64_t rows, int64_t columns, int prefer_rows, int threads)
{
    int64_t fewest = INT64_MAX;
    int best = 1;
    for (int candidate = 1; candidate <= threads; candidate++) {
        if (threads % candidate) continue;
        const int64_t column_threads = threads / candidate,
                      most = (rows + candidate - 1) / candidate * ((columns + column_threads - 1) / column_threads);
        if (prefer_rows ? most <= fewest : most < fewest) {
            fewest = most;
            best = candidate;
        }
    }
    return best;
}

/* The panels of one thread. */
static PanelRange panel_range_of(int64_t rows, int64_t columns, int prefer_rows, int thread, int threads)
{
    const int by_rows = row_threads(rows, columns, prefer_rows, threads), by_columns = threads / by_rows;
    const int row = thread % by_rows, column = thread / by_rows;
    return (PanelRange){rows * row / by_rows, rows * (row + 1) / by_rows, columns * column / by_columns,
                        columns * (column + 1) / by_columns};
}

/* A tile that c cuts off. (Denormal numbers are rounded to bfloat16 here, and flushed to zero in full tiles.) */
static void edge_kernel(MicroKernel *store_kernel, int64_t rows, int64_t columns, int rounds, int accumulates,
                        int64_t units, const float *a, int64_t a_row, const float *b, const float *start, OutputTile c,
                        Prefetch *next)
{
    float sums[MR * NR];
    store_kernel(units, a, a_row, b, start, (OutputTile){sums, NR, 0, 0}, next);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            const float sum = sums[i * NR + j], total = accumulates ? c.sums[i * c.sums_stride + j] + sum : sum;
            if (rounds)
                c.rounded[i * c.rounded_stride + j] = to_bfloat16(total);
            else
                c.sums[i * c.sums_stride + j] = total;
        }
}

/* The tile of c at (row, column). */
INLINE OutputTile output_tile(const Gemm *p, int64_t row, int64_t column)
{
    if (p->c_type == FLOAT32) return (OutputTile){(float *)p->c + row * p->c_row + column, p->c_row, 0, 0};
    float *sums = p->sums ? p->sums + row * p->sums_row + column % p->sums_row : 0;
    return (OutputTile){sums, p->sums_row, (uint16_t *)p->c + row * p->c_row + column, p->c_row};
}

/* Column panels [first, last) of c, at most 2 JR_PANELS, by row panels [row, end). `packed_a` and `packed_b` are the
   first packed panels of each. */
static void macro_kernel(const Gemm *p, KBlock kb, const float *packed_a, int64_t row, int64_t end,
                         const float *packed_b, int64_t first, int64_t last, Prefetch *a_next, Prefetch *b_next)
{
    const int has_bias = p->bias && kb.first == 0, of_columns = p->a.column_stride != 1;
    MicroKernel *full_kernel = KERNELS[p->type][kb.rounds][kb.accumulates][of_columns],
                *store_kernel = KERNELS[p->type][0][0][of_columns];
    float starts[2 * JR_PANELS * NR] = {0.0f};
    if (has_bias)
        memcpy(starts, p->bias + first * NR, min_int64((last - first) * NR, p->n - first * NR) * sizeof *starts);
    for (int64_t i = row; i < end; i++) {
        const int64_t rows = p->m - i * MR;
        const int in_place = p->a_in_place && rows >= MR;
        const float *a = in_place ? element(&p->a, i * MR, kb.first) : packed_a + (i - row) * A_PANEL;
        const int64_t a_row = in_place ? p->a.row_stride * p->a.item_size / 4 : KC;
        for (int64_t j = first; j < last; j++) {
            const int64_t columns = p->n - j * NR;
            const float *b = packed_b + (j - first) * B_PANEL, *start = has_bias ? starts + (j - first) * NR : 0;
            const OutputTile c = output_tile(p, i * MR, j * NR);
            Prefetch *next = a_next->rows > 0 ? a_next : b_next;
            if (rows >= MR && columns >= NR)
                full_kernel(kb.units, a, a_row, b, start, c, next);
            else
                edge_kernel(store_kernel, min_int64(MR, rows), min_int64(NR, columns), kb.rounds, kb.accumulates,
                            kb.units, a, a_row, b, start, c, next);
        }
    }
}

/* The number of blocks of the inner dimension. */
static int64_t k_blocks_of(int64_t k, int type)
{
    const int64_t most = type == BFLOAT16 ? 2 * KC : KC;
    return (k + most - 1) / most;
}

static int64_t kc_of(const Gemm *p)
{
    const int64_t k_blocks = k_blocks_of(p->k, p->type);
    return round_up((p->k + k_blocks - 1) / k_blocks, 2 * LANES);
}

static KBlock k_block_of(const Gemm *p, int64_t first)
{
    const int64_t k = min_int64(kc_of(p), p->k - first);
    return (KBlock){first, k, p->type == BFLOAT16 ? (k + 1) / 2 : k, p->accumulates || first > 0,
                    p->c_type == BFLOAT16 && first + k == p->k};
}

INLINE int64_t jr_panels_of(KBlock kb) { return kb.units > KC / 2 ? JR_PANELS : 2 * JR_PANELS; }

/* The block of b that is packed next, by a thread with columns [from, to) whose following columns go up to `end`. */
INLINE Prefetch next_b_block(const Gemm *p, int64_t first, int64_t from, int64_t to, int64_t end)
{
    const int64_t next = first + kc_of(p), width = min_int64(to - from, end - to);
    if (next < p->k) return prefetch_of(&p->b, next, from, min_int64(kc_of(p), p->k - next), to - from);
    return prefetch_of(&p->b, 0, to, min_int64(kc_of(p), p->k), width);
}

/* All row panels of a range by its column panels, MC_PANELS at a time, packed unless a is read in place. `packed_b` is
   the first panel of b. */
static void gemm_row_panels(const Gemm *p, KBlock kb, PanelRange range, const float *packed_b, Prefetch b_next)
{
    const int64_t most = jr_panels_of(kb), panels = range.column_last - range.column_first;
    for (int64_t panel_group = range.first; panel_group < range.last; panel_group += MC_PANELS) {
        const int64_t last = min_int64(panel_group + MC_PANELS, range.last), row = panel_group * MR,
                      end = min_int64(last * MR, p->m);
        const int64_t next_end = min_int64(min_int64(last + MC_PANELS, range.last) * MR, p->m);
        Prefetch a_next = {0};
        pack_a(&p->a, p->a_in_place, row, kb.first, end - row, kb.k, p->packed_a);
        if (!p->a_in_place) a_next = prefetch_of(&p->a, end, kb.first, next_end - end, kb.k);
        for (int64_t jr = 0; jr < panels; jr += most) {
            poll_mpi();
            macro_kernel(p, kb, p->packed_a, panel_group, last, packed_b + jr * B_PANEL, range.column_first + jr,
                         range.column_first + min_int64(jr + most, panels), &a_next, &b_next);
        }
    }
}

/* A thread packs the panels of b for its own columns. */
static void gemm_private_b(const Gemm *p, PanelRange range)
{
    const int64_t n = min_int64(range.column_last * NR, p->n);
    for (int64_t block = range.column_first; block < range.column_last; block += PRIVATE_PANELS) {
        const int64_t end = min_int64(block + PRIVATE_PANELS, range.column_last);
        const int64_t from = block * NR, to = min_int64(end * NR, n);
        const PanelRange block_range = {range.first, range.last, block, end};
        for (int64_t first = 0; first < p->k; first += kc_of(p)) {
            const KBlock kb = k_block_of(p, first);
            pack_b(&p->b, first, from, to - from, kb.k, p->packed_b);
            gemm_row_panels(p, kb, block_range, p->packed_b, next_b_block(p, first, from, to, n));
        }
    }
}

/* NC columns of c, from `column` on, by threads that pack the panels of b together. */
static void gemm_shared_b(const Gemm *p, int64_t column, int thread, int threads)
{
    const int64_t n = min_int64(NC, p->n - column);
    const int64_t row_panels = (p->m + MR - 1) / MR, column_panels = (n + NR - 1) / NR;
    const int64_t panel = column_panels * thread / threads, end = column_panels * (thread + 1) / threads;
    const int64_t from = column + panel * NR, to = min_int64(column + end * NR, p->n);
    PanelRange range =
        panel_range_of(row_panels, column_panels, row_panels * MR >= column_panels * NR, thread, threads);
    const float *packed_b = p->packed_b + range.column_first * B_PANEL;
    range.column_first += column / NR;
    range.column_last += column / NR;
    for (int64_t first = 0; first < p->k; first += kc_of(p)) {
        const KBlock kb = k_block_of(p, first);
        pack_b(&p->b, first, from, to - from, kb.k, p->packed_b + panel * B_PANEL);
#pragma omp barrier
        gemm_row_panels(p, kb, range, packed_b, next_b_block(p, first, from, to, to));
#pragma omp barrier
    }
}

/* Whether c is rounded only after several blocks of k. */
static int defers_rounding(int64_t k, int type, int c_type) { return c_type == BFLOAT16 && k_blocks_of(k, type) > 1; }

/* The number of columns whose panels of b are packed, and whose accumulators are stored, at a time by all threads. */
static int64_t packed_columns(int64_t n, int threads)
{
    const int64_t shared = min_int64(round_up(n, NR), NC), private = threads * PRIVATE_PANELS * NR;
    return shared > private ? shared : private;
}

static int64_t a_workspace_floats(int threads) { return threads * MC_PANELS * A_PANEL; }
static int64_t b_workspace_floats(int64_t n, int threads) { return packed_columns(n, threads) / NR * B_PANEL; }

/* float32 numbers of workspace for a product. */
EXPORT int64_t gemm_workspace_floats(int64_t m, int64_t n, int64_t k, int type, int c_type, int threads)
{
    const int64_t sums = defers_rounding(k, type, c_type) ? min_int64(m, ACC_ROWS) * packed_columns(n, threads) : 0;
    return a_workspace_floats(threads) + b_workspace_floats(n, threads) + sums + LANES;
}

/* Whether this library multiplies matrices of a type. */
EXPORT int supports_gemm(int type) { return KERNELS[type][0][0][0] != 0; }

/* float32 numbers of a vector register that this library was compiled for. */
EXPORT int lanes(void) { return LANES; }

/* Bytes of the SVE vectors that this library was compiled for, or 0 if it runs with any: asked before anything else. */
EXPORT int sve_vector_bytes(void)
{
#ifdef __ARM_FEATURE_SVE_BITS
    return __ARM_FEATURE_SVE_BITS / 8;
#else
    return 0;
#endif
}

/* c [m, n] = or += a [m, k] b [k, n] + bias [n]. Rows or columns of a and of b are contiguous, and the rows of c. The
   bias is float32. c is float32, or bfloat16 if a and b are, and then it is not accumulated into. */
EXPORT void gemm(const void *a, int64_t a_row, int64_t a_column, const void *b, int64_t b_row, int64_t b_column,
                 int type, const float *bias, void *c, int64_t c_row, int c_type, int accumulates, int64_t m, int64_t n,
                 int64_t k, float *work, int threads)
{
    const int64_t size = type == BFLOAT16 ? 2 : 4, c_size = c_type == BFLOAT16 ? 2 : 4;
    const int defers = defers_rounding(k, type, c_type);
    const int64_t step = defers ? ACC_ROWS : m;
    float *packed_a = (float *)round_up((int64_t)work, 4 * LANES), *packed_b = packed_a + a_workspace_floats(threads);
    float *sums = defers ? packed_b + b_workspace_floats(n, threads) : 0;
#pragma omp parallel num_threads(threads)
    for (int64_t row = 0; row < m; row += step) {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
        const Matrix local_a = {(const char *)a + row * a_row * size, a_row, a_column, size};
        const Matrix local_b = {b, b_row, b_column, size};
        void *local_c = (char *)c + row * c_row * c_size;
        Gemm p = {local_a, local_b,     min_int64(step, m - row),      n,    k, bias,     local_c, c_row, type,
                  c_type,  accumulates, is_packed_layout(&local_a, k), sums, 0, packed_a, packed_b};
        p.packed_a += thread * MC_PANELS * A_PANEL;
        if (p.a_in_place) {
            p.packed_b += thread * PRIVATE_PANELS * B_PANEL;
            p.sums_row = PRIVATE_PANELS * NR;
            if (defers) p.sums += thread * min_int64(m, ACC_ROWS) * p.sums_row;
            gemm_private_b(&p, panel_range_of((p.m + MR - 1) / MR, (n + NR - 1) / NR, 0, thread, team));
            continue;
        }
        p.sums_row = min_int64(round_up(n, NR), NC);
        for (int64_t column = 0; column < n; column += NC) gemm_shared_b(&p, column, thread, team);
    }
}

/* Products of two matrices with float32 sums: of float32 numbers, and of pairs of bfloat16 numbers on processors that
   multiply these, whose sums may be rounded in the end.

   As Goto and van de Geijn do (Anatomy of high-performance matrix multiplication, 2008), blocks of both sides are copied
   ("packed") into the order in which they are read. A tile of ROWS x COLUMNS sums stays in registers while its panels
   pass by: the left one [depth, ROWS], most often out of the first cache, and the right one [depth, COLUMNS] out of the
   second, which holds a GROUP of left panels and a STRIP of right ones. DEPTH is so large that the left panel almost
   fills the first cache, since to load and store the sums costs more.

   A left side whose rows are without gaps is not packed but read where it lies, and each thread packs right panels of its
   own columns. Else all threads pack right panels together, and each the left panels of its own rows: what one thread has
   written is slow to read, or to write, for another that shares no cache with it. What is packed next comes out of memory,
   which takes longer than the packing: tiles ask for it, a cache line at a time, since their own panels would have to wait
   behind many.

   What is multiplied is a unit of 32 bits: a float32 number, or two bfloat16 numbers that are neighbours along the
   inner dimension. Either is copied as a float. Each sum has the same order by any number of threads. */
#include "progress.h"

#if ATTENTION_MR == 12 /* 32 registers */
#define MR 8
#else
#define MR 4
#endif
#define NR_VECTORS 3
#define NR (NR_VECTORS * LANES)
#define KC 768 /* units */
#define JR_PANELS 2                      /* right panels of that depth; of a smaller one twice as many */
#define MC_PANELS 16                     /* left panels */
#define NC (64 * NR) /* whose right panels are packed at one time */
#define ACC_ROWS (128 * MR)      /* of sums that are rounded only after some passes: they stay near */
#define PRIVATE_PANELS 16                /* right panels that a thread packs at one time, alone */
#define PREFETCH_INTERVAL 32                     /* units of a tile, for each of which something is asked for */
#define CACHE_LINE 64                      /* bytes of a cache line */
#define PREFETCH_ROWS 8                      /* rows, of which what comes next is asked for while one is packed */
/* from one panel to the next: not a multiple of a page, or all would fall into the same few places of a cache */
#define A_PANEL (MR * KC + LANES)
#define B_PANEL (NR * KC + LANES)

typedef struct {
    const char *x;
    int64_t row_stride, column_stride, item_size; /* distances of neighbours in elements, one of which is 1, and bytes of an element */
} Matrix;

INLINE const void *element(const Matrix *s, int64_t row, int64_t column)
{
    return s->x + (row * s->row_stride + column * s->column_stride) * s->item_size;
}

/* ---- Packing */

/* units of a row: `count` elements, and zeros behind them */
INLINE void copy_padded(const void *x, int64_t count, int64_t size, float *to, int64_t units)
{
    memcpy(to, x, count * size);
    memset((char *)to + count * size, 0, units * sizeof *to - count * size);
}

/* Pairs of the numbers of two rows, the second one zeros where there is none. */
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

/* `count` elements that are neighbours across the inner dimension, of its unit `j`; of [k] elements along it. */
INLINE void pack_unit(const char *x, int64_t stride, int64_t size, int64_t j, int64_t k, const int64_t count, float *to)
{
    if (size == 4) {
        memcpy(to, x + j * stride * 4, count * 4);
        return;
    }
    const uint16_t *low = (const uint16_t *)x + 2 * j * stride;
    interleave_pairs(low, 2 * j + 1 < k ? low + stride : 0, count, to);
}

/* Panels of `width` that are neighbours: [panels, units, width], `panel` apart; zeros behind the last of `count`. */
INLINE void pack_panels(const char *x, int64_t stride, int64_t size, int64_t k, int64_t count, const int64_t width, float *to,
                int64_t panel)
{
    const int64_t units = size == 4 ? k : (k + 1) / 2, in_unit = size == 4 ? 1 : 2;
    const int64_t full_kernel = count / width, rest = count % width;
    for (int64_t j = 0; j < units; j++) {
        for (int64_t row = in_unit * (j + PREFETCH_ROWS); row < min_int64(in_unit * (j + PREFETCH_ROWS + 1), k); row++)
            for (int64_t byte = 0; byte < count * size; byte += 64) __builtin_prefetch(x + row * stride * size + byte);
        for (int64_t p = 0; p < full_kernel; p++)
            pack_unit(x + p * width * size, stride, size, j, k, width, to + p * panel + j * width);
        if (rest) {
            float *last = to + full_kernel * panel + j * width;
            pack_unit(x + full_kernel * width * size, stride, size, j, k, rest, last);
            memset(last + rest, 0, (width - rest) * sizeof *last);
        }
    }
}

/* Whether rows of a left side of [k] elements can be read where they lie: they consist of whole units. */
INLINE int is_packed_layout(const Matrix *a, int64_t k)
{
    return a->column_stride == 1 && (int64_t)a->x % 4 == 0 && a->row_stride * a->item_size % 4 == 0 && k * a->item_size % 4 == 0;
}

/* Left panels of `count` rows from `row` on, of [k] elements from `column` on; if the rows lie ready only the last one,
   where rows are missing. */
static void pack_a(const Matrix *a, int a_in_place, int64_t row, int64_t column, int64_t count, int64_t k, float *to)
{
    const int64_t units = a->item_size == 4 ? k : (k + 1) / 2;
    if (a->column_stride != 1) {
        pack_panels(element(a, row, column), a->column_stride, a->item_size, k, count, MR, to, A_PANEL);
        return;
    }
    for (int64_t i = a_in_place ? count / MR * MR : 0; i < round_up(count, MR); i++) {
        float *its = to + i / MR * A_PANEL + i % MR * KC;
        if (i < count)
            copy_padded(element(a, row + i, column), k, a->item_size, its, units);
        else
            memset(its, 0, units * sizeof *its);
    }
}

/* [LANES] rows of LANES numbers, turned. */
INLINE void transpose(vec *x)
{
#if LANES == 16 && !defined(__clang__) /* which has no such shuffle */
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
            const vec one = x[i], other = x[i + step];
            x[i] = __builtin_shuffle(one, other, low);
            x[i + step] = __builtin_shuffle(one, other, high);
        }
    }
#else
    float y[LANES][LANES];
    memcpy(y, x, sizeof y);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) x[i][j] = y[j][i];
#endif
}

/* A right panel [units, COLUMNS] of `count` columns that are rows in memory, from `column` on. */
static void pack_b_transposed(const Matrix *b, int64_t row, int64_t column, int64_t count, int64_t k, float *to)
{
    const int64_t units = b->item_size == 4 ? k : (k + 1) / 2;
    float rows[LANES][KC + LANES]; /* whose cache lines do not all fall into the same few places */
    for (int64_t first = 0; first < NR; first += LANES) {
        for (int64_t i = 0; i < LANES; i++) {
            if (first + i < count)
                copy_padded(element(b, row, column + first + i), k, b->item_size, rows[i], units);
            else
                memset(rows[i], 0, units * sizeof(float));
        }
        for (int64_t j = 0; j < units; j += LANES) { /* behind the last unit is room in `rows` */
            vec block[LANES];
            for (int i = 0; i < LANES; i++) block[i] = *(const unaligned_vec *)(rows[i] + j);
            transpose(block);
            const int64_t candidate = min_int64(LANES, units - j);
            for (int i = 0; i < candidate; i++) *(unaligned_vec *)(to + (j + i) * NR + first) = block[i];
        }
    }
}

/* Right panels of `count` columns from `column` on, of [k] elements from `row` on. */
static void pack_b(const Matrix *b, int64_t row, int64_t column, int64_t count, int64_t k, float *to)
{
    if (b->column_stride == 1)
        pack_panels(element(b, row, column), b->row_stride, b->item_size, k, count, NR, to, B_PANEL);
    else
        for (int64_t j = 0; j < count; j += NR)
            pack_b_transposed(b, row, column + j, min_int64(NR, count - j), k, to + j / NR * B_PANEL);
}

/* ---- Tiles */

/* sum[lane] += the unit x times y's unit of the lane */
INLINE vec multiply_add(vec sum, float x, vec y, const int type)
{
#ifdef HAS_BF16_DOT
    if (type == BFLOAT16) return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(x), (__m512bh)y);
#endif
    (void)type;
    return sum + x * y;
}

/* Sums in float32, and the numbers that they are rounded to if they are, both at a tile's place. */
typedef struct {
    float *sums;
    int64_t sums_stride; /* from one row to the next */
    uint16_t *rounded;
    int64_t rounded_stride;
} OutputTile;

/* What is packed next: `rows` of `bytes` in memory, `stride` apart, of the first of which `at` have been asked for. */
typedef struct {
    const char *row;
    int64_t rows, stride, bytes, offset;
} Prefetch;

INLINE Prefetch prefetch_of(const Matrix *side, int64_t row, int64_t column, int64_t rows, int64_t columns)
{
    const int by_rows = side->column_stride == 1;
    if (rows <= 0 || columns <= 0) return (Prefetch){0};
    return (Prefetch){element(side, row, column), by_rows ? rows : columns, (by_rows ? side->row_stride : side->column_stride) * side->item_size,
                  (by_rows ? columns : rows) * side->item_size, 0};
}

/* Ask for one more cache line. */
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

/* A tile's sums become, or get added, the product of a left panel (where unit (i, j) is at i a_row + j a_column) and a
   right one of `units`, and `start`, if there is one. With `rounds` they are not stored but rounded. */
INLINE void micro_kernel(const int type, const int rounds, const int accumulates, int64_t units, const float *a, const int64_t a_row,
                 const int64_t a_column, const float *b, const float *start, OutputTile c, Prefetch *next)
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
            vec right[NR_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < NR_VECTORS; v++) right[v] = *(const unaligned_vec *)(b + j * NR + v * LANES);
#pragma GCC unroll 16
            for (int i = 0; i < MR; i++) {
                const float left = a[i * a_row + j * a_column];
#pragma GCC unroll 4
                for (int v = 0; v < NR_VECTORS; v++) sums[i][v] = multiply_add(sums[i][v], left, right[v], type);
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

typedef void MicroKernel(int64_t units, const float *a, int64_t a_row, const float *b, const float *start, OutputTile c, Prefetch *next);

#define MICRO_KERNEL(name, type, rounds, accumulates, a_row, a_column)                                                                   \
    static void name(int64_t units, const float *a, int64_t row, const float *b, const float *start, OutputTile c, Prefetch *next) \
    {                                                                                                                     \
        (void)row;                                                                                                        \
        micro_kernel(type, rounds, accumulates, units, a, a_row, a_column, b, start, c, next);                                           \
    }
#define MICRO_KERNELS(name, type, rounds)                                                                                      \
    MICRO_KERNEL(set_rows_##name, type, rounds, 0, row, 1)                                                                        \
    MICRO_KERNEL(set_columns_##name, type, rounds, 0, 1, MR)                                                                    \
    MICRO_KERNEL(add_rows_##name, type, rounds, 1, row, 1)                                                                        \
    MICRO_KERNEL(add_columns_##name, type, rounds, 1, 1, MR)
#define KERNEL_NAMES(name) {{set_rows_##name, set_columns_##name}, {add_rows_##name, add_columns_##name}}
MICRO_KERNELS(32, FLOAT32, 0)
#ifdef HAS_BF16_DOT
MICRO_KERNELS(16, BFLOAT16, 0)
MICRO_KERNELS(16_rounded, BFLOAT16, 1)
#endif
/* [type][whether they round][whether they add][whether columns of the left panel are without gaps: else its rows are,
   `row` apart] */
static MicroKernel *const KERNELS[2][2][2][2] = {
    {KERNEL_NAMES(32)},
#ifdef HAS_BF16_DOT
    {KERNEL_NAMES(16), KERNEL_NAMES(16_rounded)},
#endif
};

/* ---- Products */

typedef struct {
    Matrix a, b;
    int64_t m, n, k;
    const float *bias;
    void *c;
    int64_t c_row;
    int type, c_type, accumulates, a_in_place; /* whether rows of the left side lie ready */
    float *sums; /* of c that is rounded only after some passes, a number for each of [m, some columns] */
    int64_t sums_row;
    float *packed_a, *packed_b; /* packed panels */
} Gemm;

/* Rows and columns of c, in panels. */
typedef struct {
    int64_t first, last, column_first, column_last;
} PanelRange;

/* Of the inner dimension: elements [first, first + k). */
typedef struct {
    int64_t first, k, units;
    int accumulates, rounds;
} KBlock;

/* Threads for rows, of all: so that the one with the most tiles has as few as can be; else for rows rather than for
   columns or not. */
static int row_threads(int64_t rows, int64_t columns, int prefer_rows, int threads)
{
    int64_t fewest = INT64_MAX;
    int best = 1;
    for (int candidate = 1; candidate <= threads; candidate++) {
        if (threads % candidate) continue;
        const int64_t column_count = threads / candidate, most = (rows + candidate - 1) / candidate * ((columns + column_count - 1) / column_count);
        if (prefer_rows ? most <= fewest : most < fewest) {
            fewest = most;
            best = candidate;
        }
    }
    return best;
}

/* A thread's part of panels. */
static PanelRange panel_range_of(int64_t rows, int64_t columns, int prefer_rows, int thread, int threads)
{
    const int by_rows = row_threads(rows, columns, prefer_rows, threads), by_columns = threads / by_rows;
    const int row = thread % by_rows, column = thread / by_rows;
    return (PanelRange){rows * row / by_rows, rows * (row + 1) / by_rows, columns * column / by_columns,
                  columns * (column + 1) / by_columns};
}

/* A tile of which c has not all rows or columns. (Denormal numbers are rounded to bfloat16 here, flushed in others.) */
static void edge_kernel(MicroKernel *kernel_without_sums, int64_t rows, int64_t columns, int rounds, int accumulates, int64_t units, const float *a,
                         int64_t a_row, const float *b, const float *start, OutputTile c, Prefetch *next)
{
    float sums[MR * NR];
    kernel_without_sums(units, a, a_row, b, start, (OutputTile){sums, NR, 0, 0}, next);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            const float its = sums[i * NR + j], total = accumulates ? c.sums[i * c.sums_stride + j] + its : its;
            if (rounds)
                c.rounded[i * c.rounded_stride + j] = to_bfloat16(total);
            else
                c.sums[i * c.sums_stride + j] = total;
        }
}

/* The tile at (row, column). */
INLINE OutputTile output_tile(const Gemm *p, int64_t row, int64_t column)
{
    if (p->c_type == FLOAT32) return (OutputTile){(float *)p->c + row * p->c_row + column, p->c_row, 0, 0};
    float *sums = p->sums ? p->sums + row * p->sums_row + column % p->sums_row : 0;
    return (OutputTile){sums, p->sums_row, (uint16_t *)p->c + row * p->c_row + column, p->c_row};
}

/* Panels [first, last) of columns of c, at most 2 STRIP, by panels of rows [row, end): `left` is the first of those that
   are packed, `right` the first panel of the strip. */
static void macro_kernel(const Gemm *p, KBlock kb, const float *left, int64_t row, int64_t end, const float *right,
                           int64_t first, int64_t last, Prefetch *a_next, Prefetch *b_next)
{
    const int has_bias = p->bias && kb.first == 0, of_columns = p->a.column_stride != 1;
    MicroKernel *full_kernel = KERNELS[p->type][kb.rounds][kb.accumulates][of_columns], *kernel_without_sums = KERNELS[p->type][0][0][of_columns];
    float starts[2 * JR_PANELS * NR] = {0.0f};
    if (has_bias)
        memcpy(starts, p->bias + first * NR,
               min_int64((last - first) * NR, p->n - first * NR) * sizeof *starts);
    for (int64_t i = row; i < end; i++) {
        const int64_t rows = p->m - i * MR;
        const int in_place = p->a_in_place && rows >= MR;
        const float *a = in_place ? element(&p->a, i * MR, kb.first) : left + (i - row) * A_PANEL;
        const int64_t a_row = in_place ? p->a.row_stride * p->a.item_size / 4 : KC;
        for (int64_t j = first; j < last; j++) {
            const int64_t columns = p->n - j * NR;
            const float *b = right + (j - first) * B_PANEL, *start = has_bias ? starts + (j - first) * NR : 0;
            const OutputTile c = output_tile(p, i * MR, j * NR);
            Prefetch *next = a_next->rows > 0 ? a_next : b_next;
            if (rows >= MR && columns >= NR)
                full_kernel(kb.units, a, a_row, b, start, c, next);
            else
                edge_kernel(kernel_without_sums, min_int64(MR, rows), min_int64(NR, columns), kb.rounds, kb.accumulates, kb.units, a,
                             a_row, b, start, c, next);
        }
    }
}

/* Over the inner dimension. */
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

/* What is packed of the right side after a pass, of a thread's columns [from, to) and those up to `end`. */
INLINE Prefetch next_b_block(const Gemm *p, int64_t first, int64_t from, int64_t to, int64_t end)
{
    const int64_t next = first + kc_of(p), width = min_int64(to - from, end - to);
    if (next < p->k) return prefetch_of(&p->b, next, from, min_int64(kc_of(p), p->k - next), to - from);
    return prefetch_of(&p->b, 0, to, min_int64(kc_of(p), p->k), width);
}

/* Panels [part.column_first, part.column_last) of columns: groups of left panels one after the other, packed where their
   rows do not lie ready. `right` is the first of the right panels. */
static void gemm_row_panels(const Gemm *p, KBlock kb, PanelRange range, const float *right, Prefetch b_next)
{
    const int64_t most = jr_panels_of(kb), panels = range.column_last - range.column_first;
    for (int64_t panel_group = range.first; panel_group < range.last; panel_group += MC_PANELS) {
        const int64_t last = min_int64(panel_group + MC_PANELS, range.last), row = panel_group * MR, end = min_int64(last * MR, p->m);
        const int64_t next_end = min_int64(min_int64(last + MC_PANELS, range.last) * MR, p->m);
        Prefetch a_next = {0};
        pack_a(&p->a, p->a_in_place, row, kb.first, end - row, kb.k, p->packed_a);
        if (!p->a_in_place) a_next = prefetch_of(&p->a, end, kb.first, next_end - end, kb.k);
        for (int64_t jr = 0; jr < panels; jr += most) {
            poll_mpi();
            macro_kernel(p, kb, p->packed_a, panel_group, last, right + jr * B_PANEL, range.column_first + jr,
                           range.column_first + min_int64(jr + most, panels), &a_next, &b_next);
        }
    }
}

/* By a thread that packs the right panels of its own columns. */
static void gemm_private_b(const Gemm *p, PanelRange range)
{
    const int64_t n = min_int64(range.column_last * NR, p->n);
    for (int64_t block = range.column_first; block < range.column_last; block += PRIVATE_PANELS) {
        const int64_t end = min_int64(block + PRIVATE_PANELS, range.column_last);
        const int64_t from = block * NR, to = min_int64(end * NR, n);
        const PanelRange its = {range.first, range.last, block, end};
        for (int64_t first = 0; first < p->k; first += kc_of(p)) {
            const KBlock kb = k_block_of(p, first);
            pack_b(&p->b, first, from, to - from, kb.k, p->packed_b);
            gemm_row_panels(p, kb, its, p->packed_b, next_b_block(p, first, from, to, n));
        }
    }
}

/* A block of columns of c, from `column` on, by threads that pack right panels together. */
static void gemm_shared_b(const Gemm *p, int64_t column, int thread, int threads)
{
    const int64_t n = min_int64(NC, p->n - column);
    const int64_t row_panels = (p->m + MR - 1) / MR, column_panels = (n + NR - 1) / NR;
    const int64_t panel = column_panels * thread / threads, end = column_panels * (thread + 1) / threads;
    const int64_t from = column + panel * NR, to = min_int64(column + end * NR, p->n);
    PanelRange range = panel_range_of(row_panels, column_panels, row_panels * MR >= column_panels * NR, thread, threads);
    const float *right = p->packed_b + range.column_first * B_PANEL;
    range.column_first += column / NR;
    range.column_last += column / NR;
    for (int64_t first = 0; first < p->k; first += kc_of(p)) {
        const KBlock kb = k_block_of(p, first);
        pack_b(&p->b, first, from, to - from, kb.k, p->packed_b + panel * B_PANEL);
#pragma omp barrier
        gemm_row_panels(p, kb, range, right, next_b_block(p, first, from, to, to));
#pragma omp barrier
    }
}

/* Whether c is rounded only after some passes. */
static int defers_rounding(int64_t k, int type, int c_type) { return c_type == BFLOAT16 && k_blocks_of(k, type) > 1; }

/* Columns of a block of which sums are kept, and right panels packed, at one time; all threads'. */
static int64_t packed_columns(int64_t n, int threads)
{
    const int64_t together = min_int64(round_up(n, NR), NC), alone = threads * PRIVATE_PANELS * NR;
    return together > alone ? together : alone;
}

static int64_t a_workspace_floats(int threads) { return threads * MC_PANELS * A_PANEL; }
static int64_t b_workspace_floats(int64_t n, int threads) { return packed_columns(n, threads) / NR * B_PANEL; }

/* Of memory that a product needs. */
EXPORT int64_t gemm_workspace_floats(int64_t m, int64_t n, int64_t k, int type, int c_type, int threads)
{
    const int64_t sums = defers_rounding(k, type, c_type) ? min_int64(m, ACC_ROWS) * packed_columns(n, threads) : 0;
    return a_workspace_floats(threads) + b_workspace_floats(n, threads) + sums + LANES;
}

/* Whether matrices of this type are multiplied. */
EXPORT int supports_gemm(int type) { return KERNELS[type][0][0][0] != 0; }

/* Numbers of a vector that it was compiled for. */
EXPORT int lanes(void) { return LANES; }

/* c [m, n] = or += a [m, k] b [k, n] + bias [n]. Of each side either rows or columns are without gaps, of c rows. The
   bias is float32; c too, or it is bfloat16 as both sides are, and nothing is added to it. */
EXPORT void gemm(const void *a, int64_t a_row, int64_t a_column, const void *b, int64_t b_row, int64_t b_column,
                     int type, const float *bias, void *c, int64_t c_row, int c_type, int accumulates, int64_t m, int64_t n,
                     int64_t k, float *work, int threads)
{
    const int64_t size = type == BFLOAT16 ? 2 : 4, c_size = c_type == BFLOAT16 ? 2 : 4;
    const int defers = defers_rounding(k, type, c_type);
    const int64_t step = defers ? ACC_ROWS : m;
    float *left = (float *)round_up((int64_t)work, 4 * LANES), *right = left + a_workspace_floats(threads);
    float *sums = defers ? right + b_workspace_floats(n, threads) : 0;
#pragma omp parallel num_threads(threads)
    for (int64_t row = 0; row < m; row += step) {
        const int thread = omp_get_thread_num(), total = omp_get_num_threads();
        const Matrix local_a = {(const char *)a + row * a_row * size, a_row, a_column, size};
        const Matrix local_b = {b, b_row, b_column, size};
        void *local_c = (char *)c + row * c_row * c_size;
        Gemm p = {local_a, local_b,  min_int64(step, m - row), n,    k, bias, local_c, c_row, type,
                     c_type, accumulates, is_packed_layout(&local_a, k),  sums, 0, left, right};
        p.packed_a += thread * MC_PANELS * A_PANEL;
        if (p.a_in_place) {
            p.packed_b += thread * PRIVATE_PANELS * B_PANEL;
            p.sums_row = PRIVATE_PANELS * NR;
            if (defers) p.sums += thread * min_int64(m, ACC_ROWS) * p.sums_row;
            gemm_private_b(&p, panel_range_of((p.m + MR - 1) / MR, (n + NR - 1) / NR, 0, thread, total));
            continue;
        }
        p.sums_row = min_int64(round_up(n, NR), NC);
        for (int64_t column = 0; column < n; column += NC) gemm_shared_b(&p, column, thread, total);
    }
}

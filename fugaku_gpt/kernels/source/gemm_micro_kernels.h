/* Micro-kernels of GEMM. */
#ifndef FUGAKU_GPT_KERNELS_GEMM_MICRO_KERNELS_H
#define FUGAKU_GPT_KERNELS_GEMM_MICRO_KERNELS_H

#include "gemm_packing.h"

/* Arm has 32 registers, of which 24 hold sums and 3 or more a row of b. GCC 12 and 14 would load later units early, and
   spill: this keeps instructions in the order of the source. By the model of LLVM 19, A64FX then reaches 99 % of its
   peak, and so do Neoverse V1 and V2. */
#if defined(__aarch64__) && !defined(__clang__)
#define KEEP_ORDER __asm__ volatile("")
#else
#define KEEP_ORDER ((void)0)
#endif
#if defined(HAS_SVE_MICRO_KERNELS) && !defined(__clang__)
#define MULTIPLIES_PAIRS_OF_UNITS 1
#endif

/* sum[lane] += x * y[lane], in units. */
INLINE vec multiply_add(vec sum, float x, vec y, const int type)
{
#ifdef HAS_BF16_DOT
    if (type == BFLOAT16) return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(x), (__m512bh)y);
#endif
    (void)type;
#ifdef MULTIPLIES_PAIRS_OF_UNITS
    /* by name: GCC may choose the instruction that overwrites x instead, and then moves and spills sums */
    __asm__("fmla %0.s, %1/m, %2.s, %3.s" : "+w"(sum) : "Upl"(svptrue_b32()), "w"(svdup_n_f32(x)), "w"(y));
    return sum;
#else
    return sum + x * y;
#endif
}

/* Stores numbers rounded to bfloat16. */
INLINE void store_rounded(uint16_t *to, vec x)
{
#if defined(HAS_BF16_MATRIX_PRODUCTS) && defined(HAS_SVE_MICRO_KERNELS)
    const svbool_t all = svptrue_b32();
    svst1h_u32(all, to, svreinterpret_u32_bf16(svcvt_bf16_f32_x(all, (sve_vec)x)));
#elif defined(HAS_BF16_MATRIX_PRODUCTS)
    vst1_bf16((bfloat16_t *)to, vcvt_bf16_f32(x));
#else
    store_bfloat16(to, x);
#endif
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

/* Vectors of a row of c between those that are prefetched: all, or the first and the last, between which are no lines. */
#define C_PREFETCH_STEP (4 * NR <= CACHE_LINE ? NR_VECTORS - 1 : 1)

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

#ifdef MULTIPLIES_PAIRS_OF_UNITS
/* Adds the products of units [j, end) of a panel of a, whose unit (i, j) is at i a_row + j a_column, and a panel of b,
   two at a time; returns the unit that is left over, or `end`. One of both strides is a constant 1. */
INLINE int64_t add_pairs_of_units(vec sums[MR][NR_VECTORS], const int type, int64_t j, int64_t end, const float *a,
                                  const int64_t a_row, const int64_t a_column, const float *b)
{
    /* A pointer for each row, from which the compiler does not derive the others: each unit is then loaded into all
       lanes by one instruction, which has no register as an offset. */
    const int pointers = a_column == 1 ? MR : 1;
    const float *rows[MR], *b_unit = b + j * NR;
#pragma GCC unroll 16
    for (int i = 0; i < pointers; i++) rows[i] = a + i * a_row + j * a_column;
    for (; j + 2 <= end; j += 2, b_unit += 2 * NR) {
#pragma GCC unroll 2
        for (int u = 0; u < 2; u++) {
            vec b_row[NR_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < NR_VECTORS; v++) b_row[v] = *(const unaligned_vec *)(b_unit + u * NR + v * LANES);
#pragma GCC unroll 16
            for (int i = 0; i < MR; i++) {
                const float a_unit = pointers == 1 ? rows[0][u * a_column + i] : rows[i][u];
#pragma GCC unroll 4
                for (int v = 0; v < NR_VECTORS; v++) sums[i][v] = multiply_add(sums[i][v], a_unit, b_row[v], type);
                KEEP_ORDER;
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < pointers; i++) {
            rows[i] += 2 * a_column;
            __asm__("" : "+r"(rows[i]));
        }
    }
    return j;
}
#endif

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
            for (int v = 0; v < NR_VECTORS; v += C_PREFETCH_STEP)
                __builtin_prefetch(c.sums + row * c.sums_stride + v * LANES, 1);
        }
        prefetch_next(next);
        const int64_t end = min_int64(first + PREFETCH_INTERVAL, units);
        int64_t begin = first;
#ifdef MULTIPLIES_PAIRS_OF_UNITS
        begin = add_pairs_of_units(sums, type, first, end, a, a_row, a_column, b);
#endif
#pragma GCC unroll 2
        for (int64_t j = begin; j < end; j++) {
            vec b_row[NR_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < NR_VECTORS; v++) b_row[v] = *(const unaligned_vec *)(b + j * NR + v * LANES);
#pragma GCC unroll 16
            for (int i = 0; i < MR; i++) {
                const float a_unit = a[i * a_row + j * a_column];
#pragma GCC unroll 4
                for (int v = 0; v < NR_VECTORS; v++) sums[i][v] = multiply_add(sums[i][v], a_unit, b_row[v], type);
                KEEP_ORDER;
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
                store_rounded(c.rounded + i * c.rounded_stride + v * LANES, total);
            else
                *(unaligned_vec *)(c.sums + i * c.sums_stride + v * LANES) = total;
        }
    }
}

#ifdef HAS_BF16_MATRIX_PRODUCTS
/* A vector of 128-bit segments. */
#ifdef HAS_SVE_MICRO_KERNELS
INLINE vec in_all_segments(const float *x) { return (sve_vec)svld1rq_f32(svptrue_b32(), x); }

/* Adds to each segment, [2, 2], the product of x [2, 4] and the transpose of y [2, 4]. The instruction rounds to odd, and
   denormal numbers are 0 to it. */
INLINE vec multiply_add_matrices(vec sum, vec x, vec y)
{
    return (sve_vec)svbfmmla_f32((sve_vec)sum, svreinterpret_bf16_f32((sve_vec)x), svreinterpret_bf16_f32((sve_vec)y));
}

/* The first rows of all segments of x and y, or the second ones. */
INLINE vec rows_of_segments(vec x, vec y, const int second)
{
    const svfloat64_t u = svreinterpret_f64_f32((sve_vec)x), v = svreinterpret_f64_f32((sve_vec)y);
    return (sve_vec)svreinterpret_f32_f64(second ? svuzp2_f64(u, v) : svuzp1_f64(u, v));
}
#else
INLINE vec in_all_segments(const float *x) { return vld1q_f32(x); }

INLINE vec multiply_add_matrices(vec sum, vec x, vec y)
{
    return vbfmmlaq_f32(sum, vreinterpretq_bf16_f32(x), vreinterpretq_bf16_f32(y));
}

INLINE vec rows_of_segments(vec x, vec y, const int second)
{
    const float64x2_t u = vreinterpretq_f64_f32(x), v = vreinterpretq_f64_f32(y);
    return vreinterpretq_f32_f64(second ? vuzp2q_f64(u, v) : vuzp1q_f64(u, v));
}
#endif

/* As `micro_kernel` for bfloat16 numbers in panels of quads. A sum holds two rows and LANES / 2 columns of c. */
INLINE void matrix_micro_kernel(const int rounds, const int accumulates, int64_t units, const float *a, const float *b,
                                const float *start, OutputTile c, Prefetch *next)
{
    vec sums[MR / 2][2 * NR_VECTORS] = {{{0}}};
    for (int64_t first = 0, row = 0; first < units; first += PREFETCH_INTERVAL, row++) {
        if ((accumulates || !rounds) && row < MR) {
#pragma GCC unroll 4
            for (int v = 0; v < NR_VECTORS; v += C_PREFETCH_STEP)
                __builtin_prefetch(c.sums + row * c.sums_stride + v * LANES, 1);
        }
        prefetch_next(next);
        const int64_t end = min_int64(first + PREFETCH_INTERVAL, units);
        for (int64_t j = first; j < end; j += 2) { /* the units of a quad */
            vec a_rows[MR / 2];
#pragma GCC unroll 8
            for (int i = 0; i < MR / 2; i++) a_rows[i] = in_all_segments(a + j * MR + 4 * i);
#pragma GCC unroll 8
            for (int v = 0; v < 2 * NR_VECTORS; v++) {
                const vec b_columns = *(const unaligned_vec *)(b + j * NR + v * LANES);
#pragma GCC unroll 8
                for (int i = 0; i < MR / 2; i++) sums[i][v] = multiply_add_matrices(sums[i][v], a_rows[i], b_columns);
                KEEP_ORDER;
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) {
#pragma GCC unroll 4
        for (int v = 0; v < NR_VECTORS; v++) {
            vec total = rows_of_segments(sums[i / 2][2 * v], sums[i / 2][2 * v + 1], i % 2);
            if (start) total += *(const unaligned_vec *)(start + v * LANES);
            if (accumulates) total += *(const unaligned_vec *)(c.sums + i * c.sums_stride + v * LANES);
            if (rounds)
                store_rounded(c.rounded + i * c.rounded_stride + v * LANES, total);
            else
                *(unaligned_vec *)(c.sums + i * c.sums_stride + v * LANES) = total;
        }
    }
}
#endif

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
#define HAS_BF16_GEMM 1
#elif defined(HAS_BF16_MATRIX_PRODUCTS)
#define MATRIX_MICRO_KERNEL(name, rounds, accumulates)                                                                 \
    static void name(int64_t units, const float *a, int64_t row, const float *b, const float *start, OutputTile c,     \
                     Prefetch *next)                                                                                   \
    {                                                                                                                  \
        (void)row;                                                                                                     \
        matrix_micro_kernel(rounds, accumulates, units, a, b, start, c, next);                                         \
    }
MATRIX_MICRO_KERNEL(set_columns_16, 0, 0)
MATRIX_MICRO_KERNEL(add_columns_16, 0, 1)
MATRIX_MICRO_KERNEL(set_columns_16_rounded, 1, 0)
MATRIX_MICRO_KERNEL(add_columns_16_rounded, 1, 1)
/* a is always packed, the same way whether its rows or columns are contiguous */
#define set_rows_16 set_columns_16
#define add_rows_16 add_columns_16
#define set_rows_16_rounded set_columns_16_rounded
#define add_rows_16_rounded add_columns_16_rounded
#define HAS_BF16_GEMM 1
#endif
/* [type][rounds][accumulates][whether the columns of a panel of a are contiguous; otherwise its rows are, `row` apart] */
static MicroKernel *const KERNELS[2][2][2][2] = {
    {KERNEL_NAMES(32)},
#ifdef HAS_BF16_GEMM
    {KERNEL_NAMES(16), KERNEL_NAMES(16_rounded)},
#endif
};

#endif

/* Micro-kernels of GEMM. */
#ifndef FUGAKU_GPT_KERNELS_GEMM_MICRO_KERNELS_H
#define FUGAKU_GPT_KERNELS_GEMM_MICRO_KERNELS_H

#include "gemm_packing.h"

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

#endif

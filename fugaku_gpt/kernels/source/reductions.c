/* float32 sums of bfloat16 numbers, which are not stored as float32 on the way. */
#include "common.h"

#define ELEMENT_BLOCK 4096
#define COLUMN_BLOCK 128 /* columns that a thread sums at a time: their sums stay in registers */
#define ROW_BLOCK 64     /* rows that are summed before they are added to the rest: fewer roundings */

/* sums[i] += x[i] from `begin` to `end` */
INLINE void add_block(float *restrict sums, const uint16_t *restrict x, int64_t begin, int64_t end)
{
#ifdef HAS_SVE
    for (int64_t i = begin; i < end; i += svcntw()) {
        const svbool_t p = svwhilelt_b32_s64(i, end);
        const svfloat32_t sum = svld1_f32(p, sums + i);
        svst1_f32(p, sums + i, svadd_f32_x(svptrue_b32(), sum, load_vector(p, x, i, BFLOAT16)));
    }
#else
#pragma omp simd
    for (int64_t i = begin; i < end; i++) sums[i] += from_bfloat16(x[i]);
#endif
}

/* sums [n] += x [n] */
EXPORT void accumulate(float *restrict sums, const uint16_t *restrict x, int64_t n, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < n; block += ELEMENT_BLOCK) {
        const int64_t end = block + ELEMENT_BLOCK < n ? block + ELEMENT_BLOCK : n;
        add_block(sums, x, block, end);
    }
}

/* sums [count] += rows of x, which are row_stride apart */
INLINE void add_row_block(float *restrict sums, const uint16_t *x, int64_t rows, int64_t row_stride,
                          const int64_t count)
{
#ifdef HAS_SVE
    const svbool_t all = svptrue_b32();
    for (int64_t j = 0; j < count; j += 2 * svcntw()) { /* columns whose sums stay in registers */
        const int64_t k = j + svcntw();
        const svbool_t p = svwhilelt_b32_s64(j, count), q = svwhilelt_b32_s64(k, count);
        svfloat32_t first = svdup_n_f32(0.0f), second = first;
        for (int64_t i = 0; i < rows; i++) {
            first = svadd_f32_x(all, first, load_vector(p, x, i * row_stride + j, BFLOAT16));
            second = svadd_f32_x(all, second, load_vector(q, x, i * row_stride + k, BFLOAT16));
        }
        svst1_f32(p, sums + j, svadd_f32_x(all, svld1_f32(p, sums + j), first));
        svst1_f32(q, sums + k, svadd_f32_x(all, svld1_f32(q, sums + k), second));
    }
#else
    float partial[COLUMN_BLOCK] = {0.0f};
    for (int64_t i = 0; i < rows; i++) {
        const uint16_t *restrict x_row = x + i * row_stride;
#pragma omp simd
        for (int64_t j = 0; j < count; j++) partial[j] += from_bfloat16(x_row[j]);
    }
    for (int64_t j = 0; j < count; j++) sums[j] += partial[j];
#endif
}

/* sums [width] of the rows of x [n, width]; the same for any number of threads. */
EXPORT void sum_of_rows(const uint16_t *x, int64_t n, int64_t width, float *sums, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < width; first += COLUMN_BLOCK) {
        const int64_t count = first + COLUMN_BLOCK < width ? COLUMN_BLOCK : width - first;
        memset(sums + first, 0, count * sizeof *sums);
        for (int64_t i = 0; i < n; i += ROW_BLOCK) {
            const int64_t rows = i + ROW_BLOCK < n ? ROW_BLOCK : n - i;
            if (count == COLUMN_BLOCK) /* a constant for the compiler */
                add_row_block(sums + first, x + i * width + first, rows, width, COLUMN_BLOCK);
            else
                add_row_block(sums + first, x + i * width + first, rows, width, count);
        }
    }
}

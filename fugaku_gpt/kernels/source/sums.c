/* Sums in float32 of numbers in bfloat16, which are not written down in float32 on their way. */
#include "common.h"

#define BLOCK 4096
#define COLUMNS 128 /* that a thread adds up at one time: their sums are registers */
#define ROWS 64     /* whose sums are added up before they are added to the rest: fewer roundings */

/* sums [n] += x [n] */
EXPORT void add_to_sums(float *restrict sums, const uint16_t *restrict x, int64_t n, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < n; block += BLOCK) {
        const int64_t end = block + BLOCK < n ? block + BLOCK : n;
#pragma omp simd
        for (int64_t i = block; i < end; i++) sums[i] += from_bfloat16(x[i]);
    }
}

/* sums [count] += rows of x, which are `row` apart */
INLINE void add_rows(float *restrict sums, const uint16_t *x, int64_t rows, int64_t row, const int64_t count)
{
    float some[COLUMNS] = {0.0f};
    for (int64_t i = 0; i < rows; i++) {
        const uint16_t *restrict its = x + i * row;
#pragma omp simd
        for (int64_t j = 0; j < count; j++) some[j] += from_bfloat16(its[j]);
    }
    for (int64_t j = 0; j < count; j++) sums[j] += some[j];
}

/* sums [width] of the rows of x [n, width]; the same by any number of threads. */
EXPORT void sum_of_rows(const uint16_t *x, int64_t n, int64_t width, float *sums, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < width; first += COLUMNS) {
        const int64_t count = first + COLUMNS < width ? COLUMNS : width - first;
        memset(sums + first, 0, count * sizeof *sums);
        for (int64_t i = 0; i < n; i += ROWS) {
            const int64_t rows = i + ROWS < n ? ROWS : n - i;
            if (count == COLUMNS) /* a number that the compiler knows */
                add_rows(sums + first, x + i * width + first, rows, width, COLUMNS);
            else
                add_rows(sums + first, x + i * width + first, rows, width, count);
        }
    }
}

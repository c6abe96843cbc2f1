/* What one core does per second, for `doctor node`: bytes of memory, cycles, multiply-adds. */
#include "common.h"

#define CHAIN 32
#define ACCUMULATORS (2 * ATTENTION_MR) /* more than two pipes of 9 cycles need, and fewer than there are registers */

/* z = x + factor y, `passes` times: 12 bytes an element, and 4 more where a store reads its line first. */
EXPORT void triad(const float *restrict x, const float *restrict y, float *restrict z, int64_t n, float factor,
                  int64_t passes)
{
    for (int64_t pass = 0; pass < passes; pass++) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) z[i] = x[i] + factor * y[i];
        __asm__ volatile("" ::: "memory"); /* the next pass is not the same to the compiler */
    }
}

/* CHAIN `steps` additions of integers, each of which waits for the one before: a cycle each. Returns their number. */
EXPORT int64_t chained_additions(int64_t steps)
{
    int64_t sum = 0, one = 1;
    __asm__ volatile("" : "+r"(one));
    for (int64_t step = 0; step < steps; step++) {
#pragma GCC unroll 32
        for (int i = 0; i < CHAIN; i++) {
            sum += one;
            __asm__ volatile("" : "+r"(sum));
        }
    }
    return sum;
}

/* `steps` times a multiply-add of each of some registers, which do not wait for each other. Returns the operations, a
   multiplication and an addition each counted; `result` gets a number that depends on all of them. */
EXPORT int64_t multiply_adds(int64_t steps, float factor, float *result)
{
    vec sums[ACCUMULATORS], x = {0}, y = {0};
    x += factor;
    y += 1.0f - factor;
#pragma GCC unroll 24
    for (int i = 0; i < ACCUMULATORS; i++) sums[i] = y * (float)i;
    for (int64_t step = 0; step < steps; step++) {
#pragma GCC unroll 24
        for (int i = 0; i < ACCUMULATORS; i++) sums[i] = sums[i] * x + y;
    }
    float total = 0.0f;
    for (int i = 0; i < ACCUMULATORS; i++)
        for (int lane = 0; lane < LANES; lane++) total += sums[i][lane];
    *result = total;
    return steps * ACCUMULATORS * LANES * 2;
}

/* Rows of logits: the logarithms of their sums of exponentials, and the gradients of the cross-entropy by them. A row is
   gone through several times while it lies in the core's own cache. */
#include "common.h"

#include <float.h>
#include <math.h>

#define LOG2_E 1.44269504088896341f
#define SOME 1024 /* columns whose float32 sum is added up in float64 */

static float largest_of(const void *x, int64_t at, int64_t columns, int type)
{
    float top = -FLT_MAX;
    if (type == BFLOAT16) {
        const uint16_t *from = (const uint16_t *)x + at;
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < columns; j++) {
            const float it = from_bfloat16(from[j]);
            top = it > top ? it : top;
        }
    } else {
        const float *from = (const float *)x + at;
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < columns; j++) top = from[j] > top ? from[j] : top;
    }
    return top;
}

/* The sum of exp(x - top). */
static float exponentials_of(const void *x, int64_t at, int64_t columns, int type, float top)
{
    double whole = 0.0;
    for (int64_t first = 0; first < columns; first += SOME) {
        const int64_t count = columns - first < SOME ? columns - first : SOME;
        float sum = 0.0f;
        if (type == BFLOAT16) {
            const uint16_t *from = (const uint16_t *)x + at + first;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < count; j++) sum += power_of_two((from_bfloat16(from[j]) - top) * LOG2_E);
        } else {
            const float *from = (const float *)x + at + first;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < count; j++) sum += power_of_two((from[j] - top) * LOG2_E);
        }
        whole += sum;
    }
    return (float)whole;
}

/* x = scale exp(x - log_sum) */
static void probabilities(void *x, int64_t at, int64_t columns, int type, float log_sum, float scale)
{
    if (type == BFLOAT16) {
        uint16_t *its = (uint16_t *)x + at;
#pragma omp simd
        for (int64_t j = 0; j < columns; j++)
            its[j] = to_bfloat16(power_of_two((from_bfloat16(its[j]) - log_sum) * LOG2_E) * scale);
    } else {
        float *its = (float *)x + at;
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) its[j] = power_of_two((its[j] - log_sum) * LOG2_E) * scale;
    }
}

/* Of each of n rows of logits, which begin every `row` elements, the largest (-FLT_MAX of none) and the sum of
   exp(logit - largest). */
EXPORT void loss_sums(const void *logits, int64_t n, int64_t columns, int64_t row, int type, float *largest, float *sums,
                      int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        largest[i] = largest_of(logits, i * row, columns, type);
        sums[i] = exponentials_of(logits, i * row, columns, type, largest[i]);
    }
}

/* Logits become scale exp(logit - log_sum), log_sums [n]. */
EXPORT void loss_gradient(void *logits, int64_t n, int64_t columns, int64_t row, int type, const float *log_sums,
                          float scale, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i++) probabilities(logits, i * row, columns, type, log_sums[i], scale);
}

/* Both at once, of rows that are whole: log_sums [n] are written. */
EXPORT void loss_of_whole_rows(void *logits, int64_t n, int64_t columns, int64_t row, int type, float *log_sums,
                               float scale, int wants_gradient, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        const float top = largest_of(logits, i * row, columns, type);
        log_sums[i] = top + logf(exponentials_of(logits, i * row, columns, type, top));
        if (wants_gradient) probabilities(logits, i * row, columns, type, log_sums[i], scale);
    }
}

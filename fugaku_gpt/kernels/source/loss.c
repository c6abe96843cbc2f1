/* Log-sum-exp of rows of logits, and the gradient of the cross-entropy. A row is read several times while it is in the
   core's own cache. */
#include "common.h"

#include <float.h>
#include <math.h>

#define LOG2_E 1.44269504088896341f
#define BLOCK 1024 /* columns with a float32 sum; these sums are added in float64 */

/* Up to BLOCK numbers of a row as float32: where they lie, or widened into a buffer. (GCC 12 and 14 compile a reduction
   over 16-bit numbers wrongly for SVE vectors of fixed length: the second accumulator is read from the first one's
   place.) */
INLINE const float *block_of(const void *x, int64_t at, int64_t count, int type, float *buffer)
{
    if (type != BFLOAT16) return (const float *)x + at;
    load_scaled(x, at, type, 1.0f, buffer, count);
    return buffer;
}

static float row_max(const void *x, int64_t at, int64_t columns, int type)
{
    float max = -FLT_MAX, buffer[BLOCK];
    for (int64_t first = 0; first < columns; first += BLOCK) {
        const int64_t count = min_int64(BLOCK, columns - first);
        const float *from = block_of(x, at + first, count, type, buffer);
#pragma omp simd reduction(max : max)
        for (int64_t j = 0; j < count; j++) max = from[j] > max ? from[j] : max;
    }
    return max;
}

/* The sum of exp(x - max). */
static float row_exp_sum(const void *x, int64_t at, int64_t columns, int type, float max)
{
    double total = 0.0;
    float buffer[BLOCK];
    for (int64_t first = 0; first < columns; first += BLOCK) {
        const int64_t count = min_int64(BLOCK, columns - first);
        const float *from = block_of(x, at + first, count, type, buffer);
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < count; j++) sum += exp2_flushed((from[j] - max) * LOG2_E);
        total += sum;
    }
    return (float)total;
}

/* x = scale exp(x - log_sum) */
static void scaled_softmax_row(void *x, int64_t at, int64_t columns, int type, float log_sum, float scale)
{
    if (type == BFLOAT16) {
        uint16_t *row = (uint16_t *)x + at;
#pragma omp simd
        for (int64_t j = 0; j < columns; j++)
            row[j] = to_bfloat16(exp2_flushed((from_bfloat16(row[j]) - log_sum) * LOG2_E) * scale);
    } else {
        float *row = (float *)x + at;
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) row[j] = exp2_flushed((row[j] - log_sum) * LOG2_E) * scale;
    }
}

/* The maximum of each of n rows of logits, which start every `row` elements (-FLT_MAX for empty rows), and the sum of
   exp(logit - maximum). */
EXPORT void loss_sums(const void *logits, int64_t n, int64_t columns, int64_t row, int type, float *largest,
                      float *sums, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        largest[i] = row_max(logits, i * row, columns, type);
        sums[i] = row_exp_sum(logits, i * row, columns, type, largest[i]);
    }
}

/* Logits become scale exp(logit - log_sum); log_sums [n] are given. */
EXPORT void loss_gradient(void *logits, int64_t n, int64_t columns, int64_t row, int type, const float *log_sums,
                          float scale, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i++) scaled_softmax_row(logits, i * row, columns, type, log_sums[i], scale);
}

/* Both at once, for rows that no other rank shares: writes log_sums [n]. */
EXPORT void loss_full_rows(void *logits, int64_t n, int64_t columns, int64_t row, int type, float *log_sums,
                           float scale, int wants_gradient, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        const float max = row_max(logits, i * row, columns, type);
        log_sums[i] = max + logf(row_exp_sum(logits, i * row, columns, type, max));
        if (wants_gradient) scaled_softmax_row(logits, i * row, columns, type, log_sums[i], scale);
    }
}

/* Log-sum-exp of rows of logits, and the gradient of the cross-entropy. A row is read several times while it is in the
   core's own cache. */
#include "common.h"

#include <float.h>
#include <math.h>

#define LOG2_E 1.44269504088896341f
#define BLOCK 1024 /* columns with a float32 sum; these sums are added in float64 */

#ifdef HAS_SVE
INLINE float sve_row_max(const void *x, int64_t at, int64_t columns, const int type)
{
    const svbool_t all = svptrue_b32();
    const int64_t step = svcntw(), end = at + columns;
    svfloat32_t m0 = svdup_n_f32(-FLT_MAX), m1 = m0, m2 = m0, m3 = m0; /* NaN is not the larger of two numbers */
    for (; at + 4 * step <= end; at += 4 * step) {
        m0 = svmaxnm_f32_x(all, m0, load_vector(all, x, at, type));
        m1 = svmaxnm_f32_x(all, m1, load_vector(all, x, at + step, type));
        m2 = svmaxnm_f32_x(all, m2, load_vector(all, x, at + 2 * step, type));
        m3 = svmaxnm_f32_x(all, m3, load_vector(all, x, at + 3 * step, type));
    }
    for (; at < end; at += step) {
        const svbool_t p = svwhilelt_b32_s64(at, end);
        m0 = svmaxnm_f32_m(p, m0, load_vector(p, x, at, type));
    }
    return svmaxnmv_f32(all, svmaxnm_f32_x(all, svmaxnm_f32_x(all, m0, m1), svmaxnm_f32_x(all, m2, m3)));
}

/* The parts of exp(exponent), which is about 1e-38 below -87.3 or, with `flushes`, 0. NaN stays NaN. */
INLINE svfloat32_t bounded_parts(svfloat32_t exponent, const int flushes, svfloat32_t *rest)
{
    const svbool_t all = svptrue_b32();
    if (!flushes) return exp_parts(svmax_n_f32_x(all, exponent, -87.3f), rest);
    const svfloat32_t power = exp_parts(svmax_n_f32_x(all, exponent, -88.0f), rest);
    return svdup_n_f32_m(power, svcmplt_n_f32(all, exponent, -87.3365448f), 0.0f);
}

INLINE svfloat32_t exp_sum_parts(svbool_t p, const void *x, int64_t at, const int type, float max, const int flushes,
                                  svfloat32_t *rest)
{
    return bounded_parts(svsub_n_f32_x(svptrue_b32(), load_vector(p, x, at, type), max), flushes, rest);
}

/* Adds exp(x - max) to a sum, from its parts; with `keeps` it takes the place of x. */
INLINE svfloat32_t add_exp(svbool_t p, svfloat32_t sum, svfloat32_t power, svfloat32_t rest, void *x, int64_t at,
                           const int type, const int keeps)
{
    const svfloat32_t factor = exp_factor(rest, 1.0f);
    if (!keeps) return svmla_f32_m(p, sum, power, factor);
    const svfloat32_t y = svmul_f32_x(p, power, factor);
    store_vector(p, y, x, at, type);
    return svadd_f32_m(p, sum, y);
}

/* The sum of exp(x - max); with `keeps` these numbers take the place of x. */
INLINE float sve_row_exp_sum(void *x, int64_t at, int64_t columns, const int type, float max, const int keeps)
{
    const svbool_t all = svptrue_b32();
    const int64_t step = svcntw(), end = at + columns;
    double total = 0.0;
    while (at < end) {
        const int64_t last = min_int64(end, at + 2 * BLOCK); /* of two sums */
        svfloat32_t sum = svdup_n_f32(0.0f), second_sum = sum, rest, second_rest;
        if (at + 2 * step <= last) { /* each iteration ends what the one before began */
            svfloat32_t power = exp_sum_parts(all, x, at, type, max, keeps, &rest);
            svfloat32_t second = exp_sum_parts(all, x, at + step, type, max, keeps, &second_rest);
            for (at += 2 * step; at + 2 * step <= last; at += 2 * step) {
                sum = add_exp(all, sum, power, rest, x, at - 2 * step, type, keeps);
                second_sum = add_exp(all, second_sum, second, second_rest, x, at - step, type, keeps);
                power = exp_sum_parts(all, x, at, type, max, keeps, &rest);
                second = exp_sum_parts(all, x, at + step, type, max, keeps, &second_rest);
            }
            sum = add_exp(all, sum, power, rest, x, at - 2 * step, type, keeps);
            second_sum = add_exp(all, second_sum, second, second_rest, x, at - step, type, keeps);
        }
        for (; at < last; at += step) {
            const svbool_t p = svwhilelt_b32_s64(at, last);
            const svfloat32_t power = exp_sum_parts(p, x, at, type, max, keeps, &rest);
            sum = add_exp(p, sum, power, rest, x, at, type, keeps);
        }
        total += svaddv_f32(all, svadd_f32_x(all, sum, second_sum));
        at = last;
    }
    return (float)total;
}

INLINE svfloat32_t softmax_parts(svbool_t p, const void *x, int64_t at, const int type, float log_sum,
                                 svfloat32_t *rest)
{
    const svfloat32_t exponent = svsub_n_f32_x(svptrue_b32(), load_vector(p, x, at, type), log_sum);
    return bounded_parts(svmin_n_f32_x(svptrue_b32(), exponent, 87.0f), 1, rest);
}

INLINE void sve_scaled_softmax_row(void *x, int64_t at, int64_t columns, const int type, float log_sum, float scale)
{
    const svbool_t all = svptrue_b32();
    const int64_t step = svcntw(), end = at + columns;
    svfloat32_t rest, second_rest;
    if (at + 2 * step <= end) {
        svfloat32_t power = softmax_parts(all, x, at, type, log_sum, &rest);
        svfloat32_t second = softmax_parts(all, x, at + step, type, log_sum, &second_rest);
        for (at += 2 * step;; at += 2 * step) {
            const svfloat32_t y = svmul_f32_x(all, power, exp_factor(rest, scale));
            const svfloat32_t second_y = svmul_f32_x(all, second, exp_factor(second_rest, scale));
            store_vectors(y, second_y, x, at - 2 * step, type);
            if (at + 2 * step > end) break;
            power = softmax_parts(all, x, at, type, log_sum, &rest);
            second = softmax_parts(all, x, at + step, type, log_sum, &second_rest);
        }
    }
    for (; at < end; at += step) {
        const svbool_t p = svwhilelt_b32_s64(at, end);
        const svfloat32_t power = softmax_parts(p, x, at, type, log_sum, &rest);
        store_vector(p, svmul_f32_x(all, power, exp_factor(rest, scale)), x, at, type);
    }
}

static float row_max(const void *x, int64_t at, int64_t columns, int type)
{
    return type == BFLOAT16 ? sve_row_max(x, at, columns, BFLOAT16) : sve_row_max(x, at, columns, FLOAT32);
}

/* The sum of exp(x - max). */
static float row_exp_sum(const void *x, int64_t at, int64_t columns, int type, float max)
{
    return type == BFLOAT16 ? sve_row_exp_sum((void *)x, at, columns, BFLOAT16, max, 0)
                            : sve_row_exp_sum((void *)x, at, columns, FLOAT32, max, 0);
}

/* x = scale exp(x - log_sum) */
static void scaled_softmax_row(void *x, int64_t at, int64_t columns, int type, float log_sum, float scale)
{
    if (type == BFLOAT16)
        sve_scaled_softmax_row(x, at, columns, BFLOAT16, log_sum, scale);
    else
        sve_scaled_softmax_row(x, at, columns, FLOAT32, log_sum, scale);
}

/* Returns the logarithm of the sum of exp(x) and makes x its softmax times scale, with one exponential for each. */
static float softmax_row(float *x, int64_t columns, float scale)
{
    const float max = sve_row_max(x, 0, columns, FLOAT32);
    const float sum = sve_row_exp_sum(x, 0, columns, FLOAT32, max, 1), factor = scale / sum;
    for (int64_t j = 0; j < columns; j += svcntw()) {
        const svbool_t p = svwhilelt_b32_s64(j, columns);
        svst1_f32(p, x + j, svmul_n_f32_x(p, svld1_f32(p, x + j), factor));
    }
    return max + logf(sum);
}
#else
/* Up to BLOCK numbers of a row as float32: where they lie, or widened into a buffer. (GCC 12 and 14 compile a reduction
   over 16-bit numbers wrongly for SVE vectors of fixed length: the second accumulator is read from the first one's
   place. That code is not used with SVE where the compiler has its intrinsics.) */
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
#endif

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
#ifdef HAS_SVE
        if (type != BFLOAT16 && wants_gradient) {
            log_sums[i] = softmax_row((float *)logits + i * row, columns, scale);
            continue;
        }
#endif
        const float max = row_max(logits, i * row, columns, type);
        log_sums[i] = max + logf(row_exp_sum(logits, i * row, columns, type, max));
        if (wants_gradient) scaled_softmax_row(logits, i * row, columns, type, log_sums[i], scale);
    }
}

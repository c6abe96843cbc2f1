/* LayerNorm (Ba et al. 2016) over rows, and its gradients; computed in float32. */
#include "common.h"

#include <math.h>

#define ROW_BLOCK                                                                                                      \
    64 /* rows whose gradients of weight and bias are summed before they are added to the rest: fewer roundings */

#ifdef HAS_SVE
#define L1_BYTES 32768 /* of rows that are read again while they are in the L1 cache, with what else is there */
#define MAX_ROWS 4     /* that are normalised together: chains of sums over vectors, roots and divisions overlap */

INLINE svfloat32_t normalized(svbool_t p, const void *x, int64_t at, const int type, const float *weight,
                              const float *bias, float center, float factor)
{
    const svbool_t all = svptrue_b32();
    const svfloat32_t normal = svmul_n_f32_x(all, svsub_n_f32_x(all, load_vector(p, x, at, type), center), factor);
    return svmad_f32_x(all, normal, svld1_f32(p, weight), svld1_f32(p, bias));
}

INLINE void normalize_sve_rows(const void *x, int64_t first, int64_t count, const float *weight, const float *bias,
                               void *y, float *means, float *scales, int64_t width, const int type, float eps)
{
    const svbool_t all = svptrue_b32();
    const int64_t step = svcntw();
    for (int64_t i = first; i < first + count; i++)
        means[i] = vector_sum(x, i * width, width, type, 0.0f, 0) / (float)width;
    for (int64_t i = first; i < first + count; i++)
        scales[i] = 1.0f / sqrtf(vector_sum(x, i * width, width, type, means[i], 1) / (float)width + eps);
    for (int64_t i = first; i < first + count; i++) {
        const float center = means[i], factor = scales[i];
        int64_t j = 0;
        for (; j <= width - 2 * step; j += 2 * step) { /* GCC 12 crashes at j + 2 step <= width */
            const int64_t k = j + step, at = i * width;
            store_vectors(normalized(all, x, at + j, type, weight + j, bias + j, center, factor),
                          normalized(all, x, at + k, type, weight + k, bias + k, center, factor), y, at + j, type);
        }
        for (; j < width; j += step) {
            const svbool_t p = svwhilelt_b32_s64(j, width);
            store_vector(p, normalized(p, x, i * width + j, type, weight + j, bias + j, center, factor), y,
                         i * width + j, type);
        }
    }
}

/* Sums over a row, of two vectors that take turns: of the gradient of its normal numbers, and of that times these. */
typedef struct {
    float sum, projection;
} RowSums;

INLINE svfloat32_t normal_vector(svbool_t p, const void *x, int64_t at, const int type, float mean, float scale)
{
    return svmul_n_f32_x(p, svsub_n_f32_x(p, load_vector(p, x, at, type), mean), scale);
}

/* Adds a vector of a row to its sums, and to those of the gradients of weight and bias. */
INLINE void add_gradients(svbool_t p, svfloat32_t normal, svfloat32_t gradient, svfloat32_t weight,
                          svfloat32_t *weight_sum, svfloat32_t *bias_sum, svfloat32_t *sum, svfloat32_t *projection)
{
    const svfloat32_t weighted = svmul_f32_x(p, gradient, weight);
    *weight_sum = svmla_f32_x(p, *weight_sum, gradient, normal);
    *bias_sum = svadd_f32_x(p, *bias_sum, gradient);
    *sum = svadd_f32_m(p, *sum, weighted);
    *projection = svmla_f32_m(p, *projection, weighted, normal);
}

/* One vector of one row or, with `both`, of the row after it as well. */
INLINE void add_row_gradients(svbool_t p, const void *x, const void *y_grad, int64_t at, int64_t width, const int type,
                              const float *weight, float *weight_sums, float *bias_sums, const float *means,
                              const float *scales, const int both, svfloat32_t *sum, svfloat32_t *projection,
                              svfloat32_t *next_sum, svfloat32_t *next_projection)
{
    const svfloat32_t w = svld1_f32(p, weight);
    svfloat32_t weight_sum = svld1_f32(p, weight_sums), bias_sum = svld1_f32(p, bias_sums);
    add_gradients(p, normal_vector(p, x, at, type, means[0], scales[0]), load_vector(p, y_grad, at, type), w,
                  &weight_sum, &bias_sum, sum, projection);
    if (both)
        add_gradients(p, normal_vector(p, x, at + width, type, means[1], scales[1]),
                      load_vector(p, y_grad, at + width, type), w, &weight_sum, &bias_sum, next_sum, next_projection);
    svst1_f32(p, weight_sums, weight_sum);
    svst1_f32(p, bias_sums, bias_sum);
}

/* Adds the gradients of weight and bias of one row from `at` on, or of two; returns sums over each in `sums`. */
INLINE void sve_parameter_gradients(const void *x, const void *y_grad, int64_t at, const float *weight,
                                    float *weight_sums, float *bias_sums, int64_t width, const int type,
                                    const float *means, const float *scales, const int both, RowSums *sums)
{
    const svbool_t all = svptrue_b32();
    const int64_t step = svcntw();
    svfloat32_t sum = svdup_n_f32(0.0f), projection = sum, next_sum = sum, next_projection = sum;
    int64_t j = 0;
    for (; j + step <= width; j += step)
        add_row_gradients(all, x, y_grad, at + j, width, type, weight + j, weight_sums + j, bias_sums + j, means,
                          scales, both, &sum, &projection, &next_sum, &next_projection);
    if (j < width)
        add_row_gradients(svwhilelt_b32_s64(j, width), x, y_grad, at + j, width, type, weight + j, weight_sums + j,
                          bias_sums + j, means, scales, both, &sum, &projection, &next_sum, &next_projection);
    sums[0] = (RowSums){svaddv_f32(all, sum), svaddv_f32(all, projection)};
    if (both) sums[1] = (RowSums){svaddv_f32(all, next_sum), svaddv_f32(all, next_projection)};
}

/* scale (weight y_grad - mean of that - normal numbers times their mean projection), by three multiply-adds. */
INLINE svfloat32_t input_gradient(svbool_t p, const void *x, const void *y_grad, int64_t at, const int type,
                                  const float *weight, float mean, float scale, float slope, float shift)
{
    const svbool_t all = svptrue_b32();
    const svfloat32_t centered = svsub_n_f32_x(all, load_vector(p, x, at, type), mean);
    const svfloat32_t rest = svmls_n_f32_x(all, svdup_n_f32(shift), centered, slope);
    const svfloat32_t scaled = svmul_n_f32_x(all, load_vector(p, y_grad, at, type), scale);
    return svmla_f32_x(all, rest, scaled, svld1_f32(p, weight));
}

INLINE void sve_input_gradient(const void *x, const void *y_grad, void *x_grad, int64_t at, const float *weight,
                               int64_t width, const int type, float mean, float scale, RowSums sums)
{
    const svbool_t all = svptrue_b32();
    const int64_t step = svcntw();
    const float slope = scale * scale * (sums.projection / (float)width), shift = -scale * (sums.sum / (float)width);
    int64_t j = 0;
    for (; j <= width - 2 * step; j += 2 * step) { /* GCC 12 crashes at j + 2 step <= width */
        const int64_t k = j + step;
        store_vectors(input_gradient(all, x, y_grad, at + j, type, weight + j, mean, scale, slope, shift),
                      input_gradient(all, x, y_grad, at + k, type, weight + k, mean, scale, slope, shift), x_grad,
                      at + j, type);
    }
    for (; j < width; j += step) {
        const svbool_t p = svwhilelt_b32_s64(j, width);
        store_vector(p, input_gradient(p, x, y_grad, at + j, type, weight + j, mean, scale, slope, shift), x_grad,
                     at + j, type);
    }
}

INLINE void sve_gradient_rows(const void *x, const void *y_grad, void *x_grad, int64_t i, const float *weight,
                              float *weight_sums, float *bias_sums, int64_t width, const int type, const float *means,
                              const float *scales, const int both)
{
    RowSums sums[2];
    sve_parameter_gradients(x, y_grad, i * width, weight, weight_sums, bias_sums, width, type, means + i, scales + i,
                            both, sums);
    for (int row = 0; row <= both; row++)
        sve_input_gradient(x, y_grad, x_grad, (i + row) * width, weight, width, type, means[i + row], scales[i + row],
                           sums[row]);
}

/* y = LayerNorm of `count` rows of x from row `first` on; writes their means and scales. */
INLINE void normalize_rows(const void *x, int64_t first, int64_t count, const float *weight, const float *bias, void *y,
                           float *means, float *scales, int64_t width, int type, float eps)
{
    if (type == BFLOAT16)
        normalize_sve_rows(x, first, count, weight, bias, y, means, scales, width, BFLOAT16, eps);
    else
        normalize_sve_rows(x, first, count, weight, bias, y, means, scales, width, FLOAT32, eps);
}

/* x_grad of row i or, with `both`, of the row after it as well; their gradients of weight and bias are added to the
   sums [width]. */
INLINE void gradient_rows(const void *x, const void *y_grad, void *x_grad, int64_t i, const float *weight,
                          float *weight_sums, float *bias_sums, int64_t width, int type, const float *means,
                          const float *scales, const int both)
{
    if (type == BFLOAT16)
        sve_gradient_rows(x, y_grad, x_grad, i, weight, weight_sums, bias_sums, width, BFLOAT16, means, scales, both);
    else
        sve_gradient_rows(x, y_grad, x_grad, i, weight, weight_sums, bias_sums, width, FLOAT32, means, scales, both);
}
#endif

/* y [n, width] = LayerNorm of x, with weight and bias [width]; means and scales (1 / deviation) [n] are for the gradient.
   work: width float32 numbers per thread. */
EXPORT void layer_norm(const void *x, const float *weight, const float *bias, void *y, float *means, float *scales,
                       int64_t n, int64_t width, int type, float eps, float *work, int threads)
{
#ifdef HAS_SVE
    (void)work; /* SVE has no use for it */
    const int64_t fitting = L1_BYTES / (width * (type == BFLOAT16 ? 2 : 4) + 1), rows = min_int64(fitting + 1, MAX_ROWS);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i += rows)
        normalize_rows(x, i, min_int64(rows, n - i), weight, bias, y, means, scales, width, type, eps);
#else
    int64_t thread_count = 0;
#pragma omp parallel num_threads(threads)
    {
        float *row = work + __atomic_fetch_add(&thread_count, 1, __ATOMIC_RELAXED) * width;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n; i++) {
            load_scaled(x, i * width, type, 1.0f, row, width);
            const float mean = row_sum(row, width, 0.0f, 0) / (float)width;
            const float scale = 1.0f / sqrtf(row_sum(row, width, mean, 1) / (float)width + eps);
#pragma omp simd
            for (int64_t j = 0; j < width; j++) row[j] = (row[j] - mean) * scale * weight[j] + bias[j];
            store_scaled(row, 1.0f, y, i * width, type, width);
            means[i] = mean;
            scales[i] = scale;
        }
    }
#endif
}

/* Writes x_grad [n, width], and weight_grad and bias_grad [width], from y_grad. work: 6 width float32 numbers per
   thread. */
EXPORT void layer_norm_gradient(const void *x, const float *weight, const float *means, const float *scales,
                                const void *y_grad, void *x_grad, float *weight_grad, float *bias_grad, int64_t n,
                                int64_t width, int type, float *work, int threads)
{
    /* one partition of the rows per thread, whichever thread takes it: sums are always added in the same order */
    const int64_t rows_per_partition = (n + threads - 1) / threads;
    memset(work, 0, (size_t)(6 * width * threads) * sizeof *work);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t partition = 0; partition < threads; partition++) {
        float *restrict row = work + partition * 6 * width, *restrict grad = row + width;
        float *block_weight_sums = grad + width, *block_bias_sums = block_weight_sums + width,
              *sums = block_bias_sums + width;
        const int64_t end = (partition + 1) * rows_per_partition < n ? (partition + 1) * rows_per_partition : n;
        for (int64_t i = partition * rows_per_partition; i < end; i++) {
#ifdef HAS_SVE
            (void)row;
            if (i + 1 < end) /* a block has an even number of rows */
                gradient_rows(x, y_grad, x_grad, i++, weight, block_weight_sums, block_bias_sums, width, type, means,
                              scales, 1);
            else
                gradient_rows(x, y_grad, x_grad, i, weight, block_weight_sums, block_bias_sums, width, type, means,
                              scales, 0);
#else
            const float mean = means[i], scale = scales[i];
            float sum = 0.0f, projection = 0.0f;
            load_scaled(x, i * width, type, 1.0f, row, width);
            load_scaled(y_grad, i * width, type, 1.0f, grad, width);
#pragma omp simd reduction(+ : sum, projection)
            for (int64_t j = 0; j < width; j++) {
                const float normal = (row[j] - mean) * scale, gradient = grad[j], weighted = gradient * weight[j];
                block_weight_sums[j] += gradient * normal;
                block_bias_sums[j] += gradient;
                row[j] = normal;
                grad[j] = weighted;
                sum += weighted;
                projection += weighted * normal;
            }
            sum /= (float)width;
            projection /= (float)width;
#pragma omp simd
            for (int64_t j = 0; j < width; j++) row[j] = (grad[j] - sum - row[j] * projection) * scale;
            store_scaled(row, 1.0f, x_grad, i * width, type, width);
#endif
            if ((i - partition * rows_per_partition) % ROW_BLOCK == ROW_BLOCK - 1)
                add_and_clear(sums, block_weight_sums, 2 * width);
        }
        add_and_clear(sums, block_weight_sums, 2 * width);
    }
    for (int64_t j = 0; j < width; j++) {
        float of_weight = 0.0f, of_bias = 0.0f;
        for (int64_t partition = 0; partition < threads; partition++) {
            of_weight += work[(partition * 6 + 4) * width + j];
            of_bias += work[(partition * 6 + 5) * width + j];
        }
        weight_grad[j] = of_weight;
        bias_grad[j] = of_bias;
    }
}

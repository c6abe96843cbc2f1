/* LayerNorm (Ba et al. 2016) over rows, and its gradients; computed in float32. */
#include "common.h"

#include <math.h>

#define ROW_BLOCK                                                                                                      \
    64 /* rows whose gradients of weight and bias are summed before they are added to the rest: fewer roundings */

#ifdef HAS_SVE
INLINE void normalize_sve_row(const void *x, int64_t at, const float *weight, const float *bias, void *y, float *mean,
                              float *scale, int64_t width, const int type, float eps)
{
    const svbool_t all = svptrue_b32();
    const float center = vector_sum(x, at, width, type, 0.0f, 0) / (float)width;
    const float factor = 1.0f / sqrtf(vector_sum(x, at, width, type, center, 1) / (float)width + eps);
    for (int64_t j = 0; j < width; j += svcntw()) {
        const svbool_t p = svwhilelt_b32_s64(j, width);
        const svfloat32_t centered = svsub_n_f32_x(all, load_vector(p, x, at + j, type), center);
        const svfloat32_t normal = svmul_n_f32_x(all, centered, factor);
        const svfloat32_t shifted = svmad_f32_x(all, normal, svld1_f32(p, weight + j), svld1_f32(p, bias + j));
        store_vector(p, shifted, y, at + j, type);
    }
    *mean = center;
    *scale = factor;
}

/* A row's gradients of weight and bias are added to their sums; `sum` and `projection` are sums over the row of the
   gradient of its normal numbers, and of that times these. */
INLINE void add_row_gradients(svbool_t p, svfloat32_t normal, svfloat32_t gradient, const float *weight,
                              float *weight_sums, float *bias_sums, svfloat32_t *sum, svfloat32_t *projection)
{
    const svfloat32_t weighted = svmul_f32_x(p, gradient, svld1_f32(p, weight));
    svst1_f32(p, weight_sums, svmla_f32_x(p, svld1_f32(p, weight_sums), gradient, normal));
    svst1_f32(p, bias_sums, svadd_f32_x(p, svld1_f32(p, bias_sums), gradient));
    *sum = svadd_f32_m(p, *sum, weighted);
    *projection = svmla_f32_m(p, *projection, weighted, normal);
}

INLINE svfloat32_t normal_vector(svbool_t p, const void *x, int64_t at, const int type, float mean, float scale)
{
    return svmul_n_f32_x(p, svsub_n_f32_x(p, load_vector(p, x, at, type), mean), scale);
}

INLINE void sve_gradient_row(const void *x, const void *y_grad, void *x_grad, int64_t at, const float *weight,
                             float *weight_sums, float *bias_sums, int64_t width, const int type, float mean,
                             float scale)
{
    const svbool_t all = svptrue_b32();
    const int64_t step = svcntw();
    svfloat32_t sum = svdup_n_f32(0.0f), projection = sum, second_sum = sum, second_projection = sum;
    int64_t j = 0;
    for (; j + 2 * step <= width; j += 2 * step) {
        const int64_t k = j + step;
        add_row_gradients(all, normal_vector(all, x, at + j, type, mean, scale), load_vector(all, y_grad, at + j, type),
                          weight + j, weight_sums + j, bias_sums + j, &sum, &projection);
        add_row_gradients(all, normal_vector(all, x, at + k, type, mean, scale), load_vector(all, y_grad, at + k, type),
                          weight + k, weight_sums + k, bias_sums + k, &second_sum, &second_projection);
    }
    for (; j < width; j += step) {
        const svbool_t p = svwhilelt_b32_s64(j, width);
        add_row_gradients(p, normal_vector(p, x, at + j, type, mean, scale), load_vector(p, y_grad, at + j, type),
                          weight + j, weight_sums + j, bias_sums + j, &sum, &projection);
    }
    const float mean_sum = svaddv_f32(all, svadd_f32_x(all, sum, second_sum)) / (float)width;
    const float mean_projection = svaddv_f32(all, svadd_f32_x(all, projection, second_projection)) / (float)width;
    for (j = 0; j < width; j += step) {
        const svbool_t p = svwhilelt_b32_s64(j, width);
        const svfloat32_t normal = normal_vector(p, x, at + j, type, mean, scale);
        const svfloat32_t weighted = svmul_f32_x(all, load_vector(p, y_grad, at + j, type), svld1_f32(p, weight + j));
        const svfloat32_t rest = svmls_n_f32_x(all, svsub_n_f32_x(all, weighted, mean_sum), normal, mean_projection);
        store_vector(p, svmul_n_f32_x(all, rest, scale), x_grad, at + j, type);
    }
}

/* y = LayerNorm of the row of x from `at` on; writes its mean and its scale. */
INLINE void normalize_row(const void *x, int64_t at, const float *weight, const float *bias, void *y, float *mean,
                          float *scale, int64_t width, int type, float eps)
{
    if (type == BFLOAT16)
        normalize_sve_row(x, at, weight, bias, y, mean, scale, width, BFLOAT16, eps);
    else
        normalize_sve_row(x, at, weight, bias, y, mean, scale, width, FLOAT32, eps);
}

/* x_grad of the row from `at` on; the row's gradients of weight and bias are added to the sums [width]. */
INLINE void gradient_row(const void *x, const void *y_grad, void *x_grad, int64_t at, const float *weight,
                         float *weight_sums, float *bias_sums, int64_t width, int type, float mean, float scale)
{
    if (type == BFLOAT16)
        sve_gradient_row(x, y_grad, x_grad, at, weight, weight_sums, bias_sums, width, BFLOAT16, mean, scale);
    else
        sve_gradient_row(x, y_grad, x_grad, at, weight, weight_sums, bias_sums, width, FLOAT32, mean, scale);
}
#else
/* The sum of x - mean, or of (x - mean)^2: four vectors at a time, since a single sum would wait for each addition. */
INLINE float row_sum(const float *x, int64_t n, float mean, const int squares)
{
    vec sums[4] = {{0}};
    int64_t j = 0;
    for (; j + 4 * LANES <= n; j += 4 * LANES) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const vec centered = *(const unaligned_vec *)(x + j + i * LANES) - mean;
            sums[i] += squares ? centered * centered : centered;
        }
    }
    const vec total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) sum += total[i];
    for (; j < n; j++) sum += squares ? (x[j] - mean) * (x[j] - mean) : x[j] - mean;
    return sum;
}
#endif

/* y [n, width] = LayerNorm of x, with weight and bias [width]; means and scales (1 / deviation) [n] are for the gradient.
   work: width float32 numbers per thread. */
EXPORT void layer_norm(const void *x, const float *weight, const float *bias, void *y, float *means, float *scales,
                       int64_t n, int64_t width, int type, float eps, float *work, int threads)
{
    int64_t thread_count = 0;
#pragma omp parallel num_threads(threads)
    {
        float *row = work + __atomic_fetch_add(&thread_count, 1, __ATOMIC_RELAXED) * width;
        (void)row; /* SVE has no use for it */
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n; i++) {
#ifdef HAS_SVE
            normalize_row(x, i * width, weight, bias, y, means + i, scales + i, width, type, eps);
#else
            load_scaled(x, i * width, type, 1.0f, row, width);
            const float mean = row_sum(row, width, 0.0f, 0) / (float)width;
            const float scale = 1.0f / sqrtf(row_sum(row, width, mean, 1) / (float)width + eps);
#pragma omp simd
            for (int64_t j = 0; j < width; j++) row[j] = (row[j] - mean) * scale * weight[j] + bias[j];
            store_scaled(row, 1.0f, y, i * width, type, width);
            means[i] = mean;
            scales[i] = scale;
#endif
        }
    }
}

static void add_and_clear(float *restrict sums, float *restrict block_weight_sums, int64_t n)
{
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        sums[j] += block_weight_sums[j];
        block_weight_sums[j] = 0.0f;
    }
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
            const float mean = means[i], scale = scales[i];
#ifdef HAS_SVE
            gradient_row(x, y_grad, x_grad, i * width, weight, block_weight_sums, block_bias_sums, width, type, mean,
                         scale);
#else
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

/* LayerNorm (Ba et al. 2016) over rows, and its gradients; computed in float32. */
#include "common.h"

#include <math.h>

#define ROW_BLOCK                                                                                                      \
    64 /* rows whose gradients of weight and bias are summed before they are added to the rest: fewer roundings */

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

/* y [n, width] = LayerNorm of x, with weight and bias [width]; means and scales (1 / deviation) [n] are for the gradient.
   work: width float32 numbers per thread. */
EXPORT void layer_norm(const void *x, const float *weight, const float *bias, void *y, float *means, float *scales,
                       int64_t n, int64_t width, int type, float eps, float *work, int threads)
{
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

/* AdamW (Loshchilov and Hutter 2019, algorithm 2) and the sum of squares of a gradient, each in one pass over memory,
   which limits them. */
#include "common.h"

#include <math.h>
#ifdef __x86_64__
#include <emmintrin.h>
#endif

#define BLOCK 4096      /* numbers with a float32 sum; these sums are added in float64 */
#define PARTIAL_SUMS 96 /* consecutive parts of a sum: a multiple of most thread counts */
#define CHUNK 128       /* parameters that are updated, rounded and written at a time */

/* Writes up to CHUNK numbers. The caches would not hold them until they are read, so where the processor can they bypass
   the caches, which would first read the memory that is overwritten. Only stream_fence orders such stores with others. */
INLINE void stream_store(const uint16_t *restrict from, uint16_t *restrict to, int64_t n)
{
    int64_t i = 0;
#ifdef __x86_64__
    if (((uintptr_t)to & 15) == 0)
        for (; i + 8 <= n; i += 8) _mm_stream_si128((__m128i *)(to + i), *(const __m128i *)(from + i));
#endif
    memcpy(to + i, from + i, (size_t)(n - i) * sizeof *to);
}

INLINE void stream_fence(void)
{
#ifdef __x86_64__
    _mm_sfence();
#endif
}

/* parameters, moments and gradients [n]. The gradient is multiplied by gradient_scale and the parameter by decay (1 - lr
   weight decay); then the parameter moves by step_size first / (sqrt(second) + eps), which include the bias corrections.
   complement1, complement2: 1 - beta, which float32 betas would not give exactly. rounded: receives the parameters in
   bfloat16, denormal ones too; may be null. */
EXPORT void adamw(float *restrict parameters, const float *restrict gradients, float *restrict first,
                  float *restrict second, uint16_t *restrict rounded, int64_t n, float gradient_scale, float decay,
                  float beta1, float complement1, float beta2, float complement2, float step_size, float eps,
                  int threads)
{
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static) nowait
        for (int64_t chunk = 0; chunk < n; chunk += CHUNK) {
            const int64_t count = min_int64(CHUNK, n - chunk);
            uint16_t rounded_chunk[CHUNK] __attribute__((aligned(16)));
#pragma omp simd
            for (int64_t j = 0; j < count; j++) {
                const int64_t i = chunk + j;
                const float gradient = gradients[i] * gradient_scale;
                const float mean = first[i] * beta1 + gradient * complement1;
                const float square = second[i] * beta2 + gradient * gradient * complement2;
                const float stepped =
                    parameters[i] * decay - divide(step_size * mean, square_root(square) + eps);
                first[i] = mean;
                second[i] = square;
                parameters[i] = stepped;
                rounded_chunk[j] = to_bfloat16(stepped);
            }
            if (rounded) stream_store(rounded_chunk, rounded + chunk, count);
        }
        if (rounded) stream_fence();
    }
}

/* The sum of squares of x [n]: float32 sums of blocks are added in float64 into PARTIAL_SUMS sums; the same for any
   number of threads. */
EXPORT double sum_of_squares(const float *x, int64_t n, int threads)
{
    double partial_sums[PARTIAL_SUMS] = {0.0};
    const int64_t elements_per_sum = round_up(n / PARTIAL_SUMS + 1, BLOCK);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t p = 0; p < PARTIAL_SUMS; p++) {
        double partial_sum = 0.0;
        const int64_t last = (p + 1) * elements_per_sum < n ? (p + 1) * elements_per_sum : n;
        for (int64_t block = p * elements_per_sum; block < last; block += BLOCK) {
            const int64_t end = block + BLOCK < last ? block + BLOCK : last;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = block; i < end; i++) sum += x[i] * x[i];
            partial_sum += sum;
        }
        partial_sums[p] = partial_sum;
    }
    double sum = 0.0;
    for (int p = 0; p < PARTIAL_SUMS; p++) sum += partial_sums[p];
    return sum;
}

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

/* The numbers of a step: gradient_scale is the factor of the gradient and decay (1 - lr weight decay) that of the
   parameter, which then moves by step_size first / (sqrt(second) + eps), which include the bias corrections. complement:
   1 - beta, which float32 betas would not give exactly. */
typedef struct {
    float gradient_scale, decay, beta1, complement1, beta2, complement2, step_size, eps;
} Step;

INLINE void update_moments(Step s, float gradient, float *first, float *second)
{
    gradient *= s.gradient_scale;
    *first = *first * s.beta1 + gradient * s.complement1;
    *second = *second * s.beta2 + gradient * gradient * s.complement2;
}

INLINE float stepped(Step s, float parameter, float first, float root)
{
    return parameter * s.decay - divide(s.step_size * first, root + s.eps);
}

/* Up to CHUNK parameters, which `rounded` receives in bfloat16. */
INLINE void step_chunk(Step s, float *restrict parameters, const float *restrict gradients, float *restrict first,
                       float *restrict second, uint16_t *restrict rounded, int64_t count)
{
#ifdef IN_STAGES
    float roots[CHUNK];
#pragma omp simd
    for (int64_t i = 0; i < count; i++) update_moments(s, gradients[i], first + i, second + i);
#pragma omp simd
    for (int64_t i = 0; i < count; i++) roots[i] = square_root(second[i]);
#pragma omp simd
    for (int64_t i = 0; i < count; i++) parameters[i] = stepped(s, parameters[i], first[i], roots[i]);
#pragma omp simd
    for (int64_t i = 0; i < count; i++) rounded[i] = to_bfloat16(parameters[i]);
#else
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        update_moments(s, gradients[i], first + i, second + i);
        const float parameter = stepped(s, parameters[i], first[i], square_root(second[i]));
        parameters[i] = parameter;
        rounded[i] = to_bfloat16(parameter);
    }
#endif
}

/* parameters, moments and gradients [n]; see Step. rounded: receives the parameters in bfloat16, denormal ones too; may
   be null. */
EXPORT void adamw(float *restrict parameters, const float *restrict gradients, float *restrict first,
                  float *restrict second, uint16_t *restrict rounded, int64_t n, float gradient_scale, float decay,
                  float beta1, float complement1, float beta2, float complement2, float step_size, float eps,
                  int threads)
{
    const Step step = {gradient_scale, decay, beta1, complement1, beta2, complement2, step_size, eps};
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static) nowait
        for (int64_t chunk = 0; chunk < n; chunk += CHUNK) {
            const int64_t count = min_int64(CHUNK, n - chunk);
            uint16_t rounded_chunk[CHUNK] __attribute__((aligned(16)));
            step_chunk(step, parameters + chunk, gradients + chunk, first + chunk, second + chunk, rounded_chunk, count);
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

/* AdamW (Loshchilov and Hutter 2019, algorithm 2) and the sum of squares of a gradient, each in one pass over memory,
   which is what they wait for. */
#include "common.h"

#include <math.h>
#ifdef __x86_64__
#include <emmintrin.h>
#endif

#define BLOCK 4096 /* numbers whose float32 sum is added up in float64 */
#define PARTIAL_SUMS 96   /* of a sum, one after the other for each thread: a multiple of most numbers of threads */
#define CHUNK 128    /* parameters that are stepped, rounded and written at a time */

/* Write RUN numbers or fewer. The caches would not hold all of them until they are read: where the processor can, they
   are written past these, which would read first what is overwritten. Such stores are ordered with others by
   stores_are_seen alone. */
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

/* parameters, moments and gradients [n]; the gradient is multiplied by factor, the parameter by keeps (1 - lr weight
   decay); then it moves by step_size first / (sqrt(second) + eps), in which the corrections of the moments' bias are.
   rest1, rest2: 1 - beta, which float32 betas would not give. rounded: the parameters in bfloat16, denormal ones too, or
   none. */
EXPORT void adamw(float *restrict parameters, const float *restrict gradients, float *restrict first,
                  float *restrict second, uint16_t *restrict rounded, int64_t n, float gradient_scale, float decay, float beta1,
                  float complement1, float beta2, float complement2, float step_size, float eps, int threads)
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
                const float stepped = parameters[i] * decay - step_size * mean / (sqrtf(square) + eps);
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

/* The sum of squares of x [n], of PARTS, which are added up in float64 from sums of blocks in float32: the same by any
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

/* AdamW (Loshchilov and Hutter 2019, algorithm 2) and the sum of squares of a gradient, each in one pass over memory,
   which is what they wait for. */
#include "common.h"

#include <math.h>
#ifdef __x86_64__
#include <emmintrin.h>
#endif

#define BLOCK 4096 /* numbers whose float32 sum is added up in float64 */
#define PARTS 96   /* of a sum, one after the other for each thread: a multiple of most numbers of threads */

/* Up to BLOCK parameters in bfloat16, denormal ones too. The caches would not hold them all until they are read: where
   the processor can, they are written past these, which would read first what is overwritten. */
static void store_past_caches(const float *restrict parameters, uint16_t *restrict to, int64_t n)
{
    uint16_t rounded[BLOCK] __attribute__((aligned(16)));
#pragma omp simd
    for (int64_t i = 0; i < n; i++) rounded[i] = to_bfloat16(parameters[i]);
    int64_t i = 0;
#ifdef __x86_64__
    if (((uintptr_t)to & 15) == 0)
        for (; i + 8 <= n; i += 8)
            _mm_stream_si128((__m128i *)(to + i), *(const __m128i *)(rounded + i));
    _mm_sfence(); /* such stores are ordered with no others */
#endif
    memcpy(to + i, rounded + i, (size_t)(n - i) * sizeof *to);
}

/* parameters, moments and gradients [n]; the gradient is multiplied by factor, the parameter by keeps (1 - lr weight
   decay); then it moves by step_size first / (sqrt(second) + eps), in which the corrections of the moments' bias are.
   rest1, rest2: 1 - beta, which float32 betas would not give. rounded: the parameters in bfloat16, or none. */
EXPORT void adamw(float *restrict parameters, const float *restrict gradients, float *restrict first,
                  float *restrict second, uint16_t *restrict rounded, int64_t n, float factor, float keeps, float beta1,
                  float rest1, float beta2, float rest2, float step_size, float eps, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < n; block += BLOCK) {
        const int64_t end = block + BLOCK < n ? block + BLOCK : n;
#pragma omp simd
        for (int64_t i = block; i < end; i++) {
            const float gradient = gradients[i] * factor;
            const float mean = first[i] * beta1 + gradient * rest1, square = second[i] * beta2 + gradient * gradient * rest2;
            first[i] = mean;
            second[i] = square;
            parameters[i] = parameters[i] * keeps - step_size * mean / (sqrtf(square) + eps);
        }
        if (rounded) store_past_caches(parameters + block, rounded + block, end - block);
    }
}

/* The sum of squares of x [n], of PARTS, which are added up in float64 from sums of blocks in float32: the same by any
   number of threads. */
EXPORT double squares(const float *x, int64_t n, int threads)
{
    double parts[PARTS] = {0.0};
    const int64_t each = round_up(n / PARTS + 1, BLOCK);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t part = 0; part < PARTS; part++) {
        double whole = 0.0;
        const int64_t last = (part + 1) * each < n ? (part + 1) * each : n;
        for (int64_t block = part * each; block < last; block += BLOCK) {
            const int64_t end = block + BLOCK < last ? block + BLOCK : last;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = block; i < end; i++) sum += x[i] * x[i];
            whole += sum;
        }
        parts[part] = whole;
    }
    double sum = 0.0;
    for (int part = 0; part < PARTS; part++) sum += parts[part];
    return sum;
}

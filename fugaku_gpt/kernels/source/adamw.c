/* AdamW (Loshchilov and Hutter 2019, algorithm 2) and the sum of squares of a gradient, each in one pass over memory,
   which is what they wait for. */
#include "common.h"

#include <math.h>
#ifdef __x86_64__
#include <emmintrin.h>
#endif

#define BLOCK 4096 /* numbers whose float32 sum is added up in float64 */
#define PARTS 96   /* of a sum, one after the other for each thread: a multiple of most numbers of threads */
#define RUN 128    /* parameters that are stepped, rounded and written at a time */

/* Write RUN numbers or fewer. The caches would not hold all of them until they are read: where the processor can, they
   are written past these, which would read first what is overwritten. Such stores are ordered with others by
   stores_are_seen alone. */
INLINE void store_past_caches(const uint16_t *restrict from, uint16_t *restrict to, int64_t n)
{
    int64_t i = 0;
#ifdef __x86_64__
    if (((uintptr_t)to & 15) == 0)
        for (; i + 8 <= n; i += 8) _mm_stream_si128((__m128i *)(to + i), *(const __m128i *)(from + i));
#endif
    memcpy(to + i, from + i, (size_t)(n - i) * sizeof *to);
}

INLINE void stores_are_seen(void)
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
                  float *restrict second, uint16_t *restrict rounded, int64_t n, float factor, float keeps, float beta1,
                  float rest1, float beta2, float rest2, float step_size, float eps, int threads)
{
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static) nowait
        for (int64_t run = 0; run < n; run += RUN) {
            const int64_t count = smaller(RUN, n - run);
            uint16_t line[RUN] __attribute__((aligned(16)));
#pragma omp simd
            for (int64_t j = 0; j < count; j++) {
                const int64_t i = run + j;
                const float gradient = gradients[i] * factor;
                const float mean = first[i] * beta1 + gradient * rest1;
                const float square = second[i] * beta2 + gradient * gradient * rest2;
                const float stepped = parameters[i] * keeps - step_size * mean / (sqrtf(square) + eps);
                first[i] = mean;
                second[i] = square;
                parameters[i] = stepped;
                line[j] = to_bfloat16(stepped);
            }
            if (rounded) store_past_caches(line, rounded + run, count);
        }
        if (rounded) stores_are_seen();
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

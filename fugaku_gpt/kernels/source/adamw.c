/* AdamW (Loshchilov and Hutter 2019, algorithm 2) and the sum of squares of a gradient, each in one pass over memory,
   which limits them. */
#include "common.h"

#include <math.h>
#ifdef __x86_64__
#include <emmintrin.h>
#endif

#define BLOCK 4096      /* numbers with a float32 sum; these sums are added in float64 */
#define PARTIAL_SUMS 96 /* consecutive parts of a sum: a multiple of most thread counts */
/* Parameters that are updated, rounded and written at a time; with SVE their square roots stay in the L1 cache. */
#ifdef HAS_SVE
#define CHUNK 1024
#else
#define CHUNK 128
#endif

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

#ifdef HAS_SVE
/* The square root of x >= 0 but for infinity, of which it is NaN; the error of the first guess, of 8 bits, is squared
   twice, and what is left is added. */
INLINE svfloat32_t vector_root(svfloat32_t x)
{
    const svbool_t all = svptrue_b32();
    svfloat32_t inverse = svminnm_n_f32_x(all, svrsqrte_f32(x), 0x1p100f); /* 0 times it is 0 */
    for (int step = 0; step < 2; step++)
        inverse = svmul_f32_x(all, inverse, svrsqrts_f32(svmul_f32_x(all, x, inverse), inverse));
    const svfloat32_t root = svmul_f32_x(all, x, inverse);
    const svfloat32_t rest = svmls_f32_x(all, x, root, root);
    return svmla_f32_x(all, root, rest, svmul_n_f32_x(all, inverse, 0.5f));
}

/* Updates moments and stores the roots of the second ones. */
INLINE void update_vector(Step s, svbool_t p, const float *gradients, float *first, float *second, float *roots)
{
    const svbool_t all = svptrue_b32();
    const svfloat32_t gradient = svmul_n_f32_x(all, svld1_f32(p, gradients), s.gradient_scale);
    const svfloat32_t mean = svmul_n_f32_x(all, svld1_f32(p, first), s.beta1);
    svst1_f32(p, first, svmla_n_f32_x(all, mean, gradient, s.complement1));
    const svfloat32_t square = svmul_f32_x(all, gradient, gradient);
    const svfloat32_t variance = svmul_n_f32_x(all, svld1_f32(p, second), s.beta2);
    const svfloat32_t updated = svmla_n_f32_x(all, variance, square, s.complement2);
    svst1_f32(p, second, updated);
    svst1_f32(p, roots, vector_root(updated));
}

/* Moves parameters; where the second moment is infinite only a mean that is none, too, moves them. */
INLINE svfloat32_t stepped_vector(Step s, svbool_t p, const float *parameters, const float *first, const float *second,
                                  const float *roots)
{
    const svbool_t all = svptrue_b32();
    const svfloat32_t step = svmul_n_f32_x(all, svld1_f32(p, first), s.step_size);
    const svfloat32_t divisor = svadd_n_f32_x(all, svld1_f32(p, roots), s.eps);
    const svfloat32_t inverse = vector_inverse(divisor);
    svfloat32_t quotient = svmul_f32_x(all, step, inverse);
    quotient = svmla_f32_x(all, quotient, svmls_f32_x(all, step, quotient, divisor), inverse);
    const svbool_t is_infinite = svcmpgt_n_f32(p, svld1_f32(p, second), FLT_MAX);
    quotient = svsel_f32(is_infinite, svmul_n_f32_x(all, step, 0.0f), quotient);
    return svnmls_n_f32_x(all, quotient, svld1_f32(p, parameters), s.decay);
}

/* Up to CHUNK parameters, which `rounded` receives in bfloat16 unless it is null. */
INLINE void step_chunk(Step s, float *restrict parameters, const float *restrict gradients, float *restrict first,
                       float *restrict second, uint16_t *restrict rounded, int64_t count)
{
    float roots[CHUNK];
    for (int64_t i = 0; i < count; i += svcntw())
        update_vector(s, svwhilelt_b32_s64(i, count), gradients + i, first + i, second + i, roots + i);
    for (int64_t i = 0; i < count; i += svcntw()) {
        const svbool_t p = svwhilelt_b32_s64(i, count);
        const svfloat32_t moved = stepped_vector(s, p, parameters + i, first + i, second + i, roots + i);
        svst1_f32(p, parameters + i, moved);
    }
    for (int64_t i = 0; rounded && i < count; i += svcntw()) {
        const svbool_t p = svwhilelt_b32_s64(i, count);
        store_vector_bfloat16(p, rounded + i, svld1_f32(p, parameters + i));
    }
}
#else
INLINE float stepped(Step s, float parameter, float first, float root)
{
    return parameter * s.decay - s.step_size * first / (root + s.eps);
}

/* Up to CHUNK parameters, which `rounded` receives in bfloat16. */
INLINE void step_chunk(Step s, float *restrict parameters, const float *restrict gradients, float *restrict first,
                       float *restrict second, uint16_t *restrict rounded, int64_t count)
{
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        update_moments(s, gradients[i], first + i, second + i);
        const float parameter = stepped(s, parameters[i], first[i], sqrtf(second[i]));
        parameters[i] = parameter;
        rounded[i] = to_bfloat16(parameter);
    }
}
#endif

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
#ifdef HAS_SVE
            step_chunk(step, parameters + chunk, gradients + chunk, first + chunk, second + chunk,
                       rounded ? rounded + chunk : 0, count);
#else
            uint16_t rounded_chunk[CHUNK] __attribute__((aligned(16)));
            step_chunk(step, parameters + chunk, gradients + chunk, first + chunk, second + chunk, rounded_chunk, count);
            if (rounded) stream_store(rounded_chunk, rounded + chunk, count);
#endif
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
#ifdef HAS_SVE
            const float sum = vector_sum(x, block, end - block, FLOAT32, 0.0f, 1);
#else
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = block; i < end; i++) sum += x[i] * x[i];
#endif
            partial_sum += sum;
        }
        partial_sums[p] = partial_sum;
    }
    double sum = 0.0;
    for (int p = 0; p < PARTIAL_SUMS; p++) sum += partial_sums[p];
    return sum;
}

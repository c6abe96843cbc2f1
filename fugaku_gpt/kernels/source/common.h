/* Shared by all kernels: vectors of this processor's width, bfloat16 conversions, powers of two. */
#ifndef FUGAKU_GPT_KERNELS_COMMON_H
#define FUGAKU_GPT_KERNELS_COMMON_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* LANES: float32 numbers of a vector register. ATTENTION_MR: rows of attention's micro-kernel, whose accumulators take
   twice as many registers and leave some of 16 (AVX2) or 32 (AVX-512, SVE, NEON) for the factors. Vectors that the
   processor lacks are made of those that it has: without -msve-vector-bits NEON's replace SVE's. */
#if defined(__AVX512F__) || (defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 512)
#define LANES 16
#define ATTENTION_MR 12
#elif defined(__AVX__) || (defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 256)
#define LANES 8
#define ATTENTION_MR 6
#elif defined(__aarch64__)
#define LANES 4
#define ATTENTION_MR 12
#else
#define LANES 4
#define ATTENTION_MR 6
#endif
#define ATTENTION_NR (2 * LANES)

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4)));

/* The processor multiplies pairs of bfloat16 numbers and adds both products to a float32 sum. */
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_BF16_DOT 1
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

/* Types of a tensor's elements; as in library.py. */
enum { FLOAT32 = 0, BFLOAT16 = 1 };

INLINE int64_t min_int64(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

INLINE float from_bfloat16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* Rounds to nearest, ties to even; NaN stays NaN. */
INLINE uint16_t to_bfloat16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x != x ? 0x7fc0 : (uint16_t)rounded;
}

/* y[j] = factor x[at + j] */
INLINE void load_scaled(const void *x, int64_t at, int type, float factor, float *restrict y, int64_t n)
{
    if (type == BFLOAT16) {
        const uint16_t *restrict from = (const uint16_t *)x + at;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) y[j] = from_bfloat16(from[j]) * factor;
    } else {
        const float *restrict from = (const float *)x + at;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) y[j] = from[j] * factor;
    }
}

INLINE void store_bfloat16(uint16_t *to, vec x)
{
#ifdef HAS_BF16_DOT
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x)); /* denormal numbers become 0 */
#else
    for (int i = 0; i < LANES; i++) to[i] = to_bfloat16(x[i]);
#endif
}

/* y[at + j] = factor x[j] */
INLINE void store_scaled(const float *restrict x, float factor, void *y, int64_t at, int type, int64_t n)
{
    if (type == BFLOAT16) {
        uint16_t *restrict to = (uint16_t *)y + at;
        int64_t j = 0;
#ifdef HAS_BF16_DOT
        for (; j + LANES <= n; j += LANES) store_bfloat16(to + j, *(const unaligned_vec *)(x + j) * factor);
#endif
#pragma omp simd
        for (int64_t i = j; i < n; i++) to[i] = to_bfloat16(x[i] * factor);
    } else {
        float *restrict to = (float *)y + at;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) to[j] = x[j] * factor;
    }
}

#ifdef __ARM_FEATURE_SVE
/* Long computations of one number are loops of stages, with results in the L1 cache between them: A64FX looks 128
   instructions ahead, fewer than one iteration of such a loop would have, and each waits 9 cycles for the one before. */
#define IN_STAGES 1

/* Quotients and roots by Newton's method: by instructions, A64FX takes 98 cycles for one of a vector, and the pipe does
   nothing else meanwhile (model of LLVM 19). The first guess is taken from the bits of a number, whose exponent it
   negates or halves; each step cubes its relative error of 0.12 or 0.035. */

/* x / y for normal or infinite y > 0. */
INLINE float divide(float x, float y)
{
    const float quarter = 0.25f * y; /* the reciprocals of the largest numbers would be denormal */
    uint32_t bits;
    float inverse;
    memcpy(&bits, &quarter, 4);
    bits = 0x7ef311c7u - bits;
    memcpy(&inverse, &bits, 4);
    for (int step = 0; step < 2; step++) {
        const float error = 1.0f - quarter * inverse;
        inverse += inverse * (error * error + error);
    }
    inverse *= 0.25f;
    const float quotient = x * inverse;
    return y > FLT_MAX ? 0.0f * x : quotient + (x - quotient * y) * inverse;
}

/* The square root of x >= 0; NaN stays NaN. */
INLINE float square_root(float x)
{
    const int is_small = x < 0x1p-96f; /* the guess needs a normal number */
    const float v = is_small ? x * 0x1p96f : x;
    uint32_t bits;
    float inverse;
    memcpy(&bits, &v, 4);
    bits = 0x5f375a86u - (bits >> 1);
    memcpy(&inverse, &bits, 4);
    for (int step = 0; step < 2; step++) {
        const float error = 1.0f - v * inverse * inverse;
        inverse += inverse * (error * (0.375f * error + 0.5f));
    }
    float root = v * inverse;
    root += (v - root * root) * (0.5f * inverse);
    root *= is_small ? 0x1p-48f : 1.0f;
    return x > 0.0f && x <= FLT_MAX ? root : x;
}
#else
INLINE float divide(float x, float y) { return x / y; }
INLINE float square_root(float x) { return sqrtf(x); }
#endif

/* 2^x for x in [-126, 126], split into an integer, which becomes the exponent, and a fraction in [-0.5, 0.5], whose power
   is a polynomial fitted for the smallest relative error (2e-9 before rounding). */
INLINE float exp2_bounded(float x)
{
    const float shifted = x + 12582912.0f; /* 1.5 2^23: the last bits of the sum are the integer */
    const float fraction = x - (shifted - 12582912.0f);
    float y = 1.534581160e-4f;
    y = y * fraction + 1.339993122e-3f;
    y = y * fraction + 9.618488959e-3f;
    y = y * fraction + 5.550328777e-2f;
    y = y * fraction + 2.402264689e-1f;
    y = y * fraction + 6.931472057e-1f;
    y = y * fraction + 1.0f;
    uint32_t bits, exponent;
    memcpy(&exponent, &shifted, 4);
    memcpy(&bits, &y, 4);
    bits += exponent << 23;
    memcpy(&y, &bits, 4);
    return y;
}

/* 2^x for x <= 126, and 2^126 above; 0 below -126, where results are denormal. NaN stays NaN. */
INLINE float exp2_flushed(float x)
{
    const float y = exp2_bounded(x < -126.0f ? -126.0f : x > 126.0f ? 126.0f : x);
    const float outside = x < -126.0f ? 0.0f : x;
    return x >= -126.0f ? y : outside;
}

#endif

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

/* x limited to [-limit, limit]; NaN stays NaN. */
INLINE float clamp(float x, float limit) { return x < -limit ? -limit : x > limit ? limit : x; }

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

/* Adds n sums of a block of rows to those of all rows, and makes them 0. */
INLINE void add_and_clear(float *restrict sums, float *restrict block_sums, int64_t n)
{
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        sums[j] += block_sums[j];
        block_sums[j] = 0.0f;
    }
}

#if defined(__ARM_FEATURE_SVE) && defined(__has_include)
#if __has_include(<arm_sve.h>)
/* Vectors of any length, in loops written for A64FX. Its window of 128 instructions must hold enough iterations for their
   chains of operations, of 9 cycles each, to overlap: long computations are loops of stages, with results in the L1 cache
   between them, and sums have several accumulators. A division or square root by instructions takes it 98 cycles for one
   vector, in which the pipe does nothing else (model of LLVM 19), so they are Newton's method. */
#define HAS_SVE 1
#include <arm_sve.h>

/* Vectors of LANES numbers are SVE's: its length is fixed, and NEON's do not make up for it. */
#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 32 * LANES
#define HAS_FIXED_SVE 1
typedef svfloat32_t sve_vec __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)));

/* Transposes LANES rows of LANES numbers: each step interleaves the upper and the lower half. */
INLINE void transpose_vectors(sve_vec *rows)
{
    sve_vec next[LANES];
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = svzip1_f32(rows[i], rows[i + LANES / 2]);
            next[2 * i + 1] = svzip2_f32(rows[i], rows[i + LANES / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = next[i];
    }
}
#endif

/* Numbers at + 0, 1, ... of x in float32; those that p lacks are 0. */
INLINE svfloat32_t load_vector(svbool_t p, const void *x, int64_t at, int type)
{
    if (type != BFLOAT16) return svld1_f32(p, (const float *)x + at);
    return svreinterpret_f32_u32(svlsl_n_u32_x(svptrue_b32(), svld1uh_u32(p, (const uint16_t *)x + at), 16));
}

/* Rounds as to_bfloat16 does. */
INLINE void store_vector_bfloat16(svbool_t p, uint16_t *to, svfloat32_t x)
{
    const svbool_t all = svptrue_b32();
    const svuint32_t bits = svreinterpret_u32_f32(x);
    const svuint32_t odd = svand_n_u32_x(all, svlsr_n_u32_x(all, bits, 16), 1);
    const svuint32_t rounded = svlsr_n_u32_x(all, svadd_u32_x(all, svadd_n_u32_x(all, bits, 0x7fff), odd), 16);
    svst1h_u32(p, to, svsel_u32(svcmpuo_f32(all, x, x), svdup_n_u32(0x7fc0), rounded));
}

/* Stores two vectors of results of arithmetic one after the other, rounded as to_bfloat16 does; a NaN keeps its upper
   half. Halves of two vectors are rounded at a time, in half as many instructions. */
INLINE void store_vectors_bfloat16(uint16_t *to, svfloat32_t first, svfloat32_t second)
{
    const svbool_t all = svptrue_b16();
    const svuint16_t a = svreinterpret_u16_f32(first), b = svreinterpret_u16_f32(second);
    const svuint16_t low = svuzp1_u16(a, b), high = svuzp2_u16(a, b);
    const svuint16_t more = svqadd_u16(low, svand_n_u16_x(all, high, 1)); /* above 0x8000: to be rounded up */
    const svuint16_t unsigned_high = svlsl_n_u16_x(all, high, 1);         /* 0xfffe: a NaN, which would become 0 */
    const svbool_t may_grow = svcmpne_n_s16(all, svreinterpret_s16_u16(unsigned_high), -2);
    svst1_u16(all, to, svadd_n_u16_m(svcmpgt_n_u16(may_grow, more, 0x8000), high, 1));
}

/* Two vectors of results of arithmetic. */
INLINE void store_vectors(svfloat32_t first, svfloat32_t second, void *y, int64_t at, int type)
{
    if (type == BFLOAT16) {
        store_vectors_bfloat16((uint16_t *)y + at, first, second);
    } else {
        svst1_f32(svptrue_b32(), (float *)y + at, first);
        svst1_f32(svptrue_b32(), (float *)y + at + svcntw(), second);
    }
}

INLINE void store_vector(svbool_t p, svfloat32_t x, void *y, int64_t at, int type)
{
    if (type == BFLOAT16)
        store_vector_bfloat16(p, (uint16_t *)y + at, x);
    else
        svst1_f32(p, (float *)y + at, x);
}

INLINE svfloat32_t add_centered(svbool_t p, svfloat32_t sum, svfloat32_t x, float center, const int squares)
{
    const int is_zero = __builtin_constant_p(center) && center == 0.0f;
    const svfloat32_t centered = is_zero ? x : svsub_n_f32_x(p, x, center);
    return squares ? svmla_f32_m(p, sum, centered, centered) : svadd_f32_m(p, sum, centered);
}

INLINE svfloat32_t add_vectors(svfloat32_t a, svfloat32_t b) { return svadd_f32_x(svptrue_b32(), a, b); }

/* The sum of n numbers of x from `at` on, less `center` each, or of the squares of these differences. */
INLINE float vector_sum(const void *x, int64_t at, int64_t n, int type, float center, const int squares)
{
    const svbool_t all = svptrue_b32();
    const int64_t step = svcntw(), end = at + n;
    svfloat32_t s0 = svdup_n_f32(0.0f), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
#define ADD(SUM, I) SUM = add_centered(all, SUM, load_vector(all, x, at + (I) * step, type), center, squares)
    for (; at + 8 * step <= end; at += 8 * step) {
        ADD(s0, 0);
        ADD(s1, 1);
        ADD(s2, 2);
        ADD(s3, 3);
        ADD(s4, 4);
        ADD(s5, 5);
        ADD(s6, 6);
        ADD(s7, 7);
    }
    for (; at + 2 * step <= end; at += 2 * step) {
        ADD(s0, 0);
        ADD(s1, 1);
    }
#undef ADD
    for (; at < end; at += step) {
        const svbool_t p = svwhilelt_b32_s64(at, end);
        s2 = add_centered(p, s2, load_vector(p, x, at, type), center, squares);
    }
    const svfloat32_t lower = add_vectors(add_vectors(s0, s1), add_vectors(s2, s3));
    return svaddv_f32(all, add_vectors(lower, add_vectors(add_vectors(s4, s5), add_vectors(s6, s7))));
}

/* 1 / x for positive numbers up to 2^126, and for infinity; the error of the first guess of 8 bits is squared twice. */
INLINE svfloat32_t vector_inverse(svfloat32_t x)
{
    const svbool_t all = svptrue_b32();
    svfloat32_t inverse = svrecpe_f32(x);
    inverse = svmul_f32_x(all, inverse, svrecps_f32(x, inverse));
    return svmul_f32_x(all, inverse, svrecps_f32(x, inverse));
}

/* For y = 2^x or exp(x): n is x in steps of 1/64 of a power of two, plus a number that leaves its steps in the last bits,
   of which FEXPA makes 2^n; `rest` is x - n, at most half a step, for which y is 2^n (1 + rest (c1 + c2 rest)), fitted
   for the smallest error (7e-9 before rounding). */
#define EXPA_SHIFT 0x1.803f8p17f
INLINE svfloat32_t expa(svfloat32_t n, svfloat32_t rest, const float c1, const float c2)
{
    const svbool_t all = svptrue_b32();
    const svfloat32_t power = svexpa_f32(svreinterpret_u32_f32(n));
    const svfloat32_t more = svmul_f32_x(all, rest, svmla_f32_x(all, svdup_n_f32(c1), rest, svdup_n_f32(c2)));
    return svmla_f32_x(all, power, power, more);
}

/* 2^x for x < 128; 0 below -126, where it would be denormal. NaN stays NaN. */
INLINE svfloat32_t vector_exp2(svfloat32_t x)
{
    const svbool_t all = svptrue_b32();
    const svfloat32_t n = svadd_n_f32_x(all, x, EXPA_SHIFT);
    const svfloat32_t rest = svsub_f32_x(all, x, svsub_n_f32_x(all, n, EXPA_SHIFT));
    return svdup_n_f32_m(expa(n, rest, 0.69314972f, 0.24022651f), svcmplt_n_f32(all, x, -126.0f), 0.0f);
}

/* 2^(x factor) for products in [-126, 126]; their last bits count too. */
INLINE svfloat32_t vector_exp2_of_product(svfloat32_t x, svfloat32_t factor)
{
    const svbool_t all = svptrue_b32();
    const svfloat32_t n = svmla_f32_x(all, svdup_n_f32(EXPA_SHIFT), x, factor);
    const svfloat32_t rest = svnmls_f32_x(all, svsub_n_f32_x(all, n, EXPA_SHIFT), x, factor);
    return expa(n, rest, 0.69314972f, 0.24022651f);
}

/* The parts of exp(x) for x in [-87.3, 87]: power (1 + rest (c1 + c2 rest)) with EXP_C1 and EXP_C2. A loop that makes
   them for its next iteration before it ends this one's has chains of half the length. */
#define EXP_C1 1.0000037f
#define EXP_C2 0.5f
INLINE svfloat32_t exp_parts(svfloat32_t x, svfloat32_t *rest)
{
    const svbool_t all = svptrue_b32();
    const svfloat32_t n = svmla_n_f32_x(all, svdup_n_f32(EXPA_SHIFT), x, 1.44269504f);
    *rest = svmls_n_f32_x(all, x, svsub_n_f32_x(all, n, EXPA_SHIFT), 0.693147181f);
    return svexpa_f32(svreinterpret_u32_f32(n));
}

/* scale (1 + rest (c1 + c2 rest)), the factor of an exponential's power. */
INLINE svfloat32_t exp_factor(svfloat32_t rest, float scale)
{
    const svbool_t all = svptrue_b32();
    const svfloat32_t slope = svmla_n_f32_x(all, svdup_n_f32(EXP_C1 * scale), rest, EXP_C2 * scale);
    return svmad_f32_x(all, slope, rest, svdup_n_f32(scale));
}
#endif
#endif

/* 2^(n + fraction) for an integer n from -126 to 126 and a fraction in [-0.5, 0.5], whose power is a polynomial fitted
   for the smallest relative error (2e-9 before rounding). shifted: n + EXP2_SHIFT. */
#define EXP2_SHIFT 12582912.0f /* 1.5 2^23: the last bits of the sum are the integer */
INLINE float exp2_of_parts(float shifted, float fraction)
{
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

/* 2^x for x in [-126, 126], split into an integer, which becomes the exponent, and a fraction. */
INLINE float exp2_bounded(float x)
{
    const float shifted = x + EXP2_SHIFT;
    return exp2_of_parts(shifted, x - (shifted - EXP2_SHIFT));
}

/* exp(x) for x in [-87, 87]: x less n log(2), which is subtracted in two parts of which the first is exact. */
INLINE float exp_bounded(float x)
{
    const float shifted = x * 1.44269504f + EXP2_SHIFT, n = shifted - EXP2_SHIFT;
    return exp2_of_parts(shifted, (x - n * 0.693359375f + n * 2.12194440e-4f) * 1.44269504f);
}

/* 2^x for x <= 126, and 2^126 above; 0 below -126, where results are denormal. NaN stays NaN. */
INLINE float exp2_flushed(float x)
{
    const float y = exp2_bounded(x < -126.0f ? -126.0f : x > 126.0f ? 126.0f : x);
    const float outside = x < -126.0f ? 0.0f : x;
    return x >= -126.0f ? y : outside;
}

#endif

/* GELU (Hendrycks and Gimpel 2016), exact and by its tanh approximation, and its gradients; computed in float32. */
#include "common.h"

#include <math.h>

#define BLOCK 1024 /* numbers at a time: they stay in the L1 cache */

/* The normal distribution function. At -|x| it is exp(-x^2 / 2) times a slowly falling function, which is a
   polynomial in 1 / (1 + 0.345 |x|), as in Abramowitz and Stegun 1964, 26.2.17, but fitted anew for the smallest
   relative error (2e-8 before it is rounded). From 12.9 on it differs from 1 by 2e-38 or less. These are the
   polynomial's coefficients, from the highest power, the ninth, down to the first; it has no constant term. */
#define TAIL_9 -2.842730611e-2f
#define TAIL_8 1.454884182e-1f
#define TAIL_7 -2.715707689e-1f
#define TAIL_6 1.876187589e-1f
#define TAIL_5 -3.787076518e-2f
#define TAIL_4 1.119047836e-1f
#define TAIL_3 1.172137406e-1f
#define TAIL_2 1.380240034e-1f
#define TAIL_1 1.376191256e-1f

#ifdef HAS_SVE
/* |x|, at most 12.9; NaN stays NaN. */
INLINE svfloat32_t exact_size(svfloat32_t x)
{
    const svbool_t all = svptrue_b32();
    return svmin_n_f32_x(all, svabs_f32_x(all, x), 12.9f);
}

/* First stage: exp(-x^2 / 2), and the variable of the tail's polynomial. */
INLINE void exact_parts(svbool_t p, svfloat32_t x, float *gaussian, float *inverse)
{
    const svbool_t all = svptrue_b32();
    const svfloat32_t size = exact_size(x);
    const svfloat32_t factor = svdup_n_f32(-0.72134752f); /* log2(e) / 2 */
    svst1_f32(p, gaussian, vector_exp2_of_product(svmul_f32_x(all, size, size), factor));
    svst1_f32(p, inverse, vector_inverse(svmla_n_f32_x(all, svdup_n_f32(1.0f), size, 0.345f)));
}

/* Second stage. With the tail at -|x|, GELU(x) is max(x, -0) - |x| tail, and its derivative at -|x| the tail less
   |x| times the density. */
INLINE svfloat32_t exact_result(svbool_t p, svfloat32_t x, const float *gaussian, const float *inverse,
                                svfloat32_t grad, const int has_grad)
{
    const svbool_t all = svptrue_b32();
    const svfloat32_t size = exact_size(x), density = svld1_f32(p, gaussian), v = svld1_f32(p, inverse);
    const svfloat32_t square = svmul_f32_x(all, v, v); /* in two chains of half the length */
    svfloat32_t odd = svdup_n_f32(TAIL_9), even = svdup_n_f32(TAIL_8);
#define NEXT(y, c) y = svmad_n_f32_x(all, y, square, c);
    NEXT(odd, TAIL_7) NEXT(even, TAIL_6) NEXT(odd, TAIL_5) NEXT(even, TAIL_4) NEXT(odd, TAIL_3) NEXT(even, TAIL_2)
    NEXT(odd, TAIL_1)
#undef NEXT
    const svfloat32_t tail = svmul_f32_x(all, svmla_f32_x(all, odd, even, v), svmul_f32_x(all, v, density));
    if (!has_grad) return svmls_f32_x(all, svmax_n_f32_x(all, x, -0.0f), size, tail);
    const svfloat32_t slope = svmls_n_f32_x(all, tail, svmul_f32_x(all, size, density), 0.3989422804f);
    const svbool_t is_negative = svcmplt_n_f32(all, x, 0.0f);
    return svmul_f32_x(all, grad, svsel_f32(is_negative, slope, svsubr_n_f32_x(all, slope, 1.0f)));
}

INLINE svfloat32_t tanh_clamp(svfloat32_t x)
{
    const svbool_t all = svptrue_b32();
    return svmax_n_f32_x(all, svmin_n_f32_x(all, x, 10.0f), -10.0f);
}

/* First stage: exp(-2 z), z = sqrt(2 / pi) (x + 0.044715 x^3). */
INLINE void tanh_parts(svbool_t p, svfloat32_t x, float *gaussian)
{
    const svbool_t all = svptrue_b32();
    x = tanh_clamp(x);
    const svfloat32_t square = svmul_f32_x(all, x, x), least = svdup_n_f32(-2.302208198f); /* times log2(e) */
    svst1_f32(p, gaussian, vector_exp2_of_product(x, svmla_n_f32_x(all, least, square, -2.302208198f * 0.044715f)));
}

/* Second stage: (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)). */
INLINE svfloat32_t tanh_result(svbool_t p, svfloat32_t x, const float *gaussian, svfloat32_t grad, const int has_grad)
{
    const svbool_t all = svptrue_b32();
    const svfloat32_t power = svld1_f32(p, gaussian);
    const svfloat32_t cdf = vector_inverse(svadd_n_f32_x(all, power, 1.0f));
    if (!has_grad) return svmul_f32_x(all, x, cdf);
    x = tanh_clamp(x);
    const svfloat32_t square = svmul_f32_x(all, x, x), least = svdup_n_f32(1.595769122f);
    const svfloat32_t z_slope = svmla_n_f32_x(all, least, square, 1.595769122f * 3.0f * 0.044715f);
    const svfloat32_t complement = svmul_f32_x(all, power, cdf); /* 1 - cdf would lose digits */
    const svfloat32_t product = svmul_f32_x(all, svmul_f32_x(all, x, cdf), z_slope);
    return svmul_f32_x(all, grad, svmla_f32_x(all, cdf, product, complement));
}

INLINE void gelu_sve_parts(svbool_t p, const void *x, int64_t at, float *gaussian, float *inverse, const int type,
                           const int approximate)
{
    const svfloat32_t number = load_vector(p, x, at, type);
    if (approximate)
        tanh_parts(p, number, gaussian);
    else
        exact_parts(p, number, gaussian, inverse);
}

INLINE svfloat32_t gelu_sve_result(svbool_t p, const void *x, const void *grad, int64_t at, const float *gaussian,
                                   const float *inverse, const int type, const int approximate)
{
    const svfloat32_t number = load_vector(p, x, at, type);
    const svfloat32_t gradient = grad ? load_vector(p, grad, at, type) : number;
    return approximate ? tanh_result(p, number, gaussian, gradient, grad != 0)
                       : exact_result(p, number, gaussian, inverse, gradient, grad != 0);
}

/* `count` numbers from `first` on. */
INLINE void gelu_sve_block(const void *x, const void *grad, void *y, int64_t first, int64_t count, const int type,
                           const int approximate)
{
    float gaussian[BLOCK], inverse[BLOCK];
    const svbool_t all = svptrue_b32();
    const int64_t step = svcntw();
    int64_t i = 0;
    for (; i + step <= count; i += step)
        gelu_sve_parts(all, x, first + i, gaussian + i, inverse + i, type, approximate);
    if (i < count)
        gelu_sve_parts(svwhilelt_b32_s64(i, count), x, first + i, gaussian + i, inverse + i, type, approximate);
    for (i = 0; i + 2 * step <= count; i += 2 * step) {
        const int64_t k = i + step;
        const svfloat32_t y0 =
            gelu_sve_result(all, x, grad, first + i, gaussian + i, inverse + i, type, approximate);
        store_vectors(y0, gelu_sve_result(all, x, grad, first + k, gaussian + k, inverse + k, type, approximate), y,
                      first + i, type);
    }
    for (; i < count; i += step) {
        const svbool_t p = svwhilelt_b32_s64(i, count);
        store_vector(p, gelu_sve_result(p, x, grad, first + i, gaussian + i, inverse + i, type, approximate), y,
                     first + i, type);
    }
}

INLINE void gelu_sve_type(const void *x, const void *grad, void *y, int64_t first, int64_t count, const int type,
                          int approximate)
{
    if (approximate)
        grad ? gelu_sve_block(x, grad, y, first, count, type, 1) : gelu_sve_block(x, 0, y, first, count, type, 1);
    else
        grad ? gelu_sve_block(x, grad, y, first, count, type, 0) : gelu_sve_block(x, 0, y, first, count, type, 0);
}

static void gelu_blocks(const void *x, const void *grad, void *y, int64_t n, int type, int approximate, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < n; first += BLOCK) {
        const int64_t count = min_int64(BLOCK, n - first);
        if (type == BFLOAT16)
            gelu_sve_type(x, grad, y, first, count, BFLOAT16, approximate);
        else
            gelu_sve_type(x, grad, y, first, count, FLOAT32, approximate);
    }
}
#else
/* The factor of x in GELU(x), and GELU's derivative. */
typedef struct {
    float cdf, slope;
} Gelu;

/* The gaussian and the inverse of which the factors are made. */
typedef struct {
    float gaussian, inverse;
} Parts;

/* exp(-x^2 / 2). */
INLINE float exact_gaussian(float x)
{
    x = clamp(x, 12.9f);
    return exp2_bounded(x * x * -0.72134752f); /* log2(e) / 2 */
}

INLINE float exact_inverse(float x) { return 1.0f / (1.0f + 0.345f * fabsf(clamp(x, 12.9f))); }

INLINE Gelu gelu_exact(float x, Parts parts)
{
    x = clamp(x, 12.9f);
    const float v = parts.inverse, gaussian = parts.gaussian;
    float y = TAIL_9;
#define NEXT(c) y = y * v + c;
    NEXT(TAIL_8) NEXT(TAIL_7) NEXT(TAIL_6) NEXT(TAIL_5) NEXT(TAIL_4) NEXT(TAIL_3) NEXT(TAIL_2) NEXT(TAIL_1)
#undef NEXT
    const float tail = y * v * gaussian;
    const float cdf = x < 0.0f ? tail : 1.0f - tail;
    return (Gelu){cdf, cdf + x * gaussian * 0.3989422804f}; /* 1 / sqrt(2 pi) */
}

/* exp(-2 z), z = sqrt(2 / pi) (x + 0.044715 x^3). */
INLINE float tanh_gaussian(float x)
{
    x = clamp(x, 10.0f);
    return exp2_bounded(x * (1.0f + 0.044715f * (x * x)) * -2.302208198f); /* times log2(e) */
}

/* (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)). From 10 on it differs from 1 by 1e-38 or less. */
INLINE Gelu gelu_tanh(float x, Parts parts)
{
    x = clamp(x, 10.0f);
    const float square = x * x, cdf = parts.inverse;
    const float complement = parts.gaussian * cdf; /* 1 - cdf would lose digits */
    return (Gelu){cdf, cdf + x * cdf * complement * 1.595769122f * (1.0f + 3.0f * 0.044715f * square)};
}

INLINE float gaussian_of(float x, const int approximate) { return approximate ? tanh_gaussian(x) : exact_gaussian(x); }

INLINE float inverse_of(float x, float gaussian, const int approximate)
{
    return approximate ? 1.0f / (1.0f + gaussian) : exact_inverse(x);
}

INLINE float gelu_of(float x, float grad, const int has_grad, Parts parts, const int approximate)
{
    const Gelu factors = approximate ? gelu_tanh(x, parts) : gelu_exact(x, parts);
    return has_grad ? grad * factors.slope : x * factors.cdf;
}

/* At most BLOCK numbers. */
INLINE void gelu_loop(const float *x, const float *grad, float *y, int64_t n, const int approximate)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        Parts parts;
        if (!approximate) parts.inverse = exact_inverse(x[i]); /* in this order GCC 12 makes faster code for x86 */
        parts.gaussian = gaussian_of(x[i], approximate);
        if (approximate) parts.inverse = inverse_of(x[i], parts.gaussian, 1);
        y[i] = gelu_of(x[i], grad ? grad[i] : 0.0f, grad != 0, parts, approximate);
    }
}

INLINE void gelu_block(const float *x, const float *grad, float *y, int64_t n, int approximate)
{
    if (approximate)
        grad ? gelu_loop(x, grad, y, n, 1) : gelu_loop(x, 0, y, n, 1);
    else
        grad ? gelu_loop(x, grad, y, n, 0) : gelu_loop(x, 0, y, n, 0);
}

static void gelu_blocks(const void *x, const void *grad, void *y, int64_t n, int type, int approximate, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < n; first += BLOCK) {
        const int64_t count = min_int64(BLOCK, n - first);
        if (type == FLOAT32) {
            const float *grad_block = grad ? (const float *)grad + first : 0;
            gelu_block((const float *)x + first, grad_block, (float *)y + first, count, approximate);
            continue;
        }
        float x_block[BLOCK], grad_block[BLOCK];
        load_scaled(x, first, type, 1.0f, x_block, count);
        if (grad) load_scaled(grad, first, type, 1.0f, grad_block, count);
        gelu_block(x_block, grad ? grad_block : 0, x_block, count, approximate);
        store_scaled(x_block, 1.0f, y, first, type, count);
    }
}
#endif

/* y [n] = GELU(x), exact or, with `approximate`, by the tanh approximation. */
EXPORT void gelu(const void *x, void *y, int64_t n, int type, int approximate, int threads)
{
    gelu_blocks(x, 0, y, n, type, approximate, threads);
}

/* x_grad [n] from y_grad and x. */
EXPORT void gelu_gradient(const void *x, const void *y_grad, void *x_grad, int64_t n, int type, int approximate,
                          int threads)
{
    gelu_blocks(x, y_grad, x_grad, n, type, approximate, threads);
}

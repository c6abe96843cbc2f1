/* GELU (Hendrycks and Gimpel 2016), exact and by its tanh approximation, and its gradients; computed in float32. */
#include "common.h"

#include <math.h>

#define BLOCK 1024 /* numbers at a time: they stay in the L1 cache */

/* The factor of x in GELU(x), and GELU's derivative. */
typedef struct {
    float cdf, slope;
} Gelu;

/* x limited to [-limit, limit]; NaN stays NaN. */
INLINE float clamp(float x, float limit) { return x < -limit ? -limit : x > limit ? limit : x; }

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

INLINE float exact_inverse(float x) { return divide(1.0f, 1.0f + 0.345f * fabsf(clamp(x, 12.9f))); }

/* The normal distribution function. At -|x| it is exp(-x^2 / 2) times a slowly falling function, which is a
   polynomial in 1 / (1 + 0.345 |x|), as in Abramowitz and Stegun 1964, 26.2.17, but fitted anew for the smallest
   relative error (2e-8 before it is rounded). From 12.9 on it differs from 1 by 2e-38 or less. */
INLINE Gelu gelu_exact(float x, Parts parts)
{
    x = clamp(x, 12.9f);
    const float v = parts.inverse, gaussian = parts.gaussian;
    float y = -2.842730611e-2f;
    y = y * v + 1.454884182e-1f;
    y = y * v - 2.715707689e-1f;
    y = y * v + 1.876187589e-1f;
    y = y * v - 3.787076518e-2f;
    y = y * v + 1.119047836e-1f;
    y = y * v + 1.172137406e-1f;
    y = y * v + 1.380240034e-1f;
    y = y * v + 1.376191256e-1f;
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
    return approximate ? divide(1.0f, 1.0f + gaussian) : exact_inverse(x);
}

INLINE float gelu_of(float x, float grad, const int has_grad, Parts parts, const int approximate)
{
    const Gelu factors = approximate ? gelu_tanh(x, parts) : gelu_exact(x, parts);
    return has_grad ? grad * factors.slope : x * factors.cdf;
}

/* At most BLOCK numbers. */
INLINE void gelu_loop(const float *x, const float *grad, float *y, int64_t n, const int approximate)
{
#ifdef IN_STAGES
    float gaussian[BLOCK], inverse[BLOCK];
#pragma omp simd
    for (int64_t i = 0; i < n; i++) gaussian[i] = gaussian_of(x[i], approximate);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) inverse[i] = inverse_of(x[i], gaussian[i], approximate);
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        y[i] = gelu_of(x[i], grad ? grad[i] : 0.0f, grad != 0, (Parts){gaussian[i], inverse[i]}, approximate);
#else
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        Parts parts;
        if (!approximate) parts.inverse = exact_inverse(x[i]); /* in this order GCC 12 makes faster code for x86 */
        parts.gaussian = gaussian_of(x[i], approximate);
        if (approximate) parts.inverse = inverse_of(x[i], parts.gaussian, 1);
        y[i] = gelu_of(x[i], grad ? grad[i] : 0.0f, grad != 0, parts, approximate);
    }
#endif
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

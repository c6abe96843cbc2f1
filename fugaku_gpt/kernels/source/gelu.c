/* GELU (Hendrycks and Gimpel 2016), exact and by its tanh approximation, and its gradients; computed in float32. */
#include "common.h"

#include <math.h>

#define BLOCK 1024 /* numbers at a time: they stay in the first cache */

/* What x is multiplied by, and the derivative of the product. */
typedef struct {
    float share, slope;
} Gelu;

/* x, or what is nearest to it from -most to most; what is no number stays none. */
INLINE float within(float x, float most) { return x < -most ? -most : x > most ? most : x; }

/* The share of a normal distribution below x. Of -|x| it is exp(-x^2 / 2) times a function that falls slowly, and that
   is a polynomial in 1 / (1 + 0.345 |x|), as in Abramowitz and Stegun 1964, 26.2.17, but fitted anew for the smallest
   relative error (2e-8 before it is rounded). From 12.9 on the share is 2e-38 or less than that from 1. */
INLINE Gelu exact(float x)
{
    x = within(x, 12.9f);
    const float size = fabsf(x), v = 1.0f / (1.0f + 0.345f * size);
    const float falls = power_within(x * x * -0.72134752f); /* log2(e) / 2 */
    float y = -2.842730611e-2f;
    y = y * v + 1.454884182e-1f;
    y = y * v - 2.715707689e-1f;
    y = y * v + 1.876187589e-1f;
    y = y * v - 3.787076518e-2f;
    y = y * v + 1.119047836e-1f;
    y = y * v + 1.172137406e-1f;
    y = y * v + 1.380240034e-1f;
    y = y * v + 1.376191256e-1f;
    const float outside = y * v * falls;
    const float share = x < 0.0f ? outside : 1.0f - outside;
    return (Gelu){share, share + x * falls * 0.3989422804f}; /* 1 / sqrt(2 pi) */
}

/* (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3). From 10 on it is 1e-38 or less than
   that from 1. */
INLINE Gelu by_tanh(float x)
{
    x = within(x, 10.0f);
    const float square = x * x;
    const float falls = power_within(x * (1.0f + 0.044715f * square) * -2.302208198f); /* exp(-2 z): times log2(e) */
    const float share = 1.0f / (1.0f + falls), rest = falls * share; /* 1 - share would have lost digits */
    return (Gelu){share, share + x * share * rest * 1.595769122f * (1.0f + 3.0f * 0.044715f * square)};
}

INLINE void products(const float *x, const float *grad, float *y, int64_t n, const int approximate)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const Gelu its = approximate ? by_tanh(x[i]) : exact(x[i]);
        y[i] = grad ? grad[i] * its.slope : x[i] * its.share;
    }
}

INLINE void some_products(const float *x, const float *grad, float *y, int64_t n, int approximate)
{
    if (approximate)
        grad ? products(x, grad, y, n, 1) : products(x, 0, y, n, 1);
    else
        grad ? products(x, grad, y, n, 0) : products(x, 0, y, n, 0);
}

static void all_products(const void *x, const void *grad, void *y, int64_t n, int type, int approximate, int threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < n; first += BLOCK) {
        const int64_t some = smaller(BLOCK, n - first);
        if (type == FLOAT32) {
            const float *its_grad = grad ? (const float *)grad + first : 0;
            some_products((const float *)x + first, its_grad, (float *)y + first, some, approximate);
            continue;
        }
        float its[BLOCK], its_grad[BLOCK];
        load(x, first, type, 1.0f, its, some);
        if (grad) load(grad, first, type, 1.0f, its_grad, some);
        some_products(its, grad ? its_grad : 0, its, some, approximate);
        store(its, 1.0f, y, first, type, some);
    }
}

/* y [n] of x, exact or, with `approximate`, by its approximation. */
EXPORT void gelu(const void *x, void *y, int64_t n, int type, int approximate, int threads)
{
    all_products(x, 0, y, n, type, approximate, threads);
}

/* x_grad [n] from y_grad. */
EXPORT void gelu_gradient(const void *x, const void *y_grad, void *x_grad, int64_t n, int type, int approximate, int threads)
{
    all_products(x, y_grad, x_grad, n, type, approximate, threads);
}

/* What attention's two ways to compute have in common: where a head's numbers are, and the softmax of a block's rows. */
#ifndef FUGAKU_GPT_KERNELS_ATTENTION_H
#define FUGAKU_GPT_KERNELS_ATTENTION_H

#include "common.h"

#include <math.h>

/* Queries of a block, by measurement; a multiple of 2 and of TILE_ROWS. Keys, of TILE_COLUMNS. Those of 48 to 192 and 64 to 128
   were within some 10 % of each other. */
#define QUERIES 96
#define KEYS 64

#define LOG2_E 1.44269504088896341f

/* By which queries are multiplied: scores are powers of two then. Both passes must round it alike. */
INLINE float scale_of(int64_t width) { return LOG2_E / sqrtf((float)width); }

typedef struct {
    int64_t parts, samples, here, heads, width; /* qkv: [parts, samples, here, 3, heads, width] */
    int64_t length, padded;                     /* parts * here; width with its zeros */
    int type;
} Shape;

INLINE Shape shape_of(int64_t parts, int64_t samples, int64_t here, int64_t heads, int64_t width, int type)
{
    Shape s = {parts, samples, here, heads, width, parts * here, round_up(width, TILE_COLUMNS), type};
    return s;
}

/* The token at position t of a sample. */
INLINE int64_t token(const Shape *s, int64_t sample, int64_t t)
{
    return (t / s->here * s->samples + sample) * s->here + t % s->here;
}

/* Of a head's rows; the first three as they follow each other in qkv. */
enum { QUERY = 0, KEY = 1, VALUE = 2, OUTPUT = 3 };

/* Where a head's query, key or value begins. */
INLINE int64_t input_at(const Shape *s, int64_t sample, int64_t head, int64_t t, int which)
{
    return ((token(s, sample, t) * 3 + which) * s->heads + head) * s->width;
}

INLINE int64_t output_at(const Shape *s, int64_t sample, int64_t head, int64_t t)
{
    return (token(s, sample, t) * s->heads + head) * s->width;
}

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* The probabilities of a query, but for their sum: x[j] = 2^(x[j] - top) of those keys that are not after it, else 0. */
INLINE float exponentials(float *x, int64_t valid, float top)
{
    float sum = 0.0f;
    if (valid == KEYS) { /* a length that the compiler knows */
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < KEYS; j++) {
            x[j] = power_of_two(x[j] - top);
            sum += x[j];
        }
        return sum;
    }
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < valid; j++) {
        x[j] = power_of_two(x[j] - top);
        sum += x[j];
    }
    for (int64_t j = valid; j < KEYS; j++) x[j] = 0.0f;
    return sum;
}

INLINE float largest(const float *x, int64_t n, float top)
{
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < n; j++) top = x[j] > top ? x[j] : top;
    return top;
}

/* x[j] = 0 where a probability was dropped. */
INLINE void drop(float *restrict x, const uint8_t *restrict kept, int64_t n)
{
#pragma omp simd
    for (int64_t j = 0; j < n; j++) x[j] = kept[j] ? x[j] : 0.0f;
}

/* A block's scores of a query become probabilities but for their sum, whose largest score and sum so far, and output
   [padded], are brought in line with it. kept: flags of dropout, or none. */
INLINE void probabilities(float *row, int64_t valid, const uint8_t *kept, float *top, float *sum, float *out,
                          int64_t padded)
{
    const float now = largest(row, valid, *top);
    const float its = exponentials(row, valid, now);
    if (now != *top) {
        const float less = exp2f(*top - now);
        *sum *= less;
#pragma omp simd
        for (int64_t j = 0; j < padded; j++) out[j] *= less;
        *top = now;
    }
    *sum += its;
    if (kept) drop(row, kept, valid);
}

/* Of a block's scores p of a query, and the gradients g of its probabilities, these probabilities, and the gradients of
   the scores; sum: over all keys, of probability and gradient. */
INLINE void gradients(float *restrict p, float *restrict g, int64_t valid, const uint8_t *kept, float log_sum, float sum)
{
    if (kept) drop(g, kept, valid);
    if (valid == KEYS) {
#pragma omp simd
        for (int64_t j = 0; j < KEYS; j++) {
            p[j] = power_of_two(p[j] - log_sum);
            g[j] = (g[j] - sum) * p[j];
        }
    } else {
#pragma omp simd
        for (int64_t j = 0; j < valid; j++) {
            p[j] = power_of_two(p[j] - log_sum);
            g[j] = (g[j] - sum) * p[j];
        }
        for (int64_t j = valid; j < KEYS; j++) p[j] = g[j] = 0.0f;
    }
    if (kept) drop(p, kept, valid);
}

/* The two ways. kept: [length, length] flags of dropout, or none; the others are scaled by factor. log_sums: [length].
   work: as many float32 numbers as float32_floats(), or bfloat16_floats(), says. */
int64_t float32_floats(const Shape *s);
void float32_forward(const Shape *s, const void *qkv, int64_t sample, int64_t head, const uint8_t *kept, float factor,
                     void *y, float *log_sums, float *work);
void float32_backward(const Shape *s, const void *qkv, int64_t sample, int64_t head, const uint8_t *kept, float factor,
                      const void *y, const void *y_grad, const float *log_sums, void *qkv_grad, float *work);
int64_t bfloat16_floats(const Shape *s);
#ifdef HAS_PAIRS
void bfloat16_forward(const Shape *s, const void *qkv, int64_t sample, int64_t head, const uint8_t *kept, float factor,
                      void *y, float *log_sums, float *work);
void bfloat16_backward(const Shape *s, const void *qkv, int64_t sample, int64_t head, const uint8_t *kept, float factor,
                       const void *y, const void *y_grad, const float *log_sums, void *qkv_grad, float *work);
#endif

#endif

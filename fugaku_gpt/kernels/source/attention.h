/* Shared by both implementations of attention: where a head's numbers are, and the softmax of a block's rows. */
#ifndef FUGAKU_GPT_KERNELS_ATTENTION_H
#define FUGAKU_GPT_KERNELS_ATTENTION_H

#include "common.h"

#include <math.h>

/* Queries and keys of a block, by measurement: multiples of 2 and ATTENTION_MR, and of ATTENTION_NR. Sizes of 48 to 192
   and 64 to 128 were within about 10 % of each other. */
#define QUERIES 96
#define KEYS 64

#define LOG2_E 1.44269504088896341f

/* The factor of queries: probabilities are then powers of two of scores. Both passes must round it alike. */
INLINE float scale_of(int64_t width) { return LOG2_E / sqrtf((float)width); }

typedef struct {
    int64_t shards, samples, local_length, heads, width; /* qkv: [shards, samples, local_length, 3, heads, width] */
    int64_t length, padded;                              /* shards * local_length; width padded with zeros */
    int type;
} Shape;

INLINE Shape shape_of(int64_t shards, int64_t samples, int64_t local_length, int64_t heads, int64_t width, int type)
{
    Shape s = {shards, samples, local_length, heads, width, shards * local_length, round_up(width, ATTENTION_NR), type};
    return s;
}

/* The token at position t of a sample. */
INLINE int64_t token(const Shape *s, int64_t sample, int64_t t)
{
    return (t / s->local_length * s->samples + sample) * s->local_length + t % s->local_length;
}

/* Kinds of a head's rows; the first three in their order in qkv. */
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

INLINE int64_t max_int64(int64_t a, int64_t b) { return a > b ? a : b; }

/* The unnormalised probabilities of a query: x[j] = 2^(x[j] - top) for the keys that it sees, otherwise 0. */
INLINE float exp2_row(float *x, int64_t valid, float top)
{
    float sum = 0.0f;
    if (valid == KEYS) { /* a constant for the compiler */
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < KEYS; j++) {
            x[j] = exp2_flushed(x[j] - top);
            sum += x[j];
        }
        return sum;
    }
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < valid; j++) {
        x[j] = exp2_flushed(x[j] - top);
        sum += x[j];
    }
    for (int64_t j = valid; j < KEYS; j++) x[j] = 0.0f;
    return sum;
}

INLINE float row_max(const float *x, int64_t n, float top)
{
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < n; j++) top = x[j] > top ? x[j] : top;
    return top;
}

/* x[j] = 0 where dropout has dropped a probability. */
INLINE void apply_mask(float *restrict x, const uint8_t *restrict keep_mask, int64_t n)
{
#pragma omp simd
    for (int64_t j = 0; j < n; j++) x[j] = keep_mask[j] ? x[j] : 0.0f;
}

/* A block's scores of a query become unnormalised probabilities; the query's largest score, sum and output [padded] so
   far are rescaled to match. keep_mask: flags of dropout, or null. */
INLINE void online_softmax_row(float *row, int64_t valid, const uint8_t *keep_mask, float *top, float *sum, float *out,
                               int64_t padded)
{
    const float new_top = row_max(row, valid, *top);
    const float block_sum = exp2_row(row, valid, new_top);
    if (new_top != *top) {
        const float correction = exp2f(*top - new_top);
        *sum *= correction;
#pragma omp simd
        for (int64_t j = 0; j < padded; j++) out[j] *= correction;
        *top = new_top;
    }
    *sum += block_sum;
    if (keep_mask) apply_mask(row, keep_mask, valid);
}

/* A block's scores p of a query become probabilities, and the gradients g of its probabilities become those of its
   scores; sum: over all keys, of probability times gradient. */
INLINE void softmax_backward_row(float *restrict p, float *restrict g, int64_t valid, const uint8_t *keep_mask,
                                 float log_sum, float sum)
{
    if (keep_mask) apply_mask(g, keep_mask, valid);
    if (valid == KEYS) {
#pragma omp simd
        for (int64_t j = 0; j < KEYS; j++) {
            p[j] = exp2_flushed(p[j] - log_sum);
            g[j] = (g[j] - sum) * p[j];
        }
    } else {
#pragma omp simd
        for (int64_t j = 0; j < valid; j++) {
            p[j] = exp2_flushed(p[j] - log_sum);
            g[j] = (g[j] - sum) * p[j];
        }
        for (int64_t j = valid; j < KEYS; j++) p[j] = g[j] = 0.0f;
    }
    if (keep_mask) apply_mask(p, keep_mask, valid);
}

/* Rows of a block of scores: query i sees the first seen + i of its keys. */
typedef struct {
    int64_t count, seen;
    const uint8_t *keep_mask; /* flags of dropout of the first query, or null */
    int64_t mask_row;         /* flags from one query to the next */
} Block;

INLINE int64_t valid_keys(const Block *block, int64_t i) { return min_int64(KEYS, block->seen + i); }

INLINE const uint8_t *mask_of(const Block *block, int64_t i)
{
    return block->keep_mask ? block->keep_mask + i * block->mask_row : 0;
}

/* The two implementations. keep_mask: [length, length] flags of dropout, or null; probabilities that stay are scaled by
   factor. log_sums: [length]. work: float32_workspace_floats() or bfloat16_workspace_floats() float32 numbers. */
int64_t float32_workspace_floats(const Shape *s);
void float32_forward(const Shape *s, const void *qkv, int64_t sample, int64_t head, const uint8_t *keep_mask,
                     float factor, void *y, float *log_sums, float *work);
void float32_backward(const Shape *s, const void *qkv, int64_t sample, int64_t head, const uint8_t *keep_mask,
                      float factor, const void *y, const void *y_grad, const float *log_sums, void *qkv_grad,
                      float *work);
int64_t bfloat16_workspace_floats(const Shape *s);
#ifdef HAS_BF16_DOT
void bfloat16_forward(const Shape *s, const void *qkv, int64_t sample, int64_t head, const uint8_t *keep_mask,
                      float factor, void *y, float *log_sums, float *work);
void bfloat16_backward(const Shape *s, const void *qkv, int64_t sample, int64_t head, const uint8_t *keep_mask,
                       float factor, const void *y, const void *y_grad, const float *log_sums, void *qkv_grad,
                       float *work);
#endif

#endif

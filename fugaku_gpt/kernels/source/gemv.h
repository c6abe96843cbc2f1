/* Sums of products of few vectors with the rows of a matrix that is read once: for gemv.c, and for the scores of
   decode_attention.c. */
#ifndef FUGAKU_GPT_KERNELS_GEMV_H
#define FUGAKU_GPT_KERNELS_GEMV_H

#include "common.h"

#define COLUMNS 2 /* rows of the weight, which are columns of the result, that share the loads of several vectors */
#define CHAINS 2  /* sums of an element: in one each addition would wait for the one before */
#define STEP (CHAINS * LANES)
#if defined(__AVX512F__) || defined(__aarch64__) /* 32 registers */
#define ROWS 4 /* vectors that share the loads of a weight */
#else
#define ROWS 2
#endif
/* Processors stop prefetching at the end of a page. A64FX has larger pages, and needs no help; its sums wait longer
   for each other, so that a single vector takes several rows of the weight, too. */
#define PREFETCH_BYTES 4096
#ifdef __aarch64__
#define IS_STREAM 0
#else
#define IS_STREAM 1
#endif

typedef struct {
    const float *x; /* [m, k] */
    const void *w, *bias;
    void *y;          /* [m, n], of rows y_row numbers from each other */
    int64_t m, n, k, y_row;
    int type, y_type; /* of w and bias, and of y */
} Gemv;

#ifdef HAS_FIXED_SVE
typedef sve_vec Sum;

/* Numbers at + 0, 1, ... of x in float32; from `count` on they are 0. */
INLINE Sum load(const void *x, int64_t at, int64_t count, const int type)
{
    return load_vector(count >= LANES ? svptrue_b32() : svwhilelt_b32_s64(0, count), x, at, type);
}

INLINE void store(float *y, int64_t count, Sum numbers)
{
    svst1_f32(count >= LANES ? svptrue_b32() : svwhilelt_b32_s64(0, count), y, numbers);
}

INLINE Sum splat(float x) { return svdup_n_f32(x); }

INLINE Sum add_product(Sum sum, Sum a, Sum b) { return svmla_f32_x(svptrue_b32(), sum, a, b); }

INLINE float total(Sum first, Sum second) { return svaddv_f32(svptrue_b32(), add_vectors(first, second)); }
#else
#ifdef __aarch64__
#include <arm_neon.h>
#endif
typedef vec Sum;
typedef uint32_t uint32_vec __attribute__((vector_size(4 * LANES)));
typedef uint16_t uint16_vec __attribute__((vector_size(2 * LANES)));

INLINE Sum load(const void *x, int64_t at, int64_t count, const int type)
{
    if (type == BFLOAT16) {
        uint16_vec halves = {0};
        memcpy(&halves, (const uint16_t *)x + at, 2 * min_int64(LANES, count));
        return (Sum)(__builtin_convertvector(halves, uint32_vec) << 16);
    }
    Sum numbers = {0};
    memcpy(&numbers, (const float *)x + at, 4 * min_int64(LANES, count));
    return numbers;
}

INLINE void store(float *y, int64_t count, Sum numbers) { memcpy(y, &numbers, 4 * min_int64(LANES, count)); }

INLINE Sum splat(float x) { return x - (Sum){0}; }

INLINE Sum add_product(Sum sum, Sum a, Sum b) { return sum + a * b; }

INLINE float total(Sum first, Sum second)
{
    const Sum both = first + second;
#if defined(__aarch64__) && LANES == 4 /* where GCC 12 may use SVE of any length, it permutes the sums of loops */
    return vaddvq_f32((float32x4_t)both);
#else
    float numbers[LANES], sum = 0.0f;
    memcpy(numbers, &both, sizeof numbers);
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < LANES; i++) sum += numbers[i];
    return sum;
#endif
}
#endif

/* Sums of `rows` vectors and `columns` rows of the weight. */
typedef struct {
    Sum of[ROWS][COLUMNS];
} Sums;

/* Adds the products of LANES numbers from j on, or `count` if these are fewer. */
INLINE void add_products(const Gemv *p, const int rows, int64_t row, const int columns, int64_t column, int64_t j,
                         int64_t count, const int type, Sums *sums)
{
    Sum weights[COLUMNS];
#pragma GCC unroll 2
    for (int c = 0; c < columns; c++) weights[c] = load(p->w, (column + c) * p->k + j, count, type);
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
        const Sum x = load(p->x, (row + i) * p->k + j, count, FLOAT32);
#pragma GCC unroll 2
        for (int c = 0; c < columns; c++) sums->of[i][c] = add_product(sums->of[i][c], weights[c], x);
    }
}

/* Prefetches the weight for step j of the rows of the weight that follow these, in the order of memory. */
INLINE void prefetch(const Gemv *p, const int columns, int64_t column, int64_t j, const int type)
{
    const int64_t bytes = type == BFLOAT16 ? 2 : 4, rest = columns > 1 ? columns * p->k : 0;
    const char *ahead = (const char *)p->w + (column * p->k + columns * j + rest) * bytes + PREFETCH_BYTES;
#pragma GCC unroll 8
    for (int64_t line = 0; line < columns * STEP * bytes; line += 64) __builtin_prefetch(ahead + line);
}

/* The results of `rows` vectors from `row` on, in `columns` columns. */
INLINE void multiply(const Gemv *p, const int rows, int64_t row, const int columns, int64_t column, const int type)
{
    Sums even = {0}, odd = {0};
    int64_t j = 0;
    for (; j + STEP <= p->k; j += STEP) {
        if (IS_STREAM) prefetch(p, columns, column, j, type);
        add_products(p, rows, row, columns, column, j, LANES, type, &even);
        add_products(p, rows, row, columns, column, j + LANES, LANES, type, &odd);
    }
    for (; j < p->k; j += LANES) add_products(p, rows, row, columns, column, j, p->k - j, type, &even);
#pragma GCC unroll 2
    for (int c = 0; c < columns; c++) {
        float bias = 0.0f;
        if (p->bias && type == BFLOAT16) bias = from_bfloat16(((const uint16_t *)p->bias)[column + c]);
        if (p->bias && type != BFLOAT16) bias = ((const float *)p->bias)[column + c];
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            const int64_t at = (row + i) * p->y_row + column + c;
            const float y = total(even.of[i][c], odd.of[i][c]) + bias;
            if (p->y_type == BFLOAT16)
                ((uint16_t *)p->y)[at] = to_bfloat16(y);
            else
                ((float *)p->y)[at] = y;
        }
    }
}

/* All results in `columns` columns. */
INLINE void multiply_all(const Gemv *p, const int columns, int64_t column, const int type)
{
    int64_t row = 0;
    for (; row + ROWS <= p->m; row += ROWS) multiply(p, ROWS, row, columns, column, type);
    const int64_t rest = p->m - row;
    if (rest == 1) multiply(p, 1, row, columns, column, type);
    if (ROWS > 2 && rest == 2) multiply(p, 2, row, columns, column, type);
    if (ROWS > 2 && rest == 3) multiply(p, 3, row, columns, column, type);
}

/* Columns [first, last) of the results. */
INLINE void multiply_columns(const Gemv *p, int64_t first, int64_t last, const int type)
{
    if (p->m > 1 || !IS_STREAM)
        for (; first + COLUMNS <= last; first += COLUMNS) multiply_all(p, COLUMNS, first, type);
    for (; first < last; first++) multiply_all(p, 1, first, type);
}

#endif

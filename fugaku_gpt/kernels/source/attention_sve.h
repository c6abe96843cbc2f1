/* Attention's softmax and transposes by SVE vectors of a fixed length. A64FX adds up a vector's lanes slowly and waits 9
   cycles for each operation: rows are reduced LANES at a time, and the exponentials of a row take turns. */
#ifndef FUGAKU_GPT_KERNELS_ATTENTION_SVE_H
#define FUGAKU_GPT_KERNELS_ATTENTION_SVE_H

#include "attention.h"

/* Of pairs of vectors, the sums or the larger numbers of their lanes' pairs. NaN is the largest. */
INLINE void reduce_pairs(sve_vec *rows, const int count, const int adds)
{
    const svbool_t all = svptrue_b32();
#pragma GCC unroll 8
    for (int i = 0; i < count / 2; i++) {
        const svfloat32_t even = svuzp1(rows[2 * i], rows[2 * i + 1]), odd = svuzp2(rows[2 * i], rows[2 * i + 1]);
        rows[i] = adds ? svadd_x(all, even, odd) : svmax_x(all, even, odd);
    }
}

/* Lane i of the result: the sum, or the largest, of the i-th of LANES rows of LANES numbers. */
INLINE svfloat32_t reduce_rows(const float *x, const int adds)
{
    sve_vec rows[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = svld1(svptrue_b32(), x + i * LANES);
    reduce_pairs(rows, LANES, adds);
    reduce_pairs(rows, LANES / 2, adds);
    reduce_pairs(rows, LANES / 4, adds);
    reduce_pairs(rows, LANES / 8, adds);
    return rows[0];
}

/* x[i, j] = value for the keys j of a block that query i does not see: at the end of the first rows, and at the beginning
   of the last. */
INLINE void hide_keys(const Block *block, float *x, float value)
{
    if (block->is_full) return;
    const int64_t count = count_up_to(block->end_keys, block->count, block->first + KEYS - 1);
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = seen_to(block, i); j < KEYS; j += LANES)
            svst1(svwhilelt_b32(j, (int64_t)KEYS), x + i * KEYS + j, svdup_f32(value));
    for (int64_t i = count_up_to(block->first_keys, block->count, block->first); i < block->count; i++)
        for (int64_t j = 0, from = seen_from(block, i); j < from; j += LANES)
            svst1(svwhilelt_b32(j, from), x + i * KEYS + j, svdup_f32(value));
}

/* online_softmax_row() for up to LANES queries. A query that has seen no key yet has a largest score of -infinity, and is
   shifted by 0. */
static void online_softmax_group(float *scores, int64_t rows, float *tops, float *sums, float *out, int64_t padded)
{
    const svbool_t all = svptrue_b32();
    const svbool_t present = svwhilelt_b32((int64_t)0, rows);
    float partial[LANES * LANES], factors[LANES], shifts[LANES];
    for (int64_t i = 0; i < rows; i++) {
        const float *row = scores + i * KEYS;
        svfloat32_t top = svld1(all, row);
#pragma GCC unroll 16
        for (int j = LANES; j < KEYS; j += LANES) top = svmax_x(all, top, svld1(all, row + j));
        svst1(all, partial + i * LANES, top);
    }
    memset(partial + rows * LANES, 0, (LANES - rows) * LANES * sizeof *partial);
    const svfloat32_t top = svld1(present, tops), new_top = svmax_x(all, top, reduce_rows(partial, 0));
    const svfloat32_t shifted = svsel(svcmpeq(all, new_top, -INFINITY), svdup_f32(0.0f), new_top);
    const svfloat32_t correction = vector_exp2(svsub_x(all, top, shifted));
    svst1(present, tops, new_top);
    svst1(all, shifts, shifted);
    for (int64_t i = 0; i < rows; i++) {
        float *row = scores + i * KEYS;
        const svfloat32_t shift = svdup_f32(shifts[i]);
        svfloat32_t sum = svdup_f32(0.0f);
#pragma GCC unroll 16
        for (int j = 0; j < KEYS; j += LANES) {
            const svfloat32_t p = vector_exp2(svsub_x(all, svld1(all, row + j), shift));
            svst1(all, row + j, p);
            sum = svadd_x(all, sum, p);
        }
        svst1(all, partial + i * LANES, sum);
    }
    svst1(present, sums, svmad_x(all, svld1(present, sums), correction, reduce_rows(partial, 1)));
    if (!svptest_any(all, svcmpne(all, correction, 1.0f))) return;
    svst1(all, factors, correction);
    for (int64_t i = 0; i < rows; i++)
        for (float *x = out + i * padded; x < out + (i + 1) * padded; x += 2 * LANES) {
            svst1(all, x, svmul_x(all, svld1(all, x), svdup_f32(factors[i])));
            svst1(all, x + LANES, svmul_x(all, svld1(all, x + LANES), svdup_f32(factors[i])));
        }
}

/* softmax_backward_row() without dropout. */
INLINE void softmax_backward_vectors(float *p, float *g, float log_sum, float sum)
{
    const svbool_t all = svptrue_b32();
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; j += LANES) {
        const svfloat32_t power = vector_exp2(svsub_x(all, svld1(all, p + j), svdup_f32(log_sum)));
        svst1(all, p + j, power);
        svst1(all, g + j, svmul_x(all, svsub_x(all, svld1(all, g + j), svdup_f32(sum)), power));
    }
}

INLINE void online_softmax(const Block *block, float *scores, float *tops, float *sums, float *out, int64_t padded)
{
    hide_keys(block, scores, -INFINITY);
    for (int64_t i = 0; i < block->count; i += LANES)
        online_softmax_group(scores + i * KEYS, min_int64(LANES, block->count - i), tops + i, sums + i,
                             out + i * padded, padded);
    for (int64_t i = 0; i < block->count && block->keep_mask; i++) drop(block, i, scores + i * KEYS);
}

INLINE void softmax_backward(const Block *block, float *p, float *g, const float *log_sums, const float *sums)
{
    for (int64_t i = 0; i < block->count && block->keep_mask; i++) drop(block, i, g + i * KEYS);
    for (int64_t i = 0; i < block->count; i++)
        softmax_backward_vectors(p + i * KEYS, g + i * KEYS, log_sums[i], sums[i]);
    hide_keys(block, p, 0.0f);
    hide_keys(block, g, 0.0f);
    for (int64_t i = 0; i < block->count && block->keep_mask; i++) drop(block, i, p + i * KEYS);
}

/* [KEYS, padded] to [padded, KEYS], by squares of LANES rows. */
static void transpose(const float *restrict x, int64_t padded, float *restrict y)
{
    const svbool_t all = svptrue_b32();
    for (int64_t i = 0; i < KEYS; i += LANES)
        for (int64_t j = 0; j < padded; j += LANES) {
            sve_vec rows[LANES];
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; lane++) rows[lane] = svld1(all, x + (i + lane) * padded + j);
            transpose_vectors(rows);
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; lane++) svst1(all, y + (j + lane) * KEYS + i, rows[lane]);
        }
}

/* Products of a block leave out what its queries do not see: tiles of scores that no query sees, and the terms of unseen
   keys or queries. Rows are divided into tiles of nearly the same size: with less than 9 rows, each sum would
   wait for its last term. */

INLINE void load_sums(vec (*sums)[2], const int rows, const float *c, int64_t c_row, const int accumulates)
{
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        sums[i][0] = accumulates ? *(const unaligned_vec *)(c + i * c_row) : (vec){0};
        sums[i][1] = accumulates ? *(const unaligned_vec *)(c + i * c_row + LANES) : (vec){0};
    }
}

INLINE void store_sums(vec (*sums)[2], const int rows, float *c, int64_t c_row)
{
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        *(unaligned_vec *)(c + i * c_row) = sums[i][0];
        *(unaligned_vec *)(c + i * c_row + LANES) = sums[i][1];
    }
}

/* c[rows, ATTENTION_NR] = or += a[rows, k] b[k, ATTENTION_NR] for even k; rows of b and c are n numbers apart. Each row of
   a has its own pointer, which the compiler may not derive from another: only then are its numbers loaded into all lanes
   by one instruction, which has no register for an index. */
INLINE void micro_kernel_rows(const int rows, int64_t k, const float *a, int64_t a_row, const float *b, float *c,
                              int64_t n, const int accumulates)
{
    vec sums[ATTENTION_MR][2];
    const float *from[ATTENTION_MR];
    load_sums(sums, rows, c, n, accumulates);
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) from[i] = a + i * a_row;
    for (int64_t j = 0; j < k; j += 2) {
#pragma GCC unroll 2
        for (int step = 0; step < 2; step++) {
            const vec left = *(const unaligned_vec *)b, right = *(const unaligned_vec *)(b + LANES);
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++) {
                const float factor = from[i][step];
                sums[i][0] += left * factor;
                sums[i][1] += right * factor;
            }
            b += n;
        }
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            from[i] += 2;
            __asm__("" : "+r"(from[i]));
        }
    }
    store_sums(sums, rows, c, n);
}

/* c[rows, ATTENTION_NR] += aT b, where a is [k, rows] of rows KEYS numbers apart. */
INLINE void micro_kernel_columns(const int rows, int64_t k, const float *a, const float *b, float *c, int64_t n)
{
    vec sums[ATTENTION_MR][2];
    load_sums(sums, rows, c, n, 1);
    for (int64_t j = 0; j < k; j++) {
        const vec left = *(const unaligned_vec *)b, right = *(const unaligned_vec *)(b + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            const float factor = a[i];
            sums[i][0] += left * factor;
            sums[i][1] += right * factor;
        }
        a += KEYS;
        b += n;
    }
    store_sums(sums, rows, c, n);
}

#if ATTENTION_MR == 12
#define EACH_SIZE(F) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11) F(12)
#else
#define EACH_SIZE(F) F(1) F(2) F(3) F(4) F(5) F(6)
_Static_assert(ATTENTION_MR == 6, "every size of a tile is compiled");
#endif
_Static_assert(QUERIES % LANES == 0 && KEYS % ATTENTION_NR == 0, "blocks end with full vectors and tiles");

/* Tiles of m rows: how many there are, the rows of each, and how many of them have one more. */
typedef struct {
    int count, rows, larger;
} Tiles;

INLINE Tiles tiles_of(int64_t m)
{
    const int count = ((int)m + ATTENTION_MR - 1) / ATTENTION_MR;
    Tiles tiles = {count, count ? (int)m / count : 0, count ? (int)m % count : 0};
    return tiles;
}

/* c[count, KEYS] = a[count, width] b[width, KEYS] */
static __attribute__((noinline)) void gemm_scores(const Block *block, int64_t width, const float *a, const float *b,
                                                  float *c)
{
    for (int64_t column = 0; column < KEYS; column += ATTENTION_NR) {
        int64_t i = first_query(block, column);
        const Tiles tiles = tiles_of(max_int64(0, end_query(block, column + ATTENTION_NR) - i));
        for (int tile = 0; tile < tiles.count; tile++) {
            const int rows = tiles.rows + (tile < tiles.larger);
#define TILE(size)                                                                                                     \
    case size: micro_kernel_rows(size, width, a + i * width, width, b + column, c + i * KEYS + column, KEYS, 0); break;
            switch (rows) { EACH_SIZE(TILE) }
#undef TILE
            i += rows;
        }
    }
}

/* c[count, n] += a[count, KEYS] b[KEYS, n] */
static __attribute__((noinline)) void gemm_over_keys(const Block *block, int64_t n, const float *a, const float *b,
                                                     float *c)
{
    const Tiles tiles = tiles_of(block->count);
    for (int64_t column = 0; column < n; column += ATTENTION_NR) {
        int64_t i = 0;
        for (int tile = 0; tile < tiles.count; tile++) {
            const int rows = tiles.rows + (tile < tiles.larger);
            const int64_t from = seen_from(block, i) / 2 * 2, k = round_up(seen_to(block, i + rows - 1), 2) - from;
#define TILE(size)                                                                                                     \
    case size: micro_kernel_rows(size, k, a + i * KEYS + from, KEYS, b + from * n + column, c + i * n + column, n, 1);  \
        break;
            switch (rows) { EACH_SIZE(TILE) }
#undef TILE
            i += rows;
        }
    }
}

/* c[KEYS, n] += aT b, where a is [count, KEYS] and b is [count, n] */
static __attribute__((noinline)) void gemm_over_queries(const Block *block, int64_t n, const float *a, const float *b,
                                                        float *c)
{
    const Tiles tiles = tiles_of(KEYS);
    int64_t first[KEYS], count[KEYS], key = 0; /* of each tile's queries, which see any of its keys */
    for (int tile = 0; tile < tiles.count; tile++) {
        first[tile] = first_query(block, key);
        key += tiles.rows + (tile < tiles.larger);
        count[tile] = end_query(block, key) - first[tile];
    }
    for (int64_t column = 0; column < n; column += ATTENTION_NR) {
        int64_t i = 0;
        for (int tile = 0; tile < tiles.count; tile++) {
            const int rows = tiles.rows + (tile < tiles.larger);
#define TILE(size)                                                                                                     \
    case size: micro_kernel_columns(size, count[tile], a + first[tile] * KEYS + i, b + first[tile] * n + column,       \
                                    c + i * n + column, n); break;
            switch (rows) { EACH_SIZE(TILE) }
#undef TILE
            i += rows;
        }
    }
}

#endif

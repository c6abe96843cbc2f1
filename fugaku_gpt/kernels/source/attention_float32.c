/* Attention of one head in float32, for tensors of any type. Their numbers are first copied into contiguous rows: width
   numbers, and zeros up to a multiple of ATTENTION_NR. Products are tiles of accumulators in registers. */
#include "attention.h"
#include "progress.h"

INLINE void load_row(const Shape *s, const void *x, int64_t at, float factor, float *y)
{
    load_scaled(x, at, s->type, factor, y, s->width);
    for (int64_t j = s->width; j < padded_width(s); j++) y[j] = 0.0f;
}

#ifdef HAS_FIXED_SVE
#include "attention_sve.h"
#else
/* c[rows, ATTENTION_NR] = or += a[rows, k] b[k, ATTENTION_NR]; a's element (i, j) is at i * a_row + j * a_column. */
INLINE void micro_kernel(const int rows, int64_t k, const float *a, int64_t a_row, int64_t a_column, const float *b,
                         int64_t b_row, float *c, int64_t c_row, int accumulates)
{
    vec sums[ATTENTION_MR][2];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        const float *from = c + i * c_row;
        sums[i][0] = accumulates ? *(const unaligned_vec *)from : (vec){0};
        sums[i][1] = accumulates ? *(const unaligned_vec *)(from + LANES) : (vec){0};
    }
    for (int64_t j = 0; j < k; j++) {
        const float *from = b + j * b_row;
        vec left = *(const unaligned_vec *)from, right = *(const unaligned_vec *)(from + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            float factor = a[i * a_row + j * a_column];
            sums[i][0] += left * factor;
            sums[i][1] += right * factor;
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        *(unaligned_vec *)(c + i * c_row) = sums[i][0];
        *(unaligned_vec *)(c + i * c_row + LANES) = sums[i][1];
    }
}

/* The rows of the next tile of the m that a product has from row i on. */
INLINE int64_t tile_rows(int64_t i, int64_t m)
{
    return i + ATTENTION_MR <= m ? ATTENTION_MR : i + 2 <= m ? 2 : 1;
}

/* micro_kernel() of a number of rows that tile_rows() returns. */
INLINE void micro_kernel_rows(int64_t rows, int64_t k, const float *a, int64_t a_row, int64_t a_column, const float *b,
                              int64_t b_row, float *c, int64_t c_row, int accumulates)
{
    if (rows == ATTENTION_MR)
        micro_kernel(ATTENTION_MR, k, a, a_row, a_column, b, b_row, c, c_row, accumulates);
    else if (rows == 2)
        micro_kernel(2, k, a, a_row, a_column, b, b_row, c, c_row, accumulates);
    else
        micro_kernel(1, k, a, a_row, a_column, b, b_row, c, c_row, accumulates);
}

/* [KEYS, padded] to [padded, KEYS] */
static void transpose(const float *restrict x, int64_t padded, float *restrict y)
{
    for (int64_t i = 0; i < KEYS; i += LANES)
        for (int64_t j = 0; j < padded; j++)
            for (int64_t lane = i; lane < i + LANES; lane++) y[j * KEYS + lane] = x[lane * padded + j];
}

/* The products leave out what no query of a tile sees, or no key of a tile is seen by: zeros that would be added. Each
   sum has the same order in every tile. */

/* c[count, KEYS] = a[count, width] b[width, KEYS], where a query sees any key of a tile. */
static __attribute__((noinline)) void gemm_scores(const Block *block, int64_t width, const float *a, const float *b,
                                                  float *c)
{
    for (int64_t key = 0; key < KEYS; key += ATTENTION_NR) {
        const int64_t end = end_query(block, key + ATTENTION_NR);
        for (int64_t i = first_query(block, key), rows; i < end; i += rows) {
            rows = tile_rows(i, end);
            micro_kernel_rows(rows, width, a + i * width, width, 1, b + key, KEYS, c + i * KEYS + key, KEYS, 0);
        }
    }
}

/* c[count, n] += a[count, KEYS] b[KEYS, n] */
static __attribute__((noinline)) void gemm_over_keys(const Block *block, int64_t n, const float *a, const float *b,
                                                     float *c)
{
    for (int64_t column = 0; column < n; column += ATTENTION_NR)
        for (int64_t i = 0, rows; i < block->count; i += rows) {
            rows = tile_rows(i, block->count);
            const int64_t from = seen_from(block, i), to = seen_to(block, i + rows - 1);
            micro_kernel_rows(rows, to - from, a + i * KEYS + from, KEYS, 1, b + from * n + column, n,
                              c + i * n + column, n, 1);
        }
}

/* c[KEYS, n] += aT b, where a is [count, KEYS] and b [count, n]. */
static __attribute__((noinline)) void gemm_over_queries(const Block *block, int64_t n, const float *a, const float *b,
                                                        float *c)
{
    for (int64_t key = 0, rows; key < KEYS; key += rows) {
        rows = tile_rows(key, KEYS);
        const int64_t first = first_query(block, key), count = end_query(block, key + rows) - first;
        for (int64_t column = 0; count > 0 && column < n; column += ATTENTION_NR)
            micro_kernel_rows(rows, count, a + first * KEYS + key, 1, KEYS, b + first * n + column, n,
                              c + key * n + column, n, 1);
    }
}

INLINE void online_softmax(const Block *block, float *scores, float *tops, float *sums, float *out, int64_t padded)
{
    for (int64_t i = 0; i < block->count; i++)
        online_softmax_row(block, i, scores + i * KEYS, tops + i, sums + i, out + i * padded, padded);
}

INLINE void softmax_backward(const Block *block, float *p, float *g, const float *log_sums, const float *sums)
{
    for (int64_t i = 0; i < block->count; i++)
        softmax_backward_row(block, i, p + i * KEYS, g + i * KEYS, log_sums[i], sums[i]);
}
#endif

/* Loads the keys or values of a block; zeros follow the last. */
static void load_keys(const Head *h, const void *x, int64_t first, float *y)
{
    const int64_t padded = padded_width(h->s);
    for (int64_t t = first; t < first + KEYS; t++, y += padded) {
        if (t < h->s->keys)
            load_row(h->s, x, key_at(h, t), 1.0f, y);
        else
            memset(y, 0, padded * sizeof *y);
    }
}

static int64_t forward_workspace_floats(const Shape *s)
{
    return padded_width(s) * (2 * round_up(s->keys, KEYS) + 2 * QUERIES + KEYS) + QUERIES * (KEYS + 2);
}

void float32_forward(const Head *h)
{
    const Shape *s = h->s;
    const int64_t padded = padded_width(s), all = round_up(s->keys, KEYS) * padded;
    const float scale = scale_of(s->width);
    float *keys = h->work, *values = keys + all, *queries = values + all, *out = queries + QUERIES * padded;
    float *block = out + QUERIES * padded, *scores = block + KEYS * padded, *tops = scores + QUERIES * KEYS;
    float *sums = tops + QUERIES;
    for (int64_t first = h->first_keys[0] / KEYS * KEYS; first < h->end_keys[s->queries - 1]; first += KEYS) {
        load_keys(h, h->keys, first, block);
        transpose(block, padded, keys + first * padded);
        load_keys(h, h->values, first, values + first * padded);
    }
    for (int64_t low = 0; low < s->queries; low += QUERIES) {
        poll_mpi();
        const int64_t count = min_int64(QUERIES, s->queries - low);
        for (int64_t i = 0; i < count; i++) {
            load_row(s, h->queries, query_at(h, low + i), scale, queries + i * padded);
            tops[i] = -INFINITY;
            sums[i] = 0.0f;
        }
        memset(out, 0, count * padded * sizeof *out);
        for (int64_t first = h->first_keys[low] / KEYS * KEYS; first < h->end_keys[low + count - 1]; first += KEYS) {
            const Block seen = block_of(h, low, count, first, 1);
            const int64_t from = seen.low - low;
            gemm_scores(&seen, padded, queries + from * padded, keys + first * padded, scores);
            online_softmax(&seen, scores, tops + from, sums + from, out + from * padded, padded);
            gemm_over_keys(&seen, padded, scores, values + first * padded, out + from * padded);
        }
        for (int64_t i = 0; i < count; i++) store_output(h, low + i, out + i * padded, tops[i], sums[i]);
    }
}

static int64_t backward_workspace_floats(const Shape *s)
{
    return padded_width(s) * (3 * s->queries + 7 * KEYS) + s->queries + 2 * QUERIES * KEYS;
}

void float32_backward(const Head *h)
{
    const Shape *s = h->s;
    const int64_t padded = padded_width(s), all = s->queries * padded, block_elements = KEYS * padded;
    const float scale = scale_of(s->width);
    float *queries = h->work, *out_grad = queries + all, *queries_grad = out_grad + all;
    float *keys = queries_grad + all, *values = keys + block_elements, *keys_transposed = values + block_elements,
          *values_transposed = keys_transposed + block_elements;
    float *keys_grad = values_transposed + block_elements, *values_grad = keys_grad + block_elements,
          *row = values_grad + block_elements;
    float *scores = row + block_elements, *scores_grad = scores + QUERIES * KEYS, *sums = scores_grad + QUERIES * KEYS;
    for (int64_t t = 0; t < s->queries; t++) {
        float *grad = out_grad + t * padded, sum = 0.0f;
        load_row(s, h->queries, query_at(h, t), scale, queries + t * padded);
        load_row(s, h->y, output_at(h, t), 1.0f, row);
        load_row(s, h->y_grad, output_at(h, t), 1.0f, grad);
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < padded; j++) sum += row[j] * grad[j];
        sums[t] = sum;
#pragma omp simd
        for (int64_t j = 0; j < padded; j++) grad[j] *= h->factor;
    }
    memset(queries_grad, 0, all * sizeof *queries_grad);
    for (int64_t first = 0; first < s->keys; first += KEYS) {
        load_keys(h, h->keys, first, keys);
        load_keys(h, h->values, first, values);
        transpose(keys, padded, keys_transposed);
        transpose(values, padded, values_transposed);
        poll_mpi();
        memset(keys_grad, 0, 2 * block_elements * sizeof *keys_grad); /* and values_grad */
        for (int64_t begin = 0; begin < s->queries; begin += QUERIES) {
            const Block seen = block_of(h, begin, min_int64(QUERIES, s->queries - begin), first, 1);
            const int64_t low = seen.low;
            if (!seen.count) continue;
            gemm_scores(&seen, padded, queries + low * padded, keys_transposed, scores);
            gemm_scores(&seen, padded, out_grad + low * padded, values_transposed, scores_grad);
            softmax_backward(&seen, scores, scores_grad, h->log_sums + low, sums + low);
            gemm_over_queries(&seen, padded, scores, out_grad + low * padded, values_grad);
            gemm_over_queries(&seen, padded, scores_grad, queries + low * padded, keys_grad);
            gemm_over_keys(&seen, padded, scores_grad, keys, queries_grad + low * padded);
        }
        for (int64_t t = first; t < min_int64(first + KEYS, s->keys); t++) /* queries were multiplied by log2 e too */
            store_key_grads(h, t, keys_grad + (t - first) * padded, 1.0f / LOG2_E, values_grad + (t - first) * padded,
                            1.0f);
    }
    for (int64_t t = 0; t < s->queries; t++)
        store_scaled(queries_grad + t * padded, scale / LOG2_E, h->queries_grad, query_at(h, t), s->type,
                     s->width);
}

int64_t float32_workspace_floats(const Shape *s)
{
    return max_int64(forward_workspace_floats(s), backward_workspace_floats(s));
}

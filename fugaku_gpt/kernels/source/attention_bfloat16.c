/* Attention of one head by products of pairs of bfloat16 numbers with float32 sums, on processors that have them. Scores
   and their softmax are float32; probabilities and gradients of scores are rounded before they are multiplied.

   A matrix of pairs, each of 32 bits, has one of two layouts: `rows` [rows, columns / 2], pairs of neighbours in a row,
   as in memory, and `interleaved` [rows / 2, columns], pairs of neighbours in a column. A product takes pairs along its
   inner dimension from both matrices: from the left one by one, from the right [inner / 2, columns] a vector at a time. */
#include "attention.h"
#include "progress.h"

static int64_t forward_workspace_floats(const Shape *s)
{
    const int64_t padded_length = round_up(s->keys, KEYS), half = padded_width(s) / 2;
    return half * (2 * padded_length + 3 * QUERIES + KEYS) + QUERIES * (KEYS + KEYS / 2 + 2);
}

static int64_t backward_workspace_floats(const Shape *s)
{
    const int64_t even = round_up(s->queries, 2), half = padded_width(s) / 2;
    return half * (4 * even + 2 * s->queries + 8 * KEYS) + s->queries + QUERIES * KEYS / 2 * 7;
}

int64_t bfloat16_workspace_floats(const Shape *s)
{
    return max_int64(forward_workspace_floats(s), backward_workspace_floats(s));
}

#ifdef HAS_BF16_DOT

_Static_assert(QUERIES % 2 == 0 && KEYS % ATTENTION_NR == 0, "queries come in full pairs, and keys in full tiles");

typedef uint32_t pair;

/* c[rows, ATTENTION_NR] = scale times, or +=, a[rows, 2 k] b[2 k, ATTENTION_NR]; a's pair (i, j) is at i * a_row +
   j * a_column. */
INLINE void micro_kernel(const int rows, int64_t k, const pair *a, int64_t a_row, int64_t a_column, const pair *b,
                         int64_t b_row, float *c, int64_t c_row, const int accumulates, float scale)
{
    __m512 sums[ATTENTION_MR][2];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        const float *from = c + i * c_row;
        sums[i][0] = accumulates ? _mm512_loadu_ps(from) : _mm512_setzero_ps();
        sums[i][1] = accumulates ? _mm512_loadu_ps(from + LANES) : _mm512_setzero_ps();
    }
    for (int64_t j = 0; j < k; j++) {
        const pair *from = b + j * b_row;
        const __m512bh left = (__m512bh)_mm512_loadu_si512(from), right = (__m512bh)_mm512_loadu_si512(from + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            const __m512bh factor = (__m512bh)_mm512_set1_epi32((int)a[i * a_row + j * a_column]);
            sums[i][0] = _mm512_dpbf16_ps(sums[i][0], factor, left);
            sums[i][1] = _mm512_dpbf16_ps(sums[i][1], factor, right);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        for (int half = 0; half < 2; half++) {
            if (!accumulates) sums[i][half] = _mm512_mul_ps(sums[i][half], _mm512_set1_ps(scale));
            _mm512_storeu_ps(c + i * c_row + half * LANES, sums[i][half]);
        }
    }
}

/* The rows of the next tile of the m that a product has from row i on. */
INLINE int64_t tile_rows(int64_t i, int64_t m)
{
    return i + ATTENTION_MR <= m ? ATTENTION_MR : i + 4 <= m ? 4 : 1;
}

/* micro_kernel() of a number of rows that tile_rows() returns. */
INLINE void micro_kernel_rows(int64_t rows, int64_t k, const pair *a, int64_t a_row, int64_t a_column, const pair *b,
                              int64_t b_row, float *c, int64_t c_row, const int accumulates, float scale)
{
    if (rows == ATTENTION_MR)
        micro_kernel(ATTENTION_MR, k, a, a_row, a_column, b, b_row, c, c_row, accumulates, scale);
    else if (rows == 4)
        micro_kernel(4, k, a, a_row, a_column, b, b_row, c, c_row, accumulates, scale);
    else
        micro_kernel(1, k, a, a_row, a_column, b, b_row, c, c_row, accumulates, scale);
}

/* The products leave out what no query of a tile sees, or no key of a tile is seen by: zeros that would be added. */

/* c[count, KEYS] = scale a[count, 2 k] b[2 k, KEYS], where a query sees any key of a tile; a in rows. */
static __attribute__((noinline)) void gemm_scores(const Block *block, int64_t k, const pair *a, const pair *b, float *c,
                                                  float scale)
{
    for (int64_t key = 0; key < KEYS; key += ATTENTION_NR) {
        const int64_t end = end_query(block, key + ATTENTION_NR);
        for (int64_t i = first_query(block, key), rows; i < end; i += rows) {
            rows = tile_rows(i, end);
            micro_kernel_rows(rows, k, a + i * k, k, 1, b + key, KEYS, c + i * KEYS + key, KEYS, 0, scale);
        }
    }
}

/* c[count, n] += a[count, KEYS] b[KEYS, n], a in rows. */
static __attribute__((noinline)) void gemm_over_keys(const Block *block, int64_t n, const pair *a, const pair *b,
                                                     float *c)
{
    for (int64_t column = 0; column < n; column += ATTENTION_NR)
        for (int64_t i = 0, rows; i < block->count; i += rows) {
            rows = tile_rows(i, block->count);
            const int64_t from = seen_from(block, i) / 2, to = (seen_to(block, i + rows - 1) + 1) / 2;
            micro_kernel_rows(rows, to - from, a + i * KEYS / 2 + from, KEYS / 2, 1, b + from * n + column, n,
                              c + i * n + column, n, 1, 1.0f);
        }
}

/* c[KEYS, n] += aT b, where a is [count, KEYS] and b [count, n]; both are interleaved. */
static __attribute__((noinline)) void gemm_over_queries(const Block *block, int64_t n, const pair *a, const pair *b,
                                                        float *c)
{
    for (int64_t key = 0, rows; key < KEYS; key += rows) {
        rows = tile_rows(key, KEYS);
        const int64_t first = first_query(block, key) / 2, count = (end_query(block, key + rows) + 1) / 2 - first;
        for (int64_t column = 0; count > 0 && column < n; column += ATTENTION_NR)
            micro_kernel_rows(rows, count, a + first * KEYS + key, 1, KEYS, b + first * n + column, n,
                              c + key * n + column, n, 1, 1.0f);
    }
}

INLINE __m512i round_pairs(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

/* The pairs (low[j], high[j]), rounded to bfloat16. */
INLINE __m512i interleave_rounded(__m512 low, __m512 high)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, round_pairs(low, high));
}

/* Rounds a row of [KEYS] numbers to pairs of neighbours. */
INLINE void round_row(const float *x, pair *y)
{
    for (int64_t j = 0; j < KEYS; j += 2 * LANES)
        _mm512_storeu_si512(y + j / 2, round_pairs(_mm512_loadu_ps(x + j), _mm512_loadu_ps(x + j + LANES)));
}

/* Rounds and interleaves two rows of [KEYS] numbers; a missing second row counts as zeros. */
INLINE void interleave_two_rows(const float *x, int has_second, pair *y)
{
    for (int64_t j = 0; j < KEYS; j += LANES) {
        const __m512 second = has_second ? _mm512_loadu_ps(x + KEYS + j) : _mm512_setzero_ps();
        _mm512_storeu_si512(y + j, interleave_rounded(_mm512_loadu_ps(x + j), second));
    }
}

/* Copies a row; zeros follow its numbers. */
INLINE void load_row(const Shape *s, const void *x, int64_t at, pair *y)
{
    memcpy(y, (const uint16_t *)x + at, s->width * sizeof(uint16_t));
    memset((uint16_t *)y + s->width, 0, (padded_width(s) - s->width) * sizeof(uint16_t));
}

/* Copies the keys or values of a block, [KEYS, padded]; zeros follow the last. */
static void load_keys(const Head *h, const void *x, int64_t first, pair *y)
{
    const int64_t half = padded_width(h->s) / 2;
    for (int64_t t = first; t < first + KEYS; t++, y += half) {
        if (t < h->s->keys)
            load_row(h->s, x, key_at(h, t), y);
        else
            memset(y, 0, half * sizeof *y);
    }
}

/* [2 n, padded] rows to [n, padded] interleaved. */
static void interleave_rows(const pair *rows, int64_t n, int64_t padded, pair *restrict y)
{
    for (int64_t i = 0; i < n; i++) {
        const uint16_t *restrict low = (const uint16_t *)rows + 2 * i * padded, *restrict high = low + padded;
#pragma omp simd
        for (int64_t j = 0; j < padded; j++) y[i * padded + j] = (pair)low[j] | (pair)high[j] << 16;
    }
}

/* A block's rows [KEYS, padded / 2] to [padded / 2, KEYS]: the right matrix of a product over the width. */
static void transpose(const pair *restrict x, int64_t half, pair *restrict y)
{
    for (int64_t i = 0; i < KEYS; i += LANES)
        for (int64_t j = 0; j < half; j++)
            for (int64_t lane = i; lane < i + LANES; lane++) y[j * KEYS + lane] = x[lane * half + j];
}

void bfloat16_forward(const Head *h)
{
    const Shape *s = h->s;
    const int64_t padded = padded_width(s), half = padded / 2, all = round_up(s->keys, KEYS) * half;
    const float scale = scale_of(s->width);
    pair *keys = (pair *)h->work, *values = keys + all, *queries = values + all, *block = queries + QUERIES * half;
    pair *p_rows = block + KEYS * half;
    float *out = (float *)(p_rows + QUERIES * KEYS / 2), *scores = out + QUERIES * padded,
          *tops = scores + QUERIES * KEYS;
    float *sums = tops + QUERIES;
    for (int64_t first = h->first_keys[0] / KEYS * KEYS; first < h->end_keys[s->queries - 1]; first += KEYS) {
        load_keys(h, h->keys, first, block);
        transpose(block, half, keys + first * half);
        load_keys(h, h->values, first, block);
        interleave_rows(block, KEYS / 2, padded, values + first * half);
    }
    for (int64_t low = 0; low < s->queries; low += QUERIES) {
        poll_mpi();
        const int64_t count = min_int64(QUERIES, s->queries - low);
        for (int64_t i = 0; i < count; i++) {
            load_row(s, h->queries, query_at(h, low + i), queries + i * half);
            tops[i] = -INFINITY;
            sums[i] = 0.0f;
        }
        memset(out, 0, count * padded * sizeof *out);
        for (int64_t first = h->first_keys[low] / KEYS * KEYS; first < h->end_keys[low + count - 1]; first += KEYS) {
            const Block seen = block_of(h, low, count, first, 1);
            const int64_t from = seen.low - low;
            gemm_scores(&seen, half, queries + from * half, keys + first * half, scores, scale);
            for (int64_t i = 0; i < seen.count; i++) {
                float *row = scores + i * KEYS;
                online_softmax_row(&seen, i, row, tops + from + i, sums + from + i, out + (from + i) * padded, padded);
                round_row(row, p_rows + i * KEYS / 2);
            }
            gemm_over_keys(&seen, padded, p_rows, values + first * half, out + from * padded);
        }
        for (int64_t i = 0; i < count; i++) store_output(h, low + i, out + i * padded, tops[i], sums[i]);
    }
}

/* Loads queries and gradients of outputs [even, padded], zeros after the last, and of each query the sum over the width
   of output times gradient. */
static void load_queries(const Head *h, int64_t even, pair *queries, pair *out_grad, float *sums)
{
    const Shape *s = h->s;
    const int64_t half = padded_width(s) / 2;
    for (int64_t t = 0; t < s->queries; t++) {
        load_row(s, h->queries, query_at(h, t), queries + t * half);
        load_row(s, h->y_grad, output_at(h, t), out_grad + t * half);
        const uint16_t *output = (const uint16_t *)h->y + output_at(h, t);
        const uint16_t *grad = (const uint16_t *)(out_grad + t * half);
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < s->width; j++) sum += from_bfloat16(output[j]) * from_bfloat16(grad[j]);
        sums[t] = sum;
    }
    memset(queries + s->queries * half, 0, (even - s->queries) * half * sizeof *queries);
    memset(out_grad + s->queries * half, 0, (even - s->queries) * half * sizeof *out_grad);
}

void bfloat16_backward(const Head *h)
{
    const Shape *s = h->s;
    const int64_t padded = padded_width(s), half = padded / 2, even = round_up(s->queries, 2), all = even * half;
    const int64_t block_elements = KEYS * half;
    const float scale = scale_of(s->width);
    pair *queries = (pair *)h->work, *queries_interleaved = queries + all, *out_grad = queries_interleaved + all;
    pair *out_grad_interleaved = out_grad + all, *block = out_grad_interleaved + all, *keys = block + block_elements,
         *keys_transposed = keys + block_elements;
    pair *values_transposed = keys_transposed + block_elements, *p_interleaved = values_transposed + block_elements,
         *g_interleaved = p_interleaved + QUERIES * KEYS / 2;
    pair *g_rows = g_interleaved + QUERIES * KEYS / 2;
    float *queries_grad = (float *)(g_rows + QUERIES * KEYS / 2), *keys_grad = queries_grad + s->queries * padded;
    float *values_grad = keys_grad + KEYS * padded, *scores = values_grad + KEYS * padded;
    float *scores_grad = scores + QUERIES * KEYS, *sums = scores_grad + QUERIES * KEYS;
    load_queries(h, even, queries, out_grad, sums);
    interleave_rows(queries, even / 2, padded, queries_interleaved);
    interleave_rows(out_grad, even / 2, padded, out_grad_interleaved);
    memset(queries_grad, 0, s->queries * padded * sizeof *queries_grad);
    for (int64_t first = 0; first < s->keys; first += KEYS) {
        load_keys(h, h->keys, first, block);
        transpose(block, half, keys_transposed);
        interleave_rows(block, KEYS / 2, padded, keys);
        load_keys(h, h->values, first, block);
        transpose(block, half, values_transposed);
        poll_mpi();
        memset(keys_grad, 0, 2 * KEYS * padded * sizeof *keys_grad); /* and values_grad */
        for (int64_t begin = 0; begin < s->queries; begin += QUERIES) {
            const Block seen = block_of(h, begin, min_int64(QUERIES, s->queries - begin), first, 2);
            const int64_t low = seen.low, count = seen.count;
            if (!count) continue;
            gemm_scores(&seen, half, queries + low * half, keys_transposed, scores, scale);
            gemm_scores(&seen, half, out_grad + low * half, values_transposed, scores_grad, h->factor);
            for (int64_t i = 0; i < count; i++) {
                float *g = scores_grad + i * KEYS;
                softmax_backward_row(&seen, i, scores + i * KEYS, g, h->log_sums[low + i], sums[low + i]);
                round_row(g, g_rows + i * KEYS / 2);
                if (i % 2 == 1 || i + 1 == count) {
                    interleave_two_rows(scores + i / 2 * 2 * KEYS, i % 2, p_interleaved + i / 2 * KEYS);
                    interleave_two_rows(scores_grad + i / 2 * 2 * KEYS, i % 2, g_interleaved + i / 2 * KEYS);
                }
            }
            gemm_over_queries(&seen, padded, p_interleaved, out_grad_interleaved + low * half, values_grad);
            gemm_over_queries(&seen, padded, g_interleaved, queries_interleaved + low * half, keys_grad);
            gemm_over_keys(&seen, padded, g_rows, keys, queries_grad + low * padded);
        }
        for (int64_t t = first; t < min_int64(first + KEYS, s->keys); t++)
            store_key_grads(h, t, keys_grad + (t - first) * padded, scale / LOG2_E, values_grad + (t - first) * padded,
                            h->factor);
    }
    for (int64_t t = 0; t < s->queries; t++)
        store_scaled(queries_grad + t * padded, scale / LOG2_E, h->queries_grad, query_at(h, t), s->type,
                     s->width);
}
#endif

/* Attention of one head in float32, for tensors of any type. Their numbers are first copied into contiguous rows: width
   numbers, and zeros up to a multiple of ATTENTION_NR. Products are tiles of accumulators in registers. */
#include "attention.h"
#include "progress.h"

INLINE void load_row(const Shape *s, const void *x, int64_t at, float factor, float *y)
{
    load_scaled(x, at, s->type, factor, y, s->width);
    for (int64_t j = s->width; j < s->padded; j++) y[j] = 0.0f;
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

/* c[m, n] = or += a[m, k] b[k, n], n a multiple of ATTENTION_NR. Each sum has the same order in every tile. */
INLINE void gemm_block(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column, const float *b,
                       int64_t b_row, float *c, int64_t c_row, int accumulates)
{
    for (int64_t column = 0; column < n; column += ATTENTION_NR) {
        const float *factor = b + column;
        int64_t i = 0;
        for (; i + ATTENTION_MR <= m; i += ATTENTION_MR)
            micro_kernel(ATTENTION_MR, k, a + i * a_row, a_row, a_column, factor, b_row, c + i * c_row + column, c_row,
                         accumulates);
        for (; i + 2 <= m; i += 2)
            micro_kernel(2, k, a + i * a_row, a_row, a_column, factor, b_row, c + i * c_row + column, c_row,
                         accumulates);
        for (; i < m; i++)
            micro_kernel(1, k, a + i * a_row, a_row, a_column, factor, b_row, c + i * c_row + column, c_row,
                         accumulates);
    }
}

/* c = or += a b, with contiguous rows. */
static __attribute__((noinline)) void gemm_rows(int64_t m, int64_t n, int64_t k, const float *a, const float *b,
                                                float *c, int accumulates)
{
    gemm_block(m, n, k, a, k, 1, b, n, c, n, accumulates);
}

/* c[m, n] += aT b, where a is [k, m]. */
static __attribute__((noinline)) void gemm_add_columns(int64_t m, int64_t n, int64_t k, const float *a, const float *b,
                                                       float *c)
{
    gemm_block(m, n, k, a, 1, m, b, n, c, n, 1);
}

/* [KEYS, padded] to [padded, KEYS] */
static void transpose(const float *restrict x, int64_t padded, float *restrict y)
{
    for (int64_t i = 0; i < KEYS; i += LANES)
        for (int64_t j = 0; j < padded; j++)
            for (int64_t lane = i; lane < i + LANES; lane++) y[j * KEYS + lane] = x[lane * padded + j];
}

INLINE void gemm_scores(const Block *block, int64_t width, const float *a, const float *b, float *c)
{
    gemm_rows(block->count, KEYS, width, a, b, c, 0);
}

INLINE void gemm_over_keys(const Block *block, int64_t n, const float *a, const float *b, float *c)
{
    gemm_rows(block->count, n, KEYS, a, b, c, 1);
}

INLINE void gemm_over_queries(const Block *block, int64_t n, const float *a, const float *b, float *c)
{
    gemm_add_columns(KEYS, n, block->count, a, b, c);
}

INLINE void online_softmax(const Block *block, float *scores, float *tops, float *sums, float *out, int64_t padded)
{
    for (int64_t i = 0; i < block->count; i++)
        online_softmax_row(scores + i * KEYS, valid_keys(block, i), mask_of(block, i), tops + i, sums + i,
                           out + i * padded, padded);
}

INLINE void softmax_backward(const Block *block, float *p, float *g, const float *log_sums, const float *sums)
{
    for (int64_t i = 0; i < block->count; i++)
        softmax_backward_row(p + i * KEYS, g + i * KEYS, valid_keys(block, i), mask_of(block, i), log_sums[i],
                             sums[i]);
}
#endif

/* Loads the keys or values of a block; zeros follow the last. */
static void load_keys(const Shape *s, const void *qkv, int64_t sample, int64_t head, int64_t first, int which, float *y)
{
    for (int64_t t = first; t < first + KEYS; t++, y += s->padded) {
        if (t < s->length)
            load_row(s, qkv, input_at(s, sample, head, t, which), 1.0f, y);
        else
            memset(y, 0, s->padded * sizeof *y);
    }
}

/* Queries from position low on beside keys from position first on. keep_mask: of the head. */
INLINE Block block_of(const Shape *s, int64_t low, int64_t count, int64_t first, const uint8_t *keep_mask)
{
    Block block = {count, low + 1 - first, keep_mask ? keep_mask + low * s->length + first : 0, s->length};
    return block;
}

static int64_t forward_workspace_floats(const Shape *s)
{
    return s->padded * (2 * round_up(s->length, KEYS) + 2 * QUERIES + KEYS) + QUERIES * (KEYS + 2);
}

void float32_forward(const Shape *s, const void *qkv, int64_t sample, int64_t head, const uint8_t *keep_mask,
                     float factor, void *y, float *log_sums, float *work)
{
    const int64_t padded = s->padded, all = round_up(s->length, KEYS) * padded;
    const float scale = scale_of(s->width);
    float *keys = work, *values = keys + all, *queries = values + all, *out = queries + QUERIES * padded;
    float *block = out + QUERIES * padded, *scores = block + KEYS * padded, *tops = scores + QUERIES * KEYS;
    float *sums = tops + QUERIES;
    for (int64_t first = 0; first < s->length; first += KEYS) {
        load_keys(s, qkv, sample, head, first, KEY, block);
        transpose(block, padded, keys + first * padded);
        load_keys(s, qkv, sample, head, first, VALUE, values + first * padded);
    }
    for (int64_t low = 0; low < s->length; low += QUERIES) {
        poll_mpi();
        const int64_t count = min_int64(QUERIES, s->length - low);
        for (int64_t i = 0; i < count; i++) {
            load_row(s, qkv, input_at(s, sample, head, low + i, QUERY), scale, queries + i * padded);
            tops[i] = -INFINITY;
            sums[i] = 0.0f;
        }
        memset(out, 0, count * padded * sizeof *out);
        for (int64_t first = 0; first < low + count; first += KEYS) {
            const int64_t from = max_int64(0, first - low); /* queries before it see none of these keys */
            const Block seen = block_of(s, low + from, count - from, first, keep_mask);
            gemm_scores(&seen, padded, queries + from * padded, keys + first * padded, scores);
            online_softmax(&seen, scores, tops + from, sums + from, out + from * padded, padded);
            gemm_over_keys(&seen, padded, scores, values + first * padded, out + from * padded);
        }
        for (int64_t i = 0; i < count; i++) {
            store_scaled(out + i * padded, factor / sums[i], y, output_at(s, sample, head, low + i), s->type, s->width);
            log_sums[low + i] = tops[i] + log2f(sums[i]);
        }
    }
}

static int64_t backward_workspace_floats(const Shape *s)
{
    return s->padded * (3 * s->length + 7 * KEYS) + s->length + 2 * QUERIES * KEYS;
}

void float32_backward(const Shape *s, const void *qkv, int64_t sample, int64_t head, const uint8_t *keep_mask,
                      float factor, const void *y, const void *y_grad, const float *log_sums, void *qkv_grad,
                      float *work)
{
    const int64_t padded = s->padded, all = s->length * padded, block_elements = KEYS * padded;
    const float scale = scale_of(s->width);
    float *queries = work, *out_grad = queries + all, *queries_grad = out_grad + all;
    float *keys = queries_grad + all, *values = keys + block_elements, *keys_transposed = values + block_elements,
          *values_transposed = keys_transposed + block_elements;
    float *keys_grad = values_transposed + block_elements, *values_grad = keys_grad + block_elements,
          *row = values_grad + block_elements;
    float *scores = row + block_elements, *scores_grad = scores + QUERIES * KEYS, *sums = scores_grad + QUERIES * KEYS;
    for (int64_t t = 0; t < s->length; t++) {
        float *grad = out_grad + t * padded, sum = 0.0f;
        load_row(s, qkv, input_at(s, sample, head, t, QUERY), scale, queries + t * padded);
        load_row(s, y, output_at(s, sample, head, t), 1.0f, row);
        load_row(s, y_grad, output_at(s, sample, head, t), 1.0f, grad);
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < padded; j++) sum += row[j] * grad[j];
        sums[t] = sum;
#pragma omp simd
        for (int64_t j = 0; j < padded; j++) grad[j] *= factor;
    }
    memset(queries_grad, 0, all * sizeof *queries_grad);
    for (int64_t first = 0; first < s->length; first += KEYS) {
        load_keys(s, qkv, sample, head, first, KEY, keys);
        load_keys(s, qkv, sample, head, first, VALUE, values);
        transpose(keys, padded, keys_transposed);
        transpose(values, padded, values_transposed);
        poll_mpi();
        memset(keys_grad, 0, 2 * block_elements * sizeof *keys_grad); /* and values_grad */
        for (int64_t low = first; low < s->length; low = low / QUERIES * QUERIES + QUERIES) {
            const int64_t count = min_int64(low / QUERIES * QUERIES + QUERIES, s->length) - low;
            const Block seen = block_of(s, low, count, first, keep_mask);
            gemm_scores(&seen, padded, queries + low * padded, keys_transposed, scores);
            gemm_scores(&seen, padded, out_grad + low * padded, values_transposed, scores_grad);
            softmax_backward(&seen, scores, scores_grad, log_sums + low, sums + low);
            gemm_over_queries(&seen, padded, scores, out_grad + low * padded, values_grad);
            gemm_over_queries(&seen, padded, scores_grad, queries + low * padded, keys_grad);
            gemm_over_keys(&seen, padded, scores_grad, keys, queries_grad + low * padded);
        }
        for (int64_t t = first; t < min_int64(first + KEYS, s->length); t++) {
            const int64_t at = (t - first) * padded;
            /* the queries were multiplied by log2 e too */
            store_scaled(keys_grad + at, 1.0f / LOG2_E, qkv_grad, input_at(s, sample, head, t, KEY), s->type, s->width);
            store_scaled(values_grad + at, 1.0f, qkv_grad, input_at(s, sample, head, t, VALUE), s->type, s->width);
        }
    }
    for (int64_t t = 0; t < s->length; t++)
        store_scaled(queries_grad + t * padded, scale / LOG2_E, qkv_grad, input_at(s, sample, head, t, QUERY), s->type,
                     s->width);
}

int64_t float32_workspace_floats(const Shape *s)
{
    return max_int64(forward_workspace_floats(s), backward_workspace_floats(s));
}

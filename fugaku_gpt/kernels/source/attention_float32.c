/* Attention of one head in float32, whatever the type of its numbers. These are copied into rows without gaps first:
   width numbers, and zeros up to a multiple of TILE_COLUMNS. Products are tiles of sums in registers. */
#include "attention.h"
#include "between.h"

INLINE void load_row(const Shape *s, const void *x, int64_t at, float factor, float *y)
{
    load(x, at, s->type, factor, y, s->width);
    for (int64_t j = s->width; j < s->padded; j++) y[j] = 0.0f;
}

/* c[rows, TILE_COLUMNS] = or += a[rows, k] b[k, TILE_COLUMNS]; a's element (i, j) is at i * a_row + j * a_column. */
INLINE void tile(const int rows, int64_t k, const float *a, int64_t a_row, int64_t a_column, const float *b, int64_t b_row,
                 float *c, int64_t c_row, int adds)
{
    vec sums[TILE_ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        const float *from = c + i * c_row;
        sums[i][0] = adds ? *(const loose_vec *)from : (vec){0};
        sums[i][1] = adds ? *(const loose_vec *)(from + LANES) : (vec){0};
    }
    for (int64_t j = 0; j < k; j++) {
        const float *from = b + j * b_row;
        vec left = *(const loose_vec *)from, right = *(const loose_vec *)(from + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            float factor = a[i * a_row + j * a_column];
            sums[i][0] += left * factor;
            sums[i][1] += right * factor;
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        *(loose_vec *)(c + i * c_row) = sums[i][0];
        *(loose_vec *)(c + i * c_row + LANES) = sums[i][1];
    }
}

/* c[m, n] = or += a[m, k] b[k, n], n a multiple of TILE_COLUMNS. Each sum has the same order whatever tile it is in. */
INLINE void product(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row, int64_t a_column, const float *b,
                    int64_t b_row, float *c, int64_t c_row, int adds)
{
    for (int64_t column = 0; column < n; column += TILE_COLUMNS) {
        const float *factor = b + column;
        int64_t i = 0;
        for (; i + TILE_ROWS <= m; i += TILE_ROWS)
            tile(TILE_ROWS, k, a + i * a_row, a_row, a_column, factor, b_row, c + i * c_row + column, c_row, adds);
        for (; i + 2 <= m; i += 2)
            tile(2, k, a + i * a_row, a_row, a_column, factor, b_row, c + i * c_row + column, c_row, adds);
        for (; i < m; i++)
            tile(1, k, a + i * a_row, a_row, a_column, factor, b_row, c + i * c_row + column, c_row, adds);
    }
}

/* c = or += a b, rows of a and b without gaps but for c's. */
static __attribute__((noinline)) void rows_product(int64_t m, int64_t n, int64_t k, const float *a, const float *b,
                                                   float *c, int adds)
{
    product(m, n, k, a, k, 1, b, n, c, n, adds);
}

/* c[m, n] += aT b, where a is [k, m]. */
static __attribute__((noinline)) void add_columns_product(int64_t m, int64_t n, int64_t k, const float *a, const float *b,
                                                          float *c)
{
    product(m, n, k, a, 1, m, b, n, c, n, 1);
}

/* [KEYS, padded] to [padded, KEYS] */
static void transpose(const float *restrict x, int64_t padded, float *restrict y)
{
    for (int64_t i = 0; i < KEYS; i += LANES)
        for (int64_t j = 0; j < padded; j++)
            for (int64_t lane = i; lane < i + LANES; lane++) y[j * KEYS + lane] = x[lane * padded + j];
}

/* Keys or values of a block, zeros after the last. */
static void load_keys(const Shape *s, const void *qkv, int64_t sample, int64_t head, int64_t first, int which, float *y)
{
    for (int64_t t = first; t < first + KEYS; t++, y += s->padded) {
        if (t < s->length)
            load_row(s, qkv, input_at(s, sample, head, t, which), 1.0f, y);
        else
            memset(y, 0, s->padded * sizeof *y);
    }
}

static int64_t forward_floats(const Shape *s)
{
    return s->padded * (2 * round_up(s->length, KEYS) + 2 * QUERIES + KEYS) + QUERIES * (KEYS + 2);
}

void float32_forward(const Shape *s, const void *qkv, int64_t sample, int64_t head, const uint8_t *kept, float factor,
                     void *y, float *log_sums, float *work)
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
        between();
        const int64_t count = smaller(QUERIES, s->length - low);
        for (int64_t i = 0; i < count; i++) {
            load_row(s, qkv, input_at(s, sample, head, low + i, QUERY), scale, queries + i * padded);
            tops[i] = -INFINITY;
            sums[i] = 0.0f;
        }
        memset(out, 0, count * padded * sizeof *out);
        for (int64_t first = 0; first < low + count; first += KEYS) {
            const int64_t from = larger(0, first - low); /* queries before it see none of these keys */
            rows_product(count - from, KEYS, padded, queries + from * padded, keys + first * padded, scores, 0);
            for (int64_t i = from; i < count; i++) {
                const int64_t valid = smaller(KEYS, low + i + 1 - first);
                const uint8_t *flags = kept ? kept + (low + i) * s->length + first : 0;
                probabilities(scores + (i - from) * KEYS, valid, flags, tops + i, sums + i, out + i * padded, padded);
            }
            rows_product(count - from, padded, KEYS, scores, values + first * padded, out + from * padded, 1);
        }
        for (int64_t i = 0; i < count; i++) {
            store(out + i * padded, factor / sums[i], y, output_at(s, sample, head, low + i), s->type, s->width);
            log_sums[low + i] = tops[i] + log2f(sums[i]);
        }
    }
}

static int64_t backward_floats(const Shape *s)
{
    return s->padded * (3 * s->length + 7 * KEYS) + s->length + 2 * QUERIES * KEYS;
}

void float32_backward(const Shape *s, const void *qkv, int64_t sample, int64_t head, const uint8_t *kept, float factor,
                      const void *y, const void *y_grad, const float *log_sums, void *qkv_grad, float *work)
{
    const int64_t padded = s->padded, all = s->length * padded, some = KEYS * padded;
    const float scale = scale_of(s->width);
    float *queries = work, *out_grad = queries + all, *queries_grad = out_grad + all;
    float *keys = queries_grad + all, *values = keys + some, *keys_turned = values + some, *values_turned = keys_turned + some;
    float *keys_grad = values_turned + some, *values_grad = keys_grad + some, *row = values_grad + some;
    float *scores = row + some, *scores_grad = scores + QUERIES * KEYS, *sums = scores_grad + QUERIES * KEYS;
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
        transpose(keys, padded, keys_turned);
        transpose(values, padded, values_turned);
        between();
        memset(keys_grad, 0, 2 * some * sizeof *keys_grad); /* and values_grad */
        for (int64_t low = first; low < s->length; low = low / QUERIES * QUERIES + QUERIES) {
            const int64_t count = smaller(low / QUERIES * QUERIES + QUERIES, s->length) - low;
            rows_product(count, KEYS, padded, queries + low * padded, keys_turned, scores, 0);
            rows_product(count, KEYS, padded, out_grad + low * padded, values_turned, scores_grad, 0);
            for (int64_t i = 0; i < count; i++) {
                const int64_t valid = smaller(KEYS, low + i + 1 - first);
                const uint8_t *flags = kept ? kept + (low + i) * s->length + first : 0;
                gradients(scores + i * KEYS, scores_grad + i * KEYS, valid, flags, log_sums[low + i], sums[low + i]);
            }
            add_columns_product(KEYS, padded, count, scores, out_grad + low * padded, values_grad);
            add_columns_product(KEYS, padded, count, scores_grad, queries + low * padded, keys_grad);
            rows_product(count, padded, KEYS, scores_grad, keys, queries_grad + low * padded, 1);
        }
        for (int64_t t = first; t < smaller(first + KEYS, s->length); t++) {
            const int64_t at = (t - first) * padded;
            /* the queries had been multiplied by log2 e too */
            store(keys_grad + at, 1.0f / LOG2_E, qkv_grad, input_at(s, sample, head, t, KEY), s->type, s->width);
            store(values_grad + at, 1.0f, qkv_grad, input_at(s, sample, head, t, VALUE), s->type, s->width);
        }
    }
    for (int64_t t = 0; t < s->length; t++)
        store(queries_grad + t * padded, scale / LOG2_E, qkv_grad, input_at(s, sample, head, t, QUERY), s->type, s->width);
}

int64_t float32_floats(const Shape *s) { return larger(forward_floats(s), backward_floats(s)); }

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

/* The sizes of a call, as in library.py. Tokens of a sample lie beside each other in shards, and positions run over shards
   first: [shards, samples, tokens of a shard, a row of heads]. A cache of keys is one shard, which may be longer than the
   keys in use. */
typedef struct {
    int64_t samples, heads, kv_heads, width; /* heads / kv_heads neighbouring heads of queries share one of keys */
    int64_t queries, keys;                   /* tokens of a sample */
    int64_t query_shard, key_shard;          /* tokens of a sample's shard in memory */
    int64_t query_row, key_row;              /* elements from a token to the next, of queries; of keys and values */
    int64_t ranges_row;                      /* ranges from a sample to the next; 0: all samples have the same */
    int64_t type;                            /* of all elements */
} Shape;

/* The numbers of a head are padded with zeros to this width. */
INLINE int64_t padded_width(const Shape *s) { return round_up(s->width, ATTENTION_NR); }

/* A head of queries, with all that its computation needs. first_keys, end_keys: query i sees keys [first_keys[i],
   end_keys[i]); neither number decreases from a query to the next. keep_mask: flags of dropout [queries, keys], or null;
   probabilities that stay are scaled by factor. log_sums: [queries]. The gradients of keys and values are those by this
   head alone: for heads that share them they are written to partial_grads, float32 [2, keys, width]; else it is null. */
typedef struct {
    const Shape *s;
    int64_t sample, head, kv_head;
    const void *queries, *keys, *values;
    const int32_t *first_keys, *end_keys;
    const uint8_t *keep_mask;
    float factor;
    void *y;
    float *log_sums;
    const void *y_grad;
    void *queries_grad, *keys_grad, *values_grad;
    float *partial_grads;
    float *work; /* float32_workspace_floats() or bfloat16_workspace_floats() numbers */
} Head;

/* The number in memory of the token at position t of a sample. */
INLINE int64_t token(const Shape *s, int64_t shard, int64_t sample, int64_t t)
{
    return (t / shard * s->samples + sample) * shard + t % shard;
}

/* Where a head's row of queries, of keys or values, or of outputs begins. */
INLINE int64_t query_at(const Head *h, int64_t t)
{
    return token(h->s, h->s->query_shard, h->sample, t) * h->s->query_row + h->head * h->s->width;
}

INLINE int64_t key_at(const Head *h, int64_t t)
{
    return token(h->s, h->s->key_shard, h->sample, t) * h->s->key_row + h->kv_head * h->s->width;
}

INLINE int64_t output_at(const Head *h, int64_t t)
{
    return (token(h->s, h->s->query_shard, h->sample, t) * h->s->heads + h->head) * h->s->width;
}

INLINE int64_t max_int64(int64_t a, int64_t b) { return a > b ? a : b; }

/* The unnormalised probabilities of a query: x[j] = 2^(x[j] - top) for its keys [from, to), otherwise 0. A function of its
   own: where its callers know something of the keys, GCC 12 makes copies of the loops that it does not vectorise. */
static __attribute__((noinline, unused)) float exp2_row(float *x, int64_t from, int64_t to, float top)
{
    float sum = 0.0f;
    if (from == 0 && to == KEYS) { /* constants for the compiler */
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < KEYS; j++) {
            x[j] = exp2_flushed(x[j] - top);
            sum += x[j];
        }
        return sum;
    }
    if (from > 0) { /* whole vectors, for a loop of few keys would mostly be what the compiler leaves over */
        const int64_t begin = from - from % LANES, end = round_up(to, LANES);
        for (int64_t j = 0; j < begin; j++) x[j] = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = begin; j < end; j++) {
            const float p = exp2_flushed(x[j] - top);
            x[j] = j >= from && j < to ? p : 0.0f;
            sum += x[j];
        }
        for (int64_t j = end; j < KEYS; j++) x[j] = 0.0f;
        return sum;
    }
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < to; j++) {
        x[j] = exp2_flushed(x[j] - top);
        sum += x[j];
    }
    for (int64_t j = to; j < KEYS; j++) x[j] = 0.0f;
    return sum;
}

/* The largest of top and x[j] for the keys [from, to). */
INLINE float row_max(const float *x, int64_t from, int64_t to, float top)
{
    if (from > 0) { /* as above */
        const int64_t end = round_up(to, LANES);
#pragma omp simd reduction(max : top)
        for (int64_t j = from - from % LANES; j < end; j++) {
            const float score = j >= from && j < to ? x[j] : top;
            top = score > top ? score : top;
        }
        return top;
    }
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < to; j++) top = x[j] > top ? x[j] : top;
    return top;
}

/* x[j] = 0 where dropout has dropped a probability. */
INLINE void apply_mask(float *restrict x, const uint8_t *restrict keep_mask, int64_t n)
{
#pragma omp simd
    for (int64_t j = 0; j < n; j++) x[j] = keep_mask[j] ? x[j] : 0.0f;
}

/* Scores of queries with keys, [count, KEYS], in which query i is that at position low + i and key j that at first + j.
   With is_full, all queries see all keys. */
typedef struct {
    int64_t low, count, first;
    int is_full;
    const int32_t *first_keys, *end_keys; /* of query low */
    const uint8_t *keep_mask;             /* flags of dropout of query low and key first, or null */
    int64_t mask_row;                     /* flags from one query to the next */
} Block;

/* How many of n numbers, none of which is smaller than the one before, are not above a bound. */
INLINE int64_t count_up_to(const int32_t *x, int64_t n, int64_t bound)
{
    int64_t count = 0;
    if (!n || x[0] > bound) return 0; /* so it mostly is, or for all of them */
    if (x[n - 1] <= bound) return n;
    while (count < n) {
        const int64_t middle = (count + n) / 2;
        if (x[middle] <= bound)
            count = middle + 1;
        else
            n = middle;
    }
    return count;
}

/* The queries i of a block, from the first to before the end, that see any of its keys [from, to). */
INLINE int64_t first_query(const Block *block, int64_t from)
{
    return block->is_full ? 0 : count_up_to(block->end_keys, block->count, block->first + from);
}

INLINE int64_t end_query(const Block *block, int64_t to)
{
    return block->is_full ? block->count : count_up_to(block->first_keys, block->count, block->first + to - 1);
}

/* The block of those among `count` queries from position low on that see any of the keys from position first on; it
   begins at a multiple of `step` queries. Its count is 0 if none does. */
INLINE Block block_of(const Head *h, int64_t low, int64_t count, int64_t first, int64_t step)
{
    Block block = {low, count, first, 0, h->first_keys + low, h->end_keys + low, 0, h->s->keys};
    block.is_full = block.first_keys[count - 1] <= first && block.end_keys[0] >= first + KEYS;
    if (!block.is_full) {
        int64_t from = first_query(&block, 0), to = end_query(&block, KEYS);
        while (from < to && block.first_keys[to - 1] == block.end_keys[to - 1]) to--; /* which see nothing at all */
        from -= from % step;
        block.low += from;
        block.count = max_int64(0, to - from);
        block.first_keys += from;
        block.end_keys += from;
    }
    if (h->keep_mask) block.keep_mask = h->keep_mask + block.low * h->s->keys + first;
    return block;
}

/* Query i sees the keys [seen_from, seen_to) of its block. */
INLINE int64_t seen_from(const Block *block, int64_t i)
{
    return block->is_full ? 0 : max_int64(0, min_int64(KEYS, block->first_keys[i] - block->first));
}

INLINE int64_t seen_to(const Block *block, int64_t i)
{
    return block->is_full ? KEYS : max_int64(seen_from(block, i), min_int64(KEYS, block->end_keys[i] - block->first));
}

/* x[j] = 0 for the keys of query i that dropout has dropped. */
INLINE void drop(const Block *block, int64_t i, float *x)
{
    const int64_t from = seen_from(block, i);
    if (block->keep_mask)
        apply_mask(x + from, block->keep_mask + i * block->mask_row + from, seen_to(block, i) - from);
}

/* A block's scores of query i become unnormalised probabilities; the query's largest score, sum and output [padded] so
   far are rescaled to match. */
INLINE void online_softmax_row(const Block *block, int64_t i, float *row, float *top, float *sum, float *out,
                               int64_t padded)
{
    const int64_t from = seen_from(block, i), to = seen_to(block, i);
    const float new_top = row_max(row, from, to, *top);
    const float block_sum = exp2_row(row, from, to, new_top);
    if (new_top != *top) {
        const float correction = exp2f(*top - new_top);
        *sum *= correction;
#pragma omp simd
        for (int64_t j = 0; j < padded; j++) out[j] *= correction;
        *top = new_top;
    }
    *sum += block_sum;
    drop(block, i, row);
}

/* For a query's keys [from, to), p[j] = 2^(p[j] - log_sum) and g[j] = (g[j] - sum) p[j]; otherwise both are 0. */
static __attribute__((noinline, unused)) void exp2_gradient_row(float *restrict p, float *restrict g, int64_t from,
                                                                int64_t to, float log_sum, float sum)
{
    if (from == 0 && to == KEYS) {
#pragma omp simd
        for (int64_t j = 0; j < KEYS; j++) {
            p[j] = exp2_flushed(p[j] - log_sum);
            g[j] = (g[j] - sum) * p[j];
        }
        return;
    }
    if (from > 0) { /* as in exp2_row */
        const int64_t begin = from - from % LANES, end = round_up(to, LANES);
        for (int64_t j = 0; j < begin; j++) p[j] = g[j] = 0.0f;
#pragma omp simd
        for (int64_t j = begin; j < end; j++) {
            const int is_seen = j >= from && j < to;
            const float probability = exp2_flushed(p[j] - log_sum);
            p[j] = is_seen ? probability : 0.0f;
            g[j] = is_seen ? (g[j] - sum) * probability : 0.0f;
        }
        for (int64_t j = end; j < KEYS; j++) p[j] = g[j] = 0.0f;
        return;
    }
#pragma omp simd
    for (int64_t j = 0; j < to; j++) {
        p[j] = exp2_flushed(p[j] - log_sum);
        g[j] = (g[j] - sum) * p[j];
    }
    for (int64_t j = to; j < KEYS; j++) p[j] = g[j] = 0.0f;
}

/* A block's scores p of query i become probabilities, and the gradients g of its probabilities become those of its
   scores; sum: over all keys, of probability times gradient. */
INLINE void softmax_backward_row(const Block *block, int64_t i, float *restrict p, float *restrict g, float log_sum,
                                 float sum)
{
    drop(block, i, g);
    exp2_gradient_row(p, g, seen_from(block, i), seen_to(block, i), log_sum, sum);
    drop(block, i, p);
}

/* Writes the output of a query [padded] and the logarithm of its sum; both are 0 where it sees no key. */
INLINE void store_output(const Head *h, int64_t t, const float *out, float top, float sum)
{
    const int is_empty = h->first_keys[t] == h->end_keys[t];
    store_scaled(out, is_empty ? 0.0f : h->factor / sum, h->y, output_at(h, t), h->s->type, h->s->width);
    h->log_sums[t] = is_empty ? 0.0f : top + log2f(sum);
}

/* Writes the gradients of the key and the value at position t, scaled. */
INLINE void store_key_grads(const Head *h, int64_t t, const float *key_grad, float key_scale, const float *value_grad,
                            float value_scale)
{
    const Shape *s = h->s;
    if (h->partial_grads) {
        store_scaled(key_grad, key_scale, h->partial_grads, t * s->width, FLOAT32, s->width);
        store_scaled(value_grad, value_scale, h->partial_grads, (s->keys + t) * s->width, FLOAT32, s->width);
    } else {
        store_scaled(key_grad, key_scale, h->keys_grad, key_at(h, t), s->type, s->width);
        store_scaled(value_grad, value_scale, h->values_grad, key_at(h, t), s->type, s->width);
    }
}

/* The two implementations. */
int64_t float32_workspace_floats(const Shape *s);
void float32_forward(const Head *h);
void float32_backward(const Head *h);
int64_t bfloat16_workspace_floats(const Shape *s);
#ifdef HAS_BF16_DOT
void bfloat16_forward(const Head *h);
void bfloat16_backward(const Head *h);
#endif

#endif

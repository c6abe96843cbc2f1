/* Attention, one head at a time, by blocks of queries and keys that stay in a core's own caches. Each query sees a range
   of keys, whose ends never decrease from a query to the next: so the queries that see any key of a block lie beside each
   other. Blocks of keys that no query of a block sees are left out, and only those that some see in part are masked.
   Causal attention, padding, documents apart from each other and a window are such ranges.

   Forward: the softmax over a block's keys is corrected when a later one has a larger score (Milakov and Gimelshein
   2018, "Online normalizer calculation for softmax"); the logarithm of each query's sum is saved. Backward: it recomputes
   the probabilities block by block, and takes the sum over keys that a softmax's gradient needs from the output and its
   gradient (Dao et al. 2022, "FlashAttention", section 3.1 and appendix B.4); for a 16-bit output that sum includes its
   rounding error.

   Threads take heads one by one. Where the processor multiplies pairs of bfloat16 numbers, heads of that type use
   attention_bfloat16.c; all others are computed in float32 by attention_float32.c. */
#include "attention.h"

/* float32 numbers of workspace per thread, for this number of queries and of keys. */
EXPORT int64_t attention_workspace_floats(int64_t length, int64_t width)
{
    const Shape s = {.width = width, .queries = length, .keys = length};
    return round_up(max_int64(float32_workspace_floats(&s), bfloat16_workspace_floats(&s)),
                    16); /* threads share no cache line */
}

/* A head of a call: all = {what all heads share}. */
static Head head_of(const Head *all, int64_t task)
{
    const Shape *s = all->s;
    Head h = *all;
    h.sample = task / s->heads;
    h.head = task % s->heads;
    h.kv_head = h.head / (s->heads / s->kv_heads);
    h.first_keys += h.sample * s->ranges_row;
    h.end_keys += h.sample * s->ranges_row;
    if (h.keep_mask) h.keep_mask += task * s->queries * s->keys;
    h.log_sums += task * s->queries;
    if (h.partial_grads) h.partial_grads += task * 2 * s->keys * s->width;
    return h;
}

/* Gradients of the keys and values from position first on become the sums of those by the heads that share them. */
static void sum_partial_grads(const Head *all, int64_t sample, int64_t kv_head, int64_t first)
{
    const Shape *s = all->s;
    const int64_t sharing = s->heads / s->kv_heads, all_keys = s->keys * s->width;
    const float *restrict grads = all->partial_grads + (sample * s->kv_heads + kv_head) * sharing * 2 * all_keys;
    const Head place = {.s = s, .sample = sample, .kv_head = kv_head};
    float *restrict sums = all->work;
    for (int64_t t = first; t < min_int64(first + KEYS, s->keys); t++)
        for (int which = 0; which < 2; which++) {
            memcpy(sums, grads + which * all_keys + t * s->width, s->width * sizeof *sums);
            for (int64_t i = 1; i < sharing; i++) {
                const float *restrict more = grads + (2 * i + which) * all_keys + t * s->width;
#pragma omp simd
                for (int64_t j = 0; j < s->width; j++) sums[j] += more[j];
            }
            store_scaled(sums, 1.0f, which ? all->values_grad : all->keys_grad, key_at(&place, t), s->type, s->width);
        }
}

/* y [shards, samples, tokens of a shard, heads, width] and log_sums [samples, heads, queries] of queries, keys and
   values; see Shape and Head. keep_mask: [samples, heads, queries, keys], or null. work: threads *
   attention_workspace_floats(). */
EXPORT void attention_forward(const Shape *s, const void *queries, const void *keys, const void *values,
                              const int32_t *first_keys, const int32_t *end_keys, const uint8_t *keep_mask,
                              float factor, void *y, float *log_sums, float *work, int threads)
{
    const Head all = {.s = s, .queries = queries, .keys = keys, .values = values, .first_keys = first_keys,
                      .end_keys = end_keys, .keep_mask = keep_mask, .factor = factor, .y = y, .log_sums = log_sums};
    const int64_t floats = attention_workspace_floats(max_int64(s->queries, s->keys), s->width);
    int64_t next = 0, thread_count = 0;
    typeof(&float32_forward) forward = float32_forward;
#ifdef HAS_BF16_DOT
    if (s->type == BFLOAT16) forward = bfloat16_forward;
#endif
#pragma omp parallel num_threads(threads)
    {
        float *workspace = work + __atomic_fetch_add(&thread_count, 1, __ATOMIC_RELAXED) * floats;
        int64_t task;
        while ((task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < s->samples * s->heads) {
            Head h = head_of(&all, task);
            h.work = workspace;
            forward(&h);
        }
    }
}

/* The gradients of queries, keys and values, laid out as these are, from y_grad and from the forward pass's inputs and
   outputs. partial_grads: where heads share keys, [samples, heads, 2, keys, width]; else null. */
EXPORT void attention_backward(const Shape *s, const void *queries, const void *keys, const void *values,
                               const int32_t *first_keys, const int32_t *end_keys, const uint8_t *keep_mask,
                               float factor, const void *y, const void *y_grad, const float *log_sums,
                               void *queries_grad, void *keys_grad, void *values_grad, float *partial_grads,
                               float *work, int threads)
{
    const Head all = {.s = s, .queries = queries, .keys = keys, .values = values, .first_keys = first_keys,
                      .end_keys = end_keys, .keep_mask = keep_mask, .factor = factor, .y = (void *)y, .y_grad = y_grad,
                      .log_sums = (float *)log_sums, .queries_grad = queries_grad, .keys_grad = keys_grad,
                      .values_grad = values_grad, .partial_grads = partial_grads};
    const int64_t floats = attention_workspace_floats(max_int64(s->queries, s->keys), s->width);
    const int64_t blocks = (s->keys + KEYS - 1) / KEYS;
    int64_t next = 0, next_sum = 0, thread_count = 0;
    typeof(&float32_backward) backward = float32_backward;
#ifdef HAS_BF16_DOT
    if (s->type == BFLOAT16) backward = bfloat16_backward;
#endif
#pragma omp parallel num_threads(threads)
    {
        float *workspace = work + __atomic_fetch_add(&thread_count, 1, __ATOMIC_RELAXED) * floats;
        int64_t task;
        while ((task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < s->samples * s->heads) {
            Head h = head_of(&all, task);
            h.work = workspace;
            backward(&h);
        }
        if (partial_grads) {
            Head sums = all;
            sums.work = workspace;
#pragma omp barrier
            while ((task = __atomic_fetch_add(&next_sum, 1, __ATOMIC_RELAXED)) < s->samples * s->kv_heads * blocks)
                sum_partial_grads(&sums, task / blocks / s->kv_heads, task / blocks % s->kv_heads,
                                  task % blocks * KEYS);
        }
    }
}

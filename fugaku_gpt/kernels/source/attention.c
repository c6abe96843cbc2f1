/* Causal attention, one head at a time, by blocks of queries and keys that stay in a core's own caches.

   Forward: the softmax over a block's keys is corrected when a later one has a larger score (Milakov and Gimelshein
   2018, "Online normalizer calculation for softmax"); the logarithm of each query's sum is saved. Backward: it recomputes
   the probabilities block by block, and takes the sum over keys that a softmax's gradient needs from the output and its
   gradient (Dao et al. 2022, "FlashAttention", section 3.1 and appendix B.4); for a 16-bit output that sum includes its
   rounding error.

   Threads take heads one by one. Where the processor multiplies pairs of bfloat16 numbers, heads of that type use
   attention_bfloat16.c; all others are computed in float32 by attention_float32.c. */
#include "attention.h"

/* float32 numbers of workspace per thread. */
EXPORT int64_t attention_workspace_floats(int64_t length, int64_t width)
{
    Shape s = shape_of(1, 1, length, 1, width, FLOAT32);
    return round_up(max_int64(float32_workspace_floats(&s), bfloat16_workspace_floats(&s)),
                    16); /* threads share no cache line */
}

/* y [shards, samples, local_length, heads, width] and log_sums [samples, heads, length] of qkv [shards, samples,
   local_length, 3, heads, width]; keep_mask: flags of dropout [samples, heads, length, length], or null. work: threads *
   attention_workspace_floats(). */
EXPORT void attention_forward(const void *qkv, void *y, float *log_sums, const uint8_t *keep_mask, int64_t shards,
                              int64_t samples, int64_t local_length, int64_t heads, int64_t width, int type,
                              float factor, float *work, int threads)
{
    const Shape s = shape_of(shards, samples, local_length, heads, width, type);
    const int64_t floats = attention_workspace_floats(s.length, width);
    int64_t next = 0, thread_count = 0;
    typeof(&float32_forward) forward = float32_forward;
#ifdef HAS_BF16_DOT
    if (type == BFLOAT16) forward = bfloat16_forward;
#endif
#pragma omp parallel num_threads(threads)
    {
        float *workspace = work + __atomic_fetch_add(&thread_count, 1, __ATOMIC_RELAXED) * floats;
        int64_t task;
        while ((task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < samples * heads)
            forward(&s, qkv, task / heads, task % heads, keep_mask ? keep_mask + task * s.length * s.length : 0, factor,
                    y, log_sums + task * s.length, workspace);
    }
}

/* qkv_grad from y_grad and from the forward pass's inputs and outputs. */
EXPORT void attention_backward(const void *qkv, const void *y, const void *y_grad, const float *log_sums,
                               const uint8_t *keep_mask, void *qkv_grad, int64_t shards, int64_t samples,
                               int64_t local_length, int64_t heads, int64_t width, int type, float factor, float *work,
                               int threads)
{
    const Shape s = shape_of(shards, samples, local_length, heads, width, type);
    const int64_t floats = attention_workspace_floats(s.length, width);
    int64_t next = 0, thread_count = 0;
    typeof(&float32_backward) backward = float32_backward;
#ifdef HAS_BF16_DOT
    if (type == BFLOAT16) backward = bfloat16_backward;
#endif
#pragma omp parallel num_threads(threads)
    {
        float *workspace = work + __atomic_fetch_add(&thread_count, 1, __ATOMIC_RELAXED) * floats;
        int64_t task;
        while ((task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < samples * heads)
            backward(&s, qkv, task / heads, task % heads, keep_mask ? keep_mask + task * s.length * s.length : 0,
                     factor, y, y_grad, log_sums + task * s.length, qkv_grad, workspace);
    }
}

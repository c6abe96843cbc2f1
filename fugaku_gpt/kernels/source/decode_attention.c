/* Attention of few new tokens over a cache of keys and values.

   The keys of a head are cut into chunks, which threads take one by one. Each gives the softmax over its keys alone, of
   all heads of queries that share them, and the chunks of a query are then combined by their largest scores (Milakov and
   Gimelshein 2018, "Online normalizer calculation for softmax"). So all threads have work where a single text with few
   heads of keys has grown long. Sums have the same order for any number of threads. */
#include "common.h"

#define KEYS 256 /* of a chunk */
#define TOGETHER 4 /* values that are added to an output at a time */
#define LOG2_E 1.44269504088896341f

/* One call: queries [samples, tokens, heads, width], tokens query_row numbers from each other; keys and values [samples,
   kv_heads, capacity, width]. The query at a position sees the keys up to it; positions [samples, tokens] grow along a
   sample. Rows are the queries of a sample that share a head of keys: [tokens, heads / kv_heads]. */
typedef struct {
    const void *queries, *keys, *values;
    const int64_t *positions;
    void *y;
    int64_t samples, tokens, heads, kv_heads, width, query_row, capacity, chunks;
    int type;
    float *partial; /* [samples, kv_heads, chunks, rows, width + 2]: outputs, largest score, sum */
} Call;

INLINE int64_t sharing_of(const Call *c) { return c->heads / c->kv_heads; }

INLINE int64_t rows_of(const Call *c) { return c->tokens * sharing_of(c); }

INLINE float *partial_of(const Call *c, int64_t sample, int64_t kv_head, int64_t chunk)
{
    return c->partial + ((sample * c->kv_heads + kv_head) * c->chunks + chunk) * rows_of(c) * (c->width + 2);
}

/* How many keys from `first` on the query of a row sees. */
INLINE int64_t seen_by(const Call *c, int64_t sample, int64_t row, int64_t first)
{
    return c->positions[sample * c->tokens + row / sharing_of(c)] + 1 - first;
}

INLINE float dot(const float *a, const float *b, int64_t n)
{
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* `count` rows of the cache from key `at` on, in float32: in their place, or in `wide`. */
INLINE const float *widened(const Call *c, const void *x, int64_t at, int64_t count, float *wide, const int type)
{
    if (type != BFLOAT16) return (const float *)x + at * c->width;
    load_scaled(x, at * c->width, type, 1.0f, wide, count * c->width);
    return wide;
}

/* out += the sum of `count` rows of values, each times its factor. */
INLINE void add_values(float *restrict out, const float *restrict values, const float *restrict factors,
                       const int count, int64_t width)
{
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
        float sum = out[i];
#pragma GCC unroll 4
        for (int j = 0; j < count; j++) sum += factors[j] * values[j * width + i];
        out[i] = sum;
    }
}

/* scores [KEYS] of a row become powers of two, and zeros from `seen` on; writes the largest score and the sum. */
static __attribute__((noinline)) void exponentials(float *scores, int64_t seen, int64_t count, float *largest,
                                                   float *total)
{
    float top = -FLT_MAX, sum = 0.0f;
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < seen; j++) top = scores[j] > top ? scores[j] : top;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < seen; j++) {
        scores[j] = exp2_flushed(scores[j] - top);
        sum += scores[j];
    }
    for (int64_t j = seen > 0 ? seen : 0; j < count; j++) scores[j] = 0.0f;
    *largest = top;
    *total = sum;
}

/* A chunk's softmax for all rows. work: queries [rows, width], scores [rows, KEYS], widened values [TOGETHER, width]. */
INLINE void attend_to_chunk(const Call *c, int64_t sample, int64_t kv_head, int64_t chunk, float *work, const int type)
{
    const int64_t rows = rows_of(c), sharing = sharing_of(c), width = c->width, first = chunk * KEYS;
    const int64_t count = min_int64(KEYS, seen_by(c, sample, rows - 1, first));
    if (count <= 0) return; /* of a sample that is shorter than the longest */
    const int64_t at = (sample * c->kv_heads + kv_head) * c->capacity + first;
    float *queries = work, *scores = queries + rows * width, *wide = scores + rows * KEYS;
    float *partial = partial_of(c, sample, kv_head, chunk);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t token = sample * c->tokens + row / sharing, head = kv_head * sharing + row % sharing;
        load_scaled(c->queries, token * c->query_row + head * width, type, LOG2_E / sqrtf((float)width),
                    queries + row * width, width);
    }
    for (int64_t j = 0; j < count; j++) {
        const float *key = widened(c, c->keys, at + j, 1, wide, type);
        for (int64_t row = 0; row < rows; row++) scores[row * KEYS + j] = dot(queries + row * width, key, width);
    }
    for (int64_t row = 0; row < rows; row++) {
        float *out = partial + row * (width + 2);
        memset(out, 0, width * sizeof *out);
        exponentials(scores + row * KEYS, min_int64(count, seen_by(c, sample, row, first)), count, out + width,
                     out + width + 1);
    }
    int64_t j = 0;
    for (; j + TOGETHER <= count; j += TOGETHER) {
        const float *values = widened(c, c->values, at + j, TOGETHER, wide, type);
        for (int64_t row = 0; row < rows; row++)
            add_values(partial + row * (width + 2), values, scores + row * KEYS + j, TOGETHER, width);
    }
    for (; j < count; j++) {
        const float *values = widened(c, c->values, at + j, 1, wide, type);
        for (int64_t row = 0; row < rows; row++)
            add_values(partial + row * (width + 2), values, scores + row * KEYS + j, 1, width);
    }
}

/* The output of a row, from those of its chunks; the first chunk's becomes the sum. */
INLINE void combine_chunks(const Call *c, int64_t sample, int64_t kv_head, int64_t row)
{
    const int64_t width = c->width, sharing = sharing_of(c), step = rows_of(c) * (width + 2);
    const int64_t chunks = (seen_by(c, sample, row, 0) + KEYS - 1) / KEYS;
    float *out = partial_of(c, sample, kv_head, 0) + row * (width + 2);
    for (int64_t chunk = 1; chunk < chunks; chunk++) {
        const float *more = out + chunk * step, top = out[width] > more[width] ? out[width] : more[width];
        const float keep = exp2f(out[width] - top), add = exp2f(more[width] - top);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) out[i] = keep * out[i] + add * more[i];
        out[width + 1] = keep * out[width + 1] + add * more[width + 1];
        out[width] = top;
    }
    const int64_t token = sample * c->tokens + row / sharing, head = kv_head * sharing + row % sharing;
    store_scaled(out, 1.0f / out[width + 1], c->y, (token * c->heads + head) * width, c->type, width);
}

INLINE int64_t scratch_floats(int64_t rows, int64_t width)
{
    return round_up(rows * (width + KEYS) + TOGETHER * width, 16); /* threads share no cache line */
}

/* float32 numbers of workspace, for `keys` keys at most. */
EXPORT int64_t decode_attention_workspace_floats(int64_t samples, int64_t tokens, int64_t heads, int64_t kv_heads,
                                                 int64_t width, int64_t keys, int threads)
{
    const int64_t chunks = (keys + KEYS - 1) / KEYS;
    return threads * scratch_floats(tokens * heads / kv_heads, width) + samples * tokens * heads * chunks * (width + 2);
}

/* y [samples, tokens, heads, width]; see Call. keys_in_use: one past the last position of all. */
EXPORT void decode_attention(const void *queries, int64_t query_row, const void *keys, const void *values,
                             const int64_t *positions, void *y, int64_t samples, int64_t tokens, int64_t heads,
                             int64_t kv_heads, int64_t width, int64_t capacity, int64_t keys_in_use, int type,
                             float *work, int threads)
{
    Call c = {queries, keys, values, positions, y, samples, tokens, heads, kv_heads, width, query_row, capacity,
              (keys_in_use + KEYS - 1) / KEYS, type, 0};
    const int64_t rows = rows_of(&c), scratch = scratch_floats(rows, width);
    c.partial = work + threads * scratch;
    int64_t next = 0, next_row = 0, thread_count = 0;
#pragma omp parallel num_threads(threads)
    {
        float *own = work + __atomic_fetch_add(&thread_count, 1, __ATOMIC_RELAXED) * scratch;
        int64_t task;
        while ((task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < samples * kv_heads * c.chunks) {
            const int64_t head = task / c.chunks, chunk = task % c.chunks;
            if (type == BFLOAT16)
                attend_to_chunk(&c, head / kv_heads, head % kv_heads, chunk, own, BFLOAT16);
            else
                attend_to_chunk(&c, head / kv_heads, head % kv_heads, chunk, own, FLOAT32);
        }
#pragma omp barrier
        while ((task = __atomic_fetch_add(&next_row, 1, __ATOMIC_RELAXED)) < samples * kv_heads * rows)
            combine_chunks(&c, task / rows / kv_heads, task / rows % kv_heads, task % rows);
    }
}

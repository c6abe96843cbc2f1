/* Attention of few new tokens over a cache of keys and values.

   The keys of a head are cut into chunks, which threads take one by one. Each gives the softmax over its keys alone, of
   all heads of queries that share them, and the chunks of a query are then combined by their largest scores (Milakov
   and Gimelshein 2018, "Online normalizer calculation for softmax"). So all threads have work where a single text with
   few heads of keys has grown long. Sums have the same order for any number of threads. */
#include "gemv.h"

#define KEYS 256                   /* of a chunk */
#define VECTORS (ROWS > 2 ? 4 : 2) /* of a row of values, whose sums stay in registers for ROWS rows */
#define LOG2_E 1.44269504088896341f

/* One call: queries [samples, tokens, heads, width], tokens query_row numbers from each other; keys and values
   [samples, kv_heads, capacity, width]. The query at a position sees the keys up to it; positions [samples, tokens]
   grow along a sample. Rows are the queries of a sample that share a head of keys: [tokens, heads / kv_heads]. */
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

/* A chunk's scores [rows, KEYS], of scaled queries [rows, width]. */
INLINE void score(const Call *c, int64_t at, int64_t count, const float *queries, float *scores, const int type)
{
    const int64_t size = type == BFLOAT16 ? 2 : 4;
    const Gemv p = {.x = queries, .w = (const char *)c->keys + at * c->width * size, .y = scores, .m = rows_of(c),
                    .n = count, .k = c->width, .y_row = KEYS, .type = type, .y_type = FLOAT32};
    multiply_columns(&p, 0, count, type);
}

/* Values of a chunk, from key `at` on, with their factors: probabilities [rows, KEYS]. */
typedef struct {
    int64_t at, count;
    const float *factors;
} Values;

/* Numbers [first, first + VECTORS LANES), or as many as there are, of the outputs [rows, width + 2] of `rows` rows from
   `row` on: the sum of the values, each times its factor. */
INLINE void add_values(const Call *c, Values chunk, const int rows, int64_t row, int64_t first, const int is_full,
                       float *outputs, const int type)
{
    const int64_t width = c->width;
    Sum sums[ROWS][VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[i][v] = splat(0.0f);
    for (int64_t j = 0; j < chunk.count; j++) {
        Sum values[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const int64_t number = first + v * LANES, rest = is_full ? LANES : width - number;
            values[v] = rest > 0 ? load(c->values, (chunk.at + j) * width + number, rest, type) : splat(0.0f);
        }
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sums[i][v] = add_product(sums[i][v], values[v], splat(chunk.factors[(row + i) * KEYS + j]));
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            if (is_full || first + v * LANES < width)
                store(outputs + (row + i) * (width + 2) + first + v * LANES,
                      is_full ? LANES : width - first - v * LANES, sums[i][v]);
}

/* The same for all rows. */
INLINE void add_all_values(const Call *c, Values chunk, int64_t first, const int is_full, float *outputs,
                           const int type)
{
    const int64_t rows = rows_of(c);
    int64_t row = 0;
    for (; row + ROWS <= rows; row += ROWS) add_values(c, chunk, ROWS, row, first, is_full, outputs, type);
    const int64_t rest = rows - row;
    if (rest == 1) add_values(c, chunk, 1, row, first, is_full, outputs, type);
    if (ROWS > 2 && rest == 2) add_values(c, chunk, 2, row, first, is_full, outputs, type);
    if (ROWS > 2 && rest == 3) add_values(c, chunk, 3, row, first, is_full, outputs, type);
}

/* scores [KEYS] of a row become powers of two, and zeros from `seen` on; writes the largest score and the sum. */
static __attribute__((noinline)) void exponentials(float *scores, int64_t seen, int64_t count, float *largest,
                                                   float *total)
{
    float top = -FLT_MAX, sum = 0.0f;
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < seen; j++) top = scores[j] > top ? scores[j] : top;
#ifdef HAS_SVE
    svfloat32_t sums = svdup_n_f32(0.0f);
    for (int64_t j = 0; j < seen; j += svcntw()) {
        const svbool_t p = svwhilelt_b32_s64(j, seen);
        const svfloat32_t power = vector_exp2(svsub_n_f32_x(p, svld1_f32(p, scores + j), top));
        svst1_f32(p, scores + j, power);
        sums = svadd_f32_m(p, sums, power);
    }
    sum = svaddv_f32(svptrue_b32(), sums);
#else
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < seen; j++) {
        scores[j] = exp2_flushed(scores[j] - top);
        sum += scores[j];
    }
#endif
    for (int64_t j = seen > 0 ? seen : 0; j < count; j++) scores[j] = 0.0f;
    *largest = top;
    *total = sum;
}

/* A chunk's softmax for all rows. work: queries [rows, width], scores [rows, KEYS]. */
INLINE void attend_to_chunk(const Call *c, int64_t sample, int64_t kv_head, int64_t chunk, float *work, const int type)
{
    const int64_t rows = rows_of(c), sharing = sharing_of(c), width = c->width, first = chunk * KEYS;
    const int64_t count = min_int64(KEYS, seen_by(c, sample, rows - 1, first));
    if (count <= 0) return; /* of a sample that is shorter than the longest */
    const int64_t at = (sample * c->kv_heads + kv_head) * c->capacity + first;
    float *queries = work, *scores = queries + rows * width;
    float *partial = partial_of(c, sample, kv_head, chunk);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t token = sample * c->tokens + row / sharing, head = kv_head * sharing + row % sharing;
        load_scaled(c->queries, token * c->query_row + head * width, type, LOG2_E / sqrtf((float)width),
                    queries + row * width, width);
    }
    score(c, at, count, queries, scores, type);
    for (int64_t row = 0; row < rows; row++) {
        float *out = partial + row * (width + 2);
        exponentials(scores + row * KEYS, min_int64(count, seen_by(c, sample, row, first)), count, out + width,
                     out + width + 1);
    }
    const Values values = {at, count, scores};
    int64_t number = 0;
    for (; number + VECTORS * LANES <= width; number += VECTORS * LANES)
        add_all_values(c, values, number, 1, partial, type);
    if (number < width) add_all_values(c, values, number, 0, partial, type);
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
    return round_up(rows * (width + KEYS), 16); /* threads share no cache line */
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

/* Calls one kernel in one thread on A64FX, emulated: a64fx.py traces the instructions between `begin` and `end`.

   Arguments: the name of a case, then its numbers. Operands are what a step has: random numbers of the normal
   distribution's spread. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FLOAT32 = 0, BFLOAT16 = 1 };

/* The kernels, as in fugaku_gpt/kernels/source. */
void adamw(float *parameters, const float *gradients, float *first, float *second, uint16_t *rounded, int64_t n,
           float gradient_scale, float decay, float beta1, float complement1, float beta2, float complement2,
           float step_size, float eps, int threads);
double sum_of_squares(const float *x, int64_t n, int threads);
void gelu(const void *x, void *y, int64_t n, int type, int approximate, int threads);
void gelu_gradient(const void *x, const void *y_grad, void *x_grad, int64_t n, int type, int approximate, int threads);
void layer_norm(const void *x, const float *weight, const float *bias, void *y, float *means, float *scales, int64_t n,
                int64_t width, int type, float eps, float *work, int threads);
void layer_norm_gradient(const void *x, const float *weight, const float *means, const float *scales,
                         const void *y_grad, void *x_grad, float *weight_grad, float *bias_grad, int64_t n,
                         int64_t width, int type, float *work, int threads);
void rms_norm(const void *x, int64_t group, int64_t group_step, int64_t row_step, const float *weight, void *y,
              float *scales, int64_t n, int64_t width, int type, float eps, float *work, int threads);
void rms_norm_gradient(const void *x, int64_t group, int64_t group_step, int64_t row_step, const float *weight,
                       const float *scales, const void *y_grad, void *x_grad, float *weight_grad, int64_t n,
                       int64_t width, int type, float *work, int threads);
void swiglu(const void *x, void *y, int64_t n, int64_t width, int type, int threads);
void swiglu_gradient(const void *x, const void *y_grad, void *x_grad, int64_t n, int64_t width, int type, int threads);
void rotate(const void *x, int64_t x_row, int64_t x_head, void *y, int64_t y_row, int64_t y_head, const float *cosines,
            const float *sines, int64_t shards, int64_t samples, int64_t tokens, int64_t heads, int64_t width, int type,
            int inverse, int threads);
void loss_sums(const void *logits, int64_t n, int64_t columns, int64_t row, int type, float *largest, float *sums,
               int threads);
void loss_gradient(void *logits, int64_t n, int64_t columns, int64_t row, int type, const float *log_sums, float scale,
                   int threads);
void loss_full_rows(void *logits, int64_t n, int64_t columns, int64_t row, int type, float *log_sums, float scale,
                    int wants_gradient, int threads);
void accumulate(float *sums, const uint16_t *x, int64_t n, int threads);
void sum_of_rows(const uint16_t *x, int64_t n, int64_t width, float *sums, int threads);
int64_t gemm_workspace_floats(int64_t m, int64_t n, int64_t k, int type, int c_type, int threads);
void gemm(const void *a, int64_t a_row, int64_t a_column, const void *b, int64_t b_row, int64_t b_column, int type,
          const float *bias, void *c, int64_t c_row, int c_type, int accumulates, int64_t m, int64_t n, int64_t k,
          float *work, int threads);
void gemv(const void *x, const void *w, const void *bias, void *y, int64_t m, int64_t n, int64_t k, int type,
          float *work, int threads);
int64_t decode_attention_workspace_floats(int64_t samples, int64_t tokens, int64_t heads, int64_t kv_heads,
                                          int64_t width, int64_t keys, int threads);
void decode_attention(const void *queries, int64_t query_row, const void *keys, const void *values,
                      const int64_t *positions, void *y, int64_t samples, int64_t tokens, int64_t heads,
                      int64_t kv_heads, int64_t width, int64_t capacity, int64_t keys_in_use, int type, float *work,
                      int threads);
int64_t attention_workspace_floats(int64_t length, int64_t width);
typedef struct {
    int64_t samples, heads, kv_heads, width, queries, keys, query_shard, key_shard, query_row, key_row, ranges_row, type;
} Shape;
void attention_forward(const Shape *s, const void *queries, const void *keys, const void *values,
                       const int32_t *first_keys, const int32_t *end_keys, const uint8_t *keep_mask, float factor,
                       void *y, float *log_sums, float *work, int threads);
void attention_backward(const Shape *s, const void *queries, const void *keys, const void *values,
                        const int32_t *first_keys, const int32_t *end_keys, const uint8_t *keep_mask, float factor,
                        const void *y, const void *y_grad, const float *log_sums, void *queries_grad, void *keys_grad,
                        void *values_grad, float *partial_grads, float *work, int threads);

/* A team of one thread in place of the OpenMP runtime, whose own instructions are no part of a kernel. */
void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags)
{
    (void)threads, (void)flags;
    body(data);
}
void GOMP_barrier(void) {}
int omp_get_thread_num(void) { return 0; }
int omp_get_num_threads(void) { return 1; }

/* progress.c's */
void (*progress_callback)(void) = 0;
void call_progress_if_due(void) {}

__attribute__((noinline)) void begin(void) { __asm__ volatile("nop" ::: "memory"); }
__attribute__((noinline)) void end(void) { __asm__ volatile("nop" ::: "memory"); }

/* The same numbers over and over, which are made quickly. */
static float *random_floats(int64_t n)
{
    enum { PERIOD = 4099 };
    static uint32_t state = 1;
    float *x = aligned_alloc(256, (size_t)(n * 4 + 511) / 256 * 256);
    for (int64_t i = 0; i < n && i < PERIOD; i++) {
        float sum = -2.0f;
        for (int j = 0; j < 4; j++) {
            state = state * 1664525u + 1013904223u;
            sum += (float)(state >> 8) * 0x1p-24f;
        }
        x[i] = 1.7f * sum;
    }
    for (int64_t i = PERIOD; i < n; i += PERIOD)
        memcpy(x + i, x, (size_t)(n - i < PERIOD ? n - i : PERIOD) * sizeof *x);
    return x;
}

static uint16_t *random_bfloat16(int64_t n)
{
    uint32_t *x = (uint32_t *)random_floats((n + 1) / 2);
    for (int64_t i = 0; i < (n + 1) / 2; i++) x[i] = x[i] >> 16 | (x[i] & 0xffff0000u);
    return (uint16_t *)x;
}

static void run_attention(int64_t length, int64_t width, int backward)
{
    const int64_t n = length * width, row = 3 * width;
    const Shape shape = {1, 1, 1, width, length, length, length, length, row, row, 0, FLOAT32};
    float *qkv = random_floats(3 * n), *y = random_floats(n), *log_sums = random_floats(length);
    float *y_grad = random_floats(n), *grad = random_floats(3 * n);
    float *work = random_floats(attention_workspace_floats(length, width));
    int32_t *first_keys = calloc(length, sizeof *first_keys), *end_keys = calloc(length, sizeof *end_keys);
    for (int64_t i = 0; i < length; i++) end_keys[i] = (int32_t)i + 1;
    if (!backward) begin();
    attention_forward(&shape, qkv, qkv + width, qkv + 2 * width, first_keys, end_keys, 0, 1.0f, y, log_sums, work, 1);
    if (!backward) return;
    begin();
    attention_backward(&shape, qkv, qkv + width, qkv + 2 * width, first_keys, end_keys, 0, 1.0f, y, y_grad, log_sums,
                       grad, grad + width, grad + 2 * width, 0, work, 1);
}

/* [m, k] x [k, n]; the layouts of a layer's forward pass, of its input's gradient, and of its weight's gradient. */
static void run_gemm(const char *layout, int64_t m, int64_t n, int64_t k)
{
    float *a = random_floats(m * k), *b = random_floats(k * n), *c = random_floats(m * n);
    float *work = random_floats(gemm_workspace_floats(m, n, k, FLOAT32, FLOAT32, 1));
    const int is_weight = !strcmp(layout, "tn"), b_transposed = !strcmp(layout, "nt");
    begin();
    gemm(a, is_weight ? 1 : k, is_weight ? m : 1, b, b_transposed ? 1 : n, b_transposed ? k : 1, FLOAT32, 0, c, n,
         FLOAT32, is_weight, m, n, k, work, 1);
}

static void *random_numbers(int64_t n, int type)
{
    return type == BFLOAT16 ? (void *)random_bfloat16(n) : random_floats(n);
}

static void run_gemv(int64_t m, int64_t n, int64_t k, int type)
{
    void *x = random_numbers(m * k, type), *w = random_numbers(n * k, type), *y = random_numbers(m * n, type);
    float *work = random_floats(m * k);
    begin();
    gemv(x, w, 0, y, m, n, k, type, work, 1);
}

/* One token of a text of `keys` tokens; heads of 64, of which `sharing` share their keys. */
static void run_decode_attention(int64_t keys, int64_t sharing, int type)
{
    void *q = random_numbers(sharing * 64, type), *y = random_numbers(sharing * 64, type);
    void *k = random_numbers(keys * 64, type), *v = random_numbers(keys * 64, type);
    const int64_t position = keys - 1;
    float *work = random_floats(decode_attention_workspace_floats(1, 1, sharing, 1, 64, keys, 1));
    begin();
    decode_attention(q, sharing * 64, k, v, &position, y, 1, 1, sharing, 1, 64, keys, keys, type, work, 1);
}

static void run_layer_norm(int64_t rows, int64_t width, int type, int backward)
{
    void *x = random_numbers(rows * width, type), *y = random_numbers(rows * width, type);
    float *weight = random_floats(width), *bias = random_floats(width), *means = random_floats(rows);
    float *scales = random_floats(rows), *work = random_floats(6 * width);
    begin();
    if (backward)
        layer_norm_gradient(x, weight, means, scales, y, x, weight, bias, rows, width, type, work, 1);
    else
        layer_norm(x, weight, bias, y, means, scales, rows, width, type, 1e-5f, work, 1);
}

static void run_rms_norm(int64_t rows, int64_t width, int type, int backward)
{
    void *x = random_numbers(rows * width, type), *y = random_numbers(rows * width, type);
    float *weight = random_floats(width), *scales = random_floats(rows), *work = random_floats(10 * width);
    begin();
    if (backward)
        rms_norm_gradient(x, rows, 0, width, weight, scales, y, x, weight, rows, width, type, work, 1);
    else
        rms_norm(x, rows, 0, width, weight, y, scales, rows, width, type, 1e-5f, work, 1);
}

static void run_swiglu(int64_t rows, int64_t width, int type, int backward)
{
    void *x = random_numbers(2 * rows * width, type), *y = random_numbers(rows * width, type);
    begin();
    if (backward)
        swiglu_gradient(x, y, x, rows, width, type, 1);
    else
        swiglu(x, y, rows, width, type, 1);
}

/* Heads of 64. */
static void run_rotate(int64_t tokens, int64_t columns, int type)
{
    void *x = random_numbers(tokens * columns, type), *y = random_numbers(tokens * columns, type);
    float *cosines = random_floats(tokens * 32), *sines = random_floats(tokens * 32);
    begin();
    rotate(x, columns, 64, y, columns, 64, cosines, sines, 1, 1, tokens, columns / 64, 64, type, 0, 1);
}

static void run_gelu(int64_t n, int type, int approximate, int backward)
{
    void *x = random_numbers(n, type), *y = random_numbers(n, type);
    begin();
    if (backward)
        gelu_gradient(x, y, x, n, type, approximate, 1);
    else
        gelu(x, y, n, type, approximate, 1);
}

static void run_loss(const char *name, int64_t rows, int64_t columns, int type)
{
    void *logits = type == BFLOAT16 ? (void *)random_bfloat16(rows * columns) : random_floats(rows * columns);
    float *log_sums = random_floats(rows), *largest = random_floats(rows);
    begin();
    if (!strcmp(name, "loss_sums"))
        loss_sums(logits, rows, columns, columns, type, largest, log_sums, 1);
    else if (!strcmp(name, "loss_gradient"))
        loss_gradient(logits, rows, columns, columns, type, log_sums, 1e-3f, 1);
    else
        loss_full_rows(logits, rows, columns, columns, type, log_sums, 1e-3f, 1, 1);
}

static void run_adamw(int64_t n, int rounds)
{
    float *parameters = random_floats(n), *gradients = random_floats(n), *first = random_floats(n);
    float *second = random_floats(n);
    uint16_t *rounded = random_bfloat16(n);
    for (int64_t i = 0; i < n; i++) second[i] *= second[i];
    begin();
    adamw(parameters, gradients, first, second, rounds ? rounded : 0, n, 0.5f, 0.9999f, 0.9f, 0.1f, 0.95f, 0.05f, 3e-4f,
          1e-8f, 1);
}

static int has_prefix(const char *name, const char *prefix) { return !strncmp(name, prefix, strlen(prefix)); }

int main(int argc, char **argv)
{
    int64_t number[4] = {0};
    const char *name = argc > 1 ? argv[1] : "";
    for (int i = 0; i < 4 && i + 2 < argc; i++) number[i] = atoll(argv[i + 2]);
    if (!strcmp(name, "attention_forward") || !strcmp(name, "attention_backward"))
        run_attention(number[0], number[1], !strcmp(name, "attention_backward"));
    else if (has_prefix(name, "gemm_"))
        run_gemm(name + strlen("gemm_"), number[0], number[1], number[2]);
    else if (!strcmp(name, "gemv"))
        run_gemv(number[0], number[1], number[2], (int)number[3]);
    else if (!strcmp(name, "decode_attention"))
        run_decode_attention(number[0], number[1], (int)number[2]);
    else if (!strcmp(name, "layer_norm"))
        run_layer_norm(number[0], number[1], (int)number[2], 0);
    else if (!strcmp(name, "layer_norm_gradient"))
        run_layer_norm(number[0], number[1], (int)number[2], 1);
    else if (has_prefix(name, "rms_norm"))
        run_rms_norm(number[0], number[1], (int)number[2], !strcmp(name, "rms_norm_gradient"));
    else if (has_prefix(name, "swiglu"))
        run_swiglu(number[0], number[1], (int)number[2], !strcmp(name, "swiglu_gradient"));
    else if (!strcmp(name, "rotate"))
        run_rotate(number[0], number[1], (int)number[2]);
    else if (!strcmp(name, "gelu"))
        run_gelu(number[0], (int)number[1], (int)number[2], 0);
    else if (!strcmp(name, "gelu_gradient"))
        run_gelu(number[0], (int)number[1], (int)number[2], 1);
    else if (has_prefix(name, "loss_"))
        run_loss(name, number[0], number[1], (int)number[2]);
    else if (!strcmp(name, "adamw"))
        run_adamw(number[0], (int)number[1]);
    else if (!strcmp(name, "sum_of_squares")) {
        float *x = random_floats(number[0]);
        begin();
        if (sum_of_squares(x, number[0], 1) < 0.0) return 1;
    } else if (!strcmp(name, "accumulate")) {
        float *sums = random_floats(number[0]);
        uint16_t *x = random_bfloat16(number[0]);
        begin();
        accumulate(sums, x, number[0], 1);
    } else if (!strcmp(name, "sum_of_rows")) {
        float *sums = random_floats(number[1]);
        uint16_t *x = random_bfloat16(number[0] * number[1]);
        begin();
        sum_of_rows(x, number[0], number[1], sums, 1);
    } else {
        fprintf(stderr, "%s: no such kernel\n", name);
        return 2;
    }
    end();
    return 0;
}

/* RMSNorm (Zhang and Sennrich 2019) over rows, and its gradients; computed in float32. */
#include "common.h"

#include <math.h>

#define ROW_BLOCK 64 /* rows whose gradients of the weight are summed before they are added to the rest */
#define ROWS 4       /* whose gradients are taken together; they share the loads of weights and sums */

/* Rows of an input that may have gaps: groups of rows, with the elements from one group to the next, and from a row of a
   group to the next. */
typedef struct {
    int64_t group, group_step, row_step;
} Rows;

INLINE int64_t start_of(Rows rows, int64_t i)
{
    if (i < rows.group) return i * rows.row_step; /* most inputs are one group: no division */
    return i / rows.group * rows.group_step + i % rows.group * rows.row_step;
}

#ifdef HAS_SVE
#define L1_BYTES 32768 /* of rows that are read again while they are in the L1 cache, with what else is there */
#define MAX_ROWS 8     /* that are normalised together: chains of sums over vectors, roots and divisions overlap */

INLINE svfloat32_t normalized(svbool_t p, const void *x, int64_t at, const int type, const float *weight, float scale)
{
    const svbool_t all = svptrue_b32();
    return svmul_f32_x(all, svmul_n_f32_x(all, load_vector(p, x, at, type), scale), svld1_f32(p, weight));
}

INLINE void normalize_sve_rows(const void *x, Rows rows, int64_t first, int64_t count, const float *weight, void *y,
                               float *scales, int64_t width, const int type, float eps)
{
    const svbool_t all = svptrue_b32();
    const int64_t step = svcntw();
    for (int64_t i = first; i < first + count; i++)
        scales[i] = 1.0f / sqrtf(vector_sum(x, start_of(rows, i), width, type, 0.0f, 1) / (float)width + eps);
    for (int64_t i = first; i < first + count; i++) {
        const int64_t at = start_of(rows, i), y_at = i * width;
        int64_t j = 0;
        for (; j <= width - 2 * step; j += 2 * step) { /* GCC 12 crashes at j + 2 step <= width */
            const int64_t k = j + step;
            store_vectors(normalized(all, x, at + j, type, weight + j, scales[i]),
                          normalized(all, x, at + k, type, weight + k, scales[i]), y, y_at + j, type);
        }
        for (; j < width; j += step) {
            const svbool_t p = svwhilelt_b32_s64(j, width);
            store_vector(p, normalized(p, x, at + j, type, weight + j, scales[i]), y, y_at + j, type);
        }
    }
}

/* y = RMSNorm of `count` rows of x from row `first` on; writes their scales. */
INLINE void normalize_rows(const void *x, Rows rows, int64_t first, int64_t count, const float *weight, void *y,
                           float *scales, int64_t width, int type, float eps)
{
    if (type == BFLOAT16)
        normalize_sve_rows(x, rows, first, count, weight, y, scales, width, BFLOAT16, eps);
    else
        normalize_sve_rows(x, rows, first, count, weight, y, scales, width, FLOAT32, eps);
}

/* Adds a vector of one row to its projection and to the weight's gradient, which it returns. */
INLINE svfloat32_t add_row(svbool_t p, const void *x, int64_t at, const void *y_grad, int64_t grad_at, const int type,
                           svfloat32_t weight, svfloat32_t weight_sum, float scale, svfloat32_t *projection)
{
    const svfloat32_t product = svmul_f32_x(p, load_vector(p, y_grad, grad_at, type), load_vector(p, x, at, type));
    *projection = svmla_f32_m(p, *projection, product, weight);
    return svmla_n_f32_x(p, weight_sum, product, scale);
}

/* Adds vector j of `count` rows, 1 or ROWS, which start at `starts` in x and at `grad_at` in y_grad. */
INLINE void add_rows(svbool_t p, const void *x, const int64_t *starts, const void *y_grad, int64_t grad_at, int64_t j,
                     int64_t width, const int type, const float *weight, float *weight_sums, const float *scales,
                     const int count, svfloat32_t *p0, svfloat32_t *p1, svfloat32_t *p2, svfloat32_t *p3)
{
    const svfloat32_t w = svld1_f32(p, weight + j);
    svfloat32_t sum = svld1_f32(p, weight_sums + j);
#define ADD(I, PROJECTION)                                                                                             \
    sum = add_row(p, x, starts[I] + j, y_grad, grad_at + (I) * width + j, type, w, sum, scales[I], PROJECTION)
    ADD(0, p0);
    if (count == ROWS) {
        ADD(1, p1);
        ADD(2, p2);
        ADD(3, p3);
    }
#undef ADD
    svst1_f32(p, weight_sums + j, sum);
}

/* Adds the gradient of the weight by `count` rows; projections: of each row the sum of y_grad weight x. */
INLINE void sve_weight_gradient(const void *x, const int64_t *starts, const void *y_grad, int64_t grad_at,
                                const float *weight, float *weight_sums, int64_t width, const int type,
                                const float *scales, const int count, float *projections)
{
    const svbool_t all = svptrue_b32();
    const int64_t step = svcntw();
    svfloat32_t p0 = svdup_n_f32(0.0f), p1 = p0, p2 = p0, p3 = p0;
    int64_t j = 0;
    for (; j + step <= width; j += step)
        add_rows(all, x, starts, y_grad, grad_at, j, width, type, weight, weight_sums, scales, count, &p0, &p1, &p2,
                 &p3);
    if (j < width)
        add_rows(svwhilelt_b32_s64(j, width), x, starts, y_grad, grad_at, j, width, type, weight, weight_sums, scales,
                 count, &p0, &p1, &p2, &p3);
    projections[0] = svaddv_f32(all, p0);
    if (count == ROWS) {
        projections[1] = svaddv_f32(all, p1);
        projections[2] = svaddv_f32(all, p2);
        projections[3] = svaddv_f32(all, p3);
    }
}

/* y_grad weight scale - x slope */
INLINE svfloat32_t input_gradient(svbool_t p, const void *x, int64_t at, const void *y_grad, int64_t grad_at,
                                  const int type, const float *weight, float scale, float slope)
{
    const svbool_t all = svptrue_b32();
    const svfloat32_t along = svmul_n_f32_x(all, load_vector(p, x, at, type), slope);
    const svfloat32_t scaled = svmul_n_f32_x(all, load_vector(p, y_grad, grad_at, type), scale);
    return svnmls_f32_x(all, along, scaled, svld1_f32(p, weight));
}

INLINE void sve_input_gradient(const void *x, int64_t at, const void *y_grad, void *x_grad, int64_t grad_at,
                               const float *weight, int64_t width, const int type, float scale, float slope)
{
    const svbool_t all = svptrue_b32();
    const int64_t step = svcntw();
    int64_t j = 0;
#define GRADIENT(P, J) input_gradient(P, x, at + (J), y_grad, grad_at + (J), type, weight + (J), scale, slope)
    for (; j <= width - 2 * step; j += 2 * step) /* GCC 12 crashes at j + 2 step <= width */
        store_vectors(GRADIENT(all, j), GRADIENT(all, j + step), x_grad, grad_at + j, type);
    for (; j < width; j += step) {
        const svbool_t p = svwhilelt_b32_s64(j, width);
        store_vector(p, GRADIENT(p, j), x_grad, grad_at + j, type);
    }
#undef GRADIENT
}

INLINE void gradient_rows_of_type(const void *x, Rows rows, const void *y_grad, void *x_grad, int64_t i,
                                  const float *weight, const float *scales, float *weight_sums, int64_t width,
                                  const int type, const int count)
{
    float projections[ROWS];
    int64_t starts[ROWS];
    for (int row = 0; row < count; row++) starts[row] = start_of(rows, i + row);
    sve_weight_gradient(x, starts, y_grad, i * width, weight, weight_sums, width, type, scales + i, count, projections);
    for (int row = 0; row < count; row++) {
        const float scale = scales[i + row], slope = scale * projections[row] / (float)width * scale * scale;
        sve_input_gradient(x, starts[row], y_grad, x_grad, (i + row) * width, weight, width, type, scale, slope);
    }
}
#else
/* A row in float32: itself, or its numbers in `buffer`. */
INLINE const float *float_row(const void *x, int64_t at, int type, float *buffer, int64_t width)
{
    if (type == FLOAT32) return (const float *)x + at;
    load_scaled(x, at, type, 1.0f, buffer, width);
    return buffer;
}

/* The place of a row of results in float32: itself, or `buffer`. */
INLINE float *result_row(void *y, int64_t at, int type, float *buffer)
{
    return type == FLOAT32 ? (float *)y + at : buffer;
}

/* y = RMSNorm of row i; writes its scale. buffer: width float32 numbers. */
INLINE void normalize_row(const void *x, Rows rows, int64_t i, const float *weight, void *y, float *scales,
                          int64_t width, const int type, float eps, float *buffer)
{
    const float *row = float_row(x, start_of(rows, i), type, buffer, width);
    float *result = result_row(y, i * width, type, buffer);
    const float scale = 1.0f / sqrtf(row_sum(row, width, 0.0f, 1) / (float)width + eps);
    scales[i] = scale;
#pragma omp simd
    for (int64_t j = 0; j < width; j++) result[j] = row[j] * scale * weight[j];
    if (type != FLOAT32) store_scaled(buffer, 1.0f, y, i * width, type, width);
}

INLINE vec load_floats(const float *x) { return *(const unaligned_vec *)x; }

/* Adds the gradient of the weight by `count` rows; projections: of each row the sum of y_grad weight x. */
INLINE void add_weight_gradient(const float *const *x, const float *const *y_grad, const float *weight,
                                const float *scales, float *weight_sums, int64_t width, const int count,
                                float *projections)
{
    vec sums[ROWS] = {{0}};
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES) {
        const vec w = load_floats(weight + j);
        vec weight_sum = load_floats(weight_sums + j);
#pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            const vec product = load_floats(y_grad[i] + j) * load_floats(x[i] + j);
            weight_sum += product * scales[i];
            sums[i] += product * w;
        }
        *(unaligned_vec *)(weight_sums + j) = weight_sum;
    }
    for (int i = 0; i < count; i++) {
        float sum = 0.0f;
        for (int lane = 0; lane < LANES; lane++) sum += sums[i][lane];
        for (int64_t k = j; k < width; k++) {
            const float product = y_grad[i][k] * x[i][k];
            weight_sums[k] += product * scales[i];
            sum += product * weight[k];
        }
        projections[i] = sum;
    }
}

INLINE void gradient_rows_of_type(const void *x, Rows rows, const void *y_grad, void *x_grad, int64_t i,
                                  const float *weight, const float *scales, float *weight_sums, int64_t width,
                                  const int type, const int count, float *buffers)
{
    const float *inputs[ROWS], *grads[ROWS];
    float factors[ROWS], projections[ROWS];
    for (int row = 0; row < count; row++) {
        inputs[row] = float_row(x, start_of(rows, i + row), type, buffers + 2 * row * width, width);
        grads[row] = float_row(y_grad, (i + row) * width, type, buffers + (2 * row + 1) * width, width);
        factors[row] = scales[i + row];
    }
    add_weight_gradient(inputs, grads, weight, factors, weight_sums, width, count, projections);
    for (int row = 0; row < count; row++) {
        const int64_t at = (i + row) * width;
        const float scale = factors[row], slope = scale * projections[row] / (float)width * scale * scale;
        const float *from = inputs[row], *grad = grads[row];
        float *buffer = buffers + 2 * row * width, *result = result_row(x_grad, at, type, buffer);
#pragma omp simd
        for (int64_t j = 0; j < width; j++) result[j] = grad[j] * scale * weight[j] - from[j] * slope;
        if (type != FLOAT32) store_scaled(buffer, 1.0f, x_grad, at, type, width);
    }
}
#endif

/* y [n, width] = RMSNorm of x [n, width], with weight [width]; scales (1 / root of the mean square) [n] are for the
   gradient. Rows of x are in groups of `group`, with group_step elements from one to the next, and row_step from a row of
   a group to the next. work: width float32 numbers per thread. */
EXPORT void rms_norm(const void *x, int64_t group, int64_t group_step, int64_t row_step, const float *weight, void *y,
                     float *scales, int64_t n, int64_t width, int type, float eps, float *work, int threads)
{
    const Rows rows = {group, group_step, row_step};
#ifdef HAS_SVE
    (void)work; /* SVE has no use for it */
    const int64_t fitting = L1_BYTES / (width * (type == BFLOAT16 ? 2 : 4) + 1), count = min_int64(fitting + 1, MAX_ROWS);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i += count)
        normalize_rows(x, rows, i, min_int64(count, n - i), weight, y, scales, width, type, eps);
#else
    int64_t thread_count = 0;
#pragma omp parallel num_threads(threads)
    {
        float *buffer = work + __atomic_fetch_add(&thread_count, 1, __ATOMIC_RELAXED) * width;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n; i++) {
            if (type == BFLOAT16)
                normalize_row(x, rows, i, weight, y, scales, width, BFLOAT16, eps, buffer);
            else
                normalize_row(x, rows, i, weight, y, scales, width, FLOAT32, eps, buffer);
        }
    }
#endif
}

/* Writes x_grad [n, width] and weight_grad [width] from y_grad [n, width] and x, whose rows are as above. work: 10 width
   float32 numbers per thread. */
EXPORT void rms_norm_gradient(const void *x, int64_t group, int64_t group_step, int64_t row_step, const float *weight,
                              const float *scales, const void *y_grad, void *x_grad, float *weight_grad, int64_t n,
                              int64_t width, int type, float *work, int threads)
{
    const Rows rows = {group, group_step, row_step};
    enum { FLOATS = 2 + 2 * ROWS }; /* per thread and column: two sums, and the rows in float32 */
    /* one partition of the rows per thread, whichever thread takes it: sums are always added in the same order */
    const int64_t rows_per_partition = (n + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t partition = 0; partition < threads; partition++) {
        float *sums = work + partition * FLOATS * width, *block_sums = sums + width;
        const int64_t first = partition * rows_per_partition, end = min_int64(first + rows_per_partition, n);
        memset(sums, 0, (size_t)(2 * width) * sizeof *sums);
#ifdef HAS_SVE
#define GRADIENT_ROWS(TYPE, COUNT)                                                                                     \
    gradient_rows_of_type(x, rows, y_grad, x_grad, i, weight, scales, block_sums, width, TYPE, COUNT)
#else
#define GRADIENT_ROWS(TYPE, COUNT)                                                                                     \
    gradient_rows_of_type(x, rows, y_grad, x_grad, i, weight, scales, block_sums, width, TYPE, COUNT,                  \
                          block_sums + width)
#endif
        for (int64_t i = first, count; i < end; i += count) {
            count = end - i < ROWS ? 1 : ROWS;
            if (type == BFLOAT16)
                count == 1 ? GRADIENT_ROWS(BFLOAT16, 1) : GRADIENT_ROWS(BFLOAT16, ROWS);
            else
                count == 1 ? GRADIENT_ROWS(FLOAT32, 1) : GRADIENT_ROWS(FLOAT32, ROWS);
            if ((i + count - first) % ROW_BLOCK == 0) add_and_clear(sums, block_sums, width);
        }
#undef GRADIENT_ROWS
        add_and_clear(sums, block_sums, width);
    }
    for (int64_t j = 0; j < width; j++) {
        float sum = 0.0f;
        for (int64_t partition = 0; partition < threads; partition++) sum += work[partition * FLOATS * width + j];
        weight_grad[j] = sum;
    }
}

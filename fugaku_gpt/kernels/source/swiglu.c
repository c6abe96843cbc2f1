/* SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer") of rows, and its gradients; computed in float32. */
#include "common.h"

#define BLOCK 1024   /* numbers of a row at a time: they stay in the L1 cache */
#define LIMIT 87.0f  /* exp(LIMIT) is finite; silu(-LIMIT) is 0 but for 2e-36 */

/* The numbers of a block of a row: their first ones in rows of two parts, the gate and what it gates, and in rows of
   one. */
typedef struct {
    int64_t gate, up, single, count;
} Block;

#ifdef HAS_SVE
/* x limited to [-LIMIT, LIMIT]; NaN stays NaN. */
INLINE svfloat32_t limited(svfloat32_t x)
{
    const svbool_t all = svptrue_b32();
    return svmax_n_f32_x(all, svmin_n_f32_x(all, x, LIMIT), -LIMIT);
}

/* First stage: exp(-gate). */
INLINE void store_power(svbool_t p, const void *x, int64_t at, const int type, float *power)
{
    svfloat32_t rest;
    const svfloat32_t scale = exp_parts(limited(svneg_f32_x(svptrue_b32(), load_vector(p, x, at, type))), &rest);
    svst1_f32(p, power, svmul_f32_x(svptrue_b32(), scale, exp_factor(rest, 1.0f)));
}

/* The logistic function of the gate, from exp(-gate). */
INLINE svfloat32_t logistic(svbool_t p, const float *power)
{
    return vector_inverse(svadd_n_f32_x(svptrue_b32(), svld1_f32(p, power), 1.0f));
}

/* silu(gate) = gate times its logistic function, which is 0 below -LIMIT. */
INLINE svfloat32_t silu(svfloat32_t gate, svfloat32_t share)
{
    const svbool_t all = svptrue_b32();
    return svmul_f32_x(all, gate, svdup_n_f32_m(share, svcmplt_n_f32(all, gate, -LIMIT), 0.0f));
}

INLINE svfloat32_t result(svbool_t p, const void *x, Block block, int64_t i, const int type, const float *powers)
{
    const svfloat32_t gate = load_vector(p, x, block.gate + i, type);
    return svmul_f32_x(svptrue_b32(), silu(gate, logistic(p, powers + i)), load_vector(p, x, block.up + i, type));
}

/* Returns the gradient by the gate; writes that by what it gates. */
INLINE svfloat32_t gradients(svbool_t p, const void *x, const void *y_grad, Block block, int64_t i, const int type,
                             const float *powers, svfloat32_t *up_grad)
{
    const svbool_t all = svptrue_b32();
    const svfloat32_t gate = load_vector(p, x, block.gate + i, type), share = logistic(p, powers + i);
    const svfloat32_t grad = load_vector(p, y_grad, block.single + i, type);
    *up_grad = svmul_f32_x(all, silu(gate, share), grad);
    const svfloat32_t complement = svmul_f32_x(all, svld1_f32(p, powers + i), share); /* 1 - share would lose digits */
    const svfloat32_t slope = svmla_f32_x(all, share, svmul_f32_x(all, limited(gate), share), complement);
    return svmul_f32_x(all, svmul_f32_x(all, slope, load_vector(p, x, block.up + i, type)), grad);
}

INLINE void store_powers(const void *x, Block block, const int type, float *powers)
{
    const int64_t step = svcntw();
    int64_t i = 0;
    for (; i + step <= block.count; i += step) store_power(svptrue_b32(), x, block.gate + i, type, powers + i);
    if (i < block.count) store_power(svwhilelt_b32_s64(i, block.count), x, block.gate + i, type, powers + i);
}

INLINE void swiglu_block(const void *x, void *y, Block block, const int type)
{
    float powers[BLOCK];
    const svbool_t all = svptrue_b32();
    const int64_t step = svcntw();
    store_powers(x, block, type, powers);
    int64_t i = 0;
    for (; i + 2 * step <= block.count; i += 2 * step) {
        const svfloat32_t first = result(all, x, block, i, type, powers);
        store_vectors(first, result(all, x, block, i + step, type, powers), y, block.single + i, type);
    }
    for (; i < block.count; i += step) {
        const svbool_t p = svwhilelt_b32_s64(i, block.count);
        store_vector(p, result(p, x, block, i, type, powers), y, block.single + i, type);
    }
}

INLINE void swiglu_gradient_block(const void *x, const void *y_grad, void *x_grad, Block block, const int type)
{
    float powers[BLOCK];
    const svbool_t all = svptrue_b32();
    const int64_t step = svcntw();
    store_powers(x, block, type, powers);
    int64_t i = 0;
    svfloat32_t up_grad, next_up_grad;
    for (; i + 2 * step <= block.count; i += 2 * step) {
        const svfloat32_t gate_grad = gradients(all, x, y_grad, block, i, type, powers, &up_grad);
        const svfloat32_t next = gradients(all, x, y_grad, block, i + step, type, powers, &next_up_grad);
        store_vectors(gate_grad, next, x_grad, block.gate + i, type);
        store_vectors(up_grad, next_up_grad, x_grad, block.up + i, type);
    }
    for (; i < block.count; i += step) {
        const svbool_t p = svwhilelt_b32_s64(i, block.count);
        store_vector(p, gradients(p, x, y_grad, block, i, type, powers, &up_grad), x_grad, block.gate + i, type);
        store_vector(p, up_grad, x_grad, block.up + i, type);
    }
}
#else
/* exp(-gate), and the logistic function of the gate. */
typedef struct {
    float power, share;
} Gate;

INLINE Gate gate_of(float x)
{
    const float power = exp_bounded(-clamp(x, LIMIT));
    return (Gate){power, 1.0f / (1.0f + power)};
}

/* silu(x) = x times its logistic function, which is 0 below -LIMIT. */
INLINE float silu(float x, float share) { return x * (x < -LIMIT ? 0.0f : share); }

INLINE void swiglu_loop(const float *gate, const float *up, float *y, int64_t n)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = silu(gate[i], gate_of(gate[i]).share) * up[i];
}

INLINE void swiglu_gradient_loop(const float *gate, const float *up, const float *y_grad, float *gate_grad,
                                 float *up_grad, int64_t n)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const Gate parts = gate_of(gate[i]);
        const float complement = parts.power * parts.share; /* 1 - share would lose digits */
        const float slope = parts.share + clamp(gate[i], LIMIT) * parts.share * complement;
        const float of_gate = slope * up[i] * y_grad[i], of_up = silu(gate[i], parts.share) * y_grad[i];
        gate_grad[i] = of_gate;
        up_grad[i] = of_up;
    }
}

INLINE void swiglu_block(const void *x, void *y, Block block, const int type)
{
    if (type == FLOAT32) {
        swiglu_loop((const float *)x + block.gate, (const float *)x + block.up, (float *)y + block.single, block.count);
        return;
    }
    float gate[BLOCK], up[BLOCK];
    load_scaled(x, block.gate, type, 1.0f, gate, block.count);
    load_scaled(x, block.up, type, 1.0f, up, block.count);
    swiglu_loop(gate, up, gate, block.count);
    store_scaled(gate, 1.0f, y, block.single, type, block.count);
}

INLINE void swiglu_gradient_block(const void *x, const void *y_grad, void *x_grad, Block block, const int type)
{
    if (type == FLOAT32) {
        const float *numbers = x;
        float *gradients = x_grad;
        swiglu_gradient_loop(numbers + block.gate, numbers + block.up, (const float *)y_grad + block.single,
                             gradients + block.gate, gradients + block.up, block.count);
        return;
    }
    float gate[BLOCK], up[BLOCK], grad[BLOCK];
    load_scaled(x, block.gate, type, 1.0f, gate, block.count);
    load_scaled(x, block.up, type, 1.0f, up, block.count);
    load_scaled(y_grad, block.single, type, 1.0f, grad, block.count);
    swiglu_gradient_loop(gate, up, grad, gate, up, block.count);
    store_scaled(gate, 1.0f, x_grad, block.gate, type, block.count);
    store_scaled(up, 1.0f, x_grad, block.up, type, block.count);
}
#endif

/* The block of this number of rows [n, 2, width], each cut into `blocks`. */
INLINE Block block_at(int64_t number, int64_t blocks, int64_t width)
{
    const int64_t row = number / blocks, first = number % blocks * BLOCK;
    const int64_t gate = 2 * row * width + first;
    return (Block){gate, gate + width, row * width + first, min_int64(BLOCK, width - first)};
}

/* y [n, width] = silu(gate) up of x [n, 2, width], the gate first. */
EXPORT void swiglu(const void *x, void *y, int64_t n, int64_t width, int type, int threads)
{
    const int64_t blocks = (width + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t number = 0; number < n * blocks; number++) {
        const Block block = block_at(number, blocks, width);
        if (type == BFLOAT16)
            swiglu_block(x, y, block, BFLOAT16);
        else
            swiglu_block(x, y, block, FLOAT32);
    }
}

/* x_grad [n, 2, width] from y_grad [n, width] and x. */
EXPORT void swiglu_gradient(const void *x, const void *y_grad, void *x_grad, int64_t n, int64_t width, int type,
                            int threads)
{
    const int64_t blocks = (width + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t number = 0; number < n * blocks; number++) {
        const Block block = block_at(number, blocks, width);
        if (type == BFLOAT16)
            swiglu_gradient_block(x, y_grad, x_grad, block, BFLOAT16);
        else
            swiglu_gradient_block(x, y_grad, x_grad, block, FLOAT32);
    }
}

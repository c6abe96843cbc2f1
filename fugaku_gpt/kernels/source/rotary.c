/* Rotary positions (Su et al. 2021, "RoFormer", section 3.4.2) of heads, whose halves are the two coordinates that are
   rotated; computed in float32. */
#include "common.h"

#ifdef HAS_SVE
/* Returns a vector of the left half, rotated, and writes that of the right one. */
INLINE svfloat32_t rotated(svbool_t p, const void *x, int64_t at, int64_t half, const int type, const float *cosines,
                           const float *sines, float sign, svfloat32_t *right_result)
{
    const svbool_t all = svptrue_b32();
    const svfloat32_t left = load_vector(p, x, at, type), right = load_vector(p, x, at + half, type);
    const svfloat32_t cosine = svld1_f32(p, cosines), sine = svmul_n_f32_x(all, svld1_f32(p, sines), sign);
    *right_result = svmla_f32_x(all, svmul_f32_x(all, right, cosine), left, sine);
    return svmls_f32_x(all, svmul_f32_x(all, left, cosine), right, sine);
}

INLINE void rotate_head(const void *x, int64_t x_at, void *y, int64_t y_at, int64_t half, const int type,
                        const float *cosines, const float *sines, float sign)
{
    const svbool_t all = svptrue_b32();
    const int64_t step = svcntw();
    svfloat32_t right, next_right;
    int64_t j = 0;
    for (; j <= half - 2 * step; j += 2 * step) { /* GCC 12 crashes at j + 2 step <= half */
        const int64_t k = j + step;
        const svfloat32_t left = rotated(all, x, x_at + j, half, type, cosines + j, sines + j, sign, &right);
        const svfloat32_t next = rotated(all, x, x_at + k, half, type, cosines + k, sines + k, sign, &next_right);
        store_vectors(left, next, y, y_at + j, type);
        store_vectors(right, next_right, y, y_at + half + j, type);
    }
    for (; j < half; j += step) {
        const svbool_t p = svwhilelt_b32_s64(j, half);
        const svfloat32_t left = rotated(p, x, x_at + j, half, type, cosines + j, sines + j, sign, &right);
        store_vector(p, left, y, y_at + j, type);
        store_vector(p, right, y, y_at + half + j, type);
    }
}
#else
INLINE float load_number(const void *x, int64_t at, const int type)
{
    return type == BFLOAT16 ? from_bfloat16(((const uint16_t *)x)[at]) : ((const float *)x)[at];
}

INLINE void store_number(float number, void *y, int64_t at, const int type)
{
    if (type == BFLOAT16)
        ((uint16_t *)y)[at] = to_bfloat16(number);
    else
        ((float *)y)[at] = number;
}

INLINE void rotate_head(const void *x, int64_t x_at, void *y, int64_t y_at, int64_t half, const int type,
                        const float *cosines, const float *sines, float sign)
{
#pragma omp simd
    for (int64_t j = 0; j < half; j++) {
        const float left = load_number(x, x_at + j, type), right = load_number(x, x_at + half + j, type);
        const float cosine = cosines[j], sine = sign * sines[j];
        store_number(left * cosine - right * sine, y, y_at + j, type);
        store_number(right * cosine + left * sine, y, y_at + half + j, type);
    }
}
#endif

/* y = x [shards, samples, tokens, heads, width], each head rotated by the angles of its position, or with `inverse` back
   by them. Positions run over shards, then tokens: cosines and sines [shards, tokens, width / 2]. x_row, x_head, y_row,
   y_head: elements from a token, and from a head, to the next. y may be x. */
EXPORT void rotate(const void *x, int64_t x_row, int64_t x_head, void *y, int64_t y_row, int64_t y_head,
                   const float *cosines, const float *sines, int64_t shards, int64_t samples, int64_t tokens,
                   int64_t heads, int64_t width, int type, int inverse, int threads)
{
    const int64_t half = width / 2;
    const float sign = inverse ? -1.0f : 1.0f;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < shards * samples * tokens; row++) {
        const int64_t angles = (row / (samples * tokens) * tokens + row % tokens) * half;
        for (int64_t head = 0; head < heads; head++) {
            const int64_t x_at = row * x_row + head * x_head, y_at = row * y_row + head * y_head;
            if (type == BFLOAT16)
                rotate_head(x, x_at, y, y_at, half, BFLOAT16, cosines + angles, sines + angles, sign);
            else
                rotate_head(x, x_at, y, y_at, half, FLOAT32, cosines + angles, sines + angles, sign);
        }
    }
}

/* Packing of blocks of matrices for GEMM, and the matrices. */
#ifndef FUGAKU_GPT_KERNELS_GEMM_PACKING_H
#define FUGAKU_GPT_KERNELS_GEMM_PACKING_H

#include "gemm_sizes.h"

typedef struct {
    const char *x;
    int64_t row_stride, column_stride, item_size; /* strides in elements, one of which is 1; bytes */
} Matrix;

INLINE const void *element(const Matrix *s, int64_t row, int64_t column)
{
    return s->x + (row * s->row_stride + column * s->column_stride) * s->item_size;
}


/* Copies `count` elements and pads them with zeros to `units` units. */
INLINE void copy_padded(const void *x, int64_t count, int64_t size, float *to, int64_t units)
{
    memcpy(to, x, count * size);
    memset((char *)to + count * size, 0, units * sizeof *to - count * size);
}

/* Interleaves two rows into pairs; a missing second row counts as zeros. */
INLINE void interleave_pairs(const uint16_t *x, const uint16_t *second, const int64_t count, float *to)
{
    int64_t i = 0;
#ifdef HAS_BF16_DOT
    for (; second && i + 8 <= count; i += 8) {
        const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(x + i)));
        const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(second + i)));
        _mm256_storeu_si256((__m256i *)(to + i), _mm256_or_si256(low, _mm256_slli_epi32(high, 16)));
    }
#endif
    for (; i < count; i++) {
        const uint32_t pair = (uint32_t)x[i] | (second ? (uint32_t)second[i] << 16 : 0);
        memcpy(to + i, &pair, sizeof pair);
    }
}

/* Packs unit `j` of the inner dimension, which has `k` elements, of `count` adjacent columns. */
INLINE void pack_unit(const char *x, int64_t stride, int64_t size, int64_t j, int64_t k, const int64_t count, float *to)
{
    if (size == 4) {
        memcpy(to, x + j * stride * 4, count * 4);
        return;
    }
    const uint16_t *low = (const uint16_t *)x + 2 * j * stride;
    interleave_pairs(low, 2 * j + 1 < k ? low + stride : 0, count, to);
}

/* Packs `count` columns into adjacent panels [panels, units, width], `panel` floats apart, padded with zeros. */
INLINE void pack_panels(const char *x, int64_t stride, int64_t size, int64_t k, int64_t count, const int64_t width,
                        float *to, int64_t panel)
{
    const int64_t units = size == 4 ? k : (k + 1) / 2, in_unit = size == 4 ? 1 : 2;
    const int64_t full_panels = count / width, rest = count % width;
    for (int64_t j = 0; j < units; j++) {
        for (int64_t row = in_unit * (j + PREFETCH_ROWS); row < min_int64(in_unit * (j + PREFETCH_ROWS + 1), k); row++)
            for (int64_t byte = 0; byte < count * size; byte += CACHE_LINE)
                __builtin_prefetch(x + row * stride * size + byte);
        for (int64_t p = 0; p < full_panels; p++)
            pack_unit(x + p * width * size, stride, size, j, k, width, to + p * panel + j * width);
        if (rest) {
            float *last = to + full_panels * panel + j * width;
            pack_unit(x + full_panels * width * size, stride, size, j, k, rest, last);
            memset(last + rest, 0, (width - rest) * sizeof *last);
        }
    }
}

#ifdef HAS_BF16_MATRIX_PRODUCTS
/* Interleaves `count` elements of four rows into groups of four. */
INLINE void interleave_quads(const uint16_t *const *rows, const int64_t count, uint16_t *to)
{
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const uint16x8x4_t block = {
            {vld1q_u16(rows[0] + i), vld1q_u16(rows[1] + i), vld1q_u16(rows[2] + i), vld1q_u16(rows[3] + i)}};
        vst4q_u16(to + 4 * i, block);
    }
    for (; i < count; i++)
        for (int row = 0; row < 4; row++) to[4 * i + row] = rows[row][i];
}

/* Packs `count` vectors of `k` bfloat16 numbers, rows of a or columns of b, into adjacent panels
   [panels, quads, width, 4], `panel` floats apart, padded with zeros. Either `stride`, from one vector to the next, or
   `k_stride`, from one number of a vector to the next, is 1. */
INLINE void pack_quads(const uint16_t *x, int64_t stride, int64_t k_stride, int64_t count, int64_t k,
                       const int64_t width, float *to, int64_t panel)
{
    static const uint16_t zeros[NR > MR ? NR : MR];
    const int64_t quads = (k + 3) / 4;
    for (int64_t first = 0; first < count; first += width) {
        const int64_t columns = min_int64(width, count - first);
        uint16_t *packed = (uint16_t *)(to + first / width * panel);
        for (int64_t q = 0; columns < width && q < quads; q++)
            memset(packed + 4 * (q * width + columns), 0, 8 * (width - columns));
        for (int64_t i = 0; k_stride == 1 && i < columns; i++) {
            const uint16_t *vector = x + (first + i) * stride;
            for (int64_t q = 0; q < k / 4; q++) memcpy(packed + 4 * (q * width + i), vector + 4 * q, 8);
            if (k % 4) copy_padded(vector + k / 4 * 4, k % 4, 2, (float *)(packed + 4 * (k / 4 * width + i)), 2);
        }
    }
    if (k_stride == 1) return;
    for (int64_t q = 0; q < quads; q++) {
        for (int64_t row = 4 * q + PREFETCH_ROWS; row < min_int64(4 * q + PREFETCH_ROWS + 4, k); row++)
            for (int64_t byte = 0; byte < 2 * count; byte += CACHE_LINE)
                __builtin_prefetch((const char *)(x + row * k_stride) + byte);
        for (int64_t first = 0; first < count; first += width) {
            const uint16_t *rows[4];
            for (int row = 0; row < 4; row++)
                rows[row] = 4 * q + row < k ? x + (4 * q + row) * k_stride + first : zeros;
            uint16_t *packed = (uint16_t *)(to + first / width * panel) + 4 * q * width;
            if (first + width <= count)
                interleave_quads(rows, width, packed);
            else
                interleave_quads(rows, count - first, packed);
        }
    }
}
#endif

/* Whether the rows of a, of [k] elements, can be read in place: they are contiguous and consist of full units. */
INLINE int is_packed_layout(const Matrix *a, int64_t k)
{
    return a->column_stride == 1 && (int64_t)a->x % 4 == 0 && a->row_stride * a->item_size % 4 == 0 &&
           k * a->item_size % 4 == 0;
}

/* Whether more rows of a panel of a map to the same set of the L1 cache than half of its ways, if they are read in
   place: they would evict each other before all of a line is read. */
INLINE int rows_share_sets(const Matrix *a)
{
#ifdef L1_WAYS
    for (int i = 0; i < MR; i++) {
        int sharing = 0;
        for (int other = 0; other < MR; other++) {
            const int64_t distance = (i - other) * a->row_stride * a->item_size & (L1_WAY_BYTES - 1);
            sharing += distance < CACHE_LINE || distance > L1_WAY_BYTES - CACHE_LINE;
        }
        if (sharing > L1_WAYS / 2) return 1;
    }
#endif
    (void)a;
    return 0;
}

/* Whether a, whose rows are contiguous, is read in place. */
INLINE int can_read_in_place(const Matrix *a)
{
#ifdef HAS_BF16_MATRIX_PRODUCTS
    if (a->item_size == 2) return 0; /* its quads need another order */
#endif
    return !rows_share_sets(a);
}

/* Packs panels of a: `count` rows from `row`, `k` elements from `column`; if a is read in place, only the last panel
   where it lacks rows. */
static void pack_a(const Matrix *a, int a_in_place, int64_t row, int64_t column, int64_t count, int64_t k, float *to)
{
    const int64_t units = a->item_size == 4 ? k : (k + 1) / 2;
#ifdef HAS_BF16_MATRIX_PRODUCTS
    if (a->item_size == 2) {
        pack_quads(element(a, row, column), a->row_stride, a->column_stride, count, k, MR, to, A_PANEL);
        return;
    }
#endif
    if (a->column_stride != 1) {
        pack_panels(element(a, row, column), a->column_stride, a->item_size, k, count, MR, to, A_PANEL);
        return;
    }
    for (int64_t i = a_in_place ? count / MR * MR : 0; i < round_up(count, MR); i++) {
        float *packed_row = to + i / MR * A_PANEL + i % MR * KC;
        if (i < count)
            copy_padded(element(a, row + i, column), k, a->item_size, packed_row, units);
        else
            memset(packed_row, 0, units * sizeof *packed_row);
    }
}

/* Transposes [LANES] rows of LANES numbers. */
INLINE void transpose(vec *x)
{
#if defined(HAS_FIXED_SVE)
    sve_vec rows[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = (sve_vec)x[i];
    transpose_vectors(rows);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) x[i] = (vec)rows[i];
#elif LANES == 16 && !defined(__clang__) /* clang has no such shuffle */
    typedef int32_t order __attribute__((vector_size(4 * LANES)));
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        order low, high;
        for (int lane = 0; lane < LANES; lane++) {
            low[lane] = lane & step ? LANES + lane - step : lane;
            high[lane] = lane & step ? LANES + lane : lane + step;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & step) continue;
            const vec upper = x[i], lower = x[i + step];
            x[i] = __builtin_shuffle(upper, lower, low);
            x[i + step] = __builtin_shuffle(upper, lower, high);
        }
    }
#else
    float y[LANES][LANES];
    memcpy(y, x, sizeof y);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) x[i][j] = y[j][i];
#endif
}

/* Packs one panel of b [units, NR] from `count` columns, from `column` on, that are rows in memory. */
static void pack_b_transposed(const Matrix *b, int64_t row, int64_t column, int64_t count, int64_t k, float *to)
{
    const int64_t units = b->item_size == 4 ? k : (k + 1) / 2;
    float rows[LANES][KC + LANES]; /* LANES more, so that cache lines do not all map to the same few sets */
    for (int64_t first = 0; first < NR; first += LANES) {
        for (int64_t i = 0; i < LANES; i++) {
            if (first + i < count)
                copy_padded(element(b, row, column + first + i), k, b->item_size, rows[i], units);
            else
                memset(rows[i], 0, units * sizeof(float));
        }
        for (int64_t j = 0; j < units; j += LANES) { /* `rows` has room after the last unit */
            vec block[LANES];
            for (int i = 0; i < LANES; i++) block[i] = *(const unaligned_vec *)(rows[i] + j);
            transpose(block);
            const int64_t count_of_block = min_int64(LANES, units - j);
            for (int i = 0; i < count_of_block; i++) *(unaligned_vec *)(to + (j + i) * NR + first) = block[i];
        }
    }
}

/* Packs panels of b: `count` columns from `column`, `k` elements from `row`. */
static void pack_b(const Matrix *b, int64_t row, int64_t column, int64_t count, int64_t k, float *to)
{
#ifdef HAS_BF16_MATRIX_PRODUCTS
    if (b->item_size == 2) {
        pack_quads(element(b, row, column), b->column_stride, b->row_stride, count, k, NR, to, B_PANEL);
        return;
    }
#endif
    if (b->column_stride == 1)
        pack_panels(element(b, row, column), b->row_stride, b->item_size, k, count, NR, to, B_PANEL);
    else
        for (int64_t j = 0; j < count; j += NR)
            pack_b_transposed(b, row, column + j, min_int64(NR, count - j), k, to + j / NR * B_PANEL);
}

#endif

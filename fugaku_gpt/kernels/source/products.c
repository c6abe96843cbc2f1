/* Products of two matrices with float32 sums: of float32 numbers, and of pairs of bfloat16 numbers on processors that
   multiply these, whose sums may be rounded in the end.

   As Goto and van de Geijn do (Anatomy of high-performance matrix multiplication, 2008), blocks of both sides are copied
   ("packed") into the order in which they are read. A tile of ROWS x COLUMNS sums stays in registers while its panels
   pass by: the left one [depth, ROWS], most often out of the first cache, and the right one [depth, COLUMNS] out of the
   second, which holds a GROUP of left panels and a STRIP of right ones. DEPTH is so large that the left panel almost
   fills the first cache, since to load and store the sums costs more.

   A left side whose rows are without gaps is not packed but read where it lies, and each thread packs right panels of its
   own columns. Else all threads pack right panels together, and each the left panels of its own rows: what one thread has
   written is slow to read, or to write, for another that shares no cache with it. What is packed next comes out of memory,
   which takes longer than the packing: tiles ask for it, a cache line at a time, since their own panels would have to wait
   behind many.

   What is multiplied is a unit of 32 bits: a float32 number, or two bfloat16 numbers that are neighbours along the
   inner dimension. Either is copied as a float. Each sum has the same order by any number of threads. */
#include "between.h"

#if TILE_ROWS == 12 /* 32 registers */
#define ROWS 8
#else
#define ROWS 4
#endif
#define VECTORS 3
#define COLUMNS (VECTORS * LANES)
#define DEPTH 768 /* units */
#define STRIP 2                      /* right panels of that depth; of a smaller one twice as many */
#define GROUP 16                     /* left panels */
#define BLOCK_COLUMNS (64 * COLUMNS) /* whose right panels are packed at one time */
#define BLOCK_ROWS (128 * ROWS)      /* of sums that are rounded only after some passes: they stay near */
#define OWN_PANELS 16                /* right panels that a thread packs at one time, alone */
#define EVERY 32                     /* units of a tile, for each of which something is asked for */
#define LINE 64                      /* bytes of a cache line */
#define AHEAD 8                      /* rows, of which what comes next is asked for while one is packed */
/* from one panel to the next: not a multiple of a page, or all would fall into the same few places of a cache */
#define LEFT_PANEL (ROWS * DEPTH + LANES)
#define RIGHT_PANEL (COLUMNS * DEPTH + LANES)

typedef struct {
    const char *x;
    int64_t row, column, size; /* distances of neighbours in elements, one of which is 1, and bytes of an element */
} Side;

INLINE const void *at(const Side *s, int64_t row, int64_t column)
{
    return s->x + (row * s->row + column * s->column) * s->size;
}

/* ---- Packing */

/* units of a row: `count` elements, and zeros behind them */
INLINE void take(const void *x, int64_t count, int64_t size, float *to, int64_t units)
{
    memcpy(to, x, count * size);
    memset((char *)to + count * size, 0, units * sizeof *to - count * size);
}

/* Pairs of the numbers of two rows, the second one zeros where there is none. */
INLINE void pair_up(const uint16_t *x, const uint16_t *second, const int64_t count, float *to)
{
    int64_t i = 0;
#ifdef HAS_PAIRS
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

/* `count` elements that are neighbours across the inner dimension, of its unit `j`; of [k] elements along it. */
INLINE void across(const char *x, int64_t stride, int64_t size, int64_t j, int64_t k, const int64_t count, float *to)
{
    if (size == 4) {
        memcpy(to, x + j * stride * 4, count * 4);
        return;
    }
    const uint16_t *low = (const uint16_t *)x + 2 * j * stride;
    pair_up(low, 2 * j + 1 < k ? low + stride : 0, count, to);
}

/* Panels of `width` that are neighbours: [panels, units, width], `panel` apart; zeros behind the last of `count`. */
INLINE void lay(const char *x, int64_t stride, int64_t size, int64_t k, int64_t count, const int64_t width, float *to,
                int64_t panel)
{
    const int64_t units = size == 4 ? k : (k + 1) / 2, in_unit = size == 4 ? 1 : 2;
    const int64_t whole = count / width, rest = count % width;
    for (int64_t j = 0; j < units; j++) {
        for (int64_t row = in_unit * (j + AHEAD); row < smaller(in_unit * (j + AHEAD + 1), k); row++)
            for (int64_t byte = 0; byte < count * size; byte += 64) __builtin_prefetch(x + row * stride * size + byte);
        for (int64_t p = 0; p < whole; p++)
            across(x + p * width * size, stride, size, j, k, width, to + p * panel + j * width);
        if (rest) {
            float *last = to + whole * panel + j * width;
            across(x + whole * width * size, stride, size, j, k, rest, last);
            memset(last + rest, 0, (width - rest) * sizeof *last);
        }
    }
}

/* Whether rows of a left side of [k] elements can be read where they lie: they consist of whole units. */
INLINE int lies_ready(const Side *a, int64_t k)
{
    return a->column == 1 && (int64_t)a->x % 4 == 0 && a->row * a->size % 4 == 0 && k * a->size % 4 == 0;
}

/* Left panels of `count` rows from `row` on, of [k] elements from `column` on; if the rows lie ready only the last one,
   where rows are missing. */
static void pack_left(const Side *a, int ready, int64_t row, int64_t column, int64_t count, int64_t k, float *to)
{
    const int64_t units = a->size == 4 ? k : (k + 1) / 2;
    if (a->column != 1) {
        lay(at(a, row, column), a->column, a->size, k, count, ROWS, to, LEFT_PANEL);
        return;
    }
    for (int64_t i = ready ? count / ROWS * ROWS : 0; i < round_up(count, ROWS); i++) {
        float *its = to + i / ROWS * LEFT_PANEL + i % ROWS * DEPTH;
        if (i < count)
            take(at(a, row + i, column), k, a->size, its, units);
        else
            memset(its, 0, units * sizeof *its);
    }
}

/* [LANES] rows of LANES numbers, turned. */
INLINE void turn(vec *x)
{
#if LANES == 16 && !defined(__clang__) /* which has no such shuffle */
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
            const vec one = x[i], other = x[i + step];
            x[i] = __builtin_shuffle(one, other, low);
            x[i + step] = __builtin_shuffle(one, other, high);
        }
    }
#else
    float y[LANES][LANES];
    memcpy(y, x, sizeof y);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) x[i][j] = y[j][i];
#endif
}

/* A right panel [units, COLUMNS] of `count` columns that are rows in memory, from `column` on. */
static void turn_right(const Side *b, int64_t row, int64_t column, int64_t count, int64_t k, float *to)
{
    const int64_t units = b->size == 4 ? k : (k + 1) / 2;
    float rows[LANES][DEPTH + LANES]; /* whose cache lines do not all fall into the same few places */
    for (int64_t first = 0; first < COLUMNS; first += LANES) {
        for (int64_t i = 0; i < LANES; i++) {
            if (first + i < count)
                take(at(b, row, column + first + i), k, b->size, rows[i], units);
            else
                memset(rows[i], 0, units * sizeof(float));
        }
        for (int64_t j = 0; j < units; j += LANES) { /* behind the last unit is room in `rows` */
            vec block[LANES];
            for (int i = 0; i < LANES; i++) block[i] = *(const loose_vec *)(rows[i] + j);
            turn(block);
            const int64_t some = smaller(LANES, units - j);
            for (int i = 0; i < some; i++) *(loose_vec *)(to + (j + i) * COLUMNS + first) = block[i];
        }
    }
}

/* Right panels of `count` columns from `column` on, of [k] elements from `row` on. */
static void pack_right(const Side *b, int64_t row, int64_t column, int64_t count, int64_t k, float *to)
{
    if (b->column == 1)
        lay(at(b, row, column), b->row, b->size, k, count, COLUMNS, to, RIGHT_PANEL);
    else
        for (int64_t j = 0; j < count; j += COLUMNS)
            turn_right(b, row, column + j, smaller(COLUMNS, count - j), k, to + j / COLUMNS * RIGHT_PANEL);
}

/* ---- Tiles */

/* sum[lane] += the unit x times y's unit of the lane */
INLINE vec add_units(vec sum, float x, vec y, const int type)
{
#ifdef HAS_PAIRS
    if (type == BFLOAT16) return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(x), (__m512bh)y);
#endif
    (void)type;
    return sum + x * y;
}

/* Sums in float32, and the numbers that they are rounded to if they are, both at a tile's place. */
typedef struct {
    float *sums;
    int64_t row; /* from one row to the next */
    uint16_t *rounded;
    int64_t rounded_row;
} Place;

/* What is packed next: `rows` of `bytes` in memory, `stride` apart, of the first of which `at` have been asked for. */
typedef struct {
    const char *row;
    int64_t rows, stride, bytes, at;
} Next;

INLINE Next next_of(const Side *side, int64_t row, int64_t column, int64_t rows, int64_t columns)
{
    const int by_rows = side->column == 1;
    if (rows <= 0 || columns <= 0) return (Next){0};
    return (Next){at(side, row, column), by_rows ? rows : columns, (by_rows ? side->row : side->column) * side->size,
                  (by_rows ? columns : rows) * side->size, 0};
}

/* Ask for one more cache line. */
INLINE void ask(Next *next)
{
    if (next->rows <= 0) return;
    __builtin_prefetch(next->row + next->at, 0, 2);
    next->at += LINE;
    if (next->at < next->bytes) return;
    next->at = 0;
    next->row += next->stride;
    next->rows--;
}

/* A tile's sums become, or get added, the product of a left panel (where unit (i, j) is at i a_row + j a_column) and a
   right one of `units`, and `start`, if there is one. With `rounds` they are not stored but rounded. */
INLINE void tile(const int type, const int rounds, const int adds, int64_t units, const float *a, const int64_t a_row,
                 const int64_t a_column, const float *b, const float *start, Place c, Next *next)
{
    vec sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            sums[i][v] = start ? *(const loose_vec *)(start + v * LANES) : (vec){0};
        }
    }
    for (int64_t first = 0, row = 0; first < units; first += EVERY, row++) {
        if ((adds || !rounds) && row < ROWS) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) __builtin_prefetch(c.sums + row * c.row + v * LANES, 1);
        }
        ask(next);
        const int64_t end = smaller(first + EVERY, units);
#pragma GCC unroll 2
        for (int64_t j = first; j < end; j++) {
            vec right[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) right[v] = *(const loose_vec *)(b + j * COLUMNS + v * LANES);
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; i++) {
                const float left = a[i * a_row + j * a_column];
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) sums[i][v] = add_units(sums[i][v], left, right[v], type);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            vec all = sums[i][v];
            if (adds) all += *(const loose_vec *)(c.sums + i * c.row + v * LANES);
            if (rounds)
                store_rounded(c.rounded + i * c.rounded_row + v * LANES, all);
            else
                *(loose_vec *)(c.sums + i * c.row + v * LANES) = all;
        }
    }
}

typedef void Tile(int64_t units, const float *a, int64_t a_row, const float *b, const float *start, Place c, Next *next);

#define TILE(name, type, rounds, adds, a_row, a_column)                                                                   \
    static void name(int64_t units, const float *a, int64_t row, const float *b, const float *start, Place c, Next *next) \
    {                                                                                                                     \
        (void)row;                                                                                                        \
        tile(type, rounds, adds, units, a, a_row, a_column, b, start, c, next);                                           \
    }
#define TILES_OF(name, type, rounds)                                                                                      \
    TILE(set_rows_##name, type, rounds, 0, row, 1)                                                                        \
    TILE(set_columns_##name, type, rounds, 0, 1, ROWS)                                                                    \
    TILE(add_rows_##name, type, rounds, 1, row, 1)                                                                        \
    TILE(add_columns_##name, type, rounds, 1, 1, ROWS)
#define NAMES_OF(name) {{set_rows_##name, set_columns_##name}, {add_rows_##name, add_columns_##name}}
TILES_OF(32, FLOAT32, 0)
#ifdef HAS_PAIRS
TILES_OF(16, BFLOAT16, 0)
TILES_OF(16_rounded, BFLOAT16, 1)
#endif
/* [type][whether they round][whether they add][whether columns of the left panel are without gaps: else its rows are,
   `row` apart] */
static Tile *const TILES[2][2][2][2] = {
    {NAMES_OF(32)},
#ifdef HAS_PAIRS
    {NAMES_OF(16), NAMES_OF(16_rounded)},
#endif
};

/* ---- Products */

typedef struct {
    Side a, b;
    int64_t m, n, k;
    const float *bias;
    void *c;
    int64_t c_row;
    int type, c_type, adds, ready; /* whether rows of the left side lie ready */
    float *sums; /* of c that is rounded only after some passes, a number for each of [m, some columns] */
    int64_t sums_row;
    float *left, *right; /* packed panels */
} Product;

/* Rows and columns of c, in panels. */
typedef struct {
    int64_t first, last, column_first, column_last;
} Part;

/* Of the inner dimension: elements [first, first + k). */
typedef struct {
    int64_t first, k, units;
    int adds, rounds;
} Pass;

/* Threads for rows, of all: so that the one with the most tiles has as few as can be; else for rows rather than for
   columns or not. */
static int threads_for_rows(int64_t rows, int64_t columns, int rather_rows, int threads)
{
    int64_t fewest = INT64_MAX;
    int found = 1;
    for (int some = 1; some <= threads; some++) {
        if (threads % some) continue;
        const int64_t others = threads / some, most = (rows + some - 1) / some * ((columns + others - 1) / others);
        if (rather_rows ? most <= fewest : most < fewest) {
            fewest = most;
            found = some;
        }
    }
    return found;
}

/* A thread's part of panels. */
static Part part_of(int64_t rows, int64_t columns, int rather_rows, int thread, int threads)
{
    const int by_rows = threads_for_rows(rows, columns, rather_rows, threads), by_columns = threads / by_rows;
    const int row = thread % by_rows, column = thread / by_rows;
    return (Part){rows * row / by_rows, rows * (row + 1) / by_rows, columns * column / by_columns,
                  columns * (column + 1) / by_columns};
}

/* A tile of which c has not all rows or columns. (Denormal numbers are rounded to bfloat16 here, flushed in others.) */
static void tile_of_edge(Tile *sets, int64_t rows, int64_t columns, int rounds, int adds, int64_t units, const float *a,
                         int64_t a_row, const float *b, const float *start, Place c, Next *next)
{
    float sums[ROWS * COLUMNS];
    sets(units, a, a_row, b, start, (Place){sums, COLUMNS, 0, 0}, next);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            const float its = sums[i * COLUMNS + j], all = adds ? c.sums[i * c.row + j] + its : its;
            if (rounds)
                c.rounded[i * c.rounded_row + j] = to_bfloat16(all);
            else
                c.sums[i * c.row + j] = all;
        }
}

/* The tile at (row, column). */
INLINE Place place(const Product *p, int64_t row, int64_t column)
{
    if (p->c_type == FLOAT32) return (Place){(float *)p->c + row * p->c_row + column, p->c_row, 0, 0};
    float *sums = p->sums ? p->sums + row * p->sums_row + column % p->sums_row : 0;
    return (Place){sums, p->sums_row, (uint16_t *)p->c + row * p->c_row + column, p->c_row};
}

/* Panels [first, last) of columns of c, at most 2 STRIP, by panels of rows [row, end): `left` is the first of those that
   are packed, `right` the first panel of the strip. */
static void multiply_strip(const Product *p, Pass pass, const float *left, int64_t row, int64_t end, const float *right,
                           int64_t first, int64_t last, Next *left_next, Next *right_next)
{
    const int biased = p->bias && pass.first == 0, of_columns = p->a.column != 1;
    Tile *whole = TILES[p->type][pass.rounds][pass.adds][of_columns], *sets = TILES[p->type][0][0][of_columns];
    float starts[2 * STRIP * COLUMNS] = {0.0f};
    if (biased)
        memcpy(starts, p->bias + first * COLUMNS,
               smaller((last - first) * COLUMNS, p->n - first * COLUMNS) * sizeof *starts);
    for (int64_t i = row; i < end; i++) {
        const int64_t rows = p->m - i * ROWS;
        const int lies = p->ready && rows >= ROWS;
        const float *a = lies ? at(&p->a, i * ROWS, pass.first) : left + (i - row) * LEFT_PANEL;
        const int64_t a_row = lies ? p->a.row * p->a.size / 4 : DEPTH;
        for (int64_t j = first; j < last; j++) {
            const int64_t columns = p->n - j * COLUMNS;
            const float *b = right + (j - first) * RIGHT_PANEL, *start = biased ? starts + (j - first) * COLUMNS : 0;
            const Place c = place(p, i * ROWS, j * COLUMNS);
            Next *next = left_next->rows > 0 ? left_next : right_next;
            if (rows >= ROWS && columns >= COLUMNS)
                whole(pass.units, a, a_row, b, start, c, next);
            else
                tile_of_edge(sets, smaller(ROWS, rows), smaller(COLUMNS, columns), pass.rounds, pass.adds, pass.units, a,
                             a_row, b, start, c, next);
        }
    }
}

/* Over the inner dimension. */
static int64_t passes_of(int64_t k, int type)
{
    const int64_t most = type == BFLOAT16 ? 2 * DEPTH : DEPTH;
    return (k + most - 1) / most;
}

static int64_t step_of(const Product *p)
{
    const int64_t passes = passes_of(p->k, p->type);
    return round_up((p->k + passes - 1) / passes, 2 * LANES);
}

static Pass pass_of(const Product *p, int64_t first)
{
    const int64_t k = smaller(step_of(p), p->k - first);
    return (Pass){first, k, p->type == BFLOAT16 ? (k + 1) / 2 : k, p->adds || first > 0,
                  p->c_type == BFLOAT16 && first + k == p->k};
}

INLINE int64_t strip_of(Pass pass) { return pass.units > DEPTH / 2 ? STRIP : 2 * STRIP; }

/* What is packed of the right side after a pass, of a thread's columns [from, to) and those up to `end`. */
INLINE Next after(const Product *p, int64_t first, int64_t from, int64_t to, int64_t end)
{
    const int64_t next = first + step_of(p), width = smaller(to - from, end - to);
    if (next < p->k) return next_of(&p->b, next, from, smaller(step_of(p), p->k - next), to - from);
    return next_of(&p->b, 0, to, smaller(step_of(p), p->k), width);
}

/* Panels [part.column_first, part.column_last) of columns: groups of left panels one after the other, packed where their
   rows do not lie ready. `right` is the first of the right panels. */
static void multiply_groups(const Product *p, Pass pass, Part part, const float *right, Next right_next)
{
    const int64_t most = strip_of(pass), panels = part.column_last - part.column_first;
    for (int64_t group = part.first; group < part.last; group += GROUP) {
        const int64_t last = smaller(group + GROUP, part.last), row = group * ROWS, end = smaller(last * ROWS, p->m);
        const int64_t next_end = smaller(smaller(last + GROUP, part.last) * ROWS, p->m);
        Next left_next = {0};
        pack_left(&p->a, p->ready, row, pass.first, end - row, pass.k, p->left);
        if (!p->ready) left_next = next_of(&p->a, end, pass.first, next_end - end, pass.k);
        for (int64_t strip = 0; strip < panels; strip += most) {
            between();
            multiply_strip(p, pass, p->left, group, last, right + strip * RIGHT_PANEL, part.column_first + strip,
                           part.column_first + smaller(strip + most, panels), &left_next, &right_next);
        }
    }
}

/* By a thread that packs the right panels of its own columns. */
static void multiply_alone(const Product *p, Part part)
{
    const int64_t n = smaller(part.column_last * COLUMNS, p->n);
    for (int64_t block = part.column_first; block < part.column_last; block += OWN_PANELS) {
        const int64_t end = smaller(block + OWN_PANELS, part.column_last);
        const int64_t from = block * COLUMNS, to = smaller(end * COLUMNS, n);
        const Part its = {part.first, part.last, block, end};
        for (int64_t first = 0; first < p->k; first += step_of(p)) {
            const Pass pass = pass_of(p, first);
            pack_right(&p->b, first, from, to - from, pass.k, p->right);
            multiply_groups(p, pass, its, p->right, after(p, first, from, to, n));
        }
    }
}

/* A block of columns of c, from `column` on, by threads that pack right panels together. */
static void multiply_together(const Product *p, int64_t column, int thread, int threads)
{
    const int64_t n = smaller(BLOCK_COLUMNS, p->n - column);
    const int64_t row_panels = (p->m + ROWS - 1) / ROWS, column_panels = (n + COLUMNS - 1) / COLUMNS;
    const int64_t panel = column_panels * thread / threads, end = column_panels * (thread + 1) / threads;
    const int64_t from = column + panel * COLUMNS, to = smaller(column + end * COLUMNS, p->n);
    Part part = part_of(row_panels, column_panels, row_panels * ROWS >= column_panels * COLUMNS, thread, threads);
    const float *right = p->right + part.column_first * RIGHT_PANEL;
    part.column_first += column / COLUMNS;
    part.column_last += column / COLUMNS;
    for (int64_t first = 0; first < p->k; first += step_of(p)) {
        const Pass pass = pass_of(p, first);
        pack_right(&p->b, first, from, to - from, pass.k, p->right + panel * RIGHT_PANEL);
#pragma omp barrier
        multiply_groups(p, pass, part, right, after(p, first, from, to, to));
#pragma omp barrier
    }
}

/* Whether c is rounded only after some passes. */
static int rounds_later(int64_t k, int type, int c_type) { return c_type == BFLOAT16 && passes_of(k, type) > 1; }

/* Columns of a block of which sums are kept, and right panels packed, at one time; all threads'. */
static int64_t columns_at_once(int64_t n, int threads)
{
    const int64_t together = smaller(round_up(n, COLUMNS), BLOCK_COLUMNS), alone = threads * OWN_PANELS * COLUMNS;
    return together > alone ? together : alone;
}

static int64_t left_floats(int threads) { return threads * GROUP * LEFT_PANEL; }
static int64_t right_floats(int64_t n, int threads) { return columns_at_once(n, threads) / COLUMNS * RIGHT_PANEL; }

/* Of memory that a product needs. */
EXPORT int64_t product_floats(int64_t m, int64_t n, int64_t k, int type, int c_type, int threads)
{
    const int64_t sums = rounds_later(k, type, c_type) ? smaller(m, BLOCK_ROWS) * columns_at_once(n, threads) : 0;
    return left_floats(threads) + right_floats(n, threads) + sums + LANES;
}

/* Whether matrices of this type are multiplied. */
EXPORT int multiplies(int type) { return TILES[type][0][0][0] != 0; }

/* Numbers of a vector that it was compiled for. */
EXPORT int lanes(void) { return LANES; }

/* c [m, n] = or += a [m, k] b [k, n] + bias [n]. Of each side either rows or columns are without gaps, of c rows. The
   bias is float32; c too, or it is bfloat16 as both sides are, and nothing is added to it. */
EXPORT void multiply(const void *a, int64_t a_row, int64_t a_column, const void *b, int64_t b_row, int64_t b_column,
                     int type, const float *bias, void *c, int64_t c_row, int c_type, int adds, int64_t m, int64_t n,
                     int64_t k, float *work, int threads)
{
    const int64_t size = type == BFLOAT16 ? 2 : 4, c_size = c_type == BFLOAT16 ? 2 : 4;
    const int later = rounds_later(k, type, c_type);
    const int64_t step = later ? BLOCK_ROWS : m;
    float *left = (float *)round_up((int64_t)work, 4 * LANES), *right = left + left_floats(threads);
    float *sums = later ? right + right_floats(n, threads) : 0;
#pragma omp parallel num_threads(threads)
    for (int64_t row = 0; row < m; row += step) {
        const int thread = omp_get_thread_num(), all = omp_get_num_threads();
        const Side its_a = {(const char *)a + row * a_row * size, a_row, a_column, size};
        const Side its_b = {b, b_row, b_column, size};
        void *its_c = (char *)c + row * c_row * c_size;
        Product p = {its_a, its_b,  smaller(step, m - row), n,    k, bias, its_c, c_row, type,
                     c_type, adds, lies_ready(&its_a, k),  sums, 0, left, right};
        p.left += thread * GROUP * LEFT_PANEL;
        if (p.ready) {
            p.right += thread * OWN_PANELS * RIGHT_PANEL;
            p.sums_row = OWN_PANELS * COLUMNS;
            if (later) p.sums += thread * smaller(m, BLOCK_ROWS) * p.sums_row;
            multiply_alone(&p, part_of((p.m + ROWS - 1) / ROWS, (n + COLUMNS - 1) / COLUMNS, 0, thread, all));
            continue;
        }
        p.sums_row = smaller(round_up(n, COLUMNS), BLOCK_COLUMNS);
        for (int64_t column = 0; column < n; column += BLOCK_COLUMNS) multiply_together(&p, column, thread, all);
    }
}

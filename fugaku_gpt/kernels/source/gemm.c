/* GEMM with float32 accumulators: c [m, n] = a [m, k] b [k, n], of float32 numbers, or of bfloat16 numbers on
   processors that multiply pairs of them or small matrices; results may be rounded to bfloat16 at the end.

   The structure is that of Goto and van de Geijn (Anatomy of high-performance matrix multiplication, 2008), with the
   names of BLIS (Van Zee and van de Geijn 2015): blocks of both matrices are packed into the order in which they are
   read. The micro-kernel holds MR x NR accumulators in registers and reads one panel of a [KC, MR], usually from the
   L1 cache, and one panel of b [KC, NR] from the L2 cache, which holds MC_PANELS panels of a and JR_PANELS panels of
   b (gemm_sizes.h). KC is as large as the caches permit, because loading and storing the accumulators costs more.

   If the rows of a are contiguous, a is not packed but read in place (unless they would evict each other from the L1
   cache), and each thread packs panels of b for its own columns. Otherwise all threads pack the panels of b together
   and each packs the panels of a for its own rows: data that one thread has written is slow to access for a thread
   that shares no cache with it. The next block to pack comes from memory, which takes longer than the packing
   itself: micro-kernels prefetch it one cache line at a time, since their own panels would otherwise queue behind
   many requests.

   The unit of multiplication has 32 bits: a float32 number, or two bfloat16 numbers that are adjacent along the
   inner dimension. Both are copied as floats. Where the processor multiplies matrices of bfloat16 numbers, panels
   consist of quads, four numbers of each row of a or column of b, and a is always packed. Every sum has the same
   order for any number of threads. */
#include "gemm_micro_kernels.h"
#include "progress.h"

typedef struct {
    Matrix a, b;
    int64_t m, n, k;
    const float *bias;
    void *c;
    int64_t c_row;
    int type, c_type, accumulates;
    int has_private_b, a_in_place; /* each thread packs panels of b for itself; a is read without packing */
    float *sums; /* accumulators of c where it is rounded after several blocks of k: [m, columns] */
    int64_t sums_row;
    float *packed_a, *packed_b; /* panels */
} Gemm;

/* Rows and columns of c, counted in panels. */
typedef struct {
    int64_t first, last, column_first, column_last;
} PanelRange;

/* Elements [first, first + k) of the inner dimension. */
typedef struct {
    int64_t first, k, units;
    int accumulates, rounds;
} KBlock;

/* How many threads share the rows; the others share the columns. The thread with the most tiles gets as few as possible;
   among equal splits, `prefer_rows` chooses the one with the most threads for rows. */
static int row_threads(int64_t rows, int64_t columns, int prefer_rows, int threads)
{
    int64_t fewest = INT64_MAX;
    int best = 1;
    for (int candidate = 1; candidate <= threads; candidate++) {
        if (threads % candidate) continue;
        const int64_t column_threads = threads / candidate,
                      most = (rows + candidate - 1) / candidate * ((columns + column_threads - 1) / column_threads);
        if (prefer_rows ? most <= fewest : most < fewest) {
            fewest = most;
            best = candidate;
        }
    }
    return best;
}

/* The panels of one thread. */
static PanelRange panel_range_of(int64_t rows, int64_t columns, int prefer_rows, int thread, int threads)
{
    const int by_rows = row_threads(rows, columns, prefer_rows, threads), by_columns = threads / by_rows;
    const int row = thread % by_rows, column = thread / by_rows;
    return (PanelRange){rows * row / by_rows, rows * (row + 1) / by_rows, columns * column / by_columns,
                        columns * (column + 1) / by_columns};
}

/* A tile that c cuts off. (Denormal numbers are rounded to bfloat16 here, and flushed to zero in full tiles.) */
static void edge_kernel(MicroKernel *store_kernel, int64_t rows, int64_t columns, int rounds, int accumulates,
                        int64_t units, const float *a, int64_t a_row, const float *b, const float *start, OutputTile c,
                        Prefetch *next)
{
    float sums[MR * NR];
    store_kernel(units, a, a_row, b, start, (OutputTile){sums, NR, 0, 0}, next);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            const float sum = sums[i * NR + j], total = accumulates ? c.sums[i * c.sums_stride + j] + sum : sum;
            if (rounds)
                c.rounded[i * c.rounded_stride + j] = to_bfloat16(total);
            else
                c.sums[i * c.sums_stride + j] = total;
        }
}

/* The tile of c at (row, column). */
INLINE OutputTile output_tile(const Gemm *p, int64_t row, int64_t column)
{
    if (p->c_type == FLOAT32) return (OutputTile){(float *)p->c + row * p->c_row + column, p->c_row, 0, 0};
    float *sums = p->sums ? p->sums + row * p->sums_row + column % p->sums_row : 0;
    return (OutputTile){sums, p->sums_row, (uint16_t *)p->c + row * p->c_row + column, p->c_row};
}

/* Column panels [first, last) of c, at most 2 JR_PANELS, by row panels [row, end). `packed_a` and `packed_b` are the
   first packed panels of each. */
static void macro_kernel(const Gemm *p, KBlock kb, const float *packed_a, int64_t row, int64_t end,
                         const float *packed_b, int64_t first, int64_t last, Prefetch *a_next, Prefetch *b_next)
{
    const int has_bias = p->bias && kb.first == 0, of_columns = p->a.column_stride != 1;
    MicroKernel *full_kernel = KERNELS[p->type][kb.rounds][kb.accumulates][of_columns],
                *store_kernel = KERNELS[p->type][0][0][of_columns];
    float starts[2 * JR_PANELS * NR] = {0.0f};
    if (has_bias)
        memcpy(starts, p->bias + first * NR, min_int64((last - first) * NR, p->n - first * NR) * sizeof *starts);
    for (int64_t i = row; i < end; i++) {
        const int64_t rows = p->m - i * MR;
        const int in_place = p->a_in_place && rows >= MR;
        const float *a = in_place ? element(&p->a, i * MR, kb.first) : packed_a + (i - row) * A_PANEL;
        const int64_t a_row = in_place ? p->a.row_stride * p->a.item_size / 4 : KC;
        for (int64_t j = first; j < last; j++) {
            const int64_t columns = p->n - j * NR;
            const float *b = packed_b + (j - first) * B_PANEL, *start = has_bias ? starts + (j - first) * NR : 0;
            const OutputTile c = output_tile(p, i * MR, j * NR);
            Prefetch *next = a_next->rows > 0 ? a_next : b_next;
            if (rows >= MR && columns >= NR)
                full_kernel(kb.units, a, a_row, b, start, c, next);
            else
                edge_kernel(store_kernel, min_int64(MR, rows), min_int64(NR, columns), kb.rounds, kb.accumulates,
                            kb.units, a, a_row, b, start, c, next);
        }
    }
}

/* The number of blocks of the inner dimension. */
static int64_t k_blocks_of(int64_t k, int type)
{
    const int64_t most = type == BFLOAT16 ? 2 * KC : KC;
    return (k + most - 1) / most;
}

static int64_t kc_of(const Gemm *p)
{
    const int64_t k_blocks = k_blocks_of(p->k, p->type);
    return round_up((p->k + k_blocks - 1) / k_blocks, 2 * LANES);
}

/* Units of `k` bfloat16 numbers. */
INLINE int64_t bfloat16_units(int64_t k)
{
#ifdef HAS_BF16_MATRIX_PRODUCTS
    return (k + 3) / 4 * 2; /* of full quads */
#else
    return (k + 1) / 2;
#endif
}

static KBlock k_block_of(const Gemm *p, int64_t first)
{
    const int64_t k = min_int64(kc_of(p), p->k - first);
    return (KBlock){first, k, p->type == BFLOAT16 ? bfloat16_units(k) : k, p->accumulates || first > 0,
                    p->c_type == BFLOAT16 && first + k == p->k};
}

INLINE int64_t jr_panels_of(KBlock kb) { return kb.units > KC / 2 ? JR_PANELS : 2 * JR_PANELS; }

/* The block of b that is packed next, by a thread with columns [from, to) whose following columns go up to `end`. */
INLINE Prefetch next_b_block(const Gemm *p, int64_t first, int64_t from, int64_t to, int64_t end)
{
    const int64_t next = first + kc_of(p), width = min_int64(to - from, end - to);
    if (next < p->k) return prefetch_of(&p->b, next, from, min_int64(kc_of(p), p->k - next), to - from);
    return prefetch_of(&p->b, 0, to, min_int64(kc_of(p), p->k), width);
}

/* All row panels of a range by its column panels, MC_PANELS at a time, packed unless a is read in place. `packed_b` is
   the first panel of b. */
static void gemm_row_panels(const Gemm *p, KBlock kb, PanelRange range, const float *packed_b, Prefetch b_next)
{
    const int64_t most = jr_panels_of(kb), panels = range.column_last - range.column_first;
    for (int64_t panel_group = range.first; panel_group < range.last; panel_group += MC_PANELS) {
        const int64_t last = min_int64(panel_group + MC_PANELS, range.last), row = panel_group * MR,
                      end = min_int64(last * MR, p->m);
        const int64_t next_end = min_int64(min_int64(last + MC_PANELS, range.last) * MR, p->m);
        Prefetch a_next = {0};
        pack_a(&p->a, p->a_in_place, row, kb.first, end - row, kb.k, p->packed_a);
        if (!p->a_in_place || PREFETCHES_A_IN_PLACE)
            a_next = prefetch_of(&p->a, end, kb.first, next_end - end, kb.k);
        for (int64_t jr = 0; jr < panels; jr += most) {
            poll_mpi();
            macro_kernel(p, kb, p->packed_a, panel_group, last, packed_b + jr * B_PANEL, range.column_first + jr,
                         range.column_first + min_int64(jr + most, panels), &a_next, &b_next);
        }
    }
}

/* A thread packs the panels of b for its own columns. */
static void gemm_private_b(const Gemm *p, PanelRange range)
{
    const int64_t n = min_int64(range.column_last * NR, p->n);
    for (int64_t block = range.column_first; block < range.column_last; block += PRIVATE_PANELS) {
        const int64_t end = min_int64(block + PRIVATE_PANELS, range.column_last);
        const int64_t from = block * NR, to = min_int64(end * NR, n);
        const PanelRange block_range = {range.first, range.last, block, end};
        for (int64_t first = 0; first < p->k; first += kc_of(p)) {
            const KBlock kb = k_block_of(p, first);
            pack_b(&p->b, first, from, to - from, kb.k, p->packed_b);
            gemm_row_panels(p, kb, block_range, p->packed_b, next_b_block(p, first, from, to, n));
        }
    }
}

/* NC columns of c, from `column` on, by threads that pack the panels of b together. */
static void gemm_shared_b(const Gemm *p, int64_t column, int thread, int threads)
{
    const int64_t n = min_int64(NC, p->n - column);
    const int64_t row_panels = (p->m + MR - 1) / MR, column_panels = (n + NR - 1) / NR;
    const int64_t panel = column_panels * thread / threads, end = column_panels * (thread + 1) / threads;
    const int64_t from = column + panel * NR, to = min_int64(column + end * NR, p->n);
    PanelRange range =
        panel_range_of(row_panels, column_panels, row_panels * MR >= column_panels * NR, thread, threads);
    const float *packed_b = p->packed_b + range.column_first * B_PANEL;
    range.column_first += column / NR;
    range.column_last += column / NR;
    for (int64_t first = 0; first < p->k; first += kc_of(p)) {
        const KBlock kb = k_block_of(p, first);
        pack_b(&p->b, first, from, to - from, kb.k, p->packed_b + panel * B_PANEL);
#pragma omp barrier
        gemm_row_panels(p, kb, range, packed_b, next_b_block(p, first, from, to, to));
#pragma omp barrier
    }
}

/* Whether c is rounded only after several blocks of k. */
static int defers_rounding(int64_t k, int type, int c_type) { return c_type == BFLOAT16 && k_blocks_of(k, type) > 1; }

/* The number of columns whose panels of b are packed, and whose accumulators are stored, at a time by all threads. */
static int64_t packed_columns(int64_t n, int threads)
{
    const int64_t shared = min_int64(round_up(n, NR), NC), private = threads * PRIVATE_PANELS * NR;
    return shared > private ? shared : private;
}

static int64_t a_workspace_floats(int threads) { return threads * MC_PANELS * A_PANEL; }
static int64_t b_workspace_floats(int64_t n, int threads) { return packed_columns(n, threads) / NR * B_PANEL; }

/* float32 numbers of workspace for a product. */
EXPORT int64_t gemm_workspace_floats(int64_t m, int64_t n, int64_t k, int type, int c_type, int threads)
{
    const int64_t sums = defers_rounding(k, type, c_type) ? min_int64(m, ACC_ROWS) * packed_columns(n, threads) : 0;
    return a_workspace_floats(threads) + b_workspace_floats(n, threads) + sums + PANEL_ALIGNMENT;
}

/* Whether this library multiplies matrices of a type. */
EXPORT int supports_gemm(int type) { return KERNELS[type][0][0][0] != 0; }

/* float32 numbers of a vector register that this library was compiled for. */
EXPORT int lanes(void) { return LANES; }

/* Bytes of the SVE vectors that this library was compiled for, or 0 if it runs with any: asked before anything else. */
EXPORT int sve_vector_bytes(void)
{
#ifdef __ARM_FEATURE_SVE_BITS
    return __ARM_FEATURE_SVE_BITS / 8;
#else
    return 0;
#endif
}

/* c [m, n] = or += a [m, k] b [k, n] + bias [n]. Rows or columns of a and of b are contiguous, and the rows of c. The
   bias is float32. c is float32, or bfloat16 if a and b are, and then it is not accumulated into. */
EXPORT void gemm(const void *a, int64_t a_row, int64_t a_column, const void *b, int64_t b_row, int64_t b_column,
                 int type, const float *bias, void *c, int64_t c_row, int c_type, int accumulates, int64_t m, int64_t n,
                 int64_t k, float *work, int threads)
{
    const int64_t size = type == BFLOAT16 ? 2 : 4, c_size = c_type == BFLOAT16 ? 2 : 4;
    const int defers = defers_rounding(k, type, c_type);
    const int64_t step = defers ? ACC_ROWS : m;
    float *packed_a = (float *)round_up((int64_t)work, 4 * PANEL_ALIGNMENT), *packed_b = packed_a + a_workspace_floats(threads);
    float *sums = defers ? packed_b + b_workspace_floats(n, threads) : 0;
#pragma omp parallel num_threads(threads)
    for (int64_t row = 0; row < m; row += step) {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
        const Matrix local_a = {(const char *)a + row * a_row * size, a_row, a_column, size};
        const Matrix local_b = {b, b_row, b_column, size};
        void *local_c = (char *)c + row * c_row * c_size;
        const int has_private_b = is_packed_layout(&local_a, k);
        Gemm p = {local_a,       local_b, min_int64(step, m - row), n, k, bias, local_c, c_row, type, c_type, accumulates,
                  has_private_b, has_private_b && can_read_in_place(&local_a), sums, 0, packed_a, packed_b};
        p.packed_a += thread * MC_PANELS * A_PANEL;
        if (p.has_private_b) {
            p.packed_b += thread * PRIVATE_PANELS * B_PANEL;
            p.sums_row = PRIVATE_PANELS * NR;
            if (defers) p.sums += thread * min_int64(m, ACC_ROWS) * p.sums_row;
            gemm_private_b(&p, panel_range_of((p.m + MR - 1) / MR, (n + NR - 1) / NR, 0, thread, team));
            continue;
        }
        p.sums_row = min_int64(round_up(n, NR), NC);
        for (int64_t column = 0; column < n; column += NC) gemm_shared_b(&p, column, thread, team);
    }
}

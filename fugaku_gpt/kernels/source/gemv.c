/* Products of a weight and few vectors: y [m, n] = x [m, k] wT + bias, where w is [n, k]. A model that continues a text
   reads one token at a time, and each of its weights once for it: the time is that of reading them.

   Rows of the weight follow each other in memory, so that a thread reads one long stream; on the processors that were
   measured (Zen 4), reading four rows side by side was half as fast. Several vectors are multiplied with two rows at a
   time, which are prefetched in the order of memory. Sums are float32, rounded once, and have the same order for any
   number of threads and of vectors: a text is continued in the same way whatever is generated beside it. */
#include "gemv.h"

#define SHARES 4 /* parts of the weight for each thread: the others take them from one that is late */

/* y [m, n] = x [m, k] wT + bias; w [n, k], and bias [n] or null; all of one type. work: m k numbers for bfloat16. */
EXPORT void gemv(const void *x, const void *w, const void *bias, void *y, int64_t m, int64_t n, int64_t k, int type,
                 float *work, int threads)
{
    Gemv p = {.x = x, .w = w, .bias = bias, .y = y, .m = m, .n = n, .k = k, .y_row = n, .type = type, .y_type = type};
    if (type == BFLOAT16) {
        load_scaled(x, 0, type, 1.0f, work, m * k);
        p.x = work;
    }
    const int64_t share = (n + SHARES * threads - 1) / (SHARES * threads);
    int64_t next = 0;
#pragma omp parallel num_threads(threads)
    {
        int64_t first;
        while ((first = __atomic_fetch_add(&next, share, __ATOMIC_RELAXED)) < n) {
            if (p.type == BFLOAT16)
                multiply_columns(&p, first, min_int64(n, first + share), BFLOAT16);
            else
                multiply_columns(&p, first, min_int64(n, first + share), FLOAT32);
        }
    }
}

/* Sizes of GEMM: its micro-kernel, and the blocks that stay in the caches. */
#ifndef FUGAKU_GPT_KERNELS_GEMM_SIZES_H
#define FUGAKU_GPT_KERNELS_GEMM_SIZES_H

#include "common.h"

#if ATTENTION_MR == 12 /* 32 registers */
#define MR 8
#else
#define MR 4
#endif
#define NR_VECTORS 3
#define NR (NR_VECTORS * LANES)
#define KC 768               /* units */
#define JR_PANELS 2          /* panels of b that stay in the L2 cache at depth KC; twice as many at half the depth */
#define MC_PANELS 16         /* panels of a that are packed at a time: MC = MC_PANELS * MR */
#define NC (64 * NR)         /* columns whose panels of b are packed at a time */
#define ACC_ROWS (128 * MR)  /* rows of accumulators that are rounded after several blocks of k: they stay in a cache */
#define PRIVATE_PANELS 16    /* panels of b that a thread packs at a time for itself */
#define PREFETCH_INTERVAL 32 /* units of a micro-kernel per prefetched cache line */
#define CACHE_LINE 64        /* bytes */
#define PREFETCH_ROWS 8      /* rows that packing prefetches ahead */
/* Distances between panels: no multiples of a page, or all panels would map to the same few sets of a cache. */
#define A_PANEL (MR * KC + LANES)
#define B_PANEL (NR * KC + LANES)

#endif

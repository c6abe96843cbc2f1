/* Sizes of GEMM: its micro-kernel, and the blocks that stay in the caches of the processor that is compiled for. */
#ifndef FUGAKU_GPT_KERNELS_GEMM_SIZES_H
#define FUGAKU_GPT_KERNELS_GEMM_SIZES_H

#include "common.h"

/* Micro-kernels use SVE's instructions; for 128 bits NEON's. */
#if defined(HAS_FIXED_SVE) && LANES > 4
#define HAS_SVE_MICRO_KERNELS 1
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif

/* The processor multiplies matrices [2, 4] and [4, 2] of bfloat16 numbers in each 128 bits: by the models of Neoverse V1
   and V2 in the time of products of pairs, which are half as many. (With SVE, processors that do so by NEON's instructions
   do by SVE's, too; GCC 12 has no other macro.) */
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_BF16_MATRIX_PRODUCTS 1
#endif

#if defined(__AVX512F__) || defined(__aarch64__) /* 32 registers */
#define MR 8
#else
#define MR 4
#endif
#define NR_VECTORS 3
#define NR (NR_VECTORS * LANES)

#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 512
/* A64FX, the only processor with vectors of this length. A core has 64 KiB of L1 cache, 4-way; 12 cores share 8 MiB of
   L2 cache, and there is no cache behind it.

   A panel of a takes 16.6 KB, a quarter of the L1 cache, and one of b 98.6 KB. In the L2 cache each of 12 threads has
   the panels of b that it has packed, or its share of those that all have packed, and a group of panels of a:
     private panels of b: 12 (4 98.6 KB + 8 16.6 KB) = 6.3 of 8.4 MB;
     shared panels of b:  32 98.6 KB + 12 8 16.6 KB  = 4.8 of 8.4 MB;
   the rest is for c and for the group of a that is prefetched, of 12 133 KB = 1.6 MB. Packed panels therefore never come
   from memory, only a does once for every 4 panels of b: 16.6 KB in 4 x 6144 cycles of a micro-kernel at its peak, or 16
   GB/s of 256 for all 12 at 2 GHz. A micro-kernel prefetches 16 lines: those of the next group of a by the time that it
   is needed, and in the last group those of b. */
#define CACHE_LINE 256 /* bytes */
#define L1_BYTES 65536
#define L1_WAY_BYTES 16384 /* distance of addresses that map to the same set */
#define L1_WAYS 4
#define L2_BYTES 8388608
#define L2_THREADS 12 /* that share an L2 cache */
#define KC 512
#define JR_PANELS 4
#define MC_PANELS 8
#define NC_PANELS 32
#define PRIVATE_PANELS 4
#define PREFETCHES_A_IN_PLACE 1 /* from memory at once, in rows that are too short for hardware to follow */
#else
/* Processors whose cores have 32 or 64 KiB of L1 cache and at least 1 MiB of L2 cache each, with 512-bit vectors, or in
   proportion with shorter ones: Zen 4, Sapphire Rapids, Neoverse V1 and V2. With 16 lanes a panel of a takes 24.6 KB of
   the L1 cache, and 16 of a and 2 of b take 688 KB of the L2 cache. Measured on Zen 4. On Arm as many columns are packed
   with shorter vectors: that is more panels. */
#ifdef __aarch64__
#define PANELS_OF_16_LANES (16 / LANES)
#else
#define PANELS_OF_16_LANES 1
#endif
#define CACHE_LINE 64
#define L1_BYTES 32768
#define L2_BYTES 1048576
#define L2_THREADS 1
#define KC 768
#define JR_PANELS (2 * PANELS_OF_16_LANES)
#define MC_PANELS 16
#define NC_PANELS (64 * PANELS_OF_16_LANES)
#define PRIVATE_PANELS (16 * PANELS_OF_16_LANES)
#define PREFETCHES_A_IN_PLACE 0
#endif
/* KC: units of the inner dimension of a panel. JR_PANELS: panels of b that stay in the L2 cache at depth KC; twice as
   many at half the depth. MC_PANELS: panels of a that are packed at a time, MC = MC_PANELS * MR. NC_PANELS: panels of b
   that all threads pack together at a time. PRIVATE_PANELS: panels of b that a thread packs at a time for itself. */
#define NC (NC_PANELS * NR)
#define ACC_ROWS (128 * MR)  /* rows of accumulators that are rounded after several blocks of k: they stay in a cache */
#define PREFETCH_INTERVAL 32 /* units of a micro-kernel per prefetched cache line */
#define PREFETCH_ROWS 8      /* rows that packing prefetches ahead */
/* Distances between panels: no multiples of a page, or all panels would map to the same few sets of a cache; panels
   begin at a vector, and where cache lines are longer, at a line. */
#define PANEL_ALIGNMENT (CACHE_LINE > 64 ? CACHE_LINE / 4 : LANES)
#define A_PANEL (MR * KC + PANEL_ALIGNMENT)
#define B_PANEL (NR * KC + PANEL_ALIGNMENT)

_Static_assert(4 * A_PANEL <= L1_BYTES, "a panel of a fits into the L1 cache");
_Static_assert(4 * L2_THREADS * (MC_PANELS * A_PANEL + JR_PANELS * B_PANEL) <= L2_BYTES / 5 * 4,
               "the panels that threads use at a time leave a fifth of their L2 cache to c and to prefetching");
#if L2_THREADS > 1
_Static_assert(4 * (NC_PANELS * B_PANEL + L2_THREADS * MC_PANELS * A_PANEL) <= L2_BYTES / 5 * 4,
               "the panels of b that threads pack together stay in the L2 cache that they share");
#endif
_Static_assert(JR_PANELS <= PRIVATE_PANELS && JR_PANELS <= NC_PANELS, "the panels of b that are used are packed");

#endif

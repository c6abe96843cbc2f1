/* Long kernels call poll_mpi between their blocks, from any thread: MPI makes progress while they compute. */
#ifndef FUGAKU_GPT_KERNELS_PROGRESS_H
#define FUGAKU_GPT_KERNELS_PROGRESS_H

#include "common.h"

#include <omp.h>

extern void (*progress_callback)(void);
void call_progress_if_due(void);

INLINE void poll_mpi(void)
{
    if (progress_callback && omp_get_thread_num() == 0) call_progress_if_due();
}

#endif

/* Long kernels call this between their parts, from whichever thread. */
#ifndef FUGAKU_GPT_KERNELS_BETWEEN_H
#define FUGAKU_GPT_KERNELS_BETWEEN_H

#include "common.h"

#include <omp.h>

extern void (*function_between)(void);
void call_if_due(void);

INLINE void between(void)
{
    if (function_between && omp_get_thread_num() == 0) call_if_due();
}

#endif

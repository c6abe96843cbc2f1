/* What the process has to do meanwhile, now and then, by the first thread: it is the one that has called the kernel. */
#include "between.h"

#include <time.h>

void (*function_between)(void) = 0;
static int64_t pause_between = 0, last_call = 0;

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

void call_if_due(void)
{
    if (nanoseconds() - last_call < pause_between) return;
    function_between();
    last_call = nanoseconds();
}

/* So often from now on; a null pointer: never. */
EXPORT void call_between(void (*function)(void), int64_t pause)
{
    function_between = function;
    pause_between = pause;
    last_call = nanoseconds();
}

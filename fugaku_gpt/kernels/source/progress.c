/* A callback that the process registers, run now and then by the first thread, which is the one that called the kernel. */
#include "progress.h"

#include <time.h>

void (*progress_callback)(void) = 0;
static int64_t callback_interval = 0, last_callback = 0;

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

void call_progress_if_due(void)
{
    if (nanoseconds() - last_callback < callback_interval) return;
    progress_callback();
    last_callback = nanoseconds();
}

/* Calls `callback` at most every `interval` nanoseconds from now on; null: never. */
EXPORT void set_progress_callback(void (*callback)(void), int64_t interval)
{
    progress_callback = callback;
    callback_interval = interval;
    last_callback = nanoseconds();
}

/* What the process has to do meanwhile, now and then, by the first thread: it is the one that has called the kernel. */
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

/* So often from now on; a null pointer: never. */
EXPORT void set_progress_callback(void (*callback)(void), int64_t interval)
{
    progress_callback = callback;
    callback_interval = interval;
    last_callback = nanoseconds();
}

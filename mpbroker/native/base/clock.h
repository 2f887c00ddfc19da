/* The two clocks that the core reads. */

#ifndef MPBROKER_CLOCK_H
#define MPBROKER_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Return the monotonic time, the same in all processes, as time.monotonic_ns(). */
static inline int64_t
monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Return the wall clock's time, which is compared with timestamps of records. */
static inline int64_t
wall_clock_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

#endif

/* clock.h - the monotonic clock, for waits with a deadline and for measuring time. */
#pragma once

#include <stdint.h>
#include <time.h>

static inline int64_t fst_now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static inline struct timespec fst_time_at(int64_t ns)
{
    return (struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
}

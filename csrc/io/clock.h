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

/* The time in so many milliseconds. */
static inline struct timespec fst_time_after(int milliseconds)
{
    const int64_t time = fst_now_ns() + (int64_t)milliseconds * 1000000;
    return (struct timespec){.tv_sec = time / 1000000000, .tv_nsec = time % 1000000000};
}

static inline int fst_time_is_past(const struct timespec *time)
{
    return fst_now_ns() >= (int64_t)time->tv_sec * 1000000000 + time->tv_nsec;
}

/* check.h - counts what was checked, says where a check failed, and goes on to the next one; in any
 * thread. A test program ends with `return check_report();`. */
#pragma once

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static long checks_made, checks_failed;

static inline int check_that(int holds, const char *file, int line, const char *text)
{
    __atomic_fetch_add(&checks_made, 1, __ATOMIC_RELAXED);
    if (!holds) {
        __atomic_fetch_add(&checks_failed, 1, __ATOMIC_RELAXED);
        fprintf(stderr, "%s:%d: failed: %s\n", file, line, text);
    }
    return holds;
}

static inline void check_int(int64_t got, int64_t want, const char *file, int line,
                             const char *text)
{
    if (!check_that(got == want, file, line, text))
        fprintf(stderr, "    got %" PRId64 ", expected %" PRId64 "\n", got, want);
}

/* NaN is close to NaN only, an infinity to itself only. */
static inline void check_near(double got, double want, double tolerance, const char *file, int line,
                              const char *text)
{
    const int both_nan = isnan(got) && isnan(want);
    if (!check_that(both_nan || got == want || fabs(got - want) <= tolerance, file, line, text))
        fprintf(stderr, "    got %.17g, expected %.17g within %g\n", got, want, tolerance);
}

static inline void check_bytes(const void *got, const void *want, size_t size, const char *file,
                               int line, const char *text)
{
    const unsigned char *a = got, *b = want;
    size_t at = 0;
    while (at < size && a[at] == b[at])
        at++;
    if (!check_that(at == size, file, line, text))
        fprintf(stderr, "    byte %zu of %zu: got 0x%02x, expected 0x%02x\n", at, size, a[at],
                b[at]);
}

static inline void check_contains(const char *got, const char *part, const char *file, int line,
                                  const char *text)
{
    if (!check_that(strstr(got, part) != NULL, file, line, text))
        fprintf(stderr, "    \"%s\" is not in \"%s\"\n", part, got);
}

#define CHECK(condition) check_that((condition) != 0, __FILE__, __LINE__, #condition)
#define CHECK_INT(got, want) check_int((got), (want), __FILE__, __LINE__, #got " == " #want)
#define CHECK_NEAR(got, want, tolerance) \
    check_near((got), (want), (tolerance), __FILE__, __LINE__, #got " is close to " #want)
#define CHECK_BYTES(got, want, size) \
    check_bytes((got), (want), (size), __FILE__, __LINE__, "the same bytes: " #got ", " #want)
#define CHECK_CONTAINS(got, part) \
    check_contains((got), (part), __FILE__, __LINE__, #got " says " #part)

/* The exit status of a test program; a program that checked nothing has failed. */
static inline int check_report(void)
{
    fprintf(stderr, "%ld checks, %ld failed\n", checks_made, checks_failed);
    return checks_failed > 0 || checks_made == 0;
}

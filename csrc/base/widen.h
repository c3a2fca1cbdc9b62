/* widen.h - rows of unsigned integers, as those of files of tokens, become wider ones. */
#ifndef FST_BASE_WIDEN_H
#define FST_BASE_WIDEN_H

#include <stddef.h>

/* Both ends may lie at any address. */
typedef void (*fst_widen)(char *restrict to, const char *restrict from, size_t items);

typedef struct {
    fst_widen u16_to_i32, u16_to_i64, u32_to_i64;
} fst_widen_loops;

#endif

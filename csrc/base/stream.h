/* stream.h - copies that bypass the caches, for data that is not read again soon. The old
 * contents of the destination are then not fetched either. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* A batch of this many bytes does not stay in a cache until it is read. */
enum { FST_STREAM_BYTES = 1 << 23 };

#ifdef __SSE2__
#include <emmintrin.h>

/* Copies with non-temporal stores. Call fst_stream_end() before another thread may read. */
static inline void fst_stream_copy(char *restrict to, const char *restrict from, size_t bytes)
{
    enum { LINE = 64, AHEAD = 16 * LINE };
    const size_t to_line = -(uintptr_t)to % LINE, head = to_line < bytes ? to_line : bytes;
    memcpy(to, from, head);
    size_t at = head;
    for (; at + LINE <= bytes; at += LINE) {
        __builtin_prefetch(from + at + AHEAD);
        __m128i line[4];
        for (int i = 0; i < 4; i++)
            line[i] = _mm_loadu_si128((const __m128i *)(const void *)(from + at) + i);
        for (int i = 0; i < 4; i++)
            _mm_stream_si128((__m128i *)(void *)(to + at) + i, line[i]);
    }
    memcpy(to + at, from + at, bytes - at);
}

static inline void fst_stream_end(void)
{
    _mm_sfence();
}
#else
static inline void fst_stream_copy(char *restrict to, const char *restrict from, size_t bytes)
{
    memcpy(to, from, bytes);
}

static inline void fst_stream_end(void)
{
}
#endif

#include "gpu/streams.h"

#include <stddef.h>
#include <stdint.h>

enum { PLACES = 1024, TRIES = 16, LASTS = 1 };

static uintptr_t noted[PLACES]; /* handles, with the bit LASTS */

/* The place where a stream is noted, or where it can be; NULL: there is no room for it. */
static uintptr_t *place_of(uintptr_t handle)
{
    const uint64_t hash = (uint64_t)handle * UINT64_C(0x9E3779B97F4A7C15) >> 32;
    for (size_t i = 0; i < TRIES; i++) {
        uintptr_t *place = &noted[(hash + i) % PLACES];
        const uintptr_t there = __atomic_load_n(place, __ATOMIC_RELAXED);
        if (!there || (there & ~(uintptr_t)LASTS) == handle)
            return place;
    }
    return NULL;
}

/* Numbers that stand for the default stream or for one of each thread, and are no addresses. */
static int is_number(uintptr_t handle)
{
    return handle < 16 || handle & LASTS;
}

fst_stream_life fst_gpu_stream_life(const void *stream)
{
    const uintptr_t handle = (uintptr_t)stream;
    if (!handle)
        return FST_STREAM_LASTS;
    const uintptr_t *place = is_number(handle) ? NULL : place_of(handle);
    if (!place)
        return FST_STREAM_ENDS;
    const uintptr_t there = __atomic_load_n(place, __ATOMIC_RELAXED);
    return !there ? FST_STREAM_UNKNOWN : there & LASTS ? FST_STREAM_LASTS : FST_STREAM_ENDS;
}

void fst_gpu_note_stream(const void *stream, int lasts)
{
    const uintptr_t handle = (uintptr_t)stream;
    uintptr_t none = 0, *place = is_number(handle) ? NULL : place_of(handle);
    while (place && !__atomic_compare_exchange_n(place, &none, handle | (lasts ? LASTS : 0), 0,
                                                 __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        place = (none & ~(uintptr_t)LASTS) == handle ? NULL : place_of(handle);
        none = 0;
    }
}

/* slots.h - memory that batches reuse.
 *
 * A slot holds one field of one batch. It has one owner at a time, who gives it back from any
 * thread. A slot may outlive the maker of its pool. */
#pragma once

#include <stddef.h>

#include "base/status.h"

typedef struct fst_slots fst_slots; /* a pool */

typedef struct fst_slot {
    void *data; /* aligned as torch aligns its own memory */
    size_t capacity;
    fst_slots *pool;
    struct fst_slot *newer, *older; /* in the pool's list of free slots */
} fst_slot;

typedef struct {
    size_t made; /* slots whose memory came from the system, since the pool was made */
    size_t free, held;
} fst_slots_counts;

fst_slots *fst_slots_new(fst_status *status);

/* Keeps at most `keep` free slots; the least recently used go first. */
void fst_slots_keep(fst_slots *pool, size_t keep);

/* Takes a free slot of a suitable size, or new memory; never waits. NULL with `status` filled. */
fst_slot *fst_slots_take(fst_slots *pool, size_t size, fst_status *status);

void fst_slot_give_back(fst_slot *slot);

fst_slots_counts fst_slots_counted(fst_slots *pool);

/* Frees the free slots now, and the others as they come back. */
void fst_slots_close(fst_slots *pool);

/* The number of forks between the process that loaded the library and this one. */
unsigned fst_forks(void);

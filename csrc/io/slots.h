/* slots.h - memory that is used again and again, for as many batches as are alive.
 *
 * A slot holds one field of one batch. It has one owner at a time, who gives it back from any
 * thread; it may outlive the one who made the pool. */
#ifndef FST_IO_SLOTS_H
#define FST_IO_SLOTS_H

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

/* At most `keep` free slots stay; those that were used longest ago go first. */
void fst_slots_keep(fst_slots *pool, size_t keep);

/* A free slot of a suitable size, or new memory: never waits. NULL with `status` filled. */
fst_slot *fst_slots_take(fst_slots *pool, size_t size, fst_status *status);

void fst_slot_give_back(fst_slot *slot);

fst_slots_counts fst_slots_counted(fst_slots *pool);

/* Frees what is free now, and the rest as it comes back. */
void fst_slots_close(fst_slots *pool);

/* How many forks lie between this process and the one that loaded the library. */
unsigned fst_forks(void);

#endif

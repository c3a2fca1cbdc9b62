/* arena_lock.h - page-locks an arena's blocks for a device to read.
 *
 * The file is mapped a second time, and only there blocks are locked. Copies that the loader
 * starts read the second mapping and may run on after the call. A script's own copies read the
 * first mapping, which is ordinary memory to the driver, so they are over when they return and
 * the block can be reused. */
#ifndef FST_IO_ARENA_LOCK_H
#define FST_IO_ARENA_LOCK_H

#include "io/arena.h"

/* Functions that lock and unlock memory for a device. */
typedef struct {
    fst_code (*lock)(int device, void *address, size_t size, fst_status *status);
    void (*unlock)(int device, void *address);
    int device;
} fst_arena_locker;

/* Prepares an arena that this process made. Locks one page as a test. Does nothing if the arena
 * is prepared already. */
fst_code fst_arena_prepare_locks(fst_arena *arena, fst_arena_locker locker, fst_status *status);

/* Finds the page-locked memory of a held block by its address. *block is the block, held once
 * more until fst_arena_end_lock. *locked is NULL if these are not `size` bytes of a held block,
 * if this process did not prepare the arena, or if more than twice what is on its way to the
 * device or to this process would be locked. */
fst_code fst_arena_lock(fst_arena *arena, const void *address, size_t size, size_t *block,
                        void **locked, fst_status *status);
void fst_arena_end_lock(fst_arena *arena, size_t block);

/* Before the process ends: keeps locked memory locked and mapped, as a device may still read it.
 * 0 undoes that. */
void fst_arena_keep_locked(int keep);

#endif

/* arena_lock.h - an arena's blocks once more, page-locked, for a device to read.
 *
 * The file is mapped a second time and blocks are locked there only. So a device reads at its own
 * pace what its owner asked it to read, and whatever else a program copies from a batch, at the
 * addresses that it knows, lies in ordinary memory for the driver: such a copy is over when it
 * returns, and nobody has to know of it before the block is used again. */
#ifndef FST_IO_ARENA_LOCK_H
#define FST_IO_ARENA_LOCK_H

#include "io/arena.h"

/* How memory is locked for a device, and let go. */
typedef struct {
    fst_code (*lock)(int device, void *address, size_t size, fst_status *status);
    void (*unlock)(int device, void *address);
    int device;
} fst_arena_locker;

/* Prepares an arena that this process made, and locks one page to see whether that can be. Again
 * for an arena that is prepared it does nothing. */
fst_code fst_arena_prepare_locks(fst_arena *arena, fst_arena_locker locker, fst_status *status);

/* What is held at an address, where it is locked, and the number of its block, which is now held
 * once more, until fst_arena_end_lock. *locked is NULL where these are no `size` bytes of a held
 * block, where the arena is not prepared in this process, or where more would be locked than twice
 * what is on its way to the device or to this process. */
fst_code fst_arena_lock(fst_arena *arena, const void *address, size_t size, size_t *block,
                        void **locked, fst_status *status);
void fst_arena_end_lock(fst_arena *arena, size_t block);

/* The process is about to end: what is locked stays so, and mapped, as a device may still read it,
 * until the system has it back. With 0 that is over. */
void fst_arena_keep_locked(int keep);

#endif

/* arena.h - shared memory: workers fill blocks of it, and the main process reads them.
 *
 * The arena is an anonymous file, mapped once, for as many blocks as are alive. One word in the
 * memory itself says who owns a block. So taking a block and giving it back needs no system call
 * and no lock, and the blocks of a killed worker can be found. The file has no name, so nothing
 * is left behind. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { FST_ARENA_BLOCKS = 16384 };

typedef struct fst_arena fst_arena;

typedef struct {
    size_t made;                    /* blocks that were ever made */
    size_t free, taken, held, gone; /* gone: the system has their memory back */
    size_t locked;                  /* page-locked, of those */
    size_t backed;                  /* bytes of all but those that are gone */
} fst_arena_counts;

/* Make an arena; or attach to the file of one in another process, which is closed on failure.
 * Forked processes have the arena already. */
fst_arena *fst_arena_new(fst_status *status);
fst_arena *fst_arena_attach(int file, size_t reserve, fst_status *status);

/* Count references: one for the arena and one for each export of its memory. The last one unmaps
 * it. */
void fst_arena_keep(fst_arena *arena);
void fst_arena_drop(fst_arena *arena);

int fst_arena_file(const fst_arena *arena);
size_t fst_arena_reserve(const fst_arena *arena);

/* Takes a block of at least `size` bytes, and makes one if none is free. Never waits. */
fst_code fst_arena_take(fst_arena *arena, size_t size, size_t *block, fst_status *status);

/* Gives a taken block back unused. */
void fst_arena_give_back(fst_arena *arena, size_t block);

/* In a worker, for a tensor over a taken block. If the tensor is gone before fst_arena_send, the
 * block is given back. fst_arena_sent returns 0, and sending has failed, if the tensor still
 * lives: somebody kept it and may write to it. */
void fst_arena_lend(fst_arena *arena, size_t block);
void fst_arena_end_loan(fst_arena *arena, size_t block);
void fst_arena_send(fst_arena *arena, size_t block);
int fst_arena_sent(fst_arena *arena, size_t block);

/* In the main process: hold a block that a worker took. The block is free when all holds and
 * pins have ended. */
fst_code fst_arena_hold(fst_arena *arena, size_t block, size_t size, fst_status *status);
void fst_arena_end_hold(fst_arena *arena, size_t block);

/* Keeps a held block from being reused: a process that sees it is about to be forked. Returns 0
 * if the block is not held. */
int fst_arena_pin(fst_arena *arena, size_t block);

/* Frees all taken blocks, once no worker lives. Returns their number. */
size_t fst_arena_sweep(fst_arena *arena);

void *fst_arena_data(const fst_arena *arena, size_t block);
size_t fst_arena_made(const fst_arena *arena); /* blocks so far: their numbers are below it */
fst_arena_counts fst_arena_counted(const fst_arena *arena);

/* Page-locks blocks for a device to read.
 *
 * The file is mapped a second time, and only there blocks are locked. Copies that the loader
 * starts read the second mapping and may run on after the call. A script's own copies read the
 * first mapping, which is ordinary memory to the driver, so they are over when they return and
 * the block can be reused. */

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

/* Lets malloc keep freed memory from the start, as glibc does after a while. The samples of a
 * batch are freed together, and the system would clear the same pages for the next ones. */
void fst_keep_freed_memory(void);

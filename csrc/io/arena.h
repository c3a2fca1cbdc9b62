/* arena.h - memory that processes share: workers fill blocks of it, the main process reads them.
 *
 * An anonymous file, mapped once, for as many blocks as are alive. Who owns a block is said by one
 * word in the memory itself, so taking one and giving it back costs no system call and no lock, and
 * what a killed worker owned can be found. Nothing has a name: nothing is left behind. */
#ifndef FST_IO_ARENA_H
#define FST_IO_ARENA_H

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

/* The first process makes the arena, and others attach to its file, which is closed where that
 * fails; forked ones have it already. */
fst_arena *fst_arena_new(fst_status *status);
fst_arena *fst_arena_attach(int file, size_t reserve, fst_status *status);

/* An arena and each export of its memory has a reference; the last one unmaps it. */
void fst_arena_keep(fst_arena *arena);
void fst_arena_drop(fst_arena *arena);

int fst_arena_file(const fst_arena *arena);
size_t fst_arena_reserve(const fst_arena *arena);

/* A block of at least `size` bytes, now taken. Never waits: makes a new one if none is free. */
fst_code fst_arena_take(fst_arena *arena, size_t size, size_t *block, fst_status *status);

/* Gives a taken block back unused. */
void fst_arena_give_back(fst_arena *arena, size_t block);

/* In a worker: a tensor is made over a taken block. If it is gone before the block is sent, the
 * block is given back. Sending fails (returns 0) if the tensor still lives after fst_arena_send:
 * somebody kept it, and may write to it. */
void fst_arena_lend(fst_arena *arena, size_t block);
void fst_arena_end_loan(fst_arena *arena, size_t block);
void fst_arena_send(fst_arena *arena, size_t block);
int fst_arena_sent(fst_arena *arena, size_t block);

/* In the main process: what a worker took is now held, until it is released as often as it was held
 * and pinned. */
fst_code fst_arena_hold(fst_arena *arena, size_t block, size_t size, fst_status *status);
void fst_arena_end_hold(fst_arena *arena, size_t block);

/* Keeps a held block from being used again: a process is about to be forked that will see it.
 * Returns 0 if it is not held. */
int fst_arena_pin(fst_arena *arena, size_t block);

/* Frees what is taken; only when no worker lives. Returns how many blocks that were. */
size_t fst_arena_sweep(fst_arena *arena);

void *fst_arena_data(const fst_arena *arena, size_t block);
size_t fst_arena_made(const fst_arena *arena); /* blocks so far: their numbers are below it */
fst_arena_counts fst_arena_counted(const fst_arena *arena);

/* Lets malloc keep memory that is freed, as far as glibc's does by itself after a while: the
 * samples of a batch are freed together, and the system would clear the same pages for the next
 * ones. */
void fst_keep_freed_memory(void);

#endif

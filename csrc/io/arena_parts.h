/* arena_parts.h - the layout of the arena's file and the states of a block, for the arena's
 * files. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "io/arena.h"

enum { SLACK = 1 << 20 }; /* bytes that may always be free */

/* Who owns a block. Only the owner changes the state, but anyone may take a FREE or GONE block. */
typedef enum { UNMADE, FREE, GONE, TAKEN, HELD } block_state;

/* In a worker: whether a tensor is over a block that it took. */
enum { NO_LOAN, LENT, LEAVING };

typedef struct {
    _Atomic uint32_t state;
    _Atomic uint32_t lives; /* how often its memory came from the system */
    size_t offset, capacity;
    _Atomic uint64_t used; /* when it was taken last */
    _Atomic uint32_t
        locked; /* by the main process, as long as the arena lives: it stays as it is */
    char rest[28];
} block_entry;

/* The beginning of the file; zeros at first. */
typedef struct {
    _Atomic size_t made, end, free_bytes, taken_bytes, most_taken;
    _Atomic uint64_t clock;
    char rest[16];
    block_entry blocks[FST_ARENA_BLOCKS];
} arena_header;

struct fst_arena {
    arena_header *header; /* where the file is mapped */
    int file;
    size_t reserve;
    _Atomic size_t references;
    /* of this process: */
    _Atomic uint32_t uses[FST_ARENA_BLOCKS]; /* exports and pins of held blocks */
    _Atomic uint32_t loans[FST_ARENA_BLOCKS];
    uint32_t seen[FST_ARENA_BLOCKS]; /* the value of `lives` for which the pages are mapped here */
    /* of arena_lock.c: */
    pthread_mutex_t locking;
    void *again; /* the second mapping, and the process that has it */
    pid_t again_of;
    atomic_int locks; /* the locker is set and works */
    fst_arena_locker locker;
    size_t locked_bytes;
    int refused;                /* locking a block failed: no other one is tried */
    size_t in_use, most_in_use; /* bytes of blocks that a device reads */
};

static inline size_t round_up(size_t size, size_t unit)
{
    return (size + unit - 1) / unit * unit;
}

/* The limit for free bytes: what two sets of batches on their way need. */
static inline size_t free_limit(const arena_header *header)
{
    return 2 * atomic_load(&header->most_taken) + SLACK;
}

/* Bytes that the system may get back once the block is free. */
static inline size_t given_back(const block_entry *entry)
{
    return atomic_load(&entry->locked) ? 0 : entry->capacity;
}

static inline void set_state(block_entry *entry, block_state state)
{
    atomic_store(&entry->state, (uint32_t)state);
}

static inline int move(block_entry *entry, block_state from, block_state to)
{
    uint32_t expected = (uint32_t)from;
    return atomic_compare_exchange_strong(&entry->state, &expected, (uint32_t)to);
}

/* Subtracts from a count. Counts may be off after a kill, and must not wrap around. */
static inline void count_down(_Atomic size_t *count, size_t amount)
{
    size_t now = atomic_load(count);
    while (!atomic_compare_exchange_weak(count, &now, now > amount ? now - amount : 0))
        ;
}

/* Allocates memory for a part of the file; without it, an access is a bus error. Returns an
 * errno. */
int fst_arena_allocate(int file, size_t offset, size_t size);

/* Bytes of a page. */
size_t fst_arena_page(void);

/* Unlocks all blocks, before the arena is freed. */
void fst_arena_unlock(fst_arena *arena);

/* Gives the memory of a block back to the system; its place in the file stays. Returns 0, or an
 * error. */
int fst_arena_punch(const fst_arena *arena, const block_entry *entry);

/* Maps a block's pages into a worker that will fill it, by one call instead of one fault per
 * page. The main process maps them on access, sixteen at a time: mapping 32 MB before a batch is
 * delivered takes 15 ms. */
void fst_arena_see(fst_arena *arena, size_t block);

fst_code fst_arena_no_memory(fst_status *status, const char *what, int error);

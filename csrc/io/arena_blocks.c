/* The blocks of an arena: their memory, who owns each, and when it is free again. */
#define _GNU_SOURCE /* fallocate */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "io/arena_parts.h"

enum {
    STEP = 1 << 20,      /* bytes that the system is asked for at once: signals come between */
    MOST_SIGNALS = 1000, /* during one step */
};

fst_code fst_arena_no_memory(fst_status *status, const char *what, int error)
{
    return fst_fail(status, FST_NO_MEMORY, "no shared memory: %s: %s", what, strerror(error));
}

size_t fst_arena_page(void)
{
    const long size = sysconf(_SC_PAGESIZE);
    return size > 0 ? (size_t)size : 4096;
}

void *fst_arena_data(const fst_arena *arena, size_t block)
{
    return (char *)arena->header + arena->header->blocks[block].offset;
}

int fst_arena_allocate(int file, size_t offset, size_t size)
{
    for (size_t done = 0; done < size; done += STEP) {
        const size_t part = size - done < STEP ? size - done : STEP;
        int signals = 0;
        while (fallocate(file, 0, (off_t)(offset + done), (off_t)part))
            if (errno != EINTR || ++signals > MOST_SIGNALS)
                return errno;
    }
    return 0;
}

int fst_arena_punch(const fst_arena *arena, const block_entry *entry)
{
    return fallocate(arena->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)entry->offset,
                     (off_t)entry->capacity);
}

void fst_arena_see(fst_arena *arena, size_t block)
{
    const block_entry *entry = &arena->header->blocks[block];
    const uint32_t lives = atomic_load(&entry->lives);
    if (arena->seen[block] == lives)
        return;
    arena->seen[block] = lives;
#ifdef MADV_POPULATE_WRITE /* an older kernel says no, and pages are mapped as they are touched */
    madvise(fst_arena_data(arena, block), entry->capacity, MADV_POPULATE_WRITE);
#endif
}

size_t fst_arena_made(const fst_arena *arena)
{
    return atomic_load(&arena->header->made);
}

/* Frees a block for its owner, or gives its memory back to the system if enough is free. */
static void set_free(fst_arena *arena, block_entry *entry)
{
    arena_header *header = arena->header;
    const size_t capacity = given_back(entry);
    const int surplus = atomic_load(&header->free_bytes) + capacity > free_limit(header);
    if (surplus && capacity && !fst_arena_punch(arena, entry)) {
        set_state(entry, GONE);
        return;
    }
    atomic_fetch_add(&header->free_bytes, capacity);
    set_state(entry, FREE);
}

void fst_arena_give_back(fst_arena *arena, size_t block)
{
    block_entry *entry = &arena->header->blocks[block];
    count_down(&arena->header->taken_bytes, entry->capacity);
    set_free(arena, entry);
}

void fst_arena_lend(fst_arena *arena, size_t block)
{
    atomic_store(&arena->loans[block], LENT);
}

void fst_arena_end_loan(fst_arena *arena, size_t block)
{
    if (atomic_exchange(&arena->loans[block], NO_LOAN) == LENT)
        fst_arena_give_back(arena, block);
}

void fst_arena_send(fst_arena *arena, size_t block)
{
    atomic_store(&arena->loans[block], LEAVING);
}

int fst_arena_sent(fst_arena *arena, size_t block)
{
    uint32_t leaving = LEAVING;
    return !atomic_compare_exchange_strong(&arena->loans[block], &leaving, LENT);
}

fst_code fst_arena_hold(fst_arena *arena, size_t block, size_t size, fst_status *status)
{
    if (block >= fst_arena_made(arena) || size > arena->header->blocks[block].capacity ||
        !move(&arena->header->blocks[block], TAKEN, HELD))
        return fst_fail(status, FST_BAD_VALUE, "no worker filled %zu bytes of block %zu", size,
                        block);
    count_down(&arena->header->taken_bytes, arena->header->blocks[block].capacity);
    atomic_store(&arena->uses[block], 1);
    return FST_OK;
}

void fst_arena_end_hold(fst_arena *arena, size_t block)
{
    if (atomic_fetch_sub(&arena->uses[block], 1) == 1)
        set_free(arena, &arena->header->blocks[block]);
}

int fst_arena_pin(fst_arena *arena, size_t block)
{
    uint32_t uses = atomic_load(&arena->uses[block]);
    while (uses && !atomic_compare_exchange_weak(&arena->uses[block], &uses, uses + 1))
        ;
    return uses > 0;
}

size_t fst_arena_sweep(fst_arena *arena)
{
    const size_t made = fst_arena_made(arena);
    size_t found = 0;
    for (size_t b = 0; b < made; b++) {
        block_entry *entry = &arena->header->blocks[b];
        if (atomic_load(&entry->state) != TAKEN)
            continue;
        found++;
        fst_arena_give_back(arena, b);
    }
    return found;
}

fst_arena_counts fst_arena_counted(const fst_arena *arena)
{
    fst_arena_counts counts = {.made = fst_arena_made(arena)};
    for (size_t b = 0; b < counts.made; b++) {
        const block_entry *entry = &arena->header->blocks[b];
        const uint32_t state = atomic_load(&entry->state);
        counts.free += state == FREE;
        counts.taken += state == TAKEN;
        counts.held += state == HELD;
        counts.gone += state == GONE;
        counts.locked += atomic_load(&entry->locked) != 0;
        counts.backed += state == GONE || state == UNMADE ? 0 : entry->capacity;
    }
    return counts;
}

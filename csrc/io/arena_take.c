/* Finds a block: the best free one, or a new one. */
#include "io/arena_parts.h"

enum { WASTE = 4 }; /* a block may be up to so many times as large as its contents */

static void count_taken(arena_header *header, size_t capacity)
{
    const size_t taken = atomic_fetch_add(&header->taken_bytes, capacity) + capacity;
    size_t most = atomic_load(&header->most_taken);
    while (taken > most && !atomic_compare_exchange_weak(&header->most_taken, &most, taken))
        ;
}

/* Whether a fitting block is better than another: a page-locked one first, as it saves a copy;
 * then the smaller one; then one whose memory is there, best in this process. */
static int is_better(const fst_arena *arena, size_t block, size_t than)
{
    const block_entry *one = &arena->header->blocks[block], *other = &arena->header->blocks[than];
    const uint32_t locked = atomic_load(&one->locked);
    if (locked != atomic_load(&other->locked))
        return locked != 0;
    if (one->capacity != other->capacity)
        return one->capacity < other->capacity;
    const int gone = atomic_load(&one->state) == GONE, also = atomic_load(&other->state) == GONE;
    if (gone != also)
        return also;
    return arena->seen[block] == atomic_load(&one->lives) &&
           arena->seen[than] != atomic_load(&other->lives);
}

/* Takes the best block without an owner, if any. A GONE block has no memory yet. */
static block_entry *take_made(fst_arena *arena, size_t size, block_state *was)
{
    arena_header *header = arena->header;
    const size_t page = fst_arena_page();
    for (;;) {
        const size_t made = atomic_load(&header->made);
        size_t best = made;
        for (size_t b = 0; b < made; b++) {
            const block_entry *entry = &header->blocks[b];
            const uint32_t state = atomic_load(&entry->state);
            if ((state == FREE || state == GONE) && entry->capacity >= size &&
                entry->capacity / WASTE <= round_up(size, page) &&
                (best == made || is_better(arena, b, best)))
                best = b;
        }
        if (best == made)
            return NULL;
        block_entry *entry = &header->blocks[best];
        *was = FREE;
        if (move(entry, FREE, TAKEN))
            return entry;
        *was = GONE;
        if (move(entry, GONE, TAKEN))
            return entry;
    }
}

/* Gives memory of free blocks back to the system, least recently used first, until `size` bytes
 * more stay within the limit. */
static void make_room(fst_arena *arena, size_t size)
{
    arena_header *header = arena->header;
    while (atomic_load(&header->free_bytes) + size > free_limit(header)) {
        const size_t made = atomic_load(&header->made);
        block_entry *oldest = NULL;
        for (size_t b = 0; b < made; b++) {
            block_entry *entry = &header->blocks[b];
            if (atomic_load(&entry->state) == FREE && !atomic_load(&entry->locked) &&
                (!oldest || entry->used < oldest->used))
                oldest = entry;
        }
        if (!oldest)
            return;
        if (!move(oldest, FREE, TAKEN))
            continue;
        if (atomic_load(&oldest->locked)) { /* since it was looked at */
            set_state(oldest, FREE);
            continue;
        }
        count_down(&header->free_bytes, oldest->capacity);
        fst_arena_punch(arena, oldest);
        set_state(oldest, GONE);
    }
}

/* Rounds a size up by at most an eighth, so that the block fits other sizes too. */
static size_t capacity_for(size_t size)
{
    size_t unit = fst_arena_page();
    while (unit * 16 <= size)
        unit *= 2;
    return round_up(size ? size : 1, unit);
}

static block_entry *no_addresses(size_t size, fst_status *status)
{
    fst_fail(status, FST_NO_MEMORY, "no addresses left for %zu bytes of a batch", size);
    return NULL;
}

/* Makes a block: a place in the file, without memory. */
static block_entry *make(fst_arena *arena, size_t size, fst_status *status)
{
    arena_header *header = arena->header;
    const size_t capacity = capacity_for(size);
    size_t made = atomic_load(&header->made), end = atomic_load(&header->end);
    do { /* before the entry, which smaller batches can use */
        if (capacity > arena->reserve - end)
            return no_addresses(size, status);
    } while (!atomic_compare_exchange_weak(&header->end, &end, end + capacity));
    do {
        if (made >= FST_ARENA_BLOCKS) {
            fst_fail(status, FST_NO_MEMORY, "%d tensors are kept already", FST_ARENA_BLOCKS);
            return NULL;
        }
    } while (!atomic_compare_exchange_weak(&header->made, &made, made + 1));
    block_entry *entry = &header->blocks[made];
    entry->offset = end;
    entry->capacity = capacity;
    set_state(entry, TAKEN);
    return entry;
}

fst_code fst_arena_take(fst_arena *arena, size_t size, size_t *block, fst_status *status)
{
    arena_header *header = arena->header;
    block_state was = GONE;
    if (size > arena->reserve) { /* and sums of sizes do not wrap */
        no_addresses(size, status);
        return status->code;
    }
    block_entry *entry = take_made(arena, size, &was);
    if (!entry) {
        make_room(arena, size);
        entry = make(arena, size, status);
    }
    if (!entry)
        return status->code;
    if (was == FREE) {
        count_down(&header->free_bytes, given_back(entry));
    } else {
        const int error = fst_arena_allocate(arena->file, entry->offset, entry->capacity);
        if (error) {
            fst_arena_punch(arena, entry); /* a part of it may be there */
            set_state(entry, GONE);
            return fst_arena_no_memory(status, "a batch", error);
        }
        atomic_fetch_add(&entry->lives, 1);
    }
    entry->used = atomic_fetch_add(&header->clock, 1);
    count_taken(header, entry->capacity);
    *block = (size_t)(entry - header->blocks);
    fst_arena_see(arena, *block);
    return FST_OK;
}

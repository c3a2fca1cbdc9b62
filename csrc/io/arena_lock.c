/* Page-locks the blocks of an arena. */
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "io/arena_parts.h"

static atomic_int keep_locked;

void fst_arena_keep_locked(int keep)
{
    atomic_store(&keep_locked, keep);
}

/* Maps the file a second time. A child does not inherit the mapping, as the locks belong to its
 * parent. */
static fst_code map_again(fst_arena *arena, fst_status *status)
{
    if (arena->again)
        return FST_OK;
    void *at = mmap(NULL, arena->reserve, PROT_READ | PROT_WRITE, MAP_SHARED, arena->file, 0);
    if (at == MAP_FAILED)
        return fst_arena_no_memory(status, "the arena cannot be mapped twice", errno);
    if (madvise(at, arena->reserve, MADV_DONTFORK)) {
        const int error = errno;
        munmap(at, arena->reserve);
        return fst_arena_no_memory(status, "the arena cannot be kept from children", error);
    }
    arena->again = at;
    arena->again_of = getpid();
    return FST_OK;
}

static fst_code try_a_page(fst_arena *arena, fst_arena_locker locker, fst_status *status)
{
    if (map_again(arena, status) ||
        locker.lock(locker.device, arena->again, fst_arena_page(), status))
        return status->code;
    locker.unlock(locker.device, arena->again);
    arena->locker = locker;
    atomic_store(&arena->locks, 1);
    return FST_OK;
}

fst_code fst_arena_prepare_locks(fst_arena *arena, fst_arena_locker locker, fst_status *status)
{
    pthread_mutex_lock(&arena->locking);
    if (!atomic_load(&arena->locks))
        try_a_page(arena, locker, status);
    pthread_mutex_unlock(&arena->locking);
    return status->code;
}

/* Finds the held block that begins at an address. Returns whether it has `size` bytes. */
static int find(const fst_arena *arena, const void *address, size_t size, size_t *block)
{
    const size_t made = fst_arena_made(arena);
    const uintptr_t place = (uintptr_t)address, begin = (uintptr_t)arena->header;
    if (place < begin || place - begin >= arena->reserve)
        return 0;
    for (size_t b = 0; b < made; b++) {
        const block_entry *entry = &arena->header->blocks[b];
        if (atomic_load(&entry->state) == HELD && entry->offset == place - begin) {
            *block = b;
            return entry->capacity >= size;
        }
    }
    return 0;
}

static size_t most_locked(const fst_arena *arena)
{
    return free_limit(arena->header) + 2 * arena->most_in_use;
}

/* Page-locks a held block that is not locked yet. */
static fst_code lock_block(fst_arena *arena, block_entry *entry, void **locked, fst_status *status)
{
    char *at = (char *)arena->again + entry->offset;
    const int is_locked = atomic_load(&entry->locked) != 0;
    const size_t in_use = arena->in_use + entry->capacity;
    const size_t most = in_use > arena->most_in_use ? in_use : arena->most_in_use;
    arena->most_in_use = most;
    const int too_many = arena->locked_bytes + entry->capacity > most_locked(arena);
    if (!is_locked && (too_many || arena->refused))
        return FST_OK;
    if (!is_locked && arena->locker.lock(arena->locker.device, at, entry->capacity, status)) {
        arena->refused = 1;
        return status->code;
    }
    if (!is_locked) {
        atomic_store(&entry->locked, 1);
        arena->locked_bytes += entry->capacity;
    }
    arena->in_use = in_use;
    *locked = at;
    return FST_OK;
}

fst_code fst_arena_lock(fst_arena *arena, const void *address, size_t size, size_t *block,
                        void **locked, fst_status *status)
{
    *locked = NULL;
    if (!atomic_load(&arena->locks) || arena->again_of != getpid() ||
        !find(arena, address, size, block) || !fst_arena_pin(arena, *block))
        return FST_OK;
    pthread_mutex_lock(&arena->locking);
    lock_block(arena, &arena->header->blocks[*block], locked, status);
    pthread_mutex_unlock(&arena->locking);
    if (!*locked)
        fst_arena_end_hold(arena, *block);
    return status->code;
}

void fst_arena_end_lock(fst_arena *arena, size_t block)
{
    pthread_mutex_lock(&arena->locking);
    arena->in_use -= arena->header->blocks[block].capacity;
    pthread_mutex_unlock(&arena->locking);
    fst_arena_end_hold(arena, block);
}

void fst_arena_unlock(fst_arena *arena)
{
    if (!arena->again || arena->again_of != getpid() || atomic_load(&keep_locked))
        return;
    const size_t made = fst_arena_made(arena);
    for (size_t b = 0; b < made; b++) {
        const block_entry *entry = &arena->header->blocks[b];
        if (atomic_load(&entry->locked))
            arena->locker.unlock(arena->locker.device, (char *)arena->again + entry->offset);
    }
    munmap(arena->again, arena->reserve);
}

#define _DEFAULT_SOURCE /* madvise */
#include "io/slots.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

struct fst_slots {
    fst_slot *newest, *oldest; /* free slots, by the time of their return */
    size_t keep;
    fst_slots_counts counts;
    int closed;
};

/* Large slots get huge pages: 512 times fewer page faults and TLB entries. */
enum { SLOT_ALIGNMENT = 64, LARGE_SLOT = 1 << 22, HUGE_PAGE = 1 << 21 };

/* One lock for all pools, held for a few instructions. fork() takes it too, so a child never
 * sees a pool half changed. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int fork_handlers_missing;
static unsigned forks;

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

static void after_fork_in_child(void)
{
    forks++;
    pthread_mutex_unlock(&lock);
}

static void watch_forks(void)
{
    fork_handlers_missing = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

unsigned fst_forks(void)
{
    return forks; /* changes only in a process that has one thread */
}

fst_slots *fst_slots_new(fst_status *status)
{
    pthread_once(&once, watch_forks);
    fst_slots *pool = fork_handlers_missing ? NULL : calloc(1, sizeof *pool);
    if (!pool)
        fst_fail(status, FST_NO_MEMORY, "no memory for a pool of slots");
    return pool;
}

static void unlink_slot(fst_slot *slot)
{
    fst_slots *pool = slot->pool;
    *(slot->newer ? &slot->newer->older : &pool->newest) = slot->older;
    *(slot->older ? &slot->older->newer : &pool->oldest) = slot->newer;
    pool->counts.free--;
}

/* Takes the oldest slots beyond `keep` out of the list. The caller frees them without the lock. */
static fst_slot *unlink_surplus(fst_slots *pool, size_t keep)
{
    fst_slot *surplus = NULL;
    while (pool->counts.free > keep) {
        fst_slot *slot = pool->oldest;
        unlink_slot(slot);
        slot->older = surplus;
        surplus = slot;
    }
    return surplus;
}

static void free_slots(fst_slot *slot)
{
    while (slot) {
        fst_slot *next = slot->older;
        free(slot->data);
        free(slot);
        slot = next;
    }
}

void fst_slots_keep(fst_slots *pool, size_t keep)
{
    pthread_mutex_lock(&lock);
    pool->keep = keep;
    fst_slot *surplus = unlink_surplus(pool, keep);
    pthread_mutex_unlock(&lock);
    free_slots(surplus);
}

static fst_slot *make_slot(fst_slots *pool, size_t size)
{
    fst_slot *slot = malloc(sizeof *slot);
    void *data = NULL;
    const size_t alignment = size < LARGE_SLOT ? SLOT_ALIGNMENT : HUGE_PAGE;
    if (!slot || posix_memalign(&data, alignment, size ? size : 1)) {
        free(slot);
        return NULL;
    }
#ifdef MADV_HUGEPAGE
    if (size >= LARGE_SLOT)
        madvise(data, size / HUGE_PAGE * HUGE_PAGE,
                MADV_HUGEPAGE); /* advice: a failure does not matter */
#endif
    *slot = (fst_slot){.data = data, .capacity = size, .pool = pool};
    return slot;
}

/* The free slot that wastes least, of at most twice the size. */
static fst_slot *find_free(const fst_slots *pool, size_t size)
{
    fst_slot *best = NULL;
    for (fst_slot *slot = pool->newest; slot; slot = slot->older)
        if (slot->capacity >= size && slot->capacity / 2 <= size &&
            (!best || slot->capacity < best->capacity))
            best = slot;
    return best;
}

fst_slot *fst_slots_take(fst_slots *pool, size_t size, fst_status *status)
{
    pthread_mutex_lock(&lock);
    fst_slot *slot = find_free(pool, size);
    if (slot)
        unlink_slot(slot);
    pool->counts.held++;
    pool->counts.made += !slot;
    pthread_mutex_unlock(&lock);
    if (slot || (slot = make_slot(pool, size)))
        return slot;
    pthread_mutex_lock(&lock); /* the free slots of other sizes may have the memory */
    fst_slot *unused = unlink_surplus(pool, 0);
    pthread_mutex_unlock(&lock);
    free_slots(unused);
    if (!(slot = make_slot(pool, size))) {
        pthread_mutex_lock(&lock);
        pool->counts.held--;
        pool->counts.made--;
        pthread_mutex_unlock(&lock);
        fst_fail(status, FST_NO_MEMORY, "no memory for %zu bytes of a batch", size);
    }
    return slot;
}

void fst_slot_give_back(fst_slot *slot)
{
    fst_slots *pool = slot->pool;
    pthread_mutex_lock(&lock);
    slot->newer = NULL;
    slot->older = pool->newest;
    *(pool->newest ? &pool->newest->newer : &pool->oldest) = slot;
    pool->newest = slot;
    pool->counts.free++;
    pool->counts.held--;
    fst_slot *surplus = unlink_surplus(pool, pool->closed ? 0 : pool->keep);
    const int last = pool->closed && !pool->counts.held;
    pthread_mutex_unlock(&lock);
    free_slots(surplus);
    if (last)
        free(pool);
}

fst_slots_counts fst_slots_counted(fst_slots *pool)
{
    pthread_mutex_lock(&lock);
    const fst_slots_counts counts = pool->counts;
    pthread_mutex_unlock(&lock);
    return counts;
}

void fst_slots_close(fst_slots *pool)
{
    pthread_mutex_lock(&lock);
    pool->closed = 1;
    fst_slot *unused = unlink_surplus(pool, 0);
    const int last = !pool->counts.held;
    pthread_mutex_unlock(&lock);
    free_slots(unused);
    if (last)
        free(pool);
}

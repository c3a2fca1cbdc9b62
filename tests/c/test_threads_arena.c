/* The arena in many hands at once: threads stand for the worker processes, so that ThreadSanitizer
 * sees what they share. */
#include <pthread.h>

#include "common.h"
#include "io/arena.h"

enum { WORKERS = 3, BATCHES = 200, QUEUE = 8, LARGEST = 600000 };

typedef struct {
    size_t block, size;
} parcel;

static fst_arena *arena;
static parcel queue[QUEUE];
static size_t queued;
static int left = WORKERS;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static _Atomic size_t locks, unlocks;

static fst_code lock_pages(int device, void *address, size_t size, fst_status *status)
{
    (void)device, (void)address, (void)size, (void)status;
    locks++;
    return FST_OK;
}

static void unlock_pages(int device, void *address)
{
    (void)device, (void)address;
    unlocks++;
}

static void send(parcel p)
{
    pthread_mutex_lock(&lock);
    while (queued == QUEUE)
        pthread_cond_wait(&moved, &lock);
    queue[queued++] = p;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

static int receive(parcel *p)
{
    pthread_mutex_lock(&lock);
    while (!queued && left)
        pthread_cond_wait(&moved, &lock);
    const int found = queued > 0;
    if (found)
        *p = queue[--queued];
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
    return found;
}

/* Fills blocks with their numbers; some are not sent. */
static void *work(void *argument)
{
    unsigned state = (unsigned)(uintptr_t)argument;
    for (int i = 0; i < BATCHES; i++) {
        fst_status status = {0};
        state = state * 1103515245u + 12345u;
        parcel p = {0, 1 + (state >> 8) % LARGEST};
        CHECK_INT(fst_arena_take(arena, p.size, &p.block, &status), FST_OK);
        memset(fst_arena_data(arena, p.block), (int)(p.block % 251), p.size);
        if (i % 5 == 4)
            fst_arena_give_back(arena, p.block);
        else
            send(p);
    }
    pthread_mutex_lock(&lock);
    left--;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
    return NULL;
}

static int is_filled(const unsigned char *data, const parcel *p)
{
    int right = 1;
    for (size_t i = 0; i < p->size; i++)
        right = right && data[i] == p->block % 251;
    return right;
}

/* Holds blocks, lets a device read some of them, and lets go in another order. */
static void *consume(void *argument)
{
    parcel p;
    (void)argument;
    while (receive(&p)) {
        fst_status status = {0};
        size_t found = 0;
        void *locked = NULL;
        CHECK_INT(fst_arena_hold(arena, p.block, p.size, &status), FST_OK);
        void *data = fst_arena_data(arena, p.block);
        CHECK_INT(fst_arena_lock(arena, data, p.size, &found, &locked, &status), FST_OK);
        CHECK(is_filled(data, &p));
        fst_arena_end_hold(arena, p.block);
        if (locked) {
            CHECK(is_filled(locked, &p));
            fst_arena_end_lock(arena, found);
        }
    }
    return NULL;
}

int main(void)
{
    fst_status status = {0};
    pthread_t threads[WORKERS + 2];
    arena = fst_arena_new(&status);
    const fst_arena_locker locker = {lock_pages, unlock_pages, 0};
    CHECK_INT(fst_arena_prepare_locks(arena, locker, &status), FST_OK);
    for (uintptr_t i = 0; i < WORKERS + 2; i++)
        pthread_create(&threads[i], NULL, i < WORKERS ? work : consume, (void *)(i + 1));
    for (int i = 0; i < WORKERS + 2; i++)
        pthread_join(threads[i], NULL);
    const fst_arena_counts counts = fst_arena_counted(arena);
    CHECK_INT((int64_t)(counts.taken + counts.held), 0);
    CHECK(counts.locked > 0 && counts.locked + 1 == locks);
    fst_arena_drop(arena);
    CHECK_INT((int64_t)unlocks, (int64_t)locks);
    return check_report();
}

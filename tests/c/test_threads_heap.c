/* Threads that take blocks of the heap, and free those of others. */
#include <pthread.h>
#include <stdatomic.h>

#include "check.h"
#include "memory/heap.h"

enum { THREADS = 4, ROUNDS = 2000, PLACES = 16 };

static _Atomic(unsigned char *) places[PLACES];

static void *work(void *argument)
{
    const size_t me = (size_t)(uintptr_t)argument;
    for (size_t round = 0; round < ROUNDS; round++) {
        unsigned char *block = fst_heap_take((round % 40 + 1) * 10000);
        if (!CHECK(block && fst_heap_owns(block)))
            return NULL;
        *block = (unsigned char)(1 + me);
        unsigned char *other = atomic_exchange(&places[(round * 7 + me) % PLACES], block);
        if (other) {
            CHECK(*other >= 1 && *other <= THREADS);
            CHECK(fst_heap_give(other) > 0);
        }
        if (round % 100 == me)
            fst_heap_trim(1 << 20);
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];
    CHECK_INT(fst_heap_open(256 << 20), 0);
    for (size_t i = 0; i < THREADS; i++)
        CHECK_INT(pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)i), 0);
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (size_t i = 0; i < PLACES; i++)
        if (places[i])
            fst_heap_give(places[i]);
    CHECK_INT((int64_t)fst_heap_count().used, 0);
    CHECK_INT((int64_t)fst_heap_count().blocks, 0);
    return check_report();
}
